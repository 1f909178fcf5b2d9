"""Answers that clients have not read, and that take memory of the server's until then."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


class EndAnswer(Protocol):
    """Ends the call of an answer. It must not wait. `is_evicted`: for the memory that unread answers take."""

    def __call__(self, *, is_evicted: bool) -> None: ...


@dataclass(eq=False)
class UnreadAnswer:
    """An answer. `until`: monotonic seconds. `has_ended`: its call is being ended, and may keep the memory still."""

    account: Hashable
    nbytes: int
    until: float
    end: EndAnswer
    has_ended: bool = False


class UnreadAnswers:
    """The unread answers of one address. Safe from any thread."""

    def __init__(self) -> None:
        self._all, self._lock = set[UnreadAnswer](), threading.Lock()

    def add(self, account: Hashable, nbytes: int, seconds: float, end: EndAnswer) -> UnreadAnswer:
        """Count an answer that its client is to read in so many seconds."""
        answer = UnreadAnswer(account, nbytes, time.monotonic() + seconds, end)
        with self._lock:
            self._all.add(answer)
        return answer

    def discard(self, answer: UnreadAnswer) -> None:
        """Forget an answer: it is read, or its call has ended."""
        with self._lock:
            self._all.discard(answer)

    @property
    def is_empty(self) -> bool:
        """True if there is none."""
        return not self._all

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        with self._lock:
            return sum(each.nbytes for each in self._all)

    def evict(self, nbytes: int) -> int:
        """End calls until so many bytes are or will be free; return their number.

        Each is of the account that has most bytes of unread answers, and there the one whose time is over first.
        """
        with self._lock:
            waiting, evicted = self._waiting(), list[UnreadAnswer]()
            held: Counter[Hashable] = Counter()
            for each in waiting:
                held[each.account] += each.nbytes
            nbytes -= sum(each.nbytes for each in self._all) - held.total()
            while nbytes > 0 and waiting:
                most = max(waiting, key=lambda each: (held[each.account], -each.until))
                waiting.remove(most)
                held[most.account] -= most.nbytes
                nbytes -= most.nbytes
                evicted.append(most)
        return _end_all(evicted, is_evicted=True)

    def end_overdue(self) -> int:
        """End the calls whose answer was not read in time; return their number. Call it now and then."""
        now = time.monotonic()
        with self._lock:
            overdue = [each for each in self._waiting() if each.until <= now]
        return _end_all(overdue, is_evicted=False)

    def _waiting(self) -> list[UnreadAnswer]:
        return [each for each in self._all if not each.has_ended]


def _end_all(answers: Sequence[UnreadAnswer], *, is_evicted: bool) -> int:
    for each in answers:
        each.has_ended = True
        each.end(is_evicted=is_evicted)
    return len(answers)
