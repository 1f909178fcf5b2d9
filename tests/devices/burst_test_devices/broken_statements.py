"""Devices that are wrong about themselves, or about what they are told, each in one way.

Run `burst vts burst_test_devices.broken_statements:Boundless`.
"""

from __future__ import annotations

import math
import signal
import time
from typing import TYPE_CHECKING, Any

from burst import MissedDeadlineTransient
from burst_test_devices.broken import _Bound, _Executing, _Prepared
from driver.devices.reference import ReferenceDevice
from driver.interface import Capabilities, DeviceStatus, Needs, Performance, PreparedModel
from driver.nn import ExecutionFailed

if TYPE_CHECKING:
    from driver.interface import BindOptions, BoundExecution, Preparation
    from driver.nn import Model
    from driver.options import Preference

    Arrays = Any


class Boundless(ReferenceDevice):
    """States a time that is no number."""

    capabilities = Capabilities({"TENSOR_FLOAT32": Performance(math.nan)})


class Silent(ReferenceDevice):
    """Supports everything, and states what it is worth for booleans alone."""

    capabilities = Capabilities({"TENSOR_BOOL8": Performance(0.5)})


class _Asleep(DeviceStatus):
    @property
    def takes_work(self) -> bool:
        """All the same."""
        return True


class Dreaming(ReferenceDevice):
    """Is in a state that the HAL does not know."""

    status = _Asleep("asleep")  # type: ignore[arg-type]


class Needy(ReferenceDevice):
    """Needs a text where paths are asked for."""

    needs = Needs(read_paths="/dev/dri")  # type: ignore[arg-type]


class Napping(ReferenceDevice):
    """Takes two seconds to hear that a burst with low power has begun."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """As the reference, but for hints."""
        return _Napping(super().prepare(model, preparation), _Bound)


class _Napping(_Prepared):
    def burst_began(self, preference: Preference) -> None:
        time.sleep(2.0 if preference == "low_power" else 0.0)


class Jumpy(ReferenceDevice):
    """Dies of SIGSEGV when a burst with low power begins."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """As the reference, but for hints."""
        return _Jumpy(super().prepare(model, preparation), _Bound)


class _Jumpy(_Prepared):
    def burst_began(self, preference: Preference) -> None:
        if preference == "low_power":
            signal.raise_signal(signal.SIGSEGV)


class Snobbish(ReferenceDevice):
    """Has queues for two of three priorities."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """As the reference, but for binding."""
        return _Snobbish(super().prepare(model, preparation), _Bound)


class _Snobbish(_Prepared):
    queues = {"high": 0, "medium": 1}  # noqa: RUF012 (nobody changes it)

    def bind(self, inputs: Arrays, outputs: Arrays, options: BindOptions) -> BoundExecution:
        self.queues[options.priority]
        return super().bind(inputs, outputs, options)


class Unpunctual(ReferenceDevice):
    """Prepares a long model for three seconds, whatever its deadline is, and never lets others through."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """Looks at no clock."""
        if len(model.main.operations) > 100:
            time.sleep(3.0)
        return super().prepare(model, preparation)


class _Blunt(_Bound):
    def run(self) -> None:
        try:
            super().run()
        except MissedDeadlineTransient as error:
            raise ExecutionFailed(0, "odd", "the accelerator gave up") from error


class Blunt(_Executing):
    """Says of an execution that was given up at its deadline that it failed."""

    kind = _Blunt
