"""Requests of bursts as events of the Trace Event format, which Perfetto and chrome://tracing show.

A request is drawn in the client's process, in the first free lane, so that requests in flight at the same time lie side
by side. What the device does with it is drawn in the device's process, in its listener's thread. Two counters show how
many requests are in flight, and how many of those are in the queue.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    Event = dict[str, Any]

ON_DEVICE: Final = {"wake", "bind", "execute"}
"""The stages that are drawn in the device's process."""


LANES: Final = {
    "GPU copy in": ("in", "in_end"),
    "GPU kernels": ("work", "work_end"),
    "GPU copy out": ("out", "out_end"),
}
"""The lanes of an accelerator, with the columns of `Trace.works` for each."""
_NO_THREAD = 1 << 22  # the kernel gives no thread a number from here on


class Sides(NamedTuple):
    """Where a burst is drawn."""

    client: int  #: pid
    device: int  #: pid
    listener: int  #: tid
    first_lane: int = 0  #: tid; there are as many as requests in flight


def requests(name: str, sides: Sides, records: NDArray[Any], stages: Mapping[str, NDArray[Any]]) -> Iterator[Event]:
    """Return the events of `records` and `stages` of a `Trace`, oldest first: each request, its stages, and the lanes'
    names.
    """
    ends: list[int] = []
    parts = [(stage, ns.tolist()) for stage, ns in stages.items() if stage != "total"]
    each = zip(records["begin"].tolist(), records["id"].tolist(), stages["total"].tolist(), count(), strict=False)
    for at, number, total, k in each:
        lane = next((n for n, end in enumerate(ends) if end <= at), len(ends))
        if lane == len(ends):
            yield label("thread_name", sides.client, sides.first_lane + lane, f"{name}, in flight {lane + 1}")
        ends[lane:] = [at + total, *ends[lane + 1 :]]
        in_client, on_device = (sides.client, sides.first_lane + lane), (sides.device, sides.listener)
        yield _span("request", name, at, total, place=in_client, number=number)
        for stage, took in parts:
            yield _span(stage, name, at, took[k], place=on_device if stage in ON_DEVICE else in_client, number=number)
            at += took[k]  # noqa: PLW2901 (the next stage begins there)


def works(name: str, sides: Sides, found: NDArray[Any], first_lane: int = 0) -> Iterator[Event]:
    """Return the events of the accelerator's work for requests, from `Trace.works`: a lane in the device's process for
    each of `LANES` in which there is anything.
    """
    for k, (lane, (begin, end)) in enumerate(LANES.items()):
        spans = found[found[begin] != 0]
        place, free = (sides.device, _NO_THREAD + first_lane + k), 0
        if len(spans):
            yield label("thread_name", *place, f"{name}, {lane}")
        for number, at, until in zip(*(spans[column].tolist() for column in ("id", begin, end)), strict=True):
            at = max(at, free)  # noqa: PLW2901 (times are exact to some microseconds; spans in a lane must not overlap)
            free = max(at, until)
            yield _span(lane, name, at, free - at, place=place, number=number)


def counters(name: str, sides: Sides, records: NDArray[Any]) -> Iterator[Event]:
    """Return the events that count the requests in flight and in the queue, one for each change."""
    n, times = len(records), np.concatenate([records[step] for step in ("sent", "taken", "received")])
    order = np.argsort(times, kind="stable")
    flying, queued = (np.repeat(change, n)[order].cumsum() for change in ([1, 0, -1], [1, -1, 0]))
    for at, f, q in zip(times[order].tolist(), flying.tolist(), queued.tolist(), strict=True):
        values = {"in flight": f, "queued": q}
        yield {"name": name, "ph": "C", "ts": at / 1e3, "pid": sides.client, "args": values}


def label(kind: str, pid: int, tid: int, name: str) -> Event:
    """Return the name of a process or thread: `kind` is "process_name" or "thread_name"."""
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def mark(name: str, sides: Sides, at: int, late: int) -> Event:
    """Return the event that marks a moment in the client's process; `late`: ns, in its arguments as microseconds."""
    where = {"pid": sides.client, "tid": sides.first_lane, "args": {"us": late / 1e3}}
    return {"name": name, "ph": "i", "s": "p", **where, "ts": at / 1e3}


def _span(stage: str, name: str, begin: int, took: int, place: tuple[int, int], number: int) -> Event:
    where = {"pid": place[0], "tid": place[1], "args": {"request": number}}
    return {"name": stage, "cat": name, "ph": "X", **where, "ts": begin / 1e3, "dur": took / 1e3}
