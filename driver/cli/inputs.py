"""Inputs for `burst run`: each from a file or random, with a note of how it was converted to fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import numpy as np

from driver.cli import arrays
from driver.cli.image import read_image
from driver.cli.sound import read_sound
from driver.nn.errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

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
        inside = arrays.names(archive)
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
            array, done = arrays.read_array(port, shape, source, where)
        case ".wav":
            array, done = read_sound(port, shape, source, where)
        case _:
            array, done = read_image(port, shape, source, where, pixels)
    return Feed(np.ascontiguousarray(array).reshape(array.shape), source, done)
