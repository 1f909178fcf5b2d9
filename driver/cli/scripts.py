"""The measurements of bench/, which is beside the packages in a clone of the project, and not in a wheel."""

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
    """One of them."""

    name: str
    question: str

    @property
    def path(self) -> Path:
        """Of its file."""
        return FOLDER / f"{self.name}.py"


def found() -> list[Script]:
    """All that can be run and that ask something; none where there is no such folder."""
    scripts = []
    is_clone = (FOLDER.parent / "pyproject.toml").is_file()
    for path in sorted(FOLDER.glob("*.py")) if is_clone else ():
        text = path.read_text()
        question = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        if question.endswith("?") and "__main__" in text:
            scripts.append(Script(path.stem, question))
    return scripts


def all_of_them() -> list[Script]:
    """The same. Raises UsageError where there are none."""
    if scripts := found():
        return scripts
    raise click.UsageError(
        "SCRIPT: the scripts of bench/ are not in the installed package; run this in a clone of the project, whose "
        "`make .venv/bench` installs what they need. `burst bench` and `burst bench MODEL` need no clone"
    )


def named(name: str) -> Script:
    """One of them, with or without its suffix. Raises UsageError."""
    scripts = {script.name: script for script in all_of_them()}
    stem = name.removesuffix(".py")
    if stem not in scripts:
        raise click.UsageError(
            f"{name!r}: no model file (.tflite, .onnx), and no script of bench/ (--list){did_you_mean(stem, scripts)}"
        )
    return scripts[stem]


def measured(script: Script, plot: Path | None, *, quick: bool) -> tuple[str, Any]:
    """What it prints, and its figures. It tells on stderr how far it is. Raises ClickException when it fails."""
    with tempfile.TemporaryDirectory(prefix="burst-bench-") as folder:
        figures = Path(folder, "figures.json")
        command = [sys.executable, str(script.path), "--json", str(figures)]
        command += ["--quick"] if quick else []
        command += ["--plot", str(plot)] if plot else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise click.ClickException(
                f"{script.name} ended with {done.returncode}; what it needs is in the extra: make .venv/bench"
            )
        return done.stdout, json.loads(figures.read_text())


def check_plot(path: Path) -> None:
    """Raises UsageError for what cannot be drawn."""
    if path.suffix not in _PICTURES:
        raise click.UsageError(f"--plot {path}: pictures are {', '.join(_PICTURES)}; call it {path.stem}.png")
    if find_spec("matplotlib") is None:
        raise click.UsageError("--plot: matplotlib draws it: pip install matplotlib")
