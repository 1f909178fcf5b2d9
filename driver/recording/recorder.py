"""Records the requests of this process, on the plain path and in bursts: within `record`, or as BURST_RECORD asks.

Checked once per `prepare`; free when recording is off. A request is copied before it is sent, and its result when it
has come; neither copy counts in the time that is recorded.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from burst import Busy, Controller, DeviceBuffer, ErrorStatus, HardwareBuffer
from burst.controller import NotSent, Packet
from burst.memory import VendorMemory
from driver.client.executor import PLAIN, BurstParts, Forwarding, in_front
from driver.client.layout import nbytes
from driver.errors import DriverError
from driver.recording.tape import UNANSWERED, Tape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from burst import OutputShape, Request, RequestArgument, Result
    from burst.controller import Configure
    from burst.wire import ResultPacket
    from driver.client.completion import Completion
    from driver.client.executor import Executor
    from driver.client.fenced import FencedExecution
    from driver.client.job import Job
    from driver.client.remote_executor import RemoteExecutor
    from driver.client.surface import AnyBurst
    from driver.nn import Model, Operand
    from driver.options import Options

VARIABLE, VARIABLE_MB = "BURST_RECORD", "BURST_RECORD_MB"
MOST_MB = 4096
"""Megabytes of a file, unless the caller or BURST_RECORD_MB says otherwise."""

_MB = 10**6
_lock = threading.Lock()
_tapes: dict[str, Tape | None] = {}  # "explicit", and "environment"


def recorded(behind: Executor) -> Executor:
    """Return what records the model's requests if recording is on, or the executor itself. Raise DriverError."""
    tape = _tape()
    return behind if tape is None or behind.remote is None else RecordingExecutor(behind, behind.remote, tape)


@contextmanager
def record(path: str | os.PathLike[str], most_bytes: int = MOST_MB * _MB) -> Iterator[Tape]:
    """Record into a new file all requests of models that this process prepares in the block. Raise DriverError."""
    tape = Tape(Path(path), most_bytes)
    with _lock:
        before, _tapes["explicit"] = _tapes.get("explicit"), tape
    try:
        yield tape
    finally:
        with _lock:
            _tapes["explicit"] = before
        tape.close()


def _tape() -> Tape | None:
    pid = os.getpid()
    found = _tapes.get("explicit")
    if found and found.pid == pid:
        return found
    if not (name := os.environ.get(VARIABLE)):
        return None
    with _lock:
        found = _tapes.get("environment")
        if found is None or found.pid != pid:
            found = _tapes["environment"] = _of_environment(Path(name))
            atexit.register(found.close)
    return found


def _of_environment(path: Path) -> Tape:
    """Return a new tape: at PATH for the first process that prepares a model, at PATH.PID for others."""
    most = os.environ.get(VARIABLE_MB) or str(MOST_MB)
    if not (most.isdecimal() and 0 < int(most) < 10**9):
        raise DriverError(f"{VARIABLE_MB}={most}: expected a whole number of megabytes")
    if path.exists():
        path = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        return Tape(path, int(most) * _MB)
    except DriverError as error:
        raise DriverError(f"{VARIABLE}: {error}") from error


in_front.append(recorded)
os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.Lock()))


_UNUSUAL = (ValueError, TypeError, LookupError, AttributeError)
"""Errors for a request that the device will refuse, or whose memory is not in this process."""

_NOT_HERE = "its inputs are in buffers of the device, or not what the model takes"
_FENCED = "it was launched with fences"
_NO_DEADLINE = 2**64 - 1


class Taker(Protocol):
    """Receives the requests: a `driver.recording.tape.Tape`."""

    def stream(self, prepared: RemoteExecutor, path: str, depth: int, spin: object) -> int:
        """Begin a stream; return its number."""

    def run(self, words: list[Any], bulk: Sequence[bytes]) -> None:
        """Record a finished request."""

    def leave_out(self, reason: str, count: int = 1) -> None:
        """Count requests that are not recorded."""


class CopiedTensor(NamedTuple):
    """One input or output: its shape, and how to copy it."""

    dimensions: tuple[int, ...]
    copy: Callable[[], bytes]


class Arguments:
    """The inputs and outputs of a request. `inputs`: None if omitted; `is_whole`: False if they cannot be copied."""

    def __init__(self, model: Model, request: Request) -> None:
        self._request, main = request, model.main
        self._operands = [main.operands[i] for i in main.outputs]
        self._shapes: Sequence[OutputShape] | None = None
        self._outputs: list[CopiedTensor | None] = []
        self.inputs: list[CopiedTensor | None] = []
        try:
            pairs = zip(request.inputs, (main.operands[i] for i in main.inputs), strict=True)
            self.inputs = [None if a.has_no_value else self._part(a, o) for a, o in pairs]
            self.is_whole = True
        except _UNUSUAL:
            self.is_whole = False

    def outputs(self, shapes: Sequence[OutputShape]) -> list[CopiedTensor | None]:
        """Return the outputs; None for what stays on the device, or in memory that this process does not map."""
        if self._shapes is not shapes:
            self._outputs = [
                None
                if isinstance(self._request.pools[a.pool], DeviceBuffer | VendorMemory)
                else self._part(a, o, shapes[n].dimensions if shapes else ())
                for n, (a, o) in enumerate(zip(self._request.outputs, self._operands, strict=True))
            ]
            self._shapes = shapes
        return self._outputs

    def _part(self, a: RequestArgument, operand: Operand, dimensions: tuple[int, ...] = ()) -> CopiedTensor:
        """Return the tensor that an argument names. Raise one of _UNUSUAL."""
        shape = tuple(dimensions or a.dimensions or operand.dimensions)
        pool = self._request.pools[a.pool]
        if isinstance(pool, HardwareBuffer):
            return CopiedTensor(shape, lambda: np.ascontiguousarray(pool.read()).tobytes())
        return CopiedTensor(shape, pool.asarray(np.uint8, (nbytes(operand, shape),), a.offset).tobytes)


class Note:
    """A request in flight. `deadline`: CLOCK_MONOTONIC ns."""

    __slots__ = ("_arguments", "_begin", "_bulk", "_deadline", "_inputs", "_stream", "_tape")

    def __init__(self, tape: Taker, stream: int, arguments: Arguments, deadline: int | None) -> None:
        self._tape, self._stream, self._arguments, self._deadline = tape, stream, arguments, deadline
        self._bulk, self._inputs = _copied(arguments.inputs)
        self._begin = time.monotonic_ns()

    def end(self, status: int, shapes: Sequence[OutputShape] = ()) -> None:
        """Record the request with its status. One whose outputs were too small is not recorded: it is sent again."""
        took = time.monotonic_ns() - self._begin
        if status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
            return
        try:
            bulk, outputs = _copied([] if status else self._arguments.outputs(shapes))
        except _UNUSUAL:
            self._tape.leave_out("its outputs are not what the model gives")
            return
        left = None if self._deadline is None else self._deadline - self._begin
        words = [self._stream, self._begin, took, left, int(status), self._inputs, outputs]
        self._tape.run(words, [*self._bulk, *bulk])


def _copied(parts: Sequence[CopiedTensor | None]) -> tuple[list[bytes], list[tuple[tuple[int, ...], int] | None]]:
    """Copy all parts; return the bytes, and the shape and size of each part."""
    copies = [part and part.copy() for part in parts]
    described = [
        None if part is None or copy is None else (part.dimensions, len(copy))
        for part, copy in zip(parts, copies, strict=True)
    ]
    return [copy for copy in copies if copy is not None], described


class _ThreadStream(threading.local):
    """The number of the calling thread's stream; None before its first request."""

    number: int | None = None


class RecordingExecutor(Forwarding):
    """An executor that writes the requests of the one behind it to the tape. `remote`: the one on the device."""

    def __init__(self, behind: Executor, remote: RemoteExecutor, tape: Taker) -> None:
        super().__init__(behind)
        self._tape, self._thread_stream, self._remote = tape, _ThreadStream(), remote
        self._known: tuple[Request, Arguments] | None = None
        self._idle_streams: list[int] = []  # of asynchronous requests

    def perform(self, job: Job) -> Result:
        """Execute and record it."""
        note = self._note(job, self._stream)
        try:
            result = self._behind.perform(job)
        except Exception:
            if note:
                note.end(UNANSWERED)
            raise
        if note:
            note.end(result.status, result.output_shapes)
        return result

    def start(self, job: Job) -> Completion:
        """Execute and record it. Requests that are in flight at once are in streams of their own."""
        stream = self._idle_streams.pop() if self._idle_streams else self._new_stream()
        note = self._note(job, lambda: stream)
        completion = self._behind.start(job)

        def end(future: Completion) -> None:
            has_failed = future.cancelled() or future.exception() is not None
            if note:
                note.end(UNANSWERED) if has_failed else note.end(future.result().status, future.result().output_shapes)
            self._idle_streams.append(stream)

        completion.add_done_callback(end)
        return completion

    def _note(self, job: Job, stream: Callable[[], int]) -> Note | None:
        """Return its note; None for a request on memory that is not here."""
        known = self._known
        if known is None or known[0] is not job.request:
            known = self._known = job.request, Arguments(self.model, job.request)
        if not known[1].is_whole:
            self._tape.leave_out(_NOT_HERE)
            return None
        return Note(self._tape, stream(), known[1], job.wait.end)

    def _new_stream(self) -> int:
        return self._tape.stream(self._remote, "plain", 1, None)

    def _stream(self) -> int:
        """Return the stream of this thread, whose requests follow one another."""
        mine = self._thread_stream
        if mine.number is None:
            mine.number = self._new_stream()
        return mine.number

    def launch(self, job: Job) -> FencedExecution:
        """Launch it. Not recorded: the inputs are unknown until the fences are signalled."""
        self._tape.leave_out(_FENCED)
        return self._behind.launch(job)

    def open_burst(self, options: Options, parts: BurstParts = PLAIN) -> AnyBurst:
        """Return a burst whose queues write what goes through them to the tape."""
        return self._behind.open_burst(options, parts._replace(open_controller=self._open_controller))

    def _open_controller(self, configure: Configure, options: Options) -> Controller:
        number = self._tape.stream(self._remote, "burst", options.depth, options.spin)
        return TapedController(self._tape, number, self.model, configure, options=options)


class TapedPacket(Packet):
    """A packet that notes when it is sent."""

    __slots__ = ("arguments",)

    def __init__(self, packet: Packet, arguments: Arguments, call: Callable[[TapedPacket, Packet], int]) -> None:
        self.data, self.nbytes, self.measure = packet.data, packet.nbytes, packet.measure
        self.arguments, self.call = arguments, partial(call, self, packet)
        self.address = 0  # each run is written to the tape


class TapedController(Controller):
    """A burst's client side that records each request, from sending it until its result comes."""

    def __init__(self, tape: Taker, stream: int, model: Model, configure: Configure, options: Options) -> None:
        self._tape, self._stream, self._model = tape, stream, model
        self._notes: dict[int, Note] = {}
        super().__init__(configure, options.memory, options.spin)

    def encode(self, request: Request, *, measure: bool = False) -> Packet:
        """Forward to the base class; the packet notes when it is sent."""
        return TapedPacket(super().encode(request, measure=measure), Arguments(self._model, request), self._call)

    def _call(self, taped: TapedPacket, packet: Packet) -> int:
        deadline = int(self._caller.deadline)
        self._begin(taped, None if deadline == _NO_DEADLINE else deadline)
        code = packet.call()
        if not code:
            self._end(self.last)
        return code

    def send(
        self, packet: Packet, timeout: float | None = None, deadline: int | None = None, last: int | None = None
    ) -> ResultPacket:
        """Forward to the base class and record the request."""
        self._begin(packet, deadline)
        return super().send(packet, timeout, deadline, last)

    def start(self, packet: Packet, deadline: int | None = None) -> None:
        """Forward to the base class and record the request."""
        self._begin(packet, deadline)
        super().start(packet, deadline)

    def interrupted(self, error: BaseException) -> None:
        """Forward to the base class; the request that was sent is recorded as unanswered."""
        super().interrupted(error)
        if not isinstance(error, Busy | NotSent) and (note := self._notes.pop(self.sent, None)):
            note.end(UNANSWERED)

    def close(self) -> None:
        """Forward to the base class. Unanswered requests are not recorded: another controller resends them."""
        if self._notes:
            self._tape.leave_out("it was not answered", len(self._notes))
            self._notes.clear()
        super().close()

    def _begin(self, packet: Packet, deadline: int | None) -> None:
        """Note the request under its future number; if it is not sent, the next request reuses the number."""
        arguments = packet.arguments  # type: ignore[attr-defined]  # all come from `encode`
        if arguments.is_whole:
            self._notes[self.sent + 1] = Note(self._tape, self._stream, arguments, deadline)
        else:
            self._tape.leave_out(_NOT_HERE)

    def _end(self, reply: ResultPacket) -> None:
        """Record the request whose result came last."""
        if note := self._notes.pop(self.received, None):
            note.end(reply.status, reply.output_shapes)

    def _result(self, code: int, measure: bool) -> ResultPacket:
        reply = super()._result(code, measure)
        self._end(reply)
        return reply
