"""Report of a run: counts by category, JSON, and JUnit XML."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args
from xml.etree import ElementTree as ET

from driver.vts.kit import Kind

if TYPE_CHECKING:
    from driver.vts.kit import Outcome

KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass
class Report:
    """The outcomes of one device, in the order of the tests."""

    device: str
    version: str
    outcomes: list[Outcome] = field(default_factory=list)
    failures: int = 0  #: so far

    def add(self, outcome: Outcome) -> None:
        """Add an outcome."""
        self.outcomes.append(outcome)
        self.failures += outcome.outcome == "failed"

    @property
    def summary(self) -> dict[str, int]:
        """Counts of passed, failed and skipped tests."""
        return _counts(self.outcomes)

    @property
    def categories(self) -> dict[str, dict[str, int]]:
        """The same per category."""
        found = dict.fromkeys(outcome.category for outcome in self.outcomes)
        return {name: _counts([o for o in self.outcomes if o.category == name]) for name in found}

    def of_kind(self, kind: Kind) -> list[Outcome]:
        """The outcomes of one kind: passed, failed or skipped."""
        return [outcome for outcome in self.outcomes if outcome.outcome == kind]

    def as_json(self) -> dict[str, Any]:
        """For `json.dumps`."""
        return {
            "device": self.device,
            "version": self.version,
            "summary": self.summary,
            "categories": self.categories,
            "tests": [
                {
                    "name": o.name,
                    "category": o.category,
                    "outcome": o.outcome,
                    "message": o.message,
                    "seconds": round(o.seconds, 6),
                }
                for o in self.outcomes
            ],
        }

    def as_junit(self) -> bytes:
        """JUnit XML: a suite for each category."""
        root = ET.Element("testsuites", {"name": _printable(f"{self.device} {self.version}"), **_totals(self.outcomes)})
        for category in self.categories:
            outcomes = [o for o in self.outcomes if o.category == category]
            suite = ET.SubElement(root, "testsuite", {"name": category, **_totals(outcomes)})
            for o in outcomes:
                name = o.name.removeprefix(f"{category}/")
                case = ET.SubElement(suite, "testcase", classname=category, name=name, time=f"{o.seconds:.6f}")
                if o.outcome != "passed":
                    kind = "failure" if o.outcome == "failed" else "skipped"
                    ET.SubElement(case, kind, message=_printable(o.message))
        ET.indent(root)
        return bytes(ET.tostring(root, encoding="utf-8", xml_declaration=True))


def _counts(outcomes: list[Outcome]) -> dict[str, int]:
    found = Counter(outcome.outcome for outcome in outcomes)
    return {kind: found[kind] for kind in KINDS}


def _totals(outcomes: list[Outcome]) -> dict[str, str]:
    counts, seconds = _counts(outcomes), sum(o.seconds for o in outcomes)
    return {
        "tests": str(len(outcomes)),
        "failures": str(counts["failed"]),
        "errors": "0",
        "skipped": str(counts["skipped"]),
        "time": f"{seconds:.6f}",
    }


def _printable(text: str) -> str:
    """Replace control characters, which XML cannot express and a device's message may have."""
    return "".join(c if c.isprintable() else " " for c in text)
