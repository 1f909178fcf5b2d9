"""The ledger: what each application of each account holds in this process, and how much of everything it may hold.

A device's tables belong to the process: descriptors, mappings, threads, life words. A client that fills one stops all
others, so what a client makes is *taken* from the ledger first, by the application and the account that it is for, and
given back when it is gone. What exceeds the limit of an account, or three quarters of it for one application, is
refused with the figure; what all accounts together may take leaves the process a reserve of its own.

What is gone once it was used, seconds of preparation, is *spent*: the ledger adds it up, and refuses nothing.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from functools import cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Self
from weakref import WeakValueDictionary

from burst import ResourceExhaustedPersistent, ResourceExhaustedTransient, StatusError
from driver.engine.limits import or_raise
from driver.protocol.ledger_report import LedgerReport, LedgerRow

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

    from driver.engine.limits import Limits

FIGURES = {
    "bytes": "bytes of buffers, temporaries and models, and of what the device keeps for clients",
    "pool_bytes": "bytes of memory pools",
    "engine_bytes": "bytes of the engine's private memory, which its service measures",
    "runtime_bytes": "bytes of the engine's private memory that no client accounts for",
    "gpu_bytes": "bytes of a GPU's memory in buffers and bound requests",
    "descriptors": "open descriptors",
    "mappings": "mappings",
    "threads": "threads",
    "life_words": "words that tell of this process's death",
    "guards": "mappings of memory that a client can truncate",
}
"""What is held, and what it counts."""

PRICES: Mapping[str, Mapping[str, int]] = {
    "client": {"descriptors": 1, "mappings": 2, "threads": 1, "bytes": 48 << 10},
    "lane socket": {"descriptors": 2, "mappings": 3, "threads": 1, "life_words": 1, "bytes": 40 << 10},
    "launches": {"descriptors": 2, "mappings": 2, "threads": 1, "bytes": 32 << 10},
    "launch thread": {"mappings": 2, "threads": 1, "bytes": 32 << 10},
    "fenced execution": {"descriptors": 1, "bytes": 2048},
    "burst": {"descriptors": 6, "mappings": 10, "threads": 1, "life_words": 1, "bytes": 88 << 10},
    "pool": {"mappings": 2},
    "model": {"mappings": 2},
    "buffer": {"bytes": 2800},
    "plan": {"bytes": 1024},
    "slot": {"bytes": 1024},
    "connection": {"descriptors": 3, "mappings": 3, "threads": 1, "life_words": 1, "bytes": 80 << 10},
}
"""What each thing of a client's costs the engine; a connection costs the service. A thread is two mappings, its stack
and the page below it.

Not counted is what the C library shares among threads: its arenas, at most eight for each processor, of two mappings.
"""


@cache
def price(kind: str, **more: int) -> Mapping[str, int]:
    """Return what a thing of that kind costs, and `more`."""
    found = Counter(PRICES[kind])
    found.update(more)
    return MappingProxyType(dict(found))


SPENT = ("preparing_seconds", "validating_seconds")


class Claim:
    """A count of something of a client's. It is given back once: by hand, by `with`, or with the last reference."""

    __slots__ = ("__weakref__", "_give_back")

    def __init__(self, give_back: Callable[[], object]) -> None:
        self._give_back: Callable[[], object] | None = give_back

    def give_back(self) -> None:
        """Give back what it counted. From any thread, and from a finalizer; a second call does nothing."""
        give_back, self._give_back = self._give_back, None
        if give_back:
            give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def __del__(self) -> None:
        with suppress(AttributeError):
            if self._give_back:
                self.give_back()


class _Level:
    """A level of the three that each claim counts for: an application, an account, and all."""

    def __init__(self) -> None:
        self.held: dict[str, int] = dict.fromkeys(FIGURES, 0)
        self.spent: dict[str, float] = {}
        self.shared: Counter[Hashable] = Counter()  #: how often each shared memory is held

    def row(self, uid: int, name: str | None) -> LedgerRow:
        held = {figure: there for figure, there in self.held.items() if there > 0}
        return LedgerRow(uid, name, held, dict(self.spent))


class Holder(_Level):
    """An application of one account. It exists as long as a client or a claim of it."""

    def __init__(self, account: Account, name: str) -> None:
        super().__init__()
        self.account, self.name = account, name

    def take(self, remedy: str, **figures: int) -> Claim:
        """Count what a client is about to make, all of it or nothing.

        remedy: what the client itself can do, for the error. Raise ResourceExhausted* with the figure.
        """
        self.account.ledger.count(self, remedy, figures)
        return Claim(partial(self.account.ledger.uncount, self, figures))

    def hold(self, remedy: str, key: Hashable, nbytes: int) -> Claim:
        """Count bytes that are there already, once for each application, account and for all, however many hold them.

        Raise ResourceExhausted*.
        """
        return self.account.ledger.hold(self, remedy, key, nbytes)

    def spend(self, figure: str, amount: float) -> None:
        """Add up what is gone: one of SPENT."""
        self.account.ledger.spend(self, figure, amount)


class Account(_Level):
    """The applications of one account."""

    def __init__(self, ledger: Ledger, uid: int) -> None:
        super().__init__()
        self.ledger, self.uid = ledger, uid
        self._holders: WeakValueDictionary[str, Holder] = WeakValueDictionary()

    def application(self, name: str = "") -> Holder:
        """Return the holder of that name; "" is the account's own."""
        with self.ledger.lock:
            found = self._holders.get(name)
            if found is None:
                found = self._holders[name] = Holder(self, name)
            return found

    def note(self, figure: str, held: int) -> None:
        """Note how much it holds of a figure that is measured, and not counted."""
        self.held[figure] = held

    def holders(self) -> list[Holder]:
        """Return its applications that hold something, or have clients."""
        return list(self._holders.values())


class Ledger(_Level):
    """The ledger of one process. Safe from any thread."""

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self.limits = limits
        self.lock = threading.RLock()  # a finalizer may give back while this thread holds it
        self._accounts: dict[int, Account] = {}
        self._most = limits.figures()

    def account(self, uid: int) -> Account:
        """Return the account with that number."""
        with self.lock:
            return self._accounts.setdefault(uid, Account(self, uid))

    def rows(self, uid: int | None = None) -> list[LedgerRow]:
        """Return what one account holds, or each: all of it, then its applications."""
        with self.lock:
            rows: list[LedgerRow] = []
            for account in self._accounts.values():
                if uid in {None, account.uid}:
                    rows.append(account.row(account.uid, None))
                    rows += [h.row(account.uid, h.name) for h in account.holders()]
            return rows

    def report(self, uid: int | None) -> LedgerReport:
        """Return what accounts hold, as `rows` does, with the limits."""
        return LedgerReport(self._most, self.rows(uid))

    def count(self, holder: Holder, remedy: str, figures: Mapping[str, int]) -> None:
        """Count these for a holder, until `uncount`. Raise ResourceExhausted*."""
        its, accounts, all_held, most = holder.held, holder.account.held, self.held, self._most
        with self.lock:  # without calls: each fenced execution comes here
            for figure, more in figures.items():
                mine, of_account, of_device = most[figure]
                if (
                    its[figure] + more > mine
                    or accounts[figure] + more > of_account
                    or all_held[figure] + more > of_device
                ):
                    levels = holder, holder.account, self
                    self._check(levels, levels, remedy, figure=figure, more=more)
            for figure, more in figures.items():
                its[figure] += more
                accounts[figure] += more
                all_held[figure] += more

    def uncount(self, holder: Holder, figures: Mapping[str, int]) -> None:
        """Uncount these, which are gone."""
        its, accounts, all_held = holder.held, holder.account.held, self.held
        with self.lock:
            for figure, less in figures.items():
                its[figure] -= less
                accounts[figure] -= less
                all_held[figure] -= less

    def hold(self, holder: Holder, remedy: str, key: Hashable, nbytes: int) -> Claim:
        """Count bytes that are there already, as `Holder.hold` does."""
        levels = holder, holder.account, self
        with self.lock:
            new = [level for level in levels if not level.shared[key]]
            self._check(levels, new, remedy, figure="bytes", more=nbytes)
            _add(new, {"bytes": nbytes})
            for level in levels:
                level.shared[key] += 1
        return Claim(partial(self._let_go, holder, key, nbytes))

    def spend(self, holder: Holder, figure: str, amount: float) -> None:
        """Add up what is gone."""
        with self.lock:
            for level in (holder, holder.account):
                level.spent[figure] = level.spent.get(figure, 0) + amount

    def _let_go(self, holder: Holder, key: Hashable, nbytes: int) -> None:
        with self.lock:
            for level in (holder, holder.account, self):
                level.shared[key] -= 1
                if not level.shared[key]:
                    del level.shared[key]
                    _add([level], {"bytes": -nbytes})

    def _check(
        self, levels: tuple[Holder, Account, Ledger], new: Iterable[_Level], remedy: str, *, figure: str, more: int
    ) -> None:
        for n, (level, most) in enumerate(zip(levels, self._most[figure], strict=True)):
            if level.held[figure] + more > most and level in new:
                raise self._refusal(n, remedy, figure=figure, more=more, there=level.held[figure])

    def _refusal(self, level: int, remedy: str, *, figure: str, more: int, there: int) -> StatusError:
        most, account = self._most[figure][level], self._most[figure].account
        whose = ("this application has", "this account has", "all accounts have")[level]
        name = f"device_{figure}" if level == 2 else f"account_{figure}"
        words = f"{name} = {most if level == 2 else account}"
        words = words if level else f"{self.limits.application_percent} % of {words}"
        kind = ResourceExhaustedPersistent if more > most else ResourceExhaustedTransient
        return kind(
            f"the limit {words} is reached: {whose} {there} {FIGURES[figure]} and asks for {more} more; "
            f"{remedy}{or_raise(name)}"
        )


def _add(levels: Iterable[_Level], figures: Mapping[str, int]) -> None:
    for level in levels:
        for figure, more in figures.items():
            level.held[figure] += more
