"""The import of memory that a client hands over into the engine: looked at, counted, and only then mapped.

Whatever way it takes (a burst's callback, a plain path, launched executions, copies of buffers), it is counted in the
ledger for as long as it is mapped. What has come one way and comes another is neither mapped nor counted again. From
another account, only fully allocated memory is mapped; holes would be charged to the engine, which touches them first.
A file on a disk is copied once, for reading.

The engine never blocks on a file: the thread that serves its client brings the pages of a file, before it waits for its
turn on the device, and without the GIL; another thread reads a copy, for a limited time.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakValueDictionary, finalize

from burst import GeneralFailure, HardwareBuffer, InvalidArgument, Malformed, Memory, ResourceExhaustedTransient
from burst.backing import Backing, backing_of, has_holes
from burst.channel import close_all, pack
from burst.memory import HardwareBufferBlob, MappedFd, VendorMemory
from burst.serving_thread import ServingThread
from driver.engine.driver_memory import DriverPool
from driver.engine.ledger import price
from fmq.errors import InvalidDescriptor
from fmq.region import memfd

if TYPE_CHECKING:
    from burst import Request
    from driver.engine.ledger import Claim
    from driver.engine.quota import Quota

_REMEDY = "free memory that the device knows"
_PRICE = price("pool")
_MOST_AT_ONCE = 1 << 30  # bytes
_SHARED = {Memory.kind, MappedFd.kind, HardwareBuffer.kind, HardwareBufferBlob.kind}


def bring_pages(request: Request) -> None:
    """Bring what a request reads and writes of files, before its thread holds or waits for anything of others."""
    files = {n: pool for n, pool in enumerate(request.pools) if isinstance(pool, Memory) and pool.is_file}
    for argument in (*request.inputs, *request.outputs) if files else ():
        if pool := files.get(argument.pool):
            pool.bring_pages(argument.offset, argument.length or pool.nbytes)


class MemoryImporter:
    """An importer of what one client hands over. Any thread."""

    def __init__(self, quota: Quota, patience: float, *, is_stranger: bool) -> None:
        """Begin. patience: seconds for reading a file. is_stranger: the client is of another account."""
        self._quota, self._is_stranger = quota, is_stranger
        self._copies = FileCopies(patience)
        self._mapped: WeakValueDictionary[tuple[int, int, bytes], Memory] = WeakValueDictionary()

    def __call__(self, plain: Any, fd: int) -> Memory:
        """Return the memory that `plain` describes, mapped. Owns `fd`.

        Raise InvalidArgument, GeneralFailure, ResourceExhausted*.
        """
        backing = backing_of(fd)
        if self._is_stranger:
            try:
                self._check(plain, fd, backing)
            except BaseException:
                close_all([fd])
                raise
            if backing is Backing.DISK:
                return self._copied(plain[1:], fd)
        # Other memory may have been truncated since: then zeros of this process lie where its pages were.
        is_sealed = _is_sealed(fd)
        name = _name_of(plain, fd) if is_sealed else None
        if name and (known := self._mapped.get(name)) is not None:
            close_all([fd])
            return known
        memory = self._taken(plain, fd, backing, is_sealed=is_sealed)
        if name:
            self._mapped[name] = memory
        return memory

    def _taken(self, plain: Any, fd: int, backing: Backing, *, is_sealed: bool) -> Memory:
        """Map it and count it. Owns `fd`. Raise as `__call__`."""
        claims: list[Claim] = []

        def admit(nbytes: int) -> None:
            figures = {**_PRICE, "pool_bytes": nbytes}
            if backing is Backing.DMA_BUF:
                figures["descriptors"] = 1
            elif not is_sealed:
                figures["guards"] = 1
            assert self._quota.holder
            claims.append(self._quota.holder.take(_REMEDY, **figures))

        try:
            memory = Memory.from_wire(plain, fd, admit)
        except BaseException:
            for claim in claims:  # here, because the error's traceback keeps them
                claim.give_back()
            raise
        memory.is_file = backing in {Backing.FILE, Backing.DISK}
        return _holding(memory, claims[0])

    def _check(self, plain: Any, fd: int, backing: Backing) -> None:
        """Raise InvalidArgument for memory with holes, GeneralFailure for what is not taken from another account."""
        match backing, plain:
            case (Backing.DMA_BUF, _):
                return
            case (Backing.MEMORY, _):
                if has_holes(fd):
                    raise InvalidArgument(
                        "the memory has holes: a device of another account takes memory with all its pages; write to "
                        "each page, or call posix_fallocate, before you hand it over"
                    )
            case (Backing.DISK, [MappedFd.kind, _, mmap.PROT_READ, _]):
                return
            case _:
                raise GeneralFailure(
                    "a device of another account takes shared memory (memfd, POSIX) and DMA-BUFs, and files on a local "
                    "disk for reading (PROT_READ); copy the rest to Memory.create(nbytes)"
                )

    def _copied(self, fields: list[Any], fd: int) -> Memory:
        """Return a copy of a part of a file. Owns `fd`. Raise GeneralFailure, ResourceExhausted*."""
        try:
            given = MappedFd.checked(fields, fd)
            nbytes = given["nbytes"]
            claim = self._quota.charge(nbytes, pool_bytes=nbytes, **_PRICE)
        except InvalidDescriptor as error:
            close_all([fd])
            raise GeneralFailure(f"{MappedFd.kind} cannot be read: {error}") from error
        except BaseException:
            close_all([fd])
            raise

        try:
            copy = self._copies(fd, given["offset"], nbytes, self._quota)
            memory = Memory.from_wire([MappedFd.kind, nbytes, mmap.PROT_READ, 0], copy)
        except BaseException:
            claim.give_back()
            raise
        return _holding(memory, claim)


class FileCopies:
    """A copier of parts of one client's files, one at a time, each in a thread of its own and for a limited time."""

    def __init__(self, patience: float) -> None:
        """Begin. patience: seconds for each, and for the one before it."""
        self._patience, self._free = patience, threading.Semaphore()

    def __call__(self, fd: int, offset: int, nbytes: int, quota: Quota) -> int:
        """Return the descriptor of the copy. Owns `fd`. Raise GeneralFailure, ResourceExhaustedTransient.

        A thread that hangs keeps the descriptor and its claim until it goes on, and no other begins before.
        """
        if not self._free.acquire(timeout=self._patience):
            close_all([fd])
            raise ResourceExhaustedTransient(
                f"reading another file of this client has taken more than {self._patience:g} s, and goes on"
            )
        outcome = _Outcome()
        try:
            claim = quota.take("wait for the other file", threads=1)
            arguments = fd, offset, nbytes, outcome, claim
            ServingThread(self._read, *arguments, name="file").start()
        except BaseException as error:
            self._free.release()
            close_all([fd])
            if isinstance(error, RuntimeError):
                raise ResourceExhaustedTransient(f"there is no thread to read a file: {error}") from error
            raise
        return outcome.within(self._patience)

    def _read(self, fd: int, offset: int, nbytes: int, outcome: _Outcome, claim: Claim) -> None:
        found, why = -1, ""
        try:
            try:
                found = _copy_of(fd, offset, nbytes)
            except OSError as error:
                why = str(error)
            close_all([fd])
        finally:
            self._free.release()
            claim.give_back()
            outcome.set(found, why)


class _Outcome:
    """An outcome that a thread has found, for one that waits a limited time."""

    def __init__(self) -> None:
        self._ended, self._deciding, self._is_late = threading.Event(), threading.Lock(), False
        self._fd, self._why = -1, ""

    def set(self, fd: int, why: str) -> None:
        """Set the descriptor. `fd`: below 0, there is none, and `why` says the reason."""
        with self._deciding:
            self._fd, self._why = fd, why
            self._ended.set()
            if self._is_late and fd >= 0:
                close_all([fd])

    def within(self, patience: float) -> int:
        """Return the descriptor. Raise GeneralFailure."""
        self._ended.wait(patience)
        with self._deciding:
            self._is_late = not self._ended.is_set()
        if self._is_late:
            raise GeneralFailure(f"the file was not read within {patience:g} s (file_seconds)")
        if self._fd < 0:
            raise GeneralFailure(f"the file cannot be read: {self._why}")
        return self._fd


def _copy_of(fd: int, offset: int, nbytes: int) -> int:
    """Return the descriptor of new memory with a copy. Raise OSError."""
    copy, done = memfd(nbytes), 0
    try:
        while done < nbytes:
            count = os.sendfile(copy, fd, offset + done, min(nbytes - done, _MOST_AT_ONCE))
            done += count or _cut_off(done, nbytes)
    except BaseException:
        os.close(copy)
        raise
    return copy


def _cut_off(done: int, nbytes: int) -> NoReturn:
    raise OSError(errno.ESTALE, f"it ended after {done} of {nbytes} bytes")


def _name_of(plain: Any, fd: int) -> tuple[int, int, bytes] | None:
    """Return what tells memory from all other memory while it is mapped; None for what only a driver knows."""
    match plain:
        case [str(kind), *_] if kind in _SHARED:  # a driver may want to hear of each of its own
            with suppress(OSError, Malformed, ValueError, TypeError, OverflowError):
                found = os.fstat(fd)
                return found.st_dev, found.st_ino, pack(plain)
    return None


def _is_sealed(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


def _holding(memory: Memory, claim: Claim) -> Memory:
    """Return the memory. Its claim ends when it is mapped no more, until when arrays on it may outlive it."""
    is_mapped = not isinstance(memory, DriverPool | VendorMemory)
    finalize(memory.base if is_mapped else memory, claim.give_back).atexit = False
    return memory
