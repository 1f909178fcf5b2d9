"""Deduplicates prepared models across clients of one account, so that equal models have their weights in memory once.

Accounts share nothing: none waits for what another prepares, saves or improves, and none can find out what it has.

A model arrives in memory that no process can change any more (sealed against writing, shrinking and growing; or the
engine's own, filled from cache files), so models that are equal stay equal. Bytes are compared, not digests: that takes
a hundredth of a second for 100 MB, and happens only when a model with the same sketch is known. Models from cache files
are compared by their digest, which has been verified anyway.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar
from weakref import WeakSet, WeakValueDictionary

from burst import ResourceExhaustedTransient
from burst.executor import Estimates
from burst.run_queue import give_way
from driver.deadlines import deadline, taking
from driver.engine.account_threads import AccountThreads
from driver.engine.cache.compilations import Declined
from driver.engine.driver_execution import DriverExecution
from driver.engine.hints import BurstHints, Hints
from driver.engine.joining import Joiner
from driver.engine.preparations import PreparationEstimates, PreparationTime
from driver.engine.runtime_threads import starting_threads_for
from driver.engine.thread_choice import BoundForm, Meter, PaceWatch
from driver.interface import Preparation
from driver.nn.older import form_for_version
from driver.options import LOW
from driver.protocol.model_codec import decode, sealed
from driver.protocol.model_memory import same_memory, sketch_of
from driver.protocol.prepare_arguments import NOTHING_FOUND, ThreadsFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from driver.engine.binding import BoundRequest
    from driver.engine.cache.compilations import CacheOwner, CacheWriter, RestoredCompilation
    from driver.engine.driver_execution import WatchedRun
    from driver.engine.driver_memory import HeldBuffer
    from driver.engine.footprint import Footprint
    from driver.engine.running_files import RunningFiles
    from driver.interface import BoundExecution, Device, PreparedModel, Saved
    from driver.nn import Model
    from driver.options import Preference
    from driver.protocol.model_memory import ModelBytes
    from driver.protocol.prepare_arguments import JoinTerms, PrepareArguments


T = TypeVar("T")
_log = logging.getLogger(__name__)
_MOST_IMPROVEMENTS = 4  # at once, of different accounts
_MOST_JOINERS = 16  # of a model: one for each set of terms
_MOST_SAVINGS = 16  # cache writers of a model that is being improved: each holds descriptors


class ModelUse(NamedTuple):
    """A use that a model is prepared for. Clients share a prepared model only if their uses are equal."""

    preference: Preference = "fast_single_answer"
    gives_way: bool = False  #: low priority: its preparation and its executions yield to everything on the machine

    @classmethod
    def of(cls, arguments: PrepareArguments) -> Self:
        """Return what the client wants the model for."""
        return cls(arguments.preference, arguments.priority == LOW)

    def preparation(self, pace: Callable[[], object], found: ThreadsFound = NOTHING_FOUND) -> Preparation:
        """Return what a device is told about a preparation in this thread. `found`: what suits the model."""
        return Preparation(self.preference, deadline(), pace, found.usual)

    def run(self, make: Callable[[], T]) -> T:
        """Return what `make` returns.

        If this use gives way, `make` runs in a thread of its own: a thread cannot take its priority back, and the
        threads that a library starts inherit it.
        """
        if not self.gives_way:
            return make()
        with ThreadPoolExecutor(1, "preparation", initializer=give_way) as threads:
            return threads.submit(make).result()


USUAL = ModelUse()
_NO_DRIVER, _NOT_KEPT = Hints(""), PreparationTime()


class SharedModel:
    """A model prepared for one use. It lives as long as a client holds it.

    bursts: the bursts on it, as its driver hears of them.
    digest: of the cache files that it was read from or written to. file: the digest of the file that it is; b"" for
    others. saved: contents of those it was read from. stage:
    how often an improved compilation has replaced `prepared`. keepers: those who have it in cache files. meter: what
    measures its runs, which therefore take place in Python; form: of what was bound meanwhile; has_native: whether any
    of that would run without Python. found: the numbers of threads that suit it.
    """

    __slots__ = (
        *("__weakref__", "_lock", "_running", "_savings", "alike", "bursts", "count", "digest", "estimates", "file"),
        *("footprint", "form", "found", "has_native", "joiners", "keepers", "meter", "model", "prepared", "region"),
        *("saved", "stage", "use", "where"),
    )

    def __init__(
        self,
        region: ModelBytes,
        where: Sequence[int],
        model: Model,
        prepared: PreparedModel,
        use: ModelUse = USUAL,
        file: bytes = b"",
        hints: Hints = _NO_DRIVER,
        running: RunningFiles | None = None,
    ) -> None:
        self.region, self.where, self.model, self.prepared, self.use = region, where, model, prepared, use
        self.alike: WeakSet[SharedModel] | None = None  #: those of its store with its sketch; this keeps the set
        self.bursts = BurstHints(prepared, use.preference, hints)
        self.digest: bytes | None = None
        self.file = file
        self.saved: Saved | None = None
        self.stage = 0
        self.footprint: Footprint | None = None  #: set for the first client that holds it
        self.estimates = Estimates()  # of all clients
        self.joiners: dict[JoinTerms, Joiner] = {}
        self.count: Callable[[], object] | None = None  #: called after each execution, until it is improved
        self.meter: Meter | PaceWatch | None = None
        self.form: BoundForm | None = None
        self.has_native = False
        self.found = NOTHING_FOUND
        self.keepers: list[CacheOwner] = []
        self._running = running
        self._savings: list[CacheWriter] = []
        self._lock = threading.Lock()  # while the driver saves the model, which may take long

    def execution(self, bound: BoundExecution, held: Sequence[HeldBuffer] = ()) -> DriverExecution:
        """Return what `prepared` has bound, with what the engine does around its runs."""
        meter = self.meter
        if meter is not None and (bound.native or bound.launch):
            self.has_native = True
        return DriverExecution(
            bound, held, self._watched(bound), self.count, around=None if meter is None else meter.run
        )

    def noted(self, bound: BoundRequest) -> BoundRequest:
        """Return a request that was bound to it. While runs are measured, note the form of its arrays."""
        if self.meter is not None and bound.arrays is not None:
            self.form = BoundForm.of(*bound.arrays)
        return bound

    def unmeasured(self, bound: BoundExecution) -> DriverExecution:
        """Return what a prepared model has bound, for a run that no client asked for."""
        return DriverExecution(bound, watched=self._watched(bound))

    def _watched(self, bound: BoundExecution) -> WatchedRun | None:
        return self._running.watched(bound, self.file) if self._running else None

    def joiner(self, terms: JoinTerms) -> Joiner:
        """Return what joins the executions of all who use the model on these terms. Any thread."""
        found = self.joiners.get(terms)
        if found is None:
            found = Joiner(self.model, terms)
            if len(self.joiners) < _MOST_JOINERS:  # else its requests are joined with each other's, and no others
                found = self.joiners.setdefault(terms, found)
        return found

    def serves(self, use: ModelUse) -> bool:
        """Return True if another client with this use may share it."""
        return self.use == use and self.prepared.serves_all

    def is_of(self, region: ModelBytes, where: Sequence[int]) -> bool:
        """Return True if it was made from the same bytes."""
        if self.region.nbytes != region.nbytes or (*self.where,) != (*where,):
            return False
        return same_memory(self.region, region)

    def save(self, saving: CacheWriter) -> None:
        """Write cache files now and, for the latest ones, again after an improvement. Raise Declined, OSError."""
        with self._lock:
            self._save(saving)
            if self.prepared.improves_after:
                self._savings = [*self._savings[1 - _MOST_SAVINGS :], saving]

    def improve(self, better: PreparedModel, switched: Callable[[], None]) -> None:
        """Put `better` in place, call `switched`, and write the cache files again."""
        with self._lock:
            better.prepared_from = self.model
            self.prepared, self.count, self.stage, self.estimates = better, None, self.stage + 1, Estimates()
            switched()
            self.bursts.move(better)
            for saving in self._savings:
                try:
                    self._save(saving)
                except (Declined, OSError) as error:
                    _log.warning("an improved compilation was not cached: %s", error)
            self._savings.clear()

    def keep_for(self, owner: CacheOwner) -> None:
        """Note that this owner's cache files have it: what is found out about it is kept there."""
        if owner not in self.keepers:
            self.keepers = [*self.keepers[1 - _MOST_SAVINGS :], owner]

    def exchange(
        self, prepared: PreparedModel, meter: Meter | PaceWatch | None, switched: Callable[[], object]
    ) -> None:
        """Put an equal model in place, for another number of threads, and call `switched`. `meter`: of its runs."""
        with self._lock:
            prepared.prepared_from = self.model
            if prepared is not self.prepared:
                self.prepared, self.estimates = prepared, Estimates()
                self.bursts.move(prepared)
            self.meter, self.has_native = meter, False
            switched()

    def _save(self, saving: CacheWriter) -> None:
        root = self.region.asarray()
        try:
            found = self.prepared.saved(root)
        except Exception as error:
            _log.exception("a device failed to serialise a model")
            raise Declined(f"the device failed to serialise the model: {error}") from error
        if found is None:
            raise Declined("the device does not cache this model")
        offset, nbytes = self.where
        self.digest = saving.save(root.data, (offset, nbytes), found, self.file)


class ModelStore:
    """The prepared models that the clients of one account still hold. Any thread; one prepares at a time."""

    def __init__(self, device: Device, running: RunningFiles | None = None) -> None:
        """Begin without models. `running`: where runs of model files are noted."""
        self._device, self._running = device, running
        self._shared: WeakSet[SharedModel] = WeakSet()
        self._alike: WeakValueDictionary[bytes, WeakSet[SharedModel]] = WeakValueDictionary()  # by their sketch
        self._lock = threading.Lock()  # of what is prepared
        self._estimates = PreparationEstimates()
        self._hints = Hints(device.name)

    def __len__(self) -> int:
        return len(self._shared)

    def prepare(
        self,
        fds: list[int],
        where: Sequence[Any],
        pace: Callable[[], object],
        use: ModelUse = USUAL,
        charge: Callable[[ModelBytes], object] = lambda _: None,
        file: bytes = b"",
        spend: Callable[[float], object] = lambda _: None,
        takes: PreparationTime | None = None,
        found: ThreadsFound = NOTHING_FOUND,
    ) -> SharedModel:
        """Prepare the model in these descriptors, or share an equal one. Owns `fds`.

        `charge`: called with the memory that the model will be in, before it is prepared. `file`: the digest of the
        file that the model is; b"" for others. `spend`: called with the seconds that it took. `takes`: what
        is known of that, and gets what is found out. `found`: numbers of threads that suited it before.

        Raise InvalidModel, and what `charge` and the device raise.
        """
        region = sealed(fds, where)
        where, sketch = where[:2], sketch_of(region)
        with self._alone(use, sketch, lambda shared: shared.is_of(region, where)) as known, _timed(spend):
            source = known.region if known else region
            charge(source)
            if known and known.serves(use):
                return known
            with self._estimates.preparing(_NOT_KEPT if known or not takes else takes):
                model = known.model if known else decode(region, where, pace)
                prepared = self._device.prepare(self._form(model), use.preparation(pace, found))
            shared = self._new(source, where, model, prepared, use=use, sketch=sketch, file=file)
            shared.found = found
            return shared

    def restore(
        self,
        read: Callable[[], RestoredCompilation],
        pace: Callable[[], object],
        use: ModelUse = USUAL,
        charge: Callable[[ModelBytes], object] = lambda _: None,
        spend: Callable[[float], object] = lambda _: None,
        takes: PreparationTime | None = None,
    ) -> SharedModel:
        """Restore a model from cache files, or share it if it is there. `charge`, `spend`, `takes`: as of `prepare`.

        `read`: reads and verifies the files, into memory that is not charged yet: one set at a time.

        Raise InvalidModel, and what `read`, `charge` and the device raise.
        """
        with taking(self._lock), _timed(spend):
            restored = read()
            sketch = sketch_of(restored.model)
            same = [shared for shared in self._serving_first(use, sketch) if shared.digest == restored.digest]
            known = next((shared for shared in same if shared.saved or shared.serves(use)), None)
            source = known.region if known else restored.model
            charge(source)
            if known and known.serves(use):
                return known
            saved = known.saved if known and known.saved else restored.saved
            with self._estimates.preparing(_NOT_KEPT if known or not takes else takes):
                model = known.model if known else decode(source, restored.where, pace)
                preparation = use.preparation(pace, restored.found)
                prepared = self._device.restore(self._form(model), saved, source.asarray(), preparation)
            shared = self._new(source, restored.where, model, prepared, use=use, sketch=sketch, file=restored.file)
            shared.digest, shared.saved, shared.found = restored.digest, saved, restored.found
            return shared

    def _form(self, model: Model) -> Model:
        """Return the model as the driver's version of the HAL has it."""
        return form_for_version(model, self._device.hal_version)

    @contextmanager
    def _alone(
        self, use: ModelUse, sketch: bytes, is_same: Callable[[SharedModel], bool]
    ) -> Iterator[SharedModel | None]:
        """Let this thread prepare, within the block, and no other one for this account.

        Yields a model that is the same, if there is one. Those with that sketch are compared, without the lock,
        which is not needed for one that can be shared whole.

        Raise MissedDeadlineTransient.
        """
        compared: set[SharedModel] = set()
        known: SharedModel | None = None
        while known is None or not known.serves(use):
            with taking(self._lock):
                others = [shared for shared in self._serving_first(use, sketch) if shared not in compared]
                if not others:
                    yield known
                    return
            found = next(filter(is_same, others), None)
            known = found or known
            compared.update(others)
        yield known

    def rest(self) -> None:
        """Have all models free what they can make again: none has run for a while."""
        for shared in list(self._shared):
            self._hints.give("rest of a model", shared.prepared.rest)

    def _serving_first(self, use: ModelUse, sketch: bytes) -> list[SharedModel]:
        """Return the models with that sketch: first those that this use may share whole, then those that may share only
        their bytes.
        """
        return sorted(self._alike.get(sketch, ()), key=lambda shared: not shared.serves(use))

    def _new(
        self,
        region: ModelBytes,
        where: Sequence[int],
        model: Model,
        prepared: PreparedModel,
        use: ModelUse,
        sketch: bytes,
        file: bytes,
    ) -> SharedModel:
        shared = SharedModel(
            region, where, model, prepared, use=use, file=file, hints=self._hints, running=self._running
        )
        shared.alike = self._alike.setdefault(sketch, WeakSet())
        shared.alike.add(shared)
        self._shared.add(shared)
        return shared


@contextmanager
def _timed(spend: Callable[[float], object]) -> Iterator[None]:
    begin = time.monotonic()
    try:
        yield
    finally:
        spend(time.monotonic() - begin)


class RunCounter:
    """A counter that calls `ask` once: after so many executions of a model, on whatever path."""

    def __init__(self, most: int, ask: Callable[[], object]) -> None:
        self._most, self._ask, self._runs = most, ask, count(1)

    def note(self) -> None:
        """Count one execution. Any thread."""
        if next(self._runs) == self._most:
            self._ask()


class ModelImprover:
    """An improver of one device's models, one of each account at a time: a quick compilation serves first.

    A better one costs time and memory, so it is made only for a model that is used: once the quick one has run as often
    as the device says. It is made in a thread of its account's while the quick one serves. Requests that are bound to
    the quick one finish on it; later ones are bound anew. No request is lost, and none runs twice.
    """

    def __init__(self, forget_plans: Callable[[], None]) -> None:
        """Begin. `forget_plans`: has all requests bound anew."""
        self._forget_plans, self._lock = forget_plans, threading.Lock()
        self._watched: weakref.WeakSet[SharedModel] = weakref.WeakSet()
        self._threads = AccountThreads("improvement", _MOST_IMPROVEMENTS)

    def watch(self, shared: SharedModel, uid: int, pace: Callable[[], object]) -> None:
        """Improve that account's model once it has run often enough, unless the device knows nothing better."""
        with self._lock:
            most = shared.prepared.improves_after
            if not most or shared in self._watched:
                return
            self._watched.add(shared)
            shared.count = RunCounter(most, partial(self._begin, weakref.ref(shared), uid, pace)).note

    def _begin(self, wanted: weakref.ref[SharedModel], uid: int, pace: Callable[[], object]) -> None:
        try:
            self._threads.submit(uid, partial(self._improve, wanted, uid, pace))
        except ResourceExhaustedTransient as error:
            _log.warning("a model is not improved; the first compilation stays in use: %s", error)

    def _improve(self, wanted: weakref.ref[SharedModel], uid: int, pace: Callable[[], object]) -> None:
        shared = wanted()
        if shared is None:  # no client holds it any more
            return
        better: PreparedModel | None = None
        try:
            with starting_threads_for(uid):
                better = shared.use.run(partial(shared.prepared.improved, shared.use.preparation(pace)))
        except Exception:  # noqa: BLE001 (the thread must go on)
            _log.exception("a model could not be improved; the first compilation stays in use")
        if better is not None:
            shared.improve(better, self._forget_plans)
        elif shared.count:  # there is nothing to count for any more
            shared.count = None
            self._forget_plans()
