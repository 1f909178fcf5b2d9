"""Drop-ins, each test with devices of its own."""

import pytest
from dropin_nets import layers

pytest.importorskip("onnxruntime")

from driver.dropin.device_model import connections
from driver.dropin.report import tally


@pytest.fixture
def net(tmp_path):
    return layers(tmp_path / "net.onnx")


@pytest.fixture
def counted(place):
    """What the drop-ins of this process have counted, from now on; connections end with the test."""
    connections.forget()
    tally.forget()
    yield tally.found
    for device in connections.devices():
        device.close()
    connections.forget()
