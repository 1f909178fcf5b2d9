"""The benchmark scripts in bench/. They are part of a clone of the project, not of a wheel."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import click

from driver.nn.errors import did_you_mean

FOLDER = Path(__file__).parents[2] / "bench"
_PICTURES = ".png", ".svg", ".pdf"


class Script(NamedTuple):
    """A benchmark script, and the question that it answers."""

    name: str
    question: str

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.py"


def found() -> list[Script]:
    """All benchmark scripts: programs whose docstring begins with a question. Empty outside a clone."""
    scripts = []
    is_clone = (FOLDER.parent / "pyproject.toml").is_file()
    for path in sorted(FOLDER.glob("*.py")) if is_clone else ():
        text = path.read_text()
        question = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        if question.endswith("?") and "__main__" in text:
            scripts.append(Script(path.stem, question))
    return scripts


def all_of_them() -> list[Script]:
    """The same as `found`. Raises UsageError outside a clone."""
    if scripts := found():
        return scripts
    raise click.UsageError(
        "SCRIPT: the installed package does not contain the scripts of bench/; run this in a clone of the project, "
        "after `make .venv/bench`. `burst bench` and `burst bench MODEL` need no clone"
    )


def named(name: str) -> Script:
    """Finds a script by its name, with or without .py. Raises UsageError."""
    scripts = {script.name: script for script in all_of_them()}
    stem = name.removesuffix(".py")
    if stem not in scripts:
        raise click.UsageError(
            f"{name!r}: neither a model file (.tflite, .onnx) nor a script of bench/ (see --list)"
            f"{did_you_mean(stem, scripts)}"
        )
    return scripts[stem]


def measured(script: Script, plot: Path | None, *, quick: bool) -> tuple[str, Any]:
    """Runs a script; returns its output and figures. Its progress goes to stderr. Raises ClickException on failure."""
    with tempfile.TemporaryDirectory(prefix="burst-bench-") as folder:
        figures = Path(folder, "figures.json")
        command = [sys.executable, str(script.path), "--json", str(figures)]
        command += ["--quick"] if quick else []
        command += ["--plot", str(plot)] if plot else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise click.ClickException(
                f"{script.name} exited with {done.returncode}; `make .venv/bench` installs what the scripts need"
            )
        return done.stdout, json.loads(figures.read_text())


def check_plot(path: Path) -> None:
    """Raises UsageError for an unknown image format, or without matplotlib."""
    if path.suffix not in _PICTURES:
        raise click.UsageError(
            f"--plot {path}: unsupported format; use {', '.join(_PICTURES)}, for example {path.stem}.png"
        )
    if find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install matplotlib")
