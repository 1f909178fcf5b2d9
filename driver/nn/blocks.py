"""Steps that take long, in blocks of a few milliseconds. Between two blocks the execution *looks* at its caller.

No call of numpy can be interrupted. So a kernel calls numpy on parts of its arrays, and calls `look` in between. There
an execution that was cancelled or is overdue ends, and one that others wait for pauses: what `look` raises ends the
kernel.

`Call.step` cuts what it recognises: functions that work element by element, reductions, products and `np.take`. A
kernel that is a Python function gets `call.look`, and uses the functions below.

What is smaller than a block is computed by a single call, as if there were no blocks. A larger result is the same to
the last bit, but for sums of floats over more elements than a block has, which are added up block by block.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Look = Callable[[], object]
Slices = tuple[slice, ...]

ELEMENTS = 1 << 18
"""Elements that one call of numpy goes over: 0.05 to 6 milliseconds of work, against which a look is nothing."""

PRODUCTS = 1 << 25
"""Products that one call adds up in a matrix product, which takes a hundredth of the time of other calls for each."""

_TERMS = 1 << 22
"""Elements of one factor of a product, which BLAS reads from memory; twice the terms of one sum."""

_PER_ELEMENT = PRODUCTS // ELEMENTS
_SIDE = 256
"""Rows of a block of a matrix product, if it has as many: enough for BLAS to use what it has loaded."""

WINDOWS = "niabjc,abjc->nijc"
"""How `np.einsum` adds up windows weighed by a filter."""

_BY_ELEMENT: set[Callable[..., Any]] = {np.copyto}
_F = TypeVar("_F", bound=Callable[..., Any])


def look_nowhere() -> None:
    """Do nothing, where nothing can end an execution."""


def by_element(function: _F) -> _F:
    """Decorate a function whose arrays, also those that it writes to, are broadcast and used element by element."""
    _BY_ELEMENT.add(function)
    return function


def pieces(shape: Sequence[int], most: int) -> Iterator[Slices]:
    """Cut an array into parts of at most `most` elements, in order: whole as far as possible along the inner axes."""
    inner = math.prod(shape[1:])
    if not shape or inner * shape[0] <= most:
        yield (slice(None),) * len(shape)
    elif inner <= most:
        rows, rest = most // inner, (slice(None),) * (len(shape) - 1)
        for start in range(0, shape[0], rows):
            yield slice(start, min(shape[0], start + rows)), *rest
    else:
        for row in range(shape[0]):
            for inside in pieces(shape[1:], most):
                yield slice(row, row + 1), *inside


def _part(array: Any, piece: Slices) -> Any:
    """Return the part of a broadcast array that belongs to a piece of the result; anything else as it is."""
    if not isinstance(array, np.ndarray) or not array.ndim:
        return array
    own = piece[len(piece) - array.ndim :]
    return array[tuple(slice(None) if size == 1 else part for size, part in zip(array.shape, own, strict=True))]


def each(look: Look, function: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Call a function that works element by element."""
    arrays = [a.shape for a in (*args, *options.values()) if isinstance(a, np.ndarray)]
    for number, piece in enumerate(pieces(np.broadcast_shapes(*arrays), ELEMENTS)):
        if number:
            look()
        function(*(_part(a, piece) for a in args), **{name: _part(a, piece) for name, a in options.items()})


def reduce(look: Look, function: np.ufunc, source: Array, axes: Sequence[int], out: Array, dtype: Any = None) -> None:
    """Reduce `axes`, which `out` keeps with the extent 1."""
    for number, piece in enumerate(pieces(source.shape, ELEMENTS)):
        if number:
            look()
        part = source[piece]
        kept = tuple(slice(None) if i in axes else whole for i, whole in enumerate(piece))
        target = out[kept]
        if all(not piece[i].start for i in axes):
            function.reduce(part, axis=tuple(axes), dtype=dtype, out=target, keepdims=True)
        else:
            function(target, function.reduce(part, axis=tuple(axes), dtype=dtype, keepdims=True), out=target)


def extreme(look: Look, method: str, source: Array, axis: int, found: Array) -> None:
    """Return the positions of extremes along `axis`, by `argmax` or `argmin`, where `found` keeps that with the extent
    1.
    """
    exceeds = np.greater if method == "argmax" else np.less
    best = np.empty(found.shape, source.dtype)
    for number, piece in enumerate(pieces(source.shape, ELEMENTS)):
        if number:
            look()
        part, start = source[piece], piece[axis].start or 0
        kept = tuple(slice(None) if i == axis else whole for i, whole in enumerate(piece))
        here = getattr(part, method)(axis, keepdims=True)
        if part.shape[axis] == source.shape[axis]:
            found[kept] = here
            continue
        value = np.take_along_axis(part, here, axis)
        if start:
            old = best[kept]
            wins = exceeds(value, old) | (np.isnan(value) & ~np.isnan(old))  # NaN is more extreme than any number
            value, here = np.where(wins, value, old), np.where(wins, here + start, found[kept])
        best[kept], found[kept] = value, here


def product(look: Look, a: Array, b: Array, out: Array) -> None:
    """`np.matmul(a, b, out)`."""
    if _products(a, b) <= PRODUCTS and max(a.size, b.size) <= _TERMS:
        np.matmul(a, b, out)
    elif a.ndim > 2 or b.ndim > 2:
        lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        a, b = (np.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (a, b))
        for piece in pieces(lead, max(1, PRODUCTS // max(1, _products(a[(0,) * len(lead)], b[(0,) * len(lead)])))):
            few = math.prod(len(range(*s.indices(n))) for s, n in zip(piece, lead, strict=True)) > 1
            _product_of(look, a[piece], b[piece], out[piece], lead=len(lead), few=few)
    elif a.ndim == 1 or b.ndim == 1:
        np.matmul(a, b, out)
    else:
        _matrix_product(look, a, b, out)


def _product_of(look: Look, a: Array, b: Array, out: Array, lead: int, *, few: bool) -> None:
    """Several matrices at once, or one."""
    if few:
        np.matmul(a, b, out)
    else:
        product(look, a[(0,) * lead], b[(0,) * lead], out[(0,) * lead])
    look()


def _matrix_product(look: Look, a: Array, b: Array, out: Array) -> None:
    (rows, terms), columns = a.shape, b.shape[1]
    if terms > _TERMS // 2:
        _long_product(look, a, b, out)
        return
    room = max(1, PRODUCTS // max(1, terms))  # elements of the result
    most = max(1, _TERMS // max(1, terms))  # rows of the one, and columns of the other
    height = min(rows, most, max(min(_SIDE, math.isqrt(room)), room // columns))
    width = min(columns, most, max(1, room // height))
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            here = slice(top, top + height), slice(left, left + width)
            np.matmul(a[here[0]], b[:, here[1]], out[here])
            look()


def _long_product(look: Look, a: Array, b: Array, out: Array) -> None:
    """Add up, block by block, a product of more terms than a block has."""
    for start in range(0, a.shape[1], _TERMS // 2):
        part = a[:, start : start + _TERMS // 2], b[start : start + _TERMS // 2]
        if not start:
            product(look, *part, out)
            continue
        more = np.empty_like(out)
        product(look, *part, more)
        each(look, np.add, out, more, out)


def _products(a: Array, b: Array) -> int:
    """Return how many products a matrix product adds up."""
    if a.ndim == 1 or b.ndim == 1:
        return max(a.size, b.size)
    lead = math.prod(np.broadcast_shapes(a.shape[:-2], b.shape[:-2])) if a.ndim > 2 or b.ndim > 2 else 1
    return int(lead * a.shape[-2] * a.shape[-1] * b.shape[-1])


def take(
    look: Look, values: Array, indices: Array, axis: int | None = None, out: Any = None, mode: str = "clip"
) -> None:
    """`np.take` into `out`, which does not overlap anything."""
    assert mode == "clip"
    if axis is None:
        for number, piece in enumerate(pieces(out.shape, ELEMENTS)):
            if number:
                look()
            np.take(values, indices[piece], out=out[piece], mode="clip")
        return
    before, after = values.shape[:axis], values.shape[axis + 1 :]
    flat, chosen = out.reshape(math.prod(before), -1, math.prod(after)), indices.reshape(-1)
    if not np.may_share_memory(flat, out):  # it is not contiguous
        np.take(values, indices, axis, out, "clip")
        return
    values = values if values.flags.c_contiguous else copied(look, values)  # as np.take does it
    source = values.reshape(math.prod(before), values.shape[axis], -1)
    for number, (n, rows, inside) in enumerate(pieces(flat.shape, ELEMENTS)):
        if number:
            look()
        target, entries = flat[n, rows, inside], chosen[rows]
        if inside == slice(None):
            np.take(source[n], entries, 1, target, "clip")
        else:
            np.copyto(target, source[n, min(max(int(entries[0]), 0), source.shape[1] - 1), inside])


def sums_of_products(look: Look, subscripts: str, source: Array, taps: Array, out: Array) -> None:
    """`np.einsum` of windows [n, i, a, b, j, c] and a filter [a, b, j, c]."""
    assert subscripts == WINDOWS
    for number, (n, i, j, c) in enumerate(pieces(out.shape, max(1, 4 * ELEMENTS // math.prod(taps.shape[:2])))):
        if number:
            look()
        np.einsum(subscripts, source[n, i, :, :, j, c], taps[:, :, j, c], out=out[n, i, j, c])


def copied(look: Look, source: Array) -> Array:
    """Return a private copy, its elements in order."""
    copy = np.empty(source.shape, source.dtype)
    each(look, np.copyto, copy, source)
    return copy


# ---- what a step calls


def cost(function: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> int:
    """Return how much work a call of numpy is, in elements that it goes over; of other functions nothing is known."""
    if function is np.matmul:
        return max(_products(args[0], args[1]) // _PER_ELEMENT, *(int(array.size) for array in args))
    sizes = [int(a.size) for a in (*args, *options.values()) if isinstance(a, np.ndarray)]
    owner = getattr(function, "__self__", None)
    return max(*sizes, int(owner.size) if isinstance(owner, np.ndarray) else 0, 0)


def in_blocks(look: Look, function: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Make the same call in blocks; return None if it is of a function that cannot be cut."""
    while isinstance(function, partial):
        args, options, function = (*function.args, *args), function.keywords | options, function.func
    if function in _KNOWN:
        return partial(_KNOWN[function], look, *args, **options)
    if function in _BY_ELEMENT or (isinstance(function, np.ufunc) and function.signature is None):
        return partial(each, look, function, *args, **options)
    method = _METHODS.get(getattr(function, "__name__", ""))
    owner = getattr(function, "__self__", None)
    return method(look, owner, *args, **options) if method and isinstance(owner, np.ndarray | np.ufunc) else None


def _reduce_step(
    look: Look, function: np.ufunc, source: Array, axis: Any, dtype: Any = None, out: Any = None, keepdims: bool = False
) -> Any:
    axes = tuple(i % source.ndim for i in (axis if isinstance(axis, tuple) else (axis,)))
    return partial(reduce, look, function, source, axes, out if keepdims else np.expand_dims(out, axes), dtype)


def _extreme_step(method: str, look: Look, source: Array, axis: int, found: Array) -> Any:
    return partial(extreme, look, method, source, axis, np.expand_dims(found, axis))


def _clip(array: Array, low: Any, high: Any, out: Array) -> None:
    array.clip(low, high, out)


def _fill(array: Array, value: Any) -> None:
    array.fill(value)


_KNOWN: dict[Any, Callable[..., Any]] = {np.matmul: product, np.take: take, np.einsum: sums_of_products}
_METHODS: dict[str, Callable[..., Any]] = {
    "reduce": _reduce_step,
    "argmax": partial(_extreme_step, "argmax"),
    "argmin": partial(_extreme_step, "argmin"),
    "clip": lambda look, *args: partial(each, look, _clip, *args),
    "fill": lambda look, *args: partial(each, look, _fill, *args),
}
