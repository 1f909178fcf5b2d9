"""Plug-ins, known by their entry points: where each is from, and how to install the libraries that it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def distribution_of(entry: EntryPoint) -> str:
    """Return name and version of the distribution that an entry point is from."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown distribution"


def remedy_for(entry: EntryPoint) -> str | None:
    """Return the command that installs the extra of the plug-in's name; None if its distribution has no such extra."""
    if entry.dist is None or entry.name not in (entry.dist.metadata.get_all("Provides-Extra") or ()):
        return None
    return f"pip install '{entry.dist.name}[{entry.name}]'"
