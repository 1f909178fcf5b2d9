"""Checks that nothing else is called `fmq`, `burst` or `driver`, where a program would look for ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from burst_engine import namesakes
from burst_engine.clone import is_unbuilt, obstacle
from driver.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from driver.finding import State

_SHADOWED = "a program that lies there imports it instead of ours: AttributeError or ImportError"
_HIDDEN = "programs that want it get ours"


def names() -> Iterator[Finding]:
    """Yield what a program in the current folder would import, and what else has these names on the path."""
    found = list(namesakes([Path.cwd()]))
    for namesake in found:
        state: State = "warning" if namesake.shadows else "note"
        why = _SHADOWED if namesake.shadows else _HIDDEN
        yield Finding(f"the name {namesake.name}", state, str(namesake), why, remedy=namesake.remedy)
    if is_unbuilt(here := Path.cwd()):
        yield _clone(here)
    if not found:
        yield Finding("names of packages", "ok", "nothing else is called fmq, burst or driver, here or on the path")


def _clone(here: Path) -> Finding:
    """Return what a program in a clone that is not built imports."""
    if said := obstacle(here):
        found = f"{here} is a clone of Burst, whose sources are not built"
        return Finding(
            "the current folder", "warning", found, "a program that lies there cannot import Burst", remedy=said
        )
    return Finding("the current folder", "ok", f"{here} is a clone; programs there import what is installed")
