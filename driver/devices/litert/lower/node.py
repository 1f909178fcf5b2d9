"""What lowering an operation works with: operands in the forms that TFLite's kernels take.

An operand can have several forms: 8-bit data with and without a sign, float16 widened to float32, an image with its
channels last. A form is made once, when an operation first reads it, so that neighbours with the same form never
convert.

A model is lowered in segments, each a graph of its own. A segment takes the tensors that it reads from earlier
segments, form by form, and these then give them. A subgraph that control flow runs is one graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from driver.devices.litert.flatbuffer import FlatbufferWriter, Quantisation
from driver.devices.lowering.errors import require
from driver.devices.lowering.node import STORED, LoweringGraph, LoweringNode
from driver.nn.types import OperandLifeTime, OperandType

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    from driver.devices.litert.flatbuffer import Section
    from driver.nn import Model, Operation, Subgraph
    from driver.nn.operation import Call, Tensor

NHWC_FROM_NCHW, NCHW_FROM_NHWC = (0, 2, 3, 1), (0, 3, 1, 2)
MAX_RANK = 4
"""Most kernels take no more dimensions."""

_STORED = STORED | {OperandType.TENSOR_FLOAT32: "FLOAT32"}
_COMPUTED = {"FLOAT16": "FLOAT32"}
_CONVERSIONS = {
    ("UINT8", "INT8"): "QUANTIZE",
    ("INT8", "UINT8"): "QUANTIZE",
    ("FLOAT16", "FLOAT32"): "CAST",
    ("FLOAT32", "FLOAT16"): "CAST",
    ("UINT8", "BOOL"): "CAST",
    ("BOOL", "UINT8"): "CAST",
}


class LiteRtForm(NamedTuple):
    """TFLite type of an operand's data, and whether its channels were moved behind its pixels."""

    type: str
    moved: bool = False


def stored_type(tensor: Tensor) -> str:
    """Return the TFLite type of an operand as a client sees it. Any byte but 0 is true, so bytes are no TFLite
    booleans.
    """
    require(tensor.type in _STORED, f"no TFLite type for {tensor.type.name}")
    return _STORED[tensor.type]


class Nested(NamedTuple):
    """A subgraph that control flow refers to, as it was lowered."""

    number: int  #: among those of the flatbuffer
    loops: int  #: WHILEs that it runs one after the other, at most
    shapes: tuple[tuple[int, ...], ...]  #: of its results


@dataclass
class Lowering:
    """The state that all graphs of a model share.

    model: whose subgraphs control flow refers to. table: the lowering of each operation.
    is_draft: it only finds out whether an operation can be lowered, and converts no constants.
    private: types of operands some of which choose addresses and lie in memory that is not known.
    nested: subgraphs that were lowered, by how they are used; None for those that cannot be.
    """

    model: Model
    table: Mapping[str, Callable[[LiteRtNode], None]]
    is_draft: bool = False
    writer: FlatbufferWriter = field(default_factory=FlatbufferWriter)
    private: set[OperandType] = field(default_factory=set)
    nested: dict[tuple[Any, ...], Nested | None] = field(default_factory=dict)
    products: int = 0  #: that an execution adds up; control flow counts once


Crossing = tuple[int, LiteRtForm]
"""An operand in a form, passed from one segment to another."""


There = dict[LiteRtForm, "tuple[dict[Crossing, int], int] | None"]
"""The forms of an operand that can be taken, each with what its giver gives and its tensor there; None: the client."""


class LiteRtGraph(LoweringGraph):
    """A subgraph, or a segment of the main one, on its way to TFLite: its tensors, whose shapes are known, and their
    forms.
    """

    def __init__(
        self,
        subgraph: Subgraph,
        tensors: dict[int, Tensor | None],
        lowering: Lowering,
        before: LiteRtGraph | None = None,
        depth: int = 0,
    ) -> None:
        """`tensors`: of all operands; None for those that are omitted. `before`: the segment before this one. `depth`:
        of control flow.
        """
        super().__init__(subgraph, tensors)
        self.lowering = lowering
        self.writer: Section = lowering.writer.section()
        self.depth = depth
        self.loops = 0  #: WHILEs that it runs one after the other, at most
        self.takes: dict[Crossing, int] = {}  #: tensors that it is given
        self.gives: dict[Crossing, int] = {}  #: tensors that others need
        self.copied: set[int] = before.copied if before else set()  #: inputs whose values choose an address
        self.results: dict[int, LiteRtForm] = before.results if before else {}  #: outputs, as clients get them
        self._operands = subgraph.operands
        self._forms: dict[int, dict[LiteRtForm, int]] = {}
        self._there: dict[int, There] = before.close() if before else {}

    def expect(self, index: int) -> None:
        self._there[index] = {LiteRtForm(stored_type(self.tensor(index))): None}

    def input(self, index: int) -> int:
        """Return the tensor that the graph is given for an operand, whether it reads it or not."""
        return self._take(index, LiteRtForm(stored_type(self.tensor(index))))

    def output(self, index: int) -> tuple[int, str]:
        """Return the tensor that holds an output in the form its client sees, and its type."""
        stored = stored_type(self.tensor(index))
        if self.tensor(index).type == OperandType.TENSOR_BOOL8 and not self.has(index, LiteRtForm(stored)):
            stored = "BOOL"  # bytes of 0 and 1
        return self.read(index, LiteRtForm(stored)), stored

    def close(self) -> dict[int, There]:
        """End the segment: outputs get the form that clients see. Returns the forms that are there for later ones."""
        for index in self.subgraph.outputs:
            if index in self._forms and index not in self._there:
                tensor, type_ = self.output(index)
                self.results[index] = LiteRtForm(type_)
                self.gives[index, self.results[index]] = tensor
        for index, forms in self._forms.items():
            if not self.tensor(index).fixed:
                there = self._there.setdefault(index, {})
                there |= {form: (self.gives, tensor) for form, tensor in forms.items() if form not in there}
        return self._there

    def keep_private(self, index: int) -> None:
        """Keep operand `index` in private memory while it is used: TFLite may compute it in the memory of an input."""
        tensor = self.tensor(index)
        if not self.depth and self._operands[index].lifetime == OperandLifeTime.SUBGRAPH_INPUT:
            self.copied.add(index)
        elif not tensor.fixed:
            self.lowering.private.add(tensor.type)

    def is_output(self, index: int) -> bool:
        """Return True for what the client gets."""
        return not self.depth and self._operands[index].lifetime == OperandLifeTime.SUBGRAPH_OUTPUT

    def has(self, index: int, form: LiteRtForm) -> bool:
        """Return True when that form needs no conversion."""
        return form in self._forms.get(index, {}) or self._is_there(index, form) or self.tensor(index).fixed

    def _is_there(self, index: int, form: LiteRtForm) -> bool:
        return form in self._there.get(index, {})

    def _take(self, index: int, form: LiteRtForm) -> int:
        """Operand `index` from before, in a form in which it is there."""
        if giver := self._there.get(index, {}).get(form):
            gives, tensor = giver
            gives[index, form] = tensor
        created = self.takes[index, form] = self.write(index, form)
        return created

    def write(self, index: int, form: LiteRtForm) -> int:
        """Return a new tensor, which an operation fills with operand `index`."""
        created = self.like(index, form)
        self._forms.setdefault(index, {})[form] = created
        return created

    def like(self, index: int, form: LiteRtForm, shape: Sequence[int] | None = None) -> int:
        """Return a tensor with the type and the quantisation of operand `index`, and its shape unless another is
        given.
        """
        tensor = self.tensor(index)
        shape = _moved(tensor.shape, form.moved) if shape is None else shape
        return self.writer.tensor(form.type, shape, quantisation(tensor, form.type))

    def read(self, index: int, form: LiteRtForm) -> int:
        """Operand `index` in that form."""
        forms, tensor = self._forms.setdefault(index, {}), self.tensor(index)
        if form not in forms:
            if tensor.fixed:
                forms[form] = self._constant(tensor, form)
            else:
                forms[form] = self._take(index, form) if self._is_there(index, form) else self._converted(index, form)
        return forms[form]

    def _constant(self, tensor: Tensor, form: LiteRtForm) -> int:
        if self.lowering.is_draft:
            return self.writer.tensor(form.type, _moved(tensor.shape, form.moved), quantisation(tensor, form.type))
        array = _retyped(tensor, form.type)
        array = array.transpose(NHWC_FROM_NCHW) if form.moved else array
        return self.writer.constant(form.type, array, quantisation(tensor, form.type))

    def _converted(self, index: int, form: LiteRtForm) -> int:
        """Return it converted: from a form of the same type if there is one: it has to be in the other layout. Else the
        type comes first.
        """
        known = [*self._forms[index], *self._there.get(index, ())]
        other = LiteRtForm(form.type, not form.moved)
        if other in known:
            order = NHWC_FROM_NCHW if form.moved else NCHW_FROM_NHWC
            source, result = self.read(index, other), self.like(index, form)
            self.writer.operation("TRANSPOSE", [source, self.integers(order)], [result], "TransposeOptions")
            return result
        nearest = min(known, key=lambda found: found.moved != form.moved)
        if nearest.moved != form.moved:
            self.read(index, LiteRtForm(form.type, nearest.moved))
            return self._converted(index, form)
        name = _CONVERSIONS.get((nearest.type, form.type))
        require(name, f"no conversion from {nearest.type} to {form.type}")
        source, result = self.read(index, nearest), self.like(index, form)
        self.convert(source, result, str(name))
        return result

    def convert(self, source: int, result: int, name: str) -> None:
        """Add a CAST or QUANTIZE between two tensors."""
        self.writer.operation(name, [source], [result], f"{name.capitalize()}Options")

    def integers(self, values: ArrayLike) -> int:
        """Return a constant of int32."""
        return self.writer.constant("INT32", np.array(values, np.int32))


def quantisation(tensor: Tensor, type_: str) -> Quantisation | None:
    """Return the quantisation of a tensor in that form; None where it has none."""
    if tensor.channel_quant is not None:
        return Quantisation(*tensor.channel_quant[:1], 0, tensor.channel_quant[1])
    if tensor.type == OperandType.TENSOR_INT32:
        return Quantisation((tensor.scale,)) if tensor.scale else None
    if not tensor.type.is_quantised or type_ not in ("INT8", "UINT8"):
        return None
    moved = {("UINT8", "INT8"): -128, ("INT8", "UINT8"): 128}.get((stored_type(tensor), type_), 0)
    return Quantisation((tensor.scale,), tensor.zero_point + moved)


def _moved(shape: Sequence[int], moved: bool) -> Sequence[int]:
    return [shape[i] for i in NHWC_FROM_NCHW] if moved else shape


def _retyped(tensor: Tensor, type_: str) -> NDArray[Any]:
    """Return a constant's data in a TFLite type."""
    stored = stored_type(tensor)
    if type_ == stored:
        return tensor.data
    if {stored, type_} == {"UINT8", "INT8"}:
        shifted: NDArray[Any] = tensor.data.view(np.uint8) ^ 0x80
        return shifted.view(type_.lower())  # its zero point moves with it
    if (stored, type_) == ("UINT8", "BOOL"):
        return np.not_equal(tensor.data, 0).view(np.uint8)
    require((stored, type_) == ("FLOAT16", "FLOAT32"), f"a constant of {stored} as {type_}")
    return tensor.data.astype(np.float32)


class LiteRtNode(LoweringNode[LiteRtGraph]):
    """One operation: its parameters (`call`), and its operands as tensors in the forms it asks for.

    byte: the cheapest type for unsigned 8-bit data here: INT8 when an operand already has that form.
    signed_byte: the type for signed 8-bit data that may have a zero point.
    """

    def __init__(self, graph: LiteRtGraph, operation: Operation, call: Call) -> None:
        super().__init__(graph, operation, call)
        self._inputs, self._outputs = operation.inputs, operation.outputs
        given = [tensor for i in self._inputs if (tensor := graph.tensors[i]) is not None]
        require(not all(tensor.fixed for tensor in given), "all its inputs are constants, and TFLite folds it away")
        self.byte, self.signed_byte = "UINT8", "INT8"
        eights = [i for i in self._inputs if self._is_byte(i)]
        if any(
            graph.has(i, LiteRtForm("INT8", moved)) for i in eights for moved in (False, True) if not self._fixed(i)
        ):
            self.byte = "INT8"

    def _is_byte(self, index: int) -> bool:
        tensor = self.graph.tensors[index]
        return tensor is not None and tensor.type == OperandType.TENSOR_QUANT8_ASYMM

    def _fixed(self, index: int) -> bool:
        return self.graph.tensor(index).fixed

    def type_of(self, tensor: Tensor) -> str:
        """Return the TFLite type in which kernels compute with it."""
        if tensor.type == OperandType.TENSOR_BOOL8:
            return "BOOL"
        if tensor.type == OperandType.TENSOR_QUANT8_ASYMM:
            return self.byte
        if tensor.type == OperandType.TENSOR_QUANT8_ASYMM_SIGNED:
            return self.signed_byte
        stored = stored_type(tensor)
        return _COMPUTED.get(stored, stored)

    def read(self, i: int, type_: str | None = None, *, moved: bool = False) -> int:
        """Input `i`; `moved`: an image whose channels come first, with its channels last."""
        return self.graph.read(self._inputs[i], LiteRtForm(type_ or self.type_of(self.input(i)), moved))

    def read_private(self, i: int) -> int:
        """Input `i`, whose values choose addresses, in memory that no other process writes between check and use."""
        index = self._inputs[i]
        require(not self.graph.is_output(index), "its indices lie in memory that the client may write")
        self.graph.keep_private(index)
        return self.read(i)

    def write(self, n: int = 0, type_: str | None = None, *, moved: bool = False) -> int:
        """Output `n`."""
        return self.graph.write(self._outputs[n], LiteRtForm(type_ or self.type_of(self.output(n)), moved))

    def like_input(self, i: int, shape: Sequence[int]) -> int:
        """Return a tensor like input `i`, but for its shape."""
        return self.graph.like(self._inputs[i], LiteRtForm(self.type_of(self.input(i))), shape)

    def like_output(self, n: int, shape: Sequence[int]) -> int:
        """Return a tensor like output `n`, but for its shape."""
        return self.graph.like(self._outputs[n], LiteRtForm(self.type_of(self.output(n))), shape)

    def emit(self, name: str, inputs: Sequence[int], outputs: Sequence[int], options: str = "", **fields: Any) -> None:
        """Add a TFLite operation; `options`: the schema's table for `fields`, without its "Options"."""
        self.graph.writer.operation(name, inputs, outputs, f"{options}Options" if options else None, **fields)

    def integers(self, values: ArrayLike) -> int:
        """Return a constant of int32."""
        return self.graph.integers(values)

    def reshape(self, source: int, result: int, shape: Sequence[int]) -> None:
        """Put the elements of one tensor into the shape of another."""
        self.emit("RESHAPE", [source, self.integers(shape)], [result], "Reshape", newShape=np.array(shape, np.int32))

    def requantised(self, i: int, n: int = 0) -> int:
        """Input `i` in the scale and zero point of output `n`."""
        if not self.is_requantised(i, n):
            return self.read(i)
        converted = self.like_output(n, self.input(i).shape)
        self.graph.convert(self.read(i), converted, "QUANTIZE")
        return converted
