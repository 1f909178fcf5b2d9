"""Files with a camera's pictures or a microphone's sound; only their owner may read them."""

from __future__ import annotations

import os
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def private(path: Path) -> Path:
    """Put an empty file of mode 0600 there, in place of what was there, for something to be written into it."""
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    return path


def new_folder(parent: Path) -> Path:
    """Make a folder there that is named after the moment."""
    folder = parent / f"{datetime.now():%Y%m%d-%H%M%S-%f}"
    folder.mkdir(mode=0o700, parents=True)
    return folder


def written(path: str) -> str:
    """Return where a file lies, from here, and how large it is."""
    return f"{os.path.relpath(path)}  ({os.path.getsize(path) / 1024:,.0f} KiB)"
