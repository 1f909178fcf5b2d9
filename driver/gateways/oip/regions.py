"""System shared memory that clients registered: adopted in place, counted, and given back.

The protocol has no sessions, so a table stands for an account: a Unix socket that lets in one account has one, and all
TCP addresses together have another if they are allowed any. A region ends when the client unregisters it, or when
nothing has used it for a while: a client that died cannot unregister.

A key is the name of a file in /dev/shm. It is one path component, opened without following links; the file is regular,
in memory, and of the table's account. All refusals have one text, so that a client learns nothing of files that are not
its own. What a client does to its file later does no harm: this process reads no byte of it, and the engine's mapping
is guarded (burst/memory.py).
"""

from __future__ import annotations

import mmap
import os
import stat
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self
from weakref import WeakSet

from burst import BurstError, Memory
from burst.backing import Backing, backing_of, has_holes
from driver.gateways.refusal import Refusal, RefusalCode, invalid, not_found
from fmq import FmqError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from driver.gateways.oip.lanes import Lane

_FOLDER = "/dev/shm"
_LONGEST = 255


class RegionLimits(NamedTuple):
    """The limits on what one account may have registered. idle: seconds that a region stays unused."""

    most: int = 256
    nbytes: int = 4 << 30
    idle: float = 3600.0


@dataclass(eq=False)
class SharedRegion:
    """A part of a client's shared memory, by the name that the client gave it.

    begin: of its first byte in `memory`, which begins on a page. users: requests that run on it. lanes: those that
    know its memory.
    """

    name: str
    key: str
    offset: int
    nbytes: int
    memory: Memory
    begin: int
    used: float
    users: int = 0
    is_ended: bool = False
    lanes: WeakSet[Lane] = field(default_factory=WeakSet)


class RegionSlice(NamedTuple):
    """A tensor's place: `nbytes` from `offset` on, counted from the beginning of the region."""

    region: str
    offset: int
    nbytes: int


class RegionWatcher(Protocol):
    """Is told of regions. Any thread."""

    def region_ready(self, region: SharedRegion) -> None:
        """Note a region before its client is told that it is registered."""

    def region_gone(self, region: SharedRegion) -> None:
        """Note a region that no request finds any more."""

    def region_used(self, region: SharedRegion) -> float:
        """Return when a request of its own last used a region: a time.monotonic()."""


class RegionTable:
    """The regions of one account. Any thread."""

    def __init__(self, uid: int, limits: RegionLimits = RegionLimits()) -> None:  # noqa: B008 (it is immutable)
        """`uid`: who has to own the files."""
        self._uid, self._limits, self._lock = uid, limits, threading.Lock()
        self._is_of_others = uid != os.getuid()
        self.watchers: list[RegionWatcher] = []
        self._regions: dict[str, SharedRegion] = {}
        self._nbytes = 0  # also of regions that have ended, while requests run on them
        self._count = 0

    def register(self, name: str, key: str, offset: int, nbytes: int) -> None:
        """Register a region. Raise Refusal."""
        if not name or len(name) > _LONGEST:
            raise invalid(f"a shared memory region needs a name of 1 to {_LONGEST} characters")
        self.expire()
        with self._lock:
            if name in self._regions:
                raise Refusal(
                    RefusalCode.ALREADY_EXISTS, f"shared memory region {name!r} is registered already; unregister it"
                )
            if not self._has_room(nbytes):
                raise _refused(name)
            self._nbytes += nbytes
            self._count += 1
        try:
            region = self._adopted(name, key, offset, nbytes)
        except (OSError, ValueError, BurstError, FmqError, MemoryError):
            self._give_back(nbytes)
            raise _refused(name) from None
        with self._lock:
            is_new = self._regions.setdefault(name, region) is region
            region.users += is_new  # its memory stays open until all have been told
        if not is_new:
            self._end(region)
            raise Refusal(RefusalCode.ALREADY_EXISTS, f"shared memory region {name!r} is registered already")
        for each in self.watchers:
            each.region_ready(region)
            if region.is_ended:  # by another connection, perhaps before this watcher knew it
                each.region_gone(region)
        self.leave(region)

    def _has_room(self, nbytes: int) -> bool:
        limits = self._limits
        return self._count < limits.most and 0 < nbytes <= limits.nbytes - self._nbytes

    def _give_back(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes -= nbytes
            self._count -= 1

    def _adopted(self, name: str, key: str, offset: int, nbytes: int) -> SharedRegion:
        """Map a region. Raise OSError, ValueError and what mapping raises."""
        fd = _opened(key)
        try:
            found = os.fstat(fd)
            is_own = found.st_uid == self._uid and stat.S_ISREG(found.st_mode) and backing_of(fd) is Backing.MEMORY
            if not is_own or offset < 0 or offset + nbytes > found.st_size:
                raise ValueError
            if self._is_of_others and has_holes(fd):  # the process that touches them pays
                raise ValueError
            begin = offset % mmap.PAGESIZE
            memory = Memory.from_fd(fd, begin + nbytes, offset=offset - begin)
        finally:
            os.close(fd)
        return SharedRegion(name, key, offset, nbytes, memory=memory, begin=begin, used=time.monotonic())

    def unregister(self, name: str) -> None:
        """Unregister one region, or all of them without a name. A region that requests run on goes on until they end.
        Unknown names are no error: Triton's server says so, and clients rely on it.
        """
        with self._lock:
            names = [name] if name else list(self._regions)
            ended = [region for each in names if (region := self._regions.pop(each, None))]
        for region in ended:
            self._end(region)

    def expire(self) -> None:
        """End the regions that nothing has used for a while."""
        before = time.monotonic() - self._limits.idle
        for region in self._unused_since(before):
            region.used = max(region.used, *(each.region_used(region) for each in self.watchers), 0.0)
        with self._lock:
            ended = [each for each in self._regions.values() if not each.users and each.used < before]
            for region in ended:
                del self._regions[region.name]
        for region in ended:
            self._end(region)

    def _unused_since(self, before: float) -> list[SharedRegion]:
        with self._lock:
            return [region for region in self._regions.values() if not region.users and region.used < before]

    def all(self) -> RegionUse:
        """Return every region. Its memory stays open until the block ends."""
        with self._lock:
            found = dict(self._regions)
            for region in found.values():
                region.users += 1
        return RegionUse(self, found)

    def status(self, name: str) -> list[SharedRegion]:
        """Return the region of that name, or all. Raise Refusal."""
        self.expire()
        with self._lock:
            if name and name not in self._regions:
                raise _unknown(name)
            return [self._regions[name]] if name else list(self._regions.values())

    def take(self, slices: Sequence[RegionSlice]) -> RegionUse:
        """Return the regions in which these lie, for one request. Raise Refusal for what is not inside its region."""
        with self._lock:
            found: dict[str, SharedRegion] = {}
            for each in slices:
                region = self._regions.get(each.region)
                if region is None:
                    raise _unknown(each.region)
                if each.offset < 0 or each.nbytes < 0 or each.offset + each.nbytes > region.nbytes:
                    raise invalid(
                        f"{each.nbytes} bytes at offset {each.offset} are not in shared memory region "
                        f"{each.region!r}, which has {region.nbytes}"
                    )
                found[each.region] = region
            for region in found.values():
                region.users += 1
        return RegionUse(self, found)

    def leave(self, region: SharedRegion) -> None:
        """Note that a request does not run on the region any more."""
        with self._lock:
            region.users -= 1
            region.used = time.monotonic()
            is_last = region.is_ended and not region.users
        if is_last:
            self._close(region)

    def _end(self, region: SharedRegion) -> None:
        with self._lock:
            region.is_ended = True
            region.users += 1
        for each in self.watchers:
            each.region_gone(region)
        self.leave(region)

    def _close(self, region: SharedRegion) -> None:
        for lane in list(region.lanes):
            lane.forget(region.memory)
        region.memory.close()
        self._give_back(region.nbytes)

    def close(self) -> None:
        """End all regions."""
        self.unregister("")


class RegionUse:
    """The regions of one request, until the block ends."""

    def __init__(self, table: RegionTable | None, regions: dict[str, SharedRegion]) -> None:
        """`table`: None where there are no regions."""
        self._table, self._regions = table, regions

    def __getitem__(self, name: str) -> SharedRegion:
        return self._regions[name]

    def __iter__(self) -> Iterator[SharedRegion]:
        return iter(self._regions.values())

    def note(self, lane: Lane) -> None:
        """Note that this lane will know the memory of the regions."""
        for region in self:
            region.lanes.add(lane)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._table:
            for region in self:
                self._table.leave(region)


NO_REGIONS = RegionUse(None, {})
"""Of a request whose tensors come in its message."""


def _opened(key: str) -> int:
    """Open a file in /dev/shm, whose owner names it as `shm_open` does. Raise OSError, ValueError."""
    word = key.removeprefix("/")
    if not word or len(word) > _LONGEST or "/" in word or "\0" in word or word in (".", ".."):
        raise ValueError
    # Without waiting: a FIFO of that name would keep the thread.
    return os.open(f"{_FOLDER}/{word}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)


def _refused(name: str) -> Refusal:
    return invalid(
        f"shared memory region {name!r:.80} is refused: its key has to name a file of /dev/shm (one path component, no "
        "link) that belongs to this address's account and holds offset + byte_size bytes, within the account's limits"
    )


def _unknown(name: str) -> Refusal:
    return not_found(f"there is no shared memory region {name!r:.80}; register it first (unused ones end)")
