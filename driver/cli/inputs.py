"""Inputs for `burst run`: each from an array, sound or image file, or random. Notes how each was converted to fit."""

from __future__ import annotations

import math
import re
import wave
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import numpy as np

from driver.cli.ports import shape_words
from driver.nn.errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from PIL.Image import Image

    from driver.cli.ports import Port


RANDOM = "random"


class Feed(NamedTuple):
    """The value of one input."""

    array: NDArray[Any]
    source: str  #: a file, "random" or "zeros"
    done: str  #: how it was converted to fit


def feeds(
    ports: Sequence[Port], given: Sequence[str], shapes: Sequence[str], seed: int, pixels: str | None
) -> list[Feed]:
    """Returns one for each input. `given`: values of --input, `shapes`: values of --shape. Raises UsageError."""
    sources, sizes = _sources(ports, given), _named(ports, shapes, "--shape")
    generator, found = np.random.default_rng(seed), []
    for port in ports:
        shape = _shape(port, sizes.get(port.name))
        source = sources.get(port.name, "zeros" if port.is_state else RANDOM)
        if source in (RANDOM, "zeros"):
            found.append(_made(port, shape, source, generator))
        else:
            found.append(_read(port, shape, source, pixels))
    return found


def _sources(ports: Sequence[Port], given: Sequence[str]) -> dict[str, str]:
    """The file of each input. An .npz without NAME= serves every input whose name it contains."""
    words = list(given)
    archives = [word for word in words if word.endswith(".npz") and Path(word).is_file()]
    for archive in archives:
        inside = _names_in(archive)
        if known := [port.name for port in ports if port.name in inside]:
            at = words.index(archive)
            words[at : at + 1] = [f"{name}={archive}" for name in known]
    return _named(ports, words, "--input")


def _named(ports: Sequence[Port], given: Iterable[str], option: str) -> dict[str, str]:
    """Values by input name. Values without NAME= go to the remaining inputs, in order."""
    found: dict[str, str] = {}
    without, names = [], [port.name for port in ports]
    for word in given:
        name = next((name for name in names if word.startswith(f"{name}=")), None)
        if name is None:
            without.append(word)
        elif name in found:
            raise click.UsageError(f"{option} {word}: input {name!r} is given twice; remove one")
        else:
            found[name] = word[len(name) + 1 :]
    free = [name for name in names if name not in found]
    for word in without[len(free) :]:
        raise click.UsageError(f"{option} {word}: too many; the model has {len(names)} inputs: {', '.join(names)}")
    for word in without:
        name, is_named, _ = word.partition("=")
        if is_named and not Path(word).exists():
            hint = did_you_mean(name, names)
            raise click.UsageError(f"{option} {word}: no input is named {name!r}; inputs: {', '.join(names)}{hint}")
    return {**found, **dict(zip(free, without, strict=False))}


def _shape(port: Port, words: str | None) -> tuple[int, ...]:
    """The shape of an input as far as it is known: the model's own, completed by --shape."""
    declared = port.operand.dimensions
    if words is None:
        return declared
    if not re.fullmatch(r"\d{1,9}(x\d{1,9})*", words, re.ASCII) or 0 in (given := tuple(map(int, words.split("x")))):
        raise click.UsageError(f"--shape {words}: expected positive numbers separated by x, for example 1x224x224x3")
    fits = not declared or (
        len(given) == len(declared) and all(d in (0, g) for d, g in zip(declared, given, strict=True))
    )
    if not fits or port.operand.type.is_scalar:
        raise click.UsageError(f"--shape {words}: input {port.name!r} is {port.words}; only a ? can be set")
    return given


def _made(port: Port, shape: tuple[int, ...], source: str, generator: np.random.Generator) -> Feed:
    """Generates an input: random numbers or zeros."""
    kind = port.operand.type
    if not shape and not kind.is_scalar:
        raise click.UsageError(f"input {port.name!r} has no known rank; pass --shape {port.name}=1x…")
    chosen = tuple(size or 1 for size in shape)
    done = f"? taken as 1; change it with --shape {port.name}=…" if chosen != shape else ""
    if source == "zeros":
        return Feed(np.zeros(chosen, kind.dtype), source, "the initial state")
    if kind.is_quantised:
        limits = np.iinfo(kind.dtype)
        array = generator.integers(limits.min, limits.max, chosen, kind.dtype, endpoint=True)
        words = "the whole quantised range"
    elif kind.dtype.kind == "f":
        array, words = generator.uniform(-1, 1, chosen), "-1 to 1"
    else:
        array, words = generator.integers(0, 2, chosen), "0 or 1"
    return Feed(np.asarray(array, kind.dtype), source, "; ".join(filter(None, (words, done))))


def _read(port: Port, shape: tuple[int, ...], source: str, pixels: str | None) -> Feed:
    """Reads an input's file by its suffix: an array, a sound, or else an image."""
    where = f"--input {source}"
    if not Path(source).is_file():
        raise click.UsageError(f"{where}: no such file; pass a path, or the word {RANDOM!r}")
    match Path(source).suffix.lower():
        case ".npy" | ".npz":
            array, done = read_array(port, shape, source, where)
        case ".wav":
            array, done = read_sound(port, shape, source, where)
        case _:
            array, done = read_image(port, shape, source, where, pixels)
    return Feed(np.ascontiguousarray(array).reshape(array.shape), source, done)


def read_sound(port: Port, shape: tuple[int, ...], path: str, where: str) -> tuple[NDArray[Any], str]:
    """Reads a sound for an input; returns it and how it was converted. Raises UsageError."""
    kind = port.operand.type
    if kind.dtype.kind != "f" and not kind.is_quantised:
        raise click.UsageError(
            f"{where}: input {port.name!r} is {kind.name}, which no sound fits; pass an array (.npy)"
        )
    samples, rate = _samples(path, where)
    count, channels = samples.shape
    done = f"{count} samples at {rate} Hz"
    is_kept = shape[-1:] == (channels,) and any(size != 1 for size in shape[:-1])
    if channels > 1 and not is_kept:
        samples, done = samples.mean(axis=1, keepdims=True), f"{done}, the mean of {channels} channels"
    filled = _filled(port, shape, samples.shape, where)
    room = math.prod(filled) // samples.shape[1]
    if room < count:
        done = f"{done}, cut to the first {room}"
    elif room > count:
        done = f"{done}, padded with {room - count} zeros"
    fitted = np.zeros((room, samples.shape[1]))
    fitted[:count] = samples[:room]
    words = "-1 to 1, quantised" if kind.is_quantised else "-1 to 1"
    return port.stored(fitted).reshape(filled), f"{done}; {words}"


def _samples(path: str, where: str) -> tuple[NDArray[np.float64], int]:
    """Samples from -1 to 1, as [time, channels]; and the sample rate."""
    try:
        with wave.open(path) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            raw = file.readframes(file.getnframes())
    except (wave.Error, EOFError, OSError) as error:
        raise click.UsageError(f"{where}: not a PCM WAV file: {error or 'it is truncated'}") from error
    raw = raw[: len(raw) - len(raw) % (width * channels)]
    if not raw:
        raise click.UsageError(f"{where}: the file contains no samples")
    if width == 1:
        numbers = np.frombuffer(raw, np.uint8).astype(np.float64) - 128
    else:  # the highest bytes of 32 bits
        wide = np.zeros((len(raw) // width, 4), np.uint8)
        wide[:, 4 - width :] = np.frombuffer(raw, np.uint8).reshape(-1, width)
        numbers = wide.view("<i4")[:, 0] / 2.0 ** (32 - 8 * width)
    return (numbers / 2.0 ** (8 * width - 1)).reshape(-1, channels), rate


def _filled(port: Port, shape: tuple[int, ...], found: tuple[int, int], where: str) -> tuple[int, ...]:
    """The input's shape: one axis is time, the last may be channels, all others have size 1."""
    count, channels = found
    rest = list(shape or (0, channels))[: -1 if channels > 1 else None]
    if len(rest) > 1 and not rest[0]:
        rest[0] = 1  # a batch
    if sum(size != 1 for size in rest) > 1:
        raise click.UsageError(
            f"{where}: input {port.name!r} takes {shape_words(shape)}, which is not a row of samples; "
            "compute its features and pass them as an array (.npy)"
        )
    return (*(size or count for size in rest), *((channels,) if channels > 1 else ()))


_DAMAGED = OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zipfile.LargeZipFile


def _names_in(path: str) -> list[str]:
    """Names of the arrays in an .npz. Raises UsageError."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except _DAMAGED as error:
        raise click.UsageError(f"--input {path}: not an .npz file: {error}; write it with numpy.savez") from error


def read_array(port: Port, shape: tuple[int, ...], path: str, where: str) -> tuple[NDArray[Any], str]:
    """Reads an array for an input; returns it and how it was converted to fit. Raises UsageError."""
    found = _array_of(port, path, where)
    done = []
    if len(found.shape) + 1 == len(shape) and shape[0] in (0, 1):
        found = found[np.newaxis]
        done.append("batch dimension added")
    if shape and (found.ndim != len(shape) or any(s not in (0, f) for s, f in zip(shape, found.shape, strict=True))):
        raise click.UsageError(
            f"{where}: the array has shape {shape_words(found.shape)}, but input {port.name!r} takes "
            f"{shape_words(shape)}; reshape it"
        )
    array, words = _converted(port, found, where)
    return array, "; ".join(filter(None, (*done, words)))


def _array_of(port: Port, path: str, where: str) -> NDArray[Any]:
    try:
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
        with found:
            names = list(found)
            if port.name in names or len(names) == 1:
                array: NDArray[Any] = found[port.name if port.name in names else names[0]]
                return array
    except _DAMAGED as error:
        raise click.UsageError(f"{where}: not a readable array: {error}; write it with numpy.save") from error
    raise click.UsageError(f"{where}: no array is named {port.name!r}; the file has {', '.join(names)}: rename one")


def _converted(port: Port, found: NDArray[Any], where: str) -> tuple[NDArray[Any], str]:
    """Converts to the input's type, if the model loses no information by it."""
    dtype, kind = port.operand.type.dtype, port.operand.type
    if found.dtype == dtype:
        return found, ""
    if found.dtype.kind == "f" and kind.is_quantised:
        scale, zero = port.operand.scale, port.operand.zero_point
        return port.stored(found), f"{found.dtype} quantised: scale {scale:g}, zero point {zero}"
    if found.dtype.kind in "fiub" and dtype.kind == "f":
        return found.astype(dtype), f"{found.dtype} converted to {dtype}"
    if found.dtype.kind in "iub" and not kind.is_quantised and np.array_equal(found, cast := found.astype(dtype)):
        return cast, f"{found.dtype} converted to {dtype}"
    raise click.UsageError(
        f"{where}: the array is {found.dtype}, but input {port.name!r} takes {dtype}; convert it with "
        f".astype('{dtype}')"
    )


def write_arrays(path: Path, found: Mapping[str, NDArray[Any]]) -> None:
    """Writes an .npz. Takes any names, which `numpy.savez` does not. Raises OSError."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in found.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.ascontiguousarray(array).reshape(array.shape), allow_pickle=False)


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
    array, words = _from_pixels(port, bytes_, where, pixels)
    if frame.is_channels_first:
        array, words = array.transpose(2, 0, 1), f"{words}, channels first"
    return array.reshape(_image_shape(shape, array.shape)), f"{done}; {words}"


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


def _image_shape(shape: tuple[int, ...], found: tuple[int, ...]) -> tuple[int, ...]:
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


def _from_pixels(port: Port, found: NDArray[np.uint8], where: str, pixels: str | None) -> tuple[NDArray[Any], str]:
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
