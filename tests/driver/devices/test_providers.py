"""The table of execution providers: how each becomes a device, what it lacks, and its options."""

import importlib.metadata
import re
from pathlib import Path

import pytest

import driver
from burst_engine.names import install_command
from driver.devices import device_class, missing, names
from driver.devices.onnxruntime import providers
from driver.devices.onnxruntime.providers import PROVIDERS, ExecutionProvider

ALL = pytest.mark.parametrize("provider", PROVIDERS.values(), ids=list(PROVIDERS))


class Installed:
    """A package that is not."""

    version, files = "1.2", ()


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    Path(tmp_path, ".config/burst").mkdir(parents=True)
    return tmp_path


@ALL
def test_each_is_a_device(provider):
    """An entry point leads to a class with the provider's name, needs and number of executions at once."""
    kind = device_class(provider.device)
    assert provider.device in names()
    assert (kind.name, kind.slots, kind.kind) == (provider.device, provider.slots, provider)
    assert "ioctl" in kind.needs.system_calls
    assert provider.configuration.name in {Path(path).name for path in kind.needs.read_paths}


@ALL
def test_a_package_that_is_missing_is_named_with_what_installs_it(provider, monkeypatch):
    """Nothing is started: the remedy is the extra of this distribution, which exists."""
    extras = importlib.metadata.metadata("burst-engine").get_all("Provides-Extra")
    assert provider.extra in extras
    monkeypatch.setattr(providers, "distribution", lambda name: None)
    found = missing(provider.device)
    assert f"the package {provider.packages[0]} is not installed" in found.what
    assert found.remedy == install_command(provider.extra)
    with pytest.raises(driver.DeviceNotFound, match=re.escape(install_command(provider.extra))):
        driver.connect(provider.device)


@ALL
def test_a_machine_without_a_gpu_is_told_so(provider, monkeypatch, home):
    """With the package, what is missing is the hardware; no process finds that out."""
    monkeypatch.setattr(providers, "distribution", lambda name: Installed)
    blind = provider._replace(nodes=("/dev/no-such-gpu",))
    what, remedy = blind.missing()
    assert "there is no GPU: none of /dev/no-such-gpu exists" in what
    assert "kernel driver" in remedy
    assert blind._replace(nodes=("/dev/null",)).missing() is None


def test_a_software_driver_takes_the_place_of_a_gpu(monkeypatch, home):
    """Naming a Vulkan driver is enough, and the device may read its folder."""
    monkeypatch.setattr(providers, "distribution", lambda name: Installed)
    blind = PROVIDERS["onnxruntime-webgpu"]._replace(nodes=("/dev/no-such-gpu",))
    blind.configuration.write_text('driver = "/opt/swift/icd.json"\n')
    assert blind.missing() is None
    assert "/opt/swift" in blind.all_needs.read_paths


@ALL
def test_options(provider, home):
    """The caller's, else the file's; what is no option, or no value of one, is an error with its place."""
    assert provider.chosen({})["cpu_nodes"] is False
    provider.configuration.write_text("cpu_nodes = true\n")
    assert provider.chosen({})["cpu_nodes"] is True
    assert provider.chosen({"cpu_nodes": False})["cpu_nodes"] is False
    with pytest.raises(ValueError, match=rf"{provider.device}: speed = 9 is no option of .*; it has .*cpu_nodes"):
        provider.chosen({"speed": 9})
    for bad in ("cpu_nodes = 1", "speed = 9", "cpu_nodes ="):
        provider.configuration.write_text(bad)
        with pytest.raises(ValueError, match=rf"{provider.device}\.toml"):
            provider.chosen({})


def test_choices_are_told():
    """A value that is none of the choices is answered with these."""
    webgpu = PROVIDERS["onnxruntime-webgpu"]
    with pytest.raises(ValueError, match="power_preference = 'much' must be 'high-performance' or 'low-power'"):
        webgpu.chosen({"power_preference": "much"})
    with pytest.raises(ValueError, match="device = -1 must be a number from 0"):
        PROVIDERS["onnxruntime-cuda"].chosen({"device": -1})


def test_what_the_cpu_may_run():
    """Arithmetic of indices in a file; nothing else, unless it is allowed."""
    webgpu = PROVIDERS["onnxruntime-webgpu"]
    strict = ExecutionProvider(webgpu, {"cpu_nodes": False})
    strict.check([])
    strict.check(["Gather", "Shape"], providers.INDEX_OPERATORS)
    with pytest.raises(driver.DriverError, match=r"WebGPU has no kernel for Det, TopK .* 3 nodes would run on the CPU"):
        strict.check(["TopK", "Det", "TopK", "Gather"], providers.INDEX_OPERATORS)
    with pytest.raises(driver.DriverError, match="no kernel for Gather"):
        strict.check(["Gather"])
    ExecutionProvider(webgpu, {"cpu_nodes": True}).check(["TopK"])
