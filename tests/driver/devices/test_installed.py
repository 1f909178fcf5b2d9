"""What is installed is found without importlib.metadata, and is what that finds."""

from importlib.metadata import distribution, version

import pytest

from burst_engine.names import DISTRIBUTION
from driver.devices import GROUP
from driver.plugins import own_entry, version_of


@pytest.mark.parametrize("name", ["numpy", "msgpack", "cffi", "blake3", DISTRIBUTION])
def test_versions(name):
    """Those of installed distributions."""
    assert version_of(name) == version(name)


def test_a_distribution_that_is_not_installed():
    """It has no version, and no folder is taken for its own that only begins like it."""
    assert version_of("nump") == version_of("no-such-distribution") == "none"


def test_devices_of_ours():
    """Each is found, with the value of its entry point; what is none is not."""
    entries = distribution(DISTRIBUTION).entry_points.select(group=GROUP)
    assert {entry.name for entry in entries} >= {"reference", "litert", "onnxruntime"}
    for entry in entries:
        assert own_entry(DISTRIBUTION, GROUP, entry.name) == entry.value
    assert own_entry(DISTRIBUTION, GROUP, "lite.t") is None
    assert own_entry(DISTRIBUTION, "console_scripts", "reference") is None


def test_a_version_where_no_installer_made_a_folder(tmp_path, monkeypatch):
    """A distribution that Debian's tools or an old setuptools have installed is found, too."""
    folder = tmp_path / "some_library-3.2.egg-info"
    folder.mkdir()
    (folder / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: some-library\nVersion: 3.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert version_of("some-library") == "3.2"
