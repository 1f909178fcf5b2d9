"""The Python that runs devices: this program, if it is one; else one that belongs to it, or that it names.

`sys.executable` is no Python in programs that embed one (uWSGI), and a frozen application is its own. Started as a
device, such a program would begin its own work again.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from typing import TYPE_CHECKING

from driver.errors import DeviceFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

_NAME = re.compile(r"(python|pypy)[\w.-]*", re.IGNORECASE)
REMEDY = "name one by driver.set_executable(path), in whose environment burst-engine is installed"

_given = ""


def set_executable(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> None:
    """Name the Python that runs the devices which this process starts, as `multiprocessing.set_executable` does.

    Programs that embed Python, and frozen applications, call it before the first device is used. burst-engine is
    installed in its environment, of the release that this process has. Devices that run already are used as they are.

    Raise ValueError for what is no absolute path of a program, and for a frozen application itself.
    """
    global _given  # noqa: PLW0603 (of the process, as multiprocessing has it)
    text = os.fsdecode(path)
    if fault := _fault(text):
        raise ValueError(f"path={text!r}: {fault}; give the absolute path of a Python")
    _given = text


def executable() -> str:
    """Return the path of the Python that runs devices. Raise DeviceFailed with the remedy."""
    if _given:
        return _given
    if not getattr(sys, "frozen", False):
        for path in _likely():
            if not _fault(path) and _is_named_python(path):
                return path
    own = "this is a frozen application" if getattr(sys, "frozen", False) else f"sys.executable is {sys.executable!r}"
    raise DeviceFailed(f"no device can be started: {own}, and no Python; {REMEDY}")


def _likely() -> Iterator[str]:
    """Yield the program itself, then those of its environment, as venv and the build lay them out."""
    yield sys.executable or ""
    version = sysconfig.get_python_version()
    folders = [os.path.join(prefix, "bin") for prefix in (sys.prefix, sys.exec_prefix)]
    if sys.prefix == sys.base_prefix:  # else these lack what the environment has
        yield getattr(sys, "_base_executable", "") or ""
        folders += [sysconfig.get_config_var("BINDIR") or "", os.path.join(sys.base_prefix, "bin")]
    for folder in dict.fromkeys(folders):
        yield from (os.path.join(folder, name) for name in (f"python{version}", "python3", "python"))


def _fault(path: str) -> str:
    """Return why that is no program to run; "": it may be one."""
    if not os.path.isabs(path):
        return "it is no absolute path"
    if not os.path.isfile(path):
        return "there is no such file"
    if not os.access(path, os.X_OK):
        return "it is no program that this account may run"
    if getattr(sys, "frozen", False) and sys.executable and os.path.realpath(path) == os.path.realpath(sys.executable):
        return "it is this frozen application, which would start itself"
    return ""


def _is_named_python(path: str) -> bool:
    return any(_NAME.fullmatch(os.path.basename(each)) for each in (path, os.path.realpath(path)))
