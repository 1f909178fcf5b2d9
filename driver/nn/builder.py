"""ModelBuilder: write a model as a few lines of Python."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .calls import check_call, match_signature
from .errors import InvalidModel, did_you_mean
from .model import Model, Operand, Operation, Subgraph
from .operands import checked, constant_operand, operand_type
from .operation import Call, OperationType, Signature, Tensor, UnknownValueError, slot_types, steers
from .ops import OPERATIONS
from .types import Dimensions, OperandLifeTime, OperandType
from .validate import validate


@dataclass(frozen=True, slots=True)
class Value:
    """Handle of an operand in a `ModelBuilder`."""

    builder: "ModelBuilder"
    index: int

    @property
    def operand(self) -> Operand:
        """The operand as declared so far."""
        return self.builder._operands[self.index]

    def __repr__(self) -> str:
        operand = self.operand
        return f"<value {self.index}: {operand.type.name} {list(operand.dimensions)}>"


class ModelBuilder:
    """Builds a model operation by operation, checking each as it is added::

        m = ModelBuilder()
        x = m.input("float32", (1, 4))
        y = m.operation("ADD", x, np.ones(4, np.float32), 0)
        m.output(y)
        model = m.build()

    A mistake raises `InvalidModel`, names the argument and the remedy, and leaves the builder as it was.
    """

    def __init__(self, *, relaxed: bool = False) -> None:
        self.relaxed = relaxed
        self._operands: list[Operand] = []
        self._operations: list[Operation] = []
        self._inputs: list[int] = []
        self._outputs: list[int] = []

    def input(
        self,
        dtype: Any,
        dimensions: Sequence[int],
        *,
        scale: float = 0.0,
        zero_point: int = 0,
        channel_quant: tuple[Sequence[float], int] | None = None,
        name: str | None = None,
    ) -> Value:
        """Declare a model input.

        dtype: "float32", "float16", "int32", "quant8_asymm", "quant8_asymm_signed", "bool8", a HAL name or a numpy
        dtype. dimensions: 0 where unknown until the model runs.
        """
        extra = None if name is None else {"name": name}
        lifetime = OperandLifeTime.SUBGRAPH_INPUT
        kind = operand_type(dtype)
        operand = Operand(
            kind, dimensions, scale, zero_point, lifetime=lifetime, value=None, channel_quant=channel_quant, extra=extra
        )
        value = self._add(checked(operand))
        self._inputs.append(value.index)
        return value

    def constant(
        self,
        array: Any,
        *,
        dtype: Any = None,
        scale: float = 0.0,
        zero_point: int = 0,
        channel_quant: tuple[Sequence[float], int] | None = None,
        by_reference: bool = False,
    ) -> Value:
        """Declare a constant tensor, or a scalar when `array` is a number or has no dimensions.

        dtype: as for `input`; when None it follows from the array. The array is not copied: leave it as it is.
        channel_quant: (one scale per channel, dimension of the channels), for int8 convolution filters. by_reference:
        the lifetime is CONSTANT_REFERENCE; a constant in frozen memory then travels to devices as a handle.
        """
        operand = constant_operand(array, dtype, scale=scale, zero_point=zero_point, channel_quant=channel_quant)
        return self._add(replace(operand, lifetime=OperandLifeTime.CONSTANT_REFERENCE) if by_reference else operand)

    def operation(
        self,
        type: str,  # noqa: A002 - the HAL's word
        *args: Any,
        scale: float | None = None,
        zero_point: int | None = None,
        dtype: Any = None,
        dimensions: Sequence[int] | None = None,
        outputs: int | None = None,
    ) -> Any:
        """Add an operation and return the handle of its output, or a tuple of handles when it has several.

        Args:
            *args: its inputs in the order of the HAL: values of this builder, arrays and lists (constants), Python
                numbers (INT32, FLOAT32 or BOOL scalars), models (the subgraphs of IF and WHILE), None for an omitted
                input.
            scale, zero_point, dtype, dimensions: of the outputs, where they do not follow from the inputs.
            outputs: how many, where the operation leaves that open.
        """
        if type not in OPERATIONS:
            raise InvalidModel(f"there is no operation {type!r}{did_you_mean(type, tuple(OPERATIONS))}")
        kind = OPERATIONS[type]
        inputs = self._arguments(kind, args)
        operands = [i if isinstance(i, Operand) else i.operand for i in inputs]
        wanted = None if dtype is None else operand_type(dtype)
        asked = _Asked(scale, zero_point, wanted, None if dimensions is None else tuple(dimensions), count=outputs)
        try:
            declared = _outputs(kind, operands, asked)
        except ValueError as error:
            raise InvalidModel(f"{type}: {error}") from error
        sources = [self._add(i) if isinstance(i, Operand) else i for i in inputs]
        results = tuple(self._add(o) for o in declared)
        self._operations.append(Operation(type, [v.index for v in sources], [v.index for v in results]))
        return results if len(results) > 1 else results[0]

    def output(self, *values: Value) -> None:
        """Make results of operations outputs of the model, in this order."""
        for value in values:
            self._check_own(value)
            operand = value.operand
            if operand.lifetime != OperandLifeTime.TEMPORARY_VARIABLE:
                raise InvalidModel(
                    f"{value!r} is {operand.lifetime.name}; only the result of an operation can be an output, once"
                )
            self._operands[value.index] = _with_lifetime(operand, OperandLifeTime.SUBGRAPH_OUTPUT)
            self._outputs.append(value.index)

    def build(self) -> Model:
        """Return the model, validated."""
        if not self._outputs:
            raise InvalidModel("the model has no output; call output(value) before build()")
        main = Subgraph(self._operands, self._operations, self._inputs, self._outputs)
        model = _with_references(main, relaxed=self.relaxed)
        validate(model)
        return model

    def _add(self, operand: Operand) -> Value:
        self._operands.append(operand)
        return Value(self, len(self._operands) - 1)

    def _check_own(self, value: Any) -> None:
        if not isinstance(value, Value) or value.builder is not self:
            raise InvalidModel(f"{value!r} is not a value of this builder; pass what its methods returned")

    def _arguments(self, kind: OperationType, args: Sequence[Any]) -> list["Value | Operand"]:
        """Return the arguments as values of this builder, or as operands still to be added."""
        result: list[Value | Operand] = []
        for position, arg in enumerate(args):
            try:
                result.append(self._argument(kind, args, position, arg))
            except InvalidModel as error:
                raise InvalidModel(f"{kind.name}, input {position}: {error}") from None
        return result

    def _argument(self, kind: OperationType, args: Sequence[Any], position: int, arg: Any) -> "Value | Operand":
        if isinstance(arg, Value):
            self._check_own(arg)
            return arg
        half = _is_half(args[0])
        if isinstance(arg, Model):
            return Operand(OperandType.SUBGRAPH, lifetime=OperandLifeTime.SUBGRAPH, value=arg)
        if arg is None:
            return Operand(_omitted_type(kind, len(args), position, half), lifetime=OperandLifeTime.NO_VALUE)
        return constant_operand(arg, OperandType.FLOAT16 if half and isinstance(arg, float) else None)


def _is_half(arg: Any) -> bool:
    if isinstance(arg, Value):
        return arg.operand.type == OperandType.TENSOR_FLOAT16
    return getattr(arg, "dtype", None) == np.float16


def _omitted_type(kind: OperationType, count: int, position: int, half: bool) -> OperandType:
    t = OperandType.TENSOR_FLOAT16 if half else OperandType.TENSOR_FLOAT32
    for signature in kind.signatures:
        found = signature.slots(count)
        if found is not None and found[0][position].endswith("?"):
            return slot_types(found[0][position], t)[0]
    raise InvalidModel("cannot be omitted (None)")


@dataclass(frozen=True, slots=True)
class _Asked:
    """A caller's wishes for the outputs of an operation."""

    scale: float | None
    zero_point: int | None
    dtype: OperandType | None
    dimensions: Dimensions | None
    count: int | None


def _outputs(kind: OperationType, inputs: Sequence[Operand], asked: _Asked) -> list[Operand]:
    """Declare the outputs of a call, from its inputs and from what the caller says."""
    if len(inputs) > 1 and isinstance(inputs[1].value, Model):  # a branch of IF, the body of WHILE
        graph = inputs[1].value.main
        return [
            _with_lifetime(graph.operands[i], OperandLifeTime.TEMPORARY_VARIABLE) for i in graph.outputs[: asked.count]
        ]
    matched, slots = match_signature(kind, inputs)
    matched, types = _output_types(kind, matched, inputs, asked)
    source = Tensor.of(inputs[matched.of])
    drafts = [_draft(kind, n, t, source, asked=asked) for n, t in enumerate(types)]
    shapes: Sequence[Dimensions] = output_dimensions(kind, slots, inputs, drafts)
    if asked.dimensions is not None:
        shapes = [asked.dimensions] * len(drafts)
    outputs = [checked(Operand(d.type, s, d.scale, d.zero_point)) for d, s in zip(drafts, shapes, strict=True)]
    check_call(kind, inputs, outputs)
    return outputs


def _output_types(
    kind: OperationType, matched: Signature, inputs: Sequence[Operand], asked: _Asked
) -> tuple[Signature, list[OperandType]]:
    """Return the first signature with outputs as asked for, and their types."""
    for signature in (matched, *kind.signatures):
        found = signature.slots(len(inputs))
        t = inputs[signature.of].type if found else None
        if t is None or t not in signature.versions():
            continue
        slots = signature.result_slots(asked.count or len(signature.outputs.split()))
        types = [slot_types(slot, t) for slot in slots or ()]
        if types and asked.dtype in (None, *types[0]):
            return signature, [asked.dtype or types[0][0], *(choice[0] for choice in types[1:])]
    wanted = f"dtype={asked.dtype.name}" if asked.dtype else f"outputs={asked.count}"
    raise InvalidModel(f"{wanted} is no result of inputs of types {', '.join(o.type.name for o in inputs)}")


def _draft(kind: OperationType, number: int, result: OperandType, source: Tensor, asked: _Asked) -> Operand:
    """Return an output without its dimensions yet."""
    if not result.is_quantised:
        if number == 0 and (asked.scale or asked.zero_point):
            raise InvalidModel(f"scale= and zero_point= do not apply to a {result.name} result")
        return Operand(result)
    wish = Tensor(result, (), asked.scale or 0.0, asked.zero_point or 0)
    scale, zero_point = kind.quantise(number, source, wish)
    if not scale > 0:
        raise InvalidModel("the result is quantised; pass scale= above 0 and zero_point=")
    for word, given, needed in (("scale", asked.scale, scale), ("zero_point", asked.zero_point, zero_point)):
        if number == 0 and given is not None and np.float32(given) != np.float32(needed):
            raise InvalidModel(f"{word}={given} cannot be chosen here, it is {needed}")
    return Operand(result, (), scale, zero_point)


def _with_lifetime(operand: Operand, lifetime: OperandLifeTime) -> Operand:
    return Operand(operand.type, operand.dimensions, operand.scale, operand.zero_point, lifetime=lifetime)


def _with_references(main: Subgraph, *, relaxed: bool) -> Model:
    """Return the model of `main`, whose SUBGRAPH operands hold models: each becomes a subgraph of its own, and a
    number.
    """
    referenced: list[Subgraph] = []

    def numbered(graph: Subgraph, numbers: dict[int, int]) -> Subgraph:
        operands = [_numbered(o, numbers) if o.lifetime == OperandLifeTime.SUBGRAPH else o for o in graph.operands]
        return Subgraph(operands, graph.operations, graph.inputs, graph.outputs)

    models = {id(o.value): o.value for o in main.operands if isinstance(o.value, Model)}
    places: dict[int, int] = {}
    for model in models.values():
        first = len(referenced) + 1
        numbers = {n: first + n for n in range(len(model.referenced))}
        places[id(model)] = first - 1
        referenced += [numbered(graph, numbers) for graph in (model.main, *model.referenced)]
    return Model(numbered(main, places), tuple(referenced), relaxed=relaxed)


def _numbered(operand: Operand, numbers: dict[int, int]) -> Operand:
    """Return a SUBGRAPH operand with the number that its subgraph gets."""
    key = id(operand.value) if isinstance(operand.value, Model) else operand.value
    return Operand(operand.type, lifetime=operand.lifetime, value=numbers[key])


_PROBES = (1009, 2017)
"""Stand-ins for an unknown dimension. Whatever differs between the two results depends on it."""


def output_dimensions(
    kind: OperationType, slots: Sequence[str], inputs: Sequence[Operand], outputs: Sequence[Operand]
) -> list[Dimensions]:
    """Return the dimensions of every output: 0 where unknown, empty where not even the rank is.

    Raise `ValueError` when the operation cannot serve what is known of its inputs.
    """
    nothing: list[Dimensions] = [()] * len(outputs)
    if any(not o.dimensions and not o.type.is_scalar and o.lifetime != OperandLifeTime.NO_VALUE for o in inputs):
        return nothing
    is_known = all(0 not in o.dimensions for o in inputs)
    try:
        first = _with_probe(kind, slots, inputs, outputs, probe=_PROBES[0])
        second = first if is_known else _with_probe(kind, slots, inputs, outputs, probe=_PROBES[1])
    except UnknownValueError:
        return nothing
    except ValueError:
        if is_known:
            raise
        return nothing
    return [tuple(x if x == y else 0 for x, y in zip(a, b, strict=True)) for a, b in zip(first, second, strict=True)]


def _with_probe(
    kind: OperationType, slots: Sequence[str], inputs: Sequence[Operand], outputs: Sequence[Operand], probe: int
) -> Sequence[Dimensions]:
    tensors: list[Tensor | None] = []
    for slot, operand in zip(slots, inputs, strict=True):
        if operand.lifetime == OperandLifeTime.NO_VALUE:
            tensors.append(None)
            continue
        tensor = Tensor.of(operand)
        tensor.shape = tuple(d or probe for d in tensor.shape)
        if steers(slot) and tensor.array is not None:
            tensor.keep_values()
        tensors.append(tensor)
    return kind.shape(Call(tensors, [Tensor.of(o) for o in outputs]))
