"""Memory that no process can write any more."""

import fcntl
import gc
import mmap
import os
import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest

from burst import Memory
from burst.freezing import FROZEN
from burst.memory import frozen_memory

DATA = np.arange(5000, dtype=np.int32)


@pytest.fixture(params=["array", "bytes", "path", "fill"])
def frozen(request, tmp_path):
    """From each source."""
    if request.param == "fill":
        return Memory.frozen_by(DATA.nbytes, lambda room: np.copyto(room.view(np.int32), DATA))
    (tmp_path / "data").write_bytes(DATA)
    return Memory.frozen({"array": DATA, "bytes": DATA.tobytes(), "path": tmp_path / "data"}[request.param])


def test_what_is_in_it(frozen):
    """The bytes of its source, in arrays that cannot be written."""
    assert frozen.is_frozen
    array = frozen.asarray(np.int32)
    assert (array == DATA).all()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_nobody_can_write_it(frozen):
    """Not through a descriptor that is opened again, and not through a mapping: the kernel refuses both."""
    assert fcntl.fcntl(frozen.fd, fcntl.F_GET_SEALS) & FROZEN == FROZEN
    with open(f"/proc/self/fd/{frozen.fd}", "r+b", buffering=0) as file:
        with pytest.raises(PermissionError):
            file.write(b"x")
        with pytest.raises(PermissionError):
            mmap.mmap(file.fileno(), frozen.nbytes)
        with pytest.raises(PermissionError):
            file.truncate(1)


def test_its_arrays_know_it():
    """Views of any shape do, after the memory was closed, too; arrays that are copies, or of other memory, do not."""
    memory = Memory.frozen(DATA)
    view, copy = memory.asarray(np.int32, (50, 100))[3:, ::2].T, memory.asarray().copy()
    memory.close()
    assert os.fstat(frozen_memory(view).fd).st_size == DATA.nbytes
    assert frozen_memory(copy) is frozen_memory(Memory.create(64).asarray()) is frozen_memory(7) is None


def test_fill_may_keep_nothing():
    """An array through which the memory could still be written: refused, and no descriptor is left."""
    gc.collect()  # of tests before this one
    kept, before = [], len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="fill kept an array"):
        Memory.frozen_by(100, kept.append)
    kept.clear()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("change", [b"", DATA.tobytes() + b"more"], ids=["shorter", "longer"])
def test_a_file_that_changes(tmp_path, monkeypatch, change):
    """While it is copied: refused, and no descriptor is left."""
    gc.collect()  # of tests before this one
    path, read, before = tmp_path / "data", os.preadv, len(os.listdir("/proc/self/fd"))
    path.write_bytes(DATA.tobytes())

    def preadv(*arguments):
        path.write_bytes(change)
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(OSError, match="the file has changed while it was read"):
        Memory.frozen(path)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_it_travels():
    """As one's own memory through `multiprocessing`: it is frozen there, too."""
    again = pickle.loads(ForkingPickler.dumps(Memory.frozen(DATA)))
    assert again.is_frozen
    assert (again.asarray(np.int32) == DATA).all()


@pytest.mark.parametrize("source", [b"", np.zeros(0, np.float32)], ids=["bytes", "array"])
def test_no_bytes_at_all(source):
    """Refused as all memory of no bytes is."""
    with pytest.raises(ValueError, match="nbytes=0"):
        Memory.frozen(source)
