"""Checks the cameras of this machine: whether there are any, whether this account may open them, and who has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from driver.doctor.finding import Finding
from driver.gateways.v4l2.video_device import cameras, holders

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER, PROCESSES = Path("/dev"), Path("/proc")


def nodes() -> Iterator[Finding]:
    """Each /dev/video*: opens none, as some cameras light up then."""
    there = cameras(FOLDER)
    if not there:
        yield Finding("cameras", "ok", "no /dev/video*; in a container, pass it in: docker run --device /dev/video0")
    for path in there:
        yield _node(path)


def _node(path: str) -> Finding:
    if not os.access(path, os.R_OK | os.W_OK):
        why, remedy = "driver.Camera cannot open it", "usermod -aG video ACCOUNT, then log in again"
        return Finding(path, "note", "this account may not open it", why, remedy)
    if using := holders(path, PROCESSES):
        why = "a camera streams to one program at a time; others get EBUSY while it does"
        return Finding(
            path, "note", f"open in process {', '.join(using)}", why, "end that program if frames are refused"
        )
    return Finding(path, "ok", "can be opened, and no process of this account has it open")
