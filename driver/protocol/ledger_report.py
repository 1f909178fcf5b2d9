"""What accounts and applications hold in a process of a device, as it tells: the answer to `ledger`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self

from burst import Malformed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_AT_ONCE = 100  # rows in one answer, which then fits a message
_MOST_ROWS, _MOST_FIGURES = 20_000, 64  # that are read of a device


class LedgerRow(NamedTuple):
    """A row of a ledger: what an application of an account holds, and has spent since it began.

    Its name is None in the row of all applications of the account, where memory that they share counts once.
    """

    uid: int
    application: str | None
    held: Mapping[str, int]
    spent: Mapping[str, float]

    @classmethod
    def read(cls, values: Any) -> Self:
        """Read a row of a device that may lie. Raise Malformed."""
        match values:
            case [int(uid), str() | None as application, dict(held), dict(spent)] if _are_numbers(held, spent):
                return cls(uid, application, held, spent)
        raise Malformed("a row of a ledger is malformed")


def _are_numbers(*figures: dict[Any, Any]) -> bool:
    return all(
        len(each) <= _MOST_FIGURES
        and all(isinstance(name, str) and isinstance(value, int | float) for name, value in each.items())
        for each in figures
    )


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
        """Ask by `call(method, …)` for all pages. `process`: "engine" or "service". Raise Malformed."""
        rows: list[LedgerRow] = []
        while True:
            values, _ = call("ledger", process, len(rows), **options)
            match values:
                case [int(total), dict(limits), list(found)] if len(rows) + len(found) <= _MOST_ROWS:
                    rows += map(LedgerRow.read, found)
                    if not found or len(rows) >= total:
                        return cls(_limits(limits), rows)
                case _:
                    raise Malformed("the page of a ledger is malformed, or one too many")

    def shares(self, row: LedgerRow) -> list[tuple[str, int, int]]:
        """Figure, what that row holds, and what it may hold; the fullest first."""
        which = 1 if row.application is None else 0
        found = [
            (figure, held, self.limits[figure][which]) for figure, held in row.held.items() if figure in self.limits
        ]
        return sorted(found, key=lambda share: -share[1] / share[2])


def _limits(values: dict[Any, Any]) -> dict[str, FigureLimits]:
    """Read the limits of a device that may lie. Raise Malformed."""
    found = {}
    for figure, most in values.items():
        match most:
            case [int(application), int(account), int(device)] if isinstance(figure, str) and min(most) > 0:
                found[figure] = FigureLimits(application, account, device)
            case _:
                raise Malformed("the limits of a ledger are malformed")
    return found
