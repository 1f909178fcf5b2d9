"""Mutants of small .tflite files: each is refused with ImportFailed or is a valid model, fast and in little memory.

    python fuzz_tflite.py --inputs 100000 --seed 7 [--folder DIR] [--form file]

Prints how many were tried, how many were accepted, and the longest time that one took; a mutant that does anything else
is written to the folder, and ends the run with its traceback. Memory is limited for the whole process.
"""

import argparse
import os
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
from driver.formats.flatbuffer import ColumnBytes, root_column
from driver.formats.tflite_schema import FIELDS
from driver.importers.tflite import reader as tflite
from driver.importers.tflite.file import TfliteFile

EDGES = [0, 1, 2, 3, 4, 7, 8, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**30, 2**31 - 1, 2**31, 2**32 - 4, 2**32 - 1]
MOST_SECONDS = 2.0
"""Of computing, for one file of a few kilobytes."""
SHARE_OF_CONVERTED = 0.2
"""Of mutants; their files are ten times as long as the written ones."""
MOST_CONVERTED, FEW_BYTES = 60_000, 64
MOST_CODES, MOST_OPTIONS = 212, 130
"""Beyond the schema's."""
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
    buffers = root_column(ColumnBytes(memoryview(data)), FIELDS["Model"]).counts("buffers")
    weights = [file.data(number) for number in range(buffers[0])]
    inside = np.ones(len(data) // 4, bool)
    for array, offset in weights:
        if array is not None and array.nbytes > FEW_BYTES:
            inside[offset // 4 + FEW_BYTES // 8 : (offset + array.nbytes - FEW_BYTES // 2) // 4] = False
    return (np.flatnonzero(inside) * 4).tolist()


def numbers(data):
    """Where the numbers of a file lie whose meaning is known: (places, bytes of each, what else each may be)."""
    model = root_column(ColumnBytes(memoryview(data)), FIELDS["Model"])
    codes = model.tables("operator_codes", FIELDS["OperatorCode"])
    graphs = model.tables("subgraphs", FIELDS["SubGraph"])
    tensors, operators = graphs.tables("tensors", FIELDS["Tensor"]), graphs.tables("operators", FIELDS["Operator"])
    found = [
        (codes.field("builtin_code"), 4, range(MOST_CODES)),
        (codes.field("deprecated_builtin_code"), 1, range(128)),
        (codes.field("version"), 4, range(12)),
        (operators.field("opcode_index"), 4, range(len(codes) + 1)),
        (operators.field("builtin_options_type"), 1, range(MOST_OPTIONS)),
        (tensors.field("type"), 1, range(24)),
        (tensors.field("buffer"), 4, range(len(tensors) + 2)),
        (tensors.field("is_variable"), 1, range(2)),
        (_elements(tensors, "shape"), 4, EDGES),
        (_elements(operators, "inputs"), 4, range(-2, len(tensors) + 1)),
        (_elements(operators, "outputs"), 4, range(-1, len(tensors) + 1)),
    ]
    return [(kept.tolist(), size, values) for where, size, values in found if (kept := where[where > 0]).size]


def _elements(tables, name):
    """Where the elements of the vectors of 32 bits in that field lie."""
    pairs = zip(tables.targets(name), tables.counts(name), strict=True)
    return np.concatenate([place + 4 + 4 * np.arange(count) for place, count in pairs] or [np.zeros(0, np.int64)])


class Mutator:
    """Edits that know that a flatbuffer is made of 32-bit offsets and counts, 16-bit vtables, and other numbers."""

    def __init__(self, seed, files, large=(), where=places):
        """large: files of which a smaller share of the mutants is made. where: gives the places of a file's words."""
        self._random, self._all = random.Random(seed), [[(f, where(f)) for f in kind] for kind in (files, large)]
        self._files = self._all[0]
        self._numbers = []
        self._edits = [self._flip, self._byte, self._edge, self._nudge, self._copy, self._half, self._cut, self._splice]

    def __call__(self):
        """A mutant: one to four edits of one file."""
        is_large = self._all[1] and self._random.random() < SHARE_OF_CONVERTED
        self._files = self._all[bool(is_large)]
        return self.edited(*self._random.choice(self._files), self._random)

    def edited(self, file, where, pick, known=()):
        """One to four edits of that file, as the random numbers of `pick` have it. `where`: its `places`. `known`: its
        `numbers`, of which half of the edits are, if there are any.
        """
        self._random, self._places, self._numbers = pick, where, known
        data = bytearray(file)
        for _ in range(pick.choice((1, 1, 1, 2, 3, 4))):
            edit = self._number if known and pick.random() < 0.5 else pick.choice(self._edits)
            edit(data)
        return bytes(data)

    def _number(self, data):
        where, size, values = self._random.choice(self._numbers)
        at, value = self._random.choice(where), self._random.choice(values)
        data[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")

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
            os.utime(file, (0, 0))  # of a file that was written just now, a copy waits for the next tick of its clock
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
