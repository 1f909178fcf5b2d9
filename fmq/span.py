"""Elements in place in the ring, for as long as this side owns their memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fmq.conversion import converted
from fmq.errors import Closed

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


class Lease:
    """Says whether this side still owns the memory behind a span's arrays. C ends it with the block, and begins it anew
    when nothing of the span is left but what the end keeps for later blocks (csrc/fmq/python/blocks.c).
    """

    __slots__ = ("is_over",)

    def __init__(self) -> None:
        self.is_over = False

    def check(self) -> None:
        """Raise Closed when it is not."""
        if self.is_over:
            raise Closed("this span was committed or left: its memory is the other side's now; copy what you keep")


_view = np.ndarray.view


class SpanArray(np.ndarray[Any, np.dtype[Any]]):
    """An ndarray in the ring. It, its views and its slices refuse to be used after the span's block has ended.

    `np.asarray(a)` and `memoryview(a)` make plain views that cannot know of that end; keep them inside the block.
    """

    _lease: Lease | None = None

    def __array_finalize__(self, origin: object) -> None:
        self._lease = None if self.flags.owndata else getattr(origin, "_lease", None)  # copies are free

    def __getitem__(self, key: Any) -> Any:
        plain = _plain(self)
        part = plain[key]
        if not isinstance(part, np.ndarray) or not np.may_share_memory(part, plain):
            return part  # a scalar, or a copy
        return _view(part, SpanArray) if self._lease is None else _leased(part, self._lease)

    def __setitem__(self, key: Any, value: Any) -> None:
        _check(self)
        super().__setitem__(key, value)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **how: Any) -> Any:
        """Calculate on plain arrays, so that results are plain as well."""
        out = how.get("out", ())
        if out:
            how["out"] = tuple(_plain(array) for array in out)
        result = getattr(ufunc, method)(*(_plain(array) for array in inputs), **how)
        return out[0] if out else result

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        _check(self)
        return super().__array_function__(function, types, args, kwargs)

    def __repr__(self) -> str:
        return "<span that has ended>" if self._lease is not None and self._lease.is_over else super().__repr__()


def _check(array: SpanArray) -> None:
    if array._lease is not None:
        array._lease.check()


def _guard_methods() -> None:
    """Make all public methods and attributes of an ndarray check the lease first; __array_ufunc__ guards ufuncs."""
    for name in dir(np.ndarray):
        if name.startswith("_") or name in _HARMLESS:
            continue
        found = getattr(np.ndarray, name)
        setattr(SpanArray, name, _guarded(found) if callable(found) else property(_guarded(found.__get__)))


_HARMLESS = {
    "dtype",
    "flags",
    "itemsize",
    "nbytes",
    "ndim",
    "shape",
    "size",
    "strides",
    "base",
}  # none of these touches the elements


def _guarded(method: Any) -> Any:
    def call(self: SpanArray, *args: Any, **how: Any) -> Any:
        _check(self)
        return method(self, *args, **how)

    return call


_guard_methods()


def _plain(array: Any) -> Any:
    if not isinstance(array, SpanArray):
        return array
    _check(array)
    return _view(array, np.ndarray)


def _leased(array: NDArray[Any], lease: Lease) -> SpanArray:
    view: SpanArray = _view(array, SpanArray)
    view._lease = lease
    return view


class Span:
    """Elements in place in the ring: `first` up to the wrap point, `second` from its start (often empty).

    Valid inside its `with` block only: afterwards the memory belongs to the other side, and both raise Closed.
    """

    __slots__ = ("_lease", "first", "second")

    def __init__(self, first: NDArray[Any], second: NDArray[Any]) -> None:
        lease = self._lease = Lease()
        self.first, self.second = _leased(first, lease), _leased(second, lease) if len(second) else second

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def __getitem__(self, key: int) -> Any:
        """Return an element: a view of it in the ring if it is an array or a record."""
        if not isinstance(key, int | np.integer):
            raise IndexError(f"span[{key}]: a span may have two parts; index .first and .second, or np.array(span)")
        if not -len(self) <= key < len(self):
            raise IndexError(f"span[{key}]: the span has {len(self)} elements")
        index = key % len(self)
        return self.first[index] if index < len(self.first) else self.second[index - len(self.first)]

    def __setitem__(self, key: slice, values: ArrayLike) -> None:
        """`span[:] = values`, where values broadcast to the whole length, and must be values of the queue's type."""
        if key != slice(None):
            raise IndexError(f"span[{key}]: only span[:] crosses the wrap point; index .first and .second")
        whole = np.broadcast_to(converted(values, self.first.dtype), (len(self),))
        self.first[:], self.second[:] = whole[: len(self.first)], whole[len(self.first) :]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return a copy, in order."""
        if copy is False:
            raise ValueError("copy=False: a span may have two parts; use .first and .second")
        parts = _plain(self.first), _plain(self.second)
        return np.concatenate(parts).astype(dtype or self.first.dtype, copy=False)
