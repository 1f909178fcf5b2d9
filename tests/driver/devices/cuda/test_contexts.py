"""Which context is current when CUDA is called, by Python's garbage collector too, and what becomes of errors then."""

import mmap
import os
import threading
import weakref

import numpy as np
import pytest
from fake_cuda import Call, FakeCuda, Word

from driver.devices.cuda.context import CudaContext
from driver.devices.cuda.driver_api import CudaFailed, CudaLibrary, CudaOutOfMemory, ffi
from driver.devices.cuda.lane import CudaGpu, GpuExecution


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A machine with two GPUs: the fake, and its library."""
    fake = FakeCuda(tmp_path_factory.mktemp("pair"), devices=2)
    return fake, CudaLibrary(str(fake.path))


def current(library):
    """The number of this thread's current context; 0: it has none."""
    found = ffi.new("CUcontext *")
    library.lib.cuCtxGetCurrent(found)
    return int(ffi.cast("uintptr_t", found[0]))


def in_thread(function):
    """What it returns in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.integration
@pytest.mark.parametrize("is_at_home", [False, True])
def test_two_gpus_in_one_thread(pair, is_at_home):
    """Each call reaches its own GPU, in whichever order; CUDA refuses a stream whose context is not current."""
    contexts = [CudaContext(pair[1], number) for number in range(2)]
    for context in contexts:
        context.is_at_home = is_at_home
    streams = [context.stream() for context in contexts]
    for _ in range(2):
        for stream in streams:
            stream.record().synchronize()


@pytest.mark.parametrize("theirs", [0, 2])
def test_the_current_context_of_a_program_stays(pair, theirs):
    """After our calls a library of the program, such as PyTorch, finds the context that it had left, or none."""
    library = pair[1]

    def found():
        library.lib.cuCtxSetCurrent(ffi.cast("CUcontext", theirs))
        context = CudaContext(library, 0)
        with context.allocate(4096), context.stream() as stream:
            stream.record().synchronize()
        return current(library)

    assert in_thread(found) == theirs


@pytest.mark.parametrize("there", [0, 1, 2])
def test_what_is_collected_is_freed_in_any_thread(pair, there, caplog):
    """The garbage collector frees memory and destroys events and streams of a GPU, whatever context its thread has."""
    fake, library = pair
    context = CudaContext(library, 0)
    used, before = fake.used, fake.calls(Call.EVENT_DESTROY)
    things = [context.allocate(4096), context.event(), context.stream(), context.pinned(4096)]

    def drop():
        library.lib.cuCtxSetCurrent(ffi.cast("CUcontext", there))
        things.clear()
        return current(library)

    assert in_thread(drop) == there
    assert fake.used == used
    assert fake.calls(Call.EVENT_DESTROY) == before + 1
    context.memory_info()
    assert not caplog.records


def test_an_error_of_what_is_freed_is_told(context, fake, caplog):
    """It is logged by the next call, with CUDA's words: the collector itself takes no lock, not even that of a log."""
    memory = context.allocate(4096)
    fake.fail(Call.FREE, 1)
    del memory
    assert not caplog.records
    context.memory_info()
    (record,) = caplog.records
    assert "cuMemFree(" in record.message
    assert "CUDA_ERROR_INVALID_VALUE" in record.message


def test_a_lost_context_is_told_by_whatever_finds_it(context, fake):
    """Any call and any query says so; what is freed then is silent, because all of it is gone."""
    told = []
    context.on_lost = told.append
    memory, event = context.allocate(4096), context.event()
    fake[Word.LOST] = 719
    for call in (lambda: context.allocate(1), event.is_done, context.synchronize):
        with pytest.raises(CudaFailed) as caught:
            call()
        assert told.pop() == str(caught.value)
    memory.close()
    assert not told
    fake[Word.LOST] = 0


def test_a_forked_process_is_told_what_to_do(context, fake):
    """CUDA does not survive a fork: the child gets an error that names the remedy, and frees nothing of its parent."""
    memory, frees = context.allocate(4096), fake.calls(Call.FREE)
    readable, writable = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            memory.close()
            context.allocate(1)
        except CudaFailed as error:
            os.write(writable, str(error).encode())
        finally:
            os._exit(0)
    os.close(writable)
    words = os.read(readable, 4096).decode()
    os.close(readable)
    os.waitpid(pid, 0)
    assert 'start it by "spawn"' in words
    assert fake.calls(Call.FREE) == frees


def test_a_request_that_does_not_fit_gives_its_staging_back(context, fake):
    """What could not be bound because memory ran out holds nothing, however often it is tried."""
    gpu = CudaGpu(context, lambda _: None)
    lane = gpu.lane()
    arrays = [np.frombuffer(mmap.mmap(-1, 4096), np.uint8) for _ in range(2)]
    for array in arrays:
        fake.fail(Call.REGISTER, 1)
        assert not gpu.pools.pin(array)
    GpuExecution(lane, [(arrays[0], 4096)], [(arrays[1], 4096)])
    before = gpu.staging.nbytes
    for n in range(8):
        fake.fail(Call.ALLOC, 2, after=n % 2)
        with pytest.raises(CudaOutOfMemory):
            GpuExecution(lane, [(arrays[0], 4096)], [(arrays[1], 4096)])
    assert gpu.staging.nbytes == before


def test_an_execution_keeps_the_memory_that_it_is_bound_to(context):
    """The client's memory stays mapped as long as what copies to and from it, though nothing else refers to it."""
    lane = CudaGpu(context, lambda _: None).lane()
    arrays = [np.frombuffer(mmap.mmap(-1, 4096), np.uint8) for _ in range(2)]
    alive = [weakref.ref(array) for array in arrays]
    execution = GpuExecution(lane, [(arrays[0], 4096)], [(arrays[1], 4096)])
    arrays.clear()
    assert all(array() is not None for array in alive)
    del execution
    assert not any(array() is not None for array in alive)
