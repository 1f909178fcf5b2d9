"""What the doctor says: one thing that was looked at, and what it means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

State = Literal["ok", "note", "warning"]


@dataclass(frozen=True)
class Finding:
    """state: "warning" when something fails because of it, "note" when something is slower, smaller or not known."""

    subject: str
    state: State
    found: str
    why: str = ""  #: why it matters
    remedy: str = ""


def examined(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """What a check finds, and a note when the system is odder than it knows. Never raises."""
    try:
        yield from check()
    except Exception as error:  # noqa: BLE001 (whatever cannot be read is not known, and no more)
        yield Finding(name, "note", f"unknown: {type(error).__name__}: {error}", "it could not be looked at")


def text_of(path: Path) -> str:
    """What a file of the kernel's says, "unknown" if that cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return "unknown"


def size(nbytes: float) -> str:
    """In the largest unit of which there is one."""
    for unit, many in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= many:
            return f"{nbytes / many:,.1f} {unit}"
    return f"{nbytes:.0f} bytes"
