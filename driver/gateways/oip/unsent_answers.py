"""What gRPC keeps of answers after their calls have ended, and the connections to which it could not send them.

Once it has begun to write an answer to a connection, gRPC keeps all that the client's windows allow it to send until
the kernel has taken that, or the connection has ended. Where the client reads nothing, keepalive finds out after most
of a minute. The library has no call that ends a connection, so its socket is looked up by the peer's address.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import stat
import termios
import threading
import time
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Iterator

_PATIENCE = 1.0  # seconds in which a client takes something that was sent to it before


class _Address(NamedTuple):
    host: str
    port: int


class UnsentAnswers:
    """The clients whose calls were ended before they had read an answer. Any thread."""

    def __init__(self, patience: float = _PATIENCE) -> None:
        self._patience, self._lock = patience, threading.Lock()
        self._unsent: dict[_Address, tuple[int, float]] = {}  # bytes, and since when it is so many

    def note(self, peer: str) -> None:
        """Note that a call of this peer was ended, which gRPC names "ipv4:HOST:PORT". Others than TCP's are left."""
        kind, _, rest = peer.partition(":")
        host, _, port = unquote(rest).rpartition(":")
        if kind in ("ipv4", "ipv6") and port.isdecimal():
            with self._lock:
                self._unsent.setdefault(_Address(_plain(host.strip("[]")), int(port)), (-1, time.monotonic()))

    def hang_up(self) -> int:
        """End the connections of those that take nothing of what was sent to them; return their number.

        Call it now and then.
        """
        with self._lock:
            if not self._unsent:
                return 0
            now, count, left = time.monotonic(), 0, dict[_Address, tuple[int, float]]()
            for address, sock in _connections():
                with sock:
                    before = self._unsent.get(address)
                    if before is None or not (nbytes := unsent_in(sock)):
                        continue
                    if nbytes != before[0]:
                        left[address] = nbytes, now
                    elif now - before[1] < self._patience:
                        left[address] = before
                    else:
                        count += 1
                        with suppress(OSError):  # it has just ended
                            sock.shutdown(socket.SHUT_RDWR)
            self._unsent = left
            return count


def _plain(host: str) -> str:
    """Return an address of IPv4 also where IPv6 has it."""
    with suppress(ValueError):
        found = ip_address(host.partition("%")[0])
        return str((isinstance(found, IPv6Address) and found.ipv4_mapped) or found)
    return host


def _connections() -> Iterator[tuple[_Address, socket.socket]]:
    """Yield the peers of this process's TCP connections, and a socket to close for each."""
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was closed meanwhile
            if stat.S_ISSOCK(os.fstat(int(fd)).st_mode):
                sock = socket.socket(fileno=os.dup(int(fd)))
                if (address := _peer_of(sock)) is None:
                    sock.close()
                else:
                    yield address, sock


def _peer_of(sock: socket.socket) -> _Address | None:
    """Return the peer of a TCP connection; None: it is none, or has ended."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            host, port, *_ = sock.getpeername()
            return _Address(_plain(host), port)
    return None


def unsent_in(sock: socket.socket) -> int:
    """Return how many bytes of a connection its client's machine has not acknowledged."""
    found = array.array("i", [0])
    with suppress(OSError):
        fcntl.ioctl(sock, termios.TIOCOUTQ, found)
    return found[0]
