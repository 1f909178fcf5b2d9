"""One model that detects objects: which frames it takes, and what it found in them as Frigate reads it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from driver.errors import DeviceFailed
from driver.gateways.detection import DetectionDecoder
from driver.gateways.detection.model_types import END2END, TYPES
from driver.importers import load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

TYPES_OF_FRIGATE = {name: its for name, its in TYPES.items() if name != END2END}
THRESHOLD = 0.4  #: Frigate asks for no less: it keeps no box below it
ROWS = 20
_USUAL = 320  # pixels: Frigate's default, where the model leaves the size open
_CONFIGURED = {"float32": "float", "uint8": "int"}  # Frigate's input_dtype


class WrongFrame(ValueError):
    """The model takes no frame of this shape or type. The message says what to change in Frigate's configuration."""


class FrameDetector:
    """A model file of a type that Frigate knows. It runs nothing: `inputs` go to the model, `rows` take its outputs."""

    def __init__(self, path: str | Path, model_type: str) -> None:
        """Load the file. Raise what `driver.load` raises, and DeviceFailed."""
        self.path, self.model_type = Path(path), model_type
        if model_type not in TYPES_OF_FRIGATE:
            raise DeviceFailed(f"model type {model_type!r}: there are {', '.join(TYPES_OF_FRIGATE)}")
        if not self.path.is_file():
            raise DeviceFailed(f"model {path}: there is no such file")
        self.model = load(self.path, optional=False)
        self._decoder = DetectionDecoder(self.model, self.path, model_type, TYPES_OF_FRIGATE, option="--model-type ")
        self._place, self._is_nhwc = self._frame_input()
        tensor = self.model.inputs[self._place]
        self._shape, self.dtype = tensor.shape, np.dtype(tensor.dtype)

    def _frame_input(self) -> tuple[int, bool]:
        """Return which input takes the frame, and whether its colours are the last dimension. Raise DeviceFailed."""
        shapes, inputs = [tensor.shape for tensor in self.model.inputs], TYPES[self.model_type].inputs
        for place, shape in enumerate(shapes):
            if len(shapes) == inputs and shape and len(shape) == 4 and shape[0] in (1, None):
                if shape[3] == 3:
                    return place, True
                if shape[1] == 3:
                    return place, False
        raise DeviceFailed(
            f"model {self.path} has inputs {shapes}; a model of type {self.model_type} takes "
            f"{inputs}, one of which is a frame (1, height, width, 3) or (1, 3, height, width)"
        )

    # ---- inputs

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """The shape of a frame; 320 where the model leaves a size open."""
        assert self._shape
        return (1, *(size or _USUAL for size in self._shape[1:]))

    @property
    def frame_place(self) -> int:
        """The number of the model's input that takes the frame."""
        return self._place

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of all inputs, for one frame."""
        return tuple(array.shape for array in self.inputs(np.empty(self.frame_shape, self.dtype)))

    def check(self, shape: tuple[int, ...], dtype: str) -> None:
        """Raise WrongFrame for a shape or a type that the model does not take."""
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

    def size(self, shape: Sequence[int]) -> tuple[int, int]:
        """Width and height of a frame of this shape."""
        return (shape[2], shape[1]) if self._is_nhwc else (shape[3], shape[2])

    def other_inputs(self, shape: Sequence[int]) -> dict[int, NDArray[Any]]:
        """Return the inputs that the model takes beside a frame of this shape, by place: its size, if anything."""
        if len(self.model.inputs) == 1:
            return {}
        place = 1 - self._place
        return {place: np.array([self.size(shape)], np.dtype(self.model.inputs[place].dtype))}

    def inputs(self, frame: NDArray[Any]) -> tuple[NDArray[Any], ...]:
        """Return all inputs of the model, for a frame that was checked."""
        every = {self._place: frame, **self.other_inputs(frame.shape)}
        return tuple(every[place] for place in sorted(every))

    # ---- outputs

    def rows(self, outputs: Sequence[NDArray[Any]], shape: Sequence[int]) -> NDArray[np.float32]:
        """Return what it found in a frame of this shape: (20, 6) of class, score, y1, x1, y2, x2, the surest first.

        Raise ValueError where the outputs are not of the type.
        """
        boxes = self._decoder(outputs, *self.size(shape), THRESHOLD).best(ROWS, THRESHOLD, by_class=False)
        count, found = boxes.scores.size, np.zeros((ROWS, 6), np.float32)
        found[:count, 0], found[:count, 1] = boxes.classes, boxes.scores
        found[:count, 2:] = boxes.corners[:, [1, 0, 3, 2]]
        return found

    def blank(self) -> tuple[NDArray[Any], ...]:
        """Return the inputs of an empty frame, to try the model with: `approve` takes what comes of it."""
        return self.inputs(np.zeros(self.frame_shape, self.dtype))

    def approve(self, outputs: Sequence[NDArray[Any]]) -> None:
        """Check the outputs for the empty frame. Raise DeviceFailed for a model that is not of the type."""
        try:
            self._decoder.approve(outputs, *self.size(self.frame_shape))
        except ValueError as error:
            raise DeviceFailed(f"model {self.path} is no {self.model_type}: {error}") from None
