"""A model in a device, as a drop-in runs it: any thread, across `fork`, on the caller's own arrays.

Programs open a session and run it from where they please. So a burst is taken from a list for each run, and a run in a
forked child connects anew. A signal's handler may run what it interrupts: a thread may take its own locks again. A
burst recovers from the death of its device by itself: it sends again what had no answer.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from burst import GeneralFailure, PeerDied, Quarantined, ResourceExhaustedPersistent, ResourceExhaustedTransient
from driver.client.device import RemoteDevice, connect
from driver.dropin.hook import SWITCH
from driver.dropin.not_on_device import NotOnDevice
from driver.dropin.report import tally
from driver.errors import DeviceFailed
from driver.fork import abandon_in_child
from driver.nn.file_form import NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from driver.client.completion import Completion
    from driver.client.prepared_model import RemotePreparedModel
    from driver.client.surface import AnyBurst
    from driver.nn import Model

_QUARANTINED = " is quarantined on this device"  # the words of `driver.service.file_gate`, in an answer

_TOOK_TOO_MUCH = ResourceExhaustedPersistent, ResourceExhaustedTransient

_OPEN, _KEPT = "/proc/self/fd", 64
_MOST_IDLE = 8
"""The most bursts of a model that are kept while no run uses them."""


def _check_descriptors() -> None:
    """Raise NotOnDevice where few file descriptors are left: models in a device and their bursts take some, and the
    program needs some for itself.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or not os.path.isdir(_OPEN):
        return
    if limit - len(os.listdir(_OPEN)) < max(_KEPT, limit // 4):
        raise NotOnDevice("few file descriptors are left to the program", "raise its limit, `ulimit -n`")


class DeviceConnections:
    """The devices that this process is connected to, by their names: each once. Any thread."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget the connections, which are the parent's: in a forked child."""
        self._lock, self._devices, self._failed = threading.RLock(), dict[str, RemoteDevice](), dict[str, str]()

    def to(self, name: str) -> RemoteDevice:
        """Return the device of that name, connected once. Raise as `connect`; at once where it has failed before."""
        with self._lock:
            if name in self._failed:
                raise DeviceFailed(self._failed[name])
            if name not in self._devices:
                try:
                    self._devices[name] = connect(name, reconnect=True)
                except Exception as error:
                    self._failed[name] = str(error)
                    raise
            return self._devices[name]

    def devices(self) -> list[RemoteDevice]:
        """Return those that are connected."""
        return list(self._devices.values())


class WarningTeller(logging.Handler):
    """Tells our warnings on standard error, as all that `burst exec` says: the program's own logs have none of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning, once."""
        tally.warn(record.getMessage())


if os.environ.get(SWITCH):
    for _name in ("driver", "burst", "fmq"):
        logging.getLogger(_name).addHandler(WarningTeller(logging.WARNING))
        logging.getLogger(_name).propagate = False

connections = DeviceConnections()
os.register_at_fork(after_in_child=connections.forget)


def has_killed(error: BaseException) -> bool:
    """Return True for the error of a model that has killed its device, and does not run there any more."""
    return isinstance(error, Quarantined) or (isinstance(error, GeneralFailure) and _QUARANTINED in str(error))


class RunOnBurst:
    """A run on a burst. Any thread may cancel it."""

    def __init__(self, burst: AnyBurst, future: Completion) -> None:
        self.burst, self.future = burst, future

    def cancel(self) -> None:
        """End it on the device, too, unless it is done: by closing the burst, as the device has begun the request."""
        if self.future.cancel():
            self.burst.close()


class DeviceModel:
    """A model on a device, connected and prepared by `prepare` or the first run, and again in a forked child."""

    def __init__(self, model: Model, device: str) -> None:
        self.model, self.device = model, device
        self._lock, self._of_parents = threading.RLock(), list[object]()
        self._prepared: RemotePreparedModel | None = None
        self._idle: list[AnyBurst] = []
        abandon_in_child(self)

    def prepare(self) -> None:
        """Prepare the model, unless this process has. Raise what `connect` and `prepare` raise; PeerDied where the
        device has died of it twice.
        """
        self._here()

    def _here(self) -> RemotePreparedModel:
        """Return the model as this process has prepared it."""
        if self._prepared is None:
            with self._lock:
                if self._prepared is None:
                    self._prepared = self._made()
                    tally.place(self.model.name, self.device)
        return self._prepared

    def _made(self) -> RemotePreparedModel:
        _check_descriptors()
        device = connections.to(self.device)
        if NAME not in device.extensions:
            raise DeviceFailed(
                f"device {self.device!r} runs no model files, or none of this account; see `burst devices`"
            )
        try:
            return device.prepare(self.model)
        except PeerDied:  # of whatever: once is bad luck
            return device.prepare(self.model)

    def run(self, arrays: Sequence[Any], watch: Callable[[RunOnBurst], object] | None = None) -> tuple[Any, ...]:
        """Execute once, an array for each input (None: left out). Return arrays that are the caller's.

        `watch`: gets the run, to cancel it from another thread. Raise ValueError for what the model does not take,
        CancelledError, NotOnDevice where few descriptors are left, and else as a burst's `run`.
        """
        try:
            return self._ran(arrays, watch)
        except _TOOK_TOO_MUCH as error:
            if not isinstance(error, PeerDied):
                raise
            return self._ran(arrays, watch)  # an engine that has grown was ended: this is the run of the next one

    def _ran(self, arrays: Sequence[Any], watch: Callable[[RunOnBurst], object] | None) -> tuple[Any, ...]:
        prepared = self._here()
        try:
            burst = self._idle.pop()
        except IndexError:
            _check_descriptors()
            burst = prepared.burst(recover=True, loop_timeout=math.inf)
        if watch is None:
            result = burst.run(*arrays)  # after an error a burst is not used again
        else:
            run = RunOnBurst(burst, burst.submit(*arrays))
            watch(run)
            result = run.future.result()
            del run
        outputs = tuple([np.array(each) if isinstance(each, np.ndarray) else each for each in result.outputs])
        del result
        if len(self._idle) < _MOST_IDLE:
            self._idle.append(burst)
        return outputs

    def abandon(self) -> None:
        """Keep what is the parent's without using it: in a forked child."""
        self._lock = threading.RLock()
        self._of_parents += [self._prepared, self._idle]
        self._prepared, self._idle = None, []
