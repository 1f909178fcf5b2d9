"""One subgraph of a .tflite file during conversion; a tensor becomes an operand on first use."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from driver.errors import ImportFailed, InvalidModel
from driver.formats.file_bytes import Array
from driver.importers.obstacle import Consequence, InputSizes, remedy_of
from driver.nn import Operand, OperandLifeTime, OperandType, Operation, Subgraph
from driver.nn.operands import checked, constant_operand
from driver.nn.types import Dimensions

from .file import Operator, TfliteSubgraph, TfliteTensor

_TYPES = {
    "FLOAT32": OperandType.TENSOR_FLOAT32,
    "FLOAT16": OperandType.TENSOR_FLOAT16,
    "INT32": OperandType.TENSOR_INT32,
    "INT64": OperandType.TENSOR_INT32,
    "UINT8": OperandType.TENSOR_QUANT8_ASYMM,
    "INT8": OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
    "BOOL": OperandType.TENSOR_BOOL8,
}
FLOATS, QUANTISED = ("FLOAT32", "FLOAT16"), ("INT8", "UINT8")
_L = OperandLifeTime


@dataclass(frozen=True, slots=True)
class Ref:
    """An operand of the subgraph under construction."""

    index: int


class TfliteGraph:
    """The operands and operations under construction.

    refer: maps the number of a subgraph in the file to its index in `Model.referenced`. inputs: those of the main
    graph by name, for messages. is_resized: the caller fixed sizes, so what the file declares may no longer hold.
    """

    def __init__(
        self,
        source: TfliteSubgraph,
        refer: Callable[[int], int],
        inputs: Mapping[str, InputSizes],
        *,
        is_resized: bool = False,
    ) -> None:
        self.source, self.refer, self.inputs, self.is_resized = source, refer, inputs, is_resized
        self.broken = set[int]()  #: results of operators that cannot be imported
        self.operands: list[Operand] = []
        self.operations: list[Operation] = []
        self.sizes: dict[int, tuple[int | None, ...]] = {}  #: lists of dimensions by tensor, None where unknown
        self.origins: dict[int, int] = {}  #: the tensor, by list, whose dimension the unknown one in it is
        self.wide: dict[int, Ref] = {}  #: the elements of tensors that have more dimensions than the HAL takes
        self._places: dict[int, Ref] = {}
        self._floats: dict[int, Ref] = {}
        self._states: dict[int, Ref] = {}
        self._tensors: dict[int, int] = {}  # the tensor that an operand is, by index
        self._inputs: list[Ref] = []

    def finish(self, names: tuple[dict[int, str], dict[int, str]], *, is_main: bool) -> Subgraph:
        """Build the subgraph; states follow its own inputs and outputs. names: of inputs and outputs, by tensor."""
        if self._states and not is_main:
            raise ImportFailed(
                f"{self.source.tensor(min(self._states))} keeps its value between executions inside of control flow"
            )
        for tensor, ref in zip(self.source.inputs, self._inputs, strict=True):
            self.operands[ref.index] = replace(self.operand(ref), extra=self._extra(tensor, names[0].get(tensor)))
        outputs = [self._output(self.read(t), self._extra(t, names[1].get(t))) for t in self.source.outputs]
        states = [self._places[tensor] for tensor in self._states]
        finals = [
            self._output(self._states[t], self._extra(t, None) | {"state": n}) for n, t in enumerate(self._states)
        ]
        return Subgraph(
            self.operands,
            self.operations,
            [ref.index for ref in (*self._inputs, *states)],
            [ref.index for ref in (*outputs, *finals)],
        )

    def take(self, tensor: int) -> None:
        """Add an input of the subgraph."""
        info = self.source.tensor(tensor)
        if tensor in self._places:
            raise ImportFailed(f"cannot take {info} as an input: it is listed twice")
        self._places[tensor] = self.add(replace(declared(info), lifetime=_L.SUBGRAPH_INPUT))
        self._inputs.append(self._places[tensor])

    def operand(self, ref: Ref) -> Operand:
        """Return the operand behind a reference."""
        return self.operands[ref.index]

    def add(self, operand: Operand) -> Ref:
        """Add an operand; raises `InvalidModel` when it is invalid by itself."""
        self.operands.append(operand if operand.type == OperandType.SUBGRAPH else checked(operand))
        return Ref(len(self.operands) - 1)

    def constant(self, value: Any, dtype: OperandType | None = None, scale: float = 0.0, zero_point: int = 0) -> Ref:
        """Add a constant that is not in the file."""
        return self.add(constant_operand(value, dtype, scale=scale, zero_point=zero_point))

    def read(self, tensor: int) -> Ref:
        """Return the operand of a tensor that an operator reads: a constant, or a value written before."""
        if tensor in self._states:
            return self._states[tensor]
        self.check(tensor)
        if tensor not in self._places:
            info = self.source.tensor(tensor)
            if tensor in self.wide:
                raise ImportFailed(
                    f"{info} has {len(info.shape or ())} dimensions; only RESHAPE and TRANSPOSE take more than 4"
                )
            if tensor in self.sizes:
                raise ImportFailed(f"{info} holds dimensions that are not known; only RESHAPE takes such a list")
            if info.is_variable:
                raise ImportFailed(
                    f"{info} keeps its value between executions; only recurrent operators may read such a tensor"
                )
            self._places[tensor] = self.add(self._constant(info) if info.data is not None else declared(info))
        return self._places[tensor]

    def is_computed(self, tensor: int) -> bool:
        """Return True if an operator or the caller writes a tensor."""
        place = self._places.get(tensor)
        return place is not None and not self.operand(place).lifetime.is_constant

    def write(self, tensor: int) -> Ref:
        """Return the operand of a tensor that an operator writes."""
        self._only_once(tensor)
        self._places[tensor] = self.add(declared(self.source.tensor(tensor)))
        self._tensors[self._places[tensor].index] = tensor
        return self._places[tensor]

    def resize(self, ref: Ref, shape: Dimensions) -> None:
        """Set the dimensions of an operand, and of the tensor that it is, where they follow from those of inputs."""
        self.operands[ref.index] = replace(self.operand(ref), dimensions=shape)
        tensor = self._tensors.get(ref.index)
        if tensor is not None and self.source.tensor(tensor).shape != ():
            self.source.resize(tensor, shape)

    def check(self, tensor: int) -> None:
        """Raise `Consequence` for a tensor that has no value because its operator cannot be imported."""
        if tensor in self.broken:
            raise Consequence(f"{self.source.name(tensor)!r} is the result of an operator that cannot be imported")

    def give_up(self, operator: Operator) -> None:
        """Go on without an operator, to find further obstacles. Its results become inputs, as the file declares them.

        Integers, and what is computed from constants, have no value then: others may need it.
        """
        is_computed = any(i >= 0 and i not in self.broken and not self._is_constant(i) for i in operator.inputs)
        for tensor in operator.outputs:
            if tensor < 0 or tensor in self._places or tensor in self.wide or tensor in self.sizes:
                continue
            self.broken.add(tensor)
            with contextlib.suppress(ImportFailed, InvalidModel):
                info = self.source.tensor(tensor)
                if (
                    is_computed
                    and info.type in (*FLOATS, *QUANTISED)
                    and info.shape is not None
                    and 0 not in info.shape
                ):
                    self._places[tensor] = self.add(replace(declared(info), lifetime=_L.SUBGRAPH_INPUT))
                    self.broken.discard(tensor)

    def _is_constant(self, tensor: int) -> bool:
        with contextlib.suppress(ImportFailed):
            return self.source.tensor(tensor).data is not None
        return False

    def seen(self, tensors: Sequence[int], reason: str) -> str:
        """Return the tensors that an operator reads, for a message that does not name one of them."""
        found = []
        for tensor in [t for t in tensors[:3] if t >= 0]:
            with contextlib.suppress(ImportFailed):
                found.append(self.source.tensor(tensor))
        if not found or any(repr(info.name[:64]) in reason for info in found):
            return ""
        return f"; it reads {', '.join(map(str, found))}"

    def unsized(self, reason: str) -> ImportFailed:
        """Return the error for an operator that needs sizes which the file leaves open; it tells how to fix them."""
        return ImportFailed(reason, remedy=remedy_of(self.inputs))

    def define(self, tensor: int, value: Array) -> None:
        """Make a written tensor a constant."""
        info = self.source.tensor(tensor)
        if tensor in self._places:
            raise ImportFailed(f"cannot write {info}: it has a value already")
        self._places[tensor] = self.add(
            replace(declared(info), dimensions=value.shape, lifetime=_L.CONSTANT_COPY, value=value)
        )

    def same(self, tensor: int, info: TfliteTensor) -> None:
        """Make a written tensor the constant `info`."""
        self._only_once(tensor)
        self.source.define(tensor, info)

    def keep_sizes(self, tensor: int, sizes: tuple[int | None, ...]) -> None:
        """Make a written tensor a list of dimensions; a constant when all are known."""
        self._only_once(tensor)
        self.sizes[tensor] = sizes
        if None not in sizes:
            self.define(tensor, np.array(sizes, np.int32))

    def keep_wide(self, tensor: int, elements: Ref) -> None:
        """Give a written tensor the elements of `ref`, in order, whatever its dimensions."""
        self._only_once(tensor)
        self.wide[tensor] = elements

    def _only_once(self, tensor: int) -> None:
        info = self.source.tensor(tensor)
        if tensor in self._places or tensor in self.wide or tensor in self.sizes or info.data is not None:
            raise ImportFailed(f"cannot write {info}: it has a value already")

    def floats(self, tensor: int) -> Ref:
        """Return a constant as TENSOR_FLOAT32: itself, or a dequantised copy."""
        info = self.source.tensor(tensor)
        if info.data is None or info.type == "FLOAT32":
            return self.read(tensor)
        if tensor not in self._floats:
            self.source.file.bytes.makes.charge(4 * info.data.size)
            self._floats[tensor] = self.constant(dequantised(info))
        return self._floats[tensor]

    def state(self, tensor: int) -> tuple[Ref, Ref]:
        """Return the operands of a variable: its value before an operator, and its value after."""
        info = self.source.tensor(tensor)
        if not info.is_variable:
            now = self.read(tensor)
            return now, self.like(now)
        if tensor not in self._places:
            extra = {"name": info.name, "state": len(self._states)}
            self._places[tensor] = self.add(replace(declared(info), lifetime=_L.SUBGRAPH_INPUT, extra=extra))
            self._states[tensor] = self._places[tensor]
        now = self.read(tensor)
        self._states[tensor] = self.like(now)
        return now, self._states[tensor]

    def like(self, ref: Ref, **changes: Any) -> Ref:
        """Return a temporary like `ref`, with `changes`."""
        free = {"lifetime": _L.TEMPORARY_VARIABLE, "value": None, "location": None, "extra": None}
        return self.add(replace(self.operand(ref), **(free | changes)))

    def _constant(self, info: TfliteTensor) -> Operand:
        """Return a constant as a view of the file; 64-bit integers become 32-bit copies."""
        assert info.data is not None
        operand, data = declared(info), info.data
        if info.type != "INT64" and info.offset < 0:
            return replace(operand, lifetime=_L.CONSTANT_COPY, value=data.reshape(operand.dimensions))
        if info.type != "INT64":
            place = (info.offset, data.nbytes)
            values = data.reshape(operand.dimensions)
            return replace(operand, lifetime=_L.CONSTANT_REFERENCE, value=values, location=place)
        if data.size and not -(2**31) <= data.min() <= data.max() < 2**31:
            raise ImportFailed(f"{info} does not fit into 32 bits")
        self.source.file.bytes.makes.charge(data.nbytes)
        values = data.astype(np.int32).reshape(operand.dimensions)
        return replace(operand, lifetime=_L.CONSTANT_COPY, value=values)

    def _extra(self, tensor: int, name: str | None) -> dict[str, Any]:
        """Return the names of an input or output: that of the signature if there is one, and that of the tensor."""
        own = self.source.tensor(tensor).name
        return {"name": own} if name is None else {"name": name, "tensor": own}

    def _output(self, ref: Ref, extra: dict[str, Any]) -> Ref:
        """Return the operand of an output; a copy of inputs, constants, and operands that are an output already."""
        if self.operand(ref).lifetime != _L.TEMPORARY_VARIABLE:
            source, ref = ref, self.like(ref)
            self.operations.append(Operation("CAST", [source.index], [ref.index]))
        self.operands[ref.index] = replace(self.operand(ref), lifetime=_L.SUBGRAPH_OUTPUT, extra=extra)
        return ref


def dequantised(info: TfliteTensor) -> Array:
    """Dequantise a constant to float32; at least rank 1."""
    assert info.data is not None
    values = np.atleast_1d(info.data.astype(np.float32))
    if info.type in FLOATS:
        return values
    if info.type not in ("INT8", "UINT8") or not info.scales:
        raise ImportFailed(f"{info} cannot be converted to floats")
    along = [-1 if i == info.channel else 1 for i in range(values.ndim)]
    count, channels = len(info.scales), dict(enumerate(values.shape)).get(info.channel)
    if count > 1 and count != channels:
        raise ImportFailed(f"{info} has {count} scales for dimension {info.channel} of {list(values.shape)}")
    if len(info.zero_points) not in (0, 1, len(info.scales)):
        raise ImportFailed(f"{info} has {len(info.zero_points)} zero points and {len(info.scales)} scales")
    scales, zero_points = (
        np.reshape(np.asarray(v, np.float32), along if len(v) > 1 else ())
        for v in (info.scales, info.zero_points or (0,))
    )
    return np.asarray((values - zero_points) * scales, np.float32)


def declared(info: TfliteTensor) -> Operand:
    """Return the temporary for a tensor of the file. A scalar becomes one element of rank 1."""
    kind, scale, zero_point, channels = _TYPES[info.type], 0.0, 0, None
    if info.type == "INT8" and len(info.scales) > 1:
        if any(info.zero_points):
            raise ImportFailed(f"{info} has a zero point per channel; the HAL requires 0 there")
        kind, channels = OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL, (info.scales, info.channel)
    elif info.type in ("INT8", "UINT8"):
        if len(info.scales) > 1 or len(info.zero_points) > 1:
            raise ImportFailed(f"{info} has {len(info.scales)} scales; the HAL has one")
        scale, zero_point = (info.scales or (1.0,))[0] or 1.0, (info.zero_points or (0,))[0]
    elif info.type == "INT32" and len(info.scales) == 1:
        scale = info.scales[0]
    dimensions = info.shape if info.shape is None or info.shape else (1,)
    extra = {"name": info.name}
    return Operand(kind, dimensions or (), scale, zero_point, channel_quant=channels, extra=extra)
