"""Which application of its account a client belongs to: the one that it declares, else its process's control group.

Accounts are told apart by what the kernel says, applications only help an account to divide its share: a program can
always name another application of its own account, and that gains it nothing from other accounts.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from burst import Malformed
from driver.options import check_application

if TYPE_CHECKING:
    from collections.abc import Sequence

    from burst.channel import Channel

_SO_PEERPIDFD = 77  # since Linux 6.5
_CONTROLLERS = "", "name=systemd", "cpu", "memory"  # "": version 2


def application_of(channel: Channel, declared: Sequence[object]) -> str:
    """Return the name of the client's application; "" for none but its account. Raise InvalidArgument, Malformed."""
    match declared:
        case ():
            return _control_group(channel)
        case (name,):
            check_application(name)
            return str(name)
    raise Malformed(f"hello takes a protocol and an application, and not {1 + len(declared)} arguments")


def control_group_in(text: str) -> str:
    """Return the path in the text of a /proc/PID/cgroup that tells programs apart; "" if all paths are the root."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        found |= dict.fromkeys(controllers.split(","), path)
    return next((path for name in _CONTROLLERS if (path := found.get(name, "/")) != "/"), "")


def _control_group(channel: Channel) -> str:
    """Return the control group of the process that connected; "" if it is unknown, as from another container."""
    try:
        pidfd = _pidfd_of(channel)
        try:
            text = Path(f"/proc/{channel.peer_pid}/cgroup").read_text(errors="backslashreplace")
            has_ended = bool(select.select([pidfd], [], [], 0)[0])  # then the number may be another process's
        finally:
            os.close(pidfd)
        return "" if has_ended else control_group_in(text)
    except (OSError, ValueError):
        return ""


def _pidfd_of(channel: Channel) -> int:
    """Return a descriptor of the process that connected. Raise OSError."""
    with suppress(OSError):
        (pidfd,) = struct.unpack("i", channel.socket.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))
        return int(pidfd)
    return os.pidfd_open(channel.peer_pid)
