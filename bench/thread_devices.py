"""Devices whose executions have so many threads, whatever requests show; litert.py has LiteRT's."""

from __future__ import annotations

from driver.devices.onnxruntime import OnnxRuntimeDevice


class OnnxRuntimeInOne(OnnxRuntimeDevice):
    """In one thread."""

    def __init__(self) -> None:
        super().__init__(threads=1)


class OnnxRuntimeInTwo(OnnxRuntimeDevice):
    """In two threads."""

    def __init__(self) -> None:
        super().__init__(threads=2)
