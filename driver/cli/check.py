"""`burst check`: everything that keeps a model file from running here, in each form and on each device."""

from __future__ import annotations

import sys
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from driver.cli.epilog import examples
from driver.cli.names import as_options, header_of, signature_option
from driver.cli.output import json_option, print_json, print_line, print_table, progress
from driver.cli.ports import declared
from driver.cli.sizes import Sizes, given_sizes, shape_option
from driver.runtime.model_check import check as find_obstacles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driver.runtime.model_check import ModelReport

_PATH: Any = click.Path(path_type=Path)


@click.command(epilog=examples("burst check net.tflite", "burst check net.onnx --shape images=1x3x320x320"))
@click.argument("model", type=_PATH)
@shape_option
@signature_option
@click.option("--no-run", is_flag=True, help="Only load the file: nothing is run on zeros.")
@json_option
def check(model: Path, shapes: tuple[str, ...], signature: str | None, no_run: bool, as_json: bool) -> None:
    """Find every obstacle of a model file, in every form.

    MODEL is a .tflite or .onnx file. A file runs as it is, on the runtime that it was made for, or as operations of the
    HAL. For each form and device there is a table of what is in the way: the operator, its tensors, the reason, and the
    remedy. Installed devices are started and asked; those that take the file as it is run it on zeros, and what a frame
    of a stream costs there is said. Exits with 1 if the file runs in no form.
    """
    try:
        with progress() as tell:
            sizes = _sizes(model, shapes, signature)
            report = find_obstacles(model, sizes, tell, signature=signature, run=not no_run)
    except OSError as error:
        raise click.UsageError(f"MODEL {str(model)!r}: {error.strerror}; pass the path of a model file") from error
    if as_json:
        print_json(asdict(report) | {"ok": report.ok})
    else:
        _show(report)
    sys.exit(not report.ok)


_MOST_NAMED = 4
"""Tensors of an operator that the table names; --json has all."""
_FORMS = {"file": "as it is", "operations": "as operations of the HAL"}


def _show(report: ModelReport) -> None:
    """Print where it runs, and a table for each form and device that has obstacles."""
    for line in (report.summary, *map(str, report.costs), *report.offers):
        print_line(line)
    for (form, device), found in groupby(report.obstacles, lambda o: (o.form, o.device)):
        told = list(found)
        if len(told) == 1 and not (told[0].operator or told[0].tensors or told[0].remedy):
            print_line(f"{_FORMS[form]}, on {device or 'any device'}: {told[0].reason}")
            continue
        print_line(f"\n{_FORMS[form]}, on {device or 'any device'}:")
        rows = [(o.operator or "", _some(o.tensors), o.reason, as_options(o.remedy or "")) for o in told]
        filled = [n for n in range(4) if any(row[n] for row in rows)]
        head = [("operator", "tensors", "reason", "remedy")[n] for n in filled]
        print_table(head, [[row[n] for n in filled] for row in rows], folds=True)
    print_line(f"asked: {', '.join(report.asked) or 'no device'}")


def _some(tensors: Sequence[str]) -> str:
    """Return the first names."""
    return ", ".join([*tensors[:_MOST_NAMED], *["…"] * (len(tensors) > _MOST_NAMED)])


def _sizes(model: Path, words: tuple[str, ...], signature: str | None) -> dict[str, Sizes]:
    """Return the sizes in the values of --shape. Raise as `header_of`, and UsageError."""
    return given_sizes(declared(header_of(model, signature))[0], words) if words else {}
