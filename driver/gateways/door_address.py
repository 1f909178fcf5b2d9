"""Where clients find a gateway: at TCP addresses, and at Unix sockets for one account each."""

from __future__ import annotations

import os
import re
import socket
import stat
from pathlib import Path
from typing import NamedTuple

from driver.errors import DeviceFailed

_TCP = re.compile(r"(?:\[(.+)\]|([^:\[\]/]*)):(\d{1,5})/?")
_LOOPBACK = "127.0.0.1"
_LONGEST_PATH = 107
_BACKLOG = 64


class DoorAddress(NamedTuple):
    """One address. host and port, or path and the uid of the account that may open it.

    said: the option and the address as they were given, for errors.
    """

    said: str
    host: str = ""
    port: int = 0
    path: str = ""
    uid: int = -1

    @classmethod
    def of_tcp(cls, said: str, text: str) -> DoorAddress | None:
        """HOST:PORT or [HOST]:PORT; :PORT is for this machine alone. None: `text` is neither."""
        match = _TCP.fullmatch(text)
        if not match or int(match[3]) > 65535:
            return None
        return cls(said, host=match[1] or match[2] or _LOOPBACK, port=int(match[3]))

    @classmethod
    def of_path(cls, said: str, path: str, uid: int) -> DoorAddress:
        """Return the address of a socket's path. Raises DeviceFailed."""
        if not path.startswith("/") or len(os.fsencode(path)) > _LONGEST_PATH:
            raise DeviceFailed(f"{said}: the path of a socket is absolute and has at most {_LONGEST_PATH} bytes")
        return cls(said, path=path, uid=uid)

    @property
    def place(self) -> str:
        """HOST:PORT, or unix:PATH, as gRPC takes it."""
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_open(self) -> bool:
        """True if other machines may reach it."""
        return not self.path and self.host not in (_LOOPBACK, "::1", "localhost")

    def listen(self) -> socket.socket:
        """Return a listening socket. Raises DeviceFailed."""
        try:
            if self.path:
                self.prepare_path()
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                before = os.umask(0o077)
                try:
                    listener.bind(self.path)
                finally:
                    os.umask(before)
                self.give_path()
                listener.listen(_BACKLOG)
                return listener
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            return self._tcp_listener(family)
        except OSError as error:
            words = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror  # of getaddrinfo
            raise DeviceFailed(f"{self.said}: cannot listen there ({words}); use another address") from error

    def _tcp_listener(self, family: socket.AddressFamily) -> socket.socket:
        """Set TCP_NODELAY, which connections inherit. asyncio does not set it on connections of a listener without a
        protocol number, as this one: the second part of an answer waited 40 ms for an acknowledgement.
        """
        listener = socket.create_server((self.host, self.port), family=family, backlog=_BACKLOG)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener

    def prepare_path(self) -> None:
        """Remove a socket at which no process listens any more. Raises DeviceFailed, OSError."""
        path = Path(self.path)
        folder = path.parent.stat()
        if folder.st_mode & 0o022 and not folder.st_mode & stat.S_ISVTX:
            raise DeviceFailed(f"{self.said}: others may write to {path.parent}; chmod go-w {path.parent}")
        if not os.path.lexists(path):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if not stat.S_ISSOCK(path.lstat().st_mode) or probe.connect_ex(self.path) == 0:
                raise DeviceFailed(f"{self.said}: something is there already; use another path")
        path.unlink()

    def give_path(self) -> None:
        """Give the socket to that account. Raises DeviceFailed, OSError."""
        os.chmod(self.path, 0o700, follow_symlinks=False)
        if self.uid != os.getuid():
            try:
                os.chown(self.path, self.uid, -1, follow_symlinks=False)
            except PermissionError:
                os.unlink(self.path)
                raise DeviceFailed(
                    f"{self.said}: only root can give a socket to another account; start the server as root, or leave "
                    "out owner="
                ) from None

    def remove(self) -> None:
        """At the end of a server: its socket goes, where a library has not removed it."""
        if self.path and os.path.lexists(self.path):
            os.unlink(self.path)
