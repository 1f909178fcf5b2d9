"""Devices of one slot, and of turns so short that every checkpoint is one where others come first: for tests.

Connect to "burst_test_devices.narrow:Reference". Their models are cut wherever they can be.
"""

from __future__ import annotations

from driver.devices.litert import LiteRtDevice, cuts
from driver.devices.onnxruntime import OnnxRuntimeDevice
from driver.devices.onnxruntime import device as onnxruntime_device
from driver.devices.reference import ReferenceDevice

_INSTANT = 1e-9  # seconds


class Reference(ReferenceDevice):
    """The reference device."""

    slots, quantum = 1, _INSTANT


class LiteRt(LiteRtDevice):
    """LiteRT, which runs every operation as a segment."""

    slots, quantum = 1, _INSTANT

    def __init__(self) -> None:
        cuts.SEGMENT = 1  # in this process
        super().__init__(threads=1)


class OnnxRuntime(OnnxRuntimeDevice):
    """ONNX Runtime, which takes every model for a large one."""

    slots, quantum = 1, _INSTANT

    def __init__(self) -> None:
        onnxruntime_device.LARGE = 0
        super().__init__(threads=1)
