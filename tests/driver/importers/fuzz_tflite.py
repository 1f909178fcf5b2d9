"""Mutants of small .tflite files: each is refused with ImportFailed or is a valid model, fast and in little memory.

    python fuzz_tflite.py --inputs 100000 --seed 7 [--folder DIR] [--form file]

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

import numpy as np
from header_files import labelled_tflite
from tflite_cases import CASES
from tflite_writer import Writer

import driver
from driver.importers.tflite import reader as tflite
from driver.importers.tflite.file import TfliteFile

EDGES = [0, 1, 2, 3, 4, 7, 8, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**30, 2**31 - 1, 2**31, 2**32 - 4, 2**32 - 1]
MOST_SECONDS = 2.0
"""Of computing, for one file of a few kilobytes."""
SHARE_OF_CONVERTED = 0.2
"""Of mutants; their files are ten times as long as the written ones."""
MOST_CONVERTED, FEW_BYTES = 60_000, 64
ROOM = 1 << 30
"""Bytes of address space beyond what the imports took."""


def written():
    """The file of every case."""
    files = []
    for write in CASES.values():
        w = Writer()
        files.append(w.file(write(w)))
    return files + [labelled_tflite()] * 5


def converted():
    """Those of the vendor's own converter that are not large."""
    files = sorted((Path(__file__).parent / "vendor").glob("*.tflite"))
    return [file.read_bytes() for file in files if file.stat().st_size < MOST_CONVERTED]


def places(data):
    """Where the words of a file lie that are no weights: what is changed in those changes nothing here."""
    file = TfliteFile(memoryview(data))
    weights = [file.data(number) for number in range(len(file._buffers))]
    inside = np.ones(len(data) // 4, bool)
    for array, offset in weights:
        if array is not None and array.nbytes > FEW_BYTES:
            inside[offset // 4 + FEW_BYTES // 8 : (offset + array.nbytes - FEW_BYTES // 2) // 4] = False
    return (np.flatnonzero(inside) * 4).tolist()


class Mutator:
    """Edits that know that a flatbuffer is made of 32-bit offsets and counts, 16-bit vtables, and other numbers."""

    def __init__(self, seed, files, large=()):
        """large: files of which a smaller share of the mutants is made."""
        self._random, self._all = random.Random(seed), [[(f, places(f)) for f in kind] for kind in (files, large)]
        self._files = self._all[0]
        self._edits = [self._flip, self._byte, self._edge, self._nudge, self._copy, self._half, self._cut, self._splice]

    def __call__(self):
        """A mutant: one to four edits of one file."""
        is_large = self._all[1] and self._random.random() < SHARE_OF_CONVERTED
        self._files = self._all[bool(is_large)]
        file, self._places = self._random.choice(self._files)
        data = bytearray(file)
        for _ in range(self._random.choice((1, 1, 1, 2, 3, 4))):
            self._random.choice(self._edits)(data)
        return bytes(data)

    def _word(self, data):
        """Where a 32-bit word begins; what was cut off is looked for no further."""
        return min(self._random.choice(self._places), max(len(data) - 4, 0) // 4 * 4)

    def _near(self, data):
        """A byte of such a word."""
        return min(self._word(data) + self._random.randrange(4), len(data) - 1)

    def _flip(self, data):
        if data:
            data[self._near(data)] ^= 1 << self._random.randrange(8)

    def _byte(self, data):
        if data:
            data[self._near(data)] = self._random.randrange(256)

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
        other, words = self._random.choice(self._files)
        at, length = self._word(data), 4 * self._random.randrange(1, 16)
        source = self._random.choice(words)
        data[at : at + length] = other[source : source + length]


def accepts(data, file=None):
    """Whether a mutant is a model; in file form if `file` is given. Everything but ImportFailed is for the caller."""
    try:
        if file is None:
            tflite.read(memoryview(data))
        else:
            file.write_bytes(data)
            driver.load(file, form="file")
    except driver.ImportFailed:
        return False
    return True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--form", choices=("file", "operations"), default="operations")
    options = parser.parse_args()
    file = options.folder / "mutant.tflite" if options.form == "file" else None
    mutate, accepted, longest = Mutator(options.seed, written(), converted()), 0, 0.0
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    for number in range(options.inputs):
        data, begun = mutate(), time.process_time()
        try:
            accepted += accepts(data, file)
            longest = max(longest, taken := time.process_time() - begun)
            assert taken < MOST_SECONDS, f"{taken:.1f} s for {len(data)} bytes"
        except BaseException:
            (options.folder / f"mutant-{options.seed}-{number}.tflite").write_bytes(data)
            raise
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{options.inputs} mutants, {accepted} accepted, longest {longest * 1000:.1f} ms, at most {most} MB resident")


if __name__ == "__main__":
    main()
