"""What a service keeps of the models that it has validated: nothing."""

from pathlib import Path

import numpy as np
import pytest

import driver


def mapped(pid):
    """The models that a process has mapped."""
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "burst-model" in line]


def test_the_service_keeps_no_memory_of_a_large_model(kit):
    """A device may leave a model in a reference cycle when it explains it; the service lets go of it at once."""
    pytest.importorskip("onnxruntime", reason="needs the extra 'onnxruntime'")
    m = driver.ModelBuilder()
    weights, bias = np.ones((1024, 512), np.float32), np.zeros(1024, np.float32)
    m.output(m.operation("FULLY_CONNECTED", m.input("float32", (1, 512)), weights, bias, 0))
    with kit.living("onnxruntime") as device, device.prepare(m.build()):
        assert not mapped(device.service_pid)
