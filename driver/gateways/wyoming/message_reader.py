"""Messages of a connection, one at a time, none of which makes this process keep more than it should.

{"type": …, "data_length": n, "payload_length": m}, a line feed, n bytes of JSON, m bytes of sound
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from wyoming.event import Event

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MOST_SOUND = 1 << 20
"""Bytes of the sound of one message, half a minute; a satellite sends 2 KiB."""
MOST_DATA = 1 << 16
"""Bytes of JSON: parsing them holds up the others, by a millisecond."""
COMPLETE_WITHIN = 30.0
"""Seconds for the first message to begin, for the rest of one that has begun, and for an answer to be taken."""


class RefusedMessage(Exception):
    """An error in what a satellite sent. The text is for the satellite."""


class MessageReader:
    """A reader of the messages of one connection."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._is_first = True

    async def read(self) -> Event | None:
        """Return the next message; None at the end of the connection.

        Raise RefusedMessage, and OSError or EOFError for a satellite that has vanished.
        """
        line = await self._line()
        if not line:
            return None
        head = _object(line)
        if not isinstance(data := head.get("data", {}), dict):
            raise RefusedMessage("the data of a message must be a JSON object")
        if count := head.get("data_length"):
            data = {**data, **_object(await self._part("data", count, MOST_DATA))}
        count = head.get("payload_length")
        payload = await self._part("payload", count, MOST_SOUND) if count else None
        if not isinstance(kind := head.get("type"), str):
            raise RefusedMessage("a message has a type, which is a string")
        self._is_first = False
        return Event(kind, data, payload)

    async def _line(self) -> bytes:
        """Read the first line of a message, for which an idle satellite has all the time, once it has sent another."""
        if self._is_first:
            async with _within("nothing was sent"):
                begin = await self._reader.read(1)
        else:
            begin = await self._reader.read(1)
        if not begin or begin == b"\n":
            return begin
        async with _within("a message was not complete"):
            try:
                line = begin + await self._reader.readline()
            except ValueError:
                raise RefusedMessage("the first line of a message is longer than 64 KiB") from None
        if not line.endswith(b"\n"):
            raise EOFError
        return line

    async def _part(self, name: str, count: object, most: int) -> bytes:
        if not isinstance(count, int) or not 0 < count <= most:
            raise RefusedMessage(f"the {name} of a message has {count!r:.40} bytes; at most {most} are taken")
        async with _within("a message was not complete"):
            return await self._reader.readexactly(count)


@asynccontextmanager
async def _within(what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(COMPLETE_WITHIN):
            yield
    except TimeoutError:
        raise RefusedMessage(f"{what} within {COMPLETE_WITHIN:g} s") from None


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RefusedMessage("this is no message of Wyoming: expected an object of JSON")
    return found


__all__ = ["COMPLETE_WITHIN", "MOST_DATA", "MOST_SOUND", "MessageReader", "RefusedMessage"]
