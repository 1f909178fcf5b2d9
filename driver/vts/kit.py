"""Tests, their outcomes, and how to run them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn

from burst import PeerDied, StatusError, Timeout
from driver.errors import DeviceFailed
from driver.vts.families import family_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from driver.vts.target import Target

Kind = Literal["passed", "failed", "skipped"]


class Failed(Exception):
    """The device is wrong; the message says what it did."""


class Skipped(Exception):
    """The test does not apply to this device; the message says why."""


def skip(reason: str) -> NoReturn:
    """Skip this test."""
    raise Skipped(reason)


def check(is_so: object, complaint: str) -> None:
    """Fail this test unless `is_so`."""
    if not is_so:
        raise Failed(complaint)


@dataclass(frozen=True, slots=True)
class Test:
    """One test. `run` returns when the device passes, and raises otherwise. The name begins with the category."""

    __test__ = False  # for pytest

    name: str
    run: Callable[[Target], object]

    @property
    def category(self) -> str:
        """The first part of its name."""
        return self.name.split("/", 1)[0]

    @property
    def family(self) -> str:
        """The test of Android's suite that it stands for; "" for a test of this kit's own."""
        return family_of(self.name)


@dataclass(frozen=True, slots=True)
class TestOutcome:
    """The outcome of one test."""

    name: str
    outcome: Kind
    message: str
    seconds: float

    @property
    def category(self) -> str:
        """The first part of its name."""
        return self.name.split("/", 1)[0]


def run(tests: Iterable[Test], target: Target) -> Iterator[TestOutcome]:
    """Run tests in order. After a test in which the device died or hung, the target connects again."""
    for test in tests:
        begin = time.monotonic()
        kind, message = _judged(test, target)
        if report := target.reports():
            kind, message = "failed", f"{message}\n{report}" if kind == "failed" else report
        yield TestOutcome(test.name, kind, message, time.monotonic() - begin)


def _judged(test: Test, target: Target) -> tuple[Kind, str]:
    try:
        test.run(target)
    except Skipped as reason:
        return "skipped", str(reason)
    except Exception as error:  # noqa: BLE001 (one failure must not end the run)
        if not isinstance(error, Failed | StatusError | DeviceFailed):
            target.forget()
        return "failed", _complaint(error)
    return "passed", ""


def _complaint(error: Exception) -> str:
    match error:
        case Failed() | DeviceFailed():
            return str(error)
        case StatusError():
            return f"the device answered {error.status.name}: {error}"
        case Timeout():
            return f"the device does not answer: {error}"
        case PeerDied():
            return f"the device died: {error}"
        case _:
            return f"{type(error).__name__}: {error}"
