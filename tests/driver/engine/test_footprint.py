"""What the engine charges a client for its own objects, beside the memory that they take in its process."""

import gc
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from sent_models import sent

import driver
from burst import Memory, Request, RequestArgument
from burst.channel import close_all
from driver.devices.reference import ReferenceDevice
from driver.engine.binding import execution
from driver.engine.device_memory import BufferTerms, LoadedModel, ManagedBuffers, ModelCharge
from driver.engine.footprint import Footprint
from driver.engine.ledger import PRICES, Ledger
from driver.engine.limits import limits
from driver.engine.models import ModelStore
from driver.engine.quota import Quota

NUMBER = 40  # of each thing that a process makes
KIB = 1024


def chain(number, n=0):
    """`number` additions, one after the other; models with another `n` are not equal."""
    m = driver.ModelBuilder()
    x, one = m.input("float32", (1, 4)), m.constant(np.full(4, n, np.float32))
    for _ in range(number):
        x = m.operation("ADD", x, one, 0)
    m.output(x)
    return m.build()


def constants(number, n=0):
    """The same with a constant for each."""
    m = driver.ModelBuilder()
    x = m.input("float32", (1, 4))
    for k in range(number):
        x = m.operation("ADD", x, m.constant(np.full(4, n + k / number, np.float32)), 0)
    m.output(x)
    return m.build()


def gathering(number, n=0):
    """One operation of `number` inputs, and an addition."""
    m = driver.ModelBuilder()
    joined = m.operation("CONCATENATION", *(m.input("float32", (1, 4)) for _ in range(number)), 1)
    m.output(m.operation("ADD", joined, m.constant(np.full(1, n, np.float32)), 0))
    return m.build()


def broad(number, n=0):
    """`number` additions, each with an input and an output."""
    m = driver.ModelBuilder()
    one = m.constant(np.full(4, n, np.float32))
    for _ in range(number):
        m.output(m.operation("ADD", m.input("float32", (1, 4)), one, 0))
    return m.build()


@pytest.fixture
def measured():
    """The bytes that Python and numpy allocate in a function and its result keeps; garbage is neither."""

    def measured(make):
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        kept = make()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        return after - before, kept

    tracemalloc.start(1)
    yield measured
    tracemalloc.stop()


@pytest.fixture
def quota():
    return Quota(2**40, Ledger(limits()).account(1000).application("camera"))


def check(measured, charged, most=2.0):
    """The charge covers what was measured, and is not much more."""
    assert 0.9 * measured <= charged <= most * measured + 8 * KIB, (
        f"{measured / KIB:.1f} KiB measured, {charged / KIB:.1f} KiB charged"
    )


@pytest.mark.parametrize("number", [20, 500])
@pytest.mark.parametrize("make", [chain, constants, gathering, broad])
class TestModels:
    """A prepared model and the requests that stay bound to it."""

    @pytest.mark.integration
    def test_model(self, measured, quota, make, number):
        """By operations, operands and constants."""
        fds, where = sent(make(number))
        found, shared = measured(lambda: ModelStore(ReferenceDevice()).prepare(fds, where, lambda: None))
        charge = ModelCharge(quota)
        charge.take_decoded(shared, lambda: None)
        check(found, quota.held)

    @pytest.mark.integration
    def test_plan(self, measured, quota, make, number):
        """By operations and arguments."""
        fds, where = sent(make(number))
        loaded = LoadedModel(1, ModelStore(ReferenceDevice()).prepare(fds, where, lambda: None), 1)
        graph, buffers = loaded.model.main, ManagedBuffers(quota)
        nbytes = 4 * int(np.prod(graph.operands[graph.outputs[0]].dimensions))

        def bound():
            inputs = tuple(RequestArgument(length=16) for _ in graph.inputs)
            outputs = tuple(RequestArgument(offset=64, length=nbytes) for _ in graph.outputs)
            request = Request(inputs, outputs, (memory,))
            return execution(loaded, request, buffers, lambda: None), request

        memory = Memory.create(64 + nbytes)
        bound()[0].run()  # what all requests share
        found, _ = measured(bound)  # and a plan keeps the request's bytes
        check(found - quota.taken, Footprint.of(loaded.model, lambda: None).plan)


def test_buffers(measured, quota):
    """A buffer of four bytes costs more than its bytes."""
    fds, where = sent(chain(1))
    loaded = LoadedModel(1, ModelStore(ReferenceDevice()).prepare(fds, where, lambda: None), 1)
    buffers = ManagedBuffers(quota)
    found, _ = measured(lambda: buffers.allocate_all([BufferTerms((), [loaded], [(0, 0, 1.0)], [])] * 1000))
    check(found, quota.held + quota.taken)


def anonymous(pid):
    """Bytes of memory of a process that is in no file and shared with no process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) * KIB


def test_threads(place, kit):
    """A client, a plain path and a burst have threads in the engine, with stacks and objects."""

    def cost(make):
        before = anonymous(device.engine_pid)
        kept.extend(make() for _ in range(NUMBER))
        return (anonymous(device.engine_pid) - before) / NUMBER

    kept = [
        driver.connect() for _ in range(max(NUMBER, 8 * os.cpu_count()))
    ]  # each new thread gets an arena, up to here
    device = kept[0]
    with device.prepare(kit.add_model()) as prepared:
        prepared.burst().close()
        check(cost(driver.connect), PRICES["client"]["bytes"], most=4)
        check(cost(lambda: device.call("lane")[1]), PRICES["lane socket"]["bytes"], most=4)
        check(cost(prepared.burst), PRICES["burst"]["bytes"], most=4)
    for thing in kept:
        close_all(thing) if isinstance(thing, list) else thing.close()
