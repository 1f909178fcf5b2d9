"""Pools of every kind as arguments of executions: on both paths, on two devices, from clients that mean harm."""

import contextlib
import mmap
import os
import threading
import time

import numpy as np
import pytest
from dma_bufs import udmabuf

import driver
from burst import ErrorStatus, Memory, Request, RequestArgument, Usage
from burst.memory import MappedFd
from driver import HardwareBuffer
from driver.interface import Capabilities, Performance
from driver.runtime import capabilities
from driver.runtime.local import LocalDevice

PAGE = mmap.PAGESIZE
NONE, GENERAL, INVALID = ErrorStatus.NONE, ErrorStatus.GENERAL_FAILURE, ErrorStatus.INVALID_ARGUMENT
DEVICES = ("reference", "litert")
SHAPE, NBYTES = (1, 4, 6, 4), 96
X = np.arange(NBYTES, dtype=np.uint8).reshape(SHAPE)


def mirror_model(shape=SHAPE, dtype="quant8_asymm"):
    """Rows become columns: what both devices compute, byte for byte."""
    m = driver.ModelBuilder()
    quantisation = {"scale": 1.0, "zero_point": 0} if dtype.startswith("quant8") else {}
    x = m.input(dtype, shape, **quantisation)
    m.output(m.operation("TRANSPOSE", x, np.array((0, 2, 1, 3), np.int32), dimensions=(0,) * 4))
    return m.build()


def memfd(nbytes):
    fd = os.memfd_create("pool")
    os.ftruncate(fd, nbytes)
    return fd


def bytes_of(kind, nbytes, tmp_path):
    """A pool of bytes, of each kind."""
    if kind in ("ashmem", "posix"):
        return Memory.create(nbytes, "posix" if kind == "posix" else None)
    if kind == "mmap_fd of a file":
        path = tmp_path / f"{time.monotonic_ns()}"
        path.write_bytes(bytes(3 * PAGE + nbytes))
        with path.open("r+b") as file:
            return Memory.from_fd(file.fileno(), nbytes, offset=PAGE)
    fd = memfd(2 * PAGE + nbytes)
    try:
        if kind == "mmap_fd":
            return Memory.from_fd(fd, nbytes, offset=2 * PAGE)
        return Memory.from_hardware_buffer(fd, "blob", nbytes)
    finally:
        os.close(fd)


@pytest.fixture(scope="module", params=DEVICES)
def name(request):
    return request.param


@pytest.fixture
def prepared(connect, name):
    """TRANSPOSE on a shared device."""
    with connect(name).prepare(mirror_model()) as found:
        yield found


@pytest.fixture
def burst(prepared):
    with prepared.burst() as found:
        yield found


def both(prepared, burst):
    return prepared.execute, burst.execute


def bulk(burst):
    return burst.stats()["copied_bytes"]["bulk"]


class TestBytes:
    KINDS = "ashmem", "posix", "mmap_fd", "mmap_fd of a file", "hardware_buffer_blob"

    @pytest.mark.parametrize("kind", KINDS)
    def test_in_and_out(self, prepared, burst, kind, tmp_path):
        """Inputs and outputs in pools of each kind, used in place: what changes there is in the next result, and
        nothing is copied.
        """
        source, target = (bytes_of(kind, NBYTES, tmp_path) for _ in range(2))
        request = Request(
            (RequestArgument(length=NBYTES),), (RequestArgument(pool=1, length=NBYTES),), (source, target)
        )
        for execute in both(prepared, burst):
            for n in range(3):
                source.asarray()[:] = X.ravel() + n
                assert execute(request).status == NONE
                assert target.asarray().tobytes() == (X + n).astype(np.uint8).transpose(0, 2, 1, 3).tobytes()
        assert bulk(burst) == 0

    def test_a_file_has_it(self, prepared, burst, tmp_path):
        """What was written to a mapped file is what its other readers find, at its offset."""
        source = Memory.create(NBYTES)
        source.asarray()[:] = X.ravel()
        path = tmp_path / "file"
        path.write_bytes(bytes(3 * PAGE))
        with path.open("r+b") as file:
            target = Memory.from_fd(file.fileno(), PAGE, offset=PAGE)
        request = Request(
            (RequestArgument(length=NBYTES),), (RequestArgument(pool=1, offset=64, length=NBYTES),), (source, target)
        )
        for execute in both(prepared, burst):
            target.asarray()[:] = 0
            assert execute(request).status == NONE
            found = path.read_bytes()
            assert found[PAGE + 64 :][:NBYTES] == X.transpose(0, 2, 1, 3).tobytes()
            assert found.strip(b"\0") == found[PAGE + 64 :][:NBYTES].strip(b"\0")

    @pytest.mark.parametrize("kind", ["mmap_fd", "hardware_buffer_blob"])
    def test_read_only(self, prepared, burst, kind, connect, name):
        """Memory that the client lets devices read is an input, and no output; they have it mapped for reading."""
        fd = memfd(PAGE)
        os.pwrite(fd, X.tobytes(), 0)
        if kind == "mmap_fd":
            pool = Memory.from_fd(fd, NBYTES, mmap.PROT_READ)
        else:
            pool = Memory.from_hardware_buffer(fd, "blob", NBYTES, usage=Usage.CPU_READ)
        other, inode = Memory.create(NBYTES), os.fstat(fd).st_ino
        argument = RequestArgument(length=NBYTES), RequestArgument(pool=1, length=NBYTES)
        for execute in both(prepared, burst):
            assert execute(Request(argument[:1], argument[1:], (pool, other))).status == NONE
            assert other.asarray().tobytes() == X.transpose(0, 2, 1, 3).tobytes()
            found = execute(Request(argument[1:], argument[:1], (pool, other)))
            assert found.status == INVALID
            assert found.message in ("", "output 0: pool 0 is read-only; put outputs into a writable pool")
        with open(f"/proc/{prepared.device.engine_pid}/maps") as maps:
            assert {row.split()[1] for row in maps if row.split()[4] == str(inode)} == {"r--s"}
        os.close(fd)

    def test_copies_of_buffers(self, connect, tmp_path):
        """Buffers of the device are copied from and to bytes of each kind; not to what may only be read, nor images."""
        device = connect()
        with device.prepare(mirror_model()) as prepared:
            roles = [driver.BufferRole(0, 0)]
            with device.allocate(driver.BufferDesc(), [prepared], roles) as buffer:
                for kind in self.KINDS:
                    source, target = (bytes_of(kind, NBYTES, tmp_path) for _ in range(2))
                    source.asarray()[:] = X.ravel()
                    buffer.copy_from(source)
                    buffer.copy_to(target)
                    assert target.asarray().tobytes() == X.tobytes()
                fd = memfd(PAGE)
                with pytest.raises(driver.InvalidArgument, match="read-only"):
                    buffer.copy_to(Memory.from_fd(fd, NBYTES, mmap.PROT_READ))
                os.close(fd)
                with pytest.raises(driver.GeneralFailure, match="an image in rgba"):
                    buffer.copy_from(HardwareBuffer.allocate("rgba", 6, 4))

    def test_constants(self, connect, name, tmp_path):
        """A constant may lie in any pool: it is copied into the model, and stays what it was then."""
        image = HardwareBuffer.allocate("gray_float32", 4, 1)
        pool = bytes_of("mmap_fd of a file", 16, tmp_path)
        pool.asarray(np.float32)[:] = image.view().reshape(4)[:] = 1, 2, 3, 4
        m = driver.ModelBuilder()
        x = m.operation("ADD", m.input("float32", (4,)), pool.asarray(np.float32), 0)
        m.output(m.operation("MUL", x, image.view().reshape(4), 0))
        with connect(name).prepare(m.build()) as prepared:
            pool.asarray()[:] = 0
            assert prepared.run(np.ones(4, np.float32))[0].tolist() == [2, 6, 12, 20]


class TestImages:
    """A frame in a hardware buffer is an input, or an output, of its own shape."""

    def frame(self, name, width=6, height=4, gaps=False):
        where = [(n * 4096, 1024) for n in range(3 if name == "yuv420" else 2 if name == "nv12" else 1)]
        found = HardwareBuffer.allocate(name, width, height, where if gaps else None)
        whole = (np.arange(np.prod(found.shape)) % 100).astype(found.dtype).reshape(found.shape)
        found.scatter(whole)
        return found, whole

    @pytest.mark.parametrize("gaps", [False, True], ids=["packed", "padded"])
    @pytest.mark.parametrize(
        "format_", ["rgba", "rgb", "gray", "nv12", "yuyv", "yuv420", "rgb_float32", "rgba_float16"]
    )
    def test_in_and_out(self, connect, name, format_, gaps):
        """Each format, on both ways, packed and with gaps: packed nothing is copied; gaps are, and are counted."""
        image, whole = self.frame(format_, gaps=gaps)
        dtype = {"u1": "quant8_asymm", "f2": "float16", "f4": "float32"}[image.dtype.str[1:]]
        _, h, w, c = image.shape
        swapped = whole.transpose(0, 2, 1, 3)
        with connect(name).prepare(mirror_model(image.shape, dtype)) as prepared, prepared.burst() as burst:
            target = Memory.create(whole.nbytes)
            request = Request((RequestArgument(),), (RequestArgument(pool=1, length=whole.nbytes),), (image, target))
            for execute in both(prepared, burst):
                for n in range(2):
                    image.scatter(whole + image.dtype.type(n))
                    assert execute(request).status == NONE
                    assert target.asarray().tobytes() == (swapped + image.dtype.type(n)).tobytes()
            assert bulk(burst) == (2 * whole.nbytes if gaps else 0)
        with connect(name).prepare(mirror_model((1, w, h, c), dtype)) as prepared, prepared.burst() as burst:
            source = Memory.create(whole.nbytes)
            source.asarray(whole.dtype, swapped.shape)[...] = swapped
            request = Request((RequestArgument(length=whole.nbytes),), (RequestArgument(pool=1),), (source, image))
            for execute in both(prepared, burst):
                image.scatter(np.zeros_like(whole))
                result = execute(request)
                assert result.status == NONE
                assert result.outputs[0].tobytes() == image.read().tobytes() == whole.tobytes()
            assert bulk(burst) == (whole.nbytes if gaps else 0)

    @pytest.mark.parametrize("format_", ["rgba", "nv12"])
    def test_a_camera_frame_is_not_copied(self, connect, name, format_):
        """A frame of 1920 x 1080 in RGBA or NV12: 0 bulk bytes, and the device sees what the camera writes."""
        frame = HardwareBuffer.allocate(format_, 1920, 1080)
        m = driver.ModelBuilder()
        x = m.input("quant8_asymm", frame.shape, scale=1.0, zero_point=0)
        part = [np.array(a, np.int32) for a in ((0, 5, 7, 0), (1, 6, 9, 1), (1, 1, 1, 1))]
        m.output(m.operation("STRIDED_SLICE", x, *part, 0, 0, 0))
        with connect(name).prepare(m.build()) as prepared, prepared.burst() as burst:
            request = Request((RequestArgument(),), (RequestArgument(pool=1, length=2),), (frame, Memory.create(2)))
            for n in range(5):
                frame.plane(0)[5, 7:9, 0] = n, n + 1
                result = burst.execute(request)
                assert (result.status, result.outputs[0].ravel().tolist()) == (NONE, [n, n + 1])
            assert bulk(burst) == 0
            assert burst.stats()["memories_sent"] == 2

    def test_no_room_for_a_copy(self, monkeypatch):
        """An image with gaps is not put together where there is no memory for that; one without needs none."""
        shape = (1, 1024, 1024, 1)
        target = Memory.create(2**20)
        arguments = (RequestArgument(),), (RequestArgument(pool=1, length=2**20),)
        images = [HardwareBuffer.allocate("gray", 1024, 1024, planes) for planes in ([(0, 1025)], None)]
        monkeypatch.setattr("burst.memory_limits.available_bytes", lambda: (2**19, "a test's"))
        with LocalDevice().prepare(mirror_model(shape)) as prepared:
            found = [prepared.execute(Request(*arguments, (image, target))) for image in images]
        assert [result.status for result in found] == [ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT, NONE]
        assert f"needs {2**20} bytes, and {2**19} are available" in found[0].message

    def test_in_steps(self, connect, monkeypatch):
        """An image goes into a model that several devices share, and comes out of it."""
        m = driver.ModelBuilder()
        x = m.operation("ADD", m.input("float32", (1, 4, 6, 4)), np.ones(4, np.float32), 0)
        m.output(m.operation("MUL", m.operation("ELU", x, 0.5), np.full(4, 2, np.float32), 0))
        (image, whole), (result, _) = (self.frame("rgba_float32", gaps=gaps) for gaps in (True, False))
        monkeypatch.setattr("driver.runtime.compilation.can_be_measured", lambda _: False)
        monkeypatch.setattr("driver.runtime.planning.MOST_STEPS", 99)
        litert = connect("litert")  # its speed is known, so that a busy machine does not measure it
        capabilities.store(
            "litert", litert.version, Capabilities({"TENSOR_FLOAT32": Performance(0.5)}, source="measured")
        )
        with driver.compile(m.build(), devices=[litert, "cpu"]) as compiled:
            assert len(compiled.placement()) == 3
            found = compiled.execute(Request((RequestArgument(),), (RequestArgument(pool=1),), (image, result)))
            assert found.status == NONE
            np.testing.assert_allclose(result.read(), (whole + 1) * 2, rtol=1e-6)

    def test_shapes(self, connect, name):
        """The shape comes from the format where the model leaves it open, and may have other axes of length 1."""
        image, whole = self.frame("gray")
        for model_shape in ((1, 4, 6, 1), (0, 0, 0, 0), (1, 0, 6, 1)):
            self.check(connect(name), mirror_model(model_shape), image, whole)
        m = driver.ModelBuilder()
        x = m.input("quant8_asymm", (4, 6), scale=1.0, zero_point=0)
        m.output(m.operation("TRANSPOSE", x, np.array((1, 0), np.int32), dimensions=(0, 0)))
        self.check(connect(name), m.build(), image, whole)

    @staticmethod
    def check(device, model, image, whole):
        own = model.main.operands[model.main.inputs[0]].dimensions
        shapes = [whole.shape if 0 in own else own]
        with device.prepare(model) as prepared, prepared.burst(input_shapes=shapes) as burst:
            target = Memory.create(whole.nbytes)
            request = Request((RequestArgument(),), (RequestArgument(pool=1, length=whole.nbytes),), (image, target))
            for execute in both(prepared, burst):
                assert execute(request).status == NONE
                assert target.asarray().tobytes() == whole.transpose(0, 2, 1, 3).tobytes()

    @pytest.mark.parametrize(
        ("image", "argument"),
        [
            (("rgba", 6, 4), RequestArgument(length=96)),
            (("rgba", 6, 4), RequestArgument(offset=4)),
            (("rgba", 6, 4), RequestArgument(dimensions=(1, 6, 4, 4))),
            (("rgba", 4, 6), RequestArgument()),
            (("rgb", 6, 4), RequestArgument()),
            (("rgba_float16", 6, 4), RequestArgument()),
        ],
        ids=["length", "offset", "dimensions", "size", "channels", "type"],
    )
    def test_refused(self, prepared, burst, image, argument):
        """An image is used whole, as what it is; the device goes on."""
        frame, other = HardwareBuffer.allocate(*image), Memory.create(NBYTES)
        plain = RequestArgument(pool=1, length=NBYTES)
        for execute in both(prepared, burst):
            assert execute(Request((argument,), (plain,), (frame, other))).status == INVALID
        assert prepared.run(X)[0].tobytes() == X.transpose(0, 2, 1, 3).tobytes()

    @pytest.mark.parametrize("image", [("rgba", 6, 4), ("rgba", 8, 8), ("rgb", 6, 4), ("gray", 96, 1), ("gray", 1, 1)])
    def test_refused_as_output(self, prepared, burst, image):
        """An output that has another shape than the image does not become it."""
        frame, other = HardwareBuffer.allocate(*image), Memory.create(NBYTES)
        request = Request((RequestArgument(pool=1, length=NBYTES),), (RequestArgument(),), (frame, other))
        for execute in both(prepared, burst):
            found = execute(request)
            assert found.status in (GENERAL, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE)
            assert not frame.asarray().any()

    def test_read_only(self, prepared, burst):
        """Without CPU_WRITE in its usage an image is no output."""
        frame, other = HardwareBuffer.allocate("rgba", 4, 6, usage=Usage.CPU_READ), Memory.create(NBYTES)
        request = Request((RequestArgument(pool=1, length=NBYTES),), (RequestArgument(),), (frame, other))
        for execute in both(prepared, burst):
            assert execute(request).status == INVALID


@contextlib.contextmanager
def meanwhile(action):
    """Does it again and again in another thread."""
    stop = threading.Event()

    def run():
        while not stop.is_set():
            action()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Said(Memory):
    """Memory that says something else of itself when it is sent."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.said = []

    def to_wire(self):
        return self.said


class TestHostile:
    @pytest.mark.parametrize(
        ("said", "status"),
        [
            (["ashmem2", PAGE, True], INVALID),
            (["", PAGE, True], INVALID),
            (["hardware_buffer_blob", 2 * PAGE, 3], GENERAL),
            (["mmap_fd", PAGE, 3, PAGE], GENERAL),
            (["mmap_fd", PAGE, 3, 12], GENERAL),
            (["mmap_fd", 2**64 - 1, 3, 0], GENERAL),
            (["hardware_buffer", "rgba", 64, 17, [[0, 256]], 0x33], GENERAL),
            (["hardware_buffer", "nv12", 64, 64, [[0, 64], [2**62, 64]], 0x33], GENERAL),
            (["hardware_buffer", "cmyk", 4, 4, [[0, 16]], 0x33], GENERAL),
            ([PAGE, True], GENERAL),
            (["hardware_buffer", [[[[]]]]], GENERAL),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_what_is_said_of_a_page(self, prepared, burst, said, status):
        """A name that is unknown is INVALID_ARGUMENT, what cannot be mapped so GENERAL_FAILURE; the burst goes on, and
        the memory can be handed over again.
        """
        pool = Said.create(PAGE)
        request = Request((RequestArgument(length=NBYTES),), (RequestArgument(offset=128, length=NBYTES),), (pool,))
        for execute in both(prepared, burst):
            pool.said = said
            assert execute(request).status == status
            assert prepared.run(X)[0].tobytes() == X.transpose(0, 2, 1, 3).tobytes()
            prepared.device.free_memory(pool)
            burst.free_memory(pool)
            pool.said = ["ashmem", PAGE, True]
            assert execute(request).status == NONE

    def test_truncated_while_it_executes(self, connect, name, process):
        """A client that truncates and extends its file while executions read and write it: whatever they answer, the
        device lives, and nobody else notices.
        """
        shape = (1, 256, 256, 4)
        nbytes = int(np.prod(shape))
        device = connect(name)
        engine = process(device.engine_pid)
        fd, statuses = memfd(2 * nbytes), set()

        def truncate():
            for size in (nbytes // 2, 0, 2 * nbytes):
                os.ftruncate(fd, size)

        first, second = RequestArgument(length=nbytes), RequestArgument(offset=nbytes, length=nbytes)
        with (
            device.prepare(mirror_model(shape)) as prepared,
            prepared.burst() as burst,
            device.prepare(mirror_model()) as other,
        ):
            for _ in range(20):
                pool = Memory.from_fd(fd, 2 * nbytes)
                request = Request((first,), (second,), (pool,))
                assert [execute(request).status for execute in both(prepared, burst)] == [NONE, NONE]
                with meanwhile(truncate):
                    statuses |= {execute(request).status for execute in both(prepared, burst) * 5}
                burst.free_memory(pool)
                device.free_memory(pool)
                assert other.run(X)[0].tobytes() == X.transpose(0, 2, 1, 3).tobytes()
        assert statuses <= {NONE, GENERAL}
        assert not engine.has_ended(0)
        os.close(fd)

    @pytest.mark.integration
    def test_indices_that_flip_while_it_executes(self, connect, name, process, kit):
        """Indices that change while GATHER runs are good or bad as a whole: a result holds entries that were asked for,
        or there is none. Nothing outside the values is ever read; the copies that this takes are counted as control.
        """
        rows, n = 100, 50_000
        m = driver.ModelBuilder()
        m.output(m.operation("GATHER", m.input("float32", (rows,)), 0, m.input("int32", (n,))))
        device = connect(name)
        engine = process(device.engine_pid)
        values, indices, target = Memory.create(4 * rows), Memory.create(4 * n), Memory.create(4 * n)
        values.asarray(np.float32)[:] = np.arange(rows)
        arguments = [RequestArgument(pool=k, length=length) for k, length in enumerate((4 * rows, 4 * n, 4 * n))]
        request = Request(tuple(arguments[:2]), tuple(arguments[2:]), (values, indices, target))
        flips, statuses = indices.asarray(np.int32), []

        def flip():
            for bad in (2**30, -(2**30), 2**31 - 1, rows):
                flips[n // 2] = bad
                flips[n // 2] = 3

        def once():
            target.asarray(np.float32)[:] = -1
            statuses.append(burst.execute(request).status)
            if not statuses[-1]:
                assert target.asarray(np.float32)[n // 2] == 3
            return {NONE, GENERAL} <= set(statuses) and len(statuses) > 100

        with device.prepare(m.build()) as prepared, prepared.burst() as burst:
            with meanwhile(flip):
                kit.until(once)
            copied = burst.stats()["copied_bytes"]
        assert set(statuses) == {NONE, GENERAL}
        assert copied["bulk"] == 0
        assert (copied["control"] > len(statuses) * 4 * n) == (name == "litert")
        assert not engine.has_ended(0)

    def test_a_shape_that_flips_while_it_executes(self, connect, process, kit):
        """The same for an operand that says a shape, on the device that takes such."""
        m = driver.ModelBuilder()
        x = m.input("float32", (2, 3000))
        m.output(m.operation("RESHAPE", x, m.input("int32", (2,))))
        device = connect()
        engine = process(device.engine_pid)
        pool, seen = Memory.create(3 * 24000), []
        shape = pool.asarray(np.int32, 2, 24000)
        arguments = [(0, 24000), (24000, 8), (48000, 24000)]
        first, second, output = (RequestArgument(offset=offset, length=length) for offset, length in arguments)

        def flip():
            for found in ((3000, 2), (2**30, 2**30), (6000, 1), (-5, 7), (1, 6000), (2**31 - 1, -1)):
                shape[:] = found

        def once():
            result = burst.execute(Request((first, second), (output,), (pool,)))
            seen.append((result.status, [tuple(found.dimensions) for found in result.output_shapes]))
            return {NONE, GENERAL} <= {status for status, _ in seen} and len(seen) > 100

        with device.prepare(m.build()) as prepared, prepared.burst() as burst, meanwhile(flip):
            kit.until(once)
        assert all(int(np.prod(dims[0])) == 6000 for status, dims in seen if status == NONE)
        assert not engine.has_ended(0)


class Told(MappedFd):
    """Notes what it is told."""

    needs_sync = True

    def __init__(self, fd, events):
        super().__init__(fd, PAGE, mmap.PROT_READ | mmap.PROT_WRITE, 0)
        self.needs_sync, self.events = True, events

    def begin(self, *, writes):
        self.events.append(("begin", writes))

    def end(self, *, writes):
        self.events.append(("end", writes))


class TestAround:
    """What happens around an execution on memory that has to be told."""

    def test_begin_and_end(self):
        """Pools are told before and after each execution, once each, and of an end also when it fails."""
        m = driver.ModelBuilder()
        values, indices = m.input("float32", (4,)), m.input("int32", (2,))
        m.output(m.operation("GATHER", values, 0, indices))
        events = []
        pool, output = Told(memfd(PAGE), events), Told(memfd(PAGE), events)
        arguments = RequestArgument(length=16), RequestArgument(offset=64, length=8)
        request = Request(arguments, (RequestArgument(pool=1, length=8),), (pool, output))
        with LocalDevice().prepare(m.build()) as prepared:
            assert prepared.execute(request).status == NONE
            assert events == [("begin", False), ("begin", True), ("end", False), ("end", True)]
            pool.asarray(np.int32, 2, 64)[:] = 9
            events.clear()
            assert prepared.execute(request).status == GENERAL
            assert events == [("begin", False), ("begin", True), ("end", False), ("end", True)]

    def test_a_real_dma_buf(self, prepared, burst):
        """An image in a DMA-BUF of the kernel's is an input and an output on both paths."""
        if not os.path.exists("/dev/udmabuf"):
            pytest.skip("this machine has no /dev/udmabuf")
        source, target = (Memory.from_hardware_buffer(udmabuf(PAGE), "rgba", *size) for size in ((6, 4), (4, 6)))
        source.begin(writes=True)
        source.plane(0)[...] = X[0]
        source.end(writes=True)
        for execute in both(prepared, burst):
            assert execute(Request((RequestArgument(),), (RequestArgument(pool=1),), (source, target))).status == NONE
            assert target.read().tobytes() == X.transpose(0, 2, 1, 3).tobytes()
        assert bulk(burst) == 0


class TestOtherLibraries:
    """A pool's memory under other names."""

    def test_dlpack_and_memoryview(self):
        """Arrays of a pool go to other libraries, and are written there, without a copy."""
        pool = Memory.create(NBYTES)
        for taken in (np.from_dlpack(pool.asarray(np.float32)), np.asarray(memoryview(pool.asarray(np.float32)))):
            assert taken.ctypes.data == pool.asarray().ctypes.data
            taken[...] = 7
            assert (pool.asarray(np.float32) == 7).all()

    @pytest.mark.parametrize("library", ["torch", "jax"])
    def test_tensors(self, connect, kit, library):
        """PyTorch's and JAX's lie in a pool, go into a burst, and are made of a result without a copy."""
        module = pytest.importorskip(library, reason=f"{library} is not installed; numpy's DLPack stands for it")
        make = module.from_dlpack if library == "torch" else module.dlpack.from_dlpack
        address = (lambda x: x.data_ptr()) if library == "torch" else (lambda x: x.unsafe_buffer_pointer())
        pool = Memory.create(16)
        pool.asarray(np.float32)[:] = 3
        with connect().prepare(kit.add_model()) as prepared, prepared.burst() as burst:
            taken = make(pool.asarray(np.float32, (1, 4)))
            assert address(taken) == pool.asarray().ctypes.data
            result = burst.run(taken).outputs[0]
            assert address(make(result)) == result.ctypes.data
            assert np.from_dlpack(make(result)).tolist() == [[4, 4, 4, 4]]

    def test_arrow(self, connect):
        """Arrow's buffers go in, typed as the input is, and results become Arrow's without a copy."""
        arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        m = driver.ModelBuilder()
        m.output(m.operation("ADD", m.input("float32", (2, 2)), np.ones((2, 2), np.float32), 0))
        values = arrow.array([1.0, 2.0, 3.0, 4.0], arrow.float32())
        with connect().prepare(m.build()) as prepared, prepared.burst() as burst:
            result = burst.run(values.buffers()[1]).outputs[0]
            assert result.tolist() == [[2, 3], [4, 5]]
            with pytest.raises(ValueError, match="has shape"):
                burst.run(arrow.py_buffer(bytes(12)))
            assert arrow.py_buffer(result).address == result.ctypes.data
