"""Conversion of elements that are no array of the queue's type, for `write`: it refuses what would change them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

_NUMBERS = "biufc"


def converted(elements: ArrayLike, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the elements as a C-contiguous array of that type, without a copy where they are one.

    Raise ValueError for an element that would be another one there. Only a float becomes the nearest of its new type,
    unless that is infinite.
    """
    array = np.asarray(elements) if hasattr(elements, "dtype") else _inferred(elements, dtype)
    return np.ascontiguousarray(array if array.dtype == dtype else _cast(array, dtype, ""))


def _inferred(elements: ArrayLike, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array of what Python's own values are; of records, with any object in each field."""
    if not dtype.names:
        return np.asarray(elements)
    _check_records(elements, dtype.names)
    return np.asarray(elements, _loose(dtype))


def _check_records(elements: Any, names: tuple[str, ...]) -> None:
    """Raise ValueError for what numpy would spread over all fields, or put into other fields than its own."""
    if isinstance(elements, list):
        for element in elements:
            _check_records(element, names)
    elif not isinstance(elements, tuple) and getattr(getattr(elements, "dtype", None), "names", None) != names:
        raise ValueError(f"elements: {elements!r} is no record of this queue; write tuples of ({', '.join(names)})")


def _loose(dtype: np.dtype[Any]) -> Any:
    if dtype.subdtype:
        return _loose(dtype.subdtype[0]), dtype.subdtype[1]
    return [(name, _loose(dtype[name])) for name in dtype.names] if dtype.names else object


def _cast(array: NDArray[Any], dtype: np.dtype[Any], field: str) -> NDArray[Any]:
    if dtype.names:
        return _cast_records(array, dtype, field)
    if array.dtype == object:
        array = _of_one_type(array)
    with np.errstate(all="ignore"):
        real = array.real if array.dtype.kind == "c" != dtype.kind else array
        try:
            made = real.astype(dtype, order="C")
            changed = np.asarray(_changed(array, made))
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"elements{field}: {array.dtype} cannot become {dtype}: {error}") from None
    if changed.any():
        at = tuple(int(index) for index in np.argwhere(changed)[0])
        index = f"[{', '.join(map(str, at))}]" if at else ""
        raise ValueError(
            f"elements{index}{field}: {array[at]} would be {made[at]} in this queue of {dtype}; write what {dtype} can"
            f" hold, or make the queue of {'another type' if array.dtype == object else array.dtype}"
        )
    return made


def _cast_records(array: NDArray[Any], dtype: np.dtype[Any], field: str) -> NDArray[Any]:
    """Field by field: numpy itself goes by their order, whatever they are called."""
    names = cast("tuple[str, ...]", dtype.names)
    if array.dtype.names != names:
        has = ", ".join(array.dtype.names or ()) or f"none, but {array.dtype}"
        raise ValueError(f"elements{field}: the queue's fields are {', '.join(names)}; these elements have {has}")
    made = np.zeros(array.shape, dtype)  # zeros: what lies between fields is sent, too
    for name in names:
        made[name] = _cast(array[name], dtype[name].base, f"{field}[{name!r}]")
    return made


def _of_one_type(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array of numbers, or texts, that these objects are; the same array if they are something else."""
    found = np.asarray(array.tolist())
    return found if found.shape == array.shape else array


def _changed(array: NDArray[Any], made: NDArray[Any]) -> Any:
    """Say which elements are not what they were."""
    kinds = array.dtype.kind, made.dtype.kind
    if kinds[0] in "fc" and kinds[1] in "fc":
        return (np.isfinite(array) & ~np.isfinite(made)) | (np.False_ if kinds[1] == "c" else array.imag != 0)
    if kinds[0] in _NUMBERS and kinds[1] in _NUMBERS:
        exact = np.clongdouble if "c" in kinds else np.longdouble  # holds each integer of 64 bits, and each float
        return made.astype(exact) != array.astype(exact)
    back = made.view(f"S{made.itemsize}") if kinds == ("S", "V") else made.astype(array.dtype)
    return (back != array) & ~((back != back) & (array != array))  # noqa: PLR0124 (what is not itself: no date)
