"""The outputs of one model that finds objects become boxes, or are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from driver.gateways.detection.model_types import FrameSize
from driver.importers.files import kind_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from driver.gateways.detection.found_boxes import FoundBoxes
    from driver.gateways.detection.model_types import DetectorType
    from driver.nn import Model

AUTO = "auto"


class DetectionDecoder:
    """A decoder for one model of one type. With "auto", the first outputs that are approved choose the type."""

    def __init__(
        self, model: Model, path: str | Path, model_type: str, types: Mapping[str, DetectorType], option: str
    ) -> None:
        """`types`: those that may be chosen. `option`: what the user writes before one of them.

        Raise ValueError for a type that does not exist.
        """
        if model_type not in (AUTO, *types):
            raise ValueError(f"{option}{model_type}: there are {', '.join(types)}")
        self.model_type, self._types, self._option = model_type, types, option
        self._tensors, self._inputs = model.outputs, len(model.inputs)
        self._in_pixels = kind_of(path) == "onnx"  # Ultralytics' .tflite files give parts of the frame

    def approve(self, outputs: Sequence[NDArray[Any]], width: int, height: int) -> None:
        """Check the outputs for a frame of that size. Raise ValueError if they are not of the type."""
        size, values = FrameSize(width, height, self._in_pixels), self._values(outputs)
        alike = [name for name, its in self._types.items() if its.inputs == self._inputs and its.fits(values, size)]
        if self.model_type in alike:
            return
        if self.model_type == AUTO and alike:
            self.model_type = alike[0]
            return
        wanted = self._types if self.model_type == AUTO else {self.model_type: self._types[self.model_type]}
        forms = "; of ".join(f"{name} {its.form}" for name, its in wanted.items())
        remedy = f"say {' or '.join(self._option + name for name in alike)}" if alike else "export it in that form"
        raise ValueError(f"its outputs are {_forms(outputs)}, and those of {forms}; {remedy}")

    def __call__(self, outputs: Sequence[NDArray[Any]], width: int, height: int, threshold: float) -> FoundBoxes:
        """Return the boxes in a frame of that size, some maybe below `threshold`. Raise ValueError for odd outputs."""
        size, values = FrameSize(width, height, self._in_pixels), self._values(outputs)
        its = self._types[self.model_type]
        if not its.fits(values, size):
            raise ValueError(f"the model answered {_forms(outputs)}, which is no {self.model_type}: {its.form}")
        return its.found(values, size, threshold)

    def _values(self, outputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the numbers that quantised ones stand for."""
        return [
            (np.asarray(array, np.float32) - info.zero_point) * np.float32(info.scale)
            if info.scale and array.dtype.kind in "iu"
            else array
            for array, info in zip(outputs, self._tensors, strict=True)
        ]


def _forms(outputs: Sequence[NDArray[Any]]) -> str:
    return ", ".join(f"{output.dtype} {output.shape}" for output in outputs) or "none"
