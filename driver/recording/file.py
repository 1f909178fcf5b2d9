"""Reads a recording. The file is untrusted: everything is bounded and checked. A truncated file is read to its end."""

from __future__ import annotations

import os
import stat
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from driver.engine.cache.memory import ModelMemory
from driver.errors import DriverError
from driver.nn import InvalidModel, validate
from driver.nn.file_form import PACKED
from driver.options import PREFERENCES, PRIORITIES
from driver.protocol.model_codec import decode
from driver.protocol.packed_values import unpack
from driver.recording.frames import MAGIC, VERSION, Damaged, FileFrame, bulk_of, read
from driver.recording.tape import UNANSWERED
from fmq.closing import Closing
from fmq.end import spin_ns

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from driver.nn import Model, Operand
    from driver.options import Preference, Priority

_MOST_RUNS = 2**22
_MOST_OTHERS = 2**16  # models, or streams
_MOST_DEPTH = 64
_MOST_STATUS = 8


class BadRecording(DriverError, ValueError):
    """A file is not a recording, or its contents are invalid."""


class Recorded(NamedTuple):
    """A model, as it was prepared."""

    address: str
    preference: Preference
    priority: Priority
    where: list[int]
    frame: FileFrame


class Stream(NamedTuple):
    """A sequence of requests: those of one burst, or of one thread on the plain path."""

    model: int
    path: str
    depth: int
    spin: float | str | None


Part = tuple[tuple[int, ...], memoryview]


class Run(NamedTuple):
    """One request. `inputs` and `outputs`: shape and bytes; None if omitted, or if it stayed on the device."""

    stream: int
    begin: int  #: ns of the recording machine's CLOCK_MONOTONIC
    took: int  #: ns
    deadline: int | None  #: ns after `begin`
    status: int  #: `driver.recording.tape.UNANSWERED` if it is unknown
    inputs: Sequence[Part | None]
    outputs: Sequence[Part | None]


class Recording(Closing):
    """A recording, open for reading by any thread.

    `trouble`: why the end of the file is missing; `left_out`: how many requests were not recorded, by reason.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read everything but the data. Raise BadRecording."""
        self.path, self.trouble = os.fspath(path), ""
        self.models: dict[int, Recorded] = {}
        self.streams: dict[int, Stream] = {}
        self.left_out: dict[str, int] | None = None
        self.command = ""
        self._begins, self._ats, self._of = array("q"), array("q"), array("q")
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise BadRecording(f"{self.path}: cannot be read: {error.strerror}") from error
        try:
            self._scan()
        except BaseException:
            self.close()
            raise
        self._order = np.argsort(np.array(self._begins), kind="stable")

    def _scan(self) -> None:
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode) or os.pread(self._fd, len(MAGIC), 0) != MAGIC:
            raise BadRecording(f"{self.path}: not a recording; make one with `burst record`")
        at, self.nbytes = len(MAGIC), found.st_size
        try:
            while self.left_out is None:
                frame = read(self._fd, at, self.nbytes)
                self._take(frame, at)
                at = frame.end
        except Damaged as error:
            self.trouble = f"{error} at byte {at}; the part before it is used"

    def _take(self, frame: FileFrame, at: int) -> None:
        """Take a frame. Raise Damaged for what this version does not understand, BadRecording for another
        version's.
        """
        match frame.words:
            case ["begin", int(version), *_] if at == len(MAGIC) and version != VERSION:
                raise BadRecording(f"{self.path}: version {version}; this release reads version {VERSION}")
            case ["begin", _, _, _, _, str(command)] if at == len(MAGIC):
                self.command = command
            case ["model", int(number), str(address), preference, priority, [int(), int()] as where] if (
                preference in PREFERENCES and priority in PRIORITIES and len(self.models) < _MOST_OTHERS
            ):
                self.models[number] = Recorded(address, preference, priority, where, frame=frame)
            case ["stream", int(number), int(model), "burst" | "plain" as path, int(depth), spin] if (
                model in self.models and 1 <= depth <= _MOST_DEPTH and len(self.streams) < _MOST_OTHERS
            ):
                self.streams[number] = Stream(model, path, depth, _spin(spin))
            case ["run", int(stream), int(begin), *_] if stream in self.streams and 0 <= begin < 2**62:
                if len(self._ats) >= _MOST_RUNS:
                    raise Damaged(f"there are more than {_MOST_RUNS} requests")
                self._begins.append(begin)
                self._ats.append(at)
                self._of.append(stream)
            case ["end", int(), dict(reasons)]:
                self.left_out = {str(why): n for why, n in reasons.items() if isinstance(n, int)}
            case _:
                raise Damaged("unknown kind of frame")

    def __len__(self) -> int:
        return len(self._ats)

    @property
    def seconds(self) -> float:
        """Seconds from the first request to the start of the last one."""
        return (max(self._begins) - min(self._begins)) / 1e9 if self._begins else 0.0

    @property
    def begin(self) -> int:
        """Start of the first request, in ns."""
        return min(self._begins, default=0)

    def numbers(self) -> dict[int, list[int]]:
        """Return the numbers of each stream's requests. Requests are numbered from 0 over all streams, by their
        start.
        """
        found: dict[int, list[int]] = {}
        for number, place in enumerate(self._order.tolist()):
            found.setdefault(self._of[place], []).append(number)
        return found

    def run(self, number: int) -> Run:
        """Read one request with its data. Raise BadRecording."""
        try:
            frame = read(self._fd, self._ats[int(self._order[number])], self.nbytes)
            return _run(frame.words, bulk_of(self._fd, frame))
        except Damaged as error:
            raise BadRecording(f"{self.path}: request {number}: {error}") from error

    def model(self, number: int) -> Model:
        """Decode and validate a model. Raise BadRecording."""
        recorded = self.models[number]
        try:
            memory = ModelMemory(np.frombuffer(bulk_of(self._fd, recorded.frame), np.uint8))
            model = decode(memory, recorded.where)
            validate(model)
        except (Damaged, InvalidModel) as error:
            raise BadRecording(f"{self.path}: model {number}: {error}") from error
        return model

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _spin(spin: object) -> float | str | None:
    if spin is None:
        return None
    try:
        spin_ns(spin)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        raise Damaged(f"spin={spin!r:.40}") from error
    return spin  # type: ignore[return-value]


def _run(words: list[Any], bulk: bytes) -> Run:
    match words:
        case ["run", int(stream), int(begin), int(took), int() | None as deadline, int(status), list(ins), list(outs)]:
            is_sane = 0 <= took < 2**62 and UNANSWERED <= status <= _MOST_STATUS
            if is_sane and (deadline is None or abs(deadline) < 2**62):
                parts = _parts([*ins, *outs], memoryview(bulk))
                return Run(
                    stream, begin, took, deadline, status=status, inputs=parts[: len(ins)], outputs=parts[len(ins) :]
                )
    raise Damaged("a request is malformed")


def _parts(described: Iterable[object], bulk: memoryview) -> list[Part | None]:
    found, at = list[Part | None](), 0
    for one in described:
        match one:
            case None:
                found.append(None)
            case [list(dimensions), int(length)] if length >= 0 and all(type(d) is int and d >= 0 for d in dimensions):
                found.append((tuple(dimensions), bulk[at : at + length]))
                at += length
            case _:
                raise Damaged("an argument is malformed")
    if at != len(bulk):
        raise Damaged(f"the arguments need {at} bytes, but the frame has {len(bulk)}")
    return found


def as_value(part: Part, operand: Operand) -> Any:
    """Return the bytes as an array of the operand's type, or as the value that they hold. Raise BadRecording."""
    dimensions, raw = part
    try:
        if operand.type == PACKED:
            return unpack(np.frombuffer(raw, np.uint8))
        found: NDArray[Any] = np.frombuffer(raw, operand.type.dtype).reshape(dimensions)
    except (ValueError, OverflowError) as error:
        raise BadRecording(f"{len(raw)} bytes of shape {dimensions!r:.60} are no {operand.type.name}") from error
    return found
