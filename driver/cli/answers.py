"""Outputs of a model in readable form: ranges of values, and the most likely classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import click
import numpy as np

from driver.cli.ports import shape_words

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from driver.cli.ports import Port

_FEWEST_CLASSES = 5  # without labels; four numbers may be a box


class Class(NamedTuple):
    """One of the most likely classes."""

    number: int
    label: str | None
    value: float


def classes(port: Port, array: NDArray[Any], top: int, labels: Sequence[str]) -> list[Class]:
    """The classes with the largest scores; none unless the output looks like class scores.

    Class scores are real numbers in one row: without labels, at least five. `labels`: one for each class, or none.
    """
    is_real = array.dtype.kind == "f" or port.operand.type.is_quantised
    fewest = 1 if labels else _FEWEST_CLASSES
    if not is_real or port.is_state or not array.ndim or array.size < fewest or array.size != array.shape[-1]:
        return []
    real = port.real(array).reshape(-1)
    if labels and len(labels) != len(real):
        raise click.UsageError(f"--labels: {len(labels)} lines, but output {port.name!r} has {len(real)} classes")
    order = np.argsort(-np.nan_to_num(real, nan=-np.inf), kind="stable")[:top]
    return [Class(int(n), labels[n] if labels else None, float(real[n])) for n in order]


def read_labels(path: Path | None) -> list[str]:
    """Reads the labels, one per line. Raises UsageError."""
    if path is None:
        return []
    try:
        return path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--labels {path}: {error}; pass a text file with one class name per line") from error


def summary(port: Port, array: NDArray[Any]) -> dict[str, Any]:
    """An output as --json prints it."""
    real = port.real(array).astype(np.float64)
    figures = {"min": float(real.min()), "mean": float(real.mean()), "max": float(real.max())} if real.size else {}
    return {"name": port.name, "type": port.operand.type.name, "shape": list(array.shape), **figures}


def summary_words(found: dict[str, Any]) -> str:
    """The summary of an output as one line of text."""
    words = f"{found['type']} {shape_words(found['shape'])}"
    return words + (f", {found['min']:.4g} to {found['max']:.4g}" if "min" in found else "")
