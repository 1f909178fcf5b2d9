"""The conformance kit: tests that the author of a device runs against it (`burst vts DEVICE`).

The kit reaches a device as any client does: by name, over its socket and through bursts. Each category of tests has
a file; `driver.vts.catalogue` lists all tests, and `driver.vts.kit` runs them.
"""

from driver.vts.cases import BadCase, Case, cases_of, read_cases
from driver.vts.catalogue import ALL, CATEGORIES, SMOKE, USUAL, Scope, catalogue
from driver.vts.kit import Failed, Skipped, Test, TestOutcome, run
from driver.vts.report import BadKnownFailures, KnownFailures, Report
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
    "Report",
    "Scope",
    "Skipped",
    "Target",
    "Test",
    "TestOutcome",
    "cases_of",
    "catalogue",
    "read_cases",
    "run",
]
