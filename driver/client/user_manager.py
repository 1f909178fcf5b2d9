"""Starting a device by systemd's manager of the account, which passes nothing of the client on: it is its own child.

A client needs that when it has limits that only privilege resets (`launch.kept`). The launcher binds the device's
socket itself, as no descriptor can be handed on, and forks when it listens: then `systemd-run` returns.
"""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_COMMAND = "systemd-run"
_WITHIN = 20.0  # seconds
_MOST_WORDS = 200  # characters
_OPTIONS = ("--user", "--quiet", "--collect", "--service-type=forking", "--property=OOMPolicy=continue")
"""OOMPolicy: the trial of a model file may end for lack of memory, and the device goes on."""


def absence() -> str:
    """Return why no manager can be asked; "" if one can."""
    from shutil import which

    if not which(_COMMAND):
        return f"{_COMMAND} is not installed"
    folder = _folder()
    if folder is None:
        return "this account has no session folder (XDG_RUNTIME_DIR)"
    path = folder / "systemd/private"
    try:
        return "" if stat.S_ISSOCK(path.stat().st_mode) else f"{path} is no socket"
    except OSError as error:
        return f"no manager listens at {path}: {error.strerror}"


def start(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a launcher, which forks when ready, with this environment alone. Return why it failed; "": it has not."""
    if reason := absence():
        return reason
    variables = [f"{name}={value}" for name, value in environment.items()]
    words = ["/usr/bin/env", "-i", *variables, *command]
    asked = [_COMMAND, *_OPTIONS, "--", *(word.replace("$", "$$") for word in words)]
    own = {"PATH": os.environ.get("PATH", os.defpath), "XDG_RUNTIME_DIR": str(_folder())}
    try:
        done = subprocess.run(asked, env=own, capture_output=True, timeout=_WITHIN, check=False, cwd="/")
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{_COMMAND}: {error}"[:_MOST_WORDS]
    said = " ".join(done.stderr.decode(errors="replace").split())[:_MOST_WORDS]
    return (said or f"{_COMMAND} ended with {done.returncode}") if done.returncode else ""


def _folder() -> Path | None:
    """Return the account's own session folder; `su` keeps another account's variable."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    for path in (*([Path(given)] if given else []), Path(f"/run/user/{os.getuid()}")):
        if path.is_dir() and path.stat().st_uid == os.getuid():
            return path
    return None
