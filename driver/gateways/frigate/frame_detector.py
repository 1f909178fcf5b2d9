"""One model that detects objects: which frames it takes, and what it found in them as Frigate reads it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from driver.errors import DeviceFailed
from driver.gateways.frigate.model_types import TYPES, FrameSize
from driver.importers import load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_USUAL = 320  # pixels: Frigate's default, where the model leaves the size open
_CONFIGURED = {"float32": "float", "uint8": "int"}  # Frigate's input_dtype


class WrongFrame(ValueError):
    """The model takes no frame of this shape or type. The message says what to change in Frigate's configuration."""


class FrameDetector:
    """A model file of a type that Frigate knows. It runs nothing: `inputs` go to the model, `rows` take its outputs."""

    def __init__(self, path: str | Path, model_type: str) -> None:
        """Loads the file. Raises what `driver.load` raises, and DeviceFailed."""
        if model_type not in TYPES:
            raise DeviceFailed(f"model type {model_type!r}: there are {', '.join(TYPES)}")
        self.path, self.model_type, self._type = Path(path), model_type, TYPES[model_type]
        if not self.path.is_file():
            raise DeviceFailed(f"model {path}: there is no such file")
        self.model = load(self.path)
        self._place, self._is_nhwc = self._frame_input()
        tensor = self.model.inputs[self._place]
        self._shape, self.dtype = tensor.shape, np.dtype(tensor.dtype)

    def _frame_input(self) -> tuple[int, bool]:
        """Which input takes the frame, and whether its colours are the last dimension. Raises DeviceFailed."""
        shapes = [tensor.shape for tensor in self.model.inputs]
        for place, shape in enumerate(shapes):
            if len(shapes) == self._type.inputs and shape and len(shape) == 4 and shape[0] in (1, None):
                if shape[3] == 3:
                    return place, True
                if shape[1] == 3:
                    return place, False
        raise DeviceFailed(
            f"model {self.path} has inputs {shapes}; a model of type {self.model_type} takes "
            f"{self._type.inputs}, one of which is a frame (1, height, width, 3) or (1, 3, height, width)"
        )

    # ---- inputs

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """Of a frame; 320 where the model leaves a size open."""
        assert self._shape
        return (1, *(size or _USUAL for size in self._shape[1:]))

    @property
    def frame_place(self) -> int:
        """Which of the model's inputs takes the frame."""
        return self._place

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of all inputs, for one frame."""
        return tuple(array.shape for array in self.inputs(np.empty(self.frame_shape, self.dtype)))

    def check(self, shape: tuple[int, ...], dtype: str) -> None:
        """Raises WrongFrame."""
        if dtype != self.dtype.name:
            said = _CONFIGURED.get(self.dtype.name)
            remedy = f"set model.input_dtype to {said}" if said else "export the model for float32 or uint8"
            raise WrongFrame(
                f"a frame of {dtype:.40}; {self.path.name} takes {self.dtype}: {remedy} in Frigate's configuration"
            )
        assert self._shape
        if len(shape) == 4 and all(mine in (None, its) for mine, its in zip((1, *self._shape[1:]), shape, strict=True)):
            return
        height, width = self.frame_shape[1:3] if self._is_nhwc else self.frame_shape[2:]
        layout = "nhwc" if self._is_nhwc else "nchw"
        raise WrongFrame(
            f"a frame of shape {list(shape)}; {self.path.name} takes {list(self.frame_shape)}: set model.width to "
            f"{width}, model.height to {height} and model.input_tensor to {layout} in Frigate's configuration"
        )

    def size(self, shape: Sequence[int]) -> FrameSize:
        """Of a frame of this shape."""
        return FrameSize(shape[2], shape[1]) if self._is_nhwc else FrameSize(shape[3], shape[2])

    def other_inputs(self, shape: Sequence[int]) -> dict[int, NDArray[Any]]:
        """What the model takes beside a frame of this shape, by its place among the inputs: its size, if anything."""
        if len(self.model.inputs) == 1:
            return {}
        place = 1 - self._place
        return {place: np.array([self.size(shape)], np.dtype(self.model.inputs[place].dtype))}

    def inputs(self, frame: NDArray[Any]) -> tuple[NDArray[Any], ...]:
        """All inputs of the model, for a frame that was checked."""
        every = {self._place: frame, **self.other_inputs(frame.shape)}
        return tuple(every[place] for place in sorted(every))

    # ---- outputs

    def rows(self, outputs: Sequence[NDArray[Any]], shape: Sequence[int]) -> NDArray[np.float32]:
        """What it found in a frame of this shape: (20, 6). Raises ValueError where the outputs are not of the type."""
        size = self.size(shape)
        if not self._type.fits(outputs, size):
            raise ValueError(f"{self.path.name} answered {_forms(outputs)}, which is no {self.model_type}")
        return self._type.found(outputs, size).rows()

    def blank(self) -> tuple[NDArray[Any], ...]:
        """The inputs of an empty frame, to try the model with: `approve` takes what comes of it."""
        return self.inputs(np.zeros(self.frame_shape, self.dtype))

    def approve(self, outputs: Sequence[NDArray[Any]]) -> None:
        """Looks at the outputs for the empty frame. Raises DeviceFailed for a model that is not of the type."""
        size = self.size(self.frame_shape)
        if self._type.fits(outputs, size):
            return
        alike = [name for name, its in TYPES.items() if its.inputs == self._type.inputs and its.fits(outputs, size)]
        remedy = f"say --model-type {' or '.join(alike)}" if alike else "export it as Frigate's documentation describes"
        raise DeviceFailed(
            f"model {self.path} is no {self.model_type}: its outputs are {_forms(outputs)}, and those of "
            f"{self.model_type} are {self._type.form}; {remedy}"
        )


def _forms(outputs: Sequence[NDArray[Any]]) -> str:
    return ", ".join(f"{output.dtype} {output.shape}" for output in outputs) or "none"
