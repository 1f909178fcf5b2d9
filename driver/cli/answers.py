"""What came out of a model, for people: ranges of numbers, and the likeliest classes."""

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

_FEWEST_CLASSES = 5  # without labels: a box has four numbers


class Class(NamedTuple):
    """One of the likeliest."""

    number: int
    label: str | None
    value: float


def classes(port: Port, array: NDArray[Any], top: int, labels: Sequence[str]) -> list[Class]:
    """Those of the largest values; none when this does not look like scores of classes.

    That is real numbers in one row, five and more if there are no labels. `labels`: of all classes, or none.
    """
    is_real = array.dtype.kind == "f" or port.operand.type.is_quantised
    fewest = 1 if labels else _FEWEST_CLASSES
    if not is_real or port.is_state or not array.ndim or array.size < fewest or array.size != array.shape[-1]:
        return []
    real = port.real(array).reshape(-1)
    if labels and len(labels) != len(real):
        raise click.UsageError(f"--labels: {len(labels)} lines for the {len(real)} classes of output {port.name!r}")
    order = np.argsort(-np.nan_to_num(real, nan=-np.inf), kind="stable")[:top]
    return [Class(int(n), labels[n] if labels else None, float(real[n])) for n in order]


def read_labels(path: Path | None) -> list[str]:
    """A line for each class. Raises UsageError."""
    if path is None:
        return []
    try:
        return path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--labels {path}: {error}; give a text file with a line for each class") from error


def summary(port: Port, array: NDArray[Any]) -> dict[str, Any]:
    """What JSON has of an output."""
    real = port.real(array).astype(np.float64)
    figures = {"min": float(real.min()), "mean": float(real.mean()), "max": float(real.max())} if real.size else {}
    return {"name": port.name, "type": port.operand.type.name, "shape": list(array.shape), **figures}


def summary_words(found: dict[str, Any]) -> str:
    """The same in a line."""
    words = f"{found['type']} {shape_words(found['shape'])}"
    return words + (f", {found['min']:.4g} to {found['max']:.4g}" if "min" in found else "")
