"""What a library says of itself, read in a process that may crash or hang without hurting this one."""

from __future__ import annotations

import json
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from driver.errors import DeviceNotFound, signal_name
from driver.interpreter import executable

SECONDS = 10.0
"""That a library may take to be loaded, and its table to be read."""
_NAME = re.compile(r".+\.so(\.[0-9]+)*", re.DOTALL)
_PROGRAM = Path(__file__).with_name("table.py")
_MOST_WORDS = 300  # characters


class LibraryDescription(NamedTuple):
    """The fields of its table that are no functions. functions: the optional ones that it has."""

    name: str
    version: str
    type: str
    slots: int
    quantum_ns: int
    extensions: tuple[str, ...]
    memory_kinds: tuple[str, ...]
    needs: dict[str, list[str]]
    cache_files: tuple[int, int] | None
    functions: frozenset[str]


def is_library(name: str) -> bool:
    """Return True if a device's name is the path of a shared library: it ends in .so, or in .so and numbers."""
    return _NAME.fullmatch(name) is not None


def absolute(name: str) -> str:
    """Return the path of a library from anywhere, without links. Other names stay as they are."""
    return os.path.realpath(name) if is_library(name) else name


def describe(path: str) -> LibraryDescription:
    """Return the description of the library at this absolute path, made once for each build of it. Raises
    DeviceNotFound.
    """
    return _described(path, build_of(path))


def build_of(path: str) -> tuple[int, ...]:
    """Return what tells this build of a library from others at the same path. Raise DeviceNotFound."""
    try:
        found = Path(path).stat()
    except OSError as error:
        raise DeviceNotFound(f"name={path!r}: there is no such library ({error.strerror}); build it") from error
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


@cache
def _described(path: str, _build: tuple[int, ...]) -> LibraryDescription:
    """Raise DeviceNotFound; then it is read again next time."""
    command = [executable(), "-P", str(_PROGRAM), path]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/")
    try:
        out, words = child.communicate(timeout=SECONDS)
        code = child.returncode
    except subprocess.TimeoutExpired:
        child.kill()
        out, words = child.communicate()
        code = None
    lines = [json.loads(line) for line in out.splitlines() if line.startswith(b'{"')]
    for line in lines:
        if "table" in line:
            return _from_plain(line["table"])
    faults = [line["fault"] for line in lines if "fault" in line]
    during = next((line["during"] for line in reversed(lines) if "during" in line), "starting Python")
    raise DeviceNotFound(f"name={path!r} cannot be a device: {faults[0] if faults else _end(during, code, words)}")


def _from_plain(plain: dict[str, Any]) -> LibraryDescription:
    for name in ("extensions", "memory_kinds"):
        plain[name] = tuple(plain[name])
    files = plain["cache_files"]
    plain |= {"cache_files": tuple(files) if files else None, "functions": frozenset(plain["functions"])}
    return LibraryDescription(**plain)


def _end(during: str, code: int | None, words: bytes) -> str:
    """Return why the program ended without an answer."""
    text = " ".join(words.decode(errors="replace").split())[-_MOST_WORDS:]
    said = f'; its last words: "{text}"' if text else ""
    if code is None:
        return f"{during} did not end within {SECONDS:g} s{said}"
    how = f"with {signal_name(-code)}" if code < 0 else f"with exit status {code}"
    return f"{during} ended the process {how}{said}"
