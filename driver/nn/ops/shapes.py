"""Operations about dimensions, which leave the elements in order: RESHAPE, SQUEEZE, EXPAND_DIMS, RANK, FILL.

Copies view the *output* in the shape of the input: outputs are contiguous, so that such a view always exists.
"""

import math
from collections.abc import Sequence

import numpy as np

from ..model import Operand
from ..operation import ANY_RANK, LETTERS, Call, OperationType, Signature, same_as_input
from ..types import Dimensions
from .axes import all_axes, one_axis

MAX_RANK = 4


def _copy(call: Call) -> None:
    source = call.array(0)
    call.step(np.copyto, call.outputs[0].data.reshape(source.shape), source)


def _reshape_shape(call: Call) -> tuple[Dimensions]:
    size, target = math.prod(call.shape(0)), call.values(1)
    if not 1 <= len(target) <= MAX_RANK or target.count(-1) > 1 or any(d < -1 for d in target):
        raise ValueError(f"target {target[:9]} has to have 1..{MAX_RANK} dimensions, at most one of them -1")
    known = math.prod(d for d in target if d != -1)
    if -1 in target:
        if known == 0 or size % known:
            raise ValueError(f"{size} elements do not divide into {target}")
        target = [size // known if d == -1 else d for d in target]
    elif known != size:
        raise ValueError(f"{size} elements do not fit into {target}")
    return (tuple(target),)


def _squeeze_shape(call: Call) -> tuple[Dimensions]:
    shape = call.shape(0)
    listed = call.values(1) if call.given(1) else [i for i, d in enumerate(shape) if d == 1]
    axes = all_axes(listed, len(shape))
    if any(shape[i] != 1 for i in axes):
        raise ValueError(f"axes {list(axes)} of {list(shape)} have to be of size 1")
    return (tuple(d for i, d in enumerate(shape) if i not in axes) or (1,),)


def one_list(inputs: Sequence[Operand], _outputs: Sequence[Operand]) -> str | None:
    """The check of operations whose input 1 is a list that may be omitted: even then it is declared as a list."""
    dimensions = inputs[1].dimensions
    return f"input 1 is declared {list(dimensions)}; it has to be 1-D" if len(dimensions) > 1 else None


def _expanded_shape(call: Call) -> tuple[Dimensions]:
    shape = call.shape(0)
    axis = one_axis(call.integer(1), len(shape) + 1)
    return ((*shape[:axis], 1, *shape[axis:]),)


def _scalar_shape(_call: Call) -> tuple[Dimensions]:
    return ((),)


def _rank(call: Call) -> None:
    call.step(np.copyto, call.outputs[0].data, len(call.shape(0)))


def _filled_shape(call: Call) -> tuple[Dimensions]:
    target = call.values(0)
    if len(target) not in ANY_RANK or min(target) < 0:
        raise ValueError(f"target {target[:9]} has to have 1..{ANY_RANK[-1]} dimensions of at least 0")
    return (tuple(target),)


def _fill(call: Call) -> None:
    call.step(np.copyto, call.outputs[0].data, call.matrix(1))


RESHAPE = OperationType(
    "RESHAPE", 22, (Signature("f0 q0 h2 s3", "T TENSOR_INT32"),), _reshape_shape, _copy, quantisation=same_as_input
)
SQUEEZE = OperationType(
    "SQUEEZE",
    34,
    (Signature("f1 q1 h2 s3", "T TENSOR_INT32?"),),
    _squeeze_shape,
    _copy,
    quantisation=same_as_input,
    check=one_list,
)
EXPAND_DIMS = OperationType(
    "EXPAND_DIMS",
    50,
    (Signature("f2 h2 i2 q2 s3", "T INT32", ranks=ANY_RANK),),
    _expanded_shape,
    _copy,
    quantisation=same_as_input,
)
RANK = OperationType(
    "RANK",
    101,
    (Signature(" ".join(f"{t}3" for t in LETTERS if t != "g"), "T", "INT32", ranks=ANY_RANK),),
    _scalar_shape,
    _rank,
)
FILL = OperationType(
    "FILL",
    100,
    tuple(
        Signature("i3", f"TENSOR_INT32 {scalar}", result, ranks=ANY_RANK)
        for scalar, result in (("FLOAT32", "f"), ("FLOAT16", "h"), ("INT32", "i"))
    ),
    _filled_shape,
    _fill,
)
