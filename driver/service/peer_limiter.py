"""The visits of peers to one door, connections or calls: a bounded number, fairly shared by accounts.

A peer that connects and then says nothing, or one byte now and then, holds its place until a deadline. So that such
peers keep no others out, each account has a share of the places, and where they are all taken a newcomer takes the one
of a visit that waits for its peer: of its own account when that has its share, else of the account with the most. No
account loses a place to one that has more. A probe makes its request at once, and is not in reach of that rule for
longer; nor is a visit whose request has arrived.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable


class PeerVisit:
    """A connection or a call of a peer."""

    def __init__(self, account: Hashable, end: Callable[[], object], asks: Callable[[], bool]) -> None:
        """`end` ends the visit; it must not wait, and does no harm when done twice. `asks`: True if a whole request is
        there, unread.
        """
        self.account, self.end, self.asks = account, end, asks
        self.deadline: float | None = None  #: monotonic seconds; None: while nothing is awaited from the peer
        self.yields_from = self.yields_to_others_from = 0.0
        """Monotonic seconds from when a newcomer of the same account may take this place, and one of an account with
        fewer places. An account without a place need not wait. `math.inf`: no newcomer may.
        """
        self.is_evicted = False

    def work(self) -> None:
        """Note that its request is complete: nothing is awaited from the peer, and no newcomer takes its place."""
        self.deadline = None
        self.stay()

    def stay(self) -> None:
        """Note that no newcomer takes its place. Its deadline goes on."""
        self.yields_from = self.yields_to_others_from = math.inf

    def wait(self, seconds: float, *, yields_in: float = 0.0, to_others_in: float = 0.0) -> None:
        """Give the peer so many seconds from now, and its place to another one of its account after `yields_in`."""
        now = time.monotonic()
        self.deadline, self.yields_from = now + seconds, now + yields_in
        self.yields_to_others_from = max(now + to_others_in, math.inf if yields_in == math.inf else 0.0)


class PeerLimiter:
    """A limiter of the visits to one door. Safe from any thread."""

    @classmethod
    def of_one(cls, most: int) -> PeerLimiter:
        """Return a limiter of which one account has so many places, and all together half as many again."""
        return cls(of_all(most), most)

    def __init__(self, most: int, most_of_account: int) -> None:
        self._most, self._share = most, most_of_account
        self._all: dict[PeerVisit, None] = {}  # in the order of their arrival
        self._present: Counter[Hashable] = Counter()  # by account, without those that were evicted
        self._lock = threading.Lock()

    def enter(
        self, account: Hashable, end: Callable[[], object], asks: Callable[[], bool] = lambda: False
    ) -> PeerVisit | None:
        """Count a new visit, if need be in the place of another; None if there is no place: end it then."""
        with self._lock:
            if len(self._all) >= 2 * self._most:  # those that were evicted have not left yet
                return None
            if not self._make_room(account):
                return None
            visit = PeerVisit(account, end, asks)
            self._all[visit] = None
            self._present[account] += 1
            return visit

    def _make_room(self, account: Hashable) -> bool:
        its, now = self._present[account], time.monotonic()
        is_full, has_share = self._present.total() >= self._most, its >= self._share
        if not is_full and not has_share:
            return True

        def yields(visit: PeerVisit) -> bool:
            if visit.account == account:
                return visit.yields_from <= now
            begin = visit.yields_to_others_from
            return not has_share and self._present[visit.account] > its and (begin <= now if its else begin < math.inf)

        waiting = [each for each in self._all if not each.is_evicted and yields(each) and not each.asks()]
        if not waiting:
            return False
        oldest = min(waiting, key=lambda each: (-self._present[each.account], each.yields_from))
        oldest.is_evicted = True
        self._forget(oldest)
        oldest.end()
        return True

    def _forget(self, visit: PeerVisit) -> None:
        self._present[visit.account] -= 1
        if not self._present[visit.account]:
            del self._present[visit.account]

    def leave(self, visit: PeerVisit) -> None:
        """Forget a visit that has ended."""
        with self._lock:
            if self._all.pop(visit, visit) is None and not visit.is_evicted:
                self._forget(visit)

    @property
    def is_empty(self) -> bool:
        """True if there is no visit."""
        return not self._all

    @property
    def is_working(self) -> bool:
        """True if the server works for any."""
        with self._lock:
            return any(each.deadline is None for each in self._all)

    def evict(self, count: int) -> int:
        """End up to so many visits that wait for their peer; return their number.

        Each is of the account that has most of them, and there the one whose time is over first.
        """
        with self._lock:
            waiting = [each for each in self._all if each.deadline is not None and not each.is_evicted]
            waiting.sort(key=lambda each: each.deadline or math.inf)
            evicted = list[PeerVisit]()
            for _ in range(min(count, len(waiting))):
                most = max(waiting, key=lambda each: self._present[each.account])
                waiting.remove(most)
                most.is_evicted = True
                self._forget(most)
                evicted.append(most)
        for visit in evicted:
            visit.end()
        return len(evicted)

    def end_overdue(self) -> int:
        """End the visits whose deadline has passed; return their number. Call it now and then."""
        now = time.monotonic()
        with self._lock:
            overdue = [each for each in self._all if each.deadline is not None and each.deadline <= now]
        for visit in overdue:
            visit.end()
        return len(overdue)


def of_all(of_one: int) -> int:
    """Return how many places there are, of which one account may have `of_one`."""
    return of_one + of_one // 2
