"""Programs in C and C++ that use libburst, and a place for the devices that they start."""

import os
import re
import shlex
import subprocess

import libburst_by_ctypes
import numpy as np
import pytest
from libburst_by_ctypes import ROOT
from needed_tools import give_up


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


@pytest.fixture(scope="session")
def ladspa_plugin(built):
    """Built without a warning."""
    if not os.path.exists("/usr/include/ladspa.h"):
        give_up("no ladspa.h: apt install ladspa-sdk")
    return built("ladspa/burst_ladspa.c", "burst_ladspa.so", "-Werror")


@pytest.fixture
def half_as_loud(tmp_path, monkeypatch, place):
    """half_as_loud(block): plug-ins have an effect from now on: half as loud, and upside down."""

    def give(block):
        import onnx
        from onnx import TensorProto, helper, numpy_helper

        half = numpy_helper.from_array(np.array(-0.5, np.float32), "half")
        sides = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, block]) for name in ("x", "y")]
        graph = helper.make_graph([helper.make_node("Mul", ["x", "half"], ["y"])], "g", sides[:1], sides[1:], [half])
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        path = tmp_path / "half.onnx"
        onnx.save(made, path)
        for name, value in {"MODEL": path, "BLOCK": block, "DEVICE": "onnxruntime"}.items():
            monkeypatch.setenv(f"BURST_LADSPA_{name}", str(value))

    return give
