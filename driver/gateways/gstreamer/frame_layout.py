"""How a model wants its frames, and whether a frame of GStreamer's lies just so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from driver.nn import Model

_MOST_PIXELS = 32767  # a side of GStreamer's video frames
_FORMATS = {(3, False): "RGB", (3, True): "RGBP", (1, False): "GRAY8", (1, True): "GRAY8"}


class FrameLayout(NamedTuple):
    """The one input of a model. width, height: None where it takes any. is_planar: [1, channels, height, width]."""

    dtype: np.dtype[Any]
    channels: int
    is_planar: bool
    width: int | None
    height: int | None

    @property
    def format(self) -> str:
        """The format as GStreamer calls it."""
        return _FORMATS[self.channels, self.is_planar]

    @property
    def caps(self) -> str:
        """The caps that the element takes, and gives on."""
        width, height = (f"[1,{_MOST_PIXELS}]" if side is None else side for side in (self.width, self.height))
        return f"video/x-raw,format={self.format},width=(int){width},height=(int){height}"

    @property
    def takes_bytes(self) -> bool:
        """True if the frame's bytes are the input's, so that it can be used where it lies."""
        return self.dtype == np.uint8

    def shape(self, width: int, height: int) -> tuple[int, ...]:
        """Return the shape of the input, for frames of that size."""
        return (1, self.channels, height, width) if self.is_planar else (1, height, width, self.channels)

    def is_packed(self, width: int, height: int, strides: Sequence[int], offsets: Sequence[int]) -> bool:
        """Return True if rows and planes follow each other without gaps."""
        if self.is_planar:
            wanted = [width] * self.channels, [n * width * height for n in range(self.channels)]
        else:
            wanted = [width * self.channels], [0]
        return (list(strides), list(offsets)) == wanted

    def view(
        self, data: Any, width: int, height: int, strides: Sequence[int], offsets: Sequence[int]
    ) -> NDArray[np.uint8]:
        """Return the frame as an array of the input's shape, with the gaps left out."""
        row = width if self.is_planar else width * self.channels
        flat = np.frombuffer(data, np.uint8)
        planes = [
            np.lib.stride_tricks.as_strided(
                _from(flat, offset, (height - 1) * stride + row), (height, row), (stride, 1)
            )
            for stride, offset in zip(strides, offsets, strict=True)
        ]
        frame = np.stack(planes) if len(planes) > 1 else planes[0]
        return frame.reshape(self.shape(width, height))


def _from(flat: NDArray[np.uint8], offset: int, nbytes: int) -> NDArray[np.uint8]:
    if offset < 0 or offset + nbytes > flat.size:
        raise ValueError(f"a frame of {flat.size} bytes has no {nbytes} bytes at {offset}; its caps are wrong")
    return flat[offset:]


def layout_of(model: Model) -> FrameLayout:
    """Return the layout of the model's frames. Raise ValueError for a model that does not take one picture."""
    inputs = model.inputs
    if len(inputs) != 1 or inputs[0].shape is None or len(inputs[0].shape) != 4:
        found = "; ".join(map(str, inputs))
        raise ValueError(
            f"the model takes {found}: burstinfer gives it one picture, [1, height, width, 3] or [1, 3, …]"
        )
    info = inputs[0]
    batch, first, second, last = info.shape  # type: ignore[misc]  # four of them
    if batch not in (None, 1):
        raise ValueError(
            f"the model takes {batch} pictures at once: burstinfer gives it one; export it with a batch of 1"
        )
    if info.dtype not in (np.uint8, np.int8, np.float32, np.float16):
        raise ValueError(f"the model takes {info}: burstinfer gives it uint8, int8, float16 or float32")
    if last in (1, 3):
        return FrameLayout(info.dtype, last, is_planar=False, width=second, height=first)
    if first in (1, 3):
        return FrameLayout(info.dtype, first, is_planar=True, width=last, height=second)
    raise ValueError(f"the model takes {info}: pictures have 1 or 3 channels, in the second or the last dimension")
