"""Outputs of a model in a few figures: what a person wants to see of them, and what --json prints."""

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
_BOX = 4  # numbers before the classes of a detector
_FEW = 8
"""Outputs of as many elements are shown as they are."""


class Class(NamedTuple):
    """One of the most likely classes."""

    number: int
    label: str | None
    value: float


def read_labels(path: Path | None) -> list[str]:
    """Read the labels, one per line. Raise UsageError."""
    if path is None:
        return []
    try:
        return path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--labels {path}: {error}; pass a text file with one class name per line") from error


def classes(port: Port, array: NDArray[Any], top: int, labels: Sequence[str] = ()) -> list[Class]:
    """Return the classes with the largest scores; none unless the output looks like scores of classes.

    Those are real numbers in one row, at least five where no labels are known; or, with labels, an axis of as many
    elements as there are labels, maybe after four of a box, as detectors have it: the largest score of each class.
    `labels`: of the user; by default the file's own.
    """
    if not port.is_real or port.is_state or not array.ndim or not array.size or not top:
        return []
    scores = _scores(port, array, labels or port.labels)
    if scores is None:
        return []
    known = [*(labels or port.labels)]
    if labels and len(labels) != len(scores):
        raise click.UsageError(f"--labels: {len(labels)} lines, but output {port.name!r} has {len(scores)} classes")
    known = known if len(known) == len(scores) else []
    order = np.argsort(-np.nan_to_num(scores, nan=-np.inf), kind="stable")[:top]
    return [Class(int(n), known[n] if known else None, float(scores[n])) for n in order]


def _scores(port: Port, array: NDArray[Any], labels: Sequence[str]) -> NDArray[Any] | None:
    """Return one score for each class; None if the output is something else."""
    real = port.real(array)
    if array.size == array.shape[-1]:
        return real.reshape(-1) if array.size >= (1 if labels else _FEWEST_CLASSES) else None
    for skipped in (0, _BOX) if len(labels) > 1 else ():
        for axis in range(array.ndim - 1, -1, -1):
            if array.shape[axis] == len(labels) + skipped:
                rest = np.moveaxis(real, axis, 0).reshape(array.shape[axis], -1)[skipped:]
                return np.asarray(np.fmax.reduce(rest, axis=1))
    return None


def summary(port: Port, array: NDArray[Any]) -> dict[str, Any]:
    """Return an output as --json prints it: name, type, shape, range; values where there are few."""
    if port.kind:
        return _of_values(port, array)
    real = port.real(array).astype(np.float64)
    found: dict[str, Any] = {"name": port.name, "dtype": port.dtype, "shape": list(array.shape)}
    if port.operand.type.is_quantised:
        found |= {"scale": port.operand.scale, "zero_point": port.operand.zero_point}
    if real.size:
        found |= {"min": float(real.min()), "mean": float(real.mean()), "max": float(real.max())}
    if real.size <= _FEW:
        found["values"] = real.reshape(-1).tolist()
    return found


def _of_values(port: Port, value: Any) -> dict[str, Any]:
    """Return a summary of texts, sequences and maps: the first ones."""
    found: dict[str, Any] = {"name": port.name, "dtype": port.dtype}
    if isinstance(value, np.ndarray):
        return found | {"shape": list(value.shape), "values": value.reshape(-1)[:_FEW].tolist()}
    values = value if isinstance(value, list) else [value]
    found["shape"] = [len(values)]
    return found | {"values": [v.tolist() if isinstance(v, np.ndarray) else v for v in values[:_FEW]]}


def summary_words(found: dict[str, Any]) -> str:
    """Return the summary of an output as one line of text."""
    quantised = "quantised " if "scale" in found else ""
    return f"{quantised}{found['dtype']} {shape_words(found['shape'])}{range_words(found)}"


def range_words(found: dict[str, Any]) -> str:
    """Return the values of an output, or between which they are."""
    if found.get("values"):
        return ": " + ", ".join(map(_said, found["values"]))
    return ", empty" if found.get("min") is None else f", {found['min']:.4g} to {found['max']:.4g}"


def brief(found: dict[str, Any], top: Sequence[dict[str, Any]]) -> Any:
    """Return an output of one frame or block as --json prints it: its likeliest classes, its few values, or their
    range.
    """
    if top:
        return {one["label"] or str(one["number"]): one["value"] for one in top}
    return found.get("values") or {word: found.get(word) for word in ("min", "max")}


def brief_words(name: str, found: Any) -> str:
    """Return an output of one frame or block as text."""
    if isinstance(found, dict) and {*found} == {"min", "max"}:
        return f"{name}{range_words(found)}".replace(",", "")
    if isinstance(found, dict):
        return ", ".join(f"{label} {value:.4g}" for label, value in found.items())
    return f"{name} " + " ".join(map(_said, found))


def _said(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float | int) else str(value)


def readable(found: Any) -> Any:
    """Return the JSON with numbers of six digits."""
    if isinstance(found, dict):
        return {key: readable(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [readable(value) for value in found]
    return float(f"{found:.6g}") if isinstance(found, float) else found


def ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last of each run of consecutive numbers."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def range_text(pair: tuple[int, int]) -> str:
    """Return a run of numbers as text."""
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]} to {pair[1]}"
