"""What the devices of both runtimes do around their operations: threads, lifetimes, and a process of their own."""

import threading

import numpy as np
import pytest

import driver
from driver.devices import device_class, missing
from driver.devices.litert.weights import aligned
from driver.interface import BindOptions, Preparation
from driver.nn import Interpreter


@pytest.fixture(params=["litert", "onnxruntime"])
def name(request):
    if lacks := missing(request.param):
        pytest.skip(lacks.what)
    return request.param


@pytest.fixture
def prepare(name):
    """prepare(model) -> the model on a device in this process, with one thread."""
    device = device_class(name)(threads=1)
    return lambda model: device.prepare(model, Preparation())


def memory(array):
    """The array where no runtime needs a copy of it."""
    place = aligned(array.nbytes).view(array.dtype).reshape(array.shape)
    place[...] = array
    return place


def test_threads_at_the_same_time(prepare, kit):
    """Several threads bind and run one prepared model at the same time; each gets its own results."""
    prepared = prepare(kit.conv_model())
    wrong = []

    def work(seed):
        x = memory(np.random.default_rng(seed).standard_normal((1, 8, 8, 3), np.float32))
        want = Interpreter(kit.conv_model()).bind([x])
        want.run()
        found = aligned(20)
        bound = prepared.bind([x], [found], BindOptions())
        for _ in range(200):
            found[:] = 0
            bound.run()
            if not np.allclose(found.view(np.float32), want.results[0].array, atol=1e-5):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_without_the_lock(prepare):
    """While an execution runs, other Python threads do."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (512, 1024))
    for _ in range(8):
        x = builder.operation("FULLY_CONNECTED", x, np.zeros((1024, 1024), np.float32), np.zeros(1024, np.float32), 0)
    builder.output(x)
    bound = prepare(builder.build()).bind([np.zeros((512, 1024), np.float32)], [aligned(2**21)], BindOptions())
    thread = threading.Thread(target=bound.run)
    thread.start()
    turns = 0
    while thread.is_alive():
        turns += 1
    assert turns > 1000


def test_binding_lives_alone(prepare, kit):
    """A binding needs nobody to keep its prepared model, or the arrays that it was given."""
    result = aligned(16)
    bound = prepare(kit.add_model()).bind([memory(np.ones((1, 4), np.float32))], [result], BindOptions())
    for _ in range(50):  # what was let go would be used again
        other = prepare(kit.add_model(constant=9.0))
        other.bind([memory(np.zeros((1, 4), np.float32))], [aligned(16)], BindOptions()).run()
    bound.run()
    assert result.view(np.float32).tolist() == [2.0] * 4


@pytest.mark.parametrize("make", ["add_model", "conv_model", "quantised_model"])
def test_through_a_burst(connect, kit, name, make):
    """A device process runs it for a burst and on the plain path, and both give what the reference gives."""
    model = getattr(kit, make)()
    operand = model.main.operands[model.main.inputs[0]]
    raw = np.random.default_rng(5).integers(0, 255, operand.dimensions, np.uint8)
    x = raw if operand.type.is_quantised else (raw / 64 - 2).astype(np.float32)
    with connect().prepare(model) as reference:
        (want,) = reference.run(x)
    tolerance = 1e-5 if want.dtype == np.float32 else 1
    with connect(name).prepare(model) as prepared:
        np.testing.assert_allclose(prepared.run(x)[0], want, atol=tolerance)
        with prepared.burst() as burst:
            for _ in range(5):
                burst.inputs[0][...] = x
                np.testing.assert_allclose(burst.run(timeout=20).outputs[0], want, atol=tolerance)
            assert burst.stats()["copied_bytes"]["bulk"] == 0


def test_what_the_process_refuses(connect, kit, name):
    """The service asks the device what it supports."""
    device = connect(name)
    assert device.type == "CPU"
    assert device.supported_operations(kit.mul_model()) == [True]
    assert device.supported_operations(kit.reshape_model()) == [False]
