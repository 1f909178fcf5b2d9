"""Arguments and results by name: `run({"images": x})`, `run(images=x)`, `outputs["boxes"]`."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from burst.errors import brief
from driver.nn.errors import did_you_mean
from driver.nn.tensors import spellings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class NamedArrays(tuple[Any, ...]):
    """A tuple of arrays that also gives each by its name. Made by `named`.

    As of any tuple, `len` and iteration are by position: `boxes, scores = outputs`. The rest is as of a mapping:
    `outputs["boxes"]`, `"boxes" in outputs`, `get`, `keys`, `values`, `items`, and `dict(outputs)`.
    """

    __slots__ = ()
    names: tuple[str, ...] = ()

    def __getitem__(self, key: Any) -> Any:
        """Return an array by position or name, or a slice. Raise KeyError with the right names."""
        if isinstance(key, str):
            name = key if key in self.names else spellings(self.names).get(key)
            if name is None:
                raise KeyError(f"{key!r}: the names are {', '.join(self.names)}{did_you_mean(key, self.names)}")
            return tuple.__getitem__(self, self.names.index(name))
        return tuple.__getitem__(self, key)

    def __contains__(self, key: object) -> bool:
        """Return True for a name, or one of these arrays: arrays are not compared by value."""
        if isinstance(key, str):
            return key in self.names or key in spellings(self.names)
        return any(key is array for array in self)

    def __setitem__(self, key: Any, value: object) -> None:
        """Raise TypeError: the arrays are in shared memory, and are written in place."""
        raise TypeError(f"{key!r}: an array in shared memory cannot be replaced; write burst.inputs[{key!r}][...] = …")

    def keys(self) -> tuple[str, ...]:
        """Return the names, so that `dict(outputs)` has the arrays by name."""
        return self.names

    def values(self) -> tuple[Any, ...]:
        """Return the arrays, in the order of their names."""
        return tuple(self)

    def items(self) -> tuple[tuple[str, Any], ...]:
        """Return each name with its array."""
        return tuple(zip(self.names, self, strict=False))

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the array of that name, or at that position; `default` where there is none."""
        try:
            return self[key]
        except LookupError:
            return default

    def __repr__(self) -> str:
        return brief(self, self.names)

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.names, tuple(self))


def named(names: tuple[str, ...]) -> type[NamedArrays]:
    """Return the class of the inputs or outputs with these names: call it with the arrays."""
    return _class(names, tuple([getattr(name, "also", "") for name in names]))


@lru_cache(maxsize=256)
def _class(names: tuple[str, ...], _also: tuple[str, ...]) -> type[NamedArrays]:
    """Make the class. `_also`: the other names, which are no part of what names are compared by."""
    return type("NamedArrays", (NamedArrays,), {"__slots__": (), "names": names})


def _made(names: tuple[str, ...], arrays: Iterable[Any]) -> NamedArrays:
    return named(names)(arrays)


def copies(outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a copy of each array, with the same names. Other values are the caller's already."""
    return type(outputs)([array.copy() if isinstance(array, np.ndarray) else array for array in outputs])


def together(arrays: tuple[Any, ...], by_name: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what was given to a call, by position or by name. Raise TypeError for both."""
    if not by_name:
        return arrays
    if arrays:
        raise TypeError(
            f"{len(arrays)} inputs were given by position and {', '.join(by_name)} by name: give all of them one way"
        )
    return (by_name,)


def by_position(arrays: Sequence[Any], names: tuple[str, ...], optional: int = 0) -> Sequence[Any]:
    """Return the arrays in the model's order; inputs that are given in one dict, by their names.

    None stands for what is left out; `optional`: so many of the last may be left out by position, too.
    Raise ValueError with the right names.
    """
    if len(arrays) != 1 or type(arrays[0]) is not dict:
        missing = len(names) - len(arrays)
        return [*arrays, *[None] * missing] if 0 < missing <= optional else arrays
    given: dict[str, Any] = arrays[0]
    if sum([name in given for name in names]) != len(given):  # in the time of so many look-ups, however many there are
        given = own_names(given, names)
    return [given.get(name) for name in names]


def own_names(given: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return it by the model's own names, whichever each was called by. Raise ValueError with the right names."""
    known, found = spellings(names), dict[str, Any]()
    for name, value in given.items():
        own = known.get(name)
        if own is None or own in found:
            left = [each for each in names if each not in given]
            what = f"there is no input {name!r}" if own is None else f"input {own!r} is given twice, also as {name!r}"
            hint = did_you_mean(str(name), left) if own is None else ""
            raise ValueError(f"{what}; the model takes {', '.join(names)}{hint}")
        found[own] = value
    return found
