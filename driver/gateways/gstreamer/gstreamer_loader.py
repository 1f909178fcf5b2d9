"""Checks GStreamer's element `burstinfer`: its loader, the Python that this takes, the search path, and the element."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from driver.finding import Finding
from driver.gateways.gstreamer.plugin_folder import ELEMENT, FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path("/")  #: of the file system
_WHY = f"GStreamer finds no element {ELEMENT!r}"
_LIBRARY = "gstreamer-1.0/libgstpython.so"
_WITHIN = 20.0  # seconds: GStreamer looks at all its plug-ins when its registry is not there
_VENV = "make the environment of GStreamer's Python: /usr/bin/python3 -m venv --system-site-packages, and activate it"


def element() -> Iterator[Finding]:
    """Return nothing where GStreamer is not installed. Warnings only where GST_PLUGIN_PATH says that the element is
    wanted.
    """
    inspect = shutil.which("gst-inspect-1.0")
    if inspect is None:
        return
    folders = [Path(entry) for entry in os.environ.get("GST_PLUGIN_PATH", "").split(":") if entry]
    is_wanted = any((folder / "python" / f"{ELEMENT}.py").is_file() for folder in folders)
    obstacle = _obstacle(is_wanted=is_wanted)
    if obstacle is None:
        yield _looked_up(inspect)
        return
    found, remedy = obstacle
    yield Finding("GStreamer", "warning" if is_wanted else "note", found, _WHY, remedy=remedy)


def _obstacle(*, is_wanted: bool) -> tuple[str, str] | None:
    """Return the first obstacle, and its remedy."""
    loaders = [found for lib in ("usr/lib", "usr/lib64") for found in (ROOT / lib).glob(f"*/{_LIBRARY}")]
    loaders += [found for lib in ("usr/lib", "usr/lib64") for found in (ROOT / lib).glob(_LIBRARY)]
    if not loaders:
        return "its loader of Python elements is missing", "apt install gstreamer1.0-python3-plugin-loader"
    versions = {match.decode() for match in re.findall(rb"libpython(3\.\d+)", loaders[0].read_bytes())}
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if versions and own not in versions:
        return f"its loader runs Python {', '.join(sorted(versions))}, and Burst is in Python {own}", _VENV
    wanted = re.search(rb"\0(libpython3\.\d+\.so)\0", loaders[0].read_bytes())  # Debian 13: the name for linking
    if wanted and not (loaders[0].parents[1] / wanted[1].decode()).exists():
        return f"its loader looks for {wanted[1].decode()}, which is not installed", "apt install libpython3-dev"
    return _obstacle_around(is_wanted=is_wanted)


def _obstacle_around(*, is_wanted: bool) -> tuple[str, str] | None:
    """Return the first obstacle beside the loader, and its remedy."""
    if find_spec("gi") is None:
        return f"{sys.executable} does not see python3-gi", f"apt install python3-gst-1.0; {_VENV}"
    first = shutil.which("python3")
    if first is None or Path(first).parent != Path(sys.executable).parent:
        return f"its loader takes the packages of {first}, the first python3 in PATH", f"activate {sys.prefix}"
    if not is_wanted:
        return "GST_PLUGIN_PATH does not name the element's folder", f"export GST_PLUGIN_PATH={FOLDER}"
    return None


def _looked_up(inspect: str) -> Finding:
    """Return what GStreamer itself says."""
    asked = subprocess.run(
        [inspect, ELEMENT], capture_output=True, text=True, timeout=_WITHIN, check=False, stdin=subprocess.DEVNULL
    )
    if asked.returncode == 0:
        return Finding("GStreamer", "ok", f"finds the element {ELEMENT}")
    remedy = (
        'python3 -c "from gi.repository import Gst; Gst.init(None); import driver.gateways.gstreamer.element" says '
        "why; GStreamer remembers what it could not load: remove "
        f"{os.environ.get('GST_REGISTRY', '~/.cache/gstreamer-1.0/registry.*.bin')}"
    )
    return Finding("GStreamer", "warning", f"does not load {FOLDER}/python/{ELEMENT}.py", _WHY, remedy=remedy)
