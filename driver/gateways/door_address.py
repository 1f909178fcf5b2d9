"""Where clients find a gateway: at TCP addresses, and at Unix sockets for one account each."""

from __future__ import annotations

import os
import pwd
import re
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from burst.channel import refuse_descriptors
from driver.client.served_sockets import is_dead
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
        """Return the address of a socket's path. Raise DeviceFailed."""
        if not path.startswith("/") or len(os.fsencode(path)) > _LONGEST_PATH:
            raise DeviceFailed(f"{said}: the path of a socket is absolute and has at most {_LONGEST_PATH} bytes")
        return cls(said, path=path, uid=uid)

    @classmethod
    def of_owner(cls, said: str, text: str) -> DoorAddress:
        """PATH, or PATH,owner=NAME for a socket of another account. Raise DeviceFailed."""
        path, _, owner = text.partition(",owner=")
        try:
            uid = pwd.getpwnam(owner).pw_uid if owner else os.getuid()
        except KeyError:
            raise DeviceFailed(f"{said}: there is no account {owner!r}") from None
        return cls.of_path(said, re.sub("^//(?=/)", "", path), uid)

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
        """Return a listening socket. Raise DeviceFailed."""
        try:
            if self.path:
                self.prepare_path()
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                refuse_descriptors(listener)
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

    def refuse_descriptors(self) -> None:
        """Have the kernel refuse descriptors at the path, where a library of this process has opened the socket."""
        for fd in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):  # it was closed meanwhile
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    self._refuse_at(socket.socket(fileno=os.dup(fd)))

    def _refuse_at(self, sock: socket.socket) -> None:
        with sock:
            if sock.family == socket.AF_UNIX and sock.getsockname() == self.path:
                refuse_descriptors(sock)

    def prepare_path(self) -> None:
        """Remove a socket at which no process listens any more. Raise DeviceFailed, OSError."""
        path = Path(self.path)
        folder = path.parent.stat()
        if folder.st_mode & 0o022 and not folder.st_mode & stat.S_ISVTX:
            raise DeviceFailed(f"{self.said}: others may write to {path.parent}; chmod go-w {path.parent}")
        if not os.path.lexists(path):
            return
        if not stat.S_ISSOCK(path.lstat().st_mode) or not is_dead(self.path):
            raise DeviceFailed(f"{self.said}: something is there already; use another path")
        path.unlink()

    def give_path(self) -> None:
        """Give the socket to that account. Raise DeviceFailed, OSError."""
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
        """Remove its socket at the end of a server, where a library has not removed it."""
        if self.path:
            with suppress(OSError):  # it has gone, or this account may not: then the process that made it does
                os.unlink(self.path)
