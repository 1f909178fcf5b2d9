"""The command in a remedy works where Burst is installed: from its clone, if that is where it is from."""

import json

import pytest

from burst_engine.names import install_command


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """What pip would have recorded of the installation, in a distribution that is found before the real one."""
    folder = tmp_path / "burst_engine-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: burst-engine\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def record(direct):
        (folder / "direct_url.json").write_text(direct if isinstance(direct, str) else json.dumps(direct))

    return record


@pytest.mark.parametrize(
    ("url", "extras", "command"),
    [
        ("file:///opt/burst", ("litert",), "pip install -e '/opt/burst[litert]'"),
        ("file:///opt/burst", ("demo", "web"), "pip install -e '/opt/burst[demo,web]'"),
        ("file:///opt/burst", (), "pip install -e /opt/burst"),
        ("file:///opt/my%20clone", ("cli",), "pip install -e '/opt/my clone[cli]'"),
    ],
)
def test_an_editable_installation_names_its_clone(recorded, url, extras, command):
    """No index need have burst-engine: the extra is installed from where the sources are."""
    recorded({"dir_info": {"editable": True}, "url": url})
    assert install_command(*extras) == command


@pytest.mark.parametrize(
    "direct",
    [
        {"archive_info": {}, "url": "file:///opt/burst_engine-1.0-cp311-abi3-manylinux_2_28_x86_64.whl"},
        {"dir_info": {}, "url": "file:///opt/burst"},
        "written by hand",
    ],
)
def test_any_other_installation_names_the_distribution(recorded, direct):
    """From a wheel, an index, or a folder that may be gone by now."""
    recorded(direct)
    assert install_command("litert") == "pip install 'burst-engine[litert]'"
    assert install_command() == "pip install burst-engine"


def test_of_an_index_nothing_is_recorded(recorded):
    """There is no direct_url.json then."""
    assert install_command("litert") == "pip install 'burst-engine[litert]'"
