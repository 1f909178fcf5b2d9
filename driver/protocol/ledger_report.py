"""What accounts and applications hold in a process of a device, as it tells: the answer to `ledger`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_AT_ONCE = 100  # rows in one answer, which then fits a message


class LedgerRow(NamedTuple):
    """A row of a ledger: what an application of an account holds, and has spent since it began.

    Its name is None in the row of all applications of the account, where memory that they share counts once.
    """

    uid: int
    application: str | None
    held: Mapping[str, int]
    spent: Mapping[str, float]


class FigureLimits(NamedTuple):
    """How much of one figure an application, an account and all together may hold."""

    application: int
    account: int
    device: int


class LedgerReport(NamedTuple):
    """The rows that a client may see: of its own account; of all for root and the device's account."""

    limits: Mapping[str, FigureLimits]
    rows: Sequence[LedgerRow]

    def page(self, start: int) -> list[Any]:
        """Return a message: how many rows there are, the limits, and the rows from number `start` on."""
        return [len(self.rows), dict(self.limits), [list(row) for row in self.rows[start : start + _AT_ONCE]]]

    @classmethod
    def read(cls, call: Callable[..., tuple[list[Any], list[int]]], process: str, **options: Any) -> LedgerReport:
        """Ask by `call(method, …)` for all pages. `process`: "engine" or "service"."""
        rows: list[LedgerRow] = []
        while True:
            (total, limits, found), _ = call("ledger", process, len(rows), **options)
            rows += [LedgerRow(*row) for row in found]
            if not found or len(rows) >= total:
                return cls({figure: FigureLimits(*most) for figure, most in limits.items()}, rows)

    def shares(self, row: LedgerRow) -> list[tuple[str, int, int]]:
        """Figure, what that row holds, and what it may hold; the fullest first."""
        which = 1 if row.application is None else 0
        found = [
            (figure, held, self.limits[figure][which]) for figure, held in row.held.items() if figure in self.limits
        ]
        return sorted(found, key=lambda share: -share[1] / share[2])
