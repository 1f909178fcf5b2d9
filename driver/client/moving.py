"""The move of a client's models and bursts to the second engine of a device that renews itself.

`driver.protocol.renewal` has the protocol. A thread for each connection on which models are prepared sleeps until the
device asks for the move, and makes it. Requests go on meanwhile; a burst goes over when nothing of it is in flight.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import numpy as np

from burst import BurstError, Malformed, Memory, PeerDied, StatusError
from burst.channel import close_all
from driver.client import discovery
from driver.client.buffers import Buffers
from driver.client.job import Job
from driver.client.workspace import KnownRequest
from driver.errors import DeviceFailed, DriverError
from driver.protocol.renewal import RenewalState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from burst import Controller, Request
    from burst.controller import Packet
    from driver.client.buffers import EncodedRequest
    from driver.client.connection import Connection
    from driver.client.device import RemoteDevice
    from driver.client.pipeline import Pipeline
    from driver.client.remote_executor import Home, RemoteExecutor
    from driver.protocol.renewal import Stage

_log = logging.getLogger(__name__)
WITHIN = 120.0  # seconds for a move, and for the end of buffers before it
_MOST_COMPARED = 64 << 20  # bytes of a request
_MOST_WARMED = 4  # requests of a burst
_LOOK = 0.02  # seconds
_MOMENT = 0.05  # seconds
_LONGEST = 0.5  # seconds between two looks at what the first engine still has
_PAUSE = 0.5  # seconds between two moves
_SOON = 2e-4  # seconds between two looks at what is in flight
_TURN = 5e-5  # seconds that a thread of Python runs while another one waits
_ANSWER = 10.0  # seconds for an answer of the service


class BurstBeside(NamedTuple):
    """A burst on the second engine, and the requests that are known there."""

    controller: Controller
    known: list[EncodedRequest]


def watch(device: RemoteDevice, connection: Connection) -> None:
    """Move what the device has over this connection when it renews itself, from now on. A second call does nothing."""
    if connection.is_watched:
        return
    connection.is_watched = True
    try:
        state, fd = _state_of(connection)
    except (BurstError, DriverError):  # an earlier release, or what the next call says better
        return
    arguments = ref(device), ref(connection), state, fd
    thread = threading.Thread(target=_watch, args=arguments, name="burst-renewal", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # this process can have no more threads
        os.close(fd)
    else:
        connection.watcher = ref(thread)


def await_watcher(connection: Connection) -> None:
    """Wait a moment for the thread of a connection that was closed: it ends as soon as the device has noticed that."""
    thread = connection.watcher()
    if thread and thread is not threading.current_thread():
        thread.join(_MOMENT)


def ask(connection: Connection, method: str, *arguments: object) -> tuple[list[Any], list[int]]:
    """Call the device about a renewal. Raise StatusError, PeerDied."""
    return connection.call(method, *arguments, timeout=_ANSWER)


def say_stays(connection: Connection, why: object) -> None:
    """Tell the device that this client cannot move."""
    with suppress(BurstError, DriverError):
        ask(connection, "stays", f"process {os.getpid()}: {why}")


def _state_of(connection: Connection) -> tuple[RenewalState, int]:
    values, fds = ask(connection, "renewal")
    try:
        state = RenewalState.from_wire(values)
        if len(fds) != 1:
            raise Malformed("the answer about a renewal has one descriptor")
        return state, fds.pop()
    finally:
        close_all(fds)


def await_change(
    connection: Connection, within: float, stages: Collection[Stage] = ("idle", "asked", "moving", "draining")
) -> RenewalState:
    """Return how the renewal of a device stands; in one of these stages, after a change or so many seconds.

    Raise StatusError, PeerDied.
    """
    state, fd = _state_of(connection)
    try:
        if not within or state.stage not in stages:
            return state
        _await_end(fd, within)
    finally:
        os.close(fd)
    state, fd = _state_of(connection)
    os.close(fd)
    return state


def _watch(device: ref[RemoteDevice], connection: ref[Connection], state: RenewalState, fd: int) -> None:
    tried = 0
    try:
        while True:
            if not state.is_going_on or state.number == tried:
                _await_end(fd)
            its, old = device(), connection()
            if its is None or old is None or old.has_ended:
                return
            os.close(fd)
            fd = -1
            state, fd = _state_of(old)
            if state.is_going_on and state.number != tried:
                tried = state.number
                if _made(its, old, state):
                    return
                time.sleep(_PAUSE)  # whatever the device asks for
            del its, old
    except (BurstError, DriverError):  # the connection has ended
        return
    finally:
        if fd >= 0:
            os.close(fd)


def _made(device: RemoteDevice, old: Connection, state: RenewalState) -> bool:
    if state.stage == "draining":
        from driver.client.pausing import Pause

        return Pause(device, old).run()
    return Move(device, old, state).run()


def _await_end(fd: int, within: float | None = None) -> None:
    poll = select.poll()
    poll.register(fd, 0)  # no event but the end
    poll.poll(None if within is None else within * 1e3)


def await_buffers(old: Connection) -> None:
    """Wait until the device has no buffer of this connection. Raise DeviceFailed if one stays."""
    why = lambda: f"{len(old.buffers)} buffers on the device were not released"  # noqa: E731
    await_done(lambda: not old.buffers, time.monotonic() + WITHIN / 2, why, pause=_LOOK)


def await_done(is_done: Callable[[], bool], end: float, why: Callable[[], str], pause: float) -> None:
    """Look after each pause until it is done. Raise DeviceFailed, which says why, after `end`, a time.monotonic()."""
    while not is_done():
        if time.monotonic() > end:
            raise DeviceFailed(why())
        time.sleep(pause)


def is_drained(pipeline: Pipeline) -> bool:
    """Take what has arrived; return True once nothing is in flight. The caller holds `submitting`."""
    pipeline.in_flight.begin(pipeline.session.controller)
    pipeline.look()
    return pipeline.in_flight.is_idle


class _ShortTurns:
    """Lets threads that run Python take turns sooner while one of them makes a move: a request waits for no 5 ms."""

    def __init__(self) -> None:
        self._lock, self._users, self._before = threading.Lock(), 0, 0.0

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(_TURN, self._before))

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users and sys.getswitchinterval() <= _TURN:  # else the program has set it meanwhile
                sys.setswitchinterval(self._before)


_short_turns = _ShortTurns()


class Move:
    """One move, from one connection of a device to another."""

    def __init__(self, device: RemoteDevice, old: Connection, state: RenewalState) -> None:
        self.device, self.old, self._state = device, old, state
        self._can_start = discovery.starts(device.address)
        self._second: discovery.SecondService | None = None
        self.new: Connection | None = None
        self._is_late = False

    def run(self) -> bool:
        """Make it; return True if it was made. Otherwise all is as it was, and the device is told why."""
        timer = threading.Timer(WITHIN, self._give_up)
        timer.daemon = True
        try:
            await_buffers(self.old)
        except DeviceFailed as error:
            self._stay(error)
            return False
        with _short_turns:
            try:
                timer.start()
                homes, bursts = self._prepare()
            except Exception as error:  # noqa: BLE001 (whatever it is, all goes on as before)
                self._stay(error)
                return False
            finally:
                timer.cancel()
            self.move_bursts(homes, bursts)
        _log.info("device %r: models and bursts went over to another engine: %s", self.device.name, self._state.words)
        return self.retire()

    def _prepare(self) -> tuple[dict[RemoteExecutor, Home], dict[Pipeline, BurstBeside]]:
        """Make all ready on the second engine; from then on it is the device's. Raise what keeps it from that."""
        new = self.new = self.reach()
        _tell(new, is_moving=True)
        homes, bursts = self.make_ready(new)
        _tell(new, is_moving=False)
        if self._second:
            self._second.take_name()
            ask(self.old, "succeeded")
        if not self.device.move(self.old, new, homes):
            raise DeviceFailed("the device ended, was closed, or got buffers meanwhile")
        return homes, bursts

    def _give_up(self) -> None:
        self._is_late = True
        if self.new:
            self.new.abandon()

    def _stay(self, error: Exception) -> None:
        words = f"the second engine was not ready within {WITHIN:g} s" if self._is_late else str(error)
        _log.warning("device %r: models and bursts stay where they are: %s", self.device.name, words)
        if self._second:
            self._second.forget()
        if self.new:
            self.new.close()
        say_stays(self.old, words)

    # ---- before

    def reach(self) -> Connection:
        """Return a connection to the second service. Raise DeviceFailed, StatusError, PeerDied."""
        old = self.old
        while True:
            (step,), _ = ask(old, "successor", self._can_start)
            if step == "wait":
                await_change(old, WITHIN, ["asked"])
                if self._is_late:
                    raise DeviceFailed("no second engine has begun")
                continue
            if step == "start" and self._can_start:
                self._second = discovery.start_beside(self.device.address, old.service_pid)
                return self.device.beside(self._second.channel)
            return self._connected()

    def _connected(self) -> Connection:
        """Return a connection to the second service, which may be about to begin. Raise as `reach`."""
        while (new := self.device.beside()).service_pid == self.old.service_pid:
            new.close()
            if self._is_late:
                raise DeviceFailed("the device has no second engine")
            time.sleep(_LOOK)
        return new

    def make_ready(self, new: Connection) -> tuple[dict[RemoteExecutor, Home], dict[Pipeline, BurstBeside]]:
        """Prepare all models there, compare what they compute, and open the bursts."""
        homes: dict[RemoteExecutor, Home] = {}
        bursts: dict[Pipeline, BurstBeside] = {}
        for executor in self._executors():
            home = homes[executor] = executor.prepared_on(new)
            for request in _of_each_shape(executor.requests()):
                _await_result(*executor.pipelines)
                _compare(request, executor.home, home)
            for pipeline in list(executor.pipelines):
                if pipeline.session.is_at(self.old):
                    bursts[pipeline] = BurstBeside(pipeline.session.opened_at(home), [])
                    _warm(pipeline, bursts[pipeline])
        return homes, bursts

    def _executors(self) -> list[RemoteExecutor]:
        return [executor for executor in list(self.device.executors) if executor.home.connection is self.old]

    # ---- after

    def move_bursts(self, homes: dict[RemoteExecutor, Home], bursts: dict[Pipeline, BurstBeside]) -> None:
        """Let each burst go over; also those that were opened meanwhile."""
        for executor, home in homes.items():
            for pipeline in list(executor.pipelines):
                try:
                    if pipeline.session.is_at(self.old):
                        beside = bursts.pop(pipeline, None) or BurstBeside(pipeline.session.opened_at(home), [])
                        _go_over(pipeline, self.old, home, beside)
                except (BurstError, DriverError, ValueError) as error:
                    _log.warning("device %r: a burst stays where it is: %s", self.device.name, error)

    def retire(self) -> bool:
        """Close the first connection once nothing uses it any more."""
        old, pause = self.old, _LOOK
        while not old.has_ended and (self._has_bursts() or not old.lane.retire()):
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        old.is_retired = True
        old.abandon()
        return True

    def _has_bursts(self) -> bool:
        executors = list(self.device.executors)
        return any(pipeline.session.is_at(self.old) for each in executors for pipeline in list(each.pipelines))


def _tell(new: Connection, *, is_moving: bool) -> None:
    """Tell the second engine whether it has time: until all is ready there, requests go on in the first one."""
    with suppress(StatusError):  # an earlier release
        new.call("moving", is_moving, timeout=_ANSWER)


def _warm(pipeline: Pipeline, beside: BurstBeside) -> None:
    """Have the second engine execute the newest requests whose outputs are free, so that it knows their memory.

    Of a chain's step nobody but the chain knows whose memory is free.
    """
    if not isinstance(pipeline.buffers, Buffers):
        return
    for encoded in pipeline.buffers.requests()[-_MOST_WARMED:]:
        packet = beside.controller.encode(encoded.request, measure=pipeline.options.measure)
        _await_result(pipeline)
        if _while_idle(pipeline, partial(_execute_if_free, beside.controller, encoded, packet)):
            beside.known.append(encoded._replace(packet=packet))


def _await_result(*pipelines: Pipeline) -> None:
    """Wait until one of these has a result, for a moment at most: then a stream has nothing to do for longest."""
    controllers = [pipeline.session.controller for pipeline in pipelines]
    before, end = [each.received for each in controllers], time.monotonic() + _MOMENT
    while controllers and [each.received for each in controllers] == before and time.monotonic() < end:
        time.sleep(_SOON)


def _execute_if_free(controller: Controller, encoded: EncodedRequest, packet: Packet) -> bool:
    if encoded.outputs.is_in_use():
        return False
    controller.send(packet)
    return True


def _go_over(pipeline: Pipeline, old: Connection, home: Home, beside: BurstBeside) -> None:
    """Let a burst go over as soon as nothing is in flight. Raise PeerDied if the second engine has ended."""

    def work() -> bool:
        if beside.controller.has_died:
            raise PeerDied("the second engine has ended")
        if pipeline.session.is_at(old):
            pipeline.session.move(home, beside)
        return True

    _while_idle(pipeline, work)
    pipeline.call_back()


def _while_idle(pipeline: Pipeline, work: Callable[[], bool]) -> bool:
    """Do the work when nothing is in flight; nothing is submitted until then. Return what it returns; False for a burst
    that has ended.
    """
    done: list[bool] = []
    with pipeline.in_flight.submitting:
        while not (done or pipeline.session.is_closed or pipeline.session.has_ended):
            if is_drained(pipeline):
                pipeline.in_flight.when_idle(lambda: done.append(work()))
            if not done:
                time.sleep(_SOON)
    return bool(done) and done[0]


def _of_each_shape(requests: list[Request]) -> Iterator[Request]:
    """Yield one request of each shape."""
    known = set[object]()
    for request in requests:
        shape = tuple(
            tuple((a.length, tuple(a.dimensions)) for a in side) for side in (request.inputs, request.outputs)
        )
        if shape not in known:
            known.add(shape)
            yield request


def _compare(request: Request, old: Home, new: Home) -> None:
    """Execute a copy of the request on both engines. Raise DeviceFailed where the second one fails, or computes other
    bits than the first one does whenever it is asked.
    """
    first = _outcome(request, old)
    if first is None:
        return
    second = _outcome(request, new)
    if second == first:
        return
    if second is None:
        raise DeviceFailed("the second engine fails to execute a request that the first one executes")
    if _outcome(request, old) == first:
        raise DeviceFailed("the second engine computes other bits than the first one from the same inputs")


def _outcome(request: Request, home: Home) -> list[bytes] | None:
    """Return what its memory is afterwards; None: it is not executed so, or fails."""
    pools = [pool for pool in request.pools if type(pool) is Memory]
    if len(pools) < len(request.pools) or sum(pool.nbytes for pool in pools) > _MOST_COMPARED:
        return None
    copies = [Memory.create(pool.nbytes) for pool in pools]
    for copy, pool in zip(copies, pools, strict=True):
        copy.asarray()[...] = pool.asarray()
    copied = request._replace(pools=tuple(copies))
    result = home.connection.lane.execute(home.number, Job.of(copied), KnownRequest(copied))
    return None if result.status else [np.asarray(copy.asarray()).tobytes() for copy in copies]
