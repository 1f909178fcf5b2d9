"""What accounts hold and have spent in each process of a served device, for Prometheus: by uid, for few of them."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from burst import BurstError
from driver.engine.limits import NO_LIMIT
from driver.protocol.ledger_report import LedgerReport, LedgerRow

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client import Metric

    from driver.client.connection import Connection

MOST_ACCOUNTS = 32
"""Accounts with metrics of their own: those that are nearest to a limit. The others are summed."""

_LEAST = 1e-3  # seconds that a question may take, though the time is up


class LedgerReports(NamedTuple):
    """The ledgers of one engine and of its service."""

    engine: LedgerReport
    service: LedgerReport

    @classmethod
    def of(cls, connection: Connection, end: float) -> LedgerReports | None:
        """Ask until `end`, of time.monotonic(). None: it has ended, or does not answer in time."""

        def call(*arguments: Any) -> tuple[list[Any], list[int]]:
            return connection.call(*arguments, timeout=max(_LEAST, end - time.monotonic()))

        try:
            return cls(LedgerReport.read(call, "engine"), LedgerReport.read(call, "service"))
        except BurstError:
            return None


def ledger_metrics(found: Sequence[LedgerReports]) -> Iterator[Metric]:
    """Yield the metrics of all engines and services of a device."""
    held = GaugeMetricFamily("burst_held", "What an account holds.", labels=["process", "uid", "figure"])
    most = GaugeMetricFamily("burst_account_limit", "What an account may hold.", labels=["process", "figure"])
    spent = CounterMetricFamily("burst_spent", "What an account has spent.", labels=["process", "uid", "figure"])
    for process in LedgerReports._fields if found else ():
        reports: list[LedgerReport] = [getattr(each, process) for each in found]
        for figure, limits in reports[0].limits.items():
            if limits.account < NO_LIMIT:
                most.add_metric([process, figure], limits.account)
        rows = [row for _, row in sorted(map(_fullest, _accounts(reports)), key=lambda each: -each[0])]
        for metric, sums in ((held, _by_uid(rows, "held")), (spent, _by_uid(rows, "spent"))):
            for (uid, figure), value in sums.items():
                metric.add_metric([process, uid, figure], value)
    yield from (held, most, spent)


def _accounts(reports: Sequence[LedgerReport]) -> Iterator[tuple[LedgerReport, LedgerRow]]:
    yield from ((report, row) for report in reports for row in report.rows if row.application is None)


def _fullest(each: tuple[LedgerReport, LedgerRow]) -> tuple[float, LedgerRow]:
    report, row = each
    return max((held / most for _, held, most in report.shares(row)), default=0.0), row


def _by_uid(rows: Sequence[LedgerRow], field: str) -> Counter[tuple[str, str]]:
    sums = Counter[tuple[str, str]]()
    for n, row in enumerate(rows):
        uid = str(row.uid) if n < MOST_ACCOUNTS else "others"
        sums.update({(uid, figure): value for figure, value in getattr(row, field).items()})
    return sums
