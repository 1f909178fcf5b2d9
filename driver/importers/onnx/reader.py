"""Convert an .onnx file to a model.

    load(path) -> Model
      OnnxFile               the content of the file, checked (file.py)
      OnnxGraph, OnnxCall    its values, and one operator, during conversion (graph.py, call.py)
      fold                   computes constant expressions, such as shapes, at load time (fold.py)
      TABLE                  one short function per operator (table.py and the modules that it lists)
      quantise, dequantise   QuantizeLinear and DequantizeLinear (below)

An operator between QuantizeLinear and DequantizeLinear computes on integers where the HAL can. The result of
DequantizeLinear keeps a reference to its integers. An operator whose inputs all do so, and whose result goes to
QuantizeLinear, is computed on the integers. Elsewhere the two become QUANTIZE and DEQUANTIZE.

This package reads protocol buffers itself. A library would unpack the whole file first: two bytes of the file can
become an object of a hundred bytes, and weights would be copied. So nothing needs to be installed, weights stay in the
mapped file where the HAL wants the same order, and the work that a file can cause is bounded by its size.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from driver.errors import ImportFailed, InvalidModel
from driver.importers.file_bytes import map_file
from driver.nn import Model

from .call import MIDDLE, OnnxCall, QuantTarget, axis_of
from .elements import bounds
from .file import DTYPES, OnnxFile, OnnxNode, OnnxTensor
from .fold import fold
from .graph import BYTES, FLOATS, OnnxGraph, ValueEntry
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
            wish = wanted(self._graph, following) if rule.quantised else None
            if wish is not None and computes_on_integers(self._graph, node, rule, wish.type):
                target = wish
                self._fused.add(following.index)
                name = following.outputs[0]
        return OnnxCall(self._graph, node, name, code, target)

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
    readers: dict[str, tuple[Callable[[str], object], str]] = {
        "value_int": (node.integer, "INT64"),
        "value_float": (node.real, "FLOAT"),
        "value_ints": (node.integers, "INT64"),
        "value_floats": (node.reals, "FLOAT"),
    }
    for word, (read, kind) in readers.items():
        if node.has(word):
            return OnnxTensor(node.outputs[0], kind, np.array(read(word), DTYPES[kind]), None)
    raise ImportFailed("it holds neither a tensor nor numbers", node.name, node.index)


def quantise(call: OnnxCall) -> None:
    """QUANTIZE; the identity for integers that return with the same scale."""
    target = wanted(call.graph, call.node)
    if target is None:
        raise ImportFailed("scale and zero point must be constant, one for all elements, and of INT8 or UINT8")
    source = call.entry(0).source
    if source is not None and source.array is None and _is(source, target):
        call.graph.alias(call.node.outputs[0], source)
        return
    value, is_image = call.input_in_its_layout()
    kind = {"INT8": "quant8_asymm_signed", "UINT8": "quant8_asymm"}[target.type]
    result = call.emit("QUANTIZE", value, scale=target.scale, zero_point=target.zero_point, dtype=kind)
    call.give(result, shape=call.shape(0), is_image=is_image)


def _is(entry: ValueEntry, target: QuantTarget) -> bool:
    return (entry.type, entry.scales, entry.zero_points) == (target.type, (target.scale,), (target.zero_point,))


def dequantise(call: OnnxCall) -> None:
    """A value that keeps its integers; DEQUANTIZE is added only where an operator needs floats."""
    entry, graph = call.entry(0), call.graph
    scales, zero_points = parameters(graph, call.node)
    if entry.array is None:
        if entry.type not in BYTES or (entry.scales, entry.zero_points) != (scales, zero_points):
            raise ImportFailed(f"{entry} is quantised with scale {entry.scales[:2]} but dequantised with {scales[:2]}")
        source = entry
    else:
        if entry.type not in (*BYTES, "INT32"):
            raise ImportFailed(f"{entry} is quantised; the HAL has 8-bit data and 32-bit biases")
        axis = axis_of(call.node.integer("axis", 1), max(entry.array.ndim, 1)) if len(scales) > 1 else 0
        count = entry.array.shape[axis] if entry.array.ndim and len(scales) > 1 else len(scales)
        if len(scales) != count or (len(scales) > 1 and not entry.array.ndim) or call.node.integer("block_size"):
            raise ImportFailed(f"{entry} has {len(scales)} scales along dimension {axis}")
        source = ValueEntry(entry.name, entry.type, entry.shape, entry.array, entry.offset)
        source.scales, source.zero_points, source.axis = scales, zero_points, axis
    name = call.node.outputs[0]
    graph.bind(ValueEntry(name, "FLOAT", entry.shape, source=source))


def parameters(graph: OnnxGraph, node: OnnxNode) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """The scales and zero points of an operator, as many of one as of the other."""
    if len(node.inputs) < 2:
        raise ImportFailed("scale is missing")
    scale = graph.entry(node.inputs[1])
    zero = graph.entry(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] else None
    if scale.array is None or scale.type != "FLOAT" or (zero is not None and zero.array is None):
        raise ImportFailed("scale and zero point must be constant")
    scales = tuple(float(s) for s in scale.array.reshape(-1))
    if not scales or len(scales) > 1 << 20 or not all(np.isfinite(s) and s > 0 for s in scales):
        raise ImportFailed(f"scales {scales[:4]} must be above 0")
    if zero is not None and np.asarray(zero.array).dtype.kind not in "iu":
        raise ImportFailed(f"zero point {zero} must hold integers")
    zeros = (0,) * len(scales) if zero is None else tuple(int(z) for z in np.asarray(zero.array).reshape(-1))
    if len(zeros) != len(scales):
        raise ImportFailed(f"{len(zeros)} zero points for {len(scales)} scales")
    return scales, zeros


def wanted(graph: OnnxGraph, node: OnnxNode) -> QuantTarget | None:
    """The target of a QuantizeLinear; None where the HAL has no such type."""
    zero = node.inputs[2] if len(node.inputs) > 2 else ""
    if not all(name in graph.entries for name in (*node.inputs[1:2], *([zero] if zero else []))):
        return None
    kind = graph.entry(zero).type if zero else {2: "UINT8", 3: "INT8", 0: "UINT8"}.get(node.integer("output_dtype"))
    scales, zero_points = parameters(graph, node)
    return QuantTarget(kind, scales[0], zero_points[0]) if kind in BYTES and len(scales) == 1 else None


def computes_on_integers(graph: OnnxGraph, node: OnnxNode, rule: OnnxRule, kind: str) -> bool:
    """Whether an operator can run on integers: all of its float inputs are dequantised from the result's type."""
    entries = [(i, graph.entries.get(name)) for i, name in enumerate(node.inputs) if name]
    if not rule.quantised or not entries or entries[0][1] is None or entries[0][1].source is None:
        return False
    for position, entry in entries:
        if entry is None:
            return False
        is_bias = rule.weights is not None and position > rule.weights
        if entry.type in FLOATS and entry.source is None and not is_bias:
            return False
        if position == rule.weights:
            if entry.source is None or not _is_filter(node, entry.source):
                return False
        elif entry.source is not None and not is_bias and not _is_tensor(entry.source):
            return False
    kinds = {e.source.type for i, e in entries if e is not None and e.source is not None and rule.weights is None}
    return kinds <= {kind} and entries[0][1].source.type == kind


def _is_filter(node: OnnxNode, source: ValueEntry) -> bool:
    """Whether the HAL has a quantised product for such weights."""
    if source.array is None or source.type not in BYTES or node.real("alpha", 1.0) != 1.0:
        return False
    if node.kind == "ConvTranspose" and node.integer("group", 1) != 1:
        return False
    units = {"Conv": 0, "ConvTranspose": 1, "MatMul": 1, "Gemm": 0 if node.integer("transB") else 1}[node.kind]
    middle = 0 if source.type == "INT8" else MIDDLE
    return len(source.scales) == 1 or (source.axis == units and all(z == middle for z in source.zero_points))


def _is_tensor(source: ValueEntry) -> bool:
    """Whether 8-bit integers are quantised per tensor."""
    return source.type in BYTES and len(source.scales) == 1


def input_scales(nodes: Sequence[OnnxNode], constants: Mapping[str, ValueEntry]) -> dict[str, tuple[float, int]]:
    """Quantisation of the model's 8-bit inputs: that of the first DequantizeLinear that reads each."""
    found: dict[str, tuple[float, int]] = {}
    for node in nodes:
        if node.kind != "DequantizeLinear" or len(node.inputs) < 2 or node.inputs[0] in found:
            continue
        scale, zero = (constants.get(name) for name in (*node.inputs[1:3], "")[:2])
        if _one(scale) is not None:
            found[node.inputs[0]] = _one(scale) or 1.0, int(_one(zero) or 0)
    return found


def _one(entry: ValueEntry | None) -> float | None:
    """Whether a value is a constant of one finite element."""
    if entry is None or entry.array is None or entry.array.size != 1:
        return None
    value = float(entry.array.reshape(-1)[0])
    return value if np.isfinite(value) else None
