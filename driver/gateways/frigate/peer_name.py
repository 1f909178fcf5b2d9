"""Who is at the other end of a connection, as far as the kernel tells: Frigate's protocol itself does not."""

from __future__ import annotations

import re
import socket
import struct
from contextlib import suppress
from pathlib import Path

_TITLE = re.compile(rb"frigate\.detector:([\w.-]{1,40})")


def peer_name(peer: socket.socket) -> str:
    """Return the detector's name in Frigate's configuration, by which Frigate calls its process.

    Else the address of the other machine, or "local" for another program of this one.
    """
    if peer.family != socket.AF_UNIX:
        with suppress(OSError):  # it may have gone already
            return str(peer.getpeername()[0])
        return "gone"
    pid, _, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    with suppress(OSError):  # 0, or a process that has ended
        if title := _TITLE.fullmatch(Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]):
            return title[1].decode()
    return "local"
