"""A driver in C that was built with sanitizers: what its device process needs, and what they have reported.

A sanitizer's runtime has to be loaded before everything else, so the device starts with the runtimes that the library
names in LD_PRELOAD. They report to files of their own or to the device's log, which the kit reads after each test.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from driver.client.discovery import OwnDevices, own_devices
from driver.devices.library.description import is_library
from driver.engine.sandbox import EXTRA
from driver.errors import DeviceFailed

_RUNTIME = re.compile(r"\(NEEDED\).*\[(lib(?:asan|ubsan|tsan|clang_rt\.[\w.-]*san[\w.-]*)\.so[.\d]*)\]")
_IN_A_LOG = re.compile(r"^\S+: runtime error: .*\n(?: +#\d.*\n)*", re.MULTILINE)
_COMPILERS = ("cc", "gcc", "clang")
_MOST = 2000  # characters of a report
_OPTIONS = {
    # Leaks: a device process ends without freeing. SIGBUS: the engine itself answers for pools that were cut off.
    "ASAN_OPTIONS": "detect_leaks=0:handle_segv=2:handle_sigbus=0:abort_on_error=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=0",
}


def read_without_runtimes() -> None:
    """Have the fields of a library's table read although no sanitizer's runtime was loaded first."""
    os.environ["ASAN_OPTIONS"] = "verify_asan_link_order=0"


class Sanitizers:
    """The reports of sanitizers during one run of the kit. Leaving it removes them."""

    def __init__(self, library: str) -> None:
        """Find the sanitizers of a device. Raise DeviceFailed for one that is no library, or was built without
        them.
        """
        runtimes = _runtimes(library)
        self._folder = TemporaryDirectory(prefix="sanitizers-")
        folder = Path(self._folder.name)
        options = {name: f"{words}:log_path={folder}/{name}" for name, words in _OPTIONS.items()}
        preload = ":".join(sorted(map(_path_of, runtimes), key=lambda path: "asan" not in path))
        self._devices = own_devices(OwnDevices(folder, {**options, "LD_PRELOAD": preload, EXTRA: str(folder)}))
        self._seen: set[str] = set()

    def reports(self) -> str:
        """Return what they have reported since the last call; "" for nothing."""
        folder = Path(self._folder.name)
        texts = [path.read_text(errors="replace") for name in _OPTIONS for path in folder.glob(f"{name}.*")]
        texts += [text for log in folder.glob("*.log") for text in _IN_A_LOG.findall(log.read_text(errors="replace"))]
        found = [text for text in texts if text not in self._seen]
        self._seen.update(found)
        return "\n".join(text.strip()[:_MOST] for text in found)

    def __enter__(self) -> Self:
        self._devices.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._devices.__exit__(None, None, None)
        self._folder.cleanup()


def _runtimes(library: str) -> list[str]:
    if not is_library(library):
        raise DeviceFailed(
            f"--sanitize is for a driver in C: name its library, such as ./libmydevice.so, not {library!r}"
        )
    if shutil.which("readelf") is None:
        raise DeviceFailed("--sanitize needs readelf to see what the library was built with: install binutils")
    done = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=False)  # noqa: S607
    if not (found := _RUNTIME.findall(done.stdout)):
        raise DeviceFailed(
            f"--sanitize: {library} names no sanitizer's runtime; build it with -g -fsanitize=address,undefined "
            "(clang: also -shared-libasan)"
        )
    return found


def _path_of(runtime: str) -> str:
    """Return where a compiler keeps it; its name, for the loader to find, if none does."""
    for compiler in filter(shutil.which, _COMPILERS):
        command = [compiler, f"-print-file-name={runtime}"]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        if Path(said).is_absolute():
            return said
    return runtime
