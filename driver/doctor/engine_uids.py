"""Checks by which way this machine gives the engines of a served device uids of their own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from driver.engine import sandbox
from driver.finding import Finding
from driver.service import cell_uids, subordinate_uids

if TYPE_CHECKING:
    from collections.abc import Iterator

SYSTEMD = Path("/run/systemd/system")
"""Is there where systemd runs the machine."""


def ways() -> Iterator[Finding]:
    """Report the ways, or what is missing for the one that needs no privileges. Only who serves others needs one."""
    absence, found = subordinate_uids.absence(), list[str]()
    if sandbox.has_capabilities(cell_uids.CAPABILITIES):
        found.append("`burst serve --uids FIRST-LAST`: this account may become others")
    if not absence:
        found.append("`burst serve --uids subuids`: it has subordinate uids")
    if SYSTEMD.is_dir():
        found.append("`burst serve --unit --uids FIRST-LAST`: systemd gives the rights")
    none = f"no way, so those of a device that this account serves would have its uid: {absence}"
    yield Finding("uids for engines", "ok", "; ".join(found) or none)
