"""A driver's library in this process: its table, its device, and the calls that both make to each other."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from burst import ErrorStatus, GeneralFailure, StatusError
from burst._core import ffi as burst_ffi
from burst._core import lib as burst_lib
from burst.errors import status_error
from driver.devices.library.table import LibraryFault, ffi, load
from fmq._core import ffi as fmq_ffi
from fmq._core import lib as fmq_lib
from fmq.printable import printable_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from driver.devices.library.device import LibraryModel
    from driver.interface import State

_log = logging.getLogger(__name__)
_ROOM = 1000  # bytes of a reason
_STATES: dict[int, State] = {0: "available", 1: "busy", 2: "offline", 3: "unknown"}
_LAST_STATUS = max(ErrorStatus)


class Why:
    """A `burst_why` and its text."""

    def __init__(self) -> None:
        self._text = ffi.new("char[]", _ROOM)
        self.pointer = ffi.new("burst_why *", (ffi.sizeof("burst_why"), _ROOM, self._text))

    def __str__(self) -> str:
        """Return what the driver has written, as one line that is safe to print."""
        return printable_line(ffi.string(self._text, _ROOM))


def write_why(why: Any, text: str) -> None:
    """Write a text for people into the driver's `burst_why`, as much as there is room for."""
    if why and why.text and why.room:
        raw = text.encode()[: why.room - 1] + b"\0"
        ffi.memmove(why.text, raw, len(raw))


def address(of: Any, pointer: Any) -> Any:
    """Return a pointer of another cffi module."""
    return ffi.cast("void *", int(of.cast("uintptr_t", pointer)))


class LoadedDriver:
    """One in each process that calls the library. Any thread may call, as burst_device.h allows it."""

    def __init__(
        self,
        path: str,
        report: Callable[[State, str], object],
        watched: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Load the library and open its device.

        `report`: what the driver calls when its device takes work, or takes none any more. `watched`: within it one of
        its functions runs.

        Raise StatusError.
        """
        self.watched, self._report = watched, report
        self.models = WeakValueDictionary[int, "LibraryModel"]()  #: that the driver has not released, by address
        self.name = path.rpartition("/")[2]
        try:
            with watched("burst_device_get"):
                self.table, self._library = load(path)
        except LibraryFault as fault:
            raise GeneralFailure(f"driver {path!r} cannot be a device: {fault}") from fault
        self.name, self.version = (
            ffi.string(text).decode(errors="replace") for text in (self.table.name, self.table.version)
        )
        self._host = self._new_host()
        self.device = self.made("open", "burst_device *", self._host)

    def _new_host(self) -> Any:
        self._callbacks = (
            ffi.callback("void(void *, int32_t, const char *)", self._on_report),
            ffi.callback("void(void *, const char *)", self._on_log),
        )
        host = ffi.new("burst_host *", {"abi": self.table.abi, "size": ffi.sizeof("burst_host")})
        host.report, host.log = self._callbacks
        checkpoint = burst_ffi.addressof(burst_lib, "burst_timed_checkpoint")
        host.checkpoint = ffi.cast("int32_t(*)(void)", address(burst_ffi, checkpoint))
        host.now = ffi.cast("uint64_t(*)(void)", address(fmq_ffi, fmq_ffi.addressof(fmq_lib, "fmq_now")))
        return host

    def _on_report(self, _: Any, state: int, reason: Any) -> None:
        text = printable_line(ffi.string(reason, _ROOM)) if reason != ffi.NULL else ""
        if state in _STATES:
            self._report(_STATES[state], text)
        else:
            _log.error("driver %s reported the state %d, which is none: %s", self.name, state, text)

    def _on_log(self, _: Any, text: Any) -> None:
        _log.info("driver %s: %s", self.name, printable_line(ffi.string(text, _ROOM)) if text != ffi.NULL else "")

    def has(self, function: str) -> bool:
        """Return True if the driver has that optional function."""
        return bool(getattr(self.table, function) != ffi.NULL)

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function that returns a status, with a `why` at the end. Raise StatusError."""
        why = Why()
        with self.watched(function):
            status = getattr(self.table, function)(*arguments, why.pointer)
        if status:
            raise self.failure(function, status, str(why))

    def made(self, function: str, kind: str, *arguments: Any) -> Any:
        """Call a function that makes something. `kind`: "burst_device *". Raise StatusError."""
        place = ffi.new(f"{kind}*")
        self.call(function, *arguments, place)
        if place[0] == ffi.NULL:
            raise GeneralFailure(f"driver {self.name!r}: {function} returned BURST_NONE and made nothing")
        return place[0]

    def tell(self, function: str, *arguments: Any) -> None:
        """Call a function that returns nothing."""
        with self.watched(function):
            getattr(self.table, function)(*arguments)

    def failure(self, function: str, status: int, why: str = "") -> StatusError:
        """Return the error that stands for what a function returned."""
        if not 0 < status <= _LAST_STATUS:
            return GeneralFailure(
                f"driver {self.name!r}: {function} returned {status}, which is no burst_status{why and f': {why}'}"
            )
        found = ErrorStatus(status)
        return status_error(found, f"driver {self.name!r}: {function}: {why or found.name}")


class Callback:
    """A call from a driver back into Python, whose exception waits until the driver has returned."""

    def __init__(self, kind: str, function: Callable[..., int | None]) -> None:
        """`kind`: of the C function, whose first argument is the context; `function`: gets the others."""
        self.error: Exception | None = None
        self._function = function
        self._is_void = kind.startswith("void")
        self.pointer = ffi.callback(kind, self._call, error=None if self._is_void else int(ErrorStatus.GENERAL_FAILURE))

    def _call(self, _: Any, *arguments: Any) -> int | None:
        if self.error is None:
            try:
                return self._function(*arguments)
            except Exception as error:  # noqa: BLE001 (it goes on where the driver was called)
                self.error = error
        return None if self._is_void else _status_of(self.error)

    def check(self) -> None:
        """Raise what the function has raised, once: it must not stay in a cycle with its own traceback."""
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None


def _status_of(error: Exception) -> int:
    return int(error.status if isinstance(error, StatusError) else ErrorStatus.GENERAL_FAILURE)
