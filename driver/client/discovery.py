"""Finding a device's service, or starting it: once, however many clients come at the same moment.

A service listens on a Unix socket in a directory of the user's own. A client that finds no service there takes the lock
beside it, looks again, binds the socket *itself* and hands it to a new service: from then on all clients' connections
wait in its backlog, and there is no moment at which two services could start or a half-started one be found. A service
without clients takes the same lock before it closes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from burst import PeerDied
from burst.channel import Channel
from driver.devices import usable_class
from driver.devices.library.description import absolute, is_library
from driver.errors import DeviceFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

_BACKLOG = 128
_LOG_LINES, _LOG_BYTES = 6, 2000  # of a log in an error message
# Forks before anything heavy is imported, so that the service is init's child and never our zombie.
_LAUNCH = "import os; os.fork() and os._exit(0)\nfrom driver.service.process import main; main()"


def runtime_dir() -> Path:
    """Where sockets, locks and logs lie: mode 0700, this user's. BURST_RUNTIME_DIR overrides it.

    Raises DeviceFailed when another account could write to it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    default = Path(base, "burst") if base else Path(f"/tmp/burst-{os.getuid()}")
    path = Path(os.environ.get("BURST_RUNTIME_DIR") or default).absolute()
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise DeviceFailed(f"{path} must be a directory of mode 0700 that belongs to you; remove it or change its mode")
    return path


def stem_of(name: str) -> str:
    """What files of a device are called: after its name or, of a library, its last part, and a digest of its path."""
    path = absolute(name)
    last = short_name(path)
    if last != path:
        last += "-" + hashlib.sha256(os.fsencode(path)).hexdigest()[:12]
    return re.sub(r"[^A-Za-z0-9_.-]", "_", last)


def short_name(name: str) -> str:
    """The last part of a library's path; other names as they are."""
    return os.path.basename(name) if is_library(name) else name


class Place:
    """The files of one device name."""

    def __init__(self, directory: Path, name: str, remedy: str = "set BURST_RUNTIME_DIR to a shorter one") -> None:
        """`remedy`: against a path that is too long. Raises DeviceFailed."""
        stem = stem_of(name)
        self.socket, self.lock, self.log = (directory / f"{stem}.{kind}" for kind in ("sock", "lock", "log"))
        if len(os.fsencode(self.socket)) > 107:
            raise DeviceFailed(f"{self.socket}: a socket's path has at most 107 bytes; {remedy}")

    @contextlib.contextmanager
    def locked(self, *, wait: bool = True) -> Iterator[bool]:
        """Yields whether we have the lock; it goes with the process that holds it."""
        with open(self.lock, "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
            else:
                yield True

    def end_of_log(self) -> str:
        """Where the log lies, and its last lines, indented: for the message of a device that did not start."""
        try:
            with open(self.log, "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
                lines = file.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
        except OSError:
            lines = []
        shown = "".join(f"\n    {line}" for line in lines)
        return f"its log is {self.log}" + (f", and ends with{shown}" if shown else ", and is empty")

    def leave(self, listener: socket.socket) -> None:
        """Under the lock: stops listening, and takes the socket's name away unless it is a successor's by now."""
        listener.close()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                probe.connect(str(self.socket))
        except ConnectionRefusedError:
            self.socket.unlink(missing_ok=True)
        except FileNotFoundError:
            pass


def connect(name: str) -> Channel:
    """A connection to the device's service, started when there is none.

    Raises DeviceNotFound, DeviceFailed, and PeerDied when the new service is gone already.
    """
    place = Place(runtime_dir(), name)
    if found := find(place):
        return found
    usable_class(name)  # says what is not installed here, and not in a log
    with place.locked():
        if found := find(place):
            return found
        with listen(place) as listener:
            _start(name, place, listener)
        found = find(place)
    if found is None:
        raise PeerDied(f"device {name!r} ended while it started")
    return found


def find(place: Place) -> Channel | None:
    """A connection to the service that listens there, or None. Raises DeviceFailed when that is another user's."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(str(place.socket))
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        return None
    channel = Channel(sock)
    if channel.peer_uid != os.getuid():
        channel.close()
        raise DeviceFailed(f"{place.socket} belongs to another user; remove it")
    return channel


def listen(place: Place) -> socket.socket:
    """Under the lock: whatever lies there now has no listener."""
    with contextlib.suppress(FileNotFoundError):
        place.socket.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(place.socket))
    listener.listen(_BACKLOG)
    return listener


def environment(directory: Path) -> dict[str, str]:
    """All that a device's processes inherit: the first client must not shape what the others get."""
    threads = str(max(1, (os.cpu_count() or 1) // 2))
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": os.path.expanduser("~"),
        "LANG": "C.UTF-8",
        "BURST_RUNTIME_DIR": str(directory),
        "OPENBLAS_NUM_THREADS": threads,
        "OMP_NUM_THREADS": threads,
    }


def _start(name: str, place: Place, listener: socket.socket) -> None:
    with open(place.log, "wb") as log:
        launcher = subprocess.Popen(
            [sys.executable, "-P", "-c", _LAUNCH, name, str(listener.fileno())],
            pass_fds=[listener.fileno()],
            start_new_session=True,
            cwd="/",
            env=environment(place.socket.parent),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    if launcher.wait():
        raise DeviceFailed(f"device {name!r} did not start; {place.end_of_log()}")
