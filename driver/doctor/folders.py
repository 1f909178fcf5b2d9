"""Checks the folders of sockets, compilations and measurements."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from driver.client.discovery import Place, runtime_dir
from driver.doctor.finding import Finding, size
from driver.errors import DeviceFailed
from driver.runtime.cache.folder import default_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

_LONG_NAME = "onnxruntime"
_LITTLE = 100 * 10**6


def runtime() -> Iterator[Finding]:
    """The folder of sockets. Creates it if it is missing, as every client does."""
    why = "no device can be found or started"
    remedy = "set BURST_RUNTIME_DIR to a folder that you own, with a short path and mode 0700"
    try:
        path = runtime_dir()
        Place(path, _LONG_NAME)
    except (DeviceFailed, OSError) as error:
        yield Finding("runtime directory", "warning", str(error), why, remedy)
        return
    mode = path.stat().st_mode & 0o777
    if not os.access(path, os.W_OK | os.X_OK):
        yield Finding("runtime directory", "warning", f"{path}: mode {mode:04o}, not writable", why, remedy)
    else:
        yield Finding("runtime directory", "ok", f"{path}, mode {mode:04o}")


def kept() -> Iterator[Finding]:
    """The folder of compilations, and that of measurements of devices."""
    yield _writable("cache folder", default_folder(), "models are compiled again in every process")
    state = Path("~/.local/state/burst").expanduser()
    yield _writable("state folder", state, "devices are measured again in every process")


def _writable(subject: str, path: Path, why: str) -> Finding:
    there = next(place for place in (path, *path.parents) if place.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding(
            subject, "note", f"{path}: {there} is not writable", why, f"make {there} writable for this account"
        )
    found = os.statvfs(there)
    free = found.f_bavail * found.f_frsize
    words = f"{path}, {'exists' if there == path else 'not created yet'}, {size(free)} free"
    return (
        Finding(subject, "note", words, why, "free some disk space")
        if free < _LITTLE
        else Finding(subject, "ok", words)
    )
