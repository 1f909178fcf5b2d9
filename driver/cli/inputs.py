"""Inputs for `burst run`: each from a file, a stream, a number or a text, or random. Notes how each was made to fit."""

from __future__ import annotations

import json
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import numpy as np

from driver.cli.images import LETTERBOX, ImageFit, animation, opened
from driver.cli.ports import shape_words
from driver.cli.sizes import SizeTable, by_input
from driver.cli.sounds import Blocks, is_sound, read_recording
from driver.cli.videos import Video, is_stream
from driver.nn.tensors import TEXTS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from PIL.Image import Image

    from driver.cli.ports import Port
    from driver.cli.sizes import Sizes

RANDOM, ZEROS = "random", "zeros"
_SAMPLE = "text"
FRAME, BLOCK = "frame", "block"


@dataclass(frozen=True, slots=True)
class FeedOptions:
    """How files become inputs.

    seed: of random inputs. pixels: one of PIXELS; None: what the input's type suggests. fit: one of FITS. block, hop:
    samples of a block of sound, and from the begin of one to the next; None: as long as the input, else the whole.
    """

    seed: int = 0
    pixels: str | None = None
    fit: str = LETTERBOX
    block: int | None = None
    hop: int | None = None


class Later(NamedTuple):
    """The values of an input after the first: frames or blocks, each with the second at which it begins."""

    unit: str  #: FRAME or BLOCK
    values: Iterator[tuple[float, NDArray[Any]]]
    close: Callable[[], object]  #: ends the stream


class Feed(NamedTuple):
    """The value of one input, or the first of many."""

    array: NDArray[Any]
    source: str  #: a file, a number, "random" or "zeros"
    done: str  #: how it was converted to fit
    later: Later | None = None


def feeds(
    ports: Sequence[Port],
    given: Sequence[str],
    sizes: Mapping[str, Sizes],
    options: FeedOptions,
    states: Collection[str] = (),
) -> list[Feed]:
    """Return one for each input. Raise UsageError.

    `given`: values of --input. `sizes`: of --shape, by input. `states`: inputs that begin with zeros; those of the
    importer do, too.
    """
    sources, table = _sources(ports, given), SizeTable(ports, sizes)
    if (options.block or options.hop) and not any(is_sound(source) for source in sources.values()):
        option = f"--block {options.block}" if options.block else f"--hop {options.hop}"
        raise click.UsageError(f"{option}: no input is a sound; pass one with --input, or leave it out")
    generator, found = np.random.default_rng(options.seed), dict[str, Feed]()
    for port in sorted(ports, key=lambda port: sources.get(port.name, RANDOM) == RANDOM):  # files tell sizes
        source = sources.get(port.name, RANDOM)
        if source != RANDOM:
            found[port.name] = _read(port, table.of(port), source, options)
        else:
            is_state = port.name not in sources and (port.is_state or port.name in states)
            found[port.name] = _made(port, table, generator, is_state=is_state)
        table.settle(port, found[port.name].array.shape)
    return [found[port.name] for port in ports]


def _sources(ports: Sequence[Port], given: Sequence[str]) -> dict[str, str]:
    """Return the file of each input. An .npz without NAME= serves every input whose name it contains."""
    words = list(given)
    archives = [word for word in words if word.endswith(".npz") and Path(word).is_file()]
    for archive in archives:
        inside = _names_in(archive)
        if known := [port.name for port in ports if port.name in inside]:
            at = words.index(archive)
            words[at : at + 1] = [f"{name}={archive}" for name in known]
    return by_input(ports, words, "--input")


def _made(port: Port, table: SizeTable, generator: np.random.Generator, *, is_state: bool) -> Feed:
    """Generate an input: random numbers, or the zeros of a state."""
    if port.kind:
        return Feed(_texts(port, table.of(port), [_SAMPLE], "its input"), RANDOM, f"the word {_SAMPLE!r}")
    kind, shape = port.operand.type, table.without_file(port, is_state=is_state)
    taken = next((own for own, known in zip(shape, table.of(port), strict=True) if not known), 0)
    done = f"? taken as {taken}; change it with --shape {port.name}=…" if taken else ""
    if is_state:
        return Feed(np.zeros(shape, kind.dtype), ZEROS, "the initial state")
    if kind.is_quantised:
        limits = np.iinfo(kind.dtype)
        array = generator.integers(limits.min, limits.max, shape, kind.dtype, endpoint=True)
        words = "the whole quantised range"
    elif kind.dtype.kind == "f":
        array, words = generator.uniform(-1, 1, shape), "-1 to 1"
    else:
        array, words = generator.integers(0, 2, shape), "0 or 1"
    return Feed(np.asarray(array, kind.dtype), RANDOM, "; ".join(filter(None, (words, done))))


def _read(port: Port, shape: Sizes, source: str, options: FeedOptions) -> Feed:
    """Read an input's file by its suffix: an array, a sound; else by what the input takes: bytes, or an image."""
    if port.kind and not source.lower().endswith((".npy", ".npz")):
        return _of_text(port, shape, source)
    if is_stream(source):
        return _of_video(port, shape, source, options)
    if not Path(source).is_file():
        return _number(port, shape, source)
    if source.lower().endswith((".npy", ".npz")):
        array, done = read_array(port, shape, source, f"--input {source}")
        return Feed(np.ascontiguousarray(array).reshape(array.shape), source, done)
    if is_sound(source):
        return _of_sound(port, shape, source, options)
    is_text = not port.is_real and port.dtype != "bool" and 0 < len(shape) < 3
    return (_of_bytes if is_text else _of_image)(port, shape, source, options)


def _of_image(port: Port, shape: Sizes, source: str, options: FeedOptions) -> Feed:
    image = opened(source)
    if image is None:
        return _of_video(port, shape, source, options)
    if frames := animation(source):
        return _of_frames(port, shape, source, options, frames=frames, close=lambda: None)
    fit = ImageFit(port, shape, image, f"--input {source}", pixels=options.pixels, fit=options.fit)
    return Feed(fit(image), source, fit.done)


def _of_video(port: Port, shape: Sizes, source: str, options: FeedOptions) -> Feed:
    video = Video(source)
    return _of_frames(port, shape, source, options, frames=iter(video), close=video.close)


def _of_frames(
    port: Port,
    shape: Sizes,
    source: str,
    options: FeedOptions,
    frames: Iterator[tuple[float, Image]],
    close: Callable[[], object],
) -> Feed:
    try:
        _, first = next(frames)
        fit = ImageFit(port, shape, first, f"--input {source}", pixels=options.pixels, fit=options.fit)
    except click.UsageError:
        close()
        raise
    later = Later(FRAME, ((second, fit(image)) for second, image in frames), close)
    return Feed(fit(first), source, fit.done, later)


def _of_sound(port: Port, shape: Sizes, source: str, options: FeedOptions) -> Feed:
    where = f"--input {source}"
    blocks = Blocks(port, shape, read_recording(source, where), where, block=options.block, hop=options.hop)
    values = iter(blocks)
    _, first = next(values)
    return Feed(first, source, blocks.done, Later(BLOCK, values, lambda: None) if blocks.count > 1 else None)


def _of_bytes(port: Port, shape: Sizes, source: str, _options: FeedOptions) -> Feed:
    """Return the bytes of any file as a row of integers."""
    found = np.fromfile(source, np.uint8)
    chosen = tuple(size or (1 if axis < len(shape) - 1 else max(1, found.size)) for axis, size in enumerate(shape))
    if math.prod(chosen[:-1]) != 1:
        raise click.UsageError(
            f"--input {source}: input {port.name!r} takes {shape_words(shape)}, which is not one row of bytes; pass an "
            "array (.npy)"
        )
    row = np.zeros(chosen[-1], port.operand.type.dtype)
    row[: found.size] = found[: row.size]
    done = f"{found.size} bytes"
    if found.size != row.size:
        done += f", cut to the first {row.size}" if found.size > row.size else f", padded with zeros to {row.size}"
    return Feed(row.reshape(chosen), source, done)


def _of_text(port: Port, shape: Sizes, source: str) -> Feed:
    """Return a text for each line of a file; of a word that names no file, the word."""
    where = f"--input {source}"
    if not Path(source).is_file():
        return Feed(_texts(port, shape, [source], where), source, "the text")
    try:
        lines = Path(source).read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{where}: {error}; pass a file of UTF-8 text, or an array (.npy)") from None
    return Feed(_texts(port, shape, lines, where), source, f"{len(lines)} lines")


def _texts(port: Port, shape: Sizes, texts: Sequence[str], where: str) -> NDArray[Any]:
    """Return an array of these texts, along the first size that is open. Raise UsageError."""
    if port.kind != TEXTS:
        raise click.UsageError(f"{where}: input {port.name!r} is {port.kind}, which run takes in Python alone")
    sizes = [*shape] if shape else [0]
    at = sizes.index(0) if 0 in sizes else 0
    chosen = [len(texts) if axis == at and not size else size or 1 for axis, size in enumerate(sizes)]
    found = np.array(texts, object)
    if len(texts) == 1:
        return np.full([size or 1 for size in sizes], found[0], object)
    if math.prod(chosen) != len(texts):
        raise click.UsageError(f"{where}: {len(texts)} texts, but input {port.name!r} takes {shape_words(shape)}")
    return found.reshape(chosen)


def _number(port: Port, shape: Sizes, source: str) -> Feed:
    """Return a number, for every element of the input. Raise UsageError for what is neither a number nor a file."""
    where = f"--input {source}"
    try:
        number = float(source)
    except ValueError:
        remedy = f"pass a path, a number, the address of a stream, or the word {RANDOM!r}"
        raise click.UsageError(f"{where}: no such file; {remedy}") from None
    chosen = tuple(size or 1 for size in shape)
    if port.is_real and port.dtype != "bfloat16":
        return Feed(port.stored(np.full(chosen, number)), source, "the number")
    exact = np.full(chosen, int(source) if source.lstrip("+-").isdecimal() else number)
    array, _ = _converted(port, exact, where)
    return Feed(array, source, "the number")


_DAMAGED = OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zipfile.LargeZipFile


def _names_in(path: str) -> list[str]:
    """Return the names of the arrays in an .npz. Raise UsageError."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except _DAMAGED as error:
        raise click.UsageError(f"--input {path}: not an .npz file: {error}; write it with numpy.savez") from error


def read_array(port: Port, shape: Sizes, path: str, where: str) -> tuple[NDArray[Any], str]:
    """Read an array for an input; return it and how it was converted to fit. Raise UsageError."""
    found = _array_of(port, path, where)
    done = []
    if found.size == 1 and port.operand.type.is_scalar:
        found = found.reshape(())
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
    """Convert to the input's type, if the model loses no information by it."""
    dtype, kind = port.operand.type.dtype, port.operand.type
    if found.dtype == dtype and not port.kind:
        return found, ""
    if port.kind == TEXTS and found.dtype.kind in "US":
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


def storable(value: Any) -> NDArray[Any]:
    """Return a copy of an output that an .npz takes: texts as str_, and sequences and maps as JSON."""
    if not isinstance(value, np.ndarray):
        return np.array(json.dumps(value, default=lambda array: array.tolist()))
    return value.astype(str) if value.dtype == object else value.copy()


def write_arrays(path: Path, found: Mapping[str, NDArray[Any]]) -> None:
    """Write an .npz. Takes any names, which `numpy.savez` does not. Raise OSError."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in found.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.ascontiguousarray(array).reshape(array.shape), allow_pickle=False)
