"""The two ends of a queue, in Python. csrc/README.md explains the protocol."""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np

from fmq._core import ffi, lib
from fmq._hot import HotEnd, HotReader, HotWriter
from fmq.closing import Closing
from fmq.conversion import converted
from fmq.errors import Busy, Closed, Overrun, Timeout, raise_errno
from fmq.geometry import Flavour
from fmq.life import Watch
from fmq.mapped import finalize_mapped
from fmq.readers import readers_of
from fmq.readiness import ReadinessFd
from fmq.region import descriptors
from fmq.role import LIFE_AT, OBSERVER, READER, SEAT, WRITER, Role, Seat, take_seat
from fmq.span import Span

if TYPE_CHECKING:
    import socket

    from numpy.typing import ArrayLike, NDArray

    from fmq.descriptor import AttachedQueue, Descriptor
    from fmq.event import EventFlag
    from fmq.readers import ReaderState
    from fmq.region import Region

DEFAULT_SPIN = 50e-6  # seconds
_CALLS = int(ffi.cast("uintptr_t", lib.fmq_hot_calls()))
_ADAPTIVE, _DEFAULT_NS = 2**64 - 1, int(DEFAULT_SPIN * 1e9)


def spin_ns(spin: float | str) -> int:
    """Return the polling window in the C core's unit. Raise ValueError."""
    if spin == "adaptive":
        return _ADAPTIVE
    if isinstance(spin, str) or not 0 <= spin <= 10:
        raise ValueError(f'spin={spin!r}: seconds from 0 to 10, or "adaptive"')
    return int(spin * 1e9)


class _End(Closing, HotEnd):
    """An end of a queue. One thread at a time may call it; a second one gets Busy. C makes its transfers."""

    to_send = "send the queue's descriptor, and take a role of the queue where it arrives"

    _which: int

    def __init__(self, place: AttachedQueue, *, follows: bool = False) -> None:
        """`follows`: the caller calls `follow` before any transfer."""
        geometry, self._place = place.geometry, place
        self.dtype, self.capacity = geometry.dtype, geometry.capacity
        self.overwrites = geometry.flavour is Flavour.UNSYNCHRONIZED
        self.broadcasts = geometry.flavour is Flavour.BROADCAST
        self._role, which = self._take_role()
        elements = place.ring.asarray(geometry.dtype, geometry.capacity, place.ring_at)
        handle = ffi.new("fmq_end **")
        control, ring = place.control.base + place.control_at, place.ring.base + place.ring_at
        if code := lib.fmq_open(control, ring, geometry.shape, which, handle):
            self._role.release()
            raise_errno(code, "cannot take the role")
        self.handle = ffi.gc(handle[0], lib.fmq_free)  #: of the C core
        address = int(ffi.cast("uintptr_t", self.handle))
        self._begin_hot(_CALLS, address, self.handle, self.dtype, self.capacity, partial(_span, elements))
        self._readiness: ReadinessFd | None = None  # for select; and
        self._async_readiness: ReadinessFd | None = None
        self._flag: EventFlag | None = None
        self.spin_ns = _DEFAULT_NS
        self._finalizer = weakref.finalize(self, self._role.release)
        self.peer_page: Region | None = None  #: a LifePage on which the peer tells of its life; None: in the queue
        self._link: weakref.finalize[..., Any] | None = None  #: ends the watch of the peer
        if place.announces and not follows:
            self._link_lock()

    @classmethod
    def attach(cls, descriptor: Descriptor) -> Self:
        """Open a descriptor's queue and take this role of it, in one step. Raise InvalidDescriptor, RoleTaken."""
        place = descriptor.attach()
        try:
            return cls(place)
        finally:
            place.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.capacity} x {self.dtype}>"

    def _link_lock(self) -> None:
        """Let the life thread ask for the peer's lock when a file of this memory is closed: the kernel may be unable to
        mark the life word. Where the system has no more inotify, the life word is the only way.
        """
        if self._which == WRITER and self.overwrites:
            return  # it does not know its readers
        peer = WRITER if self._which == READER else SEAT if self.broadcasts else READER  # SEAT: and those behind it
        byte = self._place.control_at + peer
        self._relink(lib.fmq_link_lock(self.handle, self._role.lock_fd, byte))

    def _relink(self, token: int) -> None:
        if self._link:
            self._link()
        memory = self.handle, self._place, self.peer_page
        self._link = finalize_mapped(self, memory, lib.fmq_unlink, token)

    def _take_role(self) -> tuple[Role | Seat, int]:
        place = self._place
        if self.overwrites and self._which == READER:
            return Seat(place.control, place.control_at), READER if place.control.writable else OBSERVER
        if not (place.control.writable and place.ring.writable):
            raise ValueError("writable=False: this queue was opened for observing; open it again to take a role")
        if self.broadcasts and self._which == READER:
            role = take_seat(place.control, place.control_at, announces=place.announces)
        else:
            role = Role(place.control, place.control_at, self._which, announces=place.announces)
        return role, role.which

    @property
    def spin(self) -> float | str:
        """Seconds that a wait polls before it sleeps; 0 sleeps at once. "adaptive" polls while waits are usually short:
        for up to 0.2 ms while they lately took less than 0.1 ms, which is what a sleep and a wake-up cost.
        """
        return "adaptive" if self.spin_ns == _ADAPTIVE else self.spin_ns / 1e9

    @spin.setter
    def spin(self, seconds: float | str) -> None:
        self.spin_ns = spin_ns(seconds)

    @property
    def hold(self) -> float:
        """Seconds at the beginning of a wait for which a call keeps the GIL, up to 1e-3; 0, the default, gives it up at
        once. A busy thread of this process then does not delay a short wait by its time slice; but no other thread runs
        meanwhile.
        """
        return self.hold_ns / 1e9

    @hold.setter
    def hold(self, seconds: float) -> None:
        if not 0 <= seconds <= 1e-3:
            raise ValueError(f"hold={seconds!r}: seconds from 0 to 0.001")
        self.hold_ns = int(seconds * 1e9)

    @property
    def available(self) -> int:
        """Elements that can be read (reader) or places that can be written (writer) without waiting.

        More than `capacity` when the writer of an unsynchronized queue has overtaken this reader: its next read raises
        Overrun.
        """
        n: int = lib.fmq_available(self.usable())
        if n < 0:
            raise_errno(n, "available")
        return n

    @property
    def position(self) -> int:
        """Elements that this end, and earlier holders of its role, have transferred in the queue's life."""
        n: int = lib.fmq_position(self.handle)
        if n < 0:
            raise_errno(n, "position")
        return n

    @property
    def peer(self) -> str:
        """The state of the other side, from the kernel: "nobody" (yet), "alive", "released" or "dead".

        The writer of an unsynchronized queue does not know its readers: to it they are "nobody". To the writer of a
        broadcast queue they are "alive" when one of them is, else "nobody".
        """
        return ("nobody", "alive", "released", "dead")[lib.fmq_peer(self.usable())]

    @property
    def _peer_word(self) -> tuple[Region, int]:
        if self.peer_page:
            return self.peer_page, 0
        at = LIFE_AT[WRITER if self._which == READER else READER]
        return self._place.control, self._place.control_at + at

    def follow(self, page: Region, sock: int | None = None) -> None:
        """Learn of the peer's life from a LifePage of its own, and no longer in the queue's memory. `sock`: descriptor
        of a socket to the peer alone. When that hangs up, the peer is gone even if the kernel did not mark the page.

        Before any other call. Raise OSError.
        """
        lib.fmq_follow(self.handle, page.base)
        self.peer_page = page  # keeps it mapped
        if sock is None:
            return
        if (token := lib.fmq_link(self.handle, sock)) < 0:
            raise OSError(-token, f"cannot watch a peer's socket: {os.strerror(-token)}")
        self._relink(token)

    def watch(self, sock: socket.socket) -> Watch:
        """Shut `sock` down when the peer dies, so that a wait on it ends as promptly as one on this queue."""
        return Watch(*self._peer_word, sock)

    def notify(self, flag: EventFlag | None, mask: int = 1) -> None:
        """Make every transfer on this end also set the bits of `mask` in `flag`; None ends that.

        Several queues, each with bits of its own, can share a flag on which one thread waits for all of them.
        """
        pointer, bits = (ffi.NULL, 0) if flag is None else (flag.address, flag.checked(mask))
        if code := lib.fmq_notify(self.usable(), pointer, bits):
            raise_errno(code, "notify")
        self._flag = flag  # keeps it mapped

    def fileno(self) -> int:
        """Return a descriptor that is readable while a transfer of one element would not wait: for select, epoll,
        asyncio.

        The first call starts the process's bridge thread, which sleeps for all such ends. Closed with the end.
        """
        if self._readiness is None or self._readiness.is_abandoned:
            readiness = self._new_readiness()
            try:
                readiness.arm(1)
            except BaseException:
                readiness.close()
                raise
            self._readiness, self._has_readiness = readiness, True
        return self._readiness.fd

    def close(self) -> None:
        """End the call of another thread, drop an open reservation, tell the peer, and free the role."""
        if self._link:
            self._link()  # before the role, whose file it uses
        lib.fmq_stop(self.handle)  # first: a task that is resumed must find the end closed
        for readiness in (self._readiness, self._async_readiness):
            if readiness is not None:
                readiness.close()
        self._readiness, self._has_readiness, self._async_readiness = None, False, None
        with descriptors:  # when two threads close an end, neither returns before the role is free
            self._finalizer()

    def usable(self) -> Any:
        """Return the C core's end. Raise Closed."""
        if self._role.is_held:
            return self.handle
        raise Closed("this end is closed, or was opened before a fork; open the queue again in this process")

    def _new_readiness(self) -> ReadinessFd:
        """Return a descriptor that is closed before this end's memory is unmapped, also without a call of `close`."""
        readiness = ReadinessFd(self.usable())
        finalize_mapped(self, self._place, readiness.close)
        return readiness

    def rearm(self) -> None:
        """Make `fileno` readable or not, as it should be after a transfer. C code that transfers does not do that."""
        if self._readiness is not None:
            with contextlib.suppress(Busy, Closed):
                self._readiness.arm(1)

    async def _until(self, n: int) -> None:
        if self._async_readiness is None or self._async_readiness.is_abandoned:
            self._async_readiness = self._new_readiness()
        await self._async_readiness.ready(n)

    def _refuse(self, code: int, what: str, n: int) -> NoReturn:
        if code == -errno.EMSGSIZE:
            raise ValueError(
                f"n={n}: the queue's capacity is {self.capacity} elements; make a larger queue or use parts"
            )
        if code == -errno.EOVERFLOW:
            lost, position = lib.fmq_lost(self.handle), self.position
            raise Overrun(lost, position)
        if code == -errno.EROFS:
            raise ValueError(
                "timeout: a reader without write access cannot announce that it sleeps; pass timeout=0 "
                "(or use try_read), or open the queue writable"
            )
        if self.broadcasts and self._which == WRITER and -code in (errno.EAGAIN, errno.ETIMEDOUT):
            self._name_the_slowest(code, what)
        raise_errno(code, what)

    def _name_the_slowest(self, code: int, what: str) -> None:
        """Raise a Timeout that says for which living reader a broadcast writer waited."""
        alive = [reader for reader in readers_of(self.handle) if reader.is_alive]
        if not alive:
            return
        slowest = min(alive, key=lambda reader: reader.position)
        try:
            raise_errno(code, what)
        except Timeout as error:
            told = f"process {slowest.pid} has {slowest.unread} elements unread and holds the writer up"
            named = Timeout(f"{error}; {told}; wait for it, or evict it")
            named.reader = slowest
            raise named from None


def _span(ring: NDArray[Any], start: int, first: int, second: int) -> Span:
    return Span(ring[start : start + first], ring[:second])


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes of a C-contiguous array. Not all dtypes have the buffer protocol; dates do not."""
    return np.asarray(array).reshape(-1).view(np.uint8)


def _why_unfit(out: Any, n: int, dtype: np.dtype[Any]) -> str:
    """Say why n elements cannot be read into `out`, or ""."""
    if not isinstance(out, np.ndarray):
        return f"a {type(out).__name__} is no numpy array; pass numpy.empty({n}, {str(dtype)!r})"
    if out.dtype != dtype:
        return f"its dtype is {out.dtype}, the queue's {dtype}; make it with that one"
    if out.size != n:
        return f"it has {out.size} elements, and n={n} are read; pass out[:{n}], or another n"
    if not out.flags.c_contiguous:
        return "it is not C-contiguous; read into one that is, and copy"
    return "" if out.flags.writeable else "it is read-only; pass one that may be written"


class MessageQueueWriter(_End, HotWriter):
    """The writing end."""

    _which = WRITER

    def _write(self, elements: ArrayLike, timeout: float | None) -> None:
        """`write` of what is no plain array of the queue's dtype."""
        array = converted(elements, self.dtype)
        self._transfer("write", _bytes_of(array), array.size, timeout)

    def _try_write(self, elements: ArrayLike) -> bool:
        try:
            self._write(elements, 0)
        except Timeout:
            return False
        return True

    async def write_async(self, elements: ArrayLike) -> None:
        """Write as `write` does, for asyncio. Nothing is written when the task is cancelled."""
        array = converted(elements, self.dtype)
        while not self.try_write(array):
            await self._until(array.size)

    @property
    def readers(self) -> tuple[ReaderState, ...]:
        """The readers of a broadcast queue that have come and not left, in the order of their seats. Any thread."""
        if not self.broadcasts:
            raise ValueError("readers: only the writer of a broadcast queue knows its readers")
        return readers_of(self.usable())

    def evict(self, reader: ReaderState) -> None:
        """Go on without this reader of a broadcast queue, whose next call raises Evicted. Any thread; nothing happens
        to a reader that has left, or that came later to the same place.
        """
        if code := lib.fmq_evict(self.usable(), reader.seat, reader.turn):
            raise ValueError(f"reader={reader}: no reader of this queue; take one of `readers` ({os.strerror(-code)})")


class MessageQueueReader(_End, HotReader):
    """The reading end."""

    _which = READER

    def _read(self, n: int, timeout: float | None, out: NDArray[Any] | None) -> NDArray[Any]:
        """`read` where C does not know the array as it is."""
        array: NDArray[Any] = np.empty(n, self.dtype) if out is None else out
        if why := _why_unfit(array, n, self.dtype):
            raise ValueError(f"out: {why}")
        self._transfer("read", _bytes_of(array), n, timeout)
        return array

    def _try_read(self, n: int) -> NDArray[Any] | None:
        try:
            return self._read(n, 0, None)
        except Timeout:
            return None

    async def read_async(self, n: int) -> NDArray[Any]:
        """Read as `read` does, for asyncio. Nothing is taken when the task is cancelled."""
        while (elements := self.try_read(n)) is None:
            await self._until(n)
        return elements

    def keep_latest(self, n: int) -> None:
        """Make the n newest elements of an unsynchronized queue unread, or as many as there are, and no others.

        A new reader begins with none: it sees what is written after it was made.
        """
        if n < 0:
            raise ValueError(f"n={n}: a number of elements")
        code = lib.fmq_keep_latest(self.usable(), min(n, self.capacity))
        if code == -errno.EINVAL:
            raise ValueError("keep_latest: only readers of an unsynchronized queue can skip or go back")
        self.rearm()
        if code:
            raise_errno(code, "keep_latest")
