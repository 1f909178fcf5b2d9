"""In how many threads a model runs, where nobody has said so: found out by its own requests, at the pace at which they
come.

A runtime's threads make calls in a row faster than they make a stream: between two frames they sleep, and each part of
a run wakes them up. So neither the size of a model nor a measurement of calls in a row says what suits it. After the
first requests of a burst the model is made a second time in the background, for another number of threads. Both compute
the same inputs once: if a bit of the results differs, all stays as it was. Then the next requests run on the one, those
after them on the other, and `better` judges by how long they took and how much processor time. Clients notice nothing
else: no request is lost, none runs twice, no preparation takes longer.

What is found is kept for calls in a row and for a stream, beside the model in its cache files and, by the digest of a
file, for as long as the engine lives. The first requests of each burst say at which pace it goes, and where runs take
place in Python, later ones say when that changes.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections import defaultdict
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from burst import ResourceExhaustedTransient
from driver.engine.account_threads import AccountThreads
from driver.engine.runtime_threads import starting_threads_for
from driver.interface import BindOptions
from driver.nn.older import form_for_version
from driver.protocol.prepare_arguments import NOTHING_FOUND

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from driver.engine.models import SharedModel
    from driver.interface import Device, PreparedModel
    from driver.protocol.prepare_arguments import ThreadsFound


_log = logging.getLogger(__name__)

CLEARLY = 0.95
"""A ratio of seconds, or of processor seconds, below which one number of threads is better than the other."""
SHORTEST, LONGEST = 50e-6, 0.5
"""Seconds of a run. A shorter one has no parts for several threads, and nobody waits for trials of a longer one."""
PAUSE = 1e-3
"""Seconds between two runs: a stream's, and no call in a row."""
LOOKED_AT, TRIED, WARMING = 16, 24, 4
"""Runs that say what the pace is, runs with each number of threads, and how many of these do not count."""
REST = 10.0
"""Seconds after a choice until another pace of the same requests may bring a new one."""
MOST_BYTES = 2**28
"""Of a model: a larger one is not in memory twice."""
_MOST_KEPT = 1024
_MOST_THREADS = 4  # that take steps, of different accounts
_MOST_TRIALS = 2  # models of an account that are in memory twice


class RunFigures(NamedTuple):
    """Medians of some runs, in seconds."""

    took: float
    used: float  #: processor time of the whole process
    rested: float  #: from the end of a run to the next one

    @property
    def is_stream(self) -> bool:
        """True if requests come with pauses between them."""
        return self.rested >= PAUSE


def better(present: RunFigures, other: RunFigures) -> bool:
    """Return True if the other number of threads is better: runs take less time, or about as long and less processor
    time.
    """
    if other.took < CLEARLY * present.took:
        return True
    return other.took * CLEARLY <= present.took and other.used < CLEARLY * present.used


def number_to_try(threads: int, processors: int) -> int:
    """Return the number that is compared with the present one: half as many, and two with one; 0: none."""
    other = threads // 2 or 2
    return other if other <= processors else 0


class RunClock(NamedTuple):
    """The time, and the processor time that this process has used, in seconds."""

    now: Callable[[], float] = time.perf_counter
    used: Callable[[], float] = time.process_time


_REAL = RunClock()


class Meter:
    """A meter of a model's runs, in any threads: calls `done` once, with the figures of the first `most`."""

    def __init__(self, most: int, done: Callable[[RunFigures], object], clock: RunClock = _REAL) -> None:
        self._most, self._done, self._clock = most, done, clock
        self._numbers, self._rows = count(1), list[tuple[float, float, float]]()
        self._ended, self._is_over = clock.now(), False

    def run(self, run: Callable[[], object]) -> None:
        """Run it, and note what that takes. Raise what it raises, which is not noted."""
        if self._is_over:
            run()
            return
        began, used = self._clock.now(), self._clock.used()
        run()
        ended, used_then = self._clock.now(), self._clock.used()
        self._rows.append((ended - began, used_then - used, began - self._ended))
        self._ended = ended
        if next(self._numbers) == self._most:
            # What is bound may keep this object for long, and `done` knows models.
            done, self._done, self._is_over = self._done, _nothing, True
            done(RunFigures(*map(float, np.median(self._rows[WARMING:], axis=0))))


class PaceWatch:
    """A watch on the pace of a model whose number of threads is found: calls `changed` once, with figures of the last
    run, when enough in a row came at the other pace, but not soon.
    """

    def __init__(self, changed: Callable[[RunFigures], object], clock: RunClock, *, is_stream: bool) -> None:
        self._changed, self._now, self._is_stream, self._others = changed, clock.now, is_stream, 0
        self._ended = clock.now()
        self._earliest = self._ended + REST

    def run(self, run: Callable[[], object]) -> None:
        """Run it, and note when."""
        began = self._now()
        run()
        ended = self._now()
        rest, self._ended = began - self._ended, ended
        self._others = self._others + 1 if (rest >= PAUSE) != self._is_stream else 0
        if self._others >= LOOKED_AT and ended > self._earliest:
            self._earliest, changed = math.inf, self._changed
            changed(RunFigures(ended - began, 0.0, rest))


def _nothing(_: RunFigures) -> None:
    """Do nothing."""


class BoundForm(NamedTuple):
    """The arrays of a request: shape and type of each input, None for one that is left out; bytes of each output."""

    inputs: tuple[tuple[tuple[int, ...], np.dtype[Any]] | None, ...]
    outputs: tuple[int, ...]

    @classmethod
    def of(cls, inputs: Sequence[NDArray[Any] | None], outputs: Sequence[NDArray[Any]]) -> BoundForm:
        """Return the form of these arrays."""
        return cls(tuple(None if a is None else (a.shape, a.dtype) for a in inputs), tuple(a.nbytes for a in outputs))


def computed(shared: SharedModel, prepared: PreparedModel, form: BoundForm) -> list[bytes]:
    """Return the outputs of a run on arrays of that form, with the same values each time. Raise what a run raises."""
    random = np.random.default_rng(0)
    inputs = [pair and _values(random, *pair) for pair in form.inputs]
    outputs = [np.zeros(nbytes, np.uint8) for nbytes in form.outputs]
    shared.unmeasured(prepared.bind(inputs, outputs, BindOptions())).run()
    return [array.tobytes() for array in outputs]


def _values(random: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return numbers as a model may get them; ones of a type that may stand for an index or a size."""
    if dtype.kind == "f":
        return random.standard_normal(shape).astype(dtype)
    if dtype.itemsize == 1 and dtype.kind in "iu":
        return random.integers(0, 128, shape).astype(dtype)
    return np.ones(shape, dtype)


class ThreadChooser:
    """The chooser of one device: it watches the runs of each model that leaves the number of threads open."""

    def __init__(
        self,
        device: Device,
        forget_plans: Callable[[], object],
        remember: Callable[[SharedModel], object] = lambda _: None,
        clock: RunClock = _REAL,
    ) -> None:
        """`forget_plans`: has all requests bound anew. `remember`: keeps what was found beside the model. `clock`: says
        what time it is, and how much processor time was used.
        """
        self._device, self._forget_plans, self._remember, self._clock = device, forget_plans, remember, clock
        self._steps, self._lock = AccountThreads("threads-choice", _MOST_THREADS), threading.Lock()
        self._of_files: dict[tuple[int, bytes], ThreadsFound] = {}
        self._trying: defaultdict[int, weakref.WeakSet[SharedModel]] = defaultdict(weakref.WeakSet)
        self.processors = min(os.cpu_count() or 1, len(os.sched_getaffinity(0)))

    def known(self, uid: int, file: bytes) -> ThreadsFound:
        """Return what was found for that account's file."""
        return self._of_files.get((uid, file), NOTHING_FOUND)

    def watch(self, shared: SharedModel, uid: int, pace: Callable[[], object]) -> None:
        """Look at the next runs of a model, unless that is being done, or there is nothing to choose. `pace`: as of
        `Preparation`.
        """
        is_open = shared.prepared.threads and not shared.prepared.improves_after and self.processors > 1
        if not is_open or shared.region.nbytes > MOST_BYTES:
            return
        with self._lock:
            if shared.meter is None or isinstance(shared.meter, PaceWatch):
                shared.meter = Meter(LOOKED_AT, _Choice(self, weakref.ref(shared), uid, pace).looked, self._clock)

    def submit(self, uid: int, step: Callable[[], object]) -> None:
        """Take a step in a thread of that account's: it prepares, and has requests bound anew."""
        try:
            self._steps.submit(uid, step)
        except ResourceExhaustedTransient as error:
            _log.warning("a model keeps its number of threads: %s", error)

    def candidate(
        self, shared: SharedModel, threads: int, uid: int, pace: Callable[[], object]
    ) -> PreparedModel | None:
        """Return the model for that many threads if it computes the same bits; else None."""
        present, form = shared.prepared, shared.form
        preparation = shared.use.preparation(pace)._replace(threads=threads)
        if form is None:  # all its requests are on buffers of the device
            return None
        try:
            model = form_for_version(shared.model, self._device.hal_version)
            with starting_threads_for(uid):
                made = shared.use.run(partial(self._device.prepare, model, preparation))
            if made.threads != threads or made.improves_after:
                return None
            if computed(shared, present, form) == computed(shared, made, form):
                return made
            _log.info("a model's results have other bits in %d threads: it keeps %d", threads, present.threads)
        except Exception as error:  # noqa: BLE001 (whatever a device raises: the model that serves goes on)
            _log.info("a model keeps %d threads: %s", present.threads, error)
        return None

    def may_try(self, shared: SharedModel, uid: int) -> bool:
        """Return True if this account's model may be in memory twice from now on, until it is settled."""
        if len(self._trying[uid]) >= _MOST_TRIALS:
            return False
        self._trying[uid].add(shared)
        return True

    def exchange(self, shared: SharedModel, prepared: PreparedModel, done: Callable[[RunFigures], object]) -> None:
        """Run later requests on `prepared`, and measure them."""
        shared.exchange(prepared, Meter(TRIED, done, self._clock), self._forget_plans)

    def settle(self, shared: SharedModel, uid: int, prepared: PreparedModel, watch: PaceWatch) -> None:
        """Run later requests on `prepared`, and measure nothing until the pace changes. Runs that need no Python are
        not watched for that: the next burst tells.
        """
        self._trying[uid].discard(shared)
        meter = None if shared.has_native else watch
        if prepared is not shared.prepared or shared.has_native:
            shared.exchange(prepared, meter, self._forget_plans)
        else:
            shared.meter = meter

    def watch_for(self, changed: Callable[[RunFigures], object], *, is_stream: bool) -> PaceWatch:
        """Return a watch on a model at that pace."""
        return PaceWatch(changed, self._clock, is_stream=is_stream)

    def keep(self, shared: SharedModel, uid: int) -> None:
        """Keep what was found for later preparations."""
        if shared.file:
            if len(self._of_files) >= _MOST_KEPT:
                self._of_files.clear()
            self._of_files[uid, shared.file] = shared.found
        self._remember(shared)


class _Choice(NamedTuple):
    """The choice for one model. The thread that runs the model brings figures; another one takes the next step."""

    chooser: ThreadChooser
    wanted: weakref.ref[SharedModel]
    uid: int
    pace: Callable[[], object]

    def looked(self, figures: RunFigures) -> None:
        """Begin a comparison, unless the number for this pace is known."""
        self.chooser.submit(self.uid, partial(self._begin, figures))

    def _begin(self, figures: RunFigures) -> None:
        shared = self.wanted()
        if shared is None:  # no client holds it any more
            return
        present, known = shared.prepared, shared.found.at(is_stream=figures.is_stream)
        wanted = known
        if not known and SHORTEST <= figures.took <= LONGEST:
            wanted = number_to_try(present.threads, self.chooser.processors)
        other = None
        if wanted not in {0, present.threads}:
            if not self.chooser.may_try(shared, self.uid):  # a later burst may
                self._settle(shared, present, is_stream=figures.is_stream)
                return
            other = self.chooser.candidate(shared, wanted, self.uid, self.pace)
        if other is not None and not known:
            self.chooser.exchange(shared, other, partial(self._tried, present, other))
            return
        if not known:  # there is nothing to compare with
            shared.found = shared.found.with_number(present.threads, is_stream=figures.is_stream)
        self._settle(shared, other or present, is_stream=figures.is_stream)

    def _settle(self, shared: SharedModel, prepared: PreparedModel, *, is_stream: bool) -> None:
        watch = self.chooser.watch_for(self.looked, is_stream=is_stream)
        self.chooser.settle(shared, self.uid, prepared, watch)

    def _tried(self, present: PreparedModel, other: PreparedModel, its: RunFigures) -> None:
        """Measure the present number in the same way."""

        def back() -> None:
            if shared := self.wanted():
                self.chooser.exchange(shared, present, partial(self._compared, present, other, its))

        self.chooser.submit(self.uid, back)

    def _compared(self, present: PreparedModel, other: PreparedModel, its: RunFigures, own: RunFigures) -> None:
        def judge() -> None:
            shared = self.wanted()
            if shared is None:
                return
            best = other if better(own, its) else present
            if own.is_stream == its.is_stream:  # else the pace has changed meanwhile: the next burst begins anew
                shared.found = shared.found.with_number(best.threads, is_stream=own.is_stream)
                self.chooser.keep(shared, self.uid)
            self._settle(shared, best if own.is_stream == its.is_stream else present, is_stream=its.is_stream)

        self.chooser.submit(self.uid, judge)
