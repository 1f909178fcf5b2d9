"""Constant folding of shapes: SHAPE, and the operators that pick from it and join it for a RESHAPE.

A list computed from known dimensions is a constant. A dimension that is unknown until execution, usually the batch,
is None in such a list; a RESHAPE may have one of them, which becomes its -1.
"""

import math
from collections.abc import Sequence

from driver.errors import ImportFailed

from .call import TfliteCall
from .flatbuffer import integers

Sizes = tuple[int | None, ...]
_MOST = 32
"""Limit for such a list; no shape has more dimensions."""
_FOLDED = ("STRIDED_SLICE", "GATHER", "PACK", "CONCATENATION", "MUL")


def shape(call: TfliteCall) -> None:
    """SHAPE."""
    call.rank(0)
    _keep(call, [d or None for d in call.tensor(0).shape or ()])
    call.graph.origins[call.result(0).index] = call.number(0)


def rank_of(call: TfliteCall) -> None:
    """RANK as a constant; the HAL's RANK returns a scalar, which no other operation takes as a tensor."""
    _keep(call, [call.rank(0)])


def fold(call: TfliteCall) -> bool:
    """Compute an operator on such lists at load time. Returns whether it was computed."""
    name, sizes = call.operator.name, call.graph.sizes
    if name not in _FOLDED or not sizes.keys() & set(call.operator.inputs):
        return False
    lists = [_sizes(call, i) for i in range(1 if name in ("STRIDED_SLICE", "GATHER") else len(call))]
    known = [found for found in lists if found is not None]
    if len(known) < len(lists):
        return False
    origins = {call.graph.origins.get(i) for i in call.operator.inputs if i in sizes}
    if name != "MUL" and len(origins) == 1 and None not in origins:
        call.graph.origins[call.result(0).index] = origins.pop() or 0
    if name == "STRIDED_SLICE":
        _keep(call, _sliced(call, known[0]))
    elif name == "GATHER":
        _keep(call, [_element(known[0], i) for i in call.integers(1)[: _MOST + 1]])
    elif name == "MUL":
        _keep(call, _multiplied(known))
    else:
        _keep(call, [d for found in known for d in found])
    return True


def target(call: TfliteCall) -> list[int] | None:
    """The shape argument of a RESHAPE, with -1 for the unknown size; None when the model computes it."""
    found = _sizes(call, 1) if call.given(1) else None
    if found is None:
        is_computed = call.given(1) and not call.tensor(1).is_empty
        return None if is_computed else list(integers(call.options, "NewShape") or call.result_shape())
    found, result = _rest(call, found), call.result(0).shape or ()
    if found.count(None) + found.count(-1) > 1 and len(result) == len(found):
        found = tuple(d if d not in (None, -1) else r or None for d, r in zip(found, result, strict=True))
    sizes = [-1 if d is None else d for d in found]
    if sizes.count(-1) > 1:
        raise ImportFailed(f"in {sizes[:_MOST]}, more than one dimension is unknown")
    return sizes


def _rest(call: TfliteCall, found: Sizes) -> Sizes:
    """The size that -1 stands for when the tensor itself has one unknown dimension."""
    whole = call.tensor(0).shape or ()
    is_own = call.graph.origins.get(call.number(1)) == call.number(0) and whole.count(0) == 1
    if not is_own or (found.count(None), found.count(-1)) != (1, 1):
        return found
    given = math.prod(d for d in found if d not in (None, -1))
    left, over = divmod(math.prod(d for d in whole if d), given) if given > 0 else (0, 1)
    if over:
        raise ImportFailed(f"dimensions {list(whole)} cannot become {list(found)}")
    return tuple(left if d == -1 else d for d in found)


def _sizes(call: TfliteCall, position: int) -> Sizes | None:
    """Input `position` as such a list: a constant, or one computed before; else None."""
    number = call.number(position)
    if number in call.graph.sizes:
        return call.graph.sizes[number]
    info = call.tensor(position)
    if (info.data is not None and info.data.size > _MOST) or info.is_empty:
        return None
    return tuple(call.integers(position)) if info.data is not None and info.type in ("INT32", "INT64") else None


def _keep(call: TfliteCall, found: Sequence[int | None]) -> None:
    """Bind the result to the list; it is a constant too when all sizes are known."""
    if len(found) > _MOST or any(d is not None and not -(2**31) <= d < 2**31 for d in found):
        raise ImportFailed(f"a list of {len(found)} sizes, or one that does not fit into 32 bits")
    call.graph.keep_sizes(call.result(0).index, tuple(found))


def _multiplied(factors: Sequence[Sizes]) -> Sizes:
    count = max(map(len, factors))
    if len(factors) != 2 or any(len(found) not in (1, count) for found in factors):
        raise ImportFailed(f"lists of {[len(found) for found in factors[:_MOST]]} sizes cannot be multiplied")
    a, b = (found * count if len(found) < count else found for found in factors)
    return tuple(None if None in (x, y) else (x or 0) * (y or 0) for x, y in zip(a, b, strict=True))


def _element(found: Sizes, place: int) -> int | None:
    if not -len(found) <= place < len(found):
        raise ImportFailed(f"index {place} is out of range for {len(found)} sizes")
    return found[place]


def _sliced(call: TfliteCall, found: Sizes) -> Sizes:
    (begin,), (end,), (stride,) = (call.integers(i)[:1] or [1] for i in (1, 2, 3))
    if call.options.ShrinkAxisMask() & 1:
        return (_element(found, 0 if call.options.BeginMask() & 1 else begin),)
    if not stride or call.options.NewAxisMask() or call.options.EllipsisMask() or call.options.Offset():
        raise ImportFailed(
            "a slice of sizes has a stride of 0, new axes, an ellipsis, or ends relative to the beginning"
        )
    first = None if call.options.BeginMask() & 1 else begin
    return found[first : None if call.options.EndMask() & 1 else end : stride]
