"""The variables below which every Python has the hook: what `burst exec` adds to a program's environment."""

from __future__ import annotations

import os
import re
import shutil
from importlib.resources import files
from typing import TYPE_CHECKING

from driver.dropin.hook import DEVICE, DROPINS, SWITCH
from driver.dropin.report import REPORT
from fmq.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

RUNTIMES = tuple(dict.fromkeys(name for name, _ in DROPINS.values()))
"""The runtimes whose classes are replaced."""

STARTUP = str(files("driver.dropin") / "startup")
"""The folder whose sitecustomize installs the hook."""


def environment_of_program(
    device: str | None = None, report: Path | None = None, only: str | None = None
) -> dict[str, str]:
    """Return this process's environment as a program gets it whose models are to run in a device.

    `device`: None: the one of each runtime. `report`: the file to which each process adds what ran where; it is there.
    `only`: the one runtime to replace.
    """
    environment = dict(os.environ)
    before = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place and place != STARTUP]
    environment["PYTHONPATH"] = os.pathsep.join([STARTUP, *before])
    environment[SWITCH] = f"{__version__} {only or ','.join(RUNTIMES)}"
    for name, value in ((DEVICE, device), (REPORT, report and str(report.absolute()))):
        environment.pop(name, None)
        if value:
            environment[name] = value
    return environment


def option_against_hook(command: Sequence[str]) -> str:
    """Return the option by which the Python of a command starts without the hook: "-E", "-I" or "-S".

    "" if it has none of them, or if the command is neither a Python nor a script of one.
    """
    words = [*command]
    if not _is_python(words[0]):
        words = _interpreter_of(words[0])
    return next((f"-{letter}" for letter in _flags(words) if letter in "EIS"), "") if words else ""


def _is_python(path: str) -> bool:
    return re.fullmatch(r"(python|pypy)[\d.]*t?", os.path.basename(path)) is not None


def _interpreter_of(name: str) -> list[str]:
    """Return the Python and its options in the first line of a script; nothing if there is none."""
    try:
        with open(shutil.which(name) or name, "rb") as file:
            line = file.readline(1024)
    except OSError:
        return []
    words = os.fsdecode(line[2:]).split() if line.startswith(b"#!") else []
    if words and os.path.basename(words[0]) == "env":
        words = words[2:] if words[1:2] == ["-S"] else words[1:]
    return words if words and _is_python(words[0]) else []


def _flags(words: Sequence[str]) -> Iterator[str]:
    """Yield the letters of a Python's options, up to its program."""
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("-") or word in {"-", "--"}:
            return
        if word.startswith("--"):
            continue
        for n, letter in enumerate(word[1:], 2):
            yield letter
            if letter in "cm":
                return
            if letter in "WX":
                if n == len(word):
                    next(rest, None)
                break
