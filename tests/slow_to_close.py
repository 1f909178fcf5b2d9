"""A descriptor that takes long to close, as a hostile peer would send one."""

import contextlib
import os
import socket
import struct
import threading
from pathlib import Path

from waiting import until

LINGERS = """
import os, socket, struct, threading

def lingering():
    with socket.create_server(("127.0.0.1", 0)) as server:
        slow = socket.create_connection(server.getsockname())
        unread, _ = server.accept()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
    slow.setblocking(False)
    try:
        while slow.send(bytes(1 << 20)):
            pass
    except BlockingIOError:
        return slow, unread
"""
"""For the program of another account: `lingering` returns such a socket, and its other end."""


class SlowToClose:
    """A socket that lingers for an hour over what its other end does not read."""

    def __init__(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._socket = socket.create_connection(server.getsockname())
            self._unread, _ = server.accept()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
        self._socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.send(bytes(2**20))
        self._socket.setblocking(True)

    def fileno(self):
        return self._socket.fileno()

    def leave(self):
        """Closes it here, in a thread: this copy or the one that was sent is the last.

        Returns when no child that is forked from now on gets a copy, which would linger before its first instruction.
        """
        fd = self._socket.detach()
        link = Path(f"/proc/self/fd/{fd}")
        here = link.readlink()

        def is_gone():
            try:
                return link.readlink() != here
            except FileNotFoundError:
                return True

        threading.Thread(target=os.close, args=(fd,), daemon=True).start()
        until(is_gone)

    def close(self):
        """Ends the lingering."""
        self._unread.close()

    __del__ = close  # of a test that failed: the copy here would be closed next
