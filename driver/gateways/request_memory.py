"""The memory of requests, bounded before anything decodes them.

A few bytes can become many: two of JSON a list of 64. So what a request that is not
small can become at most is estimated without decoding it, claimed for its machine or account, and refused where it is
more than one may have, or than is left.
"""

from __future__ import annotations

import json
import mmap
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from driver.gateways.refusal import Refusal, RefusalCode
from driver.libc import function

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

SMALL = 16 << 10  #: bytes of a request whose memory is not counted
OF_ONE, OF_ALL = 1 << 30, 3 << 29  #: bytes that one machine or account may have, and all at an address
_WITHIN = 10.0  # seconds for others' requests to leave room
_EVERY = 5.0  # seconds between two looks at this process's memory
LARGE = 64 << 20  #: bytes: having grown by so many, the process gives back what the C library keeps
_OF_JSON = {b"{": 400, b":": 150, b"[": 96, b",": 96}  # bytes of what such a byte can begin, in 64-bit CPython
_OF_TWO, _OF_FOUR = 0xC4, 0xF0  # the least first bytes in UTF-8 of characters that take so many bytes in CPython
_CHUNK = 1 << 20
malloc_trim = function("malloc_trim", "int(*)(size_t pad)")


class RequestMemory:
    """The memory of the requests at one address. Any thread."""

    def __init__(
        self,
        of_one: int = OF_ONE,
        of_all: int = OF_ALL,
        advice: str = "send tensors as raw bytes, or in shared memory",
    ) -> None:
        """`advice`: for clients whose request is too large."""
        self._advice = advice
        self._of_one, self._of_all, self._changed = of_one, of_all, threading.Condition()
        self._held: Counter[Hashable] = Counter()
        self._aside: Counter[Hashable] = Counter()  # of requests that wait for more

    def add(self, account: Hashable, nbytes: int) -> None:
        """Claim bytes for an account now. Raise Refusal."""
        with self._changed:
            its, alls = self._held[account] + self._aside[account], self._held.total() + self._aside.total()
            if its + nbytes > self._of_one or alls + nbytes > self._of_all:
                raise self._no_room(account, nbytes)
            self._held[account] += nbytes

    def exchange(self, account: Hashable, held: int, nbytes: int, within: float) -> None:
        """Claim `nbytes` in the place of the bytes held, waiting so many seconds for others' to be given back. Raise
        Refusal.

        What waiting requests hold is set aside meanwhile: they wait for those that run, not for each other.
        """
        if nbytes > self._of_one:
            raise Refusal(
                RefusalCode.RESOURCE_EXHAUSTED,
                f"this request can take {nbytes >> 20} MiB of memory when it is decoded; at most {self._of_one >> 20} "
                f"are given: {self._advice}",
            )

        def has_room() -> bool:
            return self._held[account] + nbytes <= self._of_one and self._held.total() + nbytes <= self._of_all

        with self._changed:
            self._move(self._held, self._aside, account, held)
            try:
                may_wait = self._aside[account] <= self._of_one // 2 and self._aside.total() <= self._of_all // 2
                if not self._changed.wait_for(has_room, within if may_wait else 0.0):
                    raise self._no_room(account, nbytes)
                self._held[account] += nbytes - held
            finally:
                self._move(self._aside, self._held, account, held)

    @property
    def claimed(self) -> int:
        """Bytes that all requests have claimed."""
        with self._changed:
            return self._held.total() + self._aside.total()

    def _no_room(self, account: Hashable, nbytes: int) -> Refusal:
        its, alls = self._held[account] + self._aside[account], self._held.total() + self._aside.total()
        return Refusal(
            RefusalCode.RESOURCE_EXHAUSTED,
            f"requests of yours hold {its >> 20} MiB of {self._of_one >> 20}, and all {alls >> 20} of "
            f"{self._of_all >> 20}: there is no room for {nbytes >> 20} more; send this one again later",
        )

    def _move(self, source: Counter[Hashable], target: Counter[Hashable], account: Hashable, nbytes: int) -> None:
        if not nbytes:
            return
        target[account] += nbytes
        source[account] -= nbytes
        if not source[account]:
            del source[account]
        self._changed.notify_all()

    def give_back(self, account: Hashable, nbytes: int) -> None:
        """Give up a claim, or a part of it."""
        with self._changed:
            self._move(self._held, Counter(), account, nbytes)


class MemoryClaim:
    """A request's part of a `RequestMemory`: `with` it."""

    def __init__(self, memory: RequestMemory, account: Hashable = None) -> None:
        self._memory, self.account, self._nbytes = memory, account, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._nbytes:
            self.give_back(self._nbytes)

    def give_back(self, nbytes: int) -> None:
        """Give up so much of it."""
        self._memory.give_back(self.account, nbytes)
        self._nbytes -= nbytes

    def add(self, nbytes: int) -> None:
        """Claim further bytes if there is room now. Raise Refusal."""
        self._memory.add(self.account, nbytes)
        self._nbytes += nbytes

    def wait_for(self, nbytes: int, within: float = _WITHIN) -> None:
        """Claim further bytes, and wait for room, in which time this claim keeps nobody waiting. Raise Refusal."""
        self._memory.exchange(self.account, self._nbytes, self._nbytes + nbytes, within)
        self._nbytes += nbytes


class MemoryReturn:
    """Returns to the system what the C library keeps of freed memory, in a thread: after calls of large messages that
    were given up it kept 1.4 GiB.
    """

    def __init__(self, every: float = _EVERY, trim: Callable[[int], object] | None = malloc_trim) -> None:
        self._every, self._trim = every, trim
        self._end, self._least = threading.Event(), resident()
        self._thread = threading.Thread(target=self._run, name="burst-oip-memory", daemon=True)

    def begin(self) -> None:
        """Look now and then from now on."""
        if self._trim:
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while self._trim and not self._end.wait(self._every):
            if resident() > self._least + LARGE:
                self._trim(0)
                self._least = resident()


def resident() -> int:
    """Return how many bytes of this process are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def json_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body, which `json_bytes` bounds. Raise ValueError, with words for the client."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("the body is not valid JSON") from None
    if isinstance(found, dict):
        return found
    raise ValueError("the body is not a JSON object")


def json_bytes(body: bytes) -> int:
    """Return how many bytes JSON takes at most once it is decoded: its text, and the values.

    CPython gives all characters of a text the width of the widest. While a string with escapes grows, there is a second
    copy of it.
    """
    signs, found, top = np.frombuffer(body, np.uint8), 0, 0
    for begin in range(0, len(signs), _CHUNK):
        chunk = signs[begin : begin + _CHUNK]
        found += sum(size * int(np.count_nonzero(chunk == sign[0])) for sign, size in _OF_JSON.items())
        top = max(top, int(chunk.max()))
    width = 4 if top >= _OF_FOUR else 2 if top >= _OF_TWO else 1
    return found + len(body) * (width + 2 * (4 if b"\\u" in body else width))
