"""Status messages to systemd: sd_notify(3), a datagram to the socket that NOTIFY_SOCKET names."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""The variables by which systemd configures this."""


def notify(**fields: object) -> None:
    """For example `notify(READY=1, STATUS="…")`. Does nothing without systemd, and ignores errors."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    words = "\n".join(f"{name}={' '.join(str(value).split())}" for name, value in fields.items())
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.connect("\0" + address[1:] if address.startswith("@") else address)
        sock.send(words.encode())


def watchdog_seconds() -> float | None:
    """The longest interval between two WATCHDOG=1 messages that systemd accepts; None if it wants none."""
    usec = os.environ.get("WATCHDOG_USEC", "")
    is_ours = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(usec) / 1e6 if is_ours and usec.isdecimal() and int(usec) else None
