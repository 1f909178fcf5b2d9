"""A device for Burst: chains of element-wise float32 operations on numpy, block by block.

A device that works operation by operation writes every intermediate result to memory and reads it again. This one takes
a block of rows through all operations of a chain while the block is in the processor's cache, and then the next block.
It leaves everything that is not element-wise to other devices: `supported_operations` says so.

To write your own device, replace `KERNELS`, `_is_taken` and what `_Program` does. The base classes are in
`driver/interface.py`; `burst vts burst_blocks:BlocksDevice` checks the result.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from burst.run_queue import checkpoint
from driver import Device, PreparedModel
from driver.deadlines import checker
from driver.interface import BoundExecution
from driver.nn import ExecutionFailed, OperandLifeTime, OperandType, OutputInsufficientSize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from driver import Model, Operand, Operation
    from driver.interface import BindOptions, Preparation

    Shape = tuple[int, ...]
    Part = tuple[slice, ...]
    Kernel = tuple[Callable[..., object], ...]  # the first one takes the inputs, each other one the result so far


def _with(ufunc: np.ufunc, constant: int) -> Callable[..., object]:
    return lambda x, out: ufunc(x, constant, out=out)


KERNELS: dict[str, Kernel] = {
    "ABS": (np.abs,),
    "ADD": (np.add,),
    "DIV": (np.divide,),
    "EXP": (np.exp,),
    "FLOOR": (np.floor,),
    "LOG": (np.log,),
    "LOGISTIC": (np.negative, np.exp, _with(np.add, 1), np.reciprocal),
    "MAXIMUM": (np.maximum,),
    "MINIMUM": (np.minimum,),
    "MUL": (np.multiply,),
    "NEG": (np.negative,),
    "RELU": (_with(np.maximum, 0),),
    "RELU1": (_with(np.maximum, -1), _with(np.minimum, 1)),
    "RELU6": (_with(np.maximum, 0), _with(np.minimum, 6)),
    "RSQRT": (np.sqrt, np.reciprocal),
    "SIN": (np.sin,),
    "SQRT": (np.sqrt,),
    "SUB": (np.subtract,),
    "TANH": (np.tanh,),
}
ACTIVATIONS: tuple[Kernel, ...] = (), KERNELS["RELU"], KERNELS["RELU1"], KERNELS["RELU6"]  # by their numbers in the HAL
WITH_ACTIVATION = {"ADD", "DIV", "MUL", "SUB"}  # it is their third input
BLOCK = 32768  # elements: 128 KiB of each array


class BlocksDevice(Device):
    """The class of the entry point. Two processes make one: one asks what it supports, the other runs models."""

    name = "blocks"
    version = f"1 (numpy {np.__version__})"  # a new version invalidates measurements and cached compilations
    type = "CPU"

    def supported_operations(self, model: Model) -> list[bool]:
        """True is a promise: the operation will be prepared, alone or with others."""
        return [_is_taken(operation, model.main.operands) for operation in model.main.operations]

    def prepare(self, model: Model, preparation: Preparation) -> _Program:
        """Prepares a validated model whose operations are all supported."""
        return _Program(model, preparation)


def _tensors(operation: Operation) -> tuple[int, ...]:
    """Its inputs without the activation."""
    return operation.inputs[:2] if operation.type in WITH_ACTIVATION else operation.inputs


def _is_taken(operation: Operation, operands: Sequence[Operand]) -> bool:
    if operation.type not in KERNELS:
        return False
    tensors, steering = [*_tensors(operation), *operation.outputs], operation.inputs[len(_tensors(operation)) :]
    is_float = all(operands[i].type == OperandType.TENSOR_FLOAT32 for i in tensors)
    return is_float and all(operands[i].lifetime.is_constant for i in steering)


class _Step(NamedTuple):
    """One operation, with its activation among its kernels."""

    number: int
    type: str
    kernels: Kernel
    inputs: tuple[int, ...]
    output: int


class _Program(PreparedModel):
    """A prepared model. Any number of threads may bind it."""

    serves_all = True  # executions leave no state, so clients with equal models may share it

    def __init__(self, model: Model, preparation: Preparation) -> None:
        self.operands, self.inputs, self.outputs = model.main.operands, model.main.inputs, model.main.outputs
        self.constants = {i: o.value for i, o in enumerate(self.operands) if o.lifetime.is_constant}
        self.steps: list[_Step] = []
        for number, operation in enumerate(model.main.operations):
            self.steps.append(self._step(number, operation))
            preparation.pace()  # lets running bursts come first
        self.uses = Counter(i for step in self.steps for i in step.inputs)

    def _step(self, number: int, operation: Operation) -> _Step:
        kernels = KERNELS[operation.type]
        if operation.type in WITH_ACTIVATION:
            kernels += ACTIVATIONS[int(self.constants[operation.inputs[2]])]
        return _Step(number, operation.type, kernels, _tensors(operation), operation.outputs[0])

    def bind(
        self,
        inputs: Sequence[NDArray[Any] | None],
        outputs: Sequence[NDArray[Any]],
        options: BindOptions,
    ) -> _Bound:
        """Binds it to memory. What can be done once is done here, so that `run` only computes."""
        arrays: dict[int, Any] = self.constants | dict(zip(self.inputs, inputs, strict=True))
        buffers = dict(zip(self.outputs, outputs, strict=True))
        shapes = {i: array.shape for i, array in arrays.items()}
        for step in self.steps:
            shapes[step.output] = self._shape(step, shapes)
        chains = []
        for shape, steps in groupby(self.steps, key=lambda step: shapes[step.output]):
            chains.append(self._chain(shape, list(steps), arrays, buffers))
            options.pace()
        return _Bound(chains, [(shapes[i], buffers[i].nbytes >= 4 * math.prod(shapes[i])) for i in self.outputs])

    def _shape(self, step: _Step, shapes: dict[int, Shape]) -> Shape:
        """Of a step's result. Raises ExecutionFailed: GENERAL_FAILURE for the client."""
        declared = self.operands[step.output].dimensions
        try:
            shape = np.broadcast_shapes(*(shapes[i] for i in step.inputs))
        except ValueError as error:
            raise ExecutionFailed(step.number, step.type, str(error)) from error
        if declared and not _agrees(declared, shape):
            raise ExecutionFailed(step.number, step.type, f"the result is declared {declared} and becomes {shape}")
        return shape

    def _chain(
        self, shape: Shape, steps: list[_Step], arrays: dict[int, Any], buffers: dict[int, NDArray[Any]]
    ) -> _Chain:
        """Steps of one shape. Gives results a place in `arrays`, unless only these steps read them."""
        chain = _Chain(shape, Counter(i for step in steps for i in step.inputs))
        for step in steps:
            is_temporary = self.operands[step.output].lifetime == OperandLifeTime.TEMPORARY_VARIABLE
            if not is_temporary or chain.uses[step.output] < self.uses[step.output]:
                arrays[step.output] = _place(shape, buffers.get(step.output))
            chain.add(step, arrays)
        return chain


def _agrees(declared: Shape, shape: Shape) -> bool:
    return len(declared) == len(shape) and all(d in (0, s) for d, s in zip(declared, shape, strict=True))


def _place(shape: Shape, buffer: NDArray[Any] | None) -> NDArray[Any]:
    """Memory for a whole result: that of its output, if there is enough of it. The bytes behind it are left alone."""
    size = 4 * math.prod(shape)
    if buffer is None or buffer.nbytes < size:
        return np.empty(shape, np.float32)
    return buffer[:size].view(np.float32).reshape(shape)


class _Chain:
    """Steps whose results have one shape, computed block by block along its first axis that is longer than 1.

    uses: how often each operand is read by the steps that are still to be added.
    """

    def __init__(self, shape: Shape, uses: Counter[int]) -> None:
        self.shape, self.uses = shape, uses
        self._axis = next((k for k, length in enumerate(shape) if length > 1), 0)
        self._length = shape[self._axis]
        self._rows = max(1, BLOCK * self._length // max(1, math.prod(shape)))
        self._calls: list[Callable[[Part, Part], None]] = []
        self._held: dict[int, _Piece] = {}  # blocks in use, and free ones
        self._free: list[_Piece] = []

    def add(self, step: _Step, arrays: dict[int, NDArray[Any]]) -> None:
        """Adds a step. Its result goes to a block, unless it has a place in `arrays`."""
        taken = [self._held[i] if i in self._held else self._whole(arrays[i]) for i in step.inputs]
        self.uses.subtract(step.inputs)
        self._free += [self._held.pop(i) for i in set(step.inputs) if i in self._held and not self.uses[i]]
        if step.output in arrays:
            result = self._whole(arrays[step.output])
        else:
            result = self._held[step.output] = self._free.pop() if self._free else self._block()
        self._calls.append(partial(_compute, step.kernels, taken, result))

    def _whole(self, array: NDArray[Any]) -> _Piece:
        return _Piece(array if array.shape == self.shape else np.broadcast_to(array, self.shape), True)

    def _block(self) -> _Piece:
        rows = min(self._rows, self._length)
        shape = tuple(rows if k == self._axis else length for k, length in enumerate(self.shape))
        return _Piece(np.empty(shape, np.float32), False)

    def run(self, before: Callable[[], None]) -> None:
        """Computes it. `before`: called before each block."""
        axes = (slice(None),) * self._axis
        for start in range(0, self._length, self._rows):
            before()
            stop = min(start + self._rows, self._length)
            whole, block = (*axes, slice(start, stop)), (*axes, slice(stop - start))
            for call in self._calls:
                call(whole, block)


class _Piece(NamedTuple):
    """An array that is computed part by part, or a block that holds one part."""

    array: NDArray[Any]
    is_whole: bool

    def at(self, whole: Part, block: Part) -> NDArray[Any]:
        """The part."""
        return self.array[whole if self.is_whole else block]


def _compute(kernels: Kernel, taken: list[_Piece], result: _Piece, whole: Part, block: Part) -> None:
    out = result.at(whole, block)
    first, *others = kernels
    first(*(piece.at(whole, block) for piece in taken), out=out)
    for kernel in others:
        kernel(out, out=out)


class _Bound(BoundExecution):
    """One execution. `shapes`: (dimensions, its memory suffices) of each output."""

    def __init__(self, chains: list[_Chain], shapes: list[tuple[Shape, bool]]) -> None:
        self._chains, self.shapes = chains, shapes

    def run(self) -> None:
        """Executes once. Before each block more urgent executions come first, and an overdue one ends."""
        if not all(is_sufficient for _, is_sufficient in self.shapes):
            raise OutputInsufficientSize(tuple(self.shapes))
        check = checker()

        def before() -> None:
            checkpoint()
            if check:
                check()

        with np.errstate(all="ignore"):
            for chain in self._chains:
                chain.run(before)
