"""A model that is prepared on a device in another process."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from burst import PeerDied
from driver.client.executor import in_front
from driver.client.surface import AnyPreparedModel
from driver.errors import DriverError

if TYPE_CHECKING:
    from burst.controller import Configure
    from driver.client.executor import Executor
    from driver.client.new_connection import ClientTerms
    from driver.client.remote_executor import Home, RemoteExecutor
    from driver.nn import Model
    from driver.options import PrepareOptions


class RemotePreparedModel(AnyPreparedModel):
    """A model made ready to run on a device. Any thread may use it, several at once."""

    def __init__(self, remote: RemoteExecutor) -> None:
        """Use `device.prepare`."""
        executor: Executor = remote
        for put in in_front:
            executor = put(executor)
        super().__init__(executor, remote.options.preference)
        self.remote, self.device, self.priority = remote, remote.device, remote.options.priority

    @property
    def home(self) -> Home:
        """The place where it is prepared."""
        return self.remote.home

    @property
    def stage(self) -> int:
        """The number of times that the device has replaced it by something better: 0 for what it made at first."""
        return self.remote.stage

    def present_home(self) -> Home:
        """Return where it is prepared, after preparing it again if its device was started again."""
        return self.remote.present_home()

    def configure_burst(self, spin: float | str) -> Configure:
        """Return the function by which burst.Controller configures a burst."""
        return self.remote.configure_burst(spin)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a recipe that connects by name and prepares the model again, wherever it is unpickled."""
        return _prepare_again, (self.device.address, self.model, self.remote.options, self.device.terms)

    def __exit__(self, *_: object) -> None:
        with suppress(PeerDied, DriverError):  # with the device, the model is gone too
            self.close()


def _prepare_again(address: str, model: Model, options: PrepareOptions, terms: ClientTerms) -> RemotePreparedModel:
    """Prepare an unpickled model again. Its connection is its own: `prepared.device`."""
    from driver.client.device import connect

    device = connect(address, application=terms.application, real_time=terms.real_time)
    try:
        return device.prepare(model, preference=options.preference, priority=options.priority, batch=options.batch)
    except BaseException:
        device.close()
        raise
