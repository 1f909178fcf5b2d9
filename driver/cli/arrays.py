"""Arrays of numpy for an input, out of .npy and .npz, and outputs into .npz."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from driver.cli.ports import shape_words

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from driver.cli.ports import Port

_DAMAGED = OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zipfile.LargeZipFile


def names(path: str) -> list[str]:
    """Of the arrays in an .npz. Raises UsageError."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except _DAMAGED as error:
        raise click.UsageError(f"--input {path}: no .npz file: {error}; write it with numpy.savez") from error


def read_array(port: Port, shape: tuple[int, ...], path: str, where: str) -> tuple[NDArray[Any], str]:
    """What an input gets of a file, and what was done to make it fit. Raises UsageError."""
    found = _loaded(port, path, where)
    done = []
    if len(found.shape) + 1 == len(shape) and shape[0] in (0, 1):
        found = found[np.newaxis]
        done.append("as a batch of one")
    if shape and (found.ndim != len(shape) or any(s not in (0, f) for s, f in zip(shape, found.shape, strict=True))):
        raise click.UsageError(
            f"{where}: an array of shape {shape_words(found.shape)}; input {port.name!r} takes {shape_words(shape)}: "
            "reshape it, or give another"
        )
    array, words = _typed(port, found, where)
    return array, "; ".join(filter(None, (*done, words)))


def _loaded(port: Port, path: str, where: str) -> NDArray[Any]:
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
        raise click.UsageError(f"{where}: it cannot be read as arrays: {error}; write it with numpy.save") from error
    raise click.UsageError(f"{where}: no array is called {port.name!r}; it has {', '.join(names)}: rename one")


def _typed(port: Port, found: NDArray[Any], where: str) -> tuple[NDArray[Any], str]:
    """In the input's type, if nothing is lost that the model could have used."""
    dtype, kind = port.operand.type.dtype, port.operand.type
    if found.dtype == dtype:
        return found, ""
    if found.dtype.kind == "f" and kind.is_quantised:
        return port.stored(found), f"{found.dtype} quantised: scale {port.operand.scale:g}, {port.operand.zero_point}"
    if found.dtype.kind in "fiub" and dtype.kind == "f":
        return found.astype(dtype), f"{found.dtype} taken as {dtype}"
    if found.dtype.kind in "iub" and not kind.is_quantised and np.array_equal(found, cast := found.astype(dtype)):
        return cast, f"{found.dtype} taken as {dtype}"
    raise click.UsageError(
        f"{where}: an array of {found.dtype}; input {port.name!r} takes {dtype}: convert it with .astype('{dtype}')"
    )


def write_arrays(path: Path, found: Mapping[str, NDArray[Any]]) -> None:
    """An .npz with any names, which `numpy.savez` does not take. Raises OSError."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in found.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.ascontiguousarray(array).reshape(array.shape), allow_pickle=False)
