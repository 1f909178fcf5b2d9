"""Where a device keeps its records: those of its own account, and apart from them those of each account with a cell.

A process keeps no other of these folders in its sandbox, so what takes an engine over cannot forge or delete what
another account's engine believes, nor hold the lock of its folder.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from driver.config import in_home

if TYPE_CHECKING:
    from pathlib import Path

STATE = "~/.local/state/burst"
_OF_ACCOUNTS = "~/.local/state/burst-accounts"

_own = STATE


def keep_for(account: int) -> None:
    """Keep the records of this process, and of what it forks, in the folder of another account's cell."""
    global _own  # noqa: PLW0603 (of the process, as its account is)
    _own = f"{_OF_ACCOUNTS}/{account}"


def folder() -> Path:
    """Return the folder of this process's records."""
    return in_home(_own)


def made() -> Path:
    """Return it, made if it is missing and can be made."""
    return _made(folder())


def made_for_all() -> Path:
    """Return the folder above those of the accounts with cells, likewise."""
    return _made(in_home(_OF_ACCOUNTS))


def _made(path: Path) -> Path:
    with suppress(OSError):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path
