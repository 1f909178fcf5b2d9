"""What pages show now: the stream puts it there, each page takes the newest at its own speed. All in one event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any

HISTORY = 1200  # points: ten seconds at the highest rate
AHEAD = 2  # updates that are on their way to a page and were not drawn yet


@dataclass(frozen=True, slots=True)
class Update:
    """One frame or block. `point` is kept for a while; of the rest every page gets only the newest."""

    point: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    picture: bytes | None = None


class Board:
    """The newest update, the points before it, and the state of everything else."""

    def __init__(self) -> None:
        self.count = 0  #: updates so far
        self.version = 0  #: of the state
        self.state: dict[str, Any] = {}
        self.latest = Update({})
        self._points: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._viewers: set[Viewer] = set()

    def post(self, update: Update) -> None:
        """Post the next update."""
        self.count += 1
        self.latest = update
        self._points.append(update.point)
        self._tell()

    def say(self, **facts: Any) -> None:
        """Set the state of something from now on."""
        self.version += 1
        self.state = {**self.state, **facts}
        self._tell()

    def since(self, count: int) -> list[dict[str, Any]]:
        """Return the points after so many updates, as far as they are kept."""
        fresh = min(self.count - count, len(self._points))
        return list(self._points)[len(self._points) - fresh :]

    def _tell(self) -> None:
        for viewer in self._viewers:
            viewer.news.set()

    def __len__(self) -> int:
        return len(self._viewers)

    def join(self, viewer: Viewer) -> None:
        """Count one page more."""
        self._viewers.add(viewer)

    def leave(self, viewer: Viewer) -> None:
        """Count one page less."""
        self._viewers.discard(viewer)


class Viewer:
    """One page: what it has got, and what it has drawn of that."""

    def __init__(self, board: Board) -> None:
        self.news = asyncio.Event()
        self.news.set()
        self._board = board
        self._version, self._count, self._on_the_way, self.dropped = -1, 0, 0, 0

    def drew(self) -> None:
        """Note that the page has drawn an update, and send it another one."""
        self._on_the_way = max(0, self._on_the_way - 1)
        self.news.set()

    def state(self) -> dict[str, Any] | None:
        """Return the state, if it is another one than last time."""
        if self._version == self._board.version:
            return None
        self._version = self._board.version
        return {"type": "state", **self._board.state}

    def update(self) -> tuple[dict[str, Any], bytes | None] | None:
        """Return the newest update, if there is one and the page keeps up."""
        board = self._board
        if self._count == board.count or self._on_the_way >= AHEAD:
            return None
        self.dropped += board.count - self._count - 1 if self._count else 0
        points, self._count = board.since(self._count), board.count
        self._on_the_way += 1
        latest = board.latest
        said = {"type": "update", "points": points, "dropped_here": self.dropped, **latest.facts}
        return {**said, "has_picture": latest.picture is not None}, latest.picture
