"""The place in a burst's `inputs` of an input whose shape the model leaves open, until a shape is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from driver.nn import Model

NOT_GIVEN = (-1,)
"""In the place of a shape: the model leaves it open, and nothing has said it yet."""


class OpenInput:
    """An input without an array yet: each use says how to give the shape. Its `dtype` and `name` are the input's."""

    __slots__ = ("_sentence", "dtype", "name")

    def __init__(self, name: str, dtype: np.dtype[Any], sentence: str) -> None:
        self.name, self.dtype, self._sentence = name, dtype, sentence

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name}: {self._sentence}", name=name, obj=self)

    def _refuse(self, *_: object, **_named: object) -> NoReturn:
        raise ValueError(self._sentence)

    __getitem__ = __setitem__ = __iter__ = __len__ = __array__ = _refuse

    def __repr__(self) -> str:
        return f"<{self._sentence}>"


def open_inputs(model: Model, shapes: Sequence[tuple[int, ...] | None]) -> list[OpenInput | None]:
    """Return for each input whose shape is NOT_GIVEN what stands in its place; else None."""
    graph = model.main
    sizes = [graph.operands[i].dimensions for i in graph.inputs]
    example = ", ".join(str(_example(own, shape)) for own, shape in zip(sizes, shapes, strict=True))
    found: list[OpenInput | None] = []
    for tensor, own, shape in zip(model.inputs, sizes, shapes, strict=True):
        said = " x ".join(str(size or "?") for size in own) or "of any shape"
        sentence = (
            f"input {tensor.name!r} is {tensor.dtype} {said}: give the sizes when the burst is opened, for example"
            f" burst(input_shapes=[{example}]), or arrays to run"
        )
        found.append(OpenInput(tensor.name, tensor.dtype, sentence) if shape == NOT_GIVEN else None)
    return found


def _example(sizes: tuple[int, ...], shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the shape, or an example for an open one; images of 320 x 320."""
    if shape != NOT_GIVEN:
        return shape
    is_image = len(sizes) == 4
    return tuple(size or (320 if is_image and axis else 1) for axis, size in enumerate(sizes)) or (1,)
