"""Files of the user's with options, as TOML: `~/.config/burst/….toml`."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def configured(path: Path) -> dict[str, Any]:
    """What a file says; nothing when there is none. Raises ValueError with its path."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
