"""A model as burst_device.h describes it: flat structs, with pointers to the constants where they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from driver.devices.library.table import ffi
from driver.nn import OPERATIONS, OperandLifeTime
from driver.nn.extension import OEM_OPERATION, PREFIX_BITS, extension_of
from driver.protocol.model_codec import operand_code

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driver.nn import Model, Operand, Operation, Subgraph

_NUMBER_BY_NAME = 0xFFFF  # of an operation of an extension
_OEM_CODE = 10000


class FlatModel:
    """`pointer` is a `const burst_model *`, which lives as long as this object."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._kept: list[Any] = []
        self._prefixes = dict(model.extensions)
        self._none = self._new("uint32_t[]", [0])
        graphs = self._new("burst_subgraph[]", 1 + len(model.referenced))
        for flat, graph in zip(graphs, (model.main, *model.referenced), strict=True):
            self._fill(flat, graph)
        flat = self.pointer = self._new("burst_model *")
        flat.size, flat.is_relaxed = ffi.sizeof("burst_model"), model.relaxed
        flat.main_graph, flat.referenced = graphs, graphs + 1
        flat.n_referenced, flat.subgraph_stride = len(model.referenced), ffi.sizeof("burst_subgraph")
        names = [self._text(name) for name in self._prefixes]
        flat.n_extensions = len(names)
        flat.extension_names = self._new("char *[]", [*names, ffi.NULL])
        flat.extension_prefixes = self._new("uint16_t[]", [*self._prefixes.values(), 0])

    def _new(self, kind: str, *value: Any) -> Any:
        """Memory that lives as long as this object."""
        found = ffi.new(kind, *value)
        self._kept.append(found)
        return found

    def _text(self, text: str) -> Any:
        return self._new("char[]", text.encode(errors="replace"))

    def _indices(self, values: Sequence[int]) -> Any:
        return self._new("uint32_t[]", values) if values else self._none

    def _fill(self, flat: Any, graph: Subgraph) -> None:
        flat.n_operands, flat.n_operations = len(graph.operands), len(graph.operations)
        flat.n_inputs, flat.n_outputs = len(graph.inputs), len(graph.outputs)
        flat.operand_stride, flat.operation_stride = ffi.sizeof("burst_operand"), ffi.sizeof("burst_operation")
        flat.inputs, flat.outputs = self._indices(graph.inputs), self._indices(graph.outputs)
        flat.operands = operands = self._new("burst_operand[]", max(1, len(graph.operands)))
        for n, operand in enumerate(graph.operands):
            self._operand(operands[n], operand)
        flat.operations = operations = self._new("burst_operation[]", max(1, len(graph.operations)))
        for n, operation in enumerate(graph.operations):
            self._operation(operations[n], operation)

    def _operand(self, flat: Any, operand: Operand) -> None:
        flat.type, flat.lifetime = operand_code(operand, self._prefixes), int(operand.lifetime)
        flat.rank, flat.dimensions = len(operand.dimensions), self._indices(operand.dimensions)
        flat.scale, flat.zero_point = operand.scale, operand.zero_point
        if operand.lifetime.is_constant:
            array = np.ascontiguousarray(operand.value)
            self._kept.append(array)
            flat.value, flat.value_bytes = ffi.cast("void *", array.ctypes.data), array.nbytes
        elif operand.lifetime == OperandLifeTime.SUBGRAPH:
            flat.subgraph = operand.value
        if operand.channel_quant:
            scales, flat.channel_dimension = operand.channel_quant
            flat.n_channel_scales, flat.channel_scales = len(scales), self._new("float[]", scales)
        if operand.extension_params:
            flat.extension_params = self._new("uint8_t[]", operand.extension_params)
            flat.extension_params_bytes = len(operand.extension_params)
        if isinstance(operand.extra, dict) and operand.extra.get("name"):
            flat.name = self._text(str(operand.extra["name"]))

    def _operation(self, flat: Any, operation: Operation) -> None:
        flat.type, flat.name = self._operation_code(operation.type), self._text(operation.type)
        flat.n_inputs, flat.n_outputs = len(operation.inputs), len(operation.outputs)
        flat.inputs, flat.outputs = self._indices(operation.inputs), self._indices(operation.outputs)

    def _operation_code(self, name: str) -> int:
        if known := OPERATIONS.get(name):
            return known.code
        extension = extension_of(name)
        if name == OEM_OPERATION or extension is None:
            return _OEM_CODE
        return self._prefixes[extension] << PREFIX_BITS | _NUMBER_BY_NAME
