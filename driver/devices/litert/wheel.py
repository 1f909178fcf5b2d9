"""The wheel that the device needs, and whether it is there: what a client asks that starts the device."""

from __future__ import annotations

from importlib.util import find_spec

from driver.plugins import version_of

WHEEL, VERSION = "ai-edge-litert", "2.3.0"


def folder() -> tuple[str, str | None]:
    """Return the version of the installed wheel, or "none", and its folder if it has the pinned version."""
    try:
        found = version_of(WHEEL)
        spec = find_spec("ai_edge_litert")
    except ImportError:
        return "none", None
    if found != VERSION or spec is None or not spec.submodule_search_locations:
        return found, None
    return found, spec.submodule_search_locations[0]


def missing() -> str | None:
    """Return what the device needs and does not find; None: nothing."""
    found, where = folder()
    return None if where else f"the device needs {WHEEL} {VERSION}, and {found} is installed"
