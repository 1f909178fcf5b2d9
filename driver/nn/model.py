"""A network as the HAL describes it: subgraphs of operands and operations, in plain immutable records.

Building a record checks no more than that its words exist; `validate` checks the rules between them.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import InvalidModel
from .extension import MOST_PREFIX, OEM, ExtensionType, check_name, extension_of
from .tensors import TensorInfo, tensors_of
from .types import Dimensions, OperandLifeTime, OperandType

ChannelQuant = tuple[tuple[float, ...], int]
"""Per-channel quantisation: one scale per channel, and the dimension that counts channels."""


def _set(record: object, /, **fields: Any) -> None:
    """Give a frozen record its fields."""
    for name, value in fields.items():
        object.__setattr__(record, name, value)


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """One value of a subgraph.

    `type` and `lifetime` may be given by their HAL names. A dimension of 0 is unknown, and so is the rank of a tensor
    without dimensions. `value` is the ndarray of a constant or the index, in `Model.referenced`, of a SUBGRAPH.
    `number_of_consumers` None means computed; `location` and `extra` are carried for the code that made the model.
    `extension_params`: bytes that mean something to the extension whose type the operand has.
    """

    type: OperandType | ExtensionType
    dimensions: Dimensions
    scale: float = 0.0
    zero_point: int = 0
    lifetime: OperandLifeTime = OperandLifeTime.TEMPORARY_VARIABLE
    value: Any = None
    channel_quant: ChannelQuant | None = None
    number_of_consumers: int | None = None
    location: Any = None
    extra: Any = None
    extension_params: bytes | None = None

    def __init__(
        self,
        type: OperandType | ExtensionType | str | int,  # noqa: A002 - the HAL's word
        dimensions: Sequence[int] = (),
        scale: float = 0.0,
        zero_point: int = 0,
        lifetime: OperandLifeTime | str | int = OperandLifeTime.TEMPORARY_VARIABLE,
        value: Any = None,
        channel_quant: tuple[Sequence[float], int] | None = None,
        number_of_consumers: int | None = None,
        location: Any = None,
        extra: Any = None,
        extension_params: bytes | None = None,
    ) -> None:
        if channel_quant is not None:
            scales, channel = channel_quant
            channel_quant = (tuple(float(s) for s in scales), int(channel))
        _set(
            self,
            type=OperandType.parse(type),
            dimensions=tuple(map(int, dimensions)),
            scale=float(scale),
            zero_point=int(zero_point),
            lifetime=OperandLifeTime.parse(lifetime),
            value=value,
            channel_quant=channel_quant,
            number_of_consumers=number_of_consumers,
            location=location,
            extra=extra,
            extension_params=None if extension_params is None else bytes(extension_params),
        )

    @property
    def base_type(self) -> OperandType:
        """The type, where only the HAL's own will do. Raises InvalidModel for one of an extension."""
        if isinstance(self.type, ExtensionType):
            raise InvalidModel(f"operand type {self.type!r} belongs to an extension; one of the HAL is needed")
        return self.type

    @property
    def is_known(self) -> bool:
        """True if the model tells its shape."""
        return self.type.is_scalar or (bool(self.dimensions) and 0 not in self.dimensions)


@dataclass(frozen=True, slots=True)
class Operation:
    """One step of a subgraph: a HAL operation and the indices of the operands it reads and writes."""

    type: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def __init__(self, type: str, inputs: Sequence[int], outputs: Sequence[int]) -> None:  # noqa: A002
        _set(self, type=str(type), inputs=tuple(map(int, inputs)), outputs=tuple(map(int, outputs)))


@dataclass(frozen=True, slots=True)
class Subgraph:
    """Operands, the operations between them in executable order, and which operands go in and out."""

    operands: tuple[Operand, ...]
    operations: tuple[Operation, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def __init__(
        self,
        operands: Sequence[Operand],
        operations: Sequence[Operation],
        inputs: Sequence[int],
        outputs: Sequence[int],
    ) -> None:
        listed = {"inputs": tuple(map(int, inputs)), "outputs": tuple(map(int, outputs))}
        _set(self, operands=tuple(operands), operations=tuple(operations), **listed)


@dataclass(frozen=True, slots=True, weakref_slot=True, repr=False)
class Model:
    """A main subgraph and those that its control flow refers to.

    `relaxed` allows float32 to be computed with the range and precision of float16. `extensions`: name and prefix of
    each vendor extension whose types or operations it uses; those that are not given get the next free prefixes.
    `portable`: returns the same network of the HAL's operations alone, the same each time; None where there is no such
    form. `signatures`: the entries of the file that it was loaded from, by name; see `driver.load`. `name`: of
    that file, or what the program calls it.
    """

    main: Subgraph
    referenced: tuple[Subgraph, ...] = ()
    relaxed: bool = False
    extensions: tuple[tuple[str, int], ...] = ()
    portable: Callable[[], "Model"] | None = field(default=None, compare=False)
    signatures: tuple[str, ...] = field(default=(), compare=False)
    name: str = field(default="", compare=False)
    _inputs: tuple[TensorInfo, ...] | None = field(default=None, init=False, compare=False)
    _outputs: tuple[TensorInfo, ...] | None = field(default=None, init=False, compare=False)

    def __post_init__(self) -> None:
        _set(self, referenced=tuple(self.referenced))
        _set(self, extensions=_with_prefixes(self.extensions, _extensions_used((self.main, *self.referenced))))

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        """Names, dtypes and shapes of the inputs, in order."""
        if self._inputs is None:
            _set(self, _inputs=tensors_of([self.main.operands[i] for i in self.main.inputs], "input"))
        return self._inputs or ()

    @property
    def optional(self) -> int:
        """The number of the last inputs that may be left out."""
        return sum(tensor.optional for tensor in self.inputs)

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """The outputs' names, types and shapes."""
        if self._outputs is None:
            _set(self, _outputs=tensors_of([self.main.operands[i] for i in self.main.outputs], "output"))
        return self._outputs or ()

    def __repr__(self) -> str:
        sides = (", ".join(map(str, side)) for side in (self.inputs, self.outputs))
        count = len(self.main.operations)
        return f"<Model of {count} operation{'s' * (count != 1)}: {' -> '.join(sides)}>"

    def named(self, name: str) -> "Model":
        """Return the same model under this name, by which tools and messages call it. Raise ValueError."""
        if not isinstance(name, str) or not name or not name.isprintable():
            raise ValueError(f"name={name!r}: a name is printable text")
        return replace(self, name=name, portable=self.portable and _Renamed(self.portable, name))

    def form_for(self, extensions: Collection[str]) -> "Model":
        """Return the form of this model for a device that knows these extensions: itself, if that uses no others or has
        no other form; else the one of the HAL's operations.

        Raise what making that form raises.
        """
        if self.portable is None or all(name in extensions for name, _ in self.extensions):
            return self
        return self.portable()


class _Renamed:
    """A `portable` whose model has another name."""

    def __init__(self, make: Callable[[], Model], name: str) -> None:
        self._make, self._name = make, name
        self._made: tuple[Model, Model] | None = None

    def __call__(self) -> Model:
        found = self._make()
        if self._made is None or self._made[0] is not found:
            self._made = found, found.named(self._name)
        return self._made[1]


def check_model(model: object) -> None:
    """Raise TypeError, with what makes a model, for anything else."""
    if not isinstance(model, Model):
        raise TypeError(
            f"model={model!r:.80}: a driver.Model; driver.load(path) makes one of a file,"
            " driver.ModelBuilder().build() one of operations"
        )


def _extensions_used(graphs: Sequence[Subgraph]) -> list[str]:
    """Return the extensions used, in the order in which they appear."""
    types = [o.type.extension for graph in graphs for o in graph.operands if isinstance(o.type, ExtensionType)]
    operations = [extension_of(operation.type) for graph in graphs for operation in graph.operations]
    return [name for name in dict.fromkeys((*types, *operations)) if name not in {None, OEM.name}]


def _with_prefixes(given: Sequence[tuple[str, int]], used: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Raise InvalidModel for prefixes that are given twice or cannot be."""
    found = dict(given)
    for name, prefix in given:
        check_name(name)
        if not 0 < prefix <= MOST_PREFIX:
            raise InvalidModel(f"extension {name}: prefix {prefix} has to be from 1 to {MOST_PREFIX}")
    if len(set(found.values())) < len(given):
        raise InvalidModel(f"extensions {list(given)}: each name and each prefix has to be there once")
    free = (prefix for prefix in range(1, MOST_PREFIX + 1) if prefix not in found.values())
    for name in used:
        if name not in found:
            found[name] = next(free)
    return tuple(found.items())
