"""`burst doctor` on GPUs: nodes, drivers of Vulkan, adapters, and devices that are offline."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import swiftshader

from driver.devices.onnxruntime import providers
from driver.doctor import graphics_adapters, installation


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with the provider, and with what a test puts there."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(providers, "distribution", lambda name: SimpleNamespace(version="1", files=()))
    monkeypatch.setattr(graphics_adapters, "DEVICES", tmp_path / "dri")
    monkeypatch.setattr(graphics_adapters, "SYSTEM", tmp_path / "drm")
    (tmp_path / "dri").mkdir()
    return tmp_path


def node(machine, name, maker):
    (machine / "dri" / name).touch()
    (machine / "drm" / name / "device").mkdir(parents=True)
    (machine / "drm" / name / "device/vendor").write_text(maker + "\n")


def vulkan_says(monkeypatch, machine, answer, code=0):
    """In the place of the program that asks Vulkan."""
    path = Path(machine, "asked.py")
    path.write_text(f"import sys\nprint({answer!r})\nsys.exit({code})")
    monkeypatch.setattr(graphics_adapters.vulkan, "__file__", str(path))


def found(machine):
    return {(f.subject, f.state): f for f in graphics_adapters.adapters()}


def test_without_the_provider_nothing_is_looked_at(monkeypatch):
    """A machine that does not use it hears nothing of Vulkan."""
    monkeypatch.setattr(providers, "distribution", lambda _: None)
    assert list(graphics_adapters.adapters()) == []


def test_an_adapter_is_fine(monkeypatch, machine):
    """A node that may be opened and a real adapter: all is well, with their names."""
    node(machine, "renderD128", "0x1002")
    vulkan_says(monkeypatch, machine, json.dumps({"adapters": [["Radeon", "discrete"]]}))
    rows = found(machine)
    assert {state for _, state in rows} == {"ok"}
    assert rows["Vulkan", "ok"].found == "Radeon, discrete"
    assert rows[str(machine / "dri/renderD128"), "ok"].found == "a GPU of AMD"


def test_a_node_that_may_not_be_opened(monkeypatch, machine):
    """The group `render` is named."""
    node(machine, "renderD128", "0x8086")
    monkeypatch.setattr(graphics_adapters.os, "access", lambda path, mode: False)
    vulkan_says(monkeypatch, machine, json.dumps({"adapters": [["Intel", "integrated"]]}))
    told = found(machine)[str(machine / "dri/renderD128"), "warning"]
    assert "may not open" in told.found
    assert "usermod -aG render" in told.remedy


@pytest.mark.parametrize(("maker", "remedy"), [("0x10de", "nvidia-driver-libs"), ("0x1002", "mesa-vulkan-drivers")])
def test_software_beside_a_gpu(monkeypatch, machine, maker, remedy):
    """The GPU is there and its driver is not: which one to install depends on who made it."""
    node(machine, "renderD128", maker)
    vulkan_says(monkeypatch, machine, json.dumps({"adapters": [["llvmpipe", "software"]]}))
    told = found(machine)["Vulkan", "warning"]
    assert "its driver is missing" in told.found
    assert remedy in told.remedy


@pytest.mark.parametrize(
    ("answer", "code", "words", "remedy"),
    [
        (json.dumps({"fault": "cannot load library 'libvulkan.so.1'"}), 1, "cannot load", "apt install libvulkan1"),
        (json.dumps({"fault": "vkCreateInstance returned -9: no driver"}), 1, "returned -9", "docker run --device"),
        (json.dumps({"adapters": []}), 0, "no adapter", "name a software driver"),
        ("", 3, "ended the process that asked it, with 3", "name a software driver"),
    ],
    ids=["loader", "driver", "none", "crash"],
)
def test_no_adapter(monkeypatch, machine, answer, code, words, remedy):
    """Each way in which there is none has a remedy."""
    vulkan_says(monkeypatch, machine, answer, code)
    told = found(machine)["Vulkan", "warning"]
    assert words in told.found
    assert remedy in told.remedy


@pytest.mark.integration
def test_software_alone(tmp_path, monkeypatch):
    """The real program, on a GPU in software: its name, and that it is slow."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(graphics_adapters, "DEVICES", tmp_path / "dri")
    swiftshader.configure(tmp_path)
    rows = found(tmp_path)
    assert "SwiftShader" in rows["Vulkan", "ok"].found
    assert "a thousand times slower" in rows["Vulkan", "note"].why


@pytest.mark.integration
def test_a_device_whose_driver_is_wrong_is_offline(place, monkeypatch):
    """It connects, says why it takes no work, and the doctor warns."""
    swiftshader.configure(f"{place.path}-home")
    Path(f"{place.path}-home", swiftshader.CONFIGURATION).write_text('driver = "/nowhere/icd.json"')
    monkeypatch.setattr(installation, "names", lambda: ["onnxruntime-webgpu"])
    (told,) = installation.started()
    assert told.state == "warning"
    assert "offline: WebGPU finds no GPU: vkCreateInstance" in told.found
