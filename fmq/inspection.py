"""Inspecting named queues from outside: what they are, how full, and which roles are held. It writes nothing and wakes
no process.

The kernel says which roles are held: a process that takes a role locks a byte of the queue's memory (role.py), and we
ask whether that lock is free. The life word, which a peer could overwrite, only tells "released" from "dead".
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fmq._core import lib
from fmq.errors import InvalidDescriptor
from fmq.geometry import CONTROL, Flavour, Geometry
from fmq.readers import ReaderState, readers_seen
from fmq.region import Region
from fmq.role import LIFE_AT, READER, SEAT, SEATS, WRITER, is_taken

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

Life = Literal["nobody", "alive", "released", "dead"]
HEAD_AT, BEGIN_AT, TAIL_AT = 128, 136, 256  # csrc/fmq/layout.h
_MAGIC = b"BURSTFMQ"
_FOLDER = Path("/dev/shm")
_UNLOCKED: tuple[Life, ...] = ("nobody", "dead", "released", "dead")  # by life word; without a lock "alive" is a lie
_LOOKS = 1000  # attempts to read two counters that belong together


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """A named queue at one moment. With `damage` it has no dtype, no flavour and zeros for numbers."""

    name: str
    dtype: np.dtype[Any] | None
    capacity: int  #: elements
    flavour: Flavour | None
    nbytes: int  #: of shared memory, control page included
    mode: int  #: permissions, 0o600 unless they were changed
    uid: int  #: its owner
    created: float  #: seconds since the epoch
    written: int  #: elements, over the queue's life
    read: int | None  #: None: each reader has a position of its own, and (broadcast) none is there
    unread: int | None
    writer: Life
    reader: Life  #: of a queue with many: "alive" while at least one is there, else "nobody"
    damage: str | None = None  #: why it cannot be opened
    readers: tuple[ReaderState, ...] = ()  #: of a broadcast queue; `read` and `unread` are the slowest one's

    @property
    def is_stale(self) -> bool:
        """True if both sides are gone, and at least one had been there. Open the queue to continue, or unlink it."""
        return "alive" not in self.who and self.who != ("nobody", "nobody")

    @property
    def who(self) -> tuple[Life, Life]:
        """The states of writer and reader."""
        return self.writer, self.reader


def inspect(name: str) -> QueueInfo:
    """Return the state of a named queue now. Raise FileNotFoundError, PermissionError, InvalidDescriptor."""
    with contextlib.closing(Region.open(name, writable=False)) as region:
        return _seen(name, region)


def queues() -> list[QueueInfo]:
    """Return this user's named queues, sorted. Memory that begins like a queue and cannot be opened has `damage`."""
    return sorted(_found(), key=lambda info: info.name)


def why_taken(name: str) -> str:
    """Say, of a name that is taken, what has it and what to do."""
    try:
        info = inspect(name)
    except ImportError as error:
        return f"name={name!r} is taken, and nothing more can be said: {error}"
    except (OSError, InvalidDescriptor) as error:
        return f"name={name!r} is taken, and not by a queue that can be used ({error}); fmq.unlink it or choose another"
    there = f"the writer is {_told(info.writer)}, the reader is {_told(info.reader)}"
    if info.is_stale:
        left = f", {info.unread} elements are unread" if info.unread else ""
        return f"name={name!r} is taken by a stale queue ({there}{left}); open it to go on, or fmq.unlink it first"
    if "alive" in info.who:
        return f"name={name!r} is taken by a queue in use ({there}); open it, or choose another name"
    return f"name={name!r} is taken by a queue that was never used; open it, or fmq.unlink it first"


def _told(life: Life) -> str:
    return {"nobody": "yet to come", "released": "gone"}.get(life, life)


def _found() -> Iterator[QueueInfo]:
    with os.scandir(_FOLDER) as entries:
        names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    for name in names:
        try:
            if (info := _listed("/" + name)) is not None:
                yield info
        except OSError:
            continue  # it is gone, or we may not read it


def _listed(name: str) -> QueueInfo | None:
    """Return a file of /dev/shm; None when it is no queue of this user."""
    fd = os.open(_FOLDER / name[1:], os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or os.pread(fd, 8, 0) != _MAGIC:
        os.close(fd)
        return None
    with contextlib.closing(Region(fd, status.st_size, name=name, writable=False)) as region:
        try:
            return _seen(name, region)
        except InvalidDescriptor as error:
            writer, reader = lives_of(region) if status.st_size >= CONTROL else ("nobody", "nobody")
            return QueueInfo(
                name,
                dtype=None,
                capacity=0,
                flavour=None,
                nbytes=status.st_size,
                mode=stat.S_IMODE(status.st_mode),
                uid=status.st_uid,
                created=status.st_mtime,
                written=0,
                read=None,
                unread=None,
                writer=writer,
                reader=reader,
                damage=str(error),
            )


def _seen(name: str, region: Region) -> QueueInfo:
    geometry, status = Geometry.read(region, 0), os.fstat(region.fd)
    if CONTROL + geometry.ring_bytes > region.nbytes:
        raise InvalidDescriptor(f"{region.nbytes} bytes are too few for the queue that the control page describes")
    written, read = _counters(region, geometry)
    readers = readers_seen(region, 0, written) if geometry.flavour is Flavour.BROADCAST else ()
    if readers:
        read = min(written, *(reader.position for reader in readers))
    return QueueInfo(
        *(name, geometry.dtype, geometry.capacity, geometry.flavour, region.nbytes),
        *(stat.S_IMODE(status.st_mode), status.st_uid, status.st_mtime),
        *(written, read, None if read is None else written - read),
        *lives_of(region),
        readers=readers,
    )


def _counters(region: Region, geometry: Geometry) -> tuple[int, int | None]:
    """Return the elements written, and read. Both move while we read them: a pair is valid if the second one did not
    change.
    """
    if geometry.flavour is not Flavour.SYNCHRONIZED:
        return lib.fmq_glance(region.base + HEAD_AT), None
    for _ in range(_LOOKS):
        read: int = lib.fmq_glance(region.base + TAIL_AT)
        written: int = lib.fmq_glance(region.base + HEAD_AT)
        if read == lib.fmq_glance(region.base + TAIL_AT):
            if 0 <= written - read <= geometry.capacity:
                return written, read
            raise InvalidDescriptor(f"its counters contradict each other: {written} elements written and {read} read")
    return min(max(written, read), read + geometry.capacity), read  # the counters move too fast for an exact pair


def lives_of(region: Region) -> tuple[Life, Life]:
    """Writer and reader of the queue at the region's start."""
    writer, reader = (_life(region, which) for which in (WRITER, READER))
    return writer, reader


def _life(region: Region, which: int) -> Life:
    if is_taken(region.fd, 0, which) or (which == READER and is_taken(region.fd, 0, SEAT, SEATS)):
        return "alive"
    word: int = lib.fmq_life_state(region.base + LIFE_AT[which])
    return _UNLOCKED[word]
