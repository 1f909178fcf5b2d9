"""Plays a recording: the same requests, in as many streams, on the same device or another; what differs is told."""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections import Counter, deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from burst import ErrorStatus, StatusError, Timeout
from driver.client.device import connect
from driver.client.job import Job, perform_with_room
from driver.client.surface import AnyPreparedModel
from driver.client.workspace import InputSet, OutputSet, Workspace
from driver.devices import names
from driver.protocol.packed_values import pack
from driver.recording.file import BadRecording, as_value
from driver.recording.recorder import RecordingExecutor
from driver.recording.tape import UNANSWERED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from burst import Result
    from driver.client.completion import Completion
    from driver.client.device import RemoteDevice
    from driver.client.layout import Shapes
    from driver.client.prepared_model import RemotePreparedModel
    from driver.nn import Operand
    from driver.recording.file import Recording, Run, Stream

Pace = Literal["recorded", "max"]
MOST_STREAMS = 256
_MOST_SEATS = 16  # bursts of one stream: for inputs of other shapes
_PERCENTILES = (50, 90, 99, 100)


@dataclass
class ReplayReport:
    """The result of a replay. Times are seconds, of requests that were answered both times."""

    recorded: array[float] = field(default_factory=lambda: array("d"))
    now: array[float] = field(default_factory=lambda: array("d"))
    statuses: dict[str, Counter[str]] = field(default_factory=lambda: {"recorded": Counter(), "now": Counter()})
    compared: int = 0
    different: int = 0
    worst: Difference | None = None
    late: float = 0.0  #: the largest delay of a request after its recorded time
    seconds: float = 0.0

    @property
    def failed(self) -> int:
        """The number of requests that failed beyond those of the recording."""
        then, now = (sum(n for name, n in self.statuses[when].items() if name != "NONE") for when in self.statuses)
        return max(0, now - then)

    def percentiles(self) -> dict[str, dict[str, float] | None]:
        """Return the percentiles of the recorded and the replayed times."""
        return {name: _percentiles(times) for name, times in (("recorded", self.recorded), ("now", self.now))}


def _percentiles(times: array[float]) -> dict[str, float] | None:
    if not times:
        return None
    found = np.percentile(np.array(times), _PERCENTILES)
    return {f"p{n}" if n < 100 else "max": float(value) for n, value in zip(_PERCENTILES, found, strict=True)}


def replay(
    recording: Recording,
    device: str | None = None,
    pace: Pace = "recorded",
    tolerance: float | None = None,
    tell: Callable[[], object] = lambda: None,
) -> ReplayReport:
    """Prepare the models of a recording and execute its requests.

    Args:
        recording: not closed by this function.
        device: a device's name or a socket's path, for all models; by default the device of the recording.
        pace: "recorded" sends each request at its recorded time, "max" as soon as its stream allows.
        tolerance: compares outputs: relative for floats (absolute below 1), absolute for integers; None: no comparison.
        tell: called after each request.

    Raise BadRecording, and what `driver.connect` and `device.prepare` raise.
    """
    lanes = _lanes(recording)
    if len(lanes) > MOST_STREAMS:
        raise BadRecording(f"{recording.path}: {len(lanes)} streams at once; at most {MOST_STREAMS} can be replayed")
    with ExitStack() as stack:
        prepared = _prepared(recording, {stream.model for stream, _ in lanes}, device, stack)
        play = _Play(recording, pace, tolerance, tell)
        play.run([_Player(play, prepared[stream.model], stream, numbers, stack=stack) for stream, numbers in lanes])
    return play.report


def _lanes(recording: Recording) -> list[tuple[Stream, list[int]]]:
    """Return the streams and the numbers of their requests. Joins equal streams that followed one another."""
    lanes: list[tuple[Stream, list[int]]] = []
    for number, numbers in recording.numbers().items():
        stream = recording.streams[number]
        before = next((of_it for other, of_it in lanes if other == stream and of_it[-1] < numbers[0]), None)
        if before is None:
            lanes.append((stream, numbers))
        else:
            before += numbers
    return lanes


def _prepared(
    recording: Recording, models: set[int], device: str | None, stack: ExitStack
) -> dict[int, RemotePreparedModel]:
    """Prepare the models, with one connection to each device."""
    homes: dict[str, RemoteDevice] = {}
    found = {}
    for number in sorted(models):
        recorded, model = recording.models[number], recording.model(number)
        address = device or recorded.address
        if device is None and address not in names():  # the file is untrusted: do not connect to any path
            raise BadRecording(f"{recording.path}: recorded on {address!r:.100}, not installed here; pass a device")
        if address not in homes:
            homes[address] = stack.enter_context(connect(address))
        prepared = homes[address].prepare(model, preference=recorded.preference, priority=recorded.priority)
        found[number] = stack.enter_context(prepared)
    return found


class _Play:
    """The state that all players of a replay share."""

    def __init__(self, recording: Recording, pace: Pace, tolerance: float | None, tell: Callable[[], object]) -> None:
        self.recording, self.pace, self.tolerance = recording, pace, tolerance
        self.report, self._tell, self._lock = ReplayReport(), tell, threading.Lock()
        self._error: BaseException | None = None
        self.is_over = False
        self._began = 0

    def run(self, players: list[_Player]) -> None:
        """Run all players in parallel. Raise the first error."""
        self._began = time.monotonic_ns()
        threads = [threading.Thread(target=self._run_one, args=(player,), daemon=True) for player in players]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            self.is_over = True  # after Ctrl-C, for the others
        self.report.seconds = (time.monotonic_ns() - self._began) / 1e9
        if self._error:
            raise self._error

    def _run_one(self, player: _Player) -> None:
        try:
            player.play()
        except Exception as error:  # noqa: BLE001 (`run` raises it)
            self._error = self._error or error
            self.is_over = True

    def left(self, run: Run) -> float:
        """Return the seconds until a request's time."""
        if self.pace == "max":
            return 0.0
        return (run.begin - self.recording.begin + self._began - time.monotonic_ns()) / 1e9

    def note_late(self, seconds: float) -> None:
        """Note how late a request began."""
        if self.pace == "recorded":
            with self._lock:
                self.report.late = max(self.report.late, seconds)

    def note(self, number: int, run: Run, took: float, answer: Result | Exception, outputs: list[Any]) -> None:
        """Count a finished request. `outputs`: the model's output operands."""
        status = _status(answer)
        found = None
        is_compared = self.tolerance is not None and run.status == 0 and not isinstance(answer, Exception)
        if is_compared:
            found = largest(number, run, answer, outputs, tolerance=self.tolerance or 0.0)  # type: ignore[arg-type]
        with self._lock:
            report = self.report
            report.statuses["recorded"][_name(run.status)] += 1
            report.statuses["now"][_name(status)] += 1
            report.compared += is_compared
            if status == run.status == 0:
                report.recorded.append(run.took / 1e9)
                report.now.append(took)
            if found:
                report.different += 1
                if report.worst is None or found.by > report.worst.by:
                    report.worst = found
            self._tell()


class _TimesOnly(deque[float]):
    """Takes the place of a tape and keeps only the times, so that they are measured where the recording's were."""

    def stream(self, *_: object) -> int:
        return 1

    def run(self, words: list[Any], _: object) -> None:
        self.append(words[2] / 1e9)

    def leave_out(self, *_: object) -> None:
        pass


class _Player:
    """Replays one stream."""

    def __init__(
        self, play: _Play, prepared: RemotePreparedModel, stream: Stream, numbers: list[int], stack: ExitStack
    ) -> None:
        """`numbers`: of its requests."""
        self._play, self._stream, self._numbers, self._stack = play, stream, numbers, stack
        self._took, model = _TimesOnly(), prepared.model
        self._prepared = AnyPreparedModel(
            RecordingExecutor(prepared.remote, prepared.remote, self._took), prepared.preference
        )
        sides = model.main.inputs, model.main.outputs
        self._inputs, self._outputs = ([model.main.operands[i] for i in side] for side in sides)
        self._seats: dict[Shapes, Any] = {}
        self._present: Any = None
        self._flying: deque[tuple[int, Run, Completion]] = deque()
        first = play.recording.run(numbers[0])
        self._values(first)
        self._seat(first)  # opens the burst before the first request's time

    def play(self) -> None:
        """Send the stream's requests, in order."""
        for number in self._numbers:
            if self._play.is_over:
                return
            self._play_one(number)
        self._land(0)

    def _play_one(self, number: int) -> None:
        run = self._play.recording.run(number)
        values = self._values(run)
        seat = self._seat(run)
        self._land(self._stream.depth - 1)
        for place, value in zip(seat.inputs, values, strict=True):
            if place is not None:
                place[...] = value
        self._wait(run)
        left = None if run.deadline is None else max(run.deadline / 1e9, 1e-6)
        if self._stream.depth == 1:
            self._note(number, run, _answer(lambda: seat.run(timeout=left)))
        else:
            deadline = None if left is None else time.monotonic() + left
            self._flying.append((number, run, seat.submit(deadline=deadline)))

    def _wait(self, run: Run) -> None:
        """Wait for a request's time; take results meanwhile."""
        left = self._play.left(run)
        while left > 0 and not self._play.is_over:
            if self._flying:
                self._land(0, left)
            else:
                time.sleep(min(left, 0.1))
            left = self._play.left(run)
        self._play.note_late(-left)

    def _land(self, most: int, within: float | None = None) -> None:
        """Take results, oldest first, until at most `most` requests are in flight or `within` seconds have passed."""
        end = math.inf if within is None else time.monotonic() + within
        while len(self._flying) > most:
            number, run, future = self._flying[0]
            left = None if within is None else end - time.monotonic()
            if left is not None and left <= 0:
                return
            try:
                error = future.exception(left)
            except Timeout:
                return
            self._flying.popleft()
            self._note(number, run, error or future.result())

    def _note(self, number: int, run: Run, answer: Any) -> None:
        took = self._took.popleft() if self._took else 0.0  # a miss that was found before it was sent
        if isinstance(answer, BaseException) and not isinstance(answer, StatusError | Timeout):
            raise answer
        self._play.note(number, run, took, answer, outputs=self._outputs)

    def _values(self, run: Run) -> list[Any]:
        if len(run.inputs) != len(self._inputs):
            raise BadRecording(f"a request of {len(run.inputs)} inputs; its model takes {len(self._inputs)}")
        return [None if p is None else as_value(p, o) for p, o in zip(run.inputs, self._inputs, strict=True)]

    def _seat(self, run: Run) -> Any:
        """Return the burst, or the `_Plain`, for inputs of its shapes."""
        shapes = tuple(None if part is None else part[0] for part in run.inputs)
        found = self._seats.get(shapes)
        if found is not self._present:
            self._land(0)  # results come in order within one burst alone
        if found is None:
            if len(self._seats) >= _MOST_SEATS:
                raise BadRecording(f"a stream with inputs of more than {_MOST_SEATS} different shapes")
            found = self._seats[shapes] = self._new_seat(shapes)
        self._present = found
        return found

    def _new_seat(self, shapes: Shapes) -> Any:
        if self._stream.path == "plain":
            return _Plain(self._prepared, shapes)
        depth, spin = self._stream.depth, self._stream.spin
        return self._stack.enter_context(self._prepared.burst(input_shapes=shapes, depth=depth, spin=spin))


class _Plain:
    """The plain path, with inputs and a `run` as a burst has them."""

    def __init__(self, prepared: AnyPreparedModel, shapes: Shapes) -> None:
        self._prepared = prepared
        self._workspace = Workspace(InputSet(prepared.model, shapes), OutputSet(prepared.model))
        self.inputs = self._workspace.inputs.arrays

    def run(self, timeout: float | None) -> Result:
        """Send the request and wait for its result. Raise StatusError, PeerDied, Timeout."""
        job = Job.of(self._workspace.request, timeout=timeout)
        result = perform_with_room(self._prepared.executor.perform, job, self._workspace.grown_for)
        result.raise_for_status()
        return result


def _answer(run: Callable[[], Result]) -> Result | Exception:
    try:
        return run()
    except (StatusError, Timeout) as error:
        return error


def _status(answer: Result | Exception) -> int:
    if isinstance(answer, StatusError):
        return int(answer.status)
    return UNANSWERED if isinstance(answer, Exception) else 0


def _name(status: int) -> str:
    return "not answered" if status == UNANSWERED else ErrorStatus(status).name


TOLERANCE = 1e-4


class Difference(NamedTuple):
    """The position where an output differs most from the recorded one."""

    request: int
    output: int
    at: tuple[int, ...]
    was: float
    by: float  #: infinite for a NaN, or another shape


def largest(number: int, run: Run, answer: Result, operands: Sequence[Operand], tolerance: float) -> Difference | None:
    """Return the largest difference over all outputs of a request; None if all are within the tolerance."""
    found = [
        difference(number, n, as_value(part, operand), new, tolerance=tolerance)
        for n, (part, operand, new) in enumerate(zip(run.outputs, operands, answer.outputs, strict=False))
        if part is not None
    ]
    return max((one for one in found if one), key=lambda one: one.by, default=None)


def difference(number: int, n: int, was: Any, new: Any, tolerance: float) -> Difference | None:
    """Return the largest difference of output `n` of a request; None if it is within the tolerance. Texts, sequences
    and maps are equal, or another value.
    """
    if not isinstance(was, np.ndarray) or was.dtype == object:
        return None if pack(was) == pack(new) else Difference(number, n, (), math.nan, by=math.inf)
    if was.shape != new.shape:
        return Difference(number, n, (), math.nan, by=math.inf)
    a, b = was.astype(np.float64), new.astype(np.float64)
    with np.errstate(invalid="ignore"):
        by = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
        by = np.where(np.isnan(by), math.inf, by)
        allowed = tolerance * np.maximum(1.0, np.abs(a)) if was.dtype.kind == "f" else np.full(a.shape, tolerance)
        allowed = np.where(np.isfinite(allowed), allowed, 0.0)
    over = np.where(by > allowed, by, 0.0)
    if not over.size or not over.any():
        return None
    index = np.unravel_index(int(over.argmax()), over.shape)
    return Difference(number, n, tuple(map(int, index)), float(a[index]), by=float(over[index]))
