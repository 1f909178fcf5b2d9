"""The time that a model takes where it could run: measured on the model itself, and remembered for this machine.

What is compared is a plan: the whole model on one device, or cut into steps on several. Each runs a few times on zeros,
transport included. A machine that was busy meanwhile is measured once more, the next time, and then believed.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import numpy as np

from driver.client.discovery import runtime_dir
from driver.engine.cache.processor import processor
from driver.errors import DeviceFailed
from driver.options import options_of
from driver.protocol.model_digest import model_digest, structure_digest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from driver.client.executor import Executor
    from driver.nn import Model
    from driver.options import Preference

MOST_SECONDS = 0.5
"""That measuring one plan may take, beyond its first run."""
_LEAST_RUNS, _MOST_RUNS = 2, 20
_BUSY_SHARE = 0.25  # of the processors' time that others took
_MOST_KEPT = 256


class Figures(NamedTuple):
    """The seconds of one execution by plan. `was_busy`: the machine was busy while they were taken."""

    seconds: Mapping[str, float]
    was_busy: bool = False
    is_final: bool = False  #: they were taken a second time


NO_FIGURES = Figures({})


def can_be_measured(model: Model) -> bool:
    """Return True if the model tells the sizes of all inputs."""
    return all(model.main.operands[i].is_known for i in model.main.inputs)


def seconds_of(executor: Executor, preference: Preference, most: float = MOST_SECONDS) -> float:
    """Return the seconds of one execution in a burst: the least of several. Raise what a burst raises."""
    zeros = [np.zeros([d or 0 for d in t.shape or ()], t.dtype) for t in executor.model.inputs]
    with executor.open_burst(options_of(preference)) as burst:
        burst.run(*zeros)  # the first one is not like the others
        best, end = float("inf"), time.perf_counter() + most
        for n in range(_MOST_RUNS):
            begin = time.perf_counter()
            if begin > end and n >= _LEAST_RUNS:
                break
            burst.run()
            best = min(best, time.perf_counter() - begin)
    return best


class Load:
    """The load on the processors, by other programs or other guests of the host, since it was made."""

    def __init__(self) -> None:
        self._begin = _stolen(), time.monotonic()

    @property
    def is_high(self) -> bool:
        """True if others load the processors; also when as many threads wait as there are processors."""
        (stolen, begin), processors = self._begin, os.cpu_count() or 1
        share = (_stolen() - stolen) / max(1e-3, time.monotonic() - begin) / processors
        return share > _BUSY_SHARE or os.getloadavg()[0] > processors + 1


def _stolen() -> float:
    """Return the seconds that the host gave to others, of all processors."""
    with suppress(OSError, ValueError, IndexError), open("/proc/stat") as file:
        return int(file.readline().split()[8]) / os.sysconf("SC_CLK_TCK")
    return 0.0


class FigureStore:
    """A store of one model's figures for one set of plans, in a file of this account."""

    def __init__(self, model: Model, terms: Sequence[Any]) -> None:
        """Find the file. `terms`: devices with versions, and what else changes the figures, as msgpack writes it."""
        digest = model_digest(model, structure_digest(model))
        name = hashlib.sha256(digest + msgpack.packb([*terms, processor()])).hexdigest()
        self._path = runtime_dir() / "placements" / f"{name}.json"

    def read(self) -> Figures | None:
        """Return the figures; None: nothing is known, or what is known was taken on a busy machine and only once."""
        with suppress(OSError, ValueError, TypeError, AttributeError, DeviceFailed):
            plain = json.loads(self._path.read_text())
            seconds = {str(name): float(value) for name, value in plain["seconds"].items()}
            return Figures(seconds, bool(plain["was_busy"]), bool(plain["is_final"]))
        return None

    def write(self, figures: Figures) -> None:
        """Keep them; a folder that cannot be written is no error."""
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            new = self._path.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps(figures._asdict(), indent=1))
            new.replace(self._path)  # at once: a reader sees the old figures or the new
            kept = sorted(self._path.parent.glob("*.json"), key=_age)
            for old in kept[:-_MOST_KEPT]:
                old.unlink(missing_ok=True)


def _age(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0
