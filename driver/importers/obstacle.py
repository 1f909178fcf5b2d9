"""What keeps a model file from becoming operations of the HAL, and sizes that a caller fixes before the import."""

import math
import operator
import reprlib
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from driver.errors import ImportFailed
from driver.nn.errors import did_you_mean

Shapes = Mapping[str, Sequence[int | None]]
"""Sizes of inputs by name; None or 0 leaves a size open."""
MOST_OBSTACLES = 256
"""The importer stops looking for obstacles when it has found so many."""
_LARGEST = 2**31 - 1
_MOST_ELEMENTS = 2**32
"""The HAL counts the bytes of a tensor in 32 bits."""
_SHORT = reprlib.Repr()
_SHORT.maxtuple = _SHORT.maxlist = 12
_SHORT.maxother = _SHORT.maxstring = 80
_NAME = 64


class Consequence(ImportFailed):
    """An operator reads a result of one that cannot be imported. It is no obstacle of its own."""


class Obstacle(NamedTuple):
    """One reason why a file cannot be imported.

    operator, number: the kind of the operator and its place in the file; None when the whole file is concerned.
    tensors: names of what the operator reads, then of what it writes. remedy: what would help; None where nothing is
    known to.
    """

    operator: str | None
    number: int | None
    tensors: tuple[str, ...]
    reason: str
    remedy: str | None = None

    @classmethod
    def of(cls, error: Exception, operator: str | None, number: int | None, tensors: Sequence[str] = ()) -> "Obstacle":
        """Return the obstacle that an error of the importer, or of the HAL's rules, tells of."""
        if isinstance(error, ImportFailed):
            return cls(operator, number, tuple(tensors), error.reason, remedy=error.remedy)
        return cls(operator, number, tuple(tensors), str(error))


def failure(obstacles: Sequence[Obstacle]) -> ImportFailed:
    """Return the error that names the first obstacle and counts the others."""
    first, *others = obstacles
    return ImportFailed(first.reason, first.operator, first.number, remedy=first.remedy, others=len(others))


class InputSizes(NamedTuple):
    """An input as the file declares it. shape: 0 where open; None when not even the rank is known.

    symbols: the name of each open size, "" where the file has none for it, in the order of the dimensions.
    """

    shape: tuple[int, ...] | None
    symbols: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.shape is None:
            return "of any shape"
        words = dict(enumerate(self.symbols))
        return "[" + ", ".join(str(d or words.get(i) or "?") for i, d in enumerate(self.shape)) + "]"


def named_sizes(shapes: object) -> dict[str, Sequence[int | None]]:
    """Return a copy of what a caller gives as `shapes`. Raise `ImportFailed` for anything but a mapping, or None."""
    if isinstance(shapes, Mapping):
        return dict(shapes)
    if shapes is None:
        return {}
    raise ImportFailed(
        f"shapes={_SHORT.repr(shapes)}: give the sizes of inputs by name, such as {{'images': (1, 3, 320, 320)}}"
    )


def fix_sizes(inputs: Mapping[str, InputSizes], shapes: Shapes | None) -> dict[str, InputSizes]:
    """Return the inputs with the sizes that `shapes` gives them. A named size is then fixed in every input that has it.

    Raise `ImportFailed` where `shapes` names another input, has another rank, or contradicts the file or itself.
    """
    known: dict[str, tuple[int, str]] = {}
    fixed = dict(inputs)
    for name, sizes in (shapes or {}).items():
        if name not in inputs:
            listed = ", ".join(f"{word[:_NAME]!r} {declared}" for word, declared in inputs.items())
            meant = did_you_mean(str(name), inputs)
            raise ImportFailed(
                f"shapes names {str(name)[:_NAME]!r}, which is not an input{meant}; the inputs are {listed or 'none'}"
            )
        fixed[name] = _fixed(name, inputs[name], sizes, known)
    sizes_by_symbol = {symbol: size for symbol, (size, _) in known.items()}
    return {name: _by_symbol(declared, sizes_by_symbol) for name, declared in fixed.items()}


def _fixed(
    name: str, declared: InputSizes, sizes: Sequence[int | None], known: dict[str, tuple[int, str]]
) -> InputSizes:
    where = f"shapes[{name[:_NAME]!r}] = {_SHORT.repr(sizes)}"
    given = _whole(sizes)
    if given is None:
        raise ImportFailed(f"{where}: give a size for each dimension; the input is {declared}")
    if any(not 0 <= size <= _LARGEST for size in given):
        raise ImportFailed(f"{where}: a size must be in 1..{_LARGEST}, or None where it stays open")
    if math.prod(given) >= _MOST_ELEMENTS:
        raise ImportFailed(f"{where}: these are {math.prod(given)} elements; give less than {_MOST_ELEMENTS}")
    if declared.shape is None:
        return InputSizes(given, ("",) * len(given))
    if len(given) != len(declared.shape):
        raise ImportFailed(f"{where} has {len(given)} dimensions; the input is {declared}")
    symbols = declared.symbols or ("",) * len(given)
    for axis, (own, size, symbol) in enumerate(zip(declared.shape, given, symbols, strict=True)):
        if own and size and own != size:
            raise ImportFailed(f"{where}: dimension {axis} is {own} in the file; the input is {declared}")
        if not own and size and symbol:
            first = known.setdefault(symbol, (size, name))
            if first[0] != size:
                raise ImportFailed(f"{where}: {symbol} is {size} here, and {first[0]} in shapes[{first[1]!r}]")
    return InputSizes(tuple(own or size for own, size in zip(declared.shape, given, strict=True)), symbols)


def _whole(sizes: Any) -> tuple[int, ...] | None:
    """Return the sizes as integers, 0 for None; None where they are anything else."""
    if isinstance(sizes, str | bytes | Mapping):
        return None
    try:
        return tuple(0 if size is None else operator.index(size) for size in sizes)
    except TypeError:
        return None


def _by_symbol(declared: InputSizes, known: Mapping[str, int]) -> InputSizes:
    if declared.shape is None or not declared.symbols:
        return declared
    pairs = zip(declared.shape, declared.symbols, strict=True)
    return declared._replace(shape=tuple(d or known.get(symbol, 0) for d, symbol in pairs))


def remedy_of(inputs: Mapping[str, InputSizes]) -> str | None:
    """Return how to fix the sizes that are still open, with numbers as an example; None when none is."""
    some = dict(islice(((n, d) for n, d in inputs.items() if d.shape is None or 0 in d.shape), 4))
    if not some:
        return None
    named: dict[str, int] = {}
    for declared in some.values():
        for symbol, size in zip(declared.symbols, _example(declared.shape), strict=False):
            if symbol:
                named[symbol] = min(size, named.get(symbol, size))
    examples = {name: _example(_by_symbol(declared, named).shape) for name, declared in some.items()}
    return f"fix {'its sizes' if len(some) == 1 else 'the sizes'} with, for example, shapes={examples!r}"


def _example(shape: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return a batch of one, which is the first open size; images of 320 x 320, and sequences of 512 elements."""
    if shape is None:
        return (1, 1)
    batch = shape.index(0) if 0 in shape[:2] else 0
    usual = 320 if len(shape) == 4 else 512
    return tuple(d or (1 if axis == batch else usual) for axis, d in enumerate(shape))
