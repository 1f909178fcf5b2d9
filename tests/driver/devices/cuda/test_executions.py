"""Executions on a GPU that is none: pools pinned once, several requests at a time, answers by a host function."""

import numpy as np
import pytest
from fake_cuda import Call, FakeCuda, Word

import burst
import driver

DEVICE = "burst_test_devices.gpu:CudaAdd"
N = 1024


def model(constant=1.0, n=N):
    builder = driver.ModelBuilder()
    x = builder.input("float32", (n,))
    builder.output(builder.operation("ADD", x, np.full(1, constant, np.float32), 0))
    return builder.build()


@pytest.fixture
def fake(tmp_path):
    """A GPU for the engine of this test alone."""
    return FakeCuda(tmp_path)


@pytest.fixture
def gpu(place, fake):
    """A device on the fake, in an engine of its own."""
    fake.configure()
    with driver.connect(DEVICE) as device:
        yield device


@pytest.fixture
def prepared(gpu):
    with gpu.prepare(model()) as found:
        yield found


def test_a_burst_computes_on_the_gpu(prepared, fake):
    """Each request is copied in, computed and copied out; a host function answers all those that were bound before."""
    kernels, functions = fake[Word.KERNELS], fake[Word.HOST_FUNCTIONS]
    with prepared.burst() as b:
        for n in range(10):
            (found,) = b.run(np.full(N, n, np.float32)).outputs
            assert (found == n + 1).all()
        assert fake[Word.KERNELS] - kernels == 10
        assert 8 <= fake[Word.HOST_FUNCTIONS] - functions < 10
        assert fake[Word.PAGEABLE] == 0
        assert b.stats()["runs"] == {"burst": 10, "plain": 0}


def test_the_plain_path_computes_there_too(prepared):
    """One request without a burst."""
    (found,) = prepared.run(np.full(N, 3, np.float32))
    assert (found == 4).all()


@pytest.mark.parametrize("way", ["plain", "burst"])
def test_nothing_is_written_beyond_an_output(prepared, fake, way):
    """An output that is too small is refused with the shape that it needs, before anything is copied."""
    pool = driver.Memory.create(16 * N)
    pool.asarray()[:] = 7
    request = burst.Request(
        (burst.RequestArgument(length=4 * N),), (burst.RequestArgument(offset=8 * N, length=2 * N),), (pool,)
    )
    kernels = fake[Word.KERNELS]
    with prepared.burst() as b:
        for _ in range(3):
            result = (prepared if way == "plain" else b).execute(request)
            assert result.status == burst.ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
            assert result.output_shapes[0].dimensions == (N,)
    assert (pool.asarray() == 7).all()
    assert fake[Word.KERNELS] == kernels


def test_successive_requests_overlap(prepared, fake, kit):
    """While the kernel of one request goes on, the next one is copied in; both answers come, in order."""
    copies, arrays = fake[Word.COPIES_IN], [np.full(N, n, np.float32) for n in range(4)]
    with prepared.burst(depth=2) as b:
        for array in arrays:
            b.submit(array).result()
        copies = fake[Word.COPIES_IN]
        fake[Word.HOLD_KERNELS] = 1
        futures = [b.submit(array) for array in arrays[:2]]
        kit.until(lambda: fake[Word.COPIES_IN] == copies + 2)
        assert not any(future.done() for future in futures)
        fake[Word.HOLD_KERNELS] = 0
        for n, future in enumerate(futures):
            assert (future.result().outputs[0] == n + 1).all()


def test_answers_keep_their_order(prepared, fake):
    """A request that is answered by Python, because it is new, waits for those before it that are on the GPU."""
    with prepared.burst(depth=4) as b:
        for n in range(40):
            futures = [b.submit(np.full(N, n + k, np.float32)) for k in range(4)]
            assert [future.result().outputs[0][0] for future in futures] == [n + k + 1 for k in range(4)]
        assert b.stats()["runs"]["burst"] == 160


def test_pools_are_pinned_once(gpu, fake, kit):
    """Each mapping is registered once, however many requests use it, and unregistered when its client is done."""
    registered = fake.calls(Call.REGISTER)
    with gpu.prepare(model()) as prepared, prepared.burst() as b:
        for n in range(20):
            b.run(np.full(N, n, np.float32))
        once = fake.calls(Call.REGISTER) - registered
        assert 1 <= once <= 4
        for n in range(20):
            b.run(np.full(N, n, np.float32))
        assert fake.calls(Call.REGISTER) - registered == once
        assert fake.registered == once
    kit.until(lambda: fake.registered == 0)


def test_a_pool_that_is_freed_is_unpinned(gpu, fake, kit):
    """`free_memory` unregisters what no execution uses any more, while the burst goes on."""
    with gpu.prepare(model()) as prepared, prepared.burst() as b:
        pool = burst.Memory.create(8 * N)
        request = burst.Request(
            (burst.RequestArgument(pool=0, length=4 * N),),
            (burst.RequestArgument(pool=0, offset=4 * N, length=4 * N),),
            (pool,),
        )
        for n in range(3):
            pool.asarray(np.float32)[:N] = n
            assert b.execute(request).status == burst.ErrorStatus.NONE
            assert (pool.asarray(np.float32)[N:] == n + 1).all()
        before = fake.registered
        b.free_memory(pool)
        kit.until(lambda: fake.registered == before - 1)


def test_read_only_pools_are_pinned_as_such(gpu, fake):
    """An input in frozen memory, which the engine may only read, is registered with the flag."""
    frozen, target = burst.Memory.frozen(np.full(N, 6, np.float32)), burst.Memory.create(4 * N)
    whole = burst.RequestArgument(length=4 * N)
    request = burst.Request((whole,), (whole._replace(pool=1),), (frozen, target))
    with gpu.prepare(model()) as prepared, prepared.burst() as b:
        for _ in range(3):
            assert b.execute(request).status == burst.ErrorStatus.NONE
        assert (target.asarray(np.float32) == 7).all()
        assert b.stats()["copied_bytes"]["bulk"] == 0


def test_what_cannot_be_pinned_is_staged(gpu, fake):
    """Where CUDA refuses a mapping, its arguments go through pinned blocks, and the copies are counted."""
    fake[Word.NO_READ_ONLY] = 1
    frozen, target = burst.Memory.frozen(np.full(N, 6, np.float32)), burst.Memory.create(4 * N)
    whole = burst.RequestArgument(length=4 * N)
    request = burst.Request((whole,), (whole._replace(pool=1),), (frozen, target))
    with gpu.prepare(model()) as prepared, prepared.burst() as b:
        for n in range(1, 4):
            assert b.execute(request).status == burst.ErrorStatus.NONE
            assert (target.asarray(np.float32) == 7).all()
            assert b.stats()["copied_bytes"]["bulk"] == n * 4 * N
    assert fake[Word.PAGEABLE] == 0


def test_outputs_are_staged_too(gpu, fake):
    """An output that was copied to a block is in the client's memory when the answer comes."""
    fake.fail(Call.REGISTER, 1)
    target, source = burst.Memory.create(8 * N), burst.Memory.create(4 * N)
    request = burst.Request(
        (burst.RequestArgument(pool=1, length=4 * N),),
        (burst.RequestArgument(pool=0, offset=0, length=4 * N),),
        (target, source),
    )
    with gpu.prepare(model()) as prepared, prepared.burst() as b:
        fake.fail(Call.REGISTER, 1)
        for n in range(5):
            source.asarray(np.float32)[:] = n
            fake.fail(Call.REGISTER, 1, after=1)
            assert b.execute(request).status == burst.ErrorStatus.NONE
            assert (target.asarray(np.float32)[:N] == n + 1).all()


def test_memory_is_free_again(gpu, fake, kit):
    """What executions have on the GPU goes with the burst."""
    before = fake.used
    with gpu.prepare(model()) as prepared:
        with prepared.burst(depth=4) as b:
            for _ in range(8):
                b.run(np.zeros(N, np.float32))
            assert fake.used > before
        kit.until(lambda: fake.used == before)


def test_sixteen_clients_share_one_context(place, fake):
    """All clients of the machine are served by one engine, which has the GPU's only context."""
    fake.configure()
    devices = [driver.connect(DEVICE) for _ in range(16)]
    prepared = [device.prepare(model()) for device in devices]
    for n, each in enumerate(prepared):
        assert (each.run(np.full(N, n, np.float32))[0] == n + 1).all()
    assert fake.contexts == 1
    for device in devices:
        device.close()
