"""`burst doctor` on the usual mistakes with GStreamer's element."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from driver.gateways.gstreamer import gstreamer_loader
from driver.gateways.gstreamer.plugin_folder import FOLDER

OWN = f"libpython3.{sys.version_info[1]}.so.1.0".encode()


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """All is as it should be, with a gst-inspect-1.0 that fails as long as there is a file `broken`."""
    bin_, library = tmp_path / "bin", tmp_path / "usr/lib/any-linux-gnu/gstreamer-1.0/libgstpython.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"..." + OWN + b"...")
    bin_.mkdir()
    inspect = bin_ / "gst-inspect-1.0"
    inspect.write_text(f"#!/bin/sh\ntest $1 = burstinfer && ! test -e {tmp_path}/broken\n")
    inspect.chmod(0o755)
    monkeypatch.setattr(gstreamer_loader, "ROOT", tmp_path)
    monkeypatch.setattr(gstreamer_loader, "find_spec", lambda name: name)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{bin_}:/usr/bin:/bin")
    monkeypatch.setenv("GST_PLUGIN_PATH", f"/elsewhere:{FOLDER}")
    return library


def told():
    (finding,) = gstreamer_loader.element()
    return finding


def test_all_is_well(installed):
    """GStreamer itself has found the element."""
    assert (told().state, told().found) == ("ok", "finds the element burstinfer")


def test_no_gstreamer(installed, monkeypatch):
    """A machine without GStreamer hears nothing of it."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert list(gstreamer_loader.element()) == []


def test_no_loader(installed):
    """The package that is most often missing is named."""
    installed.unlink()
    assert (told().state, told().remedy) == ("warning", "apt install gstreamer1.0-python3-plugin-loader")


def test_a_loader_of_another_python(installed):
    """A virtual environment of another Python cannot serve it."""
    installed.write_bytes(b"libpython3.7m.so")
    assert "its loader runs Python 3.7, and Burst is in Python 3." in told().found
    assert "--system-site-packages" in told().remedy


def test_a_loader_that_looks_for_a_library_that_is_for_linking(installed):
    """Debian 13's does not find what it depends on, until what it looks for is installed."""
    name = f"libpython3.{sys.version_info[1]}.so"
    installed.write_bytes(b"...\0" + OWN + b"\0" + name.encode() + b"\0...")
    assert (told().found, told().remedy) == (
        f"its loader looks for {name}, which is not installed",
        "apt install libpython3-dev",
    )
    (installed.parents[1] / name).touch()
    assert told().state == "ok"


def test_an_environment_that_does_not_see_gi(installed, monkeypatch):
    """The one made without --system-site-packages."""
    monkeypatch.setattr(gstreamer_loader, "find_spec", lambda _: None)
    assert "does not see python3-gi" in told().found


def test_an_environment_that_is_not_active(installed, monkeypatch, tmp_path):
    """The loader takes the packages of the first python3 in PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    assert "the first python3 in PATH" in told().found
    assert told().remedy == f"activate {sys.prefix}"


def test_no_search_path(installed, monkeypatch):
    """Without GST_PLUGIN_PATH it is a note, with what to export: the element may not be wanted."""
    monkeypatch.delenv("GST_PLUGIN_PATH")
    assert (told().state, told().remedy) == ("note", f"export GST_PLUGIN_PATH={FOLDER}")


def test_an_element_that_does_not_load(installed, tmp_path):
    """What GStreamer could not load once it does not try again: the registry is to be removed."""
    (tmp_path / "broken").touch()
    assert told().state == "warning"
    assert os.environ.get("GST_REGISTRY", "registry") in told().remedy
