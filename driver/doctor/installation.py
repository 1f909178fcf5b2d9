"""The packages that the engine is made of."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from typing import TYPE_CHECKING

from driver.doctor.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

_NEEDED = {
    "fmq._core": "the compiled queue, without which nothing runs",
    "burst._core": "the compiled bursts, without which there is only the queue",
    "numpy": "arrays",
    "msgpack": "messages between client and device",
    "posix_ipc": "shared memory that has a name",
    "blake3": "cache files are compared by it",
    "sqlite3": "the blob store is a file of SQLite's",
}


def packages() -> Iterator[Finding]:
    """Python, the compiled part and what we depend on."""
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
