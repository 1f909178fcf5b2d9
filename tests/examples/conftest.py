"""Programs in C and C++ that use libburst, and a place for the devices that they start."""

import os
import re
import shlex
import subprocess

import libburst_by_ctypes
import pytest
from libburst_by_ctypes import ROOT


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """built(source, target, more): a program or library, its name that of the source, built by the line in the head of
    its source, and more flags, on what `make install` has installed.
    """
    prefix = libburst_by_ctypes.install(tmp_path_factory.mktemp("libburst"))
    environment = os.environ | {"PKG_CONFIG_PATH": str(prefix / "lib/pkgconfig")}

    def build(name, target="", more=""):
        source = ROOT / "examples" / name
        made = prefix / (target or source.stem)
        (line,) = re.findall(rf"^ \*\s+(c\S+ .*) -o {re.escape(made.name)}$", source.read_text(), re.MULTILINE)
        command = f"{line} {more} -Wl,-rpath,{shlex.quote(str(prefix / 'lib'))} -o {shlex.quote(str(made))}"
        subprocess.run(command, shell=True, cwd=ROOT, env=environment, check=True, timeout=500)
        return made

    return build


@pytest.fixture
def place(monkeypatch):
    """A runtime directory of our own; the program starts devices with this Python."""
    with libburst_by_ctypes.own_place(monkeypatch) as path:
        yield path
