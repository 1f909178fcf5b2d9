"""Requests of several clients that become one run, along the open first dimension of their model.

A request that finds fewer than two leaders of its priority becomes one: it enters the run queue, takes along all that
wait by then and fit, runs once, and gives the lead to one of those that still wait, before it hands out the rows. So a
request waits for no other one while the device is idle, and no thread is needed for it. The others wait in their own
threads, without a slot, until they are told: that they lead, that they are done, or that they have to run alone.

| a request is | it waits | what ends that |
|---|---|---|
| waiting | in the list | the leader takes it along, it gets the lead, its deadline passes, or its client ends |
| riding | for its rows | the leader, or its deadline or client: then nobody wants its rows any more |
| settling | for its rows, which are being copied | the leader, soon |

Requests of one run have the same priority, and inputs of the same shapes but for the first dimension; where sequences
are padded, but for their length, too. A run that fails says nothing about its rows: each then runs alone, once.

The run queue charges a run to the flow of its leader. Who leads next is chosen among those that wait by what they have
taken of runs and what was charged to them, so that in the end each has paid for its own rows.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from burst import GeneralFailure, MissedDeadlineTransient, OutputShape, Result
from burst import OutputInsufficientSize as InsufficientSize
from burst._core import ffi, lib
from burst.execution import Execution
from burst.messages import Cause, ErrorStatus
from burst.run_queue import Ticket
from fmq import clock
from fmq.clock import FOREVER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from burst.messages import Phase
    from burst.run_queue import Flow
    from driver.engine.binding import BoundRequest
    from driver.engine.device_memory import LoadedModel
    from driver.engine.driver_execution import DriverExecution
    from driver.interface import BindOptions
    from driver.nn import Model
    from driver.protocol.prepare_arguments import JoinTerms

_log = logging.getLogger(__name__)

Array = NDArray[Any]
Bind = Callable[[Sequence[Array | None], Sequence[Array]], "DriverExecution"]

_MOST_BYTES = 32 << 20
"""Bytes of the arguments of one joined run. A request that has more runs alone."""

_MOST_PADDING = 0.125
"""The part of a joined run's sequences that may be padding."""

_MOST_LEADERS = 2
"""Joined runs at a time, of one priority. A driver's runtime has threads for half of the processors in each."""

_LEADING, _DONE, _ALONE = range(3)
"""What a request is told."""


class Joining(NamedTuple):
    """How the requests of one client on one model are joined: by whom, and in which flow they queue."""

    joiner: Joiner
    flow: Flow


class JoinedArguments(NamedTuple):
    """The arguments of one request. `key`: equal for requests that can run together."""

    inputs: Sequence[Array | None]
    outputs: Sequence[Array]
    key: object
    rows: int
    length: int  #: of its sequences; 0: they are not padded

    @property
    def nbytes(self) -> int:
        """Bytes of all arguments."""
        return sum(array.nbytes for array in (*self.inputs, *self.outputs) if array is not None)


class JoinedRequest(Execution):
    """A request that may run together with others. One thread at a time runs it."""

    is_static = False
    enters_itself = True
    claim: Any = None
    """What it costs its client, given back with it."""

    def __init__(
        self, alone: BoundRequest, arguments: JoinedArguments, joining: Joining, bind: Bind, priority: int
    ) -> None:
        """`alone`: the same request, bound by itself. `bind`: binds a joined run, and may raise anything."""
        self.alone, self.arguments, self.bind, self.priority = alone, arguments, bind, priority
        self._joiner, self.flow = joining
        self.copied_bytes, self.checked_bytes = alone.copied_bytes, alone.checked_bytes
        self._ticket, self._is_cancelled, self.due = Ticket(self.flow), False, FOREVER
        self.is_settling = self.is_dropped = False
        self.error: Exception | None = None
        self._found: Sequence[OutputShape] | None = None
        self._turn, self._told = threading.Lock(), _DONE
        self._turn.acquire()

    @property
    def shapes(self) -> Sequence[OutputShape]:  # type: ignore[override]  # follows the run
        """The shapes of the outputs, once it has run."""
        return self.alone.shapes if self._found is None else self._found

    def run(self) -> None:
        """Execute, alone or together with others. Raise StatusError."""
        self.due, self._found, self.error, self.is_dropped = int(lib.burst_due()), None, None, False
        self.joined = 1
        self._joiner.run(self)
        self._raise_error()

    def _raise_error(self) -> None:
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # no cycle: no garbage is collected

    def run_alone(self) -> None:
        """Run by itself, in a slot. Raise StatusError."""
        with self.slot():
            self.alone.run()

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold a slot of the device. Raise StatusError: its deadline has passed, or its client is gone."""
        if self._is_cancelled:
            raise _gone()
        if lib.burst_enter(self._ticket.handle, ffi.NULL, self.due, clock.now()):
            raise _gone() if self._is_cancelled else _missed("queued")
        try:
            yield
        finally:
            self._ticket.leave()

    def cancel(self) -> None:
        """End the run of this request, and all later ones; a run that others share goes on. Any thread."""
        self._is_cancelled = True
        self._ticket.close()
        self.alone.cancel()
        self._joiner.drop(self)

    def failure(self, status: ErrorStatus) -> Exception:
        """Return why a run has ended with that status."""
        return self.alone.failure(status)

    def wait(self, until: int) -> int | None:
        """Wait until it is told something, and return that; None: not until that time."""
        left = -1.0 if until == FOREVER else min(max(0.0, (until - clock.now()) / 1e9), threading.TIMEOUT_MAX)
        return self._told if self._turn.acquire(timeout=left) else None

    def tell(self, what: int) -> None:
        """End its wait. Called once for each."""
        self._told = what
        self._turn.release()

    def is_known(self) -> bool:
        """Return True if each output has a row for each of the inputs', as far as can be known before it runs."""
        return all(shape.dimensions[:1] == (self.arguments.rows,) for shape in self.alone.shapes)

    def take_rows(self, outputs: Sequence[Array], begin: int, joined: int) -> None:
        """Write its rows, the first of which is `begin`, to its own memory. Raise OutputInsufficientSize.

        `joined`: the number of requests that the outputs are of.
        """
        self.joined, mine, shapes = joined, self.arguments, list[OutputShape]()
        pairs = zip(self.alone.shapes, outputs, mine.outputs, strict=True)
        for (known, _), output, memory in pairs:
            rows = output[begin : begin + mine.rows]
            if mine.length and len(known) > 1 and rows.shape[1] != known[1] == mine.length:
                rows = rows[:, : mine.length]
            shapes.append(OutputShape(rows.shape, rows.nbytes <= memory.nbytes))
            if shapes[-1].is_sufficient:
                np.copyto(memory[: rows.nbytes].view(rows.dtype).reshape(rows.shape), rows)
        self._found = tuple(shapes)
        if not all(shape.is_sufficient for shape in shapes):
            result = Result(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, (), self._found)
            raise InsufficientSize("an output has more bytes than its memory", result)


def joined(loaded: LoadedModel, alone: BoundRequest, options: BindOptions) -> JoinedRequest | None:
    """Return a request on a model whose client wants its runs joined, as one of these; None: it runs alone.

    `options`: how it was bound.
    """
    if loaded.joining is None or alone.arrays is None:
        return None
    arguments = loaded.joining.joiner.arguments(*alone.arrays, options.loop_timeout)

    def bind(inputs: Sequence[Array | None], outputs: Sequence[Array]) -> DriverExecution:
        return loaded.shared.execution(loaded.shared.prepared.bind(inputs, outputs, options))

    return JoinedRequest(alone, arguments, loaded.joining, bind, priority=loaded.priority) if arguments else None


class _Apart(Exception):
    """The rows of a joined run cannot be told apart."""


class _JoinedRun:
    """One run of several requests, the leader first."""

    def __init__(self, riders: Sequence[JoinedRequest], follows: Sequence[bool]) -> None:
        """`follows`: of each output, whether its second dimension may be the length of the sequences."""
        self.riders, self._follows = riders, follows
        self.rows = sum(rider.arguments.rows for rider in riders)
        self._length = max(rider.arguments.length for rider in riders)
        self.execution: DriverExecution | None = None  #: once it is bound

    def run(self, dtypes: Sequence[np.dtype[Any]]) -> list[Array]:
        """Run once, in the leader's slot, and return the outputs. Raise anything.

        It ends by the latest deadline of its requests.
        """
        leader, shapes = self.riders[0], [self._shape(n) for n in range(len(dtypes))]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        memory = [np.empty(max(1, size), np.uint8) for size in sizes]
        inputs = [self._input(n) for n in range(len(leader.arguments.inputs))]
        self.execution = leader.bind(inputs, memory)
        if all(rider.is_dropped for rider in self.riders):
            raise _gone()
        due = lib.burst_due()
        lib.burst_set_due(max(rider.due for rider in self.riders))
        try:
            self.execution.run()
        finally:
            lib.burst_set_due(due)
        found = [tuple(shape) for shape, _ in self.execution.shapes]
        if found != shapes:
            raise _Apart(f"{self.rows} rows of inputs have outputs of shapes {found}, and not {shapes}")
        parts = zip(memory, sizes, dtypes, shapes, strict=True)
        return [array[:size].view(dtype).reshape(shape) for array, size, dtype, shape in parts]

    def _input(self, n: int) -> Array | None:
        """Return the rows of input `n`, one request's after the other's, in memory of our own."""
        arrays = [array for rider in self.riders if (array := rider.arguments.inputs[n]) is not None]
        if not arrays:
            return None
        if len({array.shape[1:] for array in arrays}) == 1:
            return np.concatenate(arrays)
        whole, begin = np.zeros((self.rows, self._length, *arrays[0].shape[2:]), arrays[0].dtype), 0
        for array in arrays:
            whole[begin : begin + len(array), : array.shape[1]] = array
            begin += len(array)
        return whole

    def _shape(self, n: int) -> tuple[int, ...]:
        """Return the shape that output `n` has to have: the leader's, with all rows."""
        leader = self.riders[0]
        others = list(leader.alone.shapes[n].dimensions[1:])
        if self._follows[n] and others and others[0] == leader.arguments.length:
            others[0] = self._length
        return (self.rows, *others)


class Joiner:
    """Joins the requests of one account on one model whose clients have given equal terms. Any thread.

    runs, requests: joined runs, and the requests that were in them.
    """

    def __init__(self, model: Model, terms: JoinTerms) -> None:
        self._terms, graph = terms, model.main
        self._dtypes = [graph.operands[i].type.stored_dtype for i in graph.outputs]
        inputs, outputs = ([graph.operands[i].dimensions for i in side] for side in (graph.inputs, graph.outputs))
        self._has_length = [terms.pads and len(shape) > 1 and not shape[1] for shape in inputs]
        self._follows = [terms.pads and (not shape or (len(shape) > 1 and not shape[1])) for shape in outputs]
        self._lock, self._full = threading.Lock(), threading.Event()
        self._waiting: list[JoinedRequest] = []
        self._running: list[_JoinedRun] = []
        self._leaders, self._is_over = Counter[int](), False  # how many, by priority
        self._balance: WeakKeyDictionary[Flow, float] = WeakKeyDictionary()
        self.runs = self.requests = 0

    def arguments(
        self, inputs: Sequence[Array | None], outputs: Sequence[Array], loop_timeout: float
    ) -> JoinedArguments | None:
        """Return the arguments of a request that can be joined; None: it cannot."""
        shapes = [None if array is None else array.shape for array in inputs]
        rows = {shape[0] if shape else 0 for shape in shapes if shape is not None}
        if self._is_over or len(rows) != 1 or not 0 < (count := rows.pop()) < self._terms.rows:
            return None
        pairs = list(zip(shapes, self._has_length, strict=True))
        lengths = {shape[1] for shape, has_length in pairs if shape is not None and has_length}
        length = lengths.pop() if len(lengths) == 1 else 0
        of_rows = [
            shape and ((None, *shape[2:]) if length and has_length else shape[1:]) for shape, has_length in pairs
        ]
        found = JoinedArguments(inputs, outputs, (loop_timeout, tuple(of_rows)), rows=count, length=length)
        return found if found.nbytes <= _MOST_BYTES else None

    def run(self, request: JoinedRequest) -> None:
        """Run a request in the calling thread, or wait until another one has. Raise StatusError, or leave an error."""
        with self._lock:
            leads = self._leaders[request.priority] < _MOST_LEADERS
            self._leaders[request.priority] += leads
            if not leads:
                self._waiting.append(request)
                if self._rows_waiting() >= self._terms.rows:
                    self._full.set()
        told = _LEADING if leads else self._wait(request)
        if told == _LEADING:
            self._lead(request)
        elif told == _ALONE:
            request.run_alone()

    def _rows_waiting(self) -> int:
        return sum(each.arguments.rows for each in self._waiting)

    def _wait(self, request: JoinedRequest) -> int:
        """Wait as `_await` does, and have the run queue count it."""
        told, began = _ALONE, time.monotonic()
        request.flow.begin_wait()
        try:
            told = self._await(request)
        finally:
            request.flow.end_wait(time.monotonic() - began, joined=told == _DONE and request.error is None)
        return told

    def _await(self, request: JoinedRequest) -> int:
        """Return what the request is told. Raise MissedDeadlineTransient."""
        told = request.wait(request.due)
        if told is not None:
            return told
        with self._lock:
            if request in self._waiting:
                self._waiting.remove(request)
                raise _missed("queued")
            if self._run_of(request) and not request.is_settling:
                self._drop_rider(request)
                raise _missed("executing")
        told = request.wait(FOREVER)  # it was told meanwhile, or will be soon
        assert told is not None
        return told

    def drop(self, request: JoinedRequest) -> None:
        """End the wait of a request whose client is gone."""
        with self._lock:
            if request in self._waiting:
                self._waiting.remove(request)
            else:
                run = self._run_of(request)
                if run is None or request.is_settling or request.is_dropped:
                    return
                self._drop_rider(request)
                if request is run.riders[0]:
                    return
            request.error = _gone()
            request.tell(_DONE)

    def _run_of(self, request: JoinedRequest) -> _JoinedRun | None:
        return next((run for run in self._running if request in run.riders), None)

    def _drop_rider(self, request: JoinedRequest) -> None:
        """Want the rows of a request no more. The run is cancelled once nobody wants any."""
        request.is_dropped = True
        run = self._run_of(request)
        if run and run.execution and all(rider.is_dropped for rider in run.riders):
            run.execution.cancel()

    def _lead(self, request: JoinedRequest) -> None:
        """Run a request with those that it can take along. Raise StatusError; the lead is handed on in any case."""
        run: _JoinedRun | None = None
        outputs: list[Array] | None = None
        try:
            self._await_others(request)
            with request.slot():
                run, began = self._with_others(request), time.perf_counter()
                if run is None:
                    request.alone.run()
                else:
                    outputs = self._outputs(run)
                    self._charge(run, time.perf_counter() - began)
        finally:
            self._hand_on(request.priority)
            if run is not None:
                self._settle(run, outputs)

    def _await_others(self, request: JoinedRequest) -> None:
        if not self._terms.window:
            return
        with self._lock:
            self._full.clear()
            is_full = self._rows_waiting() + request.arguments.rows >= self._terms.rows
        if not is_full:
            self._full.wait(max(0, min(self._terms.window, request.due - clock.now())) / 1e9)

    def _with_others(self, leader: JoinedRequest) -> _JoinedRun | None:
        """Return the next run, with the leader and those that it takes along; None: it runs alone."""
        if self._is_over or not self._waiting or not leader.is_known():
            return None
        riders, rest, sizes = [leader], list[JoinedRequest](), _Sizes.of(leader.arguments)
        with self._lock:
            for other in self._waiting:
                is_alike = other.priority == leader.priority and other.arguments.key == leader.arguments.key
                more = sizes.with_(other.arguments, self._terms.rows) if is_alike and other.is_known() else None
                (riders if more else rest).append(other)
                sizes = more or sizes
            if len(riders) == 1:
                return None
            self._waiting = rest
            for rider in riders:
                rider.is_settling = False
            self._running.append(run := _JoinedRun(riders, self._follows))
        return run

    def _outputs(self, run: _JoinedRun) -> list[Array] | None:
        """Return the outputs of a joined run; None: each request has to run alone."""
        try:
            return run.run(self._dtypes)
        except _Apart as error:
            self._is_over = True
            _log.warning("runs of a model are not joined any more: %s", error)
        except Exception as error:  # noqa: BLE001 (it may be the fault of one row, which its own run then says)
            _log.debug("a joined run failed, and its %d requests run alone: %s", len(run.riders), error)
        return None

    def _charge(self, run: _JoinedRun, seconds: float) -> None:
        """Note what each has taken of a run that its leader's flow has paid for."""
        with self._lock:
            self.runs, self.requests = self.runs + 1, self.requests + len(run.riders)
            balance = self._balance
            for rider in run.riders:
                share = rider.arguments.rows / run.rows
                balance[rider.flow] = balance.get(rider.flow, 0.0) - seconds * share
            balance[run.riders[0].flow] += seconds

    def _hand_on(self, priority: int) -> None:
        """Give the lead to the request of this priority that comes next, if any waits."""
        with self._lock:
            waiting = [each for each in self._waiting if each.priority == priority]
            if not waiting:
                self._leaders[priority] -= 1
                return
            balance = self._balance
            following = min(waiting, key=lambda each: balance.get(each.flow, 0.0))
            self._waiting.remove(following)
            following.tell(_LEADING)

    def _settle(self, run: _JoinedRun, outputs: list[Array] | None) -> None:
        """Give each request its rows, or have it run alone. Raise StatusError of the leader's own run."""
        begin, leader = 0, run.riders[0]
        for rider in run.riders:
            with self._lock:
                rider.is_settling = not rider.is_dropped
            if rider.is_settling and outputs is not None:
                try:
                    rider.take_rows(outputs, begin, len(run.riders))
                except Exception as error:  # noqa: BLE001 (it is about this request alone)
                    rider.error = error
            if rider.is_settling and rider is not leader:
                rider.tell(_ALONE if outputs is None else _DONE)
            begin += rider.arguments.rows
        with self._lock:
            self._running.remove(run)
        if leader.is_dropped:
            leader.error = _gone()
        elif outputs is None:
            leader.run_alone()


class _Sizes(NamedTuple):
    """Sizes of a joined run: of its computation and memory."""

    rows: int
    cells: int  #: of the sequences, without padding
    length: int  #: of the longest
    nbytes: int

    @classmethod
    def of(cls, arguments: JoinedArguments) -> Self:
        """Return the sizes of one request."""
        return cls(arguments.rows, arguments.rows * arguments.length, arguments.length, arguments.nbytes)

    def with_(self, more: JoinedArguments, most_rows: int) -> _Sizes | None:
        """Return the sizes with one more request; None: that is too much, or too much of it would be padding."""
        rows, length = self.rows + more.rows, max(self.length, more.length)
        cells, nbytes = self.cells + more.rows * more.length, self.nbytes + more.nbytes
        is_much = rows > most_rows or nbytes > _MOST_BYTES or cells < (1 - _MOST_PADDING) * rows * length
        return None if is_much else _Sizes(rows, cells, length, nbytes)


def _missed(phase: Phase) -> MissedDeadlineTransient:
    return MissedDeadlineTransient(cause=Cause(phase))


def _gone() -> GeneralFailure:
    return GeneralFailure("its client is gone")
