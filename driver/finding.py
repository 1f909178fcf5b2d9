"""One finding of a check: what was found, why it matters, and the remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

State = Literal["ok", "note", "warning"]


@dataclass(frozen=True)
class Finding:
    """A finding of a check.

    state: "warning" if something fails because of it; "note" if something is slower, limited or unknown.
    """

    subject: str
    state: State
    found: str
    why: str = ""  #: why it matters
    remedy: str = ""


def examined(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Run a check. An exception becomes a note, because a check must not fail on an unusual system. Never raise."""
    try:
        yield from check()
    except Exception as error:  # noqa: BLE001 (a check that fails leaves its subject unknown)
        yield Finding(name, "note", f"unknown: {type(error).__name__}: {error}", "the check failed")


def text_of(path: Path) -> str:
    """Read a file of /proc or /sys; "unknown" if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return "unknown"


def size(nbytes: float) -> str:
    """Format bytes in the largest suitable unit."""
    for unit, many in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= many:
            return f"{nbytes / many:,.1f} {unit}"
    return f"{nbytes:.0f} bytes"
