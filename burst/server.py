"""The device's side of a burst, the HAL's execution burst server: a listener thread that takes requests, runs them and
answers.

It has the HAL's two forms. With a prepared model, a request is bound to memory once, and the execution that comes of
that runs many times. With an executor, that one keeps the client's memory by slot and executes each request
(burst/burst_executor.py).

The listener waits, recognises and answers in one C call (csrc/burst/listener.c). Python sees a request only to bind it
at first, or to run it. A listener is tied to its client: it ends when the client closes its context, breaks the
protocol or dies.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Self

from burst._core import ffi, lib
from burst._hot import serve
from burst.burst_executor import ExecutorCache
from burst.channel import MAX_FDS, Message, close_all
from burst.datum import DATUM, DATUM_DTYPE
from burst.ends import address_of, handles_of
from burst.errors import (
    GeneralFailure,
    InvalidArgument,
    PeerDied,
    ResourceExhaustedTransient,
    Timeout,
    status_error,
)
from burst.execution_burst import BurstExecutorWithCache, ExecutionBurst
from burst.executor import BEFORE, CachedExecutor, DecodedRequest, Outcome, Plan, PlanRun, RequestCodec, binding_time
from burst.messages import ErrorStatus, Timing
from burst.plan_cache import MAX_PLANS
from burst.real_time import enter as enter_real_time
from burst.real_time import lock_ends
from burst.request_binder import request_binder
from burst.run_queue import give_way
from burst.serving_thread import ServingThread
from burst.slots import MappingCache
from burst.wire import ResultPacket, decode_request, encode_result
from burst.work_notes import note_trace
from fmq import Flavour, FmqError, InvalidDescriptor, MessageQueueReader, MessageQueueWriter, clock
from fmq.end import spin_ns
from fmq.errors import raise_errno

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from burst.execution_burst import BurstOffer
    from burst.executor import MemoryCache
    from burst.memory import Memory
    from burst.wire import RequestPacket
    from fmq import Descriptor

_log = logging.getLogger(__name__)
_CALLBACK_TIMEOUT = 10.0  # seconds that a client has to hand over its memory
_MAX_LENGTH = 2**16  # elements of a queue; it bounds the buffer that a client makes the device allocate
_MOST_SPIN = 10_000_000  # ns: in real time, a thread that polls for long is taken for a runaway
_LISTEN, _ANSWER = (ffi.cast("void *", ffi.addressof(lib, name)) for name in ("burst_listen", "burst_answer"))


_numbers = count(1)  #: of the bursts that this process has served
_LONGEST_NAME = 15  #: bytes of a thread's name that the kernel keeps


def _listener_name(number: int) -> str:
    """Return "burst-listen-" and the burst's number, which stays whole."""
    return f"{'burst-listen-'[: _LONGEST_NAME - len(str(number))]}{number}"


def _nothing() -> None: ...


class ExecutionBurstServer(ExecutionBurst):
    """The device's end of one burst, made by `create` or `create_with_executor`. `start` begins listening. `stop` ends
    the burst from any thread: it cancels a running execution where that is possible, and does not wait for it.
    """

    def __init__(
        self, offer: BurstOffer, job: Callable[[RequestPacket], DecodedRequest], memories: MemoryCache
    ) -> None:
        """Use `create` or `create_with_executor`."""
        self._callback, self.on_end, self._version = offer.callback, offer.on_end, offer.version
        self._ticket, self.trace, self._life = offer.ticket, offer.trace, offer.life
        self._around = offer.around
        self._memory_from = offer.memory_from
        for queue in (offer.requests, offer.results):
            check_queue(queue)
        self._reader = MessageQueueReader.attach(offer.requests.unannounced())
        try:
            self._writer = MessageQueueWriter.attach(offer.results.unannounced())
        except BaseException:
            self._reader.close()
            raise
        self._real_time = offer.real_time
        if self._real_time:
            lock_ends(self._writer, self._reader, self.trace)
        self._reader.spin_ns = spin_ns(offer.spin)
        if self._real_time and offer.spin != "adaptive":
            self._reader.spin_ns = min(self._reader.spin_ns, _MOST_SPIN)
        self._listener = self._new_listener(max(self._reader.capacity, self._writer.capacity) * DATUM)
        self._plans: list[Plan | None] = [None] * MAX_PLANS
        self._runs: list[Callable[[], object] | None] = [None] * MAX_PLANS  #: of plans whose success is always the same
        self._stale = dict[int, frozenset[int]]()  # plans that were freed while they ran, and what is freed then
        version = offer.version
        codec = RequestCodec(lambda raw: job(decode_request(raw, version)), self._encode, self._fetch)
        self._executor = CachedExecutor(codec, self._forget, memories)
        self._starting, self._is_stopped = threading.Lock(), False
        self._is_ending = self._is_over = False
        self._thread = ServingThread(self._listen, name=_listener_name(next(_numbers)))

    @classmethod
    def create(cls, offer: BurstOffer, prepared: object = None) -> Self:
        """Serve with a `driver.PreparedModel`, or with an object that has a method `bind(request)`; None: with
        `offer.bind`, that is, with the prepared model that the client has opened the burst on.

        Raise ValueError for anything else, InvalidDescriptor, RoleTaken, Malformed; then the callback is still the
        caller's.
        """
        bind = request_binder(prepared, offer)
        return cls(offer, lambda packet: DecodedRequest(packet, bind), MappingCache())

    @classmethod
    def create_with_executor(cls, offer: BurstOffer, executor: BurstExecutorWithCache) -> Self:
        """Serve with an executor that keeps the client's memory by slot. Raise what `create` raises."""
        is_executor = isinstance(executor, BurstExecutorWithCache) and not isinstance(executor, type)
        if not is_executor:
            raise ValueError(
                f"executor={executor!r:.80}: give an object with the methods of burst.BurstExecutorWithCache: "
                "is_cache_entry_present, add_cache_entry, remove_cache_entry, execute"
            )
        cache = ExecutorCache(executor)
        return cls(offer, cache.job, cache)

    def _encode(self, outcome: Outcome) -> bytes:
        """Return the encoded answer. A result packet has no room for a text, which goes into the trace; the listener
        adds times.
        """
        status, shapes, timing, text, cause = outcome
        if text:
            self.trace.note_failure(self._listener.id, status, text, cause)
        return encode_result(ResultPacket(status, shapes, Timing(timing.time_on_device)), self._version)

    def _new_listener(self, nbytes: int) -> Any:
        self._buffer = ffi.new("unsigned char[]", nbytes)
        listener = ffi.new("burst_listener *")
        listener.listen, listener.answer = _LISTEN, _ANSWER
        listener.out, listener.request = handles_of(self._writer, self._reader)
        listener.trace = self.trace.page
        listener.buffer, listener.buffer_bytes = self._buffer, nbytes
        listener.spin_ns, listener.framed, listener.current = self._reader.spin_ns, self._version > 1, -1
        listener.ticket = self._ticket.handle if self._ticket else ffi.NULL
        if lib.burst_plans(listener, MAX_PLANS):
            raise MemoryError("no memory for a burst's plans")
        return ffi.gc(listener, lib.burst_drop_plans)

    def start(self) -> None:
        """Begin listening, unless it was stopped already."""
        with self._starting:
            if not self._is_stopped:
                self._thread.start()

    def stop(self) -> None:
        """End the burst. A running execution is cancelled, or finishes first; its result is dropped."""
        self._is_ending = True  # before the loop: a plan that the listener makes meanwhile is cancelled in `_learn`
        for plan in list(self._plans):
            if plan is not None:
                plan.cancel()
        if self._ticket:
            self._ticket.close()
        with self._starting:
            if not self._is_over:
                lib.burst_inflight_close(self._listener)
        self._callback.shutdown()
        self._writer.close()  # first: the listener may be waiting for room in it
        self._reader.close()
        self._life.close()
        with self._starting:
            is_mine = not self._is_stopped and not self._thread.has_started
            self._is_stopped = True
        if is_mine:
            self._end()

    def free_memory(self, slots: Iterable[int]) -> None:
        """Free slots. Returns at once; memory in use is unmapped after the run."""
        self._executor.free_memory(slots)

    @property
    def answered(self) -> int:
        """The number of requests that this burst has answered. Only a hint: the client can write to that memory."""
        return int(self.trace.page.device.answered)

    @property
    def bound(self) -> int:
        """The number of requests that have a plan, and need not be bound again."""
        return len(self._plans) - self._plans.count(None)

    def forget_plans(self) -> None:
        """Bind all requests anew, because what they were bound to has changed."""
        self._executor.forget_plans()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the listener has freed everything."""
        self._thread.join(timeout)

    def _listen(self) -> None:
        device = self.trace.page.device
        device.pid, device.tid = os.getpid(), threading.get_native_id()
        if self._ticket and self._ticket.gives_way:
            give_way()
        if self._real_time:
            self._enter_real_time()
        try:
            with self._around:
                self._serve()
        except (FmqError, GeneralFailure, ValueError) as end:
            _log.debug("a burst ended: %s", end)
        finally:
            self._end()

    def _enter_real_time(self) -> None:
        try:
            enter_real_time(self._real_time)
        except OSError as error:
            _log.warning("a burst is not served in real time: %s", error)

    def _end(self) -> None:
        """Free everything, once nothing of it runs. The listener calls it last; `stop` does when none has started."""
        lib.burst_inflight_drain(self._listener)
        with self._starting:
            self._is_over = True
        self._writer.close()
        self._reader.close()
        self._life.close()
        self._callback.close()
        if self._ticket:
            self._ticket.leave()  # an error may have come between an execution and its answer
        self._executor.close()
        self._thread.forget()
        self._plans.clear()  # also the plan that ran when `stop` came
        self._runs.clear()
        ffi.release(self._listener)
        on_end, self.on_end = self.on_end, _nothing  # dropped, because it may refer to this server
        on_end()

    def _serve(self) -> None:
        address, runs = address_of(self._listener), self._runs
        answer: bytes | None = None
        while True:
            try:
                code = serve(address, runs, answer)
            except Exception as error:  # noqa: BLE001 (one bad request must not end a process that serves many)
                answer = self._refuse(error)
                continue
            if code > 0:
                answer = self._run(code - 1)
            elif code == -errno.ENOENT:
                answer = self._bind_and_run()
            elif code == -errno.EREMOTEIO:
                answer = self._explain()
            else:
                self._handle_event(code)
                answer = None

    def _run(self, index: int) -> bytes:
        """Return the answer to a request whose plan knows the shapes only after each run."""
        try:
            plan = self._plans[index]
            assert plan
            plan.run()
            self._note_joined(plan)
            return self._executor.answer(plan.success_now())
        except Exception as error:  # noqa: BLE001 (as in _serve)
            return self._refuse(error)

    def _bind_and_run(self) -> bytes:
        """Return the answer to a request that has no plan yet."""
        try:
            with self._executor.lock:
                raw = bytes(ffi.buffer(self._buffer, self._listener.bytes))
                plan = self._executor.plan(raw)
                self._learn(plan)
        except Exception as error:  # noqa: BLE001 (as in _serve)
            self._executor.free_when_idle()
            return self._refuse(error)
        self._executor.free_when_idle()
        listener = self._listener
        known, its = listener.attempt, ffi.addressof(listener, "attempt")
        since = known.since + clock.now() - known.known
        bound = binding_time(known.known, known.deadline)
        run = PlanRun(plan, listener.taken, known.deadline, since=since, bound=bound, judged=its)
        outcome = self._executor.execute(run, self._ticket)
        self._note_joined(plan)
        return self._said(outcome, plan)

    def _note_joined(self, plan: Plan) -> None:
        if (count := plan.execution.joined) > 1:
            self.trace.page.device.joined += 1
            self.trace.note_joined(self._listener.id, count)

    def _explain(self) -> bytes:
        """Return the answer to a request whose C function has failed."""
        plan = self._plans[self._listener.current]
        try:
            status = ErrorStatus(self._listener.failed)
            error = plan.execution.failure(status) if plan else status_error(status)
        except Exception as worse:  # noqa: BLE001 (as in _serve)
            error = worse
        return self._refuse(error)

    def _refuse(self, error: Exception) -> bytes:
        """Return the answer to a request that failed."""
        return self._said(self._executor.failure(error))

    def _said(self, outcome: Outcome, plan: Plan | None = None) -> bytes:
        """Return the answer. `plan`: it was judged; the listener judges others that have begun."""
        is_refused = outcome.cause.phase in BEFORE
        if is_refused:
            self._listener.attempt.begun = 0
        self._listener.is_judged = is_refused or plan is not None
        return self._executor.answer(outcome, plan)

    def _learn(self, plan: Plan) -> None:
        """Add a plan; when the table is full, in place of the one that was used longest ago.

        The caller holds the executor's lock.
        """
        i = lib.burst_next_plan(self._listener)
        execution, success = plan.execution, plan.success
        function, context = execution.native if execution.native and success else (0, 0)
        code = lib.burst_learn(
            self._listener,
            i,
            success or ffi.NULL,
            len(success or b""),
            ffi.cast("void *", function),
            ffi.cast("void *", context),
            plan.measure,
            execution.copied_bytes - execution.checked_bytes,
            execution.checked_bytes,
        )
        if code:
            raise_errno(code, "learn")
        if plan.estimate is not None:
            lib.burst_expect(self._listener, i, plan.estimate)
        if execution.enters_itself:
            lib.burst_enters_itself(self._listener, i)
        written = execution.written
        lib.burst_writes(self._listener, i, written if len(written) else ffi.NULL, len(written))
        if held := self._stale.pop(i, None):
            self._executor.free_memory(held)  # it was freed while the plan ran, which has ended just now
        self._plans[i] = plan
        self._runs[i] = plan.run if success else None
        if success and execution.launch is not None:
            self._runs[i] = self._launching(i, execution.launch)
        if self._is_ending:
            plan.cancel()

    def _launching(self, index: int, launch: Callable[[int], object]) -> Callable[[], object]:
        """Return what is called for runs that go on outside of the listener's thread. The first one has ended here."""
        run = lib.burst_inflight_new(self._listener, index)
        if run == ffi.NULL:
            raise MemoryError("no memory for a burst's plans")
        address = address_of(run)
        note_trace(address, self.trace)
        return partial(launch, address)

    def _forget(self, slots: frozenset[int] | None) -> frozenset[int]:
        """Drop the plans that use one of these slots, or all. One that runs is dropped after its run, and its slots,
        which are returned, are freed then.
        """
        held = set[int]()
        for i, plan in enumerate(self._plans):
            if plan is None or not (slots is None or plan.slots & slots):
                continue
            if lib.burst_forget(self._listener, i):
                self._stale[i] = self._stale.get(i, frozenset()) | (plan.slots & (slots or frozenset()))
                held |= self._stale[i]
            else:
                self._drop(i)
        return frozenset(held)

    def _drop_stale(self) -> set[int]:
        """Drop the plans that were freed while they ran and have ended. Returns the slots that can be freed now."""
        ended = [i for i in self._stale if not lib.burst_inflight_is_pending(self._listener, i)]
        freed = set[int]().union(*(self._stale.pop(i) for i in ended))
        for i in ended:
            self._drop(i)
        return freed.difference(*self._stale.values())

    def _drop(self, index: int) -> None:
        self._plans[index] = self._runs[index] = None

    def _handle_event(self, code: int) -> None:
        """Handle a return of `burst_listen` that is no request. Raise when the burst is over."""
        if code == -errno.ESTALE:
            with self._executor.lock:
                freed = self._drop_stale()
            self._executor.free_memory(freed) if freed else self._executor.free_when_idle()
        elif code == -errno.ETIMEDOUT:
            raise GeneralFailure("the client does not read its results")
        elif code == -errno.EMSGSIZE:
            raise GeneralFailure("the client's result queue has no room for any result")
        elif code not in {-errno.EINTR, -errno.EBUSY}:
            raise_errno(code, "listen")

    def _fetch(self, slots: list[int]) -> list[Memory]:
        """Ask the client for the memory of all these slots. Raise InvalidArgument for an unknown slot."""
        found: list[Memory] = []
        for n in range(0, len(slots), MAX_FDS):  # what one message can carry
            found += self._fetch_part(slots[n : n + MAX_FDS])
        return found

    def _fetch_part(self, slots: list[int]) -> list[Memory]:
        try:
            # Watched only here: a process has few watches, and between requests the listener sleeps on the life word.
            with self._reader.watch(self._callback.socket):
                message = self._callback.call(["get_memories", slots], timeout=_CALLBACK_TIMEOUT)
        except PeerDied as error:
            raise GeneralFailure(f"the client did not hand over its memory: {error}") from error
        except Timeout as error:
            self.stop()  # a late answer would be taken for the answer to the next call
            raise GeneralFailure(f"the client did not hand over its memory: {error}") from error
        try:
            return _memories(message, len(slots), self._memory_from)
        finally:
            if message.fds:
                message.close()


def check_queue(queue: Descriptor) -> None:
    """Raise InvalidDescriptor unless a burst can have this queue."""
    is_channel = queue.dtype == DATUM_DTYPE and queue.flavour is Flavour.SYNCHRONIZED
    if not is_channel or queue.capacity > _MAX_LENGTH:
        raise InvalidDescriptor(
            f"a burst's queues are synchronized, of up to {_MAX_LENGTH} elements of {DATUM} bytes; "
            f"not {queue.flavour.name.lower()}, {queue.capacity} x {queue.dtype}"
        )


def _memories(message: Message, expected: int, memory_from: Callable[[Any, int], Memory]) -> list[Memory]:
    """Return all memory that the client handed over. Raise an error if some is missing. The client is not trusted."""
    match message.body:
        case [0, list(plains)] if len(plains) == len(message.fds) == expected:
            return _map_all(plains, message.take_fds(), memory_from)
        case [ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, *_]:
            raise ResourceExhaustedTransient(
                "the client can open no more descriptors (ulimit -n) to hand over its memory"
            )
        case [int(status), *_] if status != 0:
            raise InvalidArgument("the client knows no memory for a slot of its request")
        case _:
            raise GeneralFailure("the client's answer to get_memories is malformed")


def _map_all(plains: list[object], fds: list[int], memory_from: Callable[[Any, int], Memory]) -> list[Memory]:
    try:
        return [memory_from(plain, fds.pop(0)) for plain in plains]
    finally:
        if fds:
            close_all(fds)
