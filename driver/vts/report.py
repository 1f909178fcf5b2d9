"""Report of a run: counts by category, JSON, and JUnit XML."""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Self, get_args
from xml.etree import ElementTree as ET

from driver.vts.families import family_of
from driver.vts.kit import Kind
from fmq.printable import printable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from driver.vts.kit import TestOutcome


KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass
class Report:
    """The outcomes of one device, in the order of the tests."""

    device: str
    version: str
    outcomes: list[TestOutcome] = field(default_factory=list)
    failures: int = 0  #: so far

    def add(self, outcome: TestOutcome) -> None:
        """Add an outcome."""
        self.outcomes.append(outcome)
        self.failures += outcome.outcome == "failed"

    @property
    def summary(self) -> dict[str, int]:
        """Counts of passed, failed and skipped tests."""
        return _counts(self.outcomes)

    @property
    def categories(self) -> dict[str, dict[str, int]]:
        """The outcomes of each category."""
        found = dict.fromkeys(outcome.category for outcome in self.outcomes)
        return {name: _counts([o for o in self.outcomes if o.category == name]) for name in found}

    def of_kind(self, kind: Kind) -> list[TestOutcome]:
        """Return the outcomes of one kind: passed, failed or skipped."""
        return [outcome for outcome in self.outcomes if outcome.outcome == kind]

    def as_json(self) -> dict[str, Any]:
        """Return it for `json.dumps`."""
        return {
            "device": self.device,
            "version": self.version,
            "summary": self.summary,
            "categories": self.categories,
            "tests": [
                {
                    "name": o.name,
                    "category": o.category,
                    "family": family_of(o.name),
                    "outcome": o.outcome,
                    "message": o.message,
                    "seconds": round(o.seconds, 6),
                }
                for o in self.outcomes
            ],
        }

    def as_junit(self) -> bytes:
        """Return it as JUnit XML: a suite for each category."""
        root = ET.Element("testsuites", {"name": printable(f"{self.device} {self.version}"), **_totals(self.outcomes)})
        for category in self.categories:
            outcomes = [o for o in self.outcomes if o.category == category]
            suite = ET.SubElement(root, "testsuite", {"name": category, **_totals(outcomes)})
            for o in outcomes:
                name = o.name.removeprefix(f"{category}/")
                case = ET.SubElement(suite, "testcase", classname=category, name=name, time=f"{o.seconds:.6f}")
                if o.outcome != "passed":
                    kind = "failure" if o.outcome == "failed" else "skipped"
                    ET.SubElement(case, kind, message=printable(o.message))
        ET.indent(root)
        return bytes(ET.tostring(root, encoding="utf-8", xml_declaration=True))


def _counts(outcomes: list[TestOutcome]) -> dict[str, int]:
    found = Counter(outcome.outcome for outcome in outcomes)
    return {kind: found[kind] for kind in KINDS}


def _totals(outcomes: list[TestOutcome]) -> dict[str, str]:
    counts, seconds = _counts(outcomes), sum(o.seconds for o in outcomes)
    return {
        "tests": str(len(outcomes)),
        "failures": str(counts["failed"]),
        "errors": "0",
        "skipped": str(counts["skipped"]),
        "time": f"{seconds:.6f}",
    }


# ---- known failures: tests that a device fails in certain versions, and why ------------------------------------------

_FIELDS = {"device", "version", "tests", "reason"}


class BadKnownFailures(ValueError):
    """The file cannot be read, or has a wrong entry, which the message names."""


@dataclass(frozen=True, slots=True)
class KnownFailure:
    """Tests (globs) that one device fails in versions that match a glob."""

    device: str
    version: str
    tests: tuple[str, ...]
    reason: str

    def concerns(self, device: str, version: str) -> bool:
        """Return True if the entry applies to this device and version."""
        return fnmatchcase(device, self.device) and fnmatchcase(version, self.version)

    def names(self, test: str) -> bool:
        """Return True if the entry applies to this test."""
        return any(fnmatchcase(test, glob) for glob in self.tests)


class KnownFailures:
    """The entries for one device. A known failure counts as skipped.

    ::

        [[known]]
        device = "litert"
        version = "2.*"
        tests = ["operations/*lstm*", "qos/deadline_passed"]
        reason = "issue 17"
    """

    def __init__(self, entries: Sequence[KnownFailure] = ()) -> None:
        self._entries = list(entries)
        self._failed = [0] * len(self._entries)
        self._passed = [0] * len(self._entries)

    @classmethod
    def read(cls, path: Path, device: str, version: str) -> Self:
        """Read the entries for a device and version from a TOML file. Raise BadKnownFailures."""
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise BadKnownFailures(f"{path}: cannot be read: {error}") from error
        known = content.get("known", [])
        if content.keys() - {"known"} or not isinstance(known, list):
            raise BadKnownFailures(f"{path}: it must consist of [[known]] tables, each with {_words()}")
        entries = [_entry(record, f"{path}, entry {number}") for number, record in enumerate(known, 1)]
        return cls([entry for entry in entries if entry.concerns(device, version)])

    def judge(self, outcome: TestOutcome) -> TestOutcome:
        """Return the outcome, as skipped if the failure is known."""
        for number, entry in enumerate(self._entries):
            if entry.names(outcome.name):
                self._failed[number] += outcome.outcome == "failed"
                self._passed[number] += outcome.outcome == "passed"
                if outcome.outcome == "failed":
                    message = f"known failure ({entry.reason}): {outcome.message}"
                    return replace(outcome, outcome="skipped", message=message)
        return outcome

    def stale(self) -> list[str]:
        """Return messages about outdated entries: all of their tests that ran have passed."""
        return [
            f"{', '.join(entry.tests)} ({entry.reason}) no longer fails: remove the entry"
            for entry, failed, passed in zip(self._entries, self._failed, self._passed, strict=True)
            if passed and not failed
        ]


def _entry(record: Any, where: str) -> KnownFailure:
    if not isinstance(record, dict) or record.keys() != _FIELDS:
        raise BadKnownFailures(f"{where}: it must have {_words()}, and nothing else")
    tests = record["tests"]
    if not isinstance(tests, list) or not all(isinstance(glob, str) for glob in tests):
        raise BadKnownFailures(f"{where}: tests={tests!r:.60}: it must be a list of globs")
    return KnownFailure(str(record["device"]), str(record["version"]), tuple(tests), str(record["reason"]))


def _words() -> str:
    return ", ".join(sorted(_FIELDS))
