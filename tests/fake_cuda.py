"""A libcuda.so.1 without a GPU (tests/devices/c/libcuda.c), its counters, and the faults that tests inject.

A test sees the same words as every process that has loaded the library: `FakeCuda` reads and writes them.
"""

import mmap
import os
import subprocess
import tempfile
from enum import IntEnum
from functools import cache
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).parent / "devices/c/libcuda_kernels.c"
STRICT = ("-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC")
_CALLS_AT, _ROWS_AT, _ROW, _ROWS, _WORDS = 32, 64, 4, 64, 512


class Word(IntEnum):
    """What a word says, or does.

    HOLD_*: while it is not 0, such work waits, as a copy or kernel that never ends. HELD: how much waits so.
    """

    FAIL_CALL = 0
    FAIL_AFTER = 1
    FAIL_CODE = 2
    HOLD_IN = 3
    HOLD_KERNELS = 4
    HOLD_OUT = 5
    LOST = 6
    TOTAL = 7
    DEVICES = 8
    COPIES_IN = 9
    COPIES_OUT = 10
    PAGEABLE = 11
    KERNELS = 12
    HOST_FUNCTIONS = 13
    HELD = 14
    VERSION = 16
    NO_READ_ONLY = 17


class Call(IntEnum):
    """Functions whose calls are counted, and can fail."""

    ANY = 0
    ALLOC = 1
    FREE = 2
    HOST_ALLOC = 3
    REGISTER = 4
    UNREGISTER = 5
    COPY_IN = 6
    COPY_OUT = 7
    LAUNCH = 8
    HOST_FUNC = 9
    STREAM = 10
    CONTEXT = 11
    CREATE = 12
    EXPORT = 13
    IMPORT = 14
    MAP = 15
    SYNCHRONIZE = 16
    QUERY = 17
    EVENT_DESTROY = 18


@cache
def compiled() -> bytes:
    """The library."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "libcuda.so"
        subprocess.run(["cc", *STRICT, "-shared", SOURCE, "-lpthread", "-o", path], check=True)
        return path.read_bytes()


class FakeCuda:
    """The library at `path`."""

    def __init__(self, folder: Path, total: int = 1 << 30, devices: int = 1) -> None:
        self.path = folder / "libcuda.so.1"
        self.path.write_bytes(compiled())
        control = Path(f"{self.path}.control")
        control.write_bytes(bytes(8 * _WORDS))
        with control.open("r+b") as file:
            self._words = np.frombuffer(mmap.mmap(file.fileno(), 8 * _WORDS), np.uint64)
        self[Word.TOTAL], self[Word.DEVICES], self[Word.VERSION] = total, devices, 12040

    def __getitem__(self, word: Word) -> int:
        return int(self._words[word])

    def __setitem__(self, word: Word, value: int) -> None:
        self._words[word] = value

    def calls(self, call: Call) -> int:
        """How often it was called, in all processes."""
        return int(self._words[_CALLS_AT + call])

    def fail(self, call: Call, code: int, after: int = 0) -> None:
        """Has the call fail once with that code, after so many that succeed."""
        self[Word.FAIL_AFTER], self[Word.FAIL_CODE], self[Word.FAIL_CALL] = after, code, call

    @property
    def used(self) -> int:
        """Bytes of the GPU's memory that living processes have."""
        return self._sum(1)

    @property
    def registered(self) -> int:
        """Ranges of memory that living processes have pinned."""
        return self._sum(2)

    @property
    def contexts(self) -> int:
        """Living processes with a context."""
        return self._sum(3)

    @property
    def pids(self) -> set[int]:
        """Of the living processes that have loaded it."""
        rows = self._words[_ROWS_AT : _ROWS_AT + _ROW * _ROWS].reshape(_ROWS, _ROW)
        return {int(row[0]) for row in rows if row[0] and _is_alive(int(row[0]))}

    def _sum(self, column: int) -> int:
        rows = self._words[_ROWS_AT : _ROWS_AT + _ROW * _ROWS].reshape(_ROWS, _ROW)
        return sum(int(row[column]) for row in rows if row[0] and _is_alive(int(row[0])))

    def configure(self) -> None:
        """Writes the option that has Burst load it, into the home of this process and of those that it starts."""
        options = Path(os.environ["HOME"]) / ".config/burst/cuda.toml"
        options.parent.mkdir(parents=True, exist_ok=True)
        options.write_text(f'library = "{self.path}"\n')


def _is_alive(pid: int) -> bool:
    """Whether it runs: one that was killed has nothing any more, also while its parent has not looked."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
