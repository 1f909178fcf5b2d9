"""The recovery of a burst whose device has died: the device is started again, a bounded number of times.

A model that crashes the device again and again is quarantined. A death is a crash of ours only when the device noted a
fatal signal in a trace of ours, with a request of ours running or a model of ours being prepared. Every other death
(kill -9, another client's crash) is bad luck, which `Recovery` bounds in time alone. Crashes are counted by device and
model, in this process: another process may do better.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

from burst import BuffersLost, DeviceBuffer, PeerDied, Quarantined
from burst.errors import EngineEnded
from driver.errors import signal_name
from driver.protocol.model_digest import model_digest, structure_digest
from fmq.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from burst import Controller, Request, Trace
    from driver.client.connection import Connection
    from driver.client.executor import OpenController
    from driver.client.remote_executor import Home, RemoteExecutor
    from driver.nn import Model
    from driver.options import Options


_MOST_CRASHES = 3  # in all; two by one request
_MOST_NAMES = 8


class Key(NamedTuple):
    """A key by which crashes are counted: device and model."""

    device: str  #: as it was connected to
    digest: str  #: of the model


class Crash(NamedTuple):
    """A death that a request or a preparation of this process caused."""

    signal: int
    during: str  #: which request, or the preparation
    suspect: object  #: what crashes again when it is done again


class QuarantineListener(Protocol):
    """A burst that ends when its model is quarantined."""

    def quarantined(self) -> None:
        """End the burst. Called once, by the thread that noted the last crash."""


class Quarantine:
    """The crashes that models of this process caused, and the models that may not run any more. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._crashes: dict[Key, int] = {}
        self._reasons: dict[Key, str] = {}
        self._bursts: weakref.WeakKeyDictionary[QuarantineListener, Callable[[], Key]] = weakref.WeakKeyDictionary()

    def watch(self, burst: QuarantineListener, key: Callable[[], Key]) -> None:
        """Call `burst.quarantined()` when its model is quarantined."""
        with self._lock:
            self._bursts[burst] = key

    def knows(self, device: str) -> bool:
        """Return True if any model is quarantined on that device: if not, no digest need be computed."""
        return bool(self._reasons) and any(key.device == device for key in self._reasons)

    def check(self, key: Key) -> None:
        """Raise Quarantined if that model may not run there."""
        if reason := self._reasons.get(key):
            raise Quarantined(reason)

    def note(self, key: Key, model: Model, crash: Crash, *, again: bool) -> None:
        """Count one more crash; `again`: of what crashed it before. Raise Quarantined when that was one too many."""
        with self._lock:
            self._crashes[key] = count = self._crashes.get(key, 0) + 1
            if not again and count < _MOST_CRASHES:
                return
            self._reasons[key] = (
                f"model {key.digest[:12]} ({describe(model)}) has crashed device {key.device!r} {count} times, last "
                f"with {signal_name(crash.signal)} during {crash.during}; this process does not run it there any more: "
                "correct the model or the device, and start a new process"
            )
            bursts = list(self._bursts.items())
        for burst, key_of in bursts:
            if key_of() == key:
                burst.quarantined()
        self.check(key)

    def clear(self) -> None:
        """Forget all of it: for tests."""
        with self._lock:
            self._crashes.clear()
            self._reasons.clear()


quarantine = Quarantine()


def crash_of(trace: Trace, requests: Sequence[tuple[object, Request | None]], model: Model) -> Crash | None:
    """Return the crash that a dead device noted in this trace; `requests` as in `Recovery.successor`."""
    device, results = trace.page.device, int(trace.page.client.results)
    number, running = int(device.signal), int(device.running)
    if not (number and running):
        return None
    place = running - results - 1  # results come in the order of requests
    suspect, request = requests[place] if 0 <= place < len(requests) else (None, None)
    return Crash(number, f"request {running}{_shapes(request, model) if request else ''}", suspect)


def crash_in_preparation(trace: Trace) -> Crash | None:
    """Return the crash that it noted, if it was of a model that was being prepared."""
    number = int(trace.page.device.signal)
    return Crash(number, "its preparation", None) if number else None


def digest_of(model: Model) -> str:
    """Return the digest of the model, in hexadecimal digits."""
    return model_digest(model, structure_digest(model)).hex()


def describe(model: Model) -> str:
    """Return the model's name, or its operations in short."""
    if model.name:
        return printable(model.name)
    names = [operation.type for operation in model.main.operations]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _shapes(request: Request, model: Model) -> str:
    sides = (request.inputs, model.main.inputs), (request.outputs, model.main.outputs)
    found = [
        ", ".join(
            "omitted" if a.has_no_value else str(list(a.dimensions or model.main.operands[i].dimensions))
            for a, i in zip(arguments, operands, strict=False)
        )
        for arguments, operands in sides
    ]
    return " (inputs {}; outputs {})".format(*found)


os.register_at_fork(after_in_child=lambda: setattr(quarantine, "_lock", threading.Lock()))


_MOST_REVIVALS, _WITHIN = 10, 10.0  # seconds
_MOST_IN_A_ROW = 10  # deaths that one burst sees without an answer in between
_FOLLOWS = 1.0  # seconds within which an engine ends after its service


class Recovery:
    """The deaths that one burst has seen, and the controller that comes after the next."""

    def __init__(self, prepared: RemoteExecutor, options: Options, opened: OpenController) -> None:
        self._prepared, self._options, self._opened = prepared, options, opened
        self._suspect: object = None  # what crashed the device last
        self._tokens: set[int] = set()
        self._in_a_row = 0
        self._told: Connection | None = None  # whose end, for memory, its requests have been told

    def begin(self) -> tuple[Home, Controller]:
        """Return the first controller, and where it leads. Raise StatusError, PeerDied."""
        home = self._prepared.present_home()
        try:
            return home, self.open_at(home)
        except PeerDied:
            if not self._options.recover:
                raise
            return self._prepared.revived(home.connection, self.open_at)

    def open_at(self, home: Home) -> Controller:
        """Return a controller where the device has prepared the model."""
        return self._prepared.new_controller(self._options, home, self._opened)

    def is_recoverable(self, error: BaseException, has_died: Callable[[], bool]) -> bool:
        """Return True if the burst's device died, and is to be started again.

        The plain path ends with the service; the burst ends with the engine, which follows it at once.
        """
        end = time.monotonic() + _FOLLOWS
        while self._options.recover and type(error) is PeerDied:
            if has_died():
                return True
            if time.monotonic() > end:
                return False
            time.sleep(1e-3)
        return False

    def note_answer(self) -> None:
        """Note that the device has answered since it died last."""
        self._in_a_row = 0

    def bind(self, request: Request) -> None:
        """Bind the burst to the device's buffers that this request names, if it recovers."""
        if self._options.recover:
            self._tokens |= {pool.token for pool in request.pools if isinstance(pool, DeviceBuffer)}

    def forget_buffers(self) -> None:
        """Note that the device's buffers that its requests have named are released."""
        self._tokens.clear()

    def successor(
        self, error: BaseException, home: Home, trace: Trace, waiting: Sequence[tuple[object, Request | None]]
    ) -> tuple[Home, Controller]:
        """Return a controller on the device's next life. Raise what all waiting requests are to get.

        `waiting`: the requests without an answer, each with an object that identifies it.
        """
        self._prepared.check_quarantine()
        if not (self._options.recover and isinstance(error, PeerDied)):
            raise error
        if isinstance(error, EngineEnded) and self._told is not home.connection:
            self._told = home.connection
            raise error  # perhaps it was by one of these; the next ones go to the next engine
        if self._tokens:
            names = ", ".join(map(str, sorted(self._tokens)))
            raise BuffersLost(
                f"the device died, and its buffers {names} with it; allocate new ones, and open another burst"
            )
        if crash := crash_of(trace, waiting, self._prepared.model):
            again, self._suspect = crash.suspect is not None and crash.suspect is self._suspect, crash.suspect
            self._prepared.note_crash(crash, again=again)
        self._in_a_row = 1 if trace.page.client.results else self._in_a_row + 1
        if self._in_a_row > _MOST_IN_A_ROW:
            self._in_a_row = 0  # of the next requests
            name = self._prepared.device.address
            raise PeerDied(
                f"device {name!r} died {_MOST_IN_A_ROW} times over the same requests; the burst gives them up"
            )
        return self._prepared.revived(home.connection, self.open_at)


class Revivals:
    """A count of the restarts of one connection's device: at most ten within ten seconds."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_MOST_REVIVALS)

    def count(self, name: str) -> None:
        """Count one more. Raise PeerDied when there were too many."""
        now = time.monotonic()
        if len(self._times) == _MOST_REVIVALS and now - self._times[0] < _WITHIN:
            raise PeerDied(
                f"device {name!r} died {_MOST_REVIVALS} times within {now - self._times[0]:.1f} s; it is not started "
                f"again before {_WITHIN:g} s have passed; see its log"
            )
        self._times.append(now)
