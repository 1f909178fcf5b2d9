"""What an operation is: its signature as data, a function for output shapes, a function that builds its kernel.

A kernel is a list of *steps*: callables without arguments, bound once to arrays that never move. Running a model means
calling its steps in order, so that everything that can be decided beforehand is decided while the steps are built:

    def relu(call: Call) -> None:
        call.step(np.maximum, call.array(0), 0.0, out=call.outputs[0].data)

Shape functions and builders raise `ValueError` for values they cannot serve; the interpreter adds which operation
it was.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from . import blocks
from .arena import Scratch
from .blocks import Look, look_nowhere
from .model import ChannelQuant, Operand
from .types import Dimensions, OperandType

Array = NDArray[Any]
Step = partial[Any]

MOST_VALUES = 1 << 12
"""Elements of an operand that steers an operation: axes, sizes, a condition."""

LEAST_WORK = 1 << 10
"""What any step counts as: so many elements take as long as a call."""

MAX_STEPS = 1 << 18
"""Longest kernel: a filter of absurd size is refused before its steps fill the memory."""

LOOP_TIMEOUT, LONGEST_LOOP_TIMEOUT = 2.0, 15.0
"""Seconds that a WHILE may take: by default, and at most."""

LETTERS = {
    "f": OperandType.TENSOR_FLOAT32,
    "h": OperandType.TENSOR_FLOAT16,
    "q": OperandType.TENSOR_QUANT8_ASYMM,
    "s": OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
    "i": OperandType.TENSOR_INT32,
    "b": OperandType.TENSOR_BOOL8,
    "y": OperandType.TENSOR_QUANT8_SYMM,
    "P": OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL,
    "w": OperandType.TENSOR_QUANT16_SYMM,
    "W": OperandType.TENSOR_QUANT16_ASYMM,
    "g": OperandType.SUBGRAPH,
}
ANY_RANK = tuple(range(1, 33))


class UnknownValueError(LookupError):
    """A shape depends on a value that only a run will show. Raised while building a model; never leaves the package."""


@dataclass(slots=True)
class Tensor:
    """An operand while it is computed: `array` holds its data, None while only shapes are looked at.

    `values` is a private copy of an operand that chooses a shape, an address or a branch; the array itself may lie in
    memory that another process is writing. `fixed` means that the array never changes between runs. `graph` is what
    runs the subgraph that a SUBGRAPH operand refers to.
    """

    type: OperandType
    shape: Dimensions
    scale: float = 0.0
    zero_point: int = 0
    channel_quant: ChannelQuant | None = None
    array: Array | None = None
    values: Array | None = None
    fixed: bool = False
    graph: Any = None

    @classmethod
    def of(cls, operand: Operand) -> "Tensor":
        """Return the tensor that a model's operand declares, with its array when it is constant.

        Scales get the precision that the HAL gives them.
        """
        scale = float(np.float32(operand.scale))
        tensor = cls(
            operand.base_type, operand.dimensions, scale, operand.zero_point, channel_quant=operand.channel_quant
        )
        if operand.lifetime.is_constant:
            raw = np.ascontiguousarray(operand.value).reshape(-1).view(np.uint8)
            tensor.array, tensor.fixed = raw.view(operand.type.stored_dtype).reshape(operand.dimensions), True
        return tensor

    def keep_values(self) -> None:
        """Copy the array to private memory before anything looks at it: where it lies it may be changing."""
        self.values = self.array = np.array(self.data)

    @property
    def data(self) -> Array:
        """The array, which is there whenever kernels are built; before, only constants have one."""
        if self.array is None:
            raise UnknownValueError
        return self.array


@cache
def _spread(slots: str) -> tuple[str, ...]:
    """Spell out repetitions: "T 2*INT32" is T, INT32, INT32."""
    spelled: list[str] = []
    for slot in slots.split():
        count, star, name = slot.rpartition("*")
        spelled += [name] * (int(count) if star else 1)
    return tuple(spelled)


@dataclass(frozen=True)
class Signature:
    """One way to call an operation.

    types: what T, the type of input `of`, may be; each letter of LETTERS with the HAL version 1.x that first takes it
        ("f0 q0 h2").
    inputs, outputs: slots in order, "2*X" for two of the same. A slot is
        T     as input `of`            F  filter of T: T, or P (per-channel) when T is quantised
        B     bias of T: T for floats, TENSOR_INT32 for quantised T
        S     scalar float: FLOAT16 for TENSOR_FLOAT16, else FLOAT32
        V     scalar of T: S for floats, INT32 for all others
        f h…  data of the tensor type with that letter
        ANY   whatever its type        X? the operand may be omitted (NO_VALUE)
        X...  any number of X, T... at least one
        or the name of an operand type, which then *steers* the operation (as S and V do): its value is copied before
        it is used, and unless it is constant the operation is built anew in every run.
    tails: optional further inputs, each tail after the one before, with the version that added it.
    ranks: of input `of`.
    """

    types: str
    inputs: str
    outputs: str = "T"
    tails: tuple[tuple[int, str], ...] = ()
    ranks: tuple[int, ...] = (1, 2, 3, 4)
    of: int = 0

    def versions(self) -> dict[OperandType, int]:
        """Return the types that T may be, with the HAL version 1.x that first takes each."""
        return {LETTERS[t[0]]: int(t[1:]) for t in self.types.split()}

    def slots(self, count: int) -> tuple[tuple[str, ...], int] | None:
        """Return the slots of a call with `count` inputs and the HAL version it needs, or None when it has no such
        form.
        """
        slots, since = _spread(self.inputs), 0
        for version, tail in ((0, ""), *self.tails):
            slots, since = slots + _spread(tail), max(since, version)
            if (repeated := _repeat(slots, count)) is not None:
                return repeated, since
        return None

    def counts(self) -> str:
        """Say how many inputs it takes, for people."""
        numbers, slots = [], _spread(self.inputs)
        for _, tail in ((0, ""), *self.tails):
            slots += _spread(tail)
            repeated = next((slot for slot in slots if slot.endswith("...")), None)
            least = len(slots) - (repeated is not None and repeated != "T...")
            numbers.append(f"{least} or more" if repeated else str(least))
        return " or ".join(numbers)

    def result_slots(self, count: int) -> tuple[str, ...] | None:
        """Return the slots of `count` outputs, or None when it does not have so many."""
        return _repeat(_spread(self.outputs), count)


def _repeat(slots: tuple[str, ...], count: int) -> tuple[str, ...] | None:
    """`slots` with its "X..." repeated so that there are `count`."""
    at = next((i for i, slot in enumerate(slots) if slot.endswith("...")), None)
    if at is None:
        return slots if len(slots) == count else None
    name, repetitions = slots[at].removesuffix("..."), count - len(slots) + 1
    return slots[:at] + (name,) * repetitions + slots[at + 1 :] if repetitions >= (name == "T") else None


_HALF = OperandType.TENSOR_FLOAT16


def slot_types(slot: str, t: OperandType) -> tuple[OperandType, ...]:
    """Return the operand types that fit `slot` when T is `t`."""
    is_float = t in (_HALF, OperandType.TENSOR_FLOAT32)
    scalar = OperandType.FLOAT16 if t == _HALF else OperandType.FLOAT32
    match slot.rstrip("?"):
        case "F" if t.is_quantised:
            return (t, LETTERS["P"])
        case "T" | "F":
            return (t,)
        case "B":
            return (OperandType.TENSOR_INT32 if t.is_quantised else t,)
        case "S" | "V" as name:
            return (scalar if is_float or name == "S" else OperandType.INT32,)
        case "ANY":
            return tuple(OperandType)
        case name:
            return (LETTERS[name] if name in LETTERS else OperandType[name],)


@cache
def steers(slot: str) -> bool:
    """Return True for a slot whose value chooses a shape, an address or a branch."""
    name = slot.rstrip("?")
    return name not in ("T", "F", "B", "ANY", "SUBGRAPH") and name not in LETTERS


@dataclass(slots=True)
class Call:
    """One operation with its operands: what shape functions read and what kernels are built from.

    inputs: one tensor per input, None where omitted.
    outputs: the declared tensors while shapes are looked at; with exact shapes and arrays while the kernel is built.
    packed: constants already transformed, by input.
    steps: the kernel so far.
    memory: for scratch.
    results: what the shape function of an `is_dynamic` operation computed, in the stored form, for `copy_results`.
    loop_timeout: seconds that a WHILE may take.
    look: what a kernel calls between the blocks of its work, see `blocks`.
    """

    inputs: Sequence[Tensor | None]
    outputs: Sequence[Tensor] = ()
    packed: Mapping[int, Array] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    memory: Scratch = field(default_factory=Scratch)
    results: Sequence[Array] = ()
    loop_timeout: float = LOOP_TIMEOUT
    look: Look = look_nowhere
    work: int = 0  #: of the steps since the last look, in elements
    _shared: dict[str, Array] = field(default_factory=dict)

    def tensor(self, index: int) -> Tensor:
        """Input `index`; `ValueError` when it was omitted."""
        tensor = self.inputs[index]
        if tensor is None:
            raise ValueError(f"input {index} is omitted but needed")
        return tensor

    def given(self, index: int) -> bool:
        """Return True if input `index` was passed, and not as an omitted operand."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def shape(self, index: int) -> Dimensions:
        """Return the dimensions of input `index`."""
        return self.tensor(index).shape

    def array(self, index: int) -> Array:
        """Return the data of input `index`."""
        return self.tensor(index).data

    def values(self, index: int) -> list[int]:
        """Return the elements of a steering 1-D TENSOR_INT32."""
        values = self.matrix(index)
        if values.ndim != 1:
            raise ValueError(f"input {index} has dimensions {list(self.shape(index))}; it has to be 1-D")
        return [int(v) for v in values]

    def matrix(self, index: int) -> Array:
        """Return a steering TENSOR_INT32 of any rank, as a private array."""
        values = self.tensor(index).values
        if values is None:
            raise UnknownValueError(index)
        return values

    def integer(self, index: int) -> int:
        """Return the value of a steering INT32 scalar."""
        return int(self.matrix(index).reshape(-1)[0])

    def real(self, index: int) -> float:
        """Return the value of a steering FLOAT32 or FLOAT16 scalar."""
        return float(self.matrix(index).reshape(-1)[0])

    def graph(self, index: int) -> Any:
        """Return the interpreter of the subgraph that input `index` refers to."""
        if self.tensor(index).graph is None:
            raise UnknownValueError(index)
        return self.tensor(index).graph

    def flag(self, index: int) -> bool:
        """Return the value of a trailing BOOL, false when it is not passed."""
        return index < len(self.inputs) and self.integer(index) != 0

    def step(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Append one step to the kernel, in blocks if it is a large one; and a look, after as much work as a block."""
        if len(self.steps) >= MAX_STEPS:
            raise ValueError(f"the kernel would take more than {MAX_STEPS} steps")
        cost, cut = max(LEAST_WORK, blocks.cost(function, args, kwargs)), None
        if cost > blocks.ELEMENTS:
            cut = blocks.in_blocks(self.look, function, args, kwargs)
        if self.work + cost > blocks.ELEMENTS and self.work:
            self.add_look()
        self.work += cost
        self.steps.append(cut or partial(function, *args, **kwargs))

    def add_look(self) -> None:
        """Append a look, which begins a block."""
        self.work = 0
        if self.look is not look_nowhere:
            self.steps.append(partial(self.look))

    def scratch(self, shape: Sequence[int], dtype: DTypeLike = np.float32, *, zeros: bool = False) -> Array:
        """Return an array that is the kernel's own while it runs. With `zeros` it is kept from run to run, and begins
        so.
        """
        return self.memory.array(shape, dtype, zeros=zeros)

    def shared(self, name: str, shape: Sequence[int], dtype: DTypeLike) -> Array:
        """Scratch memory that all strips of a kernel use in turn: it holds its contents only until the next strip."""
        size, buffer = math.prod(shape), self._shared.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._shared[name] = self.scratch((size,), dtype)
        return buffer[:size].reshape(shape)

    def compact(self, array: Array) -> Array:
        """`array` itself when its elements lie in order, else scratch memory into which every run copies it."""
        if array.flags.c_contiguous:
            return array
        ordered = self.shared("compact", array.shape, array.dtype)
        self.step(np.copyto, ordered, array)
        return ordered

    def pack(self, index: int, transform: "Pack") -> Array:
        """Input `index` in the form `transform` makes of it: now when it is constant, else anew in every run."""
        tensor = self.tensor(index)
        if index in self.packed:
            return self.packed[index]
        packed = transform(tensor)
        if not tensor.fixed:
            self.step(_repack, self.look, transform, tensor, packed)
        return packed


def copy_results(call: Call) -> None:
    """Copy the results of an `is_dynamic` operation, which has computed everything already."""
    for out, result in zip(call.outputs, call.results, strict=True):
        call.step(np.copyto, out.data, result, casting="unsafe")


Pack = Callable[..., Array]
"""From a tensor, and what to call while it takes long, to the array."""


def _repack(look: Look, transform: Pack, tensor: Tensor, packed: Array) -> None:
    blocks.each(look, np.copyto, packed, transform(tensor, look))


Quantisation = Callable[[Tensor, Tensor], tuple[float, int]]
"""From the tensor of type T and the declared output to the scale and zero point that the output really has."""


def declared(_source: Tensor, result: Tensor) -> tuple[float, int]:
    """Return the scale and zero point that the model declares, to which data is requantised."""
    return result.scale, result.zero_point


def same_as_input(source: Tensor, result: Tensor) -> tuple[float, int]:
    """Raw values keep their meaning."""
    return (source.scale, source.zero_point) if result.type.is_quantised else (0.0, 0)


@dataclass(frozen=True)
class OperationType:
    """Everything the package knows about one HAL operation.

    name, code: as in the HAL.
    signatures: the ways to call it.
    shape: the dimensions of every output.
    build: appends the steps of the kernel.
    quantisation: the rule for the outputs' scale and zero point, or one for each.
    pack: inputs worth transforming once when they are constant.
    takes_empty: whether an input may have no elements.
    is_dynamic: the shapes of its outputs depend on its data: `shape` computes everything, `build` is `copy_results`.
    check: what validation refuses beyond the signatures, as a reason; it gets the operands as declared.
    gate: the HAL version 1.x that a call needs beyond what the signatures say; it gets the operands as declared.
    """

    name: str
    code: int
    signatures: tuple[Signature, ...]
    shape: Callable[[Call], Sequence[Dimensions]]
    build: Callable[[Call], None]
    quantisation: Quantisation | tuple[Quantisation, ...] = declared
    pack: Mapping[int, Pack] = field(default_factory=dict)
    takes_empty: bool = False
    is_dynamic: bool = False
    check: Callable[[Sequence[Operand], Sequence[Operand]], str | None] | None = None
    gate: Callable[[Sequence[Operand], Sequence[Operand]], int] | None = None

    def quantise(self, number: int, source: Tensor, result: Tensor) -> tuple[float, int]:
        """Scale and zero point of output `number`."""
        rule = self.quantisation[number] if isinstance(self.quantisation, tuple) else self.quantisation
        return rule(source, result)
