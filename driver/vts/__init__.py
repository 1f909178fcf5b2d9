"""The conformance kit: what a device has to do, as tests that its author runs against it (`burst vts DEVICE`).

A device is reached as any client reaches it: by name, over its socket and through bursts. One file holds one category
of tests, `driver.vts.catalogue` lists them all, and `driver.vts.kit` runs them.
"""

from driver.vts.cases import BadCase, Case, read_cases
from driver.vts.catalogue import ALL, CATEGORIES, SMOKE, USUAL, Scope, catalogue
from driver.vts.kit import Failed, Outcome, Skipped, Test, run
from driver.vts.known import BadKnownFailures, KnownFailures
from driver.vts.report import Report
from driver.vts.target import Target

__all__ = [
    "ALL",
    "CATEGORIES",
    "SMOKE",
    "USUAL",
    "BadCase",
    "BadKnownFailures",
    "Case",
    "Failed",
    "KnownFailures",
    "Outcome",
    "Report",
    "Scope",
    "Skipped",
    "Target",
    "Test",
    "catalogue",
    "read_cases",
    "run",
]
