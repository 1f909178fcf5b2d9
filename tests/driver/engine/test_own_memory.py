"""Memory of kinds that a driver alone knows: "com.example.heap" of the DSP in burst_test_devices.heap.

It is a memfd that begins with a header. The driver makes an array of it, or, where its elements lie in reverse order, a
buffer that is used whole.
"""

import gc
import json
import os
import pickle
import socket
import subprocess
from contextlib import contextmanager
from multiprocessing import reduction
from pathlib import Path

import numpy as np
import pytest
import stress
from burst_test_devices.heap import HEADER, KIND, MAGIC
from request_ways import executes
from small_models import sum_model

import driver
from burst import ErrorStatus, GeneralFailure, Memory, Request, RequestArgument
from burst.memory import frozen_memory
from driver import BufferDesc, BufferRole
from driver.recording import record

DSP = "burst_test_devices.heap:Dsp"
TROUBLED = "burst_test_devices.heap:Troubled"
X = np.array([[1, 2, 3, 4]], np.float32)
START = HEADER.size
INVALID = ErrorStatus.INVALID_ARGUMENT


@contextmanager
def heap(nbytes=64, is_reversed=False, magic=MAGIC):
    """A descriptor of a heap with these bytes, each element 7."""
    fd = os.memfd_create("heap")
    values = np.full(nbytes // 4, 7, np.float32).tobytes()
    os.write(fd, HEADER.pack(magic, is_reversed) + values)
    try:
        yield fd
    finally:
        os.close(fd)


def pool_of(nbytes=64, is_reversed=False, fields=(START,), **more):
    with heap(nbytes, is_reversed, **more) as fd:
        return Memory.from_handle(fd, nbytes, KIND, fields)


def values(pool, count, offset=0):
    """What lies there, as its owner reads it."""
    return np.frombuffer(os.pread(pool.fd, 4 * count, START + offset), np.float32).tolist()


def heard(place, what):
    path = Path(place.path, "heard")
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if line["what"] == what]


@pytest.fixture(params=[DSP])
def prepared(request, place):
    """x + y on a DSP of this test's own."""
    with driver.connect(request.param) as device, device.prepare(sum_model()) as found:
        yield found


def at(offset):
    return RequestArgument(offset=offset, length=16)


LINEAR = (at(0), at(16)), (at(32),)
WHOLE = (RequestArgument(),) * 2, (RequestArgument(pool=1),)


class TestUse:
    """What executions do with it."""

    @pytest.mark.parametrize("way", ["plain", "async", "fenced", "burst"])
    def test_an_array(self, prepared, way):
        """What the driver maps as an array is used as every pool is: at offsets, in place."""
        pool = pool_of()
        with prepared.burst() as burst:
            result = executes(prepared, burst)[way](Request(*LINEAR, (pool,)))
            assert result.status == 0
            assert values(pool, 12) == [7] * 8 + [14] * 4
            assert burst.stats()["copied_bytes"]["bulk"] == 0
            if way != "fenced":
                assert result.outputs == (None,)

    @pytest.mark.parametrize("way", ["plain", "async", "fenced", "burst"])
    def test_a_buffer(self, prepared, place, way):
        """What the driver makes a buffer of is used whole, by no byte copied; so is one that the driver allocated."""
        a, b = pool_of(16, is_reversed=True), pool_of(16, is_reversed=True)
        os.pwrite(a.fd, X.tobytes(), START)
        with prepared.burst() as burst:
            execute = executes(prepared, burst)[way]
            for _ in range(3):
                assert execute(Request(*WHOLE, (a, b))).status == 0
            assert values(b, 4) == [2, 4, 6, 8]
            state = prepared.device.allocate(BufferDesc(), [prepared], [BufferRole(0, 1)], [BufferRole(0, 0)])
            state.copy_from(X)
            request = Request(
                (RequestArgument(length=16), RequestArgument(pool=1)), (RequestArgument(pool=2),), (a, state, b)
            )
            assert execute(request).status == 0
            assert values(b, 4) == [5, 5, 5, 5]
            assert burst.stats()["copied_bytes"]["bulk"] == 0
            assert not heard(place, "copy_to")

    @pytest.mark.integration
    @pytest.mark.parametrize("way", ["plain", "fenced", "burst"])
    @pytest.mark.parametrize(
        "given", [RequestArgument(offset=4), RequestArgument(length=12), RequestArgument(dimensions=(2, 4))]
    )
    def test_a_part_of_a_buffer(self, prepared, way, given):
        """It cannot be used in part, nor with other dimensions."""
        a, b = pool_of(16, is_reversed=True), pool_of(16, is_reversed=True)
        with prepared.burst() as burst:
            for request in (
                Request((given, RequestArgument()), (RequestArgument(pool=1),), (a, b)),
                Request((RequestArgument(),) * 2, (given._replace(pool=1),), (a, b)),
            ):
                assert status_of(executes(prepared, burst)[way], request) == INVALID

    def test_beyond_its_end(self, prepared):
        """An argument beyond what the driver has mapped is refused, whatever the client says."""
        pool = pool_of()
        request = Request((at(0), at(56)), (at(32),), (pool,))
        with prepared.burst() as burst:
            assert prepared.execute(request).status == burst.execute(request).status == INVALID

    def test_no_bytes_go_to_a_buffer(self, prepared):
        """Buffers copy to and from a heap that the CPU can use, and from no other."""
        state = prepared.device.allocate(BufferDesc(), [prepared], [BufferRole(0, 0)], [BufferRole(0, 0)])
        state.copy_from(pool_of(16))
        state.copy_to(found := np.empty_like(X))
        assert found.tolist() == [[7] * 4]
        state.copy_to(pool := pool_of(16))
        assert values(pool, 4) == [7] * 4
        for copy in (state.copy_from, state.copy_to):
            with pytest.raises(GeneralFailure, match=r"memory of kind com\.example\.heap; use a pool of bytes"):
                copy(pool_of(16, is_reversed=True))


def status_of(execute, request):
    """A fenced execution that is refused raises."""
    try:
        return execute(request).status
    except driver.StatusError as error:
        return error.status


class TestEnds:
    """What the driver has mapped ends when the client frees it."""

    @pytest.mark.parametrize("freed", ["by name", "dropped"])
    def test_freed(self, prepared, place, kit, freed):
        """By `free_memory`, or with its last reference: first what is bound to it goes, then it is closed, once for
        each path that had it.
        """
        a, b = pool_of(16, is_reversed=True), pool_of(16, is_reversed=True)
        with prepared.burst() as burst:
            for execute in (prepared.execute, burst.execute):
                assert execute(Request(*WHOLE, (a, b))).status == 0
            assert len(heard(place, "map")) == 4
            if freed == "by name":
                for pool in (a, b):
                    prepared.device.free_memory(pool)
                    burst.free_memory(pool)
            del a, b
            kit.until(lambda: len(heard(place, "close")) == 4)
            assert len({line["buffer"] for line in heard(place, "close")}) == 4

    def test_mapped_arrays(self, prepared, kit):
        """The engine's process maps the memory no longer."""
        pool = pool_of()
        inode = os.fstat(pool.fd).st_ino
        maps = Path(f"/proc/{prepared.device.engine_pid}/maps")
        is_mapped = lambda: any(line.split()[4] == str(inode) for line in maps.read_text().splitlines())  # noqa: E731
        assert prepared.execute(Request(*LINEAR, (pool,))).status == 0
        assert is_mapped()
        prepared.device.free_memory(pool)
        kit.until(lambda: not is_mapped())

    @pytest.mark.parametrize("clients", [1, pytest.param(stress.times(60), marks=pytest.mark.stress)])
    def test_killed(self, prepared, place, kit, clients):
        """When the client is killed while executions are bound to it on both paths. No descriptor is left."""
        program = f"""
import os, sys, driver
from burst import Memory, Request, RequestArgument
m = driver.ModelBuilder(); x, y = (m.input("float32", (1, 4)) for _ in range(2)); m.output(m.operation("ADD", x, y, 0))
prepared = driver.connect({DSP!r}).prepare(m.build())
def pool():
    fd = os.memfd_create("heap")
    os.write(fd, {HEADER.pack(MAGIC, 1)!r} + bytes(16))
    return Memory.from_handle(fd, 16, {KIND!r}, ({START},))
burst, request = prepared.burst(), Request((RequestArgument(),) * 2, (RequestArgument(pool=1),), (pool(), pool()))
assert burst.execute(request).status == prepared.execute(request).status == 0
print("ready", flush=True); sys.stdin.read()
"""
        descriptors = lambda: len(os.listdir(f"/proc/{prepared.device.engine_pid}/fd"))  # noqa: E731
        for n in range(1, clients + 2):
            with kit.python(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
                assert client.stdout.readline() == "ready\n"
                client.kill()
                client.wait()
            kit.until(lambda: len(heard(place, "close")) == 4 * n)  # noqa: B023
            if n == 1:
                before = kit.until(descriptors)  # the first burst of all opens what others share
        kit.until(lambda: descriptors() <= before)


class TestHostile:
    """A handle may be wrong in every way: the client gets an error, and the device goes on."""

    WRONG = {  # noqa: RUF012
        "no fields": lambda: pool_of(fields=()),
        "more fields": lambda: pool_of(fields=(START, 1)),
        "before the header's end": lambda: pool_of(fields=(0,)),
        "negative": lambda: pool_of(fields=(-1,)),
        "far": lambda: pool_of(fields=(2**63 - 1,)),
        "another magic": lambda: pool_of(magic=b"HELP"),
        "larger than it is": lambda: of_descriptor(os.memfd_create("heap")),
        "a socket": lambda: of_descriptor(socket.socket().detach()),
        "a terminal": lambda: of_descriptor(os.open("/dev/ptmx", os.O_RDWR)),
        "a folder": lambda: of_descriptor(os.open("/", os.O_RDONLY)),
        "an eventfd": lambda: of_descriptor(os.eventfd(0)),
    }

    @pytest.mark.parametrize("way", ["plain", "async", "fenced", "burst"])
    @pytest.mark.parametrize("what", WRONG)
    def test_a_handle(self, connect_dsp, way, what):
        """The driver's ValueError is INVALID_ARGUMENT with its text; the next request is executed."""
        prepared, burst = connect_dsp
        execute, bad = executes(prepared, burst)[way], self.WRONG[what]()
        assert status_of(execute, Request(*LINEAR, (bad,))) == INVALID
        assert execute(Request(*LINEAR, (pool_of(),))).status == 0

    @pytest.mark.parametrize("way", ["plain", "async", "fenced", "burst"])
    @pytest.mark.parametrize("is_reversed", [False, True])
    def test_it_is_cut_off(self, connect_dsp, way, is_reversed):
        """A client that truncates what the driver has mapped hurts itself alone: it reads as zeros."""
        prepared, burst = connect_dsp
        execute, pool, result = executes(prepared, burst)[way], pool_of(16, is_reversed=is_reversed), Memory.create(16)
        request = Request((RequestArgument(length=16),) * 2, (RequestArgument(pool=1, length=16),), (pool, result))
        assert execute(request).status == 0
        assert result.asarray(np.float32).tolist() == [14] * 4
        os.ftruncate(pool.fd, 0)
        assert execute(request).status == 0
        assert result.asarray(np.float32).tolist() == [0] * 4
        assert prepared.run(X, X)[0].tolist() == (X + X).tolist()

    def test_its_text(self, connect_dsp):
        """It names the driver, the kind and the reason."""
        prepared, burst = connect_dsp
        for execute in (prepared.execute, burst.execute):
            result = execute(Request(*LINEAR, (pool_of(magic=b"HELP"),)))
            assert "the driver dsp refuses map_memory of kind com.example.heap: the memory does not" in result.message

    @pytest.mark.parametrize(
        "said",
        [
            [KIND],
            [KIND, 64],
            [KIND, 64, START],
            [KIND, 64, [START], 0],
            [KIND, -1, [START]],
            [KIND, 0, [START]],
            [KIND, 2**63, [START]],
            [KIND, True, [START]],
            [KIND, 64, [2**63]],
            [KIND, 64, ["one"]],
            [KIND, 64, [True]],
            [KIND, 64, [0] * 17],
            [KIND, 64, [[START]]],
        ],
    )
    def test_a_description(self, connect_dsp, said, monkeypatch):
        """What is not [kind, bytes, [integers]] never reaches the driver."""
        prepared, burst = connect_dsp
        for execute in (prepared.execute, burst.execute):
            pool = pool_of()
            monkeypatch.setattr(pool, "to_wire", lambda: said)
            assert execute(Request(*LINEAR, (pool,))).status == INVALID
        assert prepared.run(X, X)[0].tolist() == (X + X).tolist()

    def test_an_unknown_kind(self, connect_dsp, device):
        """The error names the kinds that the device knows, its own among them."""
        prepared, burst = connect_dsp
        with heap() as fd:
            other = Memory.from_handle(fd, 64, "com.example.other", (START,))
        for execute in (prepared.execute, burst.execute):
            result = execute(Request(*LINEAR, (other,)))
            assert result.status == ErrorStatus.GENERAL_FAILURE
            assert "com.example.other" in result.message
            assert "ashmem, mmap_fd, hardware_buffer_blob, hardware_buffer, com.example.heap" in result.message
        with device.prepare(sum_model()) as reference:
            assert reference.execute(Request(*LINEAR, (pool_of(),))).status == ErrorStatus.GENERAL_FAILURE

    @pytest.mark.parametrize("what", ["map raises", "map returns nonsense"])
    @pytest.mark.parametrize("prepared", [TROUBLED], indirect=True)
    def test_a_driver(self, prepared, place, what):
        """One that raises something else, or returns no memory, is named in a GENERAL_FAILURE."""
        trouble = Path(place.path, "trouble")
        trouble.write_text(what)
        with prepared.burst() as burst:
            for execute in (prepared.execute, burst.execute):
                result = execute(Request(*LINEAR, (pool_of(),)))
                assert result.status == ErrorStatus.GENERAL_FAILURE
                assert "the driver dsp" in result.message
            trouble.unlink()
            for execute in (prepared.execute, burst.execute):
                assert execute(Request(*LINEAR, (pool_of(),))).status == 0


def test_a_kind_is_named_like_an_extension(place):
    """A driver that takes a name of ours for its own kind does not start, and its author is told."""
    with pytest.raises(driver.DeviceFailed, match="own_memory_kinds: 'ashmem' is not named like an extension"):
        driver.connect("burst_test_devices.heap:Misnamed")


def of_descriptor(fd):
    """What is not a heap. Owns the descriptor."""
    try:
        return Memory.from_handle(fd, 64, KIND, (START,))
    finally:
        os.close(fd)


@pytest.fixture(scope="module")
def _dsp(shared):
    with pytest.MonkeyPatch.context() as patch:
        shared.enter(patch)
        with driver.connect(DSP) as device, device.prepare(sum_model()) as prepared, prepared.burst() as burst:
            yield prepared, burst


@pytest.fixture
def connect_dsp(_dsp):
    """x + y on a DSP that all tests share, and a burst."""
    return _dsp


class TestConstants:
    """A model's constants cannot lie in it."""

    def test_they_are_refused_with_the_reason(self, device):
        """An operation on one is not supported, and the reason names the kinds that are; so is it with the DSP."""
        pool = Memory.frozen(np.ones(4096, np.float32))
        m = driver.ModelBuilder()
        x = m.input("float32", (1, 4))
        m.output(m.operation("MUL", m.operation("ADD", x, np.ones(4, np.float32), 0), constant(m, pool), 0))
        model = m.build()
        frozen_memory(pool.asarray()).kind = KIND
        assert device.supported_operations(model) == [True, False]
        assert "hardware_buffer or hardware_buffer_blob or mmap_fd, or give it as an array" in device.explain(model)[1]
        with pytest.raises(GeneralFailure, match=r"memory of kind com\.example\.heap, which the device cannot"):
            device.prepare(model)


def constant(builder, pool):
    return builder.constant(pool.asarray(np.float32, 4), by_reference=True)


class TestClient:
    """What a client's own process does with such memory."""

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ((64, "heap", ()), "com.example.heap"),
            ((64, "Com.Example", ()), "com.example.heap"),
            ((0, KIND, ()), "nbytes=0"),
            ((2**63, KIND, ()), "nbytes="),
            ((64, KIND, (2**63,)), r"fields\[0\]="),
            ((64, KIND, (1, "two")), r"fields\[1\]='two'"),
            ((64, KIND, range(17)), "at most 16"),
        ],
    )
    def test_wrong_arguments(self, arguments, said):
        """ValueError, with the argument and what it may be. No descriptor is left."""
        gc.collect()  # of tests before this one
        before = len(os.listdir("/proc/self/fd"))
        with heap() as fd, pytest.raises(ValueError, match=said):
            Memory.from_handle(fd, *arguments)
        assert len(os.listdir("/proc/self/fd")) <= before

    def test_it_is_not_mapped(self):
        """Its bytes are for the library that made it."""
        with pytest.raises(ValueError, match=r"com\.example\.heap is not mapped here"):
            pool_of().asarray()

    def test_it_pickles(self):
        """Between one's own processes, with its fields."""
        pool = pool_of(fields=(START, -5))
        found = pickle.loads(reduction.ForkingPickler.dumps(pool))
        assert found.to_wire() == pool.to_wire() == [KIND, 64, [START, -5]]
        assert found.is_same_memory(pool)

    def test_the_cpu_cannot_use_it(self, monkeypatch):
        """A compiled model on the CPU refuses it, and says why."""
        with driver.compile(sum_model(), devices=["cpu"]) as compiled:
            result = compiled.execute(Request(*LINEAR, (pool_of(),)))
            assert result.status == ErrorStatus.GENERAL_FAILURE
            assert "'com.example.heap': this device knows ashmem" in result.message

    def test_a_recording_goes_on(self, connect_dsp, tmp_path):
        """A request whose inputs lie in it is counted as left out; the request itself is executed."""
        prepared, _ = connect_dsp
        with record(tmp_path / "tape") as tape, prepared.device.prepare(sum_model()) as again, again.burst() as burst:
            assert burst.execute(Request(*LINEAR, (pool_of(),))).status == 0
            assert again.execute(Request(*LINEAR, (pool_of(),))).status == 0
            mixed = Memory.create(32)
            request = Request((at(0), at(16)), (RequestArgument(pool=1, length=16),), (mixed, pool_of()))
            assert burst.execute(request).status == 0
        assert sum(tape.left_out.values()) == 2
        assert tape.runs == 1
