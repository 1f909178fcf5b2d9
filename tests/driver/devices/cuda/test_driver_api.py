"""CUDA's driver API as Burst uses it, on a fake library: what it makes, frees, and says when it fails."""

import mmap
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from fake_cuda import Call, FakeCuda, Word

from burst.exhaustion import exhausted
from driver.devices.cuda.context import CudaContext, cuda_context
from driver.devices.cuda.driver_api import CudaFailed, CudaLibrary, CudaMissing, CudaOutOfMemory, ffi
from driver.devices.nvidia import library_path

PTX = b".visible .entry add_scalar(\n.visible .entry trap(\n"
TOUCH = """
import ctypes, sys
from driver.devices.cuda.context import CudaContext
from driver.devices.cuda.driver_api import CudaLibrary
memory = CudaContext(CudaLibrary(sys.argv[1]), 0).allocate(4096)
ctypes.memset(memory.address, 1, 1)
"""
IMPORT = """
import sys
from driver.devices.cuda.context import CudaContext
from driver.devices.cuda.driver_api import CudaLibrary
context = CudaContext(CudaLibrary(sys.argv[1]), 0)
shared = context.imported(int(sys.argv[2]), int(sys.argv[3])).map()
stream = context.stream()
stream.fill(shared.address, 7, shared.nbytes)
stream.synchronize()
"""


def address(array):
    return array.ctypes.data


def page(nbytes=4096):
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def test_what_is_copied_in_comes_out(context):
    """Bytes go to the GPU and back, by a stream and without one, in the order of the calls."""
    source, found = np.arange(1000, dtype=np.float32), np.zeros(1000, np.float32)
    with (
        context.allocate(source.nbytes) as memory,
        context.allocate(source.nbytes) as other,
        context.stream() as stream,
    ):
        stream.copy_in(memory.address, address(source), source.nbytes)
        stream.copy_across(other.address, memory.address, source.nbytes)
        stream.copy_out(address(found), other.address, source.nbytes)
        stream.synchronize()
        assert (found == source).all()
        backwards = source[::-1].copy()
        context.copy_in(memory.address, address(backwards), source.nbytes)
        context.copy_out(address(found), memory.address, source.nbytes)
        assert (found == backwards).all()


@pytest.mark.integration
def test_the_cpu_cannot_touch_memory_of_the_gpu(fake):
    """A process that writes to an address of the GPU ends by a signal: no test can take it for its own memory."""
    done = subprocess.run([sys.executable, "-c", TOUCH, fake.path], check=False)
    assert done.returncode == -signal.SIGSEGV


def test_a_kernel_runs_between_the_copies(context):
    """A function of a module runs on a stream with the arguments that it is given."""
    source, found = np.arange(1000, dtype=np.float32), np.zeros(1000, np.float32)
    kernel, stream = context.kernel(PTX, "add_scalar"), context.stream()
    with context.allocate(source.nbytes) as memory:
        stream.copy_in(memory.address, address(source), source.nbytes)
        at, value, n = ffi.new("uint64_t *", memory.address), ffi.new("float *", 2.5), ffi.new("uint32_t *", 1000)
        stream.launch(kernel, [4], [256], [at, at, value, n])
        stream.copy_out(address(found), memory.address, found.nbytes)
        stream.synchronize()
    assert (found == source + 2.5).all()
    with pytest.raises(CudaFailed, match=r"cuModuleGetFunction\(\): CUDA_ERROR_NOT_FOUND \(500"):
        context.kernel(PTX, "subtract")


def test_memory_is_counted_and_freed_once(context, fake):
    """What is allocated, pinned or registered is the process's until `close`; a second `close` does nothing."""
    used, registered, memory = fake.used, fake.registered, page()
    things = context.allocate(5000), context.pinned(8192), context.register(address(memory), memory.nbytes)
    assert (fake.used - used, fake.registered - registered) == (5000, 2)
    for thing in (*things, *things):
        thing.close()
    assert (fake.used, fake.registered) == (used, registered)
    assert not things[0].is_open


def test_freeing_needs_no_lock(library_of_fake):
    """All functions are found when the library is loaded: later, cffi would look for them under a lock that the thread
    in which Python frees something may have.
    """
    library = library_of_fake[1].lib
    assert {name for name in dir(library) if name.startswith("cu")} <= set(vars(library))


def test_running_out_is_a_memory_error(context, fake):
    """CudaOutOfMemory names the call and its size, and clients get a status that says that something has run out."""
    with pytest.raises(
        CudaOutOfMemory, match=rf"cuMemAlloc\({2 << 30}\): CUDA_ERROR_OUT_OF_MEMORY .*free memory of the GPU"
    ):
        context.allocate(2 << 30)
    fake.fail(Call.REGISTER, 2)
    memory = page()
    with pytest.raises(CudaOutOfMemory) as caught:
        context.register(address(memory), memory.nbytes)
    assert exhausted(caught.value)
    assert not caught.value.is_lost


def test_read_only_memory_needs_the_flag(context, fake, tmp_path):
    """A mapping that this process may only read is pinned as read-only, where the GPU can; else the call fails."""
    (tmp_path / "file").write_bytes(bytes(4096))
    with (tmp_path / "file").open("rb") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ), np.uint8)
    with pytest.raises(CudaFailed, match="CUDA_ERROR_INVALID_VALUE"):
        context.register(address(memory), 4096)
    assert context.registers_read_only
    context.register(address(memory), 4096, is_read_only=True).close()
    fake[Word.NO_READ_ONLY] = 1
    assert not context.registers_read_only
    with pytest.raises(CudaFailed, match=r"CUDA_ERROR_NOT_SUPPORTED .*this GPU or its driver cannot do it"):
        context.register(address(memory), 4096, is_read_only=True)


def test_a_range_is_registered_once(context):
    """A second registration of the same memory is refused with CUDA's own name for it."""
    memory = page()
    with context.register(address(memory), 4096), pytest.raises(CudaFailed, match="ALREADY_REGISTERED"):
        context.register(address(memory), 4096)


def test_streams_run_beside_each_other(context, fake, kit):
    """While a kernel of one stream goes on, another one copies; an event makes one wait for the other."""
    memory, target = context.pinned(4096), context.allocate(4096)
    first, second, third = (context.stream() for _ in range(3))
    fake[Word.HOLD_KERNELS] = 1
    copies = fake[Word.COPIES_IN]
    first.copy_across(target.address, target.address, 16)
    event = first.record()
    kit.until(lambda: fake[Word.HELD])
    third.wait(event)
    third.copy_in(target.address, memory.address, 4096)
    second.copy_in(target.address, memory.address, 4096)
    second.synchronize()
    assert fake[Word.HELD] == 1
    assert fake[Word.COPIES_IN] == copies + 1
    assert not event.is_done()
    assert not third.is_done()
    fake[Word.HOLD_KERNELS] = 0
    event.synchronize()
    third.synchronize()
    assert fake[Word.COPIES_IN] == copies + 2


def test_times_of_events(context):
    """Two events with clocks say how long the work between them took."""
    stream, memory = context.stream(), context.allocate(16)
    begin = stream.record(context.event(is_timed=True))
    stream.fill(memory.address, 1, 16)
    end = stream.record(context.event(is_timed=True))
    stream.synchronize()
    assert end.seconds_since(begin) >= 0


def test_a_host_function_is_called_in_the_streams_order(context):
    """It runs in a thread of the library when the work before it is done, with its argument."""
    told, seen, stream = threading.Event(), [], context.stream()

    @ffi.callback("void(void *)")
    def notice(argument):
        seen.append(int(ffi.cast("uintptr_t", argument)))
        told.set()

    memory = context.allocate(16)
    stream.fill(memory.address, 1, 16)
    stream.host_function(int(ffi.cast("uintptr_t", notice)), 42)
    assert told.wait(20)
    assert seen == [42]


def test_a_lost_context_says_so(context, fake):
    """After a fault of the GPU every call fails with a code that `is_lost` knows, and the message says what helps."""
    stream = context.stream()
    stream.launch(context.kernel(PTX, "trap"), [1], [1], [])
    with pytest.raises(
        CudaFailed, match=r"cuStreamSynchronize\(\): CUDA_ERROR_LAUNCH_FAILED \(719.*engine has to start again"
    ):
        stream.synchronize()
    with pytest.raises(CudaFailed) as caught:
        stream.is_done()
    assert caught.value.is_lost
    fake[Word.LOST] = 999
    with pytest.raises(CudaFailed, match="dmesg") as caught:
        context.allocate(16)
    assert caught.value.is_lost


def test_which_codes_mean_that_the_context_is_lost():
    """Those of which cuda.h says that the process has to end: faults of kernels and hardware, not wrong arguments."""
    lost = {code for code in range(1000) if CudaFailed(code, "CUDA_ERROR", "cuLaunchKernel()").is_lost}
    assert {214, 220, 226, 700, 702, 710, 715, 716, 719, 721, 999} <= lost
    assert not lost & {1, 2, 46, 100, 200, 201, 219, 222, 500, 600, 701, 712, 713, 720, 801}


def test_an_address_that_is_none_ends_the_context(context):
    """A copy to memory that was freed is found, as the GPU finds it: the context is lost."""
    memory, stream, source = context.allocate(64), context.stream(), np.zeros(64, np.uint8)
    memory.close()
    with pytest.raises(CudaFailed, match="ILLEGAL_ADDRESS"):
        stream.copy_in(memory.address, address(source), 64)


@pytest.mark.integration
def test_memory_of_the_gpu_crosses_processes(context, fake):
    """A descriptor of shareable memory, mapped in another process, is the same memory, and free when both let it go."""
    before, found = fake.used, np.zeros(10, np.uint8)
    shared = context.shareable(10)
    assert shared.nbytes == context.granule
    mapped, fd = shared.map(), shared.export()
    shared.close()  # the mapping keeps it
    words = [sys.executable, "-c", IMPORT, str(fake.path), str(fd), str(shared.nbytes)]
    subprocess.run(words, check=True, pass_fds=[fd])
    context.copy_out(address(found), mapped.address, 10)
    assert (found == 7).all()
    os.close(fd)
    mapped.close()
    assert fake.used == before


def test_a_missing_library_is_told_plainly(tmp_path):
    """CudaMissing names the library, where it comes from and the option; a machine without a GPU is told apart."""
    with pytest.raises(
        CudaMissing, match=r"/none\.so, which cannot be loaded .*NVIDIA's driver.*cuda\.toml may say where"
    ):
        CudaLibrary(f"{tmp_path}/none.so")
    none = FakeCuda(tmp_path, devices=0)
    with pytest.raises(
        CudaMissing, match=r"finds no GPU: cuInit\(\): CUDA_ERROR_NO_DEVICE .*nvidia-smi must list a GPU"
    ):
        CudaLibrary(str(none.path))
    none[Word.VERSION] = 11010
    with pytest.raises(CudaMissing, match=r"is of CUDA 11\.1; Burst needs 11\.4 or later"):
        CudaLibrary(str(none.path))


def test_a_gpu_that_is_not_there(library_of_fake):
    """The number of a GPU is checked against those that CUDA finds."""
    with pytest.raises(CudaMissing, match="device=3: CUDA finds 1 GPUs"):
        CudaContext(library_of_fake[1], 3)


def test_the_option_says_where_the_library_lies(fake, tmp_path, monkeypatch):
    """cuda.toml names the library for this process and the engines that it starts; one context serves all callers."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert library_path() == "libcuda.so.1"
    fake.configure()
    assert library_path() == str(fake.path)
    assert cuda_context() is cuda_context()
    assert (cuda_context().name, cuda_context().capability, cuda_context().copy_engines) == ("Fake 0", (9, 0), 2)
    assert cuda_context().uuid.startswith("GPU-a0a0a0a0-")
    assert cuda_context().memory_info()[1] == fake[Word.TOTAL]
    (tmp_path / ".config/burst/cuda.toml").write_text("library = 3")
    with pytest.raises(ValueError, match="library = 3 must be the path"):
        library_path()
