"""Mutations that may be legal: the exceptions of VTS, for operations with several forms."""

from driver.nn import Operation, Subgraph
from driver.nn.operation import LETTERS
from driver.nn.types import OperandType

_SEQUENCES = frozenset(
    {
        "BIDIRECTIONAL_SEQUENCE_LSTM",
        "BIDIRECTIONAL_SEQUENCE_RNN",
        "UNIDIRECTIONAL_SEQUENCE_LSTM",
        "UNIDIRECTIONAL_SEQUENCE_RNN",
    }
)
_FLOATS, _BYTES = frozenset(LETTERS[c] for c in "fh"), frozenset(LETTERS[c] for c in "qs")
_FILTERS = _BYTES | {LETTERS["P"]}
_ANY = frozenset(OperandType)

_INPUT_TYPES: dict[str, tuple[int, frozenset[OperandType]]] = {
    "ARGMAX": (0, _ANY),
    "ARGMIN": (0, _ANY),
    "AXIS_ALIGNED_BBOX_TRANSFORM": (1, _BYTES),
    "CAST": (0, _ANY),
    "CONV_2D": (1, _FILTERS),
    "DEPTHWISE_CONV_2D": (1, _FILTERS),
    "DEQUANTIZE": (0, frozenset(LETTERS[c] for c in "qsyP")),
    "GROUPED_CONV_2D": (1, _FILTERS),
    "LSH_PROJECTION": (1, _ANY),
    "QUANTIZE": (0, _FLOATS),
    "RANDOM_MULTINOMIAL": (0, _FLOATS),
    "RANK": (0, _ANY),
    "TRANSPOSE_CONV_2D": (1, _FILTERS),
}
"""The input whose type may change alone, and the types that it may have."""

_OUTPUT_TYPES = {"CAST": _ANY, "DEQUANTIZE": _FLOATS, "QUANTIZE": _BYTES}

_OTHER_FORMS = {"CONV_2D": (10, 7), "DEPTHWISE_CONV_2D": (11, 8)}
"""By number of inputs: the one whose type tells implicit padding (BOOL, the layout) from explicit (INT32)."""

_TAILS: dict[str, dict[int, tuple[int, ...]]] = {
    "AVERAGE_POOL_2D": {8: (7,), 11: (10,)},
    "BATCH_TO_SPACE_ND": {3: (2,)},
    "CONV_2D": {8: (7,), 11: (10,)},
    "DEPTHWISE_CONV_2D": {9: (8,), 12: (11,)},
    "DEPTH_TO_SPACE": {3: (2,)},
    "L2_NORMALIZATION": {2: (1,)},
    "L2_POOL_2D": {8: (7,), 11: (10,)},
    "LOCAL_RESPONSE_NORMALIZATION": {6: (5,)},
    "MAX_POOL_2D": {8: (7,), 11: (10,)},
    "RESIZE_BILINEAR": {4: (3,), 5: (3, 4), 6: (3, 4, 5)},
    "RESIZE_NEAREST_NEIGHBOR": {5: (3, 4), 6: (3, 4, 5)},
    "SOFTMAX": {3: (2,)},
    "SPACE_TO_BATCH_ND": {4: (3,)},
    "SPACE_TO_DEPTH": {3: (2,)},
}
"""By operation and number of inputs: the inputs whose removal leaves a shorter valid form."""

_GROWING = {
    "L2_NORMALIZATION": 2,
    "LOCAL_RESPONSE_NORMALIZATION": 6,
    "RESIZE_BILINEAR": 6,
    "RESIZE_NEAREST_NEIGHBOR": 6,
    "SOFTMAX": 3,
}
"""Operations with optional INT32 or BOOL inputs at the end, and their full number of inputs."""


def may_have_type(graph: Subgraph, operation: Operation, index: int, kind: OperandType) -> bool:
    """Whether operand `index` of a call may also have type `kind`, all else being equal."""
    position, types = _INPUT_TYPES.get(operation.type, (0, frozenset()))
    if operation.inputs.count(index) > 1:  # all inputs that must share a type change
        return True
    count, telling = _OTHER_FORMS.get(operation.type, (0, 0))
    if len(operation.inputs) == count and operation.inputs[telling] == index:
        return kind in {OperandType.BOOL, OperandType.INT32}
    if position < len(operation.inputs) and operation.inputs[position] == index:
        return {kind, graph.operands[index].type} <= types
    return index in operation.outputs and kind in _OUTPUT_TYPES.get(operation.type, frozenset())


def may_lose_input(operation: Operation, position: int) -> bool:
    """Whether a call without this input is another form of the operation."""
    if operation.type == "CONCATENATION":
        return len(operation.inputs) > 2 and position < len(operation.inputs) - 1
    return position in _TAILS.get(operation.type, {}).get(len(operation.inputs), ())


def may_lose(operation: Operation, index: int) -> bool:
    """Whether a call may be legal without operand `index`, wherever it is listed."""
    if index in operation.outputs:
        return operation.type in {"SPLIT", "WHILE"} or operation.type in _SEQUENCES
    positions = [n for n, i in enumerate(operation.inputs) if i == index]
    return len(positions) > 1 or all(may_lose_input(operation, n) for n in positions)


def may_gain_input(operation: Operation) -> bool:
    """Whether the operation may take a further INT32."""
    return len(operation.inputs) < _GROWING.get(operation.type, 0)
