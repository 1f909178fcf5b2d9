"""Checks the place where Frigate's zmq detector looks for `burst serve --frigate`."""

from __future__ import annotations

import os
import socket
import stat
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from driver.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path("/tmp/cache")  #: as Frigate's default, ipc:///tmp/cache/zmq_detector
_NAME, _SUBJECT = "zmq_detector", "socket for Frigate"
_WHY = "Frigate's detector cannot connect, and takes that for frames in which nothing is"


def frigate(folder: Path = FOLDER) -> Iterator[Finding]:
    """Return nothing where neither the extra nor a socket is there: then this machine has no Frigate."""
    path = folder / _NAME
    has_socket, has_extra = os.path.lexists(path), find_spec("cv2") is not None
    if has_socket:
        yield _of_socket(path)
    elif has_extra and not folder.is_dir():
        yield Finding(
            _SUBJECT, "ok", f"no folder {folder}; before burst serve --frigate ipc://{path}: mkdir -m 700 {folder}"
        )
    elif has_extra:
        yield _of_folder(folder)


def _of_folder(folder: Path) -> Finding:
    found = folder.stat()
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        why = "burst serve --frigate makes no socket in a folder in which others could replace it"
        return Finding(_SUBJECT, "note", f"others may write to {folder}", why, remedy=f"chmod go-w {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        remedy = f"run burst serve --frigate as uid {found.st_uid}, or chown the folder"
        return Finding(
            _SUBJECT, "note", f"{folder} is of uid {found.st_uid}", "no socket can be made there", remedy=remedy
        )
    return Finding(_SUBJECT, "ok", f"none in {folder}")


def _of_socket(path: Path) -> Finding:
    found = path.lstat()
    if not stat.S_ISSOCK(found.st_mode):
        return Finding(
            _SUBJECT, "warning", f"{path} is no socket", _WHY, remedy="remove it, and begin burst serve --frigate again"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except PermissionError:
            words = f"{path} is of uid {found.st_uid}, and this is uid {os.geteuid()}"
            remedy = f"run Frigate as root or as uid {found.st_uid}, or burst serve --frigate as Frigate's account"
            return Finding(_SUBJECT, "note", words, "only that account and root can connect", remedy=remedy)
        except OSError as error:
            words = f"{path}: {error.strerror}; its server has gone"
            return Finding(_SUBJECT, "warning", words, _WHY, remedy=f"begin burst serve --frigate ipc://{path} again")
    return Finding(_SUBJECT, "ok", f"a server listens at {path}, of uid {found.st_uid}")
