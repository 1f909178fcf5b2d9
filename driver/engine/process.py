"""The engine of a device: prepared models, burst listeners and the plain path, and nothing that holds the GIL for long.

A busy Python thread beside a listener would turn its tenths of a millisecond into five. So while a burst is open,
models are decoded and prepared in small steps with a pause after each, and the garbage collector does not run.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import warnings
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

from burst import (
    DeviceUnavailable,
    InvalidArgument,
    Memory,
)
from burst._core import lib
from burst.channel import Channel, ChannelLoop
from burst.run_queue import Application, RunQueue, Share, waiters
from burst.serving_thread import ServingThread
from burst.trace import blamed, note_crashes
from driver.config import device_uid
from driver.deadlines import check, check_entry, due, seconds_left
from driver.engine import model_binder, sandbox  # noqa: F401 (the first one before there is a sandbox)
from driver.engine.cache.compilations import VerifiedCache
from driver.engine.call_rules import Reach
from driver.engine.client import EngineClient
from driver.engine.driver_memory import DriverMemory
from driver.engine.hints import Hints
from driver.engine.latency import LatencyHint
from driver.engine.ledger import Ledger
from driver.engine.limits import WEIGHT, limits, weights
from driver.engine.models import ModelImprover, ModelStore, ModelUse, SharedModel
from driver.engine.preparations import Pacer, Preparations
from driver.engine.real_time import USUAL, RealTime
from driver.engine.running_files import GRACE, RunningFiles
from driver.engine.runtime_threads import starting_threads_for, threads_started_for
from driver.engine.thread_choice import ThreadChooser
from driver.engine.totals import Totals, summed
from driver.interface import Device
from driver.libc import function
from driver.nn import ops  # noqa: F401 (so is the table of operations)
from driver.protocol.census import Census
from driver.protocol.model_codec import handles_in
from driver.protocol.rpc import Reply, refuse, serve, take_fd
from fmq import LifePage
from fmq.region import guard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from burst.channel import Message
    from driver.engine.cache.compilations import RestoredCompilation
    from driver.engine.lane import ClientLane
    from driver.engine.ledger import Holder
    from driver.engine.open_burst import OpenBurst
    from driver.engine.preparations import PreparationTime
    from driver.options import Preference
    from driver.protocol.model_memory import ModelBytes
    from driver.protocol.prepare_arguments import PrepareArguments

    _Make = Callable[[ModelStore, ModelUse, Callable[[float], object]], SharedModel]


_log = logging.getLogger(__name__)
_malloc_trim = function("malloc_trim", "int(*)(size_t pad)")


class PlanHolder(Protocol):
    """A server that answers requests and keeps plans."""

    @property
    def answered(self) -> int:
        """The number of requests so far."""

    def forget_plans(self) -> None:
        """Drop the plans. From any thread; a running execution goes on."""


class IdleMonitor:
    """A monitor that drops plans and scratch memory of idle clients.

    It is one thread, started by the first request, that sleeps while there is nothing to drop.

    An open burst keeps the plans of its requests, and with them the temporaries of the reference device and programs
    for several shapes. A server that has answered nothing for a while drops its plans, and its next request is bound
    anew, as the first one was. A few small plans stay, as they cost more to make than they hold. Memory that a client
    has handed over stays mapped: the client frees it.

    Nothing is added to the path of a request. A server counts its answers anyway, and binding a request that is worth
    dropping schedules a look, `seconds` later, which repeats while there is something to drop. Otherwise no
    thread wakes.
    """

    def __init__(
        self,
        seconds: float,
        holders: Callable[[], Sequence[PlanHolder]],
        models: Callable[[], object] = lambda: None,
        is_in_use: Callable[[], bool] = lambda: False,
        keeps_arenas: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start no thread yet.

        `models`: called when no plans are left to drop, and `is_in_use()` is False, which is asked once a look.
        `keeps_arenas`: True while the C library keeps its free memory.
        """
        self._seconds, self._holders, self._models, self._is_in_use = seconds, holders, models, is_in_use
        self._keeps_arenas = keeps_arenas
        self._seen: WeakKeyDictionary[PlanHolder, int] = WeakKeyDictionary()
        self._resting: WeakKeyDictionary[PlanHolder, int] = WeakKeyDictionary()
        self._bound, self._never = threading.Event(), threading.Event()
        self._starting, self._thread = threading.Lock(), ServingThread(self._watch, name="idle")

    def begin(self) -> None:
        """Note that a request was bound. Called often, and cheap."""
        if not self._bound.is_set():
            with self._starting, suppress(RuntimeError):  # no thread can be started: the next request tries again
                if not self._thread.has_started:
                    self._thread.start()
                self._bound.set()

    def _watch(self) -> None:
        while True:
            self._bound.wait()
            self._never.wait(self._seconds)
            self._bound.clear()  # before looking: what is bound meanwhile is seen next time
            try:
                if self.look() | self._is_in_use():
                    self._bound.set()
                elif not self._bound.is_set():
                    self._models()
                    if not self._keeps_arenas():
                        trim()
            except Exception:  # noqa: BLE001 (plans can be dropped later, but not without this thread)
                _log.exception("an idle client's plans could not be dropped")
                self._bound.set()

    def look(self) -> bool:
        """Drop the plans of servers that have answered nothing since the last look. Return True if any keeps plans."""
        is_held = False
        for holder in self._holders():
            answered = holder.answered
            if self._resting.get(holder) == answered:
                continue
            if self._seen.get(holder) == answered:
                self._resting[holder] = answered
                holder.forget_plans()
            else:
                self._seen[holder] = answered
                is_held = True
        return is_held


def trim() -> None:
    """Return free memory to the system, if the C library can."""
    if _malloc_trim:
        _malloc_trim(0)


_RETRY = 0.1
"""Seconds after a failure to receive a client."""

_LONGEST_TIMING = 60.0  # seconds
_COLLECTING = 20  # times as long as a collection took, none is made after it
_PREPARING = {"prepare", "improve", "save"}


class Engine:
    """The engine's state that all clients share."""

    def __init__(
        self,
        name: str,
        device: Device,
        service: Channel,
        running: RunningFiles,
        *,
        is_shared: bool = False,
        real_time: RealTime = USUAL,
    ) -> None:
        self.device, self.real_time = device, real_time
        self.device.on_report = self.forget_plans  # a request that is bound anew meets `check_available`
        self._service, self.limits = service, limits(is_shared=is_shared)
        self.device.give_up = running.end_with
        if (seconds := device.looks_again_after) is not None and not device.status.takes_work:
            words = f"device {name!r} was {device.status}; another engine looks again"
            ServingThread(self._end_later, seconds, words, name="looks again").start()
        if self.device.asked_apart:
            self.device.watched = partial(self._calling, running)
            running.watch_executions(self.device.name)
        self.ledger = Ledger(self.limits)
        self.memory = DriverMemory(self.device, self.limits.driver_seconds)
        self.pace, self._preparations, self._running = Pacer(), Preparations(), running
        self._stores: dict[int, ModelStore] = {}
        self.rests = type(self.device).rest is not Device.rest  #: whether its driver wants to hear of rests
        self._hints, self._activity = Hints(self.device.name), 0
        self.latency = LatencyHint()
        self.idle = IdleMonitor(
            self.limits.idle_seconds,
            self._holders,
            models=self.rest,
            is_in_use=self._is_in_use,
            keeps_arenas=lambda: self.latency.keeps_arenas,
        )
        self.compilations, self._improver = VerifiedCache(self.device, name), ModelImprover(self.forget_plans)
        self._chooser = ThreadChooser(self.device, self.forget_plans, self._keep_threads)
        self.contexts = ChannelLoop("burst-contexts")
        self.queue, self._weights = RunQueue(self.device.slots, self.device.quantum, is_shared=is_shared), weights()
        self._shares: dict[int, Share] = {}  # kept: an account that comes again still owes what it used
        self._applications: WeakValueDictionary[tuple[int, str], Application] = WeakValueDictionary()
        self.traces: dict[OpenBurst, tuple[int, Memory]] = {}  #: of all bursts, with their clients' uids
        self.clients: set[EngineClient] = set()
        self._censuses: dict[int | None, Census] = {}
        self._totals = Totals()
        self._counting, self._collect_from = threading.Lock(), 0.0

    def _end_later(self, seconds: float, words: str) -> None:
        time.sleep(seconds)
        self._running.end_with(words)

    def _calling(self, running: RunningFiles, function: str) -> AbstractContextManager[None]:
        """Note, within the block, that this thread calls a function of the driver."""
        left, most = seconds_left(lib.burst_due()), self.limits.driver_seconds
        if function in _PREPARING:
            most = self.limits.prepare_seconds
            most = most if left is None else min(most, left + GRACE)
        return running.calling(self.device.name, function, most)

    def prepare(
        self,
        holder: Holder,
        fds: list[int],
        where: Sequence[Any],
        arguments: PrepareArguments,
        charge: Callable[[ModelBytes], object],
        takes: PreparationTime | None = None,
        file: bytes = b"",
    ) -> SharedModel:
        """Return the model in the first descriptors, prepared for `holder`; take them out of `fds` once that begins.

        `takes`, `file`: as of `ModelStore.prepare`.

        Raise MissedDeadline*, and what `charge` and the device raise.
        """

        def make(store: ModelStore, use: ModelUse, spend: Callable[[float], object]) -> SharedModel:
            own = slice(1 + len(handles_in(where)))
            model, fds[own] = fds[own], []
            known = self._chooser.known(holder.account.uid, file)
            return store.prepare(
                model, where, self.pace, use=use, charge=charge, file=file, spend=spend, takes=takes, found=known
            )

        return self._prepared(holder, arguments, make)

    def restore(
        self,
        holder: Holder,
        read: Callable[[], RestoredCompilation],
        arguments: PrepareArguments,
        charge: Callable[[ModelBytes], object],
        takes: PreparationTime | None = None,
    ) -> SharedModel:
        """Return the model of the cache files that `read` reads, prepared. `takes`: as of `ModelStore.restore`.

        Raise MissedDeadline*, and what `read`, `charge` and the device raise.
        """

        def make(store: ModelStore, use: ModelUse, spend: Callable[[float], object]) -> SharedModel:
            return store.restore(read, self.pace, use, charge, spend=spend, takes=takes)

        return self._prepared(holder, arguments, make)

    def _prepared(self, holder: Holder, arguments: PrepareArguments, make: _Make) -> SharedModel:
        """Prepare one model of an account at a time; no account waits for another's.

        A model that is ready after the deadline is dropped.
        """
        check_entry("before start")
        self.check_available()
        account, uid = holder.account, holder.account.uid
        self.limits.check_threads(
            len(os.listdir("/proc/self/task")), lambda: account.held["threads"] + threads_started_for(uid)
        )
        use = ModelUse.of(arguments)
        store, spend = self._store(uid), partial(holder.spend, "preparing_seconds")

        def traced() -> SharedModel:
            with due(arguments.deadline), blamed(arguments.trace):
                return make(store, use, spend)

        with self._preparations.one(), self.latency.around(use.preference), starting_threads_for(uid):
            shared = use.run(traced)
        check("preparing")
        self._improver.watch(shared, uid, self.pace)
        self.watch_threads(shared, uid)
        if self.rests:
            self.idle.begin()
        return shared

    def watch_threads(self, shared: SharedModel, uid: int) -> None:
        """Look at the pace of a model whose requests begin: it chooses the number of threads."""
        self._chooser.watch(shared, uid, self.pace)

    def _keep_threads(self, shared: SharedModel) -> None:
        for owner in list(shared.keepers):
            try:
                self.compilations.note_threads(owner, shared.digest or b"", shared.found)
            except OSError as error:
                _log.warning("the number of threads of a model was not kept: %s", error)

    def _store(self, uid: int) -> ModelStore:
        """Return the prepared models of an account."""
        with self._counting:
            found = self._stores.get(uid)
            if found is None:
                found = self._stores[uid] = ModelStore(self.device, self._running)
            return found

    def check_available(self) -> None:
        """Raise DeviceUnavailable while the device takes no work."""
        status = self.device.status
        if not status.takes_work:
            raise DeviceUnavailable(f"device {self.device.name!r} is {status}")

    def _holders(self) -> list[OpenBurst | ClientLane]:
        return [holder for client in list(self.clients) for holder in client.holders()]

    def _is_in_use(self) -> bool:
        """Return True if anything runs, or has run since the last call; False if the driver need not hear of it."""
        if not self.rests:
            return False
        with self._counting:
            left, clients = self._totals.snapshot(), list(self.clients)
        sums = summed(left, (client.counts for client in clients), self.pace)
        # A burst that the driver serves itself has no tickets; it counts its answers.
        answers = sum(worker.answered for client in clients for worker in client.workers())
        before, self._activity = self._activity, answers + sum(int(flow[0]) for flow in sums)
        return before != self._activity or not self.queue.is_idle

    def rest(self) -> bool:
        """Give back what can be made again, unless something is being prepared.

        In that case return False, and look again later. Requests are bound anew afterwards: so it is noticed that the
        device is used again.
        """
        has_rested = self._preparations.rest(self._give_back)
        if not has_rested:
            self.idle.begin()
        return has_rested

    def _give_back(self) -> None:
        self._collects()
        if self.rests:
            self.forget_plans()
        for store in list(self._stores.values()):
            store.rest()
        if self.rests:
            self._hints.give("rest", self.device.rest)

    def forget_plans(self) -> None:
        """Have requests of all clients bound anew: what they are bound to has changed."""
        for client in list(self.clients):
            client.forget_plans()

    def application(self, uid: int, name: str = "") -> Application:
        """Return an application of an account, shared by its clients.

        "" is the account's own, which no limit refuses. Raise ResourceExhaustedTransient.
        """
        with self._counting:
            found = self._applications.get((uid, name))
            if found is None:
                others = sum(of == uid and bool(other) for of, other in list(self._applications))
                if name:
                    self.limits.check("uid_applications", others, "close connections of other applications")
                found = self._applications[uid, name] = Application(self._share(uid), name)
            return found

    def _share(self, uid: int) -> Share:
        """Return the scheduling group of an account, shared by all its applications."""
        share = self._shares.get(uid)
        if share is None:
            share = self._shares[uid] = Share(self.queue, self._weights.get(uid, WEIGHT))
        return share

    def burst_began(self, preference: Preference) -> None:
        """Count a burst that opens, and let the machine know."""
        with self._counting:
            self.pace.bursts += 1
        self.latency.began(preference)

    def burst_ended(self, preference: Preference) -> None:
        """Count a burst that ends. Collect garbage after the last: no collection ran before."""
        with self._counting:
            self.pace.bursts -= 1
        is_owed = self.latency.ended(preference)  # memory, that was kept for it
        if not self._collects() or is_owed:
            self.idle.begin()

    def _collects(self) -> bool:
        """Collect garbage unless a burst is open, or the last collection was long and not long ago.

        A collection looks at every object of every model, and holds all clients up. Returns False if another one is due
        later.
        """
        if self.pace.bursts:
            return True
        begin = time.monotonic()
        if begin < self._collect_from:
            return False
        gc.collect()
        now = time.monotonic()
        self._collect_from = now + _COLLECTING * (now - begin)
        return True

    def traces_of(self, uid: int | None) -> list[Memory]:
        """Return the traces of one account's bursts, or of all."""
        return [memory for owner, memory in list(self.traces.values()) if uid in {None, owner}]

    def time_work(self, seconds: float, uid: int | None) -> bool:
        """Have the device note for so long when its accelerator works for the bursts that are open now.

        These are the bursts of one account, or all. False: the device does not. Raise InvalidArgument.
        """
        if not 0 <= seconds <= _LONGEST_TIMING:
            raise InvalidArgument(f"seconds={seconds!r:.40}: 0 to {_LONGEST_TIMING:g}; ask again later for more")
        until = time.monotonic() + seconds
        for burst, (owner, _) in list(self.traces.items()):
            if uid in {None, owner}:
                burst.trace.works_until = until
        try:
            return bool(self.device.time_work(until))
        except Exception:  # noqa: BLE001 (a device may raise anything)
            _log.exception("device %r failed in time_work", self.device.name)
            return False

    def census(self, uid: int | None) -> Census:
        """Return the census of one account, or of all; it is kept up to date from now on."""
        with self._counting:
            census = self._censuses.get(uid)
            if census is None:
                census = self._censuses[uid] = Census.create()
                self._count(uid, census)
        return census

    def note(self, uid: int, changes: int = 0) -> None:
        """Note that a client of that account has come or gone. `changes`: how many bursts have opened or ended."""
        with self._counting:
            for of, census in self._censuses.items():
                if of in {None, uid}:
                    self._count(of, census, changes)

    def _count(self, uid: int | None, census: Census, changes: int = 0) -> None:
        clients = sum(uid in {None, client.uid} for client in list(self.clients))
        census.note(changes, clients, len(self.traces_of(uid)))

    def admit_next(self) -> None:
        """Serve the next client that the service sends, in a thread of its own.

        No failure ends the engine: a client that cannot be served sees its connection end, and the service tells it so.
        """
        try:
            message = self._service.receive()
        except Exception as error:  # noqa: BLE001 (the others are served)
            self.end_with_service()
            _log.error("a client cannot be served: %s", error)
            time.sleep(_RETRY)
            return
        try:
            (_, uid), channel = message.body, Channel.from_fd(take_fd(message))
            with ExitStack() as failed:
                failed.enter_context(channel)
                ServingThread(self.serve, channel, uid, name="client").start()
                failed.pop_all()
        except Exception as error:  # noqa: BLE001 (as above)
            _log.error("a client cannot be served: %s", error)
        finally:
            message.close()

    def serve(self, channel: Channel, uid: int) -> None:
        """Serve one client of that account until its connection ends."""
        try:
            client = EngineClient(self, uid)
        except Exception as error:  # noqa: BLE001 (the client that there is no room for is told)
            refuse(channel, error)
            self.end_with_service()
            return
        client.handlers["figures"] = partial(self.figures, uid)
        with ExitStack() as end:  # all of it, whatever fails
            end.callback(client.close)
            end.callback(self._leave, client)
            end.callback(self.end_with_service)
            end.enter_context(channel)
            self.clients.add(client)
            self.note(uid)
            serve(channel, client.handlers, client.quota.take)

    def _leave(self, client: EngineClient) -> None:
        with self._counting:
            self.clients.discard(client)
            self._totals.leave(client.counts())

    def figures(self, uid: int, _: Message) -> Reply:
        """Return slots, waiting executions, sums of `driver.engine.totals`, bursts and models: of all accounts.

        Only the device's own account and root may ask. Raise InvalidArgument for others.
        """
        if uid not in {0, device_uid()}:
            raise InvalidArgument(
                "only the device's own account and root may read the figures of all accounts; call `turns` for your own"
            )
        with self._counting:
            left, clients, stores = self._totals.snapshot(), list(self.clients), list(self._stores.values())
        sums = summed(left, (client.counts for client in clients), self.pace)
        return Reply([self.queue.slots, waiters(), sums, len(self.traces), sum(map(len, stores))])

    def end_with_service(self) -> None:
        """End the process if the service is gone. The death of our life words then ends the waits of all clients.

        Called whenever a client's connection ends, as the end of the service may be the reason.
        """
        if self._service.peer_has_died:
            os._exit(0)


def main(
    name: str,
    kind: type[Device],
    service: Channel,
    running: RunningFiles,
    *,
    is_shared: bool,
    real_time: RealTime = USUAL,
) -> None:
    """Run the engine process. `service`: the channel to the service process, which has `running`, too. `is_shared`: by
    accounts. `real_time`: what its owner says of that.
    """
    warnings.simplefilter("ignore")  # numpy warns of infinities that a client computes
    gc.disable()
    note_crashes()
    guard()
    real_time.begin()
    engine = Engine(name, kind(), service, running, is_shared=is_shared, real_time=real_time)
    sandbox.enter(engine.device.needs.system_calls, Reach(os.getpid()))
    life = LifePage()
    ready = service.receive()
    service.watch(take_fd(ready))
    service.send([ready.body[0], 0, list(sandbox.active().items())], [life.fd])
    while True:
        engine.admit_next()
