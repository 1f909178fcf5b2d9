"""A random model under construction; hypothesis makes, and shrinks, its choices."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from driver.nn import OPERATIONS, Model, ModelBuilder, OperandType, Value
from driver.nn.operation import LETTERS, declared
from driver.nn.types import ZERO_POINTS, Dimensions

Array = NDArray[Any]
LEVELS = ("strict", "medium", "relaxed", "conv")
"""Tolerance levels, from operations that move data to operations that sum."""
SCALES = (1.0, 0.5, 0.25, 0.1)
LONGEST = 4
"""Limit of elements along an axis of a new tensor."""
RANKS = (1, 2, 3, 4)
_DRAWN_TYPES = tuple(LETTERS[letter] for letter in "fhqsib")
_Item = TypeVar("_Item")


def types_of(operation: str) -> list[OperandType]:
    """Return the types that the parameter T of an operation may have, among those drawn here."""
    known = {t for signature in OPERATIONS[operation].signatures for t in signature.versions()}
    return [t for t in _DRAWN_TYPES if t in known]


def data(kind: OperandType, shape: Dimensions, seed: int, low: float = -1.0, high: float = 1.0) -> Array:
    """Return values whose sums and products stay within every type for several operations."""
    rng = np.random.default_rng(seed)
    if kind.is_quantised or kind == OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL:
        info = np.iinfo(kind.dtype)
        return rng.integers(info.min, info.max + 1, shape).astype(kind.dtype)
    if kind == OperandType.TENSOR_BOOL8:
        return rng.integers(0, 2, shape).astype(np.uint8)
    if kind.dtype.kind == "i":
        return rng.integers(int(5 * low), int(5 * high) + 1, shape).astype(kind.dtype)
    return rng.uniform(low, high, shape).astype(kind.dtype)


class Sketch:
    """A model under construction, and the feeds of its inputs.

    draw: hypothesis's function of the current strategy. Every choice goes through it, the simplest first, so that
        hypothesis can shrink a failure.
    level: the widest tolerance that its operations need.
    """

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self.draw = draw
        self._builder = ModelBuilder()
        self._tensors: list[Value] = []
        self._exact: set[int] = set()
        self._unread: list[Value] = []
        self.feeds: list[Array] = []
        self.level = LEVELS[0]

    def integer(self, low: int, high: int) -> int:
        """Return a number from `low`, the simplest, to `high`."""
        from hypothesis import strategies as st

        return int(self.draw(st.integers(low, high)))

    def flag(self) -> bool:
        """Return false or true."""
        return self.integer(0, 1) == 1

    def choice(self, items: Sequence[_Item]) -> _Item:
        """Return one of `items`; the first is the simplest."""
        return items[self.integer(0, len(items) - 1)]

    def axis(self, rank: int) -> int:
        """Return an axis of a tensor, from the front or from the back."""
        return self.integer(0, rank - 1) - rank * self.flag()

    def tensor(
        self,
        types: Sequence[OperandType],
        ranks: Sequence[int] = RANKS,
        *,
        exact: bool = False,
        fits: Callable[[Dimensions], bool] = lambda _shape: True,
        shape: Callable[[], Dimensions] | None = None,
    ) -> Value:
        """Return a tensor of one of `types`: an existing one that `fits`, or a new one.

        exact: only a tensor that is bit-exact on all devices, for discontinuous operations.
        shape: draws the dimensions of a new one.
        """
        known = [
            v
            for v in self._tensors
            if v.operand.type in types
            and len(v.operand.dimensions) in ranks
            and (not exact or v.index in self._exact)
            and fits(v.operand.dimensions)
        ]
        chosen = self.integer(0, len(known))
        if chosen:
            return known[-chosen]
        kind = self.choice(types)
        return self.fresh(kind, shape() if shape else self.shape(self.choice(ranks)))

    def shape(self, rank: int) -> Dimensions:
        """Return the dimensions of a new tensor."""
        return tuple(self.integer(1, LONGEST) for _ in range(rank))

    def image(self) -> Dimensions:
        """Return the dimensions of a new tensor for operations on images, in either layout."""
        return (self.integer(1, 2), *(self.integer(1, 5) for _ in range(3)))

    def fresh(
        self, kind: OperandType, shape: Dimensions, *, low: float = -1.0, high: float = 1.0, **quant: Any
    ) -> Value:
        """Return a new input or constant. quant: fixed scale, zero_point or channel_quant."""
        array = data(kind, shape, self.integer(0, 255), low, high=high)
        if kind in ZERO_POINTS and not quant:
            quant = self.quantisation(kind)
        if self.flag() and self.feeds:
            value = self._builder.constant(array, dtype=kind, **quant)
        else:
            value = self._builder.input(kind, shape, **quant)
            self.feeds.append(array)
        self._tensors.append(value)
        self._exact.add(value.index)
        return value

    def quantisation(self, kind: OperandType) -> dict[str, Any]:
        """Return a scale and a zero point for a tensor of this type; empty for types without."""
        if kind not in ZERO_POINTS:
            return {}
        first, last = ZERO_POINTS[kind]
        return {"scale": self.choice(SCALES), "zero_point": self.choice(((first + last + 1) // 2, first, last - 3))}

    def result(self, operation: str, kind: OperandType, above: float = 0.0) -> dict[str, Any]:
        """Return the quantisation to request for a result of this type, if it is free. above: least scale."""
        if OPERATIONS[operation].quantisation is not declared or kind not in ZERO_POINTS:
            return {}
        asked = self.quantisation(kind)
        return {**asked, "scale": asked["scale"] if asked["scale"] > above else above * 2}

    def add(self, operation: str, *args: Any, level: str = "strict", **asked: Any) -> None:
        """Add an operation. level: tolerance that it needs."""
        read = [a for a in args if isinstance(a, Value)]
        results = self._builder.operation(operation, *args, **asked)
        results = results if isinstance(results, tuple) else (results,)
        if level == LEVELS[0] and all(v.index in self._exact for v in read):
            self._exact.update(v.index for v in results)
        self.level = max(self.level, level, key=LEVELS.index)
        self._unread = [v for v in self._unread if v not in read] + list(results)
        self._tensors += [v for v in results if not v.operand.type.is_scalar]

    def model(self) -> Model:
        """Build the model; every operand that no operation reads is an output."""
        self._builder.output(*self._unread)
        return self._builder.build()
