"""Where a Chromium without a window is, and how it is started: for whatever looks at a page in a real browser."""

from __future__ import annotations

import shutil

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
REMEDY = "no Chromium: install one (Debian: apt install chromium-headless-shell)"


def program() -> str | None:
    """Its path. None: there is none; REMEDY says what to install."""
    return next(filter(None, map(shutil.which, NAMES)), None)
