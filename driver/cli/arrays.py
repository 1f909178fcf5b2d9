"""Reads inputs from .npy and .npz files; writes outputs to .npz."""

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
    """Names of the arrays in an .npz. Raises UsageError."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except _DAMAGED as error:
        raise click.UsageError(f"--input {path}: not an .npz file: {error}; write it with numpy.savez") from error


def read_array(port: Port, shape: tuple[int, ...], path: str, where: str) -> tuple[NDArray[Any], str]:
    """Reads an array for an input; returns it and how it was converted to fit. Raises UsageError."""
    found = _loaded(port, path, where)
    done = []
    if len(found.shape) + 1 == len(shape) and shape[0] in (0, 1):
        found = found[np.newaxis]
        done.append("batch dimension added")
    if shape and (found.ndim != len(shape) or any(s not in (0, f) for s, f in zip(shape, found.shape, strict=True))):
        raise click.UsageError(
            f"{where}: the array has shape {shape_words(found.shape)}, but input {port.name!r} takes "
            f"{shape_words(shape)}; reshape it"
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
        raise click.UsageError(f"{where}: not a readable array: {error}; write it with numpy.save") from error
    raise click.UsageError(f"{where}: no array is named {port.name!r}; the file has {', '.join(names)}: rename one")


def _typed(port: Port, found: NDArray[Any], where: str) -> tuple[NDArray[Any], str]:
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
