"""A broadcast as vLLM's `shm_broadcast` does it, written from a description of its algorithm.

One writer, a fixed number of readers, a ring of chunks in shared memory. Each chunk has a flag "written" and one flag
per reader, a byte each. The writer takes the next chunk when it is not written, or when all have read it; readers and
writer wait by polling with sched_yield. It needs the number of readers in advance, and a reader that dies stops the
writer for good. Left out, in the peer's favour: pickling, the check whether a message fits into a chunk, and logging.
"""

from __future__ import annotations

import mmap
import os

CHUNKS = 10  # as many as there by default
_LENGTH = 8


class ChunkRing:
    """The memory, to be made before the processes are forked."""

    def __init__(self, readers: int, most: int) -> None:
        self.readers, self.chunk = readers, -(-(most + _LENGTH) // 64) * 64
        self.flags_at, self.line = CHUNKS * self.chunk, readers + 1
        self.memory = memoryview(mmap.mmap(-1, self.flags_at + CHUNKS * self.line))

    def flags(self, chunk: int) -> memoryview:
        """Of a chunk: written, and one for each reader."""
        at = self.flags_at + chunk * self.line
        return self.memory[at : at + self.line]


class ChunkWriter:
    """The writing side."""

    def __init__(self, ring: ChunkRing) -> None:
        self._ring, self._next = ring, 0

    def send(self, data: bytes) -> None:
        """Waits until all readers have read what the next chunk held."""
        ring, flags = self._ring, self._ring.flags(self._next)
        while flags[0] and sum(flags[1:]) != ring.readers:
            os.sched_yield()
        flags[0] = 0
        at = self._next * ring.chunk
        ring.memory[at : at + _LENGTH] = len(data).to_bytes(_LENGTH, "little")
        ring.memory[at + _LENGTH : at + _LENGTH + len(data)] = data
        flags[1:] = bytes(ring.readers)
        flags[0] = 1
        self._next = (self._next + 1) % CHUNKS


class ChunkReader:
    """A reading side."""

    def __init__(self, ring: ChunkRing, number: int) -> None:
        self._ring, self._number, self._next = ring, number, 0

    def receive(self) -> bytes:
        """Waits until the next chunk is written and not yet read by this reader."""
        ring, flags, mine = self._ring, self._ring.flags(self._next), self._number + 1
        while not flags[0] or flags[mine]:
            os.sched_yield()
        at = self._next * ring.chunk
        n = int.from_bytes(ring.memory[at : at + _LENGTH], "little")
        data = bytes(ring.memory[at + _LENGTH : at + _LENGTH + n])
        flags[mine] = 1
        self._next = (self._next + 1) % CHUNKS
        return data
