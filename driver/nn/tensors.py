"""The inputs and outputs of a model as people see them: by name."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

TEXTS = "tensor(string)"
"""The `kind` of a tensor of texts."""


class TensorName(str):
    """The name of an input or output. also: what the file's own runtime calls it, where that is another name, as
    "serving_default_x:0" beside "x"; each is taken wherever a name is.
    """

    __slots__ = ("also",)
    also: str

    def __new__(cls, name: str, also: str) -> Self:
        found = super().__new__(cls, name)
        found.also = also
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.also)


def spellings(names: Iterable[str]) -> dict[str, str]:
    """Return each name by which one of these may be called, and which it is. Its own name goes before another's."""
    own = {name: name for name in names}
    return {name.also: name for name in own.values() if isinstance(name, TensorName)} | own


class TensorInfo(NamedTuple):
    """An input or output of a model.

    `shape` has None for each dimension that the model leaves open, and is None where not even the rank is known.
    `labels`: what each element along the last axis stands for, where the file says it. `kind`: what it is if it is no
    tensor of numbers, in ONNX's words: "tensor(string)", "seq(map(int64,tensor(float)))"; its dtype is object then.
    `optional`: an input that may be left out, since the file has a value for it; such inputs are the last ones.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...] | None
    scale: float = 0.0  #: of quantised values; 0.0: they mean what they are
    zero_point: int = 0
    labels: tuple[str, ...] = ()
    kind: str = ""
    optional: bool = False

    def __str__(self) -> str:
        if self.kind and self.kind != TEXTS:
            return f"{self.name}: {self.kind}"
        sizes = None if self.shape is None else ", ".join("?" if d is None else str(d) for d in self.shape)
        element = "string" if self.kind else self.dtype
        return f"{self.name}: {element} {'of any rank' if sizes is None else f'[{sizes}]'}"

    def __repr__(self) -> str:
        quantised = f" scale {self.scale:.6g} zero point {self.zero_point}" if self.scale else ""
        return f"<{self}{quantised}{f' {len(self.labels)} labels' if self.labels else ''}>"


def tensors_of(operands: Sequence[Any], word: str) -> tuple[TensorInfo, ...]:
    """Return the descriptions of these operands. `word`: "input" or "output", for those that have no name of
    their own.
    """
    extras = [operand.extra if isinstance(operand.extra, dict) else {} for operand in operands]
    names = [str(extra.get("name") or f"{word}_{n}") for n, extra in enumerate(extras)]
    again = {name for name, count in Counter(names).items() if count > 1}
    names = [f"{name}_{n}" if name in again else name for n, name in enumerate(names)]
    also = [str(extra.get("tensor") or "") for extra in extras]
    found = [TensorName(name, own) if own and own != name else name for name, own in zip(names, also, strict=True)]
    return tuple(map(_info, found, operands, extras))


def _info(name: str, operand: Any, extra: dict[str, Any]) -> TensorInfo:
    labels = tuple(map(str, extra.get("labels") or ()))
    if kind := str(extra.get("type") or ""):
        sizes = extra.get("shape")
        shape = None if sizes is None else tuple(d or None for d in sizes)
        return TensorInfo(name, np.dtype(object), shape, labels=labels, kind=kind)
    shape = None
    if operand.dimensions or operand.type.is_scalar:
        shape = tuple(d or None for d in operand.dimensions)
    scale, zero_point = extra.get("quantisation") or (operand.scale, operand.zero_point)
    optional = bool(extra.get("optional"))
    return TensorInfo(name, operand.type.dtype, shape, scale, zero_point=zero_point, labels=labels, optional=optional)
