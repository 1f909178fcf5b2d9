"""Writes followed bursts as one file for Perfetto."""

from __future__ import annotations

import gzip
import json
from itertools import chain
from typing import IO, TYPE_CHECKING, Any, cast

from burst import timeline

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from driver.watching.follow import Followed

_LANES = 64  # of a burst: it has at most so many requests in flight


def write(path: Path, followed: Sequence[Followed]) -> None:
    """Writes JSON, compressed if the path ends in .gz. Raises OSError."""
    with cast("IO[str]", gzip.open(path, "wt", compresslevel=1) if path.suffix == ".gz" else path.open("w")) as file:
        file.write('{"displayTimeUnit": "ns", "traceEvents": [\n')
        between = ""
        for event in events(followed):
            file.write(between + json.dumps(event))
            between = ",\n"
        file.write("\n]}\n")


def events(followed: Sequence[Followed]) -> Iterator[dict[str, Any]]:
    """Names of processes, then burst by burst its requests and its counters."""
    yield from _names(followed)
    for n, one in enumerate(followed):
        burst, records = one.burst, one.records
        sides, name = burst.trace.sides(first_lane=1 + n * _LANES), f"burst {burst.number}"
        yield from timeline.requests(name, sides, records, burst.trace.stages(records))
        yield from timeline.counters(name, sides, records)


def _names(followed: Sequence[Followed]) -> Iterator[dict[str, Any]]:
    """Each process and each listener once."""
    clients = {one.burst.pid: one.burst.program or "client" for one in followed}
    all_sides = [(one.burst, one.burst.trace.sides()) for one in followed]
    devices = {sides.device: f"device {burst.device}" for burst, sides in all_sides}
    for pid, name in chain(devices.items(), clients.items()):
        yield timeline.label("process_name", pid, 0, name)
    for burst, sides in all_sides:
        yield timeline.label("thread_name", sides.device, sides.listener, f"burst {burst.number}, {burst.model}")
