"""Reads an image file into an input: resized, and converted to its channels and type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import click
import numpy as np

from driver.cli.ports import shape_words

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

    from driver.cli.ports import Port

RANGES = {"0..1": (0.0, 1.0), "-1..1": (-1.0, 1.0), "0..255": (0.0, 255.0)}
IMAGENET = "imagenet"
PIXELS = *RANGES, IMAGENET
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels, in the range 0..1
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


class _Frame(NamedTuple):
    """Size of the image that an input takes; 0 means open."""

    height: int
    width: int
    channels: int
    is_channels_first: bool


def read_image(
    port: Port, shape: tuple[int, ...], path: str, where: str, pixels: str | None
) -> tuple[NDArray[Any], str]:
    """Reads an image for an input; returns it and how it was converted. `pixels`: one of PIXELS. Raises UsageError."""
    frame = _frame(port, shape, where)
    image, done = _resized(_opened(path, where), frame)
    bytes_ = np.asarray(image).reshape(image.height, image.width, frame.channels)
    array, words = _typed(port, bytes_, where, pixels)
    if frame.is_channels_first:
        array, words = array.transpose(2, 0, 1), f"{words}, channels first"
    return array.reshape(_filled(shape, array.shape)), f"{done}; {words}"


def _frame(port: Port, shape: tuple[int, ...], where: str) -> _Frame:
    inner = shape[1:] if len(shape) == 4 and shape[0] in (0, 1) else shape
    if len(inner) == 2:
        return _Frame(*inner, 1, is_channels_first=False)
    if len(inner) == 3 and inner[2] in _MODES:
        return _Frame(*inner, is_channels_first=False)
    if len(inner) == 3 and inner[0] in _MODES:
        return _Frame(inner[1], inner[2], inner[0], is_channels_first=True)
    raise click.UsageError(
        f"{where}: input {port.name!r} takes {shape_words(shape)}, which is not an image of 1, 3 or 4 channels; "
        "pass an array (.npy), or --shape"
    )


def _filled(shape: tuple[int, ...], found: tuple[int, ...]) -> tuple[int, ...]:
    """The input's shape, with open dimensions filled in."""
    if len(shape) == 2:
        return found[:2]
    return (1, *found) if len(shape) == 4 else found


def _opened(path: str, where: str) -> Image:
    try:
        from PIL import Image, ImageOps
    except ModuleNotFoundError as error:
        raise click.UsageError(f"{where}: images need pillow: pip install 'burst-engine[cli]'") from error
    try:
        with Image.open(path) as file:
            return ImageOps.exif_transpose(file)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        known = "supported: .npy, .npz, .wav and images (PNG, JPEG, …)"
        raise click.UsageError(f"{where}: not a readable image: {error}; {known}") from error


def _resized(image: Image, frame: _Frame) -> tuple[Image, str]:
    from PIL.Image import Resampling

    done = f"{image.width} x {image.height} {image.mode}"
    if image.mode != (mode := _MODES[frame.channels]):
        image, done = image.convert(mode), f"{done}, converted to {mode}"
    size = frame.width or image.width, frame.height or image.height
    if size != image.size:
        image, done = image.resize(size, Resampling.BILINEAR), f"{done}, resized to {size[0]} x {size[1]} (bilinear)"
    return image, done


def _typed(port: Port, found: NDArray[np.uint8], where: str, pixels: str | None) -> tuple[NDArray[Any], str]:
    """Converts pixels to the input's type."""
    dtype = port.operand.type.dtype
    if pixels is None and port.is_byte:
        return (found.astype(np.int16) + np.iinfo(dtype).min).astype(dtype), "bytes used as quantised values"
    if dtype.kind not in "fi" and not port.operand.type.is_quantised:
        raise click.UsageError(
            f"{where}: input {port.name!r} is {port.operand.type.name}, which no image fits; pass an array (.npy)"
        )
    pixels = pixels or ("0..1" if dtype.kind == "f" or port.operand.type.is_quantised else "0..255")
    words = f"pixels as {pixels}" + (", quantised" if port.operand.type.is_quantised else "")
    return port.stored(_scaled(found / np.float64(255), pixels, where)), words


def _scaled(found: NDArray[np.float64], pixels: str, where: str) -> NDArray[np.float64]:
    """Scales pixels from the range 0..1."""
    if pixels != IMAGENET:
        low, high = RANGES[pixels]
        return found * (high - low) + low
    if found.shape[2] != 3:
        raise click.UsageError(f"{where}: --pixels {IMAGENET} needs 3 channels; the input has {found.shape[2]}")
    return (found - _MEAN) / _DEVIATION
