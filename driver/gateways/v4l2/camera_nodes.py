"""Checks the cameras of this machine: whether there are any, what they are, whether this account may open them, and
which processes have.
"""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from burst_engine.names import install_command
from driver.finding import Finding
from driver.gateways.v4l2.video_device import cameras, holders

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER, PROCESSES, CLASS = Path("/dev"), Path("/proc"), Path("/sys/class/video4linux")
_SENSORS = "unicam", "rp1-cfe", "isi-cap", "imx-media"  # drivers that deliver a sensor's raw values
_NO_CAMERAS = "codec", "-isp", "pispbe", "rpivid", "hantro", "vpu"  # those of processors for video


def nodes() -> Iterator[Finding]:
    """Return each /dev/video*: opens none, as some cameras light up then."""
    there = cameras(FOLDER)
    if not there:
        yield Finding("cameras", "ok", "no /dev/video*; in a container, pass it in: docker run --device /dev/video0")
    for path in there:
        yield _node(path)
    if there and not find_spec("simplejpeg"):
        why = "webcams on USB deliver 1080p at 30 frames a second only as JPEG, which driver.Camera decodes by it"
        yield Finding("cameras", "note", "simplejpeg is not installed", why, remedy=install_command("camera"))


def _node(path: str) -> Finding:
    name, driver, index = _described(Path(path).name)
    known = f"{name} ({driver}): " if name else ""
    if any(word in driver for word in _NO_CAMERAS):
        return Finding(path, "ok", f"{known}a processor for video, and no camera")
    if any(word in driver for word in _SENSORS):
        why = "it delivers a sensor's raw values, which driver.Camera refuses"
        remedy = 'read it through libcamera: docs/howto/camera.md, "A Raspberry Pi"'
        return Finding(path, "note", f"{known}a sensor behind its receiver", why, remedy=remedy)
    if index > 0:
        return Finding(path, "ok", f"{known}a further node of a camera, most often for metadata; use its first one")
    return _opening(path, known)


def _described(node: str) -> tuple[str, str, int]:
    """Name, driver and number among the nodes of one device, as far as the kernel says."""
    folder, name, index = CLASS / node, "", 0
    with suppress(OSError, ValueError):
        name = (folder / "name").read_text().strip()
        index = int((folder / "index").read_text())
    return name, (folder / "device" / "driver").resolve().name if name else "", index


def _opening(path: str, known: str) -> Finding:
    if not os.access(path, os.R_OK | os.W_OK):
        why, remedy = "driver.Camera cannot open it", "usermod -aG video ACCOUNT, then log in again"
        return Finding(path, "note", f"{known}this account may not open it", why, remedy=remedy)
    if using := holders(path, PROCESSES):
        why = "a camera streams to one program at a time; others get EBUSY while it does"
        return Finding(
            path,
            "note",
            f"{known}open in process {', '.join(using)}",
            why,
            remedy="end that program if frames are refused",
        )
    return Finding(path, "ok", f"{known}can be opened, and no process of this account has it open")
