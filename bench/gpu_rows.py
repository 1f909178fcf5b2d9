"""What the checks of gpu.py have in common: their rows, devices of their own, and a GPU that is none."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from measure import HERE, NotMeasured
from own_device import own_device

import driver
from driver.cli.timing import estimate
from driver.errors import DriverError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from driver.cli.timing import Estimate

TESTS = HERE.parent / "tests"
MOST_ADDED, MOST_SECONDS = 20e-6, 2.0  # of a run, to that in process; until clients are served again


class Row(NamedTuple):
    """A line of the report. is_kept: whether it is within its limit; None: it has none."""

    check: str
    subject: str
    words: str
    is_kept: bool | None = None
    figures: dict[str, float] | None = None

    def line(self) -> str:
        """For people."""
        kept = {None: "", True: " -> met", False: " -> missed"}[self.is_kept]
        return f"{self.check:9} {self.subject}: {self.words}{kept}"


@contextmanager
def connected(name: str) -> Iterator[driver.RemoteDevice]:
    """A device of this check's own. Raises NotMeasured where this machine has none."""
    try:
        with own_device(name) as device:
            yield device
    except DriverError as error:
        raise NotMeasured(str(error)) from error


def attempted(check: str, subject: str, attempt: Callable[[], tuple[Any, ...]]) -> Row:
    """The row of one attempt, which returns its words, whether they are within a limit, and figures; or raises."""
    try:
        return Row(check, subject, *attempt())
    except NotMeasured as why:
        return Row(check, subject, f"did not run: {why}")
    except Exception as error:  # noqa: BLE001 (the others still run)
        traceback.print_exc()
        return Row(check, subject, f"failed: {type(error).__name__}: {error}", is_kept=False)


class Added(NamedTuple):
    """The seconds of a run in process and in a burst, medians, and what the burst adds."""

    here: float
    there: float
    added: Estimate

    @classmethod
    def of(cls, took: NDArray[np.float64]) -> Added:
        """`took`: of each round in process, and in the burst."""
        here, there = np.median(took, axis=0)
        return cls(here, there, estimate(took[:, 1] - took[:, 0]))

    def __str__(self) -> str:
        here, there, added = (1e6 * seconds for seconds in (self.here, self.there, self.added.median))
        return f"in process {here:.1f} us, burst {there:.1f} us, {added:+.1f} us"

    @property
    def figures(self) -> dict[str, float]:
        """For --json."""
        return {
            "in_process_us": 1e6 * self.here,
            "burst_us": 1e6 * self.there,
            "added_us": 1e6 * self.added.median,
        }


def usable(*names: str) -> str:
    """The first of these devices that lacks nothing. Raises NotMeasured with what they lack."""
    known = {info.name: info.missing for info in driver.devices()}
    for name in names:
        if known.get(name) == "":
            return name
    raise NotMeasured("; ".join(f"{name}: {known.get(name, 'no such device')}" for name in names))


def use_stand_ins(home: Path) -> None:
    """Have this process, and what it starts, find tests' libcuda.so.1 in the place of CUDA, and SwiftShader, if it is
    there, in the place of Vulkan's drivers. Raises NotMeasured.
    """
    sys.path.append(str(TESTS))
    from fake_cuda import FakeCuda

    home.mkdir()
    os.environ["HOME"] = str(home)
    try:
        FakeCuda(home).configure()
    except OSError as error:
        raise NotMeasured(f"tests' libcuda.so.1 cannot be compiled: {error}") from error
    with suppress(ImportError):  # it is made for pytest
        import swiftshader

        if not swiftshader.missing():
            swiftshader.configure(home)
