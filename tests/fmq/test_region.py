"""Regions: views outlive them, sealed memory keeps its size, named memory is private and really there."""

import contextlib
import errno
import fcntl
import gc
import mmap
import os
import re
import stat

import numpy as np
import pytest
from fmq_peers import open_memory, process

import fmq
from fmq._core import ffi, lib

PAGE = mmap.PAGESIZE


def test_views_outlive_close_and_the_region():
    """close gives back the descriptor; an array keeps its memory."""
    region = fmq.Region.create(8192)
    view = region.asarray(np.uint32, (4, 8), 4096)
    region.close()
    del region
    gc.collect()
    view[:] = 7
    assert view.sum() == 7 * 32


def test_a_mapping_goes_with_its_last_view():
    """Nothing stays mapped once region and views are gone."""

    def mapped():
        with open("/proc/self/maps") as maps:
            return len(re.findall("memfd:fmq", maps.read()))

    before = mapped()
    view = fmq.Region.create(8192).asarray()
    gc.collect()
    assert mapped() == before + 1
    del view
    gc.collect()
    assert mapped() == before


def test_a_closed_region_has_no_descriptor():
    """fd raises; closing twice is harmless."""
    region = fmq.Region.create(1)
    region.close()
    region.close()
    with pytest.raises(ValueError, match="closed"):
        _ = region.fd


def test_anonymous_memory_cannot_change_its_size():
    """The kernel refuses to shrink or grow it, and to add seals: no peer can make our mapping fault."""
    region = fmq.Region.create(8192)
    for size in (0, 4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(region.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_memory_starts_as_zeros():
    """Both kinds."""
    for kind in ("memfd", "posix"):
        assert not fmq.Region.create(5000, kind).asarray().any()


def test_regions_are_shared_with_forked_children():
    """What a child writes, the parent sees."""
    region = fmq.Region.create(4096)
    with process(region.asarray().__setitem__, 5, 9):
        pass
    assert region.asarray()[5] == 9


def test_a_read_only_region_gives_read_only_views():
    """numpy refuses the write, before the kernel does."""
    region = fmq.Region.create(4096)
    view = fmq.Region.from_fd(os.dup(region.fd), 4096, writable=False).asarray()
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


@pytest.mark.parametrize(
    ("dtype", "shape", "offset"),
    [
        ("u1", 4097, 0),
        ("u1", 1, 4096),
        ("u8", 512, 8),
        ("u1", -1, 0),
        ("u1", None, 4097),
        ("u1", None, -1),
        ("u1", (2**40, 2**40), 0),
    ],
)
def test_views_stay_inside(dtype, shape, offset):
    """Outside the region there is nothing to see, whatever overflows on the way."""
    with pytest.raises(ValueError, match=r"offset=|shape="):
        fmq.Region.create(4096).asarray(dtype, shape, offset)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_impossible_sizes_are_refused(nbytes):
    """At least one byte."""
    with pytest.raises(ValueError, match="nbytes="):
        fmq.Region.create(nbytes)


def test_an_unknown_kind_is_refused():
    """The message names the two that there are."""
    with pytest.raises(ValueError, match="'memfd' or 'posix'"):
        fmq.Region.create(1, "mmap")


def test_named_memory_is_private_exclusive_and_removable(name):
    """Mode 0600 whatever the umask; a second create is told to open or unlink; unlink removes it, once."""
    old = os.umask(0)
    try:
        queue = fmq.MessageQueue.create("u1", 8, name=name)
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat("/dev/shm" + name).st_mode) == 0o600
    with pytest.raises(FileExistsError, match=rf"{name}.*unlink"):
        fmq.MessageQueue.create("u1", 8, name=name)
    fmq.unlink(name)
    with pytest.raises(FileNotFoundError, match=name):
        fmq.unlink(name)
    queue.writer().write([1])  # who has it open keeps it


def test_a_refused_create_leaves_the_other_queue_alone(name):
    """The existing queue keeps its elements, and no draft stays behind."""
    drafts = {entry for entry in os.listdir("/dev/shm") if entry.startswith("fmq-draft")}
    w = fmq.MessageQueue.create("u1", 8, name=name).writer()
    w.write([1, 2])
    with pytest.raises(FileExistsError):
        fmq.MessageQueue.create("f8", 1000, name=name)
    assert list(fmq.MessageQueue.open(name).reader().read(2, 0)) == [1, 2]
    assert {entry for entry in os.listdir("/dev/shm") if entry.startswith("fmq-draft")} <= drafts


def test_unnamed_posix_memory_leaves_no_name():
    """Its name is gone before create returns."""
    before = set(os.listdir("/dev/shm"))
    region = fmq.Region.create(4096, "posix")
    assert not any(entry.startswith("fmq") for entry in set(os.listdir("/dev/shm")) - before)
    region.close()


@pytest.mark.parametrize("how", ["named", "unnamed"])
def test_a_full_dev_shm_is_an_error_now_and_not_a_fault_later(monkeypatch, name, how):
    """NoSpace, an OSError with ENOSPC, says how much is needed and how much is free; nothing stays behind."""

    def full(fd, offset, nbytes):
        raise OSError(errno.ENOSPC, "full")

    before = open_memory()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(fmq.NoSpace, match=r"20480 bytes.* are needed and \d+ are free in /dev/shm") as told:
        fmq.MessageQueue.create("u1", 16384, name=name if how == "named" else None, memory="posix")
    assert told.value.errno == errno.ENOSPC
    assert not os.path.exists("/dev/shm" + name)
    assert not open_memory() - before


def test_more_than_dev_shm_has_is_refused_for_real(monkeypatch, name):
    """The same with the real kernel, and without taking what is there: that may be all memory of the machine."""
    have = os.statvfs("/dev/shm")
    monkeypatch.setattr(os, "posix_fallocate", None)
    with pytest.raises(fmq.NoSpace, match="are needed"):
        fmq.MessageQueue.create("u1", have.f_blocks * have.f_frsize + 2**30, name=name)
    assert not os.path.exists("/dev/shm" + name)


def test_a_part_of_it_is_mapped():
    """From an offset on, as large as asked for; without one, from the beginning, as C programs do."""
    with contextlib.closing(fmq.Region.create(3 * PAGE)) as whole:
        whole.asarray()[:] = np.repeat([1, 2, 3], PAGE)
        part = fmq.Region(os.dup(whole.fd), PAGE, offset=PAGE)
        assert (part.asarray() == 2).all()
        base = ffi.new("void **")
        assert lib.fmq_map(whole.fd, PAGE, 0, base) == 0
        assert bytes(ffi.buffer(base[0], PAGE)) == b"\1" * PAGE
        assert lib.fmq_unmap(base[0], PAGE) == 0
        with pytest.raises(OSError, match="Invalid argument"):
            fmq.Region(os.dup(whole.fd), PAGE, offset=12)
