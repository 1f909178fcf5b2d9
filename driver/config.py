"""The account of this process, where its own files lie, and its option files, which are TOML: `~/.config/burst/….toml`.

The cell of another account may run under a uid of its own (`driver.service.cell_uids`), with a home of its own. It
serves its device's account, and errors name the files of that.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import Any

NOWHERE = Path("/dev/null")
"""The home of accounts that have none: nothing can be read there, or kept."""

_device: tuple[int, Path] | None = None
"""The uid and the home of the device's account, in a process that has another uid."""


def move_to(folder: Path) -> None:
    """Make a folder this process's home, before it changes its uid from that of its device's account."""
    global _device  # noqa: PLW0603 (of the process, as its uid is)
    _device = os.getuid(), home()
    os.environ["HOME"] = str(folder)


def device_uid() -> int:
    """Return the uid of the account that serves the device: this process's own, but in such a cell."""
    return _device[0] if _device else os.getuid()


def of_device(path: Path) -> Path:
    """Return the path of a file of this home in the home of the device's account, where it is edited."""
    return _device[1] / path.relative_to(home()) if _device else path


def home() -> Path:
    """Return the account's folder: $HOME, or the one of the table of accounts where HOME is missing, relative or
    another account's, as `su` and `sudo` may leave it.
    """
    given = Path(os.environ.get("HOME", ""))
    return given if given.is_absolute() and _is_own(given) else listed_home() or NOWHERE


def listed_home() -> Path | None:
    """Return what the table of accounts says; None for an account without an entry, or with a home that is no path."""
    try:
        found = Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None
    return found if found.is_absolute() and found != Path("/") else None  # which systemd says of an account of its own


def in_home(text: str) -> Path:
    """Return a path that may begin with "~/"."""
    return home() / text[2:] if text.startswith("~/") else home() if text == "~" else Path(os.path.expanduser(text))


def _is_own(path: Path) -> bool:
    """Return True if a folder is this account's, or will be: a container may give root's to every account."""
    try:
        owner = path.stat().st_uid
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return owner == os.getuid() or (owner == 0 and os.access(path, os.R_OK | os.X_OK))


def configured(path: Path) -> dict[str, Any]:
    """Return a file's options; empty when the file is missing. Raise ValueError with its path."""
    import tomllib

    try:
        return tomllib.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
