"""The ledger: what each application of each account holds in this process, and how much of everything it may hold.

A device's tables belong to the process: descriptors, mappings, threads, life words. A client that fills one stops all
others, so what a client makes is *taken* from the ledger first, by the application and the account that it is for, and
given back when it is gone. What exceeds the limit of an account, or three quarters of it for one application, is
refused with the figure; what all accounts together may take leaves the process a reserve of its own.

What is gone once it was used, seconds of preparation and bytes of logs, is *spent*: the ledger adds it up, and refuses
nothing.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from weakref import WeakValueDictionary

from burst import ResourceExhaustedTransient
from driver.engine.limits import raised

if TYPE_CHECKING:
    from collections.abc import Mapping

    from driver.engine.limits import Limits

FIGURES = {
    "pools": "memory pools of clients that are mapped",
    "pool_bytes": "their bytes",
    "descriptors": "open descriptors",
    "mappings": "mappings",
    "threads": "threads",
    "life_words": "words that tell of this process's death",
    "guards": "mappings of memory that a client can truncate",
    "plans": "requests that stay bound",
    "models": "prepared models",
    "buffers": "buffers of the device",
    "fences": "fences that executions wait for",
}
"""What is held, and what it counts."""

PRICES: Mapping[str, Mapping[str, int]] = {
    "client": {"descriptors": 1, "mappings": 2, "threads": 1},
    "plain path": {"descriptors": 2, "mappings": 3, "threads": 1, "life_words": 1},
    "burst": {"descriptors": 6, "mappings": 10, "threads": 1, "life_words": 1},
    "launches": {"descriptors": 4, "mappings": 5, "threads": 2, "life_words": 1},
    "pool": {"mappings": 2},
}
"""What each thing of a client's costs the engine. A thread is two mappings: its stack, and the page below it.

Not counted is what the C library shares among threads: its arenas, at most eight for each processor, of two mappings.
"""

SPENT = ("preparing_seconds", "validating_seconds", "log_bytes")


class LedgerRow(NamedTuple):
    """What one application of an account holds, and has spent since the device started."""

    uid: int
    application: str
    held: Mapping[str, int]
    spent: Mapping[str, float]


class Claim:
    """Something of a client's, counted. It is given back once: by hand, by `with`, or with the last reference."""

    __slots__ = ("__weakref__", "_figures", "_holder")

    def __init__(self, holder: Holder, figures: Mapping[str, int]) -> None:
        self._holder: Holder | None = holder
        self._figures = figures

    def give_back(self) -> None:
        """What it counted is gone. From any thread, and from a finalizer; a second call does nothing."""
        holder, self._holder = self._holder, None
        if holder:
            holder.account.ledger.give_back(holder, self._figures)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def __del__(self) -> None:
        with suppress(AttributeError):
            self.give_back()


class Holder:
    """One application of an account. It exists as long as a client or a claim of it."""

    def __init__(self, account: Account, name: str) -> None:
        self.account, self.name = account, name
        self.held: Counter[str] = Counter()
        self.spent: Counter[str] = Counter()

    def take(self, remedy: str, **figures: int) -> Claim:
        """Counts what a client is about to make, all of it or nothing.

        remedy: what the client itself can do, for the error. Raises ResourceExhaustedTransient with the figure.
        """
        self.account.ledger.take(self, remedy, figures)
        return Claim(self, figures)

    def spend(self, figure: str, amount: float) -> None:
        """Adds up what is gone: one of SPENT."""
        self.account.ledger.spend(self, figure, amount)


class Account:
    """All applications of one account."""

    def __init__(self, ledger: Ledger, uid: int) -> None:
        self.ledger, self.uid = ledger, uid
        self.held: Counter[str] = Counter()
        self._holders: WeakValueDictionary[str, Holder] = WeakValueDictionary()

    def application(self, name: str = "") -> Holder:
        """The holder of that name; "" is the account's own."""
        with self.ledger.lock:
            found = self._holders.get(name)
            if found is None:
                found = self._holders[name] = Holder(self, name)
            return found

    def holders(self) -> list[Holder]:
        """Its applications that hold something, or have clients."""
        return list(self._holders.values())


class Ledger:
    """Of one process. Any thread."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.lock = threading.RLock()  # a finalizer may give back while this thread holds it
        self._held: Counter[str] = Counter()
        self._accounts: dict[int, Account] = {}

    def account(self, uid: int) -> Account:
        """The account with that number."""
        with self.lock:
            return self._accounts.setdefault(uid, Account(self, uid))

    def rows(self, uid: int | None = None) -> list[LedgerRow]:
        """What the applications of one account hold, or of all."""
        with self.lock:
            holders = [h for a in self._accounts.values() if uid in {None, a.uid} for h in a.holders()]
            return [LedgerRow(h.account.uid, h.name, dict(+h.held), dict(h.spent)) for h in holders]

    def take(self, holder: Holder, remedy: str, figures: Mapping[str, int]) -> None:
        """Counts these for a holder. Raises ResourceExhaustedTransient."""
        with self.lock:
            for figure, more in figures.items():
                self._check(holder, remedy, figure, more)
            self._add(holder, figures)

    def give_back(self, holder: Holder, figures: Mapping[str, int]) -> None:
        """They are gone."""
        with self.lock:
            self._add(holder, {figure: -less for figure, less in figures.items()})

    def spend(self, holder: Holder, figure: str, amount: float) -> None:
        """Adds up what is gone."""
        with self.lock:
            spent: Any = holder.spent
            spent[figure] += amount

    def _add(self, holder: Holder, figures: Mapping[str, int]) -> None:
        for held in (holder.held, holder.account.held, self._held):
            held.update(figures)

    def _check(self, holder: Holder, remedy: str, figure: str, more: int) -> None:
        limits, percent = self._limits, self._limits.application_percent
        of_account: int = getattr(limits, name := f"account_{figure}")
        for whose, held, most, words in (
            ("this application has", holder.held, of_account * percent // 100, f"{percent} % of {name} = {of_account}"),
            ("this account has", holder.account.held, of_account, f"{name} = {of_account}"),
            (
                "all accounts have",
                self._held,
                all_of := getattr(limits, f"device_{figure}"),
                f"device_{figure} = {all_of}",
            ),
        ):
            if held[figure] + more > most:
                raise ResourceExhaustedTransient(
                    f"the limit {words} is reached: {whose} {held[figure]} {FIGURES[figure]} and asks for {more} "
                    f"more; {remedy}, or {raised(words.partition(' = ')[0].rpartition(' ')[2])}"
                )
