"""Kinds of pools in this process: what each says of itself, what is refused, and what it takes to make one."""

import fcntl
import gc
import mmap
import os
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
from dma_bufs import udmabuf

from burst import (
    GeneralFailure,
    HardwareBuffer,
    InvalidArgument,
    Memory,
    ResourceExhaustedPersistent,
    Usage,
    dma_buf,
    memory_limits,
)
from burst.images import FORMATS
from burst.memory import KINDS

PAGE = mmap.PAGESIZE


@pytest.fixture
def file(tmp_path):
    """A regular file of three pages, numbered."""
    path = tmp_path / "pool"
    path.write_bytes(b"".join(bytes([n]) * PAGE for n in range(3)))
    with path.open("r+b") as opened:
        yield opened


def make(kind, file):
    """One of each kind."""
    return {
        "ashmem": lambda: Memory.create(PAGE),
        "mmap_fd": lambda: Memory.from_fd(file.fileno(), PAGE, mmap.PROT_READ, PAGE),
        "hardware_buffer_blob": lambda: Memory.from_hardware_buffer(file.fileno(), "blob", PAGE + 8),
        "hardware_buffer": lambda: Memory.from_hardware_buffer(
            file.fileno(), "nv12", 16, 8, [(PAGE, 32), (0, 16)], Usage.CPU_READ | Usage.CAMERA_WRITE
        ),
    }[kind]()


HOSTILE = [
    None, [], 7, [7], "ashmem", {}, ["ashmem"], ["ashmem", 4096], ["ashmem", 4096, 1], ["ashmem", True, False],
    ["ashmem", 2**80, False], ["ashmem", -1, False], ["ashmem", 4 * PAGE, False], ["ashmem", PAGE, True],
    ["mmap_fd", PAGE], ["mmap_fd", PAGE, 1, 0, 0], ["mmap_fd", 0, 1, 0], ["mmap_fd", -PAGE, 1, 0],
    ["mmap_fd", PAGE, 0, 0], ["mmap_fd", PAGE, 2, 0], ["mmap_fd", PAGE, 7, 0], ["mmap_fd", PAGE, 1, 8],
    ["mmap_fd", PAGE, 1, -PAGE], ["mmap_fd", PAGE, 1, 3 * PAGE], ["mmap_fd", 2**63, 1, 0],
    ["mmap_fd", PAGE, 1, 2**63], ["mmap_fd", 2**46, 1, 2**46], ["mmap_fd", 1.5, 1, 0], ["mmap_fd", True, 1, 0],
    ["hardware_buffer_blob", 0, 3], ["hardware_buffer_blob", 4 * PAGE, 3], ["hardware_buffer_blob", PAGE, 0],
    ["hardware_buffer_blob", PAGE, 0x30], ["hardware_buffer_blob", PAGE, -1], ["hardware_buffer_blob", PAGE, 2**64],
    ["hardware_buffer_blob", PAGE, "3"], ["hardware_buffer_blob", 2**64, 3],
    ["hardware_buffer", "cmyk", 4, 4, [[0, 16]], 3], ["hardware_buffer", ["rgba"], 4, 4, [[0, 16]], 3],
    ["hardware_buffer", "rgba", 0, 4, [[0, 16]], 3], ["hardware_buffer", "rgba", 4, -4, [[0, 16]], 3],
    ["hardware_buffer", "rgba", 2**16, 1, [[0, 2**18]], 3], ["hardware_buffer", "rgba", True, 4, [[0, 16]], 3],
    ["hardware_buffer", "rgba", 4, 4, [[0, 15]], 3], ["hardware_buffer", "rgba", 4, 4, [[0, 2**70]], 3],
    ["hardware_buffer", "rgba", 4, 4, [[-16, 16]], 3], ["hardware_buffer", "rgba", 4, 4, [[2**70, 16]], 3],
    ["hardware_buffer", "rgba", 4, 4, [[3 * PAGE - 63, 16]], 3], ["hardware_buffer", "rgba", 4, 4, [], 3],
    ["hardware_buffer", "rgba", 4, 4, [[0, 16], [64, 16]], 3], ["hardware_buffer", "rgba", 4, 4, [[0]], 3],
    ["hardware_buffer", "rgba", 4, 4, [[0, "16"]], 3], ["hardware_buffer", "rgba", 4, 4, [0, 16], 3],
    ["hardware_buffer", "nv12", 4, 4, [[0, 4]], 3], ["hardware_buffer", "nv12", 3, 4, [[0, 4], [16, 4]], 3],
    ["hardware_buffer", "nv12", 4, 5, [[0, 4], [20, 4]], 3],
    ["hardware_buffer", "nv12", 4, 4, [[0, 4], [12, 4]], 3],
    ["hardware_buffer", "rgba_float32", 4, 4, [[2, 64]], 3],
    ["hardware_buffer", "rgba_float32", 4, 4, [[0, 66]], 3],
    ["hardware_buffer", "rgba", 4, 4, [[0, 16]], 0x30], ["hardware_buffer", "rgba", 4, 4, [[0, 16]]],
]  # fmt: skip


class TestTravel:
    @pytest.mark.parametrize("kind", KINDS)
    def test_metadata_goes_along(self, kind, file):
        """On the wire and in a pickle, a pool of each kind arrives as what it was, on the same memory."""
        pool = make(kind, file)
        assert pool.kind == kind
        for arrived in (
            Memory.from_wire(pool.to_wire(), os.dup(pool.fd)),
            ForkingPickler.loads(bytes(ForkingPickler.dumps(pool))),
        ):
            assert type(arrived) is type(pool)
            assert arrived.writable == pool.writable
            if kind != "ashmem":  # which says whether it is sealed by its descriptor, gone on arrival by the wire
                assert arrived.to_wire() == pool.to_wire()
            assert arrived.asarray().tobytes() == pool.asarray().tobytes()

    def test_a_pickle_can_be_handed_on(self, file):
        """What was unpickled still has its descriptor, as devices need it."""
        pool = ForkingPickler.loads(bytes(ForkingPickler.dumps(make("mmap_fd", file))))
        assert Memory.from_wire(pool.to_wire(), os.dup(pool.fd)).asarray()[0] == 1

    def test_a_device_keeps_no_descriptor(self, file):
        """Memory that a device knows costs it no open file."""
        gc.collect()  # of tests before this one
        before = os.listdir("/proc/self/fd")
        arrived = [Memory.from_wire(p.to_wire(), os.dup(p.fd)) for p in [make(kind, file) for kind in KINDS]]
        assert len(arrived) == len(KINDS)
        assert len(os.listdir("/proc/self/fd")) <= len(before)

    @pytest.mark.parametrize("plain", [["ashmen", 4096, True], ["", 1], ["hardware_buffer2"]])
    def test_unknown_kinds(self, plain, file):
        """The name of no kind is an INVALID_ARGUMENT, and the descriptor is closed."""
        fd = os.dup(file.fileno())
        with pytest.raises(InvalidArgument, match="this device knows ashmem, mmap_fd"):
            Memory.from_wire(plain, fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)

    def test_a_kind_of_another_driver(self, file):
        """It may be described well: GENERAL_FAILURE, as the HAL recommends for handles that a driver cannot decode."""
        fd = os.dup(file.fileno())
        with pytest.raises(GeneralFailure, match=r"'com\.example\.heap': this device knows ashmem, mmap_fd"):
            Memory.from_wire(["com.example.heap", 4096, [1]], fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)

    @pytest.mark.parametrize("plain", HOSTILE, ids=str)
    def test_hostile_metadata(self, plain, file):
        """Whatever is said about three pages, it is a GENERAL_FAILURE if it is not so, and the descriptor is closed."""
        fd = os.dup(file.fileno())
        with pytest.raises(GeneralFailure):
            Memory.from_wire(plain, fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)

    @pytest.mark.parametrize("fd", [os.eventfd, lambda _: os.pipe()[0], lambda _: os.open("/dev/null", os.O_RDWR)])
    @pytest.mark.parametrize(
        "plain",
        [
            ["ashmem", 1, False],
            ["mmap_fd", 1, 1, 0],
            ["hardware_buffer_blob", 1, 3],
            ["hardware_buffer", "gray", 1, 1, [[0, 1]], 3],
        ],
        ids=lambda plain: plain[0],
    )
    def test_what_is_no_memory(self, plain, fd):
        """Other descriptors cannot be mapped."""
        with pytest.raises(GeneralFailure):
            Memory.from_wire(plain, fd(0))

    def test_what_may_only_be_read(self, file):
        """A descriptor for reading alone is mapped for reading alone."""
        fd = os.open(file.name, os.O_RDONLY)
        with pytest.raises(GeneralFailure, match="Permission denied"):
            Memory.from_wire(["mmap_fd", PAGE, 3, 0], os.dup(fd))
        pool = Memory.from_wire(["mmap_fd", PAGE, 1, 0], fd)
        assert not pool.writable
        with pytest.raises(ValueError, match="read-only"):
            pool.asarray()[0] = 1


class TestMmapFd:
    def test_part_of_a_file(self, file):
        """From the offset on, shared with everybody who has the file open, and the caller keeps the descriptor."""
        pool = Memory.from_fd(file.fileno(), 2 * PAGE, offset=PAGE)
        assert pool.asarray()[[0, PAGE]].tolist() == [1, 2]
        pool.asarray()[1] = 77
        pool.close()
        assert os.pread(file.fileno(), 2, PAGE) == b"\x01\x4d"

    @pytest.mark.parametrize(
        ("arguments", "match"),
        [
            ((PAGE, mmap.PROT_READ, 8), "offset=8: a multiple of the page size"),
            ((PAGE, mmap.PROT_EXEC), "protection=4: PROT_READ, or"),
            ((3 * PAGE, mmap.PROT_READ, PAGE), "only 12288"),
            ((0,), "nbytes=0"),
        ],
    )
    def test_refused_here(self, file, arguments, match):
        """What a device could not map is refused when it is made, by the argument's name."""
        with pytest.raises(ValueError, match=match):
            Memory.from_fd(file.fileno(), *arguments)

    def test_what_is_no_file(self):
        """What mmap takes is taken: a device, here one that gives zeros."""
        fd = os.open("/dev/zero", os.O_RDWR)
        pool = Memory.from_fd(fd, PAGE)
        arrived = Memory.from_wire(pool.to_wire(), fd)
        arrived.asarray()[:] = 1
        assert not pool.needs_sync
        assert not pool.asarray().any()

    def test_told_where_there_is_a_disk(self, file):
        """Only a file that can be written, and has a disk, has to be flushed; memory has not."""
        fd = os.memfd_create("pool")
        os.ftruncate(fd, PAGE)
        assert not Memory.from_fd(fd, PAGE).needs_sync
        os.close(fd)
        assert not Memory.from_fd(file.fileno(), PAGE, mmap.PROT_READ).needs_sync
        if _is_on_disk(file):
            pool = Memory.from_fd(file.fileno(), PAGE, offset=PAGE)
            assert pool.needs_sync
            pool.asarray()[:] = 5
            assert _dirty(pool)
            pool.end(writes=False)
            assert _dirty(pool)
            pool.end(writes=True)
            assert not _dirty(pool)


def _is_on_disk(file):
    try:
        fcntl.fcntl(file.fileno(), fcntl.F_GET_SEALS)
    except OSError:
        return True
    return False


def _dirty(pool):
    """kB of the mapping that its file has not got, as the kernel counts them."""
    address = pool.asarray().ctypes.data
    with open("/proc/self/smaps") as rows:
        found = False
        for row in rows:
            if row.startswith(f"{address:x}-"):
                found = True
            elif found and row.startswith("Private_Dirty"):
                return int(row.split()[1])
    raise AssertionError("not mapped")


class TestImages:
    @pytest.mark.parametrize("name", FORMATS)
    def test_planes_make_the_operand(self, name):
        """Packed, an image is its operand in place; with gaps it is put together, and taken apart, value by value."""
        packed = HardwareBuffer.allocate(name, 6, 4)
        packed.asarray()[:] = np.arange(packed.nbytes) % 60
        gaps = [(64 * 100 * n, 128) for n in range(len(packed.planes))]
        padded = HardwareBuffer.allocate(name, 6, 4, gaps)
        for n in range(len(gaps)):
            padded.plane(n)[...] = packed.plane(n)
        found = packed.view()
        assert found.shape == packed.shape
        assert found.ctypes.data == packed.asarray().ctypes.data
        assert found.tobytes() == packed.asarray().tobytes()
        assert padded.view() is None
        assert padded.read().tobytes() == found.tobytes()
        other = HardwareBuffer.allocate(name, 6, 4, gaps)
        other.scatter(found)
        for n in range(len(gaps)):
            assert other.plane(n).tobytes() == padded.plane(n).tobytes()

    def test_nv12(self):
        """Y first, then U and V by turns: one channel of height * 3/2 rows."""
        image = HardwareBuffer.allocate("nv12", 4, 2)
        image.plane(0)[...] = np.arange(8).reshape(2, 4, 1)
        image.plane(1)[...] = [[[100, 200], [101, 201]]]
        assert image.read().shape == (1, 3, 4, 1)
        assert image.read().ravel().tolist() == [*range(8), 100, 200, 101, 201]

    def test_yuyv(self):
        """Two values for each pixel: Y, and U or V by turns; any number of rows."""
        image = HardwareBuffer.allocate("yuyv", 4, 3)
        assert (image.shape, image.plane(0).shape) == ((1, 3, 4, 2), (3, 4, 2))

    def test_planes_of_a_larger_stride(self):
        """A camera's rows that are aligned to 64 bytes, with the second plane behind 8 rows for 6."""
        image = HardwareBuffer.allocate("nv12", 10, 6, [(0, 64), (512, 64)])
        assert image.nbytes == 512 + 2 * 64 + 10
        assert image.plane(1).shape == (3, 5, 2)

    @pytest.mark.parametrize(
        ("arguments", "match"),
        [
            (("bgr", 4, 4), "format='bgr': one of rgba, rgb"),
            (("nv12", 5, 4), "width=5: .*; even ones for nv12"),
            (("yuyv", 5, 4), "width=5: .*; even ones for yuyv"),
            (("rgba", 4, 4, [(0, 8)]), "rows of 16 bytes; a stride is no less"),
            (("nv12", 4, 4, [(0, 4), (8, 4)]), "overlap"),
        ],
    )
    def test_refused_here(self, arguments, match):
        """What contradicts itself is refused when it is made."""
        with pytest.raises(ValueError, match=match):
            HardwareBuffer.allocate(*arguments)

    def test_usage(self):
        """Without CPU_WRITE it may only be read; without CPU_READ it is refused."""
        assert not HardwareBuffer.allocate("rgba", 4, 4, usage=Usage.CPU_READ).writable
        with pytest.raises(ValueError, match="CPU_READ is needed"):
            HardwareBuffer.allocate("rgba", 4, 4, usage=Usage.CPU_WRITE)

    def test_accesses_are_told_to_the_kernel(self, monkeypatch):
        """A DMA-BUF is synchronised before the CPU reads, and when it has written."""
        asked = []
        monkeypatch.setattr("burst.memory.sync_dma_buf", lambda _, flags: asked.append(flags))
        fd = os.memfd_create("stands for a DMA-BUF")
        os.ftruncate(fd, PAGE)
        monkeypatch.setattr("burst.memory.is_dma_buf", lambda _: True)
        pool = Memory.from_hardware_buffer(fd, "rgba", 4, 4)
        os.close(fd)
        assert pool.needs_sync
        pool.begin(writes=False)
        pool.end(writes=False)
        pool.begin(writes=True)
        pool.end(writes=True)
        assert asked == [1, 1 | 4, 3, 3 | 4]

    def test_what_is_no_dma_buf(self, file):
        """Neither files nor events are taken for one."""
        for fd in (file.fileno(), Memory.create(1).fd, os.eventfd(0)):
            assert not dma_buf.is_dma_buf(fd)

    def test_udmabuf(self):
        """A real DMA-BUF is mapped, and synchronised by the kernel, without an error."""
        if not os.path.exists("/dev/udmabuf"):
            pytest.skip("this machine has no /dev/udmabuf")
        pool = Memory.from_hardware_buffer(udmabuf(2 * PAGE), "gray", 64, 64)
        assert pool.needs_sync
        pool.begin(writes=True)
        pool.plane(0)[...] = 3
        pool.end(writes=True)
        arrived = Memory.from_wire(pool.to_wire(), os.dup(pool.fd))
        assert (arrived.read() == 3).all()


class TestRoom:
    """A pool that does not fit is refused when it is made."""

    def test_more_than_the_machine_has(self):
        """By name, with the bytes that are needed and available."""
        with pytest.raises(ResourceExhaustedPersistent, match=rf"needs {2**50} bytes, and \d+ are available"):
            Memory.create(2**50)
        with pytest.raises(ResourceExhaustedPersistent, match=r"needs \d+ bytes, and \d+ are available"):
            HardwareBuffer.allocate("gray", 60000, 60000, [(0, 2**24)])

    @pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_FSIZE"])
    def test_limits_of_the_process(self, limit):
        """What the process may have counts, and it goes on after a refusal."""
        program = f"""
import resource
from burst import Memory, ResourceExhaustedPersistent
space = 0 if {limit!r} == "RLIMIT_FSIZE" else int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.{limit}, (space + 2**28, space + 2**28))
try:
    Memory.create(2**29)
except ResourceExhaustedPersistent as error:
    print(error)
Memory.create(2**21).asarray()[:] = 1
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
        assert f"needs {2**29} bytes" in done.stdout
        assert limit in done.stdout

    @pytest.fixture
    def control_groups(self, tmp_path, monkeypatch):
        """A folder in the place of those in which the kernel shows processes and their groups."""
        (tmp_path / "self").mkdir()
        monkeypatch.setattr(memory_limits, "_CGROUPS", tmp_path)
        monkeypatch.setattr(memory_limits, "_PROC", tmp_path)
        return tmp_path

    def test_control_groups(self, control_groups):
        """The tightest of the groups that we are in counts; pages of files that nobody uses are to be had."""
        inner = control_groups / "a/b"
        inner.mkdir(parents=True)
        for folder, most, used in ((control_groups / "a", "9000000", "6000000"), (inner, "max", "5000000")):
            (folder / "memory.max").write_text(most)
            (folder / "memory.current").write_text(used)
            (folder / "memory.stat").write_text("anon 1\ninactive_file 1000000\n")
        (control_groups / "self/cgroup").write_text("0::/a/b\n")
        Memory.create(4000000)
        with pytest.raises(ResourceExhaustedPersistent, match=r"and 4000000 are available \(its control group\)"):
            Memory.create(4000001)

    def test_control_groups_of_the_first_version(self, control_groups):
        """The same in version 1, in whose containers the path begins above what is mounted there."""
        inner = control_groups / "memory/pod/inner"
        inner.mkdir(parents=True)
        for folder, most, used in ((inner.parent, 9_000_000, 6_000_000), (inner, 2**63 - 4096, 5_000_000)):
            (folder / "memory.limit_in_bytes").write_text(str(most))
            (folder / "memory.usage_in_bytes").write_text(str(used))
            (folder / "memory.stat").write_text("inactive_file 5\ntotal_inactive_file 1000000\n")
        for path in ("/pod/inner", "/above/this/pod/inner"):
            (control_groups / "self/cgroup").write_text(f"4:cpu,memory:{path}\n3:pids:/\n0::/\n")
            assert memory_limits.control_group_bytes() == 9_000_000
            assert memory_limits.available_bytes() == (4_000_000, "its control group")
        (inner.parent / "memory.limit_in_bytes").unlink()
        assert memory_limits.control_group_bytes() is None

    def test_posix_memory(self, monkeypatch):
        """A full /dev/shm is told in the same way."""
        have = os.statvfs("/dev/shm")
        nbytes = have.f_blocks * have.f_frsize + 2**20
        monkeypatch.setattr("burst.memory.check_available", lambda _: None)
        with pytest.raises(ResourceExhaustedPersistent, match=f"{nbytes} bytes of shared memory are needed and"):
            Memory.create(nbytes, "posix")


def test_more_than_can_be_guarded():
    """A device that has mapped as much memory as it can guard refuses more of what could be truncated under it, takes
    sealed memory as before, and has room again when something is let go.
    """
    program = """
import os
from burst import Memory, ResourceExhaustedTransient
from fmq.region import guard
guard()
fd = os.memfd_create("shrinks")
os.ftruncate(fd, 4096)
known = []
try:
    while len(known) < 5000:
        known.append(Memory.from_wire(["mmap_fd", 4096, 3, 0], os.dup(fd)))
except ResourceExhaustedTransient as error:
    assert "Cannot allocate memory" in str(error), error
sealed = Memory.create(4096)
Memory.from_wire(sealed.to_wire(), os.dup(sealed.fd)).asarray()[:] = 1
del known[-1]
known.append(Memory.from_wire(["mmap_fd", 4096, 3, 0], os.dup(fd)))
os.ftruncate(fd, 0)
print(len(known), sum(int(memory.asarray()[0]) for memory in known))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    count, total = map(int, done.stdout.split())
    assert 4000 < count <= 4096
    assert total == 0
