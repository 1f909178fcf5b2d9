"""Reads the user's option files, which are TOML: `~/.config/burst/….toml`."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def configured(path: Path) -> dict[str, Any]:
    """Returns a file's options; empty when the file is missing. Raises ValueError with its path."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
