"""Executions of .onnx files with texts, sequences, maps or optional values among their inputs and outputs.

ONNX Runtime has no such values in memory of ours. Each run makes them of the client's bytes, calls what ONNX Runtime's
own `InferenceSession.run` calls, and packs what comes back; tensors of numbers beside them are read where they lie.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from driver.deadlines import check
from driver.devices.files import checked_input, source_of
from driver.devices.onnxruntime.library import library
from driver.devices.stoppable import Attempt, StoppableRuns
from driver.errors import ExecutionFailed, OutputInsufficientSize
from driver.interface import BoundExecution, BufferArgument
from driver.nn.file_form import PACKED
from driver.protocol.packed_values import pack, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from driver.devices.onnxruntime.file_model import OnnxFileModel, OnnxFilePort

_STORED_AS_BITS = "BFLOAT16"


class PackedExecution(BoundExecution):
    """An execution on its memory. `copied_bytes` counts tensors of numbers alone."""

    is_static = False

    def __init__(
        self,
        owner: OnnxFileModel,
        inputs: Sequence[NDArray[Any] | None],
        outputs: Sequence[NDArray[np.uint8]],
        loop_timeout: float,
    ) -> None:
        """Raise ValueError for arguments that do not fit."""
        if any(isinstance(each, BufferArgument) for each in (*inputs, *outputs)):
            raise ValueError("a file with values that are no tensors of numbers runs in the CPU's memory")
        self._owner, self._outputs = owner, outputs
        lane, self._session = owner.session.lane, owner.session.session._sess  # what the class wraps
        self._names = [port.name for port in owner.outputs]
        self._lock = lane.lock if lane else nullcontext()  # its runs share the lane's stream
        self._runs = StoppableRuns(owner.loops, loop_timeout)
        self._before: list[Callable[[], object]] = []
        self._sources = [self._source(*each) for each in zip(range(len(inputs)), owner.inputs, inputs, strict=True)]
        self._feeds: dict[str, Any] = {}
        self._found: list[Any] = []
        self.shapes = tuple(((), False) for _ in outputs)

    def _source(self, number: int, port: OnnxFilePort, given: Any) -> Callable[[], Any] | None:
        """Return the function that gives ONNX Runtime this input in a run; None: it is left out."""
        where = f"input {number} ({port.name})"
        if given is None and number >= self._owner.required:
            return None
        if port.type == _STORED_AS_BITS:
            raise ValueError(f"{where}: ONNX Runtime takes no bfloat16 beside values that are no tensors")
        if port.type == PACKED.name:
            if given is None and not port.dtype.startswith("optional"):
                raise ValueError(f"{where}: only optional values may be omitted, and this is {port.dtype}")
            return lambda: None if given is None else _value(where, given)
        array = checked_input(where, "an .onnx file", given, port.stored)
        place, fill = source_of(array, port.dtype)
        if fill is not None:
            self._before.append(fill)
            self.copied_bytes += place.nbytes
            self.checked_bytes += place.nbytes if port.chooses else 0
        typed = place.view(np.bool_ if port.dtype == "bool" else port.stored).reshape(array.shape)
        return lambda: typed

    def run(self) -> None:
        """Execute once. Raise OutputInsufficientSize, ExecutionFailed, LoopTimeout, MissedDeadlineTransient."""
        for fill in self._before:
            fill()
        pairs = zip(self._owner.inputs, self._sources, strict=True)
        self._feeds = {port.name: read() for port, read in pairs if read is not None}
        check("queued")
        began = time.perf_counter()
        fault = self._runs.run(self._attempt, is_long=self._owner.is_long)
        if fault and self._owner.provider is not None:
            self._owner.provider.examine(fault)
        if fault:
            raise ExecutionFailed(0, "the file", fault)
        self._owner.took(time.perf_counter() - began)
        found, self._found, self._feeds = self._found, [], {}
        self.shapes = tuple(_store(*each) for each in zip(self._owner.outputs, found, self._outputs, strict=True))
        if not all(is_sufficient for _, is_sufficient in self.shapes):
            raise OutputInsufficientSize(self.shapes)

    def _attempt(self) -> Attempt:
        options = library().RunOptions()
        return Attempt(partial(self._run, options), partial(setattr, options, "terminate", True))

    def _run(self, options: Any) -> str | None:
        try:
            with self._lock:
                self._found = self._session.run(self._names, self._feeds, options)
        except Exception as error:  # noqa: BLE001 - its errors share no other class
            return str(error)
        return None

    def cancel(self) -> None:
        """End the run in progress before its next operation, with ExecutionFailed. Safe from any thread."""
        self._runs.cancel()

    def is_running(self) -> bool:
        return self._runs.is_running


def _value(where: str, memory: NDArray[np.uint8]) -> Any:
    try:
        return unpack(memory)
    except ValueError as error:
        raise ExecutionFailed(0, "the file", f"{where} {error}") from None


def _store(port: OnnxFilePort, value: Any, room: NDArray[np.uint8]) -> tuple[tuple[int, ...], bool]:
    """Write an output, if there is room. Returns its shape, and whether there was."""
    if port.type == PACKED.name:
        contents = np.frombuffer(pack(value), np.uint8)
        shape: tuple[int, ...] = (contents.nbytes,)
    else:
        shape, contents = value.shape, np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    if contents.nbytes > room.nbytes:
        return shape, False
    room[: contents.nbytes] = contents
    return shape, True
