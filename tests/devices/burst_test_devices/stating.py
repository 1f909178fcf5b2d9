"""Devices whose drivers state what they are worth."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from burst_test_devices import runtime_folder
from driver.devices.reference import ReferenceDevice
from driver.interface import Capabilities, Performance

STATED = Capabilities(
    {"TENSOR_FLOAT32": Performance(0.125, 0.5)}, relaxed_tensor=Performance(0.0625), if_performance=Performance(2.0)
)


class Stating(ReferenceDevice):
    """States the same at any time."""

    name, capabilities = "stating", STATED


class Asked(ReferenceDevice):
    """States what the file "stated" in BURST_RUNTIME_DIR says, in Python."""

    needs = runtime_folder.needs()

    name = "asked"

    @property
    def capabilities(self) -> Any:
        """Read when Burst asks."""
        names = {"Capabilities": Capabilities, "Performance": Performance}
        return eval(Path(os.environ["BURST_RUNTIME_DIR"], "stated").read_text(), names)
