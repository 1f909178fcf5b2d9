"""Images for the inputs of a model: read, brought to size, and their pixels as the numbers that the input takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import click
import numpy as np

from burst_engine.names import install_command
from driver.cli.ports import shape_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from PIL.Image import Image

    from driver.cli.ports import Port

RANGES = {"0..1": (0.0, 1.0), "-1..1": (-1.0, 1.0), "0..255": (0.0, 255.0)}
IMAGENET = "imagenet"
PIXELS = *RANGES, IMAGENET
FITS = LETTERBOX, STRETCH = "letterbox", "stretch"
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels, in the range 0..1
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_GREY = 114  # of the bars beside an image: YOLO's
_ANIMATED = {"GIF", "WEBP", "PNG"}
_STEP = 32  # networks that take images of any size mostly need a multiple of it


class Frame(NamedTuple):
    """The image that an input takes; a size of 0 is open."""

    height: int
    width: int
    channels: int
    is_channels_first: bool


def frame_of(shape: Sequence[int]) -> Frame | None:
    """Return the image that an input of this shape takes; None if that is no image of 1, 3 or 4 channels."""
    inner = tuple(shape[1:] if len(shape) == 4 and shape[0] in (0, 1) else shape)
    if len(inner) == 2:
        return Frame(*inner, 1, is_channels_first=False)
    if len(inner) == 3 and inner[2] in _MODES:
        return Frame(*inner, is_channels_first=False)
    if len(inner) == 3 and inner[0] in _MODES:
        return Frame(inner[1], inner[2], inner[0], is_channels_first=True)
    return None


def opened(path: str) -> Image | None:
    """Return the image in a file, turned as its EXIF says, of 8 bits a channel; None if Pillow does not know its
    format.

    Raise UsageError.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ModuleNotFoundError as error:
        raise click.UsageError(f"--input {path}: images need pillow: {install_command('cli')}") from error
    try:
        with Image.open(path) as file:
            kind = file.format
            return _of_8_bits(ImageOps.exif_transpose(file), f"--input {path}")
    except Image.DecompressionBombError as error:
        raise click.UsageError(f"--input {path}: {error}; pass a smaller image") from error
    except UnidentifiedImageError:
        return None
    except (OSError, ValueError, SyntaxError) as error:
        raise click.UsageError(f"--input {path}: a damaged {kind} image: {error}; fetch or export it again") from error


def animation(path: str) -> Iterator[tuple[float, Image]] | None:
    """Yield the frames of an animated GIF, WebP or PNG, each with the second at which it is shown; None of what is
    none.
    """
    from PIL import Image, ImageSequence

    file = Image.open(path)
    if file.format not in _ANIMATED or getattr(file, "n_frames", 1) == 1:  # an MPO's second image is a preview
        file.close()
        return None

    def frames() -> Iterator[tuple[float, Image.Image]]:
        second = 0.0
        with file:
            for frame in ImageSequence.Iterator(file):
                image = _of_8_bits(frame.copy(), f"--input {path}")
                yield second, image
                second += frame.info.get("duration", 100) / 1000

    return frames()


def _of_8_bits(image: Image, where: str) -> Image:
    """Return the image with every value in its proportion: Pillow cuts off what is above 255. Raise UsageError.

    Numbers of 16 bits are from 0 to 65535, and real numbers from 0 to 1, or else they have no range that is known.
    """
    from PIL import Image as Images

    if not image.mode.startswith(("I", "F")):
        return image.convert("RGBA") if image.mode == "P" and "transparency" in image.info else image
    values = np.asarray(image)
    most = 1.0 if image.mode == "F" else 65535
    if not (values.min(initial=0) >= 0 and values.max(initial=0) <= most):  # NaN neither
        raise click.UsageError(
            f"{where}: its values go from {values.min():g} to {values.max():g}, and an image of mode {image.mode} has "
            f"them from 0 to {most:g}; pass an array (.npy)"
        )
    return Images.fromarray(np.rint(values * (255 / most)).astype(np.uint8))


class ImageFit:
    """Makes arrays for an input of images that have the size of the first one. `done`: how they are converted."""

    def __init__(
        self, port: Port, shape: Sequence[int], first: Image, where: str, *, pixels: str | None, fit: str
    ) -> None:
        """`shape`: 0 where it is open. `pixels`: one of PIXELS, `fit`: one of FITS. Raise UsageError."""
        frame = frame_of(shape)
        if frame is None:
            raise click.UsageError(
                f"{where}: input {port.name!r} takes {shape_words(shape)}, which is not an image of 1, 3 or 4 channels;"
                " pass an array (.npy), or --shape"
            )
        self._frame, self._rank, self._where = frame, len(shape), where
        self._size = _size(frame, first)
        self._inner = self._size if fit == STRETCH else _letterboxed(frame, first, self._size)
        self._table, words = _numbers(port, frame.channels, where, pixels)
        self.done = "; ".join((self._resizing(first), words + ", channels first" * frame.is_channels_first))

    def _resizing(self, first: Image) -> str:
        done, mode = f"{first.width} x {first.height} {first.mode}", _MODES[self._frame.channels]
        if first.mode != mode:
            done += f", converted to {mode}"
        if self._inner != first.size:
            done += f", resized to {self._inner[0]} x {self._inner[1]} (bilinear)"
        if self._inner != self._size:
            done += f", letterboxed to {self._size[0]} x {self._size[1]}"
        return done

    def __call__(self, image: Image) -> NDArray[Any]:
        """Return the array for an image."""
        from PIL import Image as Images

        channels = self._frame.channels
        if image.mode != (mode := _MODES[channels]):
            try:
                image = image.convert(mode)
            except ValueError as error:
                raise click.UsageError(f"{self._where}: {error}; convert the image to RGB first") from error
        if image.size != self._inner:
            image = image.resize(self._inner, Images.Resampling.BILINEAR)
        if self._inner != self._size:
            whole = Images.new(mode, self._size, _GREY if channels == 1 else (_GREY,) * channels)
            left, top = ((a - b) // 2 for a, b in zip(self._size, self._inner, strict=True))
            whole.paste(image, (left, top))
            image = whole
        found = np.asarray(image).reshape(image.height, image.width, channels)
        array = self._table[found, np.arange(channels)]
        if self._frame.is_channels_first:
            array = array.transpose(2, 0, 1)
        return np.ascontiguousarray(array.reshape(array.shape[:2]) if self._rank == 2 else array).reshape(
            (1,) * (self._rank == 4) + array.shape[: self._rank]
        )


def _size(frame: Frame, image: Image) -> tuple[int, int]:
    """Width and height: one that is open follows the image's proportions; both are its own, up to a multiple of 32."""
    if frame.width and frame.height:
        return frame.width, frame.height
    if frame.width:
        return frame.width, max(1, round(image.height * frame.width / image.width))
    if frame.height:
        return max(1, round(image.width * frame.height / image.height)), frame.height
    return -(-image.width // _STEP) * _STEP, -(-image.height // _STEP) * _STEP


def _letterboxed(frame: Frame, image: Image, size: tuple[int, int]) -> tuple[int, int]:
    """Return the size of the image within `size`: the largest of its proportions; its own where height and width are
    open.
    """
    if not frame.width and not frame.height:
        return image.size
    scale = min(size[0] / image.width, size[1] / image.height)
    return max(1, round(image.width * scale)), max(1, round(image.height * scale))


def _numbers(port: Port, channels: int, where: str, pixels: str | None) -> tuple[NDArray[Any], str]:
    """Return the number that the input takes for each byte of each channel, [256, channels]."""
    dtype, bytes_ = port.operand.type.dtype, np.repeat(np.arange(256)[:, np.newaxis], channels, axis=1)
    if pixels is None and port.is_byte:
        return (bytes_ + np.iinfo(dtype).min).astype(dtype), "bytes used as quantised values"
    if dtype.kind not in "fiu" or port.dtype in ("bool", "bfloat16"):
        raise click.UsageError(
            f"{where}: input {port.name!r} is {port.dtype}, which no image fits; pass an array (.npy)"
        )
    pixels = pixels or ("0..1" if port.is_real else "0..255")
    quantised = ", quantised" if port.operand.type.is_quantised else ""
    return port.stored(_scaled(bytes_ / 255, pixels, where)), f"pixels as {pixels}{quantised}"


def _scaled(found: NDArray[np.float64], pixels: str, where: str) -> NDArray[np.float64]:
    """Scale pixels from the range 0..1. `found`: channels last."""
    if pixels != IMAGENET:
        low, high = RANGES[pixels]
        return found * (high - low) + low
    if found.shape[-1] != 3:
        raise click.UsageError(f"{where}: --pixels {IMAGENET} needs 3 channels; the input has {found.shape[-1]}")
    return (found - _MEAN) / _DEVIATION
