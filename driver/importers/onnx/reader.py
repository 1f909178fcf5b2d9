"""Convert an .onnx file to a model.

    load(path) -> Model
      OnnxFile               the content of the file, checked (file.py, which reads through protobuf.py)
      OnnxGraph, OnnxCall    its values, and one operator, during conversion (graph.py, call.py)
      fold                   computes constant expressions, such as shapes, at load time (fold.py)
      TABLE                  one short function per operator (table.py and the modules that it lists)
      quantise, dequantise   QuantizeLinear and DequantizeLinear (quantised.py)

This package reads protocol buffers itself. A library would unpack the whole file first: two bytes of the file can
become an object of a hundred bytes, and weights would be copied. So nothing needs to be installed, weights stay in the
mapped file where the HAL wants the same order, and the work that a file can cause is bounded by its size.
"""

from collections import Counter
from pathlib import Path

import numpy as np

from driver.errors import ImportFailed, InvalidModel
from driver.importers.file_bytes import map_file
from driver.nn import Model

from .call import OnnxCall, QuantTarget
from .elements import bounds
from .file import OnnxFile, OnnxNode, OnnxTensor
from .fold import fold
from .graph import OnnxGraph
from .quantised import computes_on_integers, dequantise, input_scales, quantise, wanted
from .table import TABLE, OnnxRule

_OWN = ("", "ai.onnx")
_EARLIEST = 7
_ACTIVATIONS: dict[object, int] = {(0.0, 6.0): 3, (-1.0, 1.0): 2, (0.0, float("inf")): 1, (0.0, None): 1}


def load(file: Path) -> Model:
    """Load an .onnx file, and the files beside it that hold its weights."""
    return read(map_file(file), file.parent)


def read(data: memoryview, folder: Path | None = None) -> Model:
    """Convert the bytes of an .onnx file; raises `ImportFailed` when damaged or without counterpart in the HAL.

    folder: where other files may hold its weights.
    """
    with np.errstate(all="ignore"):  # numbers in a damaged file may be infinite or NaN
        file = OnnxFile(data, folder)
        if file.opset < _EARLIEST:
            raise ImportFailed(f"opset {file.opset} is too old; convert the model to opset {_EARLIEST} or newer")
        graph, nodes = OnnxGraph(file), file.nodes()
        walk = _Walk(graph, nodes)
        try:
            for info in file.inputs():
                graph.declare(info, *walk.scales.get(info.name, (1.0, 0)))
        except InvalidModel as error:
            raise ImportFailed(str(error)) from None
        for node in nodes:
            try:
                walk.map(node)
            except (ImportFailed, InvalidModel) as error:
                raise ImportFailed(str(error), node.name, node.index) from None
        try:
            return graph.finish(file.outputs())
        except InvalidModel as error:
            raise ImportFailed(f"not a valid graph: {error}") from None


class _Walk:
    """Converts the operators in order, and remembers which were fused into others."""

    def __init__(self, graph: OnnxGraph, nodes: list[OnnxNode]) -> None:
        self._graph, self._fused = graph, set[int]()
        reads = [(name, node) for node in nodes for name in node.inputs if name]
        self._times = Counter(name for name, _ in reads) + Counter(graph.file.outputs())
        self._readers = dict(reads)
        for node in nodes:
            if node.kind == "Constant" and node.domain in _OWN and len(node.outputs) == 1:
                graph.define(_constant(node))
        self.scales = input_scales(nodes, graph.entries)

    def map(self, node: OnnxNode) -> None:
        """Convert one operator."""
        if node.index in self._fused or (node.kind == "Constant" and node.domain in _OWN):
            return
        if node.domain not in _OWN:
            raise ImportFailed("operators of other domains are not supported")
        if not node.outputs or not node.outputs[0]:
            raise ImportFailed("it has no result")
        if fold(OnnxCall(self._graph, node, node.outputs[0])):
            return
        if node.kind in ("QuantizeLinear", "DequantizeLinear"):
            (quantise if node.kind == "QuantizeLinear" else dequantise)(OnnxCall(self._graph, node, node.outputs[0]))
            return
        rule = TABLE.get(node.kind)
        if rule is None:
            raise ImportFailed("the HAL 1.3 has no operation for it, or the importer does not support it")
        rule.convert(self._call(node, rule))

    def _call(self, node: OnnxNode, rule: OnnxRule) -> OnnxCall:
        """The call for an operator, with a following activation and QuantizeLinear fused into it."""
        name, code, target = node.outputs[0], 0, None
        following = self._only_reader(name, len(node.outputs))
        if rule.fuses and following is not None and (code := self._activation(following)):
            self._fused.add(following.index)
            name = following.outputs[0]
            following = self._only_reader(name, 1)
        if following is not None and following.kind == "QuantizeLinear" and following.domain in _OWN:
            target = self._target(node, rule, following)
            if target is not None:
                self._fused.add(following.index)
                name = following.outputs[0]
        return OnnxCall(self._graph, node, name, code, target)

    def _target(self, node: OnnxNode, rule: OnnxRule, following: OnnxNode) -> QuantTarget | None:
        target = wanted(self._graph, following) if rule.quantised else None
        is_whole = target is not None and computes_on_integers(self._graph, node, rule, target.type)
        return target if is_whole else None

    def _only_reader(self, name: str, results: int) -> OnnxNode | None:
        """The operator that reads a value, if it is the only one."""
        if results != 1 or self._times[name] != 1 or name not in self._readers:
            return None
        node = self._readers[name]
        return node if node.inputs[0] == name and len(node.outputs) == 1 else None

    def _activation(self, node: OnnxNode) -> int:
        """The HAL's code for an activation that can be fused; 0 for any other operator."""
        if node.domain not in _OWN or node.kind not in ("Relu", "Clip"):
            return 0
        if node.kind == "Relu":
            return 1
        call = OnnxCall(self._graph, node, node.outputs[0])
        entries = [self._graph.entries.get(name) for name in node.inputs[1:] if name]
        if any(entry is None or entry.array is None or entry.array.size != 1 for entry in entries):
            return 0
        return _ACTIVATIONS.get(bounds(call), 0)


def _constant(node: OnnxNode) -> OnnxTensor:
    """The tensor that a Constant node holds."""
    found = node.tensor("value")
    if found is not None:
        return OnnxTensor(node.outputs[0], found.type, found.data, found.offset)
    for word, kind in (("value_int", "INT64"), ("value_float", "FLOAT")):
        if node.has(word):
            value = node.integer(word) if kind == "INT64" else node.real(word)
            return OnnxTensor(node.outputs[0], kind, np.array(value, np.int64 if kind == "INT64" else np.float32), None)
    if node.has("value_ints"):
        return OnnxTensor(node.outputs[0], "INT64", np.array(node.integers("value_ints"), np.int64), None)
    if node.has("value_floats"):
        return OnnxTensor(node.outputs[0], "FLOAT", np.array(node.reals("value_floats"), np.float32), None)
    raise ImportFailed("it holds neither a tensor nor numbers", node.name, node.index)
