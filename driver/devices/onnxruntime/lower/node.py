"""What lowering an operation works with: operands in the forms that ONNX Runtime's kernels take.

An operand can have several forms: 8-bit data as it is stored, as the real numbers it stands for, or as steps above its
zero point; float16 widened to float32; an image with its channels first. A form is made once, when an operation
first reads it, so that neighbours with the same form never convert.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from driver.devices.lowering.errors import require
from driver.devices.lowering.node import STORED, LoweringGraph, LoweringNode
from driver.devices.onnxruntime.writer import OrtWriter
from driver.formats.onnx_schema import TYPES
from driver.nn.ops.real import activation_bounds
from driver.nn.types import OperandType

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from driver.nn import Operation, Subgraph
    from driver.nn.operation import Call, Tensor

PLANAR = (0, 3, 1, 2)
"""The axes of an image whose channels come last, in the order of one whose channels come first."""

AWAY = 1 - 2**-21
"""ONNX rounds halves to even, and the HAL away from zero. Multiplying the step by this makes a half a little more than
a half; a smaller fraction stays below, unless it is a half to five digits.
"""

SHIFT = 128
"""Between bytes with a sign and those without."""

_STORED = STORED | {
    OperandType.TENSOR_FLOAT32: "FLOAT",
    OperandType.TENSOR_QUANT16_SYMM: "INT16",
    OperandType.TENSOR_QUANT16_ASYMM: "UINT16",
}
_BYTES = ("UINT8", "INT8")


class OrtForm(NamedTuple):
    """A form of an operand: an ONNX type, "REAL" or "STEPS" for float32 made of stored numbers; the order of its axes,
    which is () for that of the HAL. Bytes with a sign as UINT8 are 128 larger.
    """

    type: str
    order: tuple[int, ...] = ()


def stored_type(tensor: Tensor) -> str:
    """Return the ONNX type of an operand as a client sees it. Any byte but 0 is true, so bytes are no ONNX booleans."""
    require(tensor.type in _STORED, f"no ONNX type for {tensor.type.name}")
    return _STORED[tensor.type]


def number_type(tensor: Tensor) -> str:
    """Return the form in which arithmetic takes it."""
    if tensor.type == OperandType.TENSOR_BOOL8:
        return "BOOL"
    stored = stored_type(tensor)
    return "REAL" if stored in _BYTES else {"FLOAT16": "FLOAT"}.get(stored, stored)


def onnx_type(form: str) -> str:
    """Return the ONNX type of a form."""
    return form if form in TYPES else "FLOAT"


class OrtGraph(LoweringGraph):
    """A subgraph on its way to ONNX: its tensors, whose shapes are known, and their forms."""

    def __init__(
        self,
        subgraph: Subgraph,
        tensors: dict[int, Tensor | None],
        referenced: Sequence[Subgraph] = (),
        *,
        is_draft: bool = False,
    ) -> None:
        """`tensors`: of all operands; None for those that are omitted. `referenced`: what IF and WHILE refer to.

        `is_draft`: it only finds out whether an operation can be lowered, and converts no constants.
        """
        super().__init__(subgraph, tensors)
        self.referenced, self._is_draft = referenced, is_draft
        self._forms: dict[int, dict[OrtForm, str]] = {}
        # None: this one, without a cycle: an engine collects no garbage while a burst lives.
        self._root: OrtGraph | None = None
        self._constants = self.writer = OrtWriter()
        self.work = 0  #: products that an execution adds up
        self.loops = 0  #: in all its subgraphs

    def within(self, subgraph: Subgraph, tensors: dict[int, Tensor | None], *, apart: bool) -> OrtGraph:
        """Return a graph that sees the tensors of this one; `apart`: it is written by itself, else in this one."""
        inner = OrtGraph(subgraph, tensors, self.referenced, is_draft=self._is_draft)
        inner._root, inner._constants = self._outermost, self._constants
        inner.writer = OrtWriter(self.writer.names) if apart else self.writer
        return inner

    def count_loop(self) -> None:
        """Count a WHILE."""
        self._outermost.loops += 1

    @property
    def _outermost(self) -> OrtGraph:
        return self if self._root is None else self._root

    def forms(self, index: int) -> dict[OrtForm, str]:
        """Return the forms in which an operand exists."""
        return dict(self._forms.get(index, {}))

    def expect(self, index: int) -> None:
        self.input(index)

    def input(self, index: int) -> str:
        """Return the tensor that the model is given for an operand."""
        form = OrtForm(stored_type(self.tensor(index)))
        return self._forms.setdefault(index, {}).setdefault(form, self.writer.names.new())

    def output(self, index: int) -> tuple[str, str]:
        """Return the tensor that holds an output as its client sees it, and its type."""
        stored = stored_type(self.tensor(index))
        is_truth = self.tensor(index).type == OperandType.TENSOR_BOOL8
        if is_truth and not self.has(index, stored):
            stored = "BOOL"  # bytes of 0 and 1
        return self.writer.own(self.read(index, OrtForm(stored))), stored

    def has(self, index: int, type_: str) -> bool:
        """Return True if it exists as `type_`, or can without a conversion."""
        return OrtForm(type_) in self._forms.get(index, {}) or self.tensor(index).fixed

    def put(self, index: int, form: OrtForm, name: str) -> None:
        """Operand `index` has that form in tensor `name`."""
        self._forms.setdefault(index, {})[form] = name

    def read(self, index: int, form: OrtForm) -> str:
        """Operand `index` in that form."""
        forms, tensor = self._forms.setdefault(index, {}), self.tensor(index)
        if form not in forms:
            forms[form] = self._constant(tensor, form) if tensor.fixed else self._converted(index, form)
        return forms[form]

    def table(self, index: int, type_: str) -> str:
        """Operand `index` in that type, of which rows are looked up. A constant stays where it lies."""
        tensor = self.tensor(index)
        if not tensor.fixed or self._is_draft:
            return self.read(index, OrtForm(type_))
        return self._constants.constant(_retyped(tensor, type_), is_table=True)

    def _constant(self, tensor: Tensor, form: OrtForm) -> str:
        if self._is_draft:
            return self.writer.names.new()
        array = _retyped(tensor, form.type)
        return self.constant(array.transpose(form.order) if form.order else array)

    def _converted(self, index: int, form: OrtForm) -> str:
        """Return it converted: from a form in the same order if there is one. Types change before orders do, as that
        may be for several.
        """
        forms, tensor = self._forms[index], self.tensor(index)
        alike = [found for found in forms if found.type == form.type]
        if alike:
            straight = form.type if not form.order else self.read(index, OrtForm(form.type))
            if form.order:
                return self.emit("Transpose", straight, perm=form.order)
            back = np.argsort(alike[0].order).tolist()
            return self.emit("Transpose", forms[alike[0]], perm=back)
        sources = [found for found in forms if found.type == stored_type(tensor)] or list(forms)
        source = min(sources, key=lambda found: found.order != form.order)
        if source.order != form.order:
            self.read(index, OrtForm(form.type, source.order))
            return self.read(index, form)
        return self._retype(tensor, forms[source], form.type)

    def _retype(self, tensor: Tensor, source: str, type_: str) -> str:
        if (stored_type(tensor), type_) == ("INT8", "UINT8"):
            wide = self.emit("Cast", source, to=TYPES["INT32"])
            source = self.emit("Add", wide, self.constant(np.array(SHIFT, np.int32)))
        if type_ not in ("REAL", "STEPS"):
            return self.emit("Cast", source, to=TYPES[type_])
        if tensor.channel_quant is not None:
            scales, axis = np.array(tensor.channel_quant[0], np.float32), tensor.channel_quant[1]
            return self.emit("DequantizeLinear", source, self.constant(scales), axis=axis)
        if type_ == "STEPS":
            steps, zero = self.emit("Cast", source, to=TYPES["FLOAT"]), np.array(tensor.zero_point, np.float32)
            return self.emit("Sub", steps, self.constant(zero)) if tensor.zero_point else steps
        scale = self.constant(np.array(tensor.scale, np.float32))
        return self.emit("DequantizeLinear", source, scale, self.zero_point(tensor))

    def zero_point(self, tensor: Tensor) -> str:
        """Return the zero point of 8-bit data, as a constant of its type."""
        return self.constant(np.array(tensor.zero_point, tensor.type.stored_dtype))

    def emit(self, operation: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Return an ONNX operation with one result."""
        return self.writer.node(operation, inputs, 1, domain, **attributes)[0]

    def constant(self, array: NDArray[Any]) -> str:
        """Return a constant, which graphs within this one see, too."""
        return self._constants.constant(array)

    @contextmanager
    def body(self) -> Iterator[OrtWriter]:
        """Open a body: inside the `with`, nodes go to a graph within this one. They may read only what was read
        before.
        """
        around = self.writer
        self.writer = OrtWriter(around.names)
        try:
            yield self.writer
        finally:
            self.writer = around


def _retyped(tensor: Tensor, type_: str) -> NDArray[Any]:
    """Return a constant's data in a form."""
    data = tensor.data
    if type_ == stored_type(tensor):
        return data
    if type_ == "BOOL":
        return np.not_equal(data, 0)
    if type_ == "UINT8":
        return np.add(data, SHIFT, dtype=np.int16).astype(np.uint8)
    if type_ in ("REAL", "STEPS"):
        steps: NDArray[Any] = np.subtract(data, tensor.zero_point, dtype=np.float32)
        return steps if type_ == "STEPS" else steps * np.float32(tensor.scale)
    return data.astype({"FLOAT": "f4", "DOUBLE": "f8", "INT32": "i4", "INT64": "i8"}[type_])


class OrtNode(LoweringNode[OrtGraph]):
    """One operation: its parameters (`call`), and its operands as tensors in the forms it asks for."""

    def __init__(self, graph: OrtGraph, operation: Operation, call: Call) -> None:
        super().__init__(graph, operation, call)
        self._inputs, self._outputs = operation.inputs, operation.outputs
        self.emit = graph.emit

    def read(self, i: int, type_: str | None = None, order: tuple[int, ...] = ()) -> str:
        """Input `i`; as arithmetic takes it unless a type is given."""
        return self.graph.read(self._inputs[i], OrtForm(type_ or number_type(self.input(i)), order))

    def table(self, i: int, type_: str) -> str:
        """Input `i` in that type, of which rows are looked up."""
        return self.graph.table(self._inputs[i], type_)

    def raw_type(self, i: int) -> str:
        """Return the type in which input `i` needs no conversion, for operations that only move elements."""
        stored, number = stored_type(self.input(i)), number_type(self.input(i))
        is_wider = stored in ("FLOAT16", "UINT8") and number in ("FLOAT", "BOOL")
        return number if is_wider and not self.graph.has(self._inputs[i], stored) else stored

    def put(self, name: str, n: int = 0, type_: str | None = None, order: tuple[int, ...] = ()) -> None:
        """Let tensor `name` be output `n`, as it is stored unless a type is given."""
        self.graph.put(self._outputs[n], OrtForm(type_ or stored_type(self.output(n)), order), name)

    def give(self, name: str, n: int = 0, *, code: int = 0, steps: bool = False, order: tuple[int, ...] = ()) -> None:
        """Let these numbers, after an activation, be output `n`; `steps`: they count steps above its zero point."""
        out = self.output(n)
        if out.type.is_quantised:
            name = self.clamped(self.quantised(name, out, steps=steps), out, code)
            self.put(name, n, order=order)
        else:
            self.put(self.activated(name, code), n, number_type(out), order)

    def quantised(self, name: str, out: Tensor, *, steps: bool = False) -> str:
        """Real numbers as they are stored in `out`."""
        scale = np.array((1.0 if steps else out.scale) * AWAY, np.float32)
        return self.emit("QuantizeLinear", name, self.graph.constant(scale), self.graph.zero_point(out))

    def clamped(self, name: str, out: Tensor, code: int) -> str:
        """Return stored numbers within the bounds of a fused activation."""
        info, bounds = np.iinfo(out.type.stored_dtype), activation_bounds(code, out)
        low, high = (int(bound or 0) for bound in bounds)
        if (low, high) == (info.min, info.max):
            return name
        limits = [self.graph.constant(np.array(limit, out.type.stored_dtype)) for limit in (low, high)]
        return self.emit("Clip", name, *limits)

    def activated(self, name: str, code: int) -> str:
        """Real numbers after a fused activation."""
        low, high = activation_bounds(code)
        if low is None:
            return name
        if high is None:
            return self.emit("Relu", name)
        return self.emit("Clip", name, self.scalar(low), self.scalar(high))

    def scalar(self, value: float) -> str:
        """Return a constant of float32."""
        return self.graph.constant(np.array(value, np.float32))

    def integers(self, values: Sequence[int] | int) -> str:
        """Return a constant of int64, as ONNX has its shapes and axes."""
        return self.graph.constant(np.array(values, np.int64))

    def reshaped(self, name: str, shape: Sequence[int]) -> str:
        """Return the elements in that shape."""
        return self.emit("Reshape", name, self.integers(list(shape)))

    def requantised(self, i: int, type_: str) -> str:
        """Input `i` in that raw type, and in the scale and zero point of output 0."""
        return self.quantised(self.read(i), self.output()) if self.is_requantised(i) else self.read(i, type_)
