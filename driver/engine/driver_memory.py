"""Memory that a driver makes: buffers that it allocates itself, and memory of kinds that it alone can map.

The driver is not trusted to behave. Whatever it raises becomes an error that names it. Allocations and copies run in
threads of their own: one that never returns costs its client an answer, and no other client anything.

A driver's buffer has several holders: the client, through its token or slot, and whatever is bound to it. They share a
`HeldBuffer`, which closes the buffer when the last of them is gone: first what is bound goes, then the buffer.
"""

from __future__ import annotations

import logging
import os
import threading
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from burst import GeneralFailure, InvalidArgument, Memory, StatusError
from burst.own_kinds import register_kinds
from burst.serving_thread import ServingThread
from driver.interface import Device, DriverBuffer, GrowingBuffer, MemoryHandle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from burst.own_kinds import HandleDescription
    from driver.engine.quota import Quota
    from driver.interface import BufferRequest

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_LITTLE = 2**16  # bytes: a growing buffer is charged for these from the first


class DriverCalls:
    """A caller of a driver. A call that does not return in time fails; its result is dropped later."""

    def __init__(self, driver: str, patience: float) -> None:
        """Begin. patience: seconds for each call."""
        self.driver, self.patience = driver, patience

    def __call__(self, method: str, work: Callable[[], _T], on_late: Callable[[_T], object] = lambda _: None) -> _T:
        """Return what `work` returns, run in another thread. `on_late` gets a result that comes too late.

        Raise StatusError, which names the driver and the method.
        """
        found: list[_T] = []
        errors: list[Exception] = []
        ended, is_decided = threading.Event(), threading.Lock()

        def run() -> None:
            try:
                found.append(work())
            except Exception as error:  # noqa: BLE001 (a driver may raise anything)
                errors.append(error)
            is_late = not is_decided.acquire(blocking=False)
            ended.set()
            if is_late and found:
                on_late(found.pop())

        ServingThread(copy_context().run, run, name=f"driver-{method}").start()
        if not ended.wait(self.patience) and is_decided.acquire(blocking=False):
            raise GeneralFailure(f"the driver {self.driver} has not returned from {method} for {self.patience:g} s")
        ended.wait()
        if errors:
            raise self.failed(method, errors.pop())
        return found.pop()

    def failed(self, method: str, error: Exception) -> StatusError:
        """Return what the client gets for an error of the driver: the driver's status if it has one."""
        if isinstance(error, StatusError):
            return type(error)(f"the driver {self.driver} refuses {method}: {error}")
        return self.lied(f"failed in {method}: {type(error).__name__}: {error}")

    def lied(self, what: str) -> GeneralFailure:
        """Return what the client gets for nonsense."""
        return GeneralFailure(f"the driver {self.driver} {what}")


class HeldBuffer:
    """A driver's buffer. The last reference to this object closes it, and gives back what was charged for it."""

    def __init__(self, buffer: DriverBuffer, calls: DriverCalls, quota: Quota | None = None) -> None:
        """`quota`: what a growing buffer is charged to."""
        self.buffer, self._calls, self._quota, self._pending = buffer, calls, quota, ""
        self.is_growing = isinstance(buffer, GrowingBuffer)
        self.least, self.most = 0, -1  #: bytes of a growing buffer between which nothing is to be charged
        self._give_back: Callable[[], object] = lambda: None

    def charge_growth(self) -> None:
        """Charge what a growing buffer occupies, and half as much again where there is room. Raise StatusError.

        So most runs charge nothing, though each lets it grow. What was charged for more than four times as much goes
        back.
        """
        nbytes = self.buffer.nbytes
        if self.least <= nbytes <= self.most:
            return
        quota = self._quota
        assert quota
        self._charge_nothing()
        for most in (max(nbytes + nbytes // 2, _LITTLE), nbytes):
            try:
                self._give_back, self.most = quota.charge(most).give_back, most
                self.least = 0 if most <= _LITTLE else most // 4
            except StatusError:
                if most == nbytes:
                    self.drop()
                    raise
            else:
                return

    def drop(self) -> None:
        """Have a growing buffer free its value, and charge nothing for it."""
        cast("GrowingBuffer", self.buffer).drop()
        self._charge_nothing()

    def _charge_nothing(self) -> None:
        self._give_back()
        self._give_back, self.least, self.most = lambda: None, 0, -1

    def reshape(self, dimensions: tuple[int, ...]) -> None:
        """Make room for a value with these dimensions in a growing buffer. Raise StatusError."""
        buffer = cast("GrowingBuffer", self.buffer)
        self._copy("reshape", lambda: buffer.reshape(dimensions))

    def charge(self, quota: Quota) -> None:
        """Charge what the driver says that it occupies. Raise StatusError."""
        try:
            said = {"nbytes": self.buffer.nbytes, "gpu_nbytes": self.buffer.gpu_nbytes}
        except Exception as error:
            raise self._calls.failed("nbytes", error) from error
        for name, value in said.items():
            if type(value) is not int or not 0 <= value < 2**63:
                raise self._calls.lied(f"says {name}={value!r:.40} of a buffer: it is a whole number from 0 on")
        figures = {"gpu_bytes": said["gpu_nbytes"]} if said["gpu_nbytes"] else {}
        try:
            self._give_back = quota.charge(said["nbytes"], **figures).give_back
        except StatusError as error:
            words = ", ".join(f"{name}={value}" for name, value in said.items() if value)
            raise type(error)(f"of a buffer the driver {self._calls.driver} says {words}: {error}") from error

    def copy_from(self, source: NDArray[np.uint8]) -> None:
        """Make `source` its value. Raise StatusError."""
        self._copy("copy_from", lambda: self.buffer.copy_from(source))

    def copy_to(self, target: NDArray[np.uint8]) -> None:
        """Write its value to all of `target`. Raise StatusError."""
        self._copy("copy_to", lambda: self.buffer.copy_to(target))

    def copy_across(self, source: HeldBuffer) -> bool:
        """Make the value of another one its own, where the driver can do so by itself. Raise StatusError."""
        found: list[bool] = []
        self._copy("copy_across", lambda: found.append(self.buffer.copy_across(source.buffer)))
        return bool(found and found[0])

    def in_place(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Return the value where it lies; None for a native layout. Raise StatusError."""
        found = self._calls("array", self.buffer.array)
        if found is None or (_is_bytes(found) and found.nbytes >= nbytes):
            return None if found is None else found[:nbytes]
        raise self._calls.lied(f"returns {found!r:.80} from array: {nbytes} bytes are an array of uint8 with one axis")

    def _copy(self, method: str, work: Callable[[], None]) -> None:
        """Copy in a thread that holds the buffer open. While one copy hangs there is no other: each costs a thread."""
        if self._pending:
            raise self._calls.lied(f"has not returned from {self._pending} of this buffer yet")

        def copy() -> None:
            self._pending = method
            try:
                work()
            finally:
                self._pending = ""

        self._calls(method, copy)

    def __del__(self) -> None:
        try:
            self.buffer.close()
        except Exception:  # noqa: BLE001 (a driver may raise anything)
            _log.exception("the driver %s failed to close a buffer", self._calls.driver)
        finally:
            self._give_back()


class DriverMemory:
    """The memory of the engine's own driver. Registers its kinds of memory with this process."""

    def __init__(self, device: Device, patience: float) -> None:
        """Register the kinds. patience: seconds for each call. Raise ValueError for a kind with a wrong name."""
        self._device, self._calls, self._allocating = device, DriverCalls(device.name, patience), threading.Lock()
        register_kinds(device.own_memory_kinds, self._opened)

    def allocate(self, request: BufferRequest, quota: Quota) -> HeldBuffer | None:
        """Return a driver's buffer, charged to the client; None: the engine allocates. Raise StatusError."""
        if type(self._device).allocate is Device.allocate:
            return None
        (found,) = self._called("allocate", [request])
        held = None if found is None else HeldBuffer(found, self._calls, quota)
        if held:
            held.charge(quota)
        return held

    def allocate_growing(self, requests: Sequence[BufferRequest], quota: Quota) -> list[HeldBuffer | None]:
        """Return a growing buffer of the driver's for each, likewise: without a value they occupy nothing yet, so one
        call makes all of them.
        """
        if type(self._device).allocate_growing is Device.allocate_growing or not requests:
            return [None] * len(requests)
        found = self._called("allocate_growing", requests)
        held = [None if each is None else HeldBuffer(each, self._calls, quota) for each in found]
        for each in held:
            if each:
                each.charge_growth()
        return held

    def _called(self, method: str, requests: Sequence[BufferRequest]) -> list[DriverBuffer | None]:
        """Return what the driver allocates, all or none. Raise StatusError."""
        if not self._allocating.acquire(timeout=self._calls.patience):
            raise self._calls.lied(f"has not returned from {method} for another buffer for {self._calls.patience:g} s")
        # The call gives the lock back, also when it returns too late.
        allocate, kind = getattr(self._device, method), GrowingBuffer if method == "allocate_growing" else DriverBuffer
        found: list[Any] = self._calls(method, lambda: self._allocated(allocate, requests), on_late=_close)
        for each in found:
            if each is not None and not isinstance(each, kind):
                _close(found)
                raise self._calls.lied(f"returns {each!r:.80} from {method}, and not a {kind.__name__} or None")
        return found

    def _allocated(
        self, allocate: Callable[[BufferRequest], DriverBuffer | None], requests: Sequence[BufferRequest]
    ) -> list[DriverBuffer | None]:
        found = list[DriverBuffer | None]()
        try:
            for request in requests:
                found.append(allocate(request))
        except BaseException as error:
            _close(found)
            if isinstance(error, ValueError):
                raise InvalidArgument(str(error)) from error
            raise
        finally:
            self._allocating.release()
        return found

    def _opened(self, given: HandleDescription, fd: int) -> Memory:
        """Return memory of one of the driver's own kinds. Owns `fd`. Raise InvalidArgument, GeneralFailure."""
        what = f"map_memory of kind {given.kind}"
        try:
            found = self._device.map_memory(MemoryHandle(given.kind, fd, given.nbytes, given.fields))
        except ValueError as error:
            raise InvalidArgument(f"the driver {self._device.name} refuses {what}: {error}") from error
        except Exception as error:
            raise self._calls.failed(what, error) from error
        finally:
            os.close(fd)
        if isinstance(found, DriverBuffer):
            return DriverPool(given, np.empty(0, np.uint8), HeldBuffer(found, self._calls))
        if not _is_bytes(found):
            raise self._calls.lied(f"returns {found!r:.80} from {what}: a DriverBuffer, or uint8 with one axis")
        return DriverPool(given, found)


class DriverPool(Memory):
    """A pool of one of the driver's own kinds, as the driver has mapped it for the engine.

    held: what it is, where the driver has made a buffer of it, to be used whole. Otherwise it is an array of bytes.
    """

    def __init__(self, given: HandleDescription, array: NDArray[np.uint8], held: HeldBuffer | None = None) -> None:
        """Take no descriptor, and map nothing: the driver has."""
        self._fd, self.name, self._bytes, self.held = -1, None, array, held
        self.kind, self.nbytes, self.writable = given.kind, array.nbytes, bool(array.flags.writeable)
        if held:
            self.nbytes, self.writable = given.nbytes, True

    def asarray(self, dtype: Any = np.uint8, shape: int | tuple[int, ...] | None = None, offset: int = 0) -> Any:
        """Return a view, as `Memory` does. Raise GeneralFailure for a buffer of the driver."""
        if self.held:
            raise GeneralFailure(f"memory of kind {self.kind} has no bytes that the CPU can use; use a pool of bytes")
        return super().asarray(dtype, shape, offset)


def _is_bytes(found: object) -> bool:
    return isinstance(found, np.ndarray) and found.dtype == np.uint8 and found.ndim == 1 and found.flags.c_contiguous


def _close(late: Sequence[DriverBuffer | None]) -> None:
    for each in late:
        if isinstance(each, DriverBuffer):
            each.close()
