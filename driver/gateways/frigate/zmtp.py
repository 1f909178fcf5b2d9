"""ZeroMQ's protocol on one connection, ZMTP 3.x without a security mechanism, as a ROUTER socket speaks it.

A library's socket takes whole messages, of as many parts as a client sends, before a program sees the first byte. Here
a message comes part by part: `begin_part` says how long the next one is, and the caller decides whether it is read,
read into memory that is there already, or skipped. What one connection keeps is one buffer, whatever its client sends.

    greeting (64 bytes)  ->  <-  greeting, READY        READY (its kind of socket)  ->
    message: parts, each with flags and a length; the last one without MORE. Commands (PING) may stand between them.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

_MORE, _LONG, _COMMAND = 1, 2, 4
_SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
_GREETING = _SIGNATURE + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_CLIENTS = (b"REQ", b"DEALER")  # what may talk to a ROUTER here
BUFFER = 16384
_LONGEST_COMMAND = 1024
_MOST_PARTS = 64  # of a message
_TURN = 16  # reads after which others have their turn, for a socket that is never empty


class BrokenConnection(Exception):
    """The connection is of no use any more. is_wrong: its peer speaks no ZMTP 3, and has not merely ended."""

    def __init__(self, why: str, *, is_wrong: bool = False) -> None:
        super().__init__(why)
        self.is_wrong = is_wrong


class ZmtpConnection:
    """Server's side. One task reads and writes."""

    def __init__(self, peer: socket.socket) -> None:
        """`peer` does not block; it stays the caller's."""
        self._socket, self._loop = peer, asyncio.get_running_loop()
        self._buffer = memoryview(bytearray(BUFFER))
        self._begin = self._end = 0
        self._left = self._parts = self._reads = 0
        self.has_more = False  #: whether the message has a further part

    # ---- bytes

    async def _fill(self, view: memoryview) -> int:
        self._reads += 1
        if not self._reads % _TURN:
            await asyncio.sleep(0)
        try:
            count = await self._loop.sock_recv_into(self._socket, view)
        except OSError as error:
            raise BrokenConnection(str(error)) from error
        if not count:
            raise BrokenConnection("the connection has ended")
        return count

    async def _exactly(self, count: int) -> bytes:
        """Up to BUFFER bytes."""
        while self._end - self._begin < count:
            if self._begin:
                kept = self._end - self._begin
                self._buffer[:kept] = bytes(self._buffer[self._begin : self._end])
                self._begin, self._end = 0, kept
            self._end += await self._fill(self._buffer[self._end :])
        self._begin += count
        return bytes(self._buffer[self._begin - count : self._begin])

    # ---- the beginning

    async def greet(self) -> None:
        """Exchange greetings. Raise BrokenConnection for a peer that is no client of this protocol."""
        await self._send(_GREETING)
        greeting = await self._exactly(64)
        if greeting[0] != 0xFF or not greeting[9] & 1 or greeting[10] < 3:
            _refuse("it speaks no ZMTP 3")
        if greeting[12:32].rstrip(b"\0") != b"NULL":
            _refuse("it wants a security mechanism; here is none")
        await self._send(_framed(_COMMAND, b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"ROUTER"))
        flags, size = await self._head()
        if not flags & _COMMAND or size > _LONGEST_COMMAND:
            _refuse("it sends messages before it is ready")
        if (kind := _kind_of_socket(await self._exactly(size))) not in _CLIENTS:
            _refuse(f"the peer's socket is {kind[:20]!r}, not REQ or DEALER")

    # ---- messages

    async def _head(self) -> tuple[int, int]:
        """Read the flags and the length of a frame."""
        (flags,) = await self._exactly(1)
        if flags & ~7 or (flags & _COMMAND and flags & _MORE):
            _refuse("unknown flags in a frame")
        size = int.from_bytes(await self._exactly(8 if flags & _LONG else 1), "big")
        return flags, size

    async def begin_message(self, complete: float) -> int:
        """Return the length of the next message's first part. It may be long until that comes; once it has begun, its
        head has `complete` seconds.
        """
        size = None
        await asyncio.sleep(0)  # others have their turn after each message, however many a read has
        while size is None:
            if self._begin == self._end:
                self._begin, self._end = 0, await self._fill(self._buffer)
            async with asyncio.timeout(complete):
                size = await self._part()
        return size

    def has_begun(self) -> bool:
        """Return True if a message is there of which nothing was read yet: no command, as PING is."""
        try:
            return self._begin == self._end and not self._socket.recv(1, socket.MSG_PEEK)[0] & _COMMAND
        except (OSError, IndexError):  # nothing is there, or it has ended
            return False

    async def begin_part(self) -> int:
        """Return the length of the message's next part."""
        while (size := await self._part()) is None:
            pass
        return size

    async def _part(self) -> int | None:
        """Read the head of a part, or a command: None then."""
        flags, size = await self._head()
        if flags & _COMMAND:
            await self._obey(size)
            return None
        self._parts = self._parts + 1 if self.has_more else 1
        if self._parts > _MOST_PARTS:
            _refuse(f"a message of more than {_MOST_PARTS} parts")
        self.has_more, self._left = bool(flags & _MORE), size
        return size

    async def _obey(self, size: int) -> None:
        if size > _LONGEST_COMMAND:
            _refuse(f"a command of {size} bytes")
        command = await self._exactly(size)
        await asyncio.sleep(0)  # a read can have 2,700 of them
        if command.startswith(b"\x04PING"):
            await self._send(_framed(_COMMAND, b"\x04PONG" + command[7:23]))  # behind the name, a time to live
        elif command.startswith(b"\x05ERROR"):
            _refuse("it reports an error")

    async def read(self) -> bytes:
        """Read a part that was begun, of BUFFER bytes at most."""
        count, self._left = self._left, 0
        return await self._exactly(count)

    async def read_into(self, view: memoryview) -> None:
        """Read a part that was begun, of the length of `view`."""
        self._left = 0
        done = min(self._end - self._begin, len(view))
        view[:done] = self._buffer[self._begin : self._begin + done]
        self._begin += done
        while done < len(view):
            done += await self._fill(view[done:])

    async def skip_message(self) -> None:
        """Skip what is left of the message."""
        while True:
            here = min(self._end - self._begin, self._left)
            self._begin, self._left = self._begin + here, self._left - here
            while self._left:
                self._left -= await self._fill(self._buffer[: min(BUFFER, self._left)])
                self._begin = self._end = 0
            if not self.has_more:
                return
            await self.begin_part()

    async def send(self, parts: Sequence[bytes]) -> None:
        """Send a message. Raise BrokenConnection."""
        last = len(parts) - 1
        await self._send(b"".join(_framed(_MORE if n < last else 0, part) for n, part in enumerate(parts)))

    async def _send(self, data: bytes) -> None:
        try:
            await self._loop.sock_sendall(self._socket, data)
        except OSError as error:
            raise BrokenConnection(str(error)) from error


def _refuse(why: str) -> NoReturn:
    raise BrokenConnection(why, is_wrong=True)


def _framed(flags: int, body: bytes) -> bytes:
    if len(body) > 255:
        return struct.pack(">BQ", flags | _LONG, len(body)) + body
    return struct.pack(">BB", flags, len(body)) + body


def _kind_of_socket(ready: bytes) -> bytes:
    """Return the kind of socket that a READY command names. Raise BrokenConnection."""
    if not ready.startswith(b"\x05READY"):
        _refuse("it is not ready")
    at = 6
    while at < len(ready):
        name = ready[at + 1 : at + 1 + ready[at]]
        at += 1 + ready[at]
        size = int.from_bytes(ready[at : at + 4], "big")
        value = ready[at + 4 : at + 4 + size]
        at += 4 + size
        if at > len(ready):
            _refuse("truncated READY command")
        if name.lower() == b"socket-type":
            return value
    return b""
