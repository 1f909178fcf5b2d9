"""What the kernel tells about the processes of devices and clients."""

from __future__ import annotations

import time
from pathlib import PurePath

import psutil

_PSS_EVERY = 10.0  # seconds: to add up a process's pages keeps it from mapping others meanwhile


def program_of(pid: int) -> str:
    """What a process runs, in a word: a script or a module in place of its interpreter. Empty when it is not seen."""
    try:
        words = psutil.Process(pid).cmdline()
    except (psutil.Error, OSError, ValueError, OverflowError):
        return ""
    return "".join(filter(str.isprintable, _named(words)))


def _named(words: list[str]) -> str:
    name = PurePath(words[0]).name if words else ""
    if not name.startswith("python"):
        return name
    for word, following in zip(words[1:], [*words[2:], ""], strict=True):
        if word in {"-m", "-c"}:
            return following if word == "-m" else f"{name} -c"
        if not word.startswith("-"):
            return PurePath(word).name
    return name


class Processes:
    """The two of a device. What is not seen from here, as in another container, is None."""

    def __init__(self, service: int, engine: int) -> None:
        self._all = _family(service, engine)
        self._pss: int | None = None
        self._pss_at = float("-inf")

    def cpu_seconds(self) -> float | None:
        """That they have computed, all together."""
        try:
            times = [process.cpu_times() for process in self._all]
        except psutil.Error:
            return None
        return sum(t.user + t.system for t in times) if times else None

    def rss(self) -> int | None:
        """Bytes in memory."""
        try:
            return sum(process.memory_info().rss for process in self._all) or None
        except psutil.Error:
            return None

    def pss(self) -> int | None:
        """Bytes, less what others share; at most ten seconds old."""
        if time.monotonic() - self._pss_at > _PSS_EVERY:
            self._pss_at = time.monotonic()
            try:
                self._pss = sum(process.memory_full_info().pss for process in self._all) or None
            except psutil.Error:  # of another account
                self._pss = None
        return self._pss


def _family(service: int, engine: int) -> list[psutil.Process]:
    """An engine is its service's child: where that does not hold, the numbers mean other processes here."""
    try:
        parent, child = psutil.Process(service), psutil.Process(engine)
        return [parent, child] if child.ppid() == service else []
    except (psutil.Error, ValueError, OverflowError):
        return []
