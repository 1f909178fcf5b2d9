"""Pools of a client in memory of a GPU, on the tests' libcuda.so.1: kind `nvidia.cuda_fd`, and DLPack both ways."""

import ctypes
import faulthandler
import gc
import os
import pickle
import subprocess
from multiprocessing import reduction
from pathlib import Path

import numpy as np
import pytest
from fake_cuda import Call, FakeCuda, Word
from request_ways import executes

import driver
from burst import (
    BurstError,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    Memory,
    Request,
    RequestArgument,
    ResourceExhaustedPersistent,
)
from driver import BufferDesc, BufferRole
from driver.devices.cuda import gpu_pool
from driver.devices.cuda.context import CudaContext
from driver.devices.cuda.device_buffers import CUDA_FD
from driver.devices.cuda.driver_api import CudaLibrary
from driver.devices.cuda.gpu_pool import GpuPool
from driver.devices.cuda.gpu_tensor import GpuTensor, borrowed, lent_tensors

GPU = "burst_test_devices.gpu:CudaAdd"
X = np.arange(1, 5, dtype=np.float32).reshape(1, 4)
GRANULE = 2 << 20
CPU = (1, 0)


@pytest.fixture
def gpu(place, monkeypatch):
    """One GPU for this process and for its devices."""
    fake = FakeCuda(Path(place.path))
    contexts = {}

    def context(ordinal=0):
        if ordinal not in contexts:
            contexts[ordinal] = CudaContext(CudaLibrary(str(fake.path)), ordinal)
        return contexts[ordinal]

    monkeypatch.setattr(gpu_pool, "cuda_context", context)
    fake.configure()
    return fake


def adding(value=1.0):
    """x + value."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (1, 4))
    builder.output(builder.operation("ADD", x, np.full(1, value, np.float32), 0))
    return builder.build()


@pytest.fixture
def prepared(gpu):
    with driver.connect(GPU) as device, device.prepare(adding()) as found:
        yield found


def value_at(pool, offset=0):
    pool.copy_to(found := np.empty(4, np.float32), offset)
    return found.tolist()


def at(source, target):
    """From one offset of a pool to another one."""
    return (RequestArgument(offset=source, length=16),), (RequestArgument(offset=target, length=16),)


class TestRequests:
    """Executions on a client's memory of the GPU."""

    @pytest.mark.parametrize("way", ["plain", "async", "fenced", "burst"])
    def test_nothing_leaves_the_gpu(self, prepared, gpu, way):
        """On every way, at any offset: no copy in or out, and the client finds the value where it asked for it."""
        pool = GpuPool.allocate(4096)
        pool.copy_from(X, 64)
        before = gpu[Word.COPIES_IN], gpu[Word.COPIES_OUT], gpu[Word.KERNELS]
        with prepared.burst() as burst:
            execute = executes(prepared, burst)[way]
            for source, target in ((64, 256), (256, 64), (64, 4000)):
                assert execute(Request(*at(source, target), (pool,))).status == 0
        assert (gpu[Word.COPIES_IN], gpu[Word.COPIES_OUT]) == before[:2]
        assert gpu[Word.KERNELS] - before[2] == 3
        assert value_at(pool, 4000) == (X[0] + 3).tolist()

    def test_beside_memory_of_other_kinds(self, prepared, gpu):
        """A frame in the CPU's memory, its result on the GPU; from there to a buffer of the device."""
        pool, frame = GpuPool.allocate(64), Memory.create(64)
        frame.asarray(np.float32, 4)[:] = X
        ends = (RequestArgument(length=16),), (RequestArgument(pool=1),)
        assert prepared.execute(Request(*ends, (frame, pool))).status == 0
        assert value_at(pool) == (X[0] + 1).tolist()
        state = prepared.device.allocate(BufferDesc(), [prepared], [BufferRole(0, 0)], [BufferRole(0, 0)])
        copies = gpu[Word.COPIES_IN], gpu[Word.COPIES_OUT]
        assert prepared.execute(Request(*ends, (pool, state))).status == 0
        assert (gpu[Word.COPIES_IN], gpu[Word.COPIES_OUT]) == copies
        state.copy_to(found := np.empty_like(X))
        assert found.tolist() == (X + 2).tolist()

    @pytest.mark.parametrize(
        ("source", "target"),
        [
            (RequestArgument(offset=GRANULE, length=16), RequestArgument()),
            (RequestArgument(offset=GRANULE - 8), RequestArgument()),
            (RequestArgument(length=8), RequestArgument()),
            (RequestArgument(offset=2, length=16), RequestArgument()),
            (RequestArgument(length=16), RequestArgument(offset=GRANULE - 8, length=16)),
        ],
    )
    def test_what_does_not_fit_is_refused(self, prepared, gpu, source, target):
        """Before the GPU is asked for anything; an output that is too small is told as such."""
        before = gpu[Word.KERNELS]
        result = prepared.execute(Request((source,), (target,), (GpuPool.allocate(64),)))
        assert result.status == ErrorStatus.INVALID_ARGUMENT
        assert gpu[Word.KERNELS] == before

    def test_an_output_that_is_too_small(self, prepared, gpu):
        """As in every other pool, with the shape that it needs."""
        request = Request(
            (RequestArgument(length=16),), (RequestArgument(offset=64, length=8),), (GpuPool.allocate(64),)
        )
        result = prepared.execute(request)
        assert result.status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
        assert result.output_shapes[0].dimensions == (1, 4)


class TestHandles:
    """What a client can say that is not so."""

    def test_wrong_handles(self, prepared, gpu):
        """What describes no memory of a GPU is an INVALID_ARGUMENT; memory of another GPU, of another size than it has,
        or of no GPU at all, a GENERAL_FAILURE; both with the reason.
        """
        pool = GpuPool.allocate(64)
        (number, other), fd = pool.numbers, os.memfd_create("no gpu")
        os.write(fd, b"x")
        cases = {
            "the memory is of another GPU": (GeneralFailure, pool.fd, GRANULE, (number, other + 1)),
            "is a multiple of 2097152": (InvalidArgument, pool.fd, 4096, pool.numbers),
            "CUDA does not map it": (GeneralFailure, pool.fd, 2 * GRANULE, pool.numbers),
            "cuMemImportFromShareableHandle": (GeneralFailure, fd, GRANULE, pool.numbers),
            "fields=": (InvalidArgument, pool.fd, GRANULE, ()),
        }
        for words, (kind, given, nbytes, fields) in cases.items():
            wrong = Memory.from_handle(given, nbytes, CUDA_FD, fields)
            with pytest.raises(kind, match=words):
                prepared.execute(Request(*at(0, 64), (wrong,))).raise_for_status()
        os.close(fd)
        assert prepared.execute(Request(*at(0, 64), (pool,))).status == 0

    def test_a_device_without_a_gpu(self, gpu, place):
        """It names the kinds that it knows."""
        request = Request(*at(0, 64), (GpuPool.allocate(64),))
        with (
            driver.connect("reference") as device,
            device.prepare(adding()) as prepared,
            pytest.raises(GeneralFailure, match=r"nvidia\.cuda_fd.*this device knows ashmem"),
        ):
            prepared.execute(request).raise_for_status()

    def test_a_full_gpu(self, gpu):
        """The error of `allocate` has the figures."""
        gpu[Word.TOTAL] = GRANULE
        with pytest.raises(
            ResourceExhaustedPersistent, match=r"nbytes=4194304: the GPU has 2097152 of 2097152 bytes free"
        ):
            GpuPool.allocate(2 * GRANULE)
        with pytest.raises(ValueError, match="at least one byte"):
            GpuPool.allocate(0)


class TestDeaths:
    """The rules of memory of the CPU hold."""

    def test_a_dropped_pool_is_the_devices_no_more(self, prepared, gpu, kit):
        """The last reference unmaps it on both sides."""
        pool = GpuPool.allocate(64)
        assert prepared.execute(Request(*at(0, 64), (pool,))).status == 0
        assert gpu.used >= 2 * GRANULE  # once in each process
        del pool
        gc.collect()
        kit.until(lambda: gpu.used < GRANULE)

    @pytest.mark.integration
    def test_a_killed_client(self, prepared, gpu, kit):
        """kill -9 of a client whose pool the device has mapped: the memory is free."""
        program = (
            "import sys, numpy as np, driver\n"
            "from pathlib import Path\n"
            "from burst import Request, RequestArgument\n"
            "from driver.devices.cuda.gpu_pool import GpuPool\n"
            "m = driver.ModelBuilder(); x = m.input('float32', (1, 4))\n"
            "m.output(m.operation('ADD', x, np.ones(1, np.float32), 0))\n"
            "device = driver.connect(sys.argv[1]); prepared = device.prepare(m.build())\n"
            "ends = (RequestArgument(length=16),), (RequestArgument(offset=64, length=16),)\n"
            "pool = GpuPool.allocate(64); prepared.execute(Request(*ends, (pool,))).raise_for_status()\n"
            "print('ready', flush=True); sys.stdin.read()\n"
        )
        used = gpu.used
        with pytest.MonkeyPatch.context() as patch:
            home = Path(os.environ["BURST_RUNTIME_DIR"]) / "home"
            patch.setenv("HOME", str(home))
            gpu.configure()
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            with kit.python(program, GPU, **pipes) as process:
                assert process.stdout.readline() == "ready\n"
                assert gpu.used >= used + 2 * GRANULE
                process.kill()
        kit.until(lambda: gpu.used == used)

    def test_a_killed_engine_leaves_the_value(self, prepared, gpu, kit):
        """The pool is the client's: the burst goes on with the next engine, which maps it again."""
        pool = GpuPool.allocate(64)
        pool.copy_from(X)
        with prepared.burst(recover=True) as burst:
            assert burst.execute(Request(*at(0, 0), (pool,))).status == 0
            os.kill(prepared.device.engine_pid, 9)
            kit.until(lambda: gpu.used <= GRANULE)
            assert value_at(pool) == (X[0] + 1).tolist()
            kit.until(lambda: served(burst, pool))
        assert value_at(pool, 64) == (X[0] + 2).tolist()

    def test_its_own_processes_share_it(self, gpu):
        """A pickled pool is the same memory."""
        pool = GpuPool.allocate(64)
        pool.copy_from(X)
        other = pickle.loads(reduction.ForkingPickler.dumps(pool))
        other.copy_from(X + 1)
        assert value_at(pool) == (X[0] + 1).tolist()


def served(burst, pool):
    try:
        return burst.execute(Request(*at(0, 64), (pool,))).status == 0
    except (BurstError, driver.DriverError):
        return False


class TestDlpack:
    """Tensors for other libraries, and theirs."""

    def test_what_a_consumer_sees(self, gpu):
        """Device, type and shape, by DLPack and by the interface that CuPy and Numba also read."""
        pool = GpuPool.allocate(4096)
        tensor = pool.tensor(np.float16, (2, 3), offset=64)
        assert tensor.__dlpack_device__() == (2, 0)
        with borrowed(tensor, (2, 0), stream=0) as found:
            assert found == (pool.address + 64, 12, "f16", (2, 3))
        interface = tensor.__cuda_array_interface__
        assert interface["data"] == (pool.address + 64, False)
        assert (interface["shape"], interface["typestr"], interface["version"]) == ((2, 3), "<f2", 3)
        assert pool.tensor().shape == (GRANULE,)
        for wrong in ({"offset": 1}, {"shape": GRANULE}, {"offset": GRANULE + 4}, {"shape": (-1, 4)}):
            with pytest.raises(ValueError, match=r"offset|do not fit|from 0 on"):
                pool.tensor(np.float32, **wrong)
        with pytest.raises(BufferError, match="stays where it is"):
            tensor.__dlpack__(dl_device=CPU)

    @pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "i1", "u2", "i8", "c8", "?"])
    def test_numpy_reads_our_capsules(self, dtype):
        """A tensor whose device is the CPU shows that the capsule is what consumers expect: shape, type, memory."""
        source = np.arange(24).astype(dtype)
        tensor = GpuTensor(source, source.ctypes.data, dtype, (2, 3, 4), CPU)
        found = np.from_dlpack(tensor)
        assert found.dtype == source.dtype
        assert (found == source.reshape(2, 3, 4)).all()
        assert found.ctypes.data == source.ctypes.data

    def test_what_is_lent_comes_back(self):
        """The pool lives as long as what a consumer has made of it; a capsule that nobody takes is given back, too."""
        source, lent = np.arange(4), lent_tensors()
        tensor = GpuTensor(source, source.ctypes.data, source.dtype, (4,), CPU)
        found = np.from_dlpack(tensor)
        del tensor
        assert lent_tensors() == lent + 1
        assert found.tolist() == [0, 1, 2, 3]
        del found
        assert lent_tensors() == lent
        capsule = GpuTensor(source, source.ctypes.data, source.dtype, (4,), CPU).__dlpack__()
        assert lent_tensors() == lent + 1
        del capsule
        assert lent_tensors() == lent

    def test_tensors_of_others_go_in_on_the_gpu(self, gpu):
        """A copy within the GPU, on a stream that the tensor's library lets wait; nothing stays borrowed."""
        a, b = GpuPool.allocate(4096), GpuPool.allocate(4096)
        a.copy_from(X, 64)
        asked = []

        class Torch:
            def __dlpack__(self, *, stream):
                asked.append(stream)
                return a.tensor(np.float32, (1, 4), 64).__dlpack__()

            def __dlpack_device__(self):
                return (2, 0)

        before, lent = (gpu[Word.COPIES_IN], gpu[Word.COPIES_OUT]), lent_tensors()
        b.copy_from(Torch(), 128)
        assert (gpu[Word.COPIES_IN], gpu[Word.COPIES_OUT]) == before
        assert value_at(b, 128) == X[0].tolist()
        assert lent_tensors() == lent
        assert asked[0] > 2  # a stream of ours, and none of CUDA's own

    def test_what_cannot_go_in(self, gpu):
        """Tensors of another GPU, tensors with gaps, too many bytes, and what is no tensor."""
        pool = GpuPool.allocate(64)

        class Elsewhere:
            def __dlpack__(self, *, stream):
                raise AssertionError

            def __dlpack_device__(self):
                return (2, 1)

        with pytest.raises(ValueError, match=r"DLPack's device \(2, 1\)"):
            pool.copy_from(Elsewhere())
        with pytest.raises(ValueError, match="do not fit"):
            pool.copy_from(np.zeros(GRANULE + 1, np.uint8))
        with pytest.raises(ValueError, match="do not fit"):
            pool.copy_to(np.zeros(8), offset=GRANULE)
        source = np.arange(16).reshape(4, 4)
        with pytest.raises(ValueError, match="with gaps"), borrowed(_CpuTensor(source.T), CPU, None):
            pass
        with borrowed(_CpuTensor(source), CPU, None) as found:
            assert (found.address, found.nbytes, found.shape) == (source.ctypes.data, 128, (4, 4))
        with pytest.raises(ValueError, match="no __dlpack__"), borrowed(object(), CPU, None):
            pass

    def test_a_failed_copy_is_told(self, gpu):
        """By the name of CUDA's call and its error."""
        pool = GpuPool.allocate(64)
        gpu.fail(Call.COPY_IN, 1)
        with pytest.raises(Exception, match=r"cuMemcpyHtoD.*CUDA_ERROR_INVALID_VALUE"):
            pool.copy_from(X)


class _CpuTensor:
    """An array of numpy's, by DLPack alone."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, *, stream):
        return self._array.__dlpack__(stream=stream)

    def __dlpack_device__(self):
        return CPU


@pytest.mark.integration
def test_the_cpu_cannot_read_a_pool(gpu):
    """It has no array; its address ends the process that touches it."""
    pool = GpuPool.allocate(64)
    with pytest.raises(ValueError, match="not mapped here"):
        pool.asarray()
    if pid := os.fork():
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == 11
    else:
        faulthandler.disable()
        ctypes.memset(pool.address, 1, 1)
        os._exit(0)
