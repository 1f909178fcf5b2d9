"""How many clients and bursts a device has, on memory that others may read: who looks at it disturbs nobody.

A reader that sees that the set of bursts has changed asks the device for their traces, and not before. The memory is
the device's own figures for an account, and the device never reads it.
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
    """What the engine writes; its `life` is marked when the engine dies."""

    nbytes: Final = 4096

    def __init__(self, memory: Memory) -> None:
        self.memory, self.life, self._counts = memory, LifePage(), CensusCounts(memory)

    @classmethod
    def create(cls) -> Self:
        """A new one, of nobody."""
        return cls(Memory.create(cls.nbytes))

    def note(self, changes: int, clients: int, bursts: int) -> None:
        """So many are there now, after so many more changes of the set of bursts."""
        words = self._counts.words
        words[1], words[2] = clients, bursts
        words[0] += np.uint64(changes)


class CensusCounts:
    """What is written there, as it is now."""

    def __init__(self, memory: Region) -> None:
        self.words = memory.asarray(np.uint64, 3)

    @property
    def changes(self) -> int:
        """How often a burst has begun or ended."""
        return int(self.words[0])

    @property
    def clients(self) -> int:
        """Connections."""
        return int(self.words[1])

    @property
    def bursts(self) -> int:
        """That are open."""
        return int(self.words[2])
