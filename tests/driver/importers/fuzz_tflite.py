"""Mutants of small .tflite files: each is refused with ImportFailed or is a valid model, fast and in little memory.

    python fuzz_tflite.py --inputs 100000 --seed 7 [--folder DIR]

Prints how many were tried, how many were accepted, and the longest time that one took; a mutant that does anything else
is written to the folder, and ends the run with its traceback. Memory is limited for the whole process.
"""

import argparse
import random
import resource
import struct
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from tflite_cases import CASES
from tflite_writer import Writer

import driver
from driver.importers import tflite

EDGES = [0, 1, 2, 3, 4, 7, 8, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**30, 2**31 - 1, 2**31, 2**32 - 4, 2**32 - 1]
MOST_SECONDS = 2.0
"""Of computing, for one file of a kilobyte or two."""
ROOM = 1 << 30
"""Bytes of address space beyond what the imports took."""


def seeds():
    """The file of every case."""
    files = []
    for write in CASES.values():
        w = Writer()
        files.append(w.file(write(w)))
    return files


class Mutator:
    """Edits that know that a flatbuffer is made of 32-bit offsets and counts, 16-bit vtables, and other numbers."""

    def __init__(self, seed, files):
        self._random, self._files = random.Random(seed), files
        self._edits = [self._flip, self._byte, self._edge, self._nudge, self._copy, self._half, self._cut, self._splice]

    def __call__(self):
        """A mutant: one to four edits of one file."""
        data = bytearray(self._random.choice(self._files))
        for _ in range(self._random.choice((1, 1, 1, 2, 3, 4))):
            self._random.choice(self._edits)(data)
        return bytes(data)

    def _word(self, data):
        """Where a 32-bit word begins."""
        return self._random.randrange(max(len(data) // 4, 1)) * 4

    def _flip(self, data):
        if data:
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)

    def _byte(self, data):
        if data:
            data[self._random.randrange(len(data))] = self._random.randrange(256)

    def _edge(self, data):
        at = self._word(data)
        data[at : at + 4] = struct.pack("<I", self._random.choice(EDGES))

    def _nudge(self, data):
        at = self._word(data)
        if at + 4 <= len(data):
            value = struct.unpack_from("<I", data, at)[0] + self._random.choice((-64, -8, -4, -2, -1, 1, 2, 4, 8, 64))
            data[at : at + 4] = struct.pack("<I", value % 2**32)

    def _copy(self, data):
        at, source = self._word(data), self._word(data)
        data[at : at + 4] = data[source : source + 4]

    def _half(self, data):
        at = self._word(data) + self._random.choice((0, 2))
        data[at : at + 2] = struct.pack("<H", self._random.choice(EDGES) % 2**16)

    def _cut(self, data):
        del data[self._random.randrange(len(data) + 1) :]

    def _splice(self, data):
        other = self._random.choice(self._files)
        at, length = self._word(data), 4 * self._random.randrange(1, 16)
        source = self._word(other)
        data[at : at + length] = other[source : source + length]


def accepts(data):
    """Whether a mutant is a model. Everything but ImportFailed is for the caller to see."""
    try:
        tflite.read(memoryview(data))
    except driver.ImportFailed:
        return False
    return True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path())
    options = parser.parse_args()
    mutate, accepted, longest = Mutator(options.seed, seeds()), 0, 0.0
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    for number in range(options.inputs):
        data, begun = mutate(), time.process_time()
        try:
            accepted += accepts(data)
            longest = max(longest, taken := time.process_time() - begun)
            assert taken < MOST_SECONDS, f"{taken:.1f} s for {len(data)} bytes"
        except BaseException:
            (options.folder / f"mutant-{options.seed}-{number}.tflite").write_bytes(data)
            raise
    print(f"{options.inputs} mutants, {accepted} accepted, longest {longest * 1000:.1f} ms")


if __name__ == "__main__":
    main()
