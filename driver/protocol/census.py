"""Counts of a device's clients and bursts, in shared memory: reading them costs the device nothing.

A reader calls for the traces of bursts only when the counts say that the set of bursts has changed. The engine writes
the counts for one account and never reads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from burst import Memory
from fmq import LifePage

if TYPE_CHECKING:
    from typing import Self

    from fmq import Region


class Census:
    """The engine's side. `life` is marked when the engine dies."""

    nbytes: Final = 4096

    def __init__(self, memory: Memory) -> None:
        self.memory, self.life, self._counts = memory, LifePage(), CensusCounts(memory)

    @classmethod
    def create(cls) -> Self:
        return cls(Memory.create(cls.nbytes))

    def note(self, changes: int, clients: int, bursts: int) -> None:
        """Set the counts. `changes`: bursts that have opened or ended since."""
        words = self._counts.words
        words[1], words[2] = clients, bursts
        words[0] += np.uint64(changes)


class CensusCounts:
    """The counts as they are now."""

    def __init__(self, memory: Region) -> None:
        self.words = memory.asarray(np.uint64, 3)

    @property
    def changes(self) -> int:
        """Number of bursts that have opened plus number that have ended."""
        return int(self.words[0])

    @property
    def clients(self) -> int:
        """Connected clients."""
        return int(self.words[1])

    @property
    def bursts(self) -> int:
        """Open bursts."""
        return int(self.words[2])
