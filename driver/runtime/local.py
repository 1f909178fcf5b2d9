"""The CPU device in the client's own process: the methods of a remote device, and nothing between call and kernel.

An execution is given up between two operations when its time is up, as in a device process, and its result is dropped
when it comes too late. A request is checked and bound as a device process does it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from driver.client.surface import AnyPreparedModel
from driver.deadlines import check_entry, due, nanoseconds
from driver.devices.reference import ReferenceDevice
from driver.nn import validate
from driver.nn.known import explained
from driver.options import check_preference
from driver.runtime.local_executor import LocalExecutor
from fmq.closing import Closing

if TYPE_CHECKING:
    from burst import Memory
    from driver.interface import Device
    from driver.nn import Model
    from driver.options import Preference

NAME = "cpu"


class LocalDevice(Closing):
    """Runs models in this process, by default as the reference device does. Any thread may use it."""

    address = NAME

    def __init__(self, device: Device | None = None) -> None:
        self._device = device or ReferenceDevice()
        self.name, self.version, self.type = NAME, self._device.version, "CPU"
        self.extensions = tuple(extension.name for extension in self._device.extensions)

    def supported_operations(self, model: Model) -> list[bool]:
        """Return True for each operation of the main subgraph that it supports. Raise InvalidModel."""
        return [reason is None for reason in self.explain(model)]

    def explain(self, model: Model) -> list[str | None]:
        """Return for each operation of the main subgraph why it is not supported; None: it is. Raise InvalidModel."""
        model = model.form_for(self.extensions)
        validate(model)
        return explained(model, self.extensions, self._device.explain, self._device.hal_version)

    def prepare(
        self, model: Model, *, preference: Preference = "fast_single_answer", deadline: float | None = None
    ) -> LocalPrepared:
        """Make a model ready. Raise InvalidModel; MissedDeadline* when that is not done by a time.monotonic()."""
        check_preference(preference)
        model = model.form_for(self.extensions)
        validate(model)
        by = None if deadline is None else nanoseconds(deadline)
        with due(by):
            check_entry("before start")
            return LocalPrepared(self, LocalExecutor(model, preference, self._device), preference)

    def free_memory(self, memory: Memory) -> None:
        """Do nothing: nothing is kept of pools."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how another process makes the same device, which holds nothing of this process."""
        return LocalDevice, (self._device,)

    def close(self) -> None:
        """Do nothing: prepared models go on."""


class LocalPrepared(AnyPreparedModel):
    """A model made ready to run in this process. Any thread may use it, several at once."""

    def __init__(self, device: LocalDevice, local: LocalExecutor, preference: Preference) -> None:
        """Use `device.prepare`."""
        super().__init__(local, preference)
        self.device, self.local = device, local

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a recipe that prepares the model again, wherever it is unpickled."""
        return _prepare_again, (self.device, self.model, self.preference)


def _prepare_again(device: LocalDevice, model: Model, preference: Preference) -> LocalPrepared:
    return device.prepare(model, preference=preference)
