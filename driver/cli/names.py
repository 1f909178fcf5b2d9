"""The DEVICE and MODEL arguments of the command line: validation and shell completion."""

from __future__ import annotations

import ast
import re
import shlex
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from driver.errors import ImportFailed
from driver.importers.files import READERS, Form, load, read_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from driver.importers.header import Header
    from driver.importers.obstacle import Shapes
    from driver.nn import Model


def is_model(name: str) -> bool:
    """Return True for a file name with a suffix that `driver.load` knows."""
    return Path(name).suffix.lower() in READERS


def form_option(function: Callable[..., object]) -> Callable[..., object]:
    """Return the option --form, as `form`."""
    return click.option(
        "--form",
        type=click.Choice(get_args(Form)),
        default="auto",
        show_default=True,
        help="The file as it is, in its own runtime; operations of the HAL; or what each device runs.",
    )(function)


def signature_option(function: Callable[..., object]) -> Callable[..., object]:
    """Return the option --signature, as `signature`."""
    return click.option(
        "--signature", metavar="NAME", help="Entry of a .tflite file that has several. [default: its first subgraph]"
    )(function)


def header_of(path: Path, signature: str | None = None) -> Header:
    """Return the header of a model file. Raise UsageError if it cannot be opened, ImportFailed if it holds no valid
    model.
    """
    with _readable(path):
        return read_header(path, signature)


def loaded(path: Path, shapes: Shapes | None = None, form: Form = "auto", signature: str | None = None) -> Model:
    """Load a model. Raise as `header_of`."""
    with _readable(path):
        return load(path, shapes, form, signature=signature, optional=False)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise click.UsageError(f"MODEL {str(path)!r}: {error.strerror}; pass the path of a model file") from error
    except ImportFailed as error:
        raise click.UsageError(f"MODEL {str(path)!r}: {as_options(str(error))}") from error


_FIXED = re.compile(r"shapes=(\{'.*?\)\})")


def as_options(words: str) -> str:
    """Return the text with --shape where it tells a program to pass shapes={…}."""
    return _FIXED.sub(lambda found: _options(found[1], found[0]), words)


def _options(written: str, instead: str) -> str:
    try:
        shapes = ast.literal_eval(written)
        return " ".join(f"--shape {shlex.quote(name)}={'x'.join(map(str, sizes))}" for name, sizes in shapes.items())
    except (ValueError, SyntaxError):
        return instead
