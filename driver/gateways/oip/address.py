"""Where clients find a server: addresses as `burst serve --oip` takes them, and Unix sockets for one account each."""

from __future__ import annotations

import os
import pwd
import re
import socket
import stat
from pathlib import Path
from typing import NamedTuple

from driver.errors import DeviceFailed

_TCP = re.compile(r"(?:\[(.+)\]|([^:\[\]/,]*)):(\d{1,5})")
_LOOPBACK = "127.0.0.1"
_LONGEST_PATH = 107
_HELP = "HOST:PORT, :PORT (this machine alone), unix:PATH, http://HOST:PORT or http+unix:PATH"


class DoorAddress(NamedTuple):
    """One address. host and port, or path and the uid of the account that may open it."""

    is_http: bool
    host: str = ""
    port: int = 0
    path: str = ""
    uid: int = -1

    @property
    def for_grpc(self) -> str:
        """As gRPC takes it."""
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_open(self) -> bool:
        """Whether other machines may reach it."""
        return not self.path and self.host not in (_LOOPBACK, "::1", "localhost")

    @property
    def said(self) -> str:
        """As it was given on the command line, for errors."""
        return f"--oip {self.with_port(0)}"

    def with_port(self, port: int) -> str:
        """For people and clients, with the port that the kernel chose."""
        shown = self._replace(port=port or self.port).for_grpc
        scheme = ("http+" if self.path else "http://") if self.is_http else ""
        return scheme + shown

    def listen(self) -> socket.socket:
        """A listening socket. Raises DeviceFailed."""
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
                listener.listen(64)
                return listener
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            return socket.create_server((self.host, self.port), family=family, backlog=64)
        except OSError as error:
            raise DeviceFailed(f"{self.said}: cannot listen there ({error.strerror or error})") from error

    def prepare_path(self) -> None:
        """Removes a socket at which no process listens any more. Raises DeviceFailed, OSError."""
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
        """The socket becomes that account's. Raises DeviceFailed, OSError."""
        os.chmod(self.path, 0o700, follow_symlinks=False)
        if self.uid != os.getuid():
            try:
                os.chown(self.path, self.uid, -1, follow_symlinks=False)
            except PermissionError:
                os.unlink(self.path)
                raise DeviceFailed(
                    f"--oip {self.with_port(0)}: only root can give a socket to another account; start the server as "
                    "root, or leave out owner="
                ) from None


def door_address(text: str) -> DoorAddress:
    """What an address says. Raises DeviceFailed."""
    rest = text.removeprefix("grpc://")
    is_http = rest.startswith("http")
    if rest.startswith(("unix:", "http+unix:")):
        path, _, owner = rest.split("unix:", 1)[1].partition(",owner=")
        path = re.sub("^//(?=/)", "", path)
        if not path.startswith("/") or len(os.fsencode(path)) > _LONGEST_PATH:
            raise DeviceFailed(f"--oip {text}: the path of a socket is absolute and has at most {_LONGEST_PATH} bytes")
        return DoorAddress(is_http, path=path, uid=_uid(owner, text) if owner else os.getuid())
    match = _TCP.fullmatch(rest.removeprefix("http://").rstrip("/"))
    if not match or int(match[3]) > 65535:
        raise DeviceFailed(f"--oip {text}: give {_HELP}")
    return DoorAddress(is_http, host=match[1] or match[2] or _LOOPBACK, port=int(match[3]))


def _uid(owner: str, text: str) -> int:
    try:
        return pwd.getpwnam(owner).pw_uid
    except KeyError:
        raise DeviceFailed(f"--oip {text}: there is no account {owner!r}") from None
