"""One inference as both doors see it, and the rules for what may stand in it."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np

from driver.gateways.oip.datatypes import DATATYPES, STRINGS, Datatype, datatype_of, values_as
from driver.gateways.oip.regions import RegionSlice
from driver.gateways.oip.texts import as_bytes, given_texts, packed_texts
from driver.gateways.refusal import invalid
from driver.nn.tensors import spellings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from driver.nn import Model, Operand
    from driver.nn.tensors import TensorInfo

_LARGEST = 2**32 - 1
_REGION, _OFFSET, _SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"
_PRIORITIES = {0: "medium", 1: "high", 2: "medium", 3: "low"}
_MOST_SECONDS = 1e6
FINAL = "triton_enable_empty_final_response"


class GivenTensor(NamedTuple):
    """An input: its bytes, its values, or the shared memory in which it lies."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: Any = None
    values: Sequence[Any] | None = None
    place: RegionSlice | None = None


class WantedTensor(NamedTuple):
    """An output that the client asked for, and where it wants it. classes: so many of the largest values, or 0: all."""

    name: str
    place: RegionSlice | None = None
    is_binary: bool = True
    classes: int = 0


class InferCall(NamedTuple):
    """A client's request to infer. wanted: None means all outputs. deadline: a time.monotonic(). traceparent: the
    client's span, in the words of W3C; "" for none. most: answers, of a decoupled model; 0: as its folder says.
    """

    model: str
    version: str
    id: str
    given: Sequence[GivenTensor]
    wanted: Sequence[WantedTensor] | None
    deadline: float | None
    priority: str
    traceparent: str = ""
    most: int = 0

    @property
    def slices(self) -> list[RegionSlice]:
        """All places in shared memory."""
        places = [each.place for each in self.given] + [each.place for each in self.wanted or ()]
        return [place for place in places if place]


class AnsweredTensor(NamedTuple):
    """An output: its values, or where in shared memory they are."""

    name: str
    kind: Datatype
    shape: tuple[int, ...]
    array: NDArray[Any] | None
    place: RegionSlice | None
    is_binary: bool

    def packed(self) -> bytes:
        """Return its values as they travel."""
        assert self.array is not None
        return packed_texts(self.array) if self.kind is STRINGS else self.array.tobytes()

    def values(self) -> list[Any]:
        """Return its values for JSON."""
        assert self.array is not None
        found: list[Any] = self.array.reshape(-1).tolist()
        return [text.decode() for text in found] if self.kind is STRINGS else found


class InferAnswer(NamedTuple):
    """The result of an `InferCall`. times: of time.monotonic_ns(), when the stages of its work began, and their end.
    is_last: False if another answer to this call follows; None: it is the only one.
    """

    model: str
    version: str
    id: str
    tensors: list[AnsweredTensor]
    times: Sequence[int] = ()
    is_last: bool | None = None


def region_slice(parameters: Mapping[str, Any], what: str) -> RegionSlice | None:
    """Return where these parameters of a tensor say that it lies; None: in the message. Raise Refusal."""
    name = parameters.get(_REGION)
    if name is None:
        if _OFFSET in parameters or _SIZE in parameters:
            raise invalid(f"{what}: {_OFFSET} and {_SIZE} need a {_REGION}")
        return None
    offset, nbytes = parameters.get(_OFFSET, 0), parameters.get(_SIZE)
    if not isinstance(name, str) or not _is_whole(offset) or not _is_whole(nbytes):
        raise invalid(f"{what}: {_REGION} is a name, {_SIZE} and {_OFFSET} are integers from 0 on")
    return RegionSlice(name, offset, nbytes)


def wanted_tensor(name: str, parameters: Mapping[str, Any], *, is_binary: bool) -> WantedTensor:
    """Return the output that these parameters ask for. Raise Refusal."""
    if not parameters:
        return WantedTensor(name, None, is_binary)
    what = f"output {name!r:.80}"
    place, classes = region_slice(parameters, what), parameters.get("classification", 0)
    if not _is_whole(classes):
        raise invalid(f"{what}: classification={classes!r:.40}: the number of classes, an integer from 0 on")
    if classes and place:
        raise invalid(f"{what}: classes come in the message; ask for them without a {_REGION}")
    return WantedTensor(name, place, is_binary, classes)


def time_and_priority(parameters: Mapping[str, Any], left: float | None) -> tuple[float | None, str]:
    """Return the deadline and the priority of a request's parameters. `left`: seconds that its transport gives it.

    Raise Refusal.
    """
    _check_sequence(parameters)
    timeout = parameters.get("timeout", 0)
    if not _is_whole(timeout):
        raise invalid(f"timeout={timeout!r:.40}: microseconds, an integer from 0 on")
    seconds = [each for each in (left, timeout / 1e6 if timeout else None) if each is not None and each < _MOST_SECONDS]
    priority = parameters.get("priority", 0)
    if not _is_whole(priority) or priority not in _PRIORITIES:
        raise invalid(f"priority={priority!r:.40}: 0 (as the server likes), 1 (high), 2 (medium) or 3 (low)")
    return (time.monotonic() + min(seconds) if seconds else None), _PRIORITIES[priority]


def _check_sequence(parameters: Mapping[str, Any]) -> None:
    """Check a request's place in a sequence, which changes nothing: models keep no state. Raise Refusal."""
    number = parameters.get("sequence_id", 0)
    if not isinstance(number, str) and not (_is_whole(number) and number < 2**64):
        raise invalid(f"sequence_id={number!r:.40}: an integer from 0 on, or a string")
    for name in ("sequence_start", "sequence_end"):
        mark = parameters.get(name, False)
        if not isinstance(mark, bool):
            raise invalid(f"{name}={mark!r:.40}: true or false")
        if mark and not number:
            raise invalid(f"{name} needs a sequence_id that is not 0")


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class TensorPort:
    """An input or output of a model, by the protocol's words."""

    def __init__(self, tensor: TensorInfo, operand: Operand) -> None:
        """Raise Refusal for a type that the protocol has no name for."""
        self.name, self.kind, self.is_known = tensor.name, datatype_of(operand), operand.is_known
        self.dtype = operand.type.dtype
        self.sizes = None if tensor.shape is None else tuple(size or 0 for size in tensor.shape)

    @property
    def metadata(self) -> dict[str, Any]:
        """The tensor in the words of ModelMetadata. A scalar has shape []."""
        sizes = (-1,) if self.sizes is None else self.sizes
        return {"name": self.name, "datatype": self.kind.name, "shape": [size or -1 for size in sizes]}

    def nbytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of a tensor of that shape."""
        return math.prod(shape) * self.dtype.itemsize

    def raw_shape(self, nbytes: int, *, is_batched: bool) -> tuple[int, ...]:
        """Return the one shape that a tensor of so many bytes has, of one row where there are rows. Raise Refusal."""
        if self.sizes is None or self.kind is STRINGS:
            raise invalid(
                f"input {self.name!r}: its bytes do not say its shape, so a raw request needs JSON that has it"
            )
        sizes = [1, *self.sizes[1:]] if is_batched else list(self.sizes)
        if sizes.count(0) > 1:
            raise invalid(
                f"input {self.name!r} has shape {self.metadata['shape']}: say in JSON which one a raw request has"
            )
        if 0 in sizes:
            sizes[sizes.index(0)] = nbytes // self.nbytes([size or 1 for size in sizes])
        return tuple(sizes)

    @property
    def known_bytes(self) -> int | None:
        """The bytes, if the model tells its shape."""
        return self.nbytes(self.sizes or ()) if self.is_known else None

    def check(self, given: GivenTensor) -> None:
        """Raise Refusal if type or shape are not this input's."""
        if given.datatype != self.kind.name:
            if given.datatype == "BYTES":
                told = "it takes numbers; turn strings into numbers before"
                raise invalid(f"input {self.name!r} is {self.kind.name}, not BYTES: {told}")
            unknown = "" if given.datatype in DATATYPES else ", which is not a type of the protocol"
            raise invalid(f"input {self.name!r} is {self.kind.name}, not {given.datatype!r:.20}{unknown}")
        shape, sizes = given.shape, self.sizes
        if not all(0 <= size <= _LARGEST for size in shape):
            raise invalid(f"input {self.name!r}: shape {list(shape)!s:.200}: each size is from 0 to {_LARGEST}")
        is_scalar = sizes == () and shape == (1,)  # which clients say who have no shape without sizes
        fits = (
            sizes is None
            or is_scalar
            or (len(shape) == len(sizes) and all(s in (0, got) for s, got in zip(sizes, shape, strict=True)))
        )
        if not fits:
            raise invalid(f"input {self.name!r} has shape {self.metadata['shape']}, not {list(shape)!s:.200}")
        if self.kind is STRINGS:
            return
        nbytes = self.nbytes(shape)
        found = given.place.nbytes if given.place else None if given.raw is None else len(given.raw)
        if found is not None and found != nbytes:
            raise invalid(f"input {self.name!r} of shape {list(shape)} has {nbytes} bytes, and {found} came")

    def array(self, given: GivenTensor) -> NDArray[Any]:
        """Return the values of an input that came in the message, and was checked. Raise Refusal."""
        shape = () if self.sizes == () else given.shape
        if self.kind is STRINGS:
            return given_texts(given, f"input {self.name!r}").reshape(shape)
        if given.raw is not None:
            return np.frombuffer(given.raw, self.dtype).reshape(shape)
        if given.values is None:
            raise invalid(f"input {self.name!r} has no data")
        found = values_as(self.kind, given.values, f"input {self.name!r}")
        if found.size != math.prod(given.shape):
            raise invalid(f"input {self.name!r} of shape {list(given.shape)} has not {found.size} values")
        return found.view(self.dtype).reshape(shape)

    def values(self, given: GivenTensor) -> NDArray[Any] | None:
        """Return the values as `array` does; None if they lie in shared memory."""
        return None if given.place and self.kind is not STRINGS else self.array(given)

    def answered(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the values of an output as an answer has them."""
        return as_bytes(array) if self.kind is STRINGS else array.view(self.kind.dtype)


class ModelPorts:
    """The ports of a model."""

    def __init__(self, model: Model) -> None:
        self.model, operands = model, model.main.operands
        pairs = zip(model.inputs, model.main.inputs, strict=True)
        self.inputs = tuple(TensorPort(tensor, operands[n]) for tensor, n in pairs)
        pairs = zip(model.outputs, model.main.outputs, strict=True)
        self.outputs = tuple(TensorPort(tensor, operands[n]) for tensor, n in pairs)
        self._output_names = {port.name for port in self.outputs}

    def ordered(self, given: Sequence[GivenTensor], most_rows: int) -> list[GivenTensor]:
        """Return them in the model's order, checked. Raise Refusal."""
        known = spellings(port.name for port in self.inputs)
        by_name = {known.get(each.name, each.name): each for each in given}
        if len(by_name) != len(given):
            raise invalid("an input is given twice")
        found = []
        for port in self.inputs:
            its = by_name.pop(port.name, None)
            if its is None:
                raise invalid(f"input {port.name!r} is missing; the model takes {_names(self.inputs)}")
            port.check(its)
            if most_rows and its.shape and its.shape[0] > most_rows:
                raise invalid(f"input {port.name!r} has {its.shape[0]} rows; max_batch_size is {most_rows}")
            found.append(its)
        if by_name:
            raise invalid(f"the model has no input {next(iter(by_name))!r:.80}; it takes {_names(self.inputs)}")
        return found

    def wanted(self, wanted: Sequence[WantedTensor] | None) -> dict[str, WantedTensor]:
        """Return what is wanted by name. Raise Refusal."""
        if wanted is None:
            return {port.name: WantedTensor(port.name) for port in self.outputs}
        known = spellings(port.name for port in self.outputs)
        found = {known.get(each.name, each.name): each for each in wanted}
        if len(found) != len(wanted):
            raise invalid("an output is asked for twice")
        if unknown := found.keys() - self._output_names:
            raise invalid(f"the model has no output {min(unknown)!r:.80}; it has {_names(self.outputs)}")
        for port in self.outputs:
            if port.kind is STRINGS and port.name in found and found[port.name].place:
                raise invalid(f"output {port.name!r}: BYTES come in the message, and not in shared memory")
        return found


def _names(ports: Sequence[TensorPort]) -> str:
    return ", ".join(repr(port.name) for port in ports)


__all__ = [
    "AnsweredTensor",
    "GivenTensor",
    "InferAnswer",
    "InferCall",
    "ModelPorts",
    "TensorPort",
    "WantedTensor",
    "region_slice",
    "time_and_priority",
    "wanted_tensor",
]
