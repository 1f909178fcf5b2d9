"""An .onnx file as a model.

    load(file)               a path -> a Model
      OnnxFile                   what it says, checked (file.py, by way of protobuf.py)
      OnnxGraph, OnnxCall            its values and an operator on their way into the HAL (graph.py, call.py)
      fold                   what is computed at once, as shapes are (fold.py)
      TABLE                  a short function for each operator (table.py and its siblings)
      QuantizeLinear…        quantised operators (quantised.py)

Protocol buffers are read here and not by a library, for that would unpack the whole file first: two bytes of it can be
an object of a hundred, and weights would be copied. So nothing needs to be installed, weights stay in the mapped file
as far as the HAL wants them in the same order, and what a file may make the reader do is bounded by its size.
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
    """The model in an .onnx file, and in the files beside it that hold its weights."""
    return read(map_file(file), file.parent)


def read(data: memoryview, folder: Path | None = None) -> Model:
    """The model in the bytes of an .onnx file; `ImportFailed` when they are damaged or cannot be mapped.

    folder: where its weights may lie in other files.
    """
    with np.errstate(all="ignore"):  # damaged numbers are infinite, or no numbers
        file = OnnxFile(data, folder)
        if file.opset < _EARLIEST:
            raise ImportFailed(f"opset {file.opset}; convert the model to {_EARLIEST} or newer")
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
    """The operators one by one, and which were fused into others."""

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
        """What becomes of an operator."""
        if node.index in self._fused or (node.kind == "Constant" and node.domain in _OWN):
            return
        if node.domain not in _OWN:
            raise ImportFailed("operators of other domains are not known")
        if not node.outputs or not node.outputs[0]:
            raise ImportFailed("it has no result")
        if fold(OnnxCall(self._graph, node, node.outputs[0])):
            return
        if node.kind in ("QuantizeLinear", "DequantizeLinear"):
            (quantise if node.kind == "QuantizeLinear" else dequantise)(OnnxCall(self._graph, node, node.outputs[0]))
            return
        rule = TABLE.get(node.kind)
        if rule is None:
            raise ImportFailed("there is no operation for it in the HAL 1.3, or none is known here")
        rule.convert(self._call(node, rule))

    def _call(self, node: OnnxNode, rule: OnnxRule) -> OnnxCall:
        """The operator, with what follows it fused into it."""
        name, code, target = node.outputs[0], 0, None
        following = self._follower(name, len(node.outputs))
        if rule.fuses and following is not None and (code := self._activation(following)):
            self._fused.add(following.index)
            name = following.outputs[0]
            following = self._follower(name, 1)
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

    def _follower(self, name: str, results: int) -> OnnxNode | None:
        """The only operator that reads a value."""
        if results != 1 or self._times[name] != 1 or name not in self._readers:
            return None
        node = self._readers[name]
        return node if node.inputs[0] == name and len(node.outputs) == 1 else None

    def _activation(self, node: OnnxNode) -> int:
        """The HAL's code for what can be fused; 0 for what cannot."""
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
    """What a Constant holds."""
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
    raise ImportFailed("it holds no tensor and no numbers", node.name, node.index)
