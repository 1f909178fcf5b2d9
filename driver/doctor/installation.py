"""Checks the packages that the engine needs."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from typing import TYPE_CHECKING

from driver.doctor.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

_NEEDED = {
    "fmq._core": "compiled message queues; nothing runs without them",
    "burst._core": "compiled bursts; only queues work without them",
    "numpy": "arrays",
    "msgpack": "messages between client and device",
    "posix_ipc": "named shared memory",
    "blake3": "checksums of cache files",
    "sqlite3": "the blob store of compilations",
}


def packages() -> Iterator[Finding]:
    """Python, the compiled modules and the dependencies."""
    python = sys.version.split()[0]
    yield Finding("Python", "ok", f"{sys.implementation.name} {python}, {sys.executable}")
    for name, purpose in _NEEDED.items():
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            yield Finding(
                name, "warning", f"cannot be loaded: {error}", purpose, "pip install --force-reinstall burst-engine"
            )
        else:
            yield Finding(name, "ok", _version(name) or str(getattr(module, "__file__", "there")))


def _version(name: str) -> str | None:
    if name == "sqlite3":
        return f"SQLite {importlib.import_module(name).sqlite_version}"
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
