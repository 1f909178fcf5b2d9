"""Executions of a driver's: its `execute`, called from C with the deadline of the thread that runs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from burst import ErrorStatus, GeneralFailure
from burst._core import ffi as burst_ffi
from burst._core import lib
from driver.devices.library.driver_buffers import LibraryBuffer
from driver.devices.library.loaded import Why
from driver.devices.library.table import ffi
from driver.errors import ExecutionFailed, OutputInsufficientSize
from driver.interface import BoundExecution, BufferArgument
from driver.nn import combine_dimensions
from driver.options import PRIORITIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from driver.devices.library.device import LibraryModel
    from driver.interface import BindOptions

_MOST_RANK = 8
_RUN = int(burst_ffi.cast("uintptr_t", burst_ffi.addressof(lib, "burst_timed_run")))


class LibraryExecution(BoundExecution):
    """An execution that the driver's `bind` made, and the memory that it is bound to."""

    _timed: Any = None
    _object: Any = None

    def __init__(
        self,
        model: LibraryModel,
        inputs: Sequence[NDArray[Any] | BufferArgument | None],
        outputs: Sequence[NDArray[Any] | BufferArgument],
        options: BindOptions,
    ) -> None:
        self._model, self._driver, self._kept = model, model.driver, (inputs, outputs)
        self._room = [_room(output) for output in outputs]
        binding, *arguments = self._binding(inputs, outputs, options)
        self._object = self._driver.made("bind", "burst_execution *", model.prepared, binding)
        del arguments
        execute = burst_ffi.cast("driver_function *", _address(self._driver.table.execute))
        self._timed = lib.burst_timed_new(execute, burst_ffi.cast("void *", _address(self._object)))
        if self._timed == burst_ffi.NULL:
            raise MemoryError
        shapes = self._shapes()
        self.is_static = shapes is not None
        self.shapes = shapes or tuple(((), False) for _ in outputs)
        self._is_fit = not self.is_static or all(is_sufficient for _, is_sufficient in self.shapes)
        if self.is_static and self._is_fit:
            self.native = _RUN, int(burst_ffi.cast("uintptr_t", self._timed))

    def _binding(self, inputs: Sequence[Any], outputs: Sequence[Any], options: BindOptions) -> tuple[Any, ...]:
        """Return a `burst_binding`, and what must live as long."""
        graph, kept = self._model.model.main, list[Any]()
        sides = []
        for arrays, operands in ((inputs, graph.inputs), (outputs, graph.outputs)):
            side = ffi.new("burst_argument[]", max(1, len(arrays)))
            for argument, array, operand in zip(side, arrays, operands, strict=False):
                if array is None:
                    continue
                if isinstance(array, BufferArgument):
                    dimensions = array.dimensions
                    argument.buffer = _buffer(array).pointer
                else:
                    dimensions = array.shape if arrays is inputs else graph.operands[operand].dimensions
                    argument.memory = ffi.cast("void *", array.ctypes.data)
                kept.append(ffi.new("uint32_t[]", [*dimensions, 0]))
                argument.bytes = _room(array)
                argument.rank, argument.dimensions = len(dimensions), kept[-1]
            sides.append(side)
        binding = ffi.new("burst_binding *", {"size": ffi.sizeof("burst_binding")})
        binding.n_inputs, binding.n_outputs, binding.stride = len(inputs), len(outputs), ffi.sizeof("burst_argument")
        binding.inputs, binding.outputs = sides
        binding.loop_timeout_ns, binding.priority = int(options.loop_timeout * 1e9), PRIORITIES.index(options.priority)
        return binding, sides, kept

    def run(self) -> None:
        """Execute once, without the GIL. Raise OutputInsufficientSize, ExecutionFailed, StatusError."""
        if not self._is_fit:
            raise OutputInsufficientSize(tuple(self.shapes))
        if status := lib.burst_timed_run(self._timed):
            raise self.failure(ErrorStatus(status))
        if not self.is_static:
            self.shapes = self._known_shapes()
            if not all(is_sufficient for _, is_sufficient in self.shapes):
                raise OutputInsufficientSize(tuple(self.shapes))

    def failure(self, status: ErrorStatus) -> Exception:
        """Return why the last run failed. The driver knows more than the status."""
        said = lib.burst_timed_status(self._timed)
        if said == lib.BURST_TIMED_CANCELLED:
            return ExecutionFailed(0, "the model", "it was cancelled")
        if said == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
            return self._insufficient()
        return self._driver.failure("execute", said or int(status), self._why())

    def _insufficient(self) -> Exception:
        try:
            shapes = self._known_shapes()
        except GeneralFailure as error:
            return error
        if all(is_sufficient for _, is_sufficient in shapes):
            name = self._driver.name
            return GeneralFailure(f"driver {name!r}: execute says that an output is too small, but all suffice")
        self.shapes = shapes
        return OutputInsufficientSize(shapes)

    def _why(self) -> str:
        if not self._driver.has("explain"):
            return ""
        why = Why()
        self._driver.tell("explain", self._object, why.pointer)
        return str(why)

    def cancel(self) -> None:
        """End the run in progress, if the driver can, and all later ones."""
        lib.burst_timed_cancel(self._timed)
        if self._driver.has("cancel"):
            self._driver.tell("cancel", self._object)

    def _known_shapes(self) -> tuple[tuple[tuple[int, ...], bool], ...]:
        if (shapes := self._shapes()) is None:
            raise GeneralFailure(f"driver {self._driver.name!r}: output_shape does not know a shape after execute")
        return shapes

    def _shapes(self) -> tuple[tuple[tuple[int, ...], bool], ...] | None:
        """Return the shapes of all outputs; None while not all are known. Raise GeneralFailure for one that
        cannot be.
        """
        found, shape = [], ffi.new("burst_shape *")
        for n, (operand, room) in enumerate(zip(self._model.model.main.outputs, self._room, strict=True)):
            with self._driver.watched("output_shape"):
                status = self._driver.table.output_shape(self._object, n, shape)
            if status:
                return None
            found.append(self._checked(n, operand, room, shape))
        return tuple(found)

    def _checked(self, n: int, operand: int, room: int, shape: Any) -> tuple[tuple[int, ...], bool]:
        declared = self._model.model.main.operands[operand]
        where = f"driver {self._driver.name!r}: output_shape: output {n}"
        if shape.rank > _MOST_RANK:
            raise GeneralFailure(f"{where} has rank {shape.rank}; at most {_MOST_RANK} is possible")
        dimensions = tuple(shape.dimensions[0 : shape.rank])
        if combine_dimensions(declared.dimensions, dimensions) is None or (declared.dimensions and not dimensions):
            raise GeneralFailure(
                f"{where} has dimensions {list(dimensions)}, the model says {list(declared.dimensions)}"
            )
        is_sufficient = math.prod(dimensions) * declared.type.element_size <= room
        if is_sufficient != bool(shape.is_sufficient):
            words = "suffice" if is_sufficient else "do not suffice"
            raise GeneralFailure(
                f"{where} has dimensions {list(dimensions)}, for which {room} bytes {words}, and is_sufficient is "
                f"{shape.is_sufficient}"
            )
        return dimensions, is_sufficient

    def __del__(self) -> None:
        if self._timed is not None:
            lib.burst_timed_free(self._timed)
        if self._object is not None:
            self._driver.tell("unbind", self._object)


def _buffer(argument: BufferArgument) -> LibraryBuffer:
    if not isinstance(argument.buffer, LibraryBuffer):
        raise GeneralFailure(f"{type(argument.buffer).__name__} is no buffer of this driver")
    return argument.buffer


def _room(argument: NDArray[Any] | BufferArgument) -> int:
    return _buffer(argument).value_bytes if isinstance(argument, BufferArgument) else argument.nbytes


def _address(pointer: Any) -> int:
    return int(ffi.cast("uintptr_t", pointer))
