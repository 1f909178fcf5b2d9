"""Plug-ins, known by their entry points: where each is from, and how to install the libraries that it needs.

importlib.metadata takes 15 ms to load, and each of a device's processes would wait for it: what it is asked for most is
found here without it, in the folders that installers make of distributions.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from burst_engine.names import DISTRIBUTION, install_command

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_INFO = ".dist-info"


def distribution_of(entry: EntryPoint) -> str:
    """Return name and version of the distribution that an entry point is from."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown distribution"


def remedy_for(entry: EntryPoint) -> str | None:
    """Return the command that installs the extra of the plug-in's name; None if its distribution has no such extra."""
    if entry.dist is None or entry.name not in (entry.dist.metadata.get_all("Provides-Extra") or ()):
        return None
    ours = entry.dist.name == DISTRIBUTION
    return install_command(entry.name) if ours else f"pip install '{entry.dist.name}[{entry.name}]'"


def version_of(distribution: str) -> str:
    """Return the version of an installed distribution, without importing it; "none" where it is not installed."""
    if info := _folder_of(distribution):
        return info.name[: -len(_INFO)].partition("-")[2]
    from importlib import metadata  # for what was installed in another way

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


def own_entry(distribution: str, group: str, name: str) -> str | None:
    """Return the value of an entry point of that distribution, "module:attribute"; None: it is not found so."""
    if (info := _folder_of(distribution)) is None:
        return None
    with suppress(OSError):
        _, _, there = (info / "entry_points.txt").read_text("utf-8").partition(f"[{group}]\n")
        if found := re.search(rf"^{re.escape(name)} *= *(\S+)$", there.partition("\n[")[0], re.MULTILINE):
            return found[1]
    return None


def _folder_of(distribution: str) -> Path | None:
    stem = re.sub(r"[-_.]+", "_", distribution).lower() + "-"
    for folder in sys.path:
        with suppress(OSError):  # a folder that is not there, or an archive
            for name in os.listdir(folder or "."):
                if name.endswith(_INFO) and name.lower().startswith(stem):
                    return Path(folder, name)
    return None
