"""GPU memory and utilisation in `burst top` and `burst doctor`, by a stand-in for NVIDIA's management library."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import driver
from driver.doctor import nvidia_gpus
from driver.monitor import GpuReader

SOURCE = Path(__file__).parent / "fake_nvml.c"


@pytest.fixture(scope="session")
def nvml(tmp_path_factory):
    """The folder of a libnvidia-ml.so.1."""
    folder = tmp_path_factory.mktemp("nvml")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(
        ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", SOURCE, "-o", library], check=True
    )
    return folder


def burst(*words, folder="", ends=0, **environment):
    """What the command prints."""
    found = os.environ | {"LD_LIBRARY_PATH": str(folder), "COLUMNS": "200"} | environment
    done = subprocess.run(
        [sys.executable, "-m", "driver.cli", *words], capture_output=True, text=True, check=False, env=found
    )
    assert (done.returncode, done.stderr) == (ends, "")
    return done.stdout


@pytest.mark.integration
def test_top_shows_what_the_device_occupies(place, kit, nvml):
    """A line for each GPU, whoever uses it; the memory of the engine beside the device's own; all of it in JSON."""
    with driver.connect("reference") as device, device.prepare(kit.add_model()) as prepared, prepared.burst() as opened:
        opened.run(np.ones((1, 4), np.float32))
        users = {"FAKE_NVML_USERS": f"{device.engine_pid}:345000000,1:99,{device.service_pid}:1000000"}
        words = ("top", "--count", "1", "--every", "0.1")
        sample = json.loads(burst(*words, "--json", folder=nvml, **users))
        lines = burst(*words, folder=nvml, **users).splitlines()
    (found,), (first, second) = sample["devices"], sample["gpus"]
    assert found["gpu_memory"] == 346000000
    assert (first["index"], first["memory_used"], first["memory_total"]) == (0, 1_500_000_000, 8_000_000_000)
    assert first["utilisation"] == pytest.approx(0.37)
    assert first["memory_of"]["1"] == 99
    assert (second["memory_used"], second["utilisation"], second["memory_of"]) == (1_500_000_000, None, {})
    assert "GPU memory 346 MB" in lines[0]
    assert "GPU 0  Fake GPU 0\u241b, memory 1500 MB of 8000 MB, utilisation 37 %" in lines
    assert "GPU 1  Fake GPU 1\u241b, memory 1500 MB of 8000 MB, utilisation - %" in lines


@pytest.mark.integration
def test_a_device_without_a_gpu_says_nothing_of_one(place, kit, nvml):
    """Processes that the GPU does not know, as of another container, have no figure rather than 0."""
    with driver.connect("reference"):
        sample = json.loads(burst("top", "--json", "--count", "1", "--every", "0.1", folder=nvml))
    assert sample["devices"][0]["gpu_memory"] is None
    assert len(sample["gpus"]) == 2


@pytest.mark.integration
@pytest.mark.parametrize(
    "state",
    ["no driver", *(pytest.param(state, marks=pytest.mark.integration) for state in ("no library", "no module"))],
)
def test_where_nvml_is_missing_nothing_is_shown(place, nvml, state, tmp_path):
    """Neither a line nor an error."""
    folder, more = nvml, {"FAKE_NVML_ERROR": "9"}
    if state == "no library":
        folder, more = tmp_path, {}
    if state == "no module":
        (tmp_path / "pynvml.py").write_text("raise ImportError('it is not installed')")
        more = {"PYTHONPATH": str(tmp_path)}
    with driver.connect("reference"):
        assert "GPU" not in burst("top", "--count", "1", "--every", "0.1", folder=folder, **more)


def findings(folder, **environment):
    """Of the GPUs, by subject."""
    found = json.loads(burst("doctor", "--json", folder=folder, **environment))
    return {one["subject"]: one for one in found if "GPU" in one["subject"]}


@pytest.mark.integration
def test_doctor_names_each_gpu(place, nvml):
    """With its memory and the driver's version."""
    found = findings(nvml)
    assert {one["state"] for one in found.values()} == {"ok"}
    assert found["GPU 0"]["found"].replace("\x1b", "") == "Fake GPU 0, 8.0 GB, driver 580.42"
    assert "GPU 1" in found


def test_doctor_without_a_gpu(monkeypatch, tmp_path):
    """No driver is no fault; a driver that NVML does not reach is a note with the reason and a remedy."""
    monkeypatch.setattr(nvidia_gpus, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(GpuReader, "read", lambda _: [])
    (finding,) = nvidia_gpus.gpus()
    assert (finding.state, "docker run --gpus all" in finding.found) == ("ok", True)
    (tmp_path / "version").write_text("NVRM version")
    (finding,) = nvidia_gpus.gpus()
    assert (finding.state, bool(finding.found), "docker run --gpus all" in finding.remedy) == ("note", True, True)
