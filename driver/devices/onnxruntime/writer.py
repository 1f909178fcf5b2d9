"""Writes the bytes of an ONNX model: protobuf messages, of which ONNX needs a dozen fields.

The `onnx` package does the same, but takes 0.3 s to load and copies weights: 17 MB take 0.26 s. Here weights are not
part of the message: ONNX Runtime gets their addresses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from driver.formats.onnx_schema import ELEMENTS, TYPES
from driver.formats.protobuf import ProtoWriter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

OPSET, CONTRIBUTED = 18, "com.microsoft"
"""The version of ONNX's operations, and the domain of ONNX Runtime's own."""

SMALL = 1024
"""Larger constants are not part of the message. Shapes and axes must be."""

_IR_VERSION = 8
_TYPE_OF = {dtype: name for name, dtype in ELEMENTS.items()}


def lying_elsewhere(tensor: ProtoWriter) -> ProtoWriter:
    """Return the message of a tensor of which ONNX Runtime gets the address."""
    return tensor.message(13, ProtoWriter().text(1, "location").text(2, "client")).integer(14, 1)


class Names:
    """Names that are unique in a model, nested graphs included."""

    def __init__(self) -> None:
        self._count = 0

    def new(self) -> str:
        """Return the next one."""
        self._count += 1
        return f"t{self._count}"


class OrtWriter:
    """A graph: nodes and constants. Tensors are known by their names."""

    def __init__(self, names: Names | None = None) -> None:
        """`names`: of the graph around this one, if there is one."""
        self.names = names or Names()
        self.operations: list[str] = []  #: in order
        self.weights: list[tuple[str, NDArray[Any]]] = []  #: constants outside the message, by their names
        self.tables: list[tuple[str, str, Sequence[int]]] = []  #: name, type and sizes of those that are inputs, too
        self._nodes, self._constants = ProtoWriter(), ProtoWriter()
        self._known: dict[tuple[Any, ...], str] = {}
        self._written: set[str] = set()

    def node(
        self, operation: str, inputs: Sequence[str], results: int = 1, domain: str = "", **attributes: Any
    ) -> list[str]:
        """Return the names of its results. An omitted input is "". An attribute may be a `ProtoWriter`, a graph."""
        outputs = [self.names.new() for _ in range(results)]
        found = ProtoWriter()
        for field, names in ((1, inputs), (2, outputs)):
            for name in names:
                found.text(field, name)
        found.text(4, operation)
        for name, value in attributes.items():
            found.message(5, _attribute(name, value))
        self._nodes.message(1, found.text(7, domain) if domain else found)
        self.operations.append(operation)
        self._written.update(outputs)
        return outputs

    def constant(self, array: NDArray[Any], *, is_table: bool = False) -> str:
        """Return a constant with its data. Equal small constants become one.

        `is_table`: kernels only read it where it lies, so a large one is an input as well: a session may be given other
        values for it, so that optimisers leave it alone, and it is never copied.
        """
        key = (array.dtype.str, array.shape, array.tobytes()) if array.size <= 8 else None
        if key in self._known:
            return self._known[key]
        name, message = self.names.new(), ProtoWriter()
        for size in array.shape:
            message.integer(1, size)
        message.integer(2, TYPES[_TYPE_OF[array.dtype]]).text(8, name)
        if array.nbytes > SMALL:
            lying_elsewhere(message)
            self.weights.append((name, np.ascontiguousarray(array)))
            if is_table:
                self.tables.append((name, _TYPE_OF[array.dtype], array.shape))
        else:
            message.data(9, array.tobytes())
        self._constants.message(5, message)
        if key is not None:
            self._known[key] = name
        return name

    def own(self, name: str) -> str:
        """Return a tensor that can be an output of the graph: one that a node of it computed, and that no other output
        is.
        """
        if name not in self._written:
            (name,) = self.node("Identity", [name])
        self._written.discard(name)
        return name

    def graph(
        self, inputs: Sequence[tuple[str, str, Sequence[int] | None]], outputs: Sequence[tuple[str, str]]
    ) -> ProtoWriter:
        """Write a graph. `inputs`: name, type and dimensions, if these are known; `outputs`: name and type of each."""
        found = ProtoWriter().fields(self._nodes).text(2, "main").fields(self._constants)
        for name, type_, shape in (*inputs, *self.tables):
            found.message(11, _tensor(name, type_, shape))
        for name, type_ in outputs:
            found.message(12, _tensor(name, type_))
        return found


def _attribute(name: str, value: Any) -> ProtoWriter:
    found = ProtoWriter().text(1, name)
    match value:
        case ProtoWriter():
            return found.message(6, value).integer(20, 5)
        case str():
            return found.text(4, value).integer(20, 3)
        case float():
            return found.real(2, value).integer(20, 1)
        case int():
            return found.integer(3, value).integer(20, 2)
    for number in value:
        found.integer(8, int(number))
    return found.integer(20, 7)


def _tensor(name: str, type_: str, shape: Sequence[int] | None = None) -> ProtoWriter:
    tensor = ProtoWriter().integer(1, TYPES[type_])
    if shape is not None:
        dimensions = ProtoWriter()
        for size in shape:
            dimensions.message(1, ProtoWriter().integer(1, size))
        tensor.message(2, dimensions)
    return ProtoWriter().text(1, name).message(2, ProtoWriter().message(1, tensor))


def model(graph: ProtoWriter) -> bytes:
    """Return the bytes that ONNX Runtime reads."""
    found = ProtoWriter().integer(1, _IR_VERSION)
    for domain, version in (("", OPSET), (CONTRIBUTED, 1)):
        found.message(8, ProtoWriter().text(1, domain).integer(2, version))
    return found.message(7, graph).joined()
