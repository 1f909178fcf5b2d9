"""Constants in pools: handles of those that no process can write, one copy of the others, and who is charged."""

import fcntl
import gc
import mmap
import os

import numpy as np
import pytest
from sent_models import sent

import driver
from burst import (
    GeneralFailure,
    InvalidArgument,
    Memory,
    Request,
    RequestArgument,
    ResourceExhaustedPersistent,
    ResourceExhaustedTransient,
)
from driver.client.encoded_models import LatestModel
from driver.devices.reference import ReferenceDevice
from driver.engine.device_memory import ModelCharge
from driver.engine.ledger import Ledger
from driver.engine.limits import limits
from driver.engine.models import ModelStore
from driver.engine.quota import Quota
from driver.protocol import model_memory
from driver.protocol.model_codec import encode, operations_on, sealed
from driver.protocol.model_memory import MOST_HANDLES, same_memory

SIDE = 64
NBYTES = 4 * SIDE * SIDE
ALL = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
X = np.ones((1, SIDE), np.float32)


def weights(seed=0):
    return np.random.default_rng(seed).standard_normal((SIDE, SIDE), np.float32)


def product(pool, offset=0, bias=0.0, by_reference=True):
    """x times weights that lie in a pool."""
    m = driver.ModelBuilder()
    x = m.input("float32", X.shape)
    w = m.constant(pool.asarray(np.float32, (SIDE, SIDE), offset), by_reference=by_reference)
    m.output(m.operation("FULLY_CONNECTED", x, w, np.full(SIDE, bias, np.float32), 0))
    return m.build()


def own_bytes(model):
    """Of the model's own memfd."""
    encoded = encode(model)
    return os.fstat(encoded.fd).st_size


def small(model):
    """Whether the constants travel outside the model's own memfd."""
    return own_bytes(model) < NBYTES


def mappings(pid, memory):
    """Of this memory in that process."""
    inode = os.fstat(memory.fd).st_ino
    with open(f"/proc/{pid}/maps") as lines:
        return [line for line in lines if line.split()[4] == str(inode)]


@pytest.mark.parametrize("name", ["reference", "litert", "onnxruntime"])
def test_a_frozen_pool_is_not_copied(connect, name):
    """The engine reads the client's own pages, also after the client has dropped them; results are the same."""
    device, pool = connect(name), Memory.frozen(weights())
    model = product(pool)
    assert small(model)
    assert device.supported_operations(model) == [True]
    with device.prepare(model) as prepared:
        found = mappings(device.engine_pid, pool)
        assert found
        assert all(line.split()[1].startswith("r--s") for line in found)
        del pool
        np.testing.assert_allclose(prepared.run(X)[0], X @ weights().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "pool",
    [
        lambda: Memory.create(NBYTES),
        lambda: Memory.create(NBYTES, "posix"),
        lambda: Memory.frozen(np.zeros(NBYTES + 4, np.uint8)),
    ],
    ids=["sealed size", "posix", "misaligned"],
)
def test_other_pools_are_copied(pool):
    """Constants in memory that a process can still write, and those that are not aligned, travel as bytes."""
    pool = pool()
    assert not small(product(pool, pool.nbytes - NBYTES))


def test_a_constant_copy_is_copied():
    """Only CONSTANT_REFERENCE travels as a handle."""
    pool = Memory.frozen(weights())
    assert small(product(pool))
    assert not small(product(pool, by_reference=False))


def test_a_pool_that_is_written_later_changes_nothing(device):
    """What was prepared stays what it was."""
    pool = Memory.create(NBYTES)
    pool.asarray(np.float32)[:] = 1
    with device.prepare(product(pool)) as prepared:
        pool.asarray(np.float32)[:] = 2
        assert prepared.run(X)[0].tolist() == [[SIDE] * SIDE]


def test_memory_of_ones_own_that_is_sealed(device):
    """A memfd with the three seals, opened for reading, is frozen memory of the kind mmap_fd, from any page on."""
    fd = os.memfd_create("own", os.MFD_ALLOW_SEALING)
    os.write(fd, bytes(2 * mmap.PAGESIZE) + weights().tobytes())
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, ALL)
    pool = Memory.from_fd(fd, NBYTES + mmap.PAGESIZE, mmap.PROT_READ, mmap.PAGESIZE)
    os.close(fd)
    model = product(pool, mmap.PAGESIZE)
    assert pool.is_frozen
    assert encode(model).where[2] == [["mmap_fd", 2 * mmap.PAGESIZE, NBYTES]]
    with device.prepare(model) as prepared:
        np.testing.assert_allclose(prepared.run(X)[0], X @ weights().T, rtol=1e-5, atol=1e-5)


def test_more_pools_than_can_travel(device):
    """The constants of further pools are copied; of too many, the largest parts travel."""
    m = driver.ModelBuilder()
    x = m.input("float32", (1,))
    pools = [Memory.frozen(np.full(16, n, np.float32)) for n in range(MOST_HANDLES + 3)]
    for pool in pools:
        x = m.operation("ADD", x, m.constant(pool.asarray(np.float32, (1,)), by_reference=True), 0)
    m.output(x)
    model = m.build()
    assert len(encode(model).where[2]) == MOST_HANDLES
    with device.prepare(model) as prepared:
        assert prepared.run(np.zeros(1, np.float32))[0].item() == sum(range(len(pools)))


class TestOnce:
    """`supported_operations` and `prepare` share one copy."""

    def test_the_same_memory_is_sent_again(self):
        """Until the model is prepared, or another one is asked about, or the application changes a constant."""
        latest, pool = LatestModel(), Memory.create(NBYTES)
        model, other = product(pool), product(Memory.create(NBYTES))
        first = latest.asked(model, MOST_HANDLES)
        assert latest.asked(model, MOST_HANDLES) is first
        assert latest.prepared(model, MOST_HANDLES) is first
        pool.asarray()[-1] = 1
        assert latest.prepared(model, MOST_HANDLES) is not first
        changed = latest.asked(model, MOST_HANDLES)
        latest.forget(model)
        assert latest.prepared(model, MOST_HANDLES) is not changed
        kept = latest.asked(model, MOST_HANDLES)
        latest.asked(other, MOST_HANDLES)
        assert latest.prepared(model, MOST_HANDLES) is not kept

    def test_it_is_dropped_with_the_model(self):
        """An application that asks and goes on keeps no memory."""
        latest, model = LatestModel(), product(Memory.create(NBYTES))
        fd = latest.asked(model, MOST_HANDLES).fd
        os.fstat(fd)
        del model
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)

    def test_the_client_keeps_no_descriptor(self, device):
        """Of models that are prepared, and of pools that are dropped."""
        device.prepare(product(Memory.frozen(weights()))).close()
        gc.collect()  # of tests before this one
        before = len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{device.engine_pid}/fd"))
        for n in range(20):
            model = product(Memory.frozen(weights(n)))
            device.supported_operations(model)
            device.prepare(model).close()
        del model
        assert len(os.listdir("/proc/self/fd")) <= before[0]  # those of other tests may end meanwhile
        assert len(os.listdir(f"/proc/{device.engine_pid}/fd")) <= before[1]


def unsealed(seals):
    """A copy of the weights in memory with these seals."""
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.write(fd, weights().tobytes())
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize("method", ["supported", "prepare"])
class TestHostile:
    """A client that calls memory a handle which is none."""

    @pytest.mark.parametrize("missing", [fcntl.F_SEAL_WRITE, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW])
    def test_unsealed_memory_is_refused(self, device, method, missing):
        """Each of the three seals is looked for by the process that maps the memory."""
        encoded = encode(product(Memory.frozen(weights())))
        fd = unsealed(ALL & ~missing)
        try:
            with pytest.raises(InvalidArgument, match="pool of kind 'ashmem' is not sealed against writing"):
                device.call(method, encoded.where, fds=[encoded.fd, fd])
        finally:
            os.close(fd)
        assert device.supported_operations(product(Memory.frozen(weights()))) == [True]

    @pytest.mark.parametrize(
        ("handle", "words"),
        [
            (["ashmem", 1, NBYTES], "not whole pages"),
            (["ashmem", -mmap.PAGESIZE, NBYTES], "not whole pages"),
            (["ashmem", 0, NBYTES + 1], "not whole pages"),
            (["ashmem", 0, 0], "not whole pages"),
            (["ashmem", 2**62, 2**62], "not whole pages"),
            (["magic", 0, NBYTES], "is unknown"),
            (["ashmem", 0], "no handle"),
            ([7, 0, NBYTES], "no handle"),
            ("ashmem", "no handle"),
        ],
        ids=str,
    )
    def test_handles_that_do_not_fit_are_refused(self, device, method, handle, words):
        """Parts outside the memory, unknown kinds, and what is no handle at all."""
        encoded = encode(product(Memory.frozen(weights())))
        with pytest.raises(InvalidArgument, match=words):
            device.call(method, [*encoded.where[:2], [handle]], fds=encoded.fds)

    def test_memory_without_end_is_refused(self, device, method):
        """A sparse pool of a terabyte: a few bytes for its client, and refused before the device reads any of it."""
        fd = os.memfd_create("sparse", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 2**40)
        os.pwrite(fd, bytes(mmap.PAGESIZE), 0)  # the handle's part has no hole
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, ALL)
        encoded = encode(product(Memory.frozen(weights())))
        try:
            with pytest.raises(ResourceExhaustedPersistent, match=r"109951162\d+ exceeds the limit client_bytes"):
                device.call(method, [*encoded.where[:2], [["ashmem", 0, mmap.PAGESIZE]]], fds=[encoded.fd, fd])
        finally:
            os.close(fd)

    def test_counts_that_differ_are_refused(self, device, method):
        """Fewer descriptors than handles, more of them, and more handles than any model has."""
        encoded = encode(product(Memory.frozen(weights())))
        (handle,) = encoded.where[2]
        for count, fds in ((2, encoded.fds), (MOST_HANDLES + 1, [*encoded.fds, *encoded.fds])):
            with pytest.raises(InvalidArgument):
                device.call(method, [*encoded.where[:2], [handle] * count], fds=fds)


def charged(store, quota, model):
    """Prepares a model on the account of a client. Keep what it returns."""
    charge = ModelCharge(quota)
    fds, where = sent(model)
    return store.prepare(fds, where, lambda: None, charge=charge.take), charge


class TestCharge:
    """What a model keeps in memory is charged to its client."""

    def test_a_pool_is_charged_once(self):
        """However many models of a client lie in it, in full, until the last of them is dropped."""
        quota, store = Quota(2**30), ModelStore(ReferenceDevice())
        pool = Memory.frozen(np.concatenate([weights(), weights(1)]))
        models = [product(pool), product(pool, NBYTES), product(pool, bias=1.0)]
        kept = [charged(store, quota, model) for model in models]
        assert quota.held == 2 * NBYTES + sum(map(own_bytes, models))
        del kept[1:]
        assert quota.held == 2 * NBYTES + own_bytes(models[0])
        kept.clear()
        assert quota.held == 0

    def test_all_clients_together_are_charged_once(self):
        """Each client that has an equal model is charged for it; its account and the device once, as its pages are."""
        ledger, store, pool = Ledger(limits()), ModelStore(ReferenceDevice()), Memory.frozen(weights())
        clients = [Quota(2**30, ledger.account(1000).application(name)) for name in ("a", "a", "b")]
        kept = [charged(store, quota, product(pool)) for quota in clients]
        assert kept[0][0] is kept[1][0]
        nbytes = NBYTES + own_bytes(product(pool))
        assert [quota.held for quota in clients] == [nbytes] * 3
        assert [row.held["bytes"] for row in ledger.rows()] == [nbytes] * 3  # of the account and its applications
        assert ledger.held["bytes"] == nbytes
        kept.clear()
        assert [quota.held for quota in clients] == [0, 0, 0]
        assert not ledger.held["bytes"]

    @pytest.mark.parametrize("make", [Memory.frozen, np.asarray], ids=["handle", "copy"])
    def test_a_model_that_does_not_fit_is_refused(self, configure, make):
        """Too large for the limit: for ever, and `supported_operations` says so, too. Too large for what is left: until
        a model is closed.
        """
        most, rows = 32 * NBYTES, 16 * SIDE  # more than what the engine keeps for a connection and a model
        one, other, large = (np.concatenate([weights(n)] * count) for n, count in ((1, 16), (2, 16), (3, 48)))
        path = configure(client_bytes=most)
        with driver.connect() as device:
            model = gathered(make(large), 3 * rows)
            for ask in (device.supported_operations, device.prepare):
                with pytest.raises(ResourceExhaustedPersistent, match=f"client_bytes = {most}.*{path}"):
                    ask(model)
            first = device.prepare(gathered(make(one), rows))
            with pytest.raises(ResourceExhaustedTransient, match="client_bytes"):
                device.prepare(gathered(make(other), rows))
            first.close()
            assert device.prepare(gathered(make(other), rows))


def gathered(source, rows):
    """Rows of a table, in a pool or an array."""
    m = driver.ModelBuilder()
    x = m.input("int32", (1,))
    table = source.asarray(np.float32, (rows, SIDE)) if isinstance(source, Memory) else source
    m.output(m.operation("EMBEDDING_LOOKUP", x, m.constant(table, by_reference=True)))
    return m.build()


def test_models_over_one_pool_share_its_pages(device):
    """The engine maps the client's own memory for each of them, and gives all of it back."""
    pool = Memory.frozen(weights())
    models = [device.prepare(product(pool, bias=float(n))) for n in range(8)]
    assert {line.split()[3] for line in mappings(device.engine_pid, pool)} == {mappings("self", pool)[0].split()[3]}
    for n, prepared in enumerate(models):
        np.testing.assert_allclose(prepared.run(X)[0], X @ weights().T + n, rtol=1e-5, atol=1e-5)
        prepared.close()
    assert mappings(device.engine_pid, pool) == []


def test_equal_models_in_one_pool_are_not_compared(monkeypatch):
    """Their memory is the same; only what was copied is looked at."""
    pool = Memory.frozen(weights())
    one, other = (sealed(*sent(product(pool))) for _ in range(2))
    compared = []
    monkeypatch.setattr(model_memory, "same_bytes", lambda _one, _other, nbytes: compared.append(nbytes) or True)
    assert same_memory(one, other)
    assert compared == [own_bytes(product(pool))]


class TestKinds:
    """A device says which pools it takes no handles of."""

    def test_operations_on_them_are_not_supported(self, connect):
        """Asked what it supports, and asked to prepare; constants that are copied are no handles."""
        device, pool = connect("Copying"), Memory.frozen(weights())
        assert device.supported_operations(product(pool)) == [False]
        with pytest.raises(GeneralFailure, match=r"FULLY_CONNECTED.*not supported"):
            device.prepare(product(pool))
        assert device.supported_operations(product(pool, by_reference=False)) == [True]
        fd = os.dup(pool.fd)
        own = Memory.from_fd(fd, NBYTES, mmap.PROT_READ)
        os.close(fd)
        assert device.supported_operations(product(own)) == [True]

    def test_in_subgraphs_too(self):
        """An operation that runs a subgraph reads the subgraph's constants."""
        m = driver.ModelBuilder()
        condition, x = m.input("bool8", (1,)), m.input("float32", X.shape)
        with_pool, without = (product(Memory.frozen(weights()), by_reference=by) for by in (True, False))
        y = m.operation("IF", condition, with_pool, without, x)
        m.output(m.operation("IF", condition, without, without, y))
        model = m.build()
        (value,) = [o.value for g in model.referenced for o in g.operands if o.lifetime.name == "CONSTANT_REFERENCE"]
        assert operations_on(model, lambda constant: constant is value) == [True, False]


def test_a_frozen_pool_is_an_input_of_requests(device, kit):
    """Both paths read it in place; an output in it is refused."""
    pool, out = Memory.frozen(np.arange(4, dtype=np.float32)), Memory.create(16)
    there, here = RequestArgument(length=16), RequestArgument(pool=1, length=16)
    with device.prepare(kit.add_model()) as prepared, prepared.burst() as burst:
        for way in (prepared, burst):
            assert way.execute(Request((there,), (here,), (pool, out))).outputs[0].tolist() == [[1, 2, 3, 4]]
        with pytest.raises(InvalidArgument):
            way.execute(Request((here,), (there,), (pool, out))).raise_for_status()
