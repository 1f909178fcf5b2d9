"""Known failures: tests that a device fails in certain versions, and why."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from driver.vts.kit import Outcome

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
        """Whether the entry applies to this device and version."""
        return fnmatchcase(device, self.device) and fnmatchcase(version, self.version)

    def names(self, test: str) -> bool:
        """Whether the entry applies to this test."""
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
        """Read the entries for a device and version from a TOML file. Raises BadKnownFailures."""
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise BadKnownFailures(f"{path}: cannot be read: {error}") from error
        known = content.get("known", [])
        if content.keys() - {"known"} or not isinstance(known, list):
            raise BadKnownFailures(f"{path}: it must consist of [[known]] tables, each with {_words()}")
        entries = [_entry(record, f"{path}, entry {number}") for number, record in enumerate(known, 1)]
        return cls([entry for entry in entries if entry.concerns(device, version)])

    def judge(self, outcome: Outcome) -> Outcome:
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
        """Messages about outdated entries: all of their tests that ran have passed."""
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
