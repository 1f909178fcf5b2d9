"""QuantizeLinear and DequantizeLinear.

An operator between the two computes on integers where the HAL can. The result of DequantizeLinear keeps a reference to
its integers. An operator whose inputs all do so, and whose result goes to QuantizeLinear, is computed on the integers.
Elsewhere the two become QUANTIZE and DEQUANTIZE.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from driver.errors import ImportFailed

from .call import MIDDLE, OnnxCall, QuantTarget, axis_of
from .file import OnnxNode
from .graph import BYTES, FLOATS, OnnxGraph, ValueEntry
from .table import OnnxRule


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
    """Keep the integers of a value; DEQUANTIZE is added only where an operator needs floats."""
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
        source = ValueEntry(entry.name, entry.type, entry.shape, entry.array, offset=entry.offset)
        source.scales, source.zero_points, source.axis = scales, zero_points, axis
    name = call.node.outputs[0]
    graph.bind(ValueEntry(name, "FLOAT", entry.shape, source=source))


def parameters(graph: OnnxGraph, node: OnnxNode) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return the scales and zero points of an operator, as many of one as of the other."""
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
    """Return the target of a QuantizeLinear; None where the HAL has no such type."""
    zero = node.inputs[2] if len(node.inputs) > 2 else ""
    if any(graph.find(name) is None for name in (*node.inputs[1:2], *([zero] if zero else []))):
        return None
    kind = graph.entry(zero).type if zero else {2: "UINT8", 3: "INT8", 0: "UINT8"}.get(node.integer("output_dtype"))
    scales, zero_points = parameters(graph, node)
    return QuantTarget(kind, scales[0], zero_points[0]) if kind in BYTES and len(scales) == 1 else None


def computes_on_integers(graph: OnnxGraph, node: OnnxNode, rule: OnnxRule, kind: str) -> bool:
    """Return True if an operator can run on integers: all of its float inputs are dequantised from the result's
    type.
    """
    entries = [(i, graph.find(name)) for i, name in enumerate(node.inputs) if name]
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
    """Return True if the HAL has a quantised product for such weights."""
    if source.array is None or source.type not in BYTES or node.real("alpha", 1.0) != 1.0:
        return False
    if node.kind == "ConvTranspose" and node.integer("group", 1) != 1:
        return False
    units = {"Conv": 0, "ConvTranspose": 1, "MatMul": 1, "Gemm": 0 if node.integer("transB") else 1}[node.kind]
    middle = 0 if source.type == "INT8" else MIDDLE
    return len(source.scales) == 1 or (source.axis == units and all(z == middle for z in source.zero_points))


def _is_tensor(source: ValueEntry) -> bool:
    """Return True if 8-bit integers are quantised per tensor."""
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
    """Return True if a value is a constant of one finite element."""
    if entry is None or entry.array is None or entry.array.size != 1:
        return None
    value = float(entry.array.reshape(-1)[0])
    return value if np.isfinite(value) else None
