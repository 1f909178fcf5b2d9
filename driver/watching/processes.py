"""Reads from the kernel the program, CPU time and memory of devices and clients."""

from __future__ import annotations

import time
from pathlib import PurePath

import psutil

_PSS_EVERY = 10.0  # seconds: to add up a process's pages keeps it from mapping others meanwhile


def program_of(pid: int) -> str:
    """The program of a process: the script or module instead of the interpreter. Empty if it is not visible."""
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
    """The two processes of a device. Figures are None if they are not visible, as in another container."""

    def __init__(self, service: int, engine: int) -> None:
        self._all = _family(service, engine)
        self._pss: int | None = None
        self._pss_at = float("-inf")

    def cpu_seconds(self) -> float | None:
        """CPU time of both, in seconds."""
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
        """Proportional share of memory in bytes; at most ten seconds old."""
        if time.monotonic() - self._pss_at > _PSS_EVERY:
            self._pss_at = time.monotonic()
            try:
                self._pss = sum(process.memory_full_info().pss for process in self._all) or None
            except psutil.Error:  # of another account
                self._pss = None
        return self._pss


def _family(service: int, engine: int) -> list[psutil.Process]:
    """Both processes, if the engine is the service's child; else the pids mean other processes in this namespace."""
    try:
        parent, child = psutil.Process(service), psutil.Process(engine)
        return [parent, child] if child.ppid() == service else []
    except (psutil.Error, ValueError, OverflowError):
        return []
