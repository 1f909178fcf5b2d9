"""`ExecutionBurstServer.create(offer, prepared)` of a driver's prepared model, in a program that holds both ends."""

import os
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from c_drivers import compiled

import driver
from burst import (
    Accepted,
    BurstOffer,
    Controller,
    DeviceBuffer,
    ErrorStatus,
    ExecutionBurstServer,
    Memory,
    Request,
)
from burst import RequestArgument as A
from burst.channel import Channel
from driver.devices import device_class
from driver.devices.library.device import library_class
from driver.devices.reference import ReferenceDevice, ReferenceModel
from driver.interface import Preparation, PreparedModel
from driver.nn import ModelBuilder
from fmq import LifePage

VENDOR = Path(__file__).parents[1] / "importers/vendor"


def prepared(build, device=ReferenceDevice):
    """What that device makes of the model that `build` adds to a builder."""
    builder = ModelBuilder()
    build(builder)
    return device().prepare(builder.build(), Preparation())


def increment(builder):
    """x + 1."""
    builder.output(builder.operation("ADD", builder.input("float32", (4,)), np.ones(4, np.float32), 0))


@contextmanager
def served(model, **fields):
    """The client's end of a burst that this process serves with that model."""
    life, held = LifePage(), []

    def configure(offer):
        callback, context = (Channel.from_fd(os.dup(end.fileno())) for end in (offer.callback, offer.context))
        held.append(context)
        taken = BurstOffer(offer.requests, offer.results, callback, life=life, version=max(offer.versions), **fields)
        try:
            burst = ExecutionBurstServer.create(taken, model)
        except ValueError:
            callback.close()
            raise
        burst.start()
        return Accepted(taken.version, os.dup(life.fd))

    with Controller(configure) as controller:
        yield controller


def execute(controller, request, **options):
    """The result of a request."""
    return controller.send(controller.packet(request, **options), 60)


def place(*arrays):
    """A pool with these arrays, and an argument for each."""
    ends = np.cumsum([0, *(-(-array.nbytes // 64) * 64 for array in arrays)]).tolist()
    pool = Memory.create(max(ends[-1], 64))
    for array, offset in zip(arrays, ends, strict=False):
        pool.asarray(array.dtype, array.shape, offset)[...] = array
    return pool, tuple(A(offset=o, length=array.nbytes) for o, array in zip(ends, arrays, strict=False))


def run(controller, *arrays, outputs, **shapes):
    """The result, and the bytes of each output; `outputs`: how many bytes each has room for."""
    pool, inputs = place(*arrays)
    found, results = place(*(np.zeros(n, np.uint8) for n in outputs))
    results = tuple(a._replace(pool=1) for a in results)
    for name, dimensions in shapes.items():
        n = int(name.removeprefix("input"))
        inputs = (*inputs[:n], inputs[n]._replace(dimensions=dimensions), *inputs[n + 1 :])
    result = execute(controller, Request(inputs, results, (pool, found)))
    return result, [found.asarray(np.uint8, a.length, a.offset) for a in results]


def test_several_inputs_and_a_scalar():
    """x + y, and the axis of a concatenation, which is an input."""

    def build(builder):
        x, y = builder.input("float32", (2, 2)), builder.input("float32", (2, 2))
        builder.output(builder.operation("ADD", x, y, builder.input("INT32", ())))

    with served(prepared(build)) as controller:
        x, y = np.array([[1, -5], [3, 4]], np.float32), np.full((2, 2), 2, np.float32)
        for activation, expected in ((0, x + y), (1, np.maximum(x + y, 0))):  # NONE and RELU
            result, (out,) = run(controller, x, y, np.array(activation, np.int32), outputs=[16])
            assert result.status is ErrorStatus.NONE
            np.testing.assert_array_equal(out.view(np.float32).reshape(2, 2), expected)


def test_unspecified_dimensions_and_outputs_that_grow():
    """The request gives the input's dimensions; what is too small for the output says how large it has to be."""

    def build(builder):
        x = builder.input("float32", (0, 2))
        builder.output(builder.operation("ADD", x, np.ones(2, np.float32), 0, dimensions=(0, 2)))

    with served(prepared(build)) as controller:
        for rows in (1, 3):
            x = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
            result, _ = run(controller, x, outputs=[4], input0=(rows, 2))
            assert result.status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
            assert [(s.dimensions, s.is_sufficient) for s in result.output_shapes] == [((rows, 2), False)]
            result, (out,) = run(controller, x, outputs=[x.nbytes], input0=(rows, 2))
            assert result.status is ErrorStatus.NONE
            assert [s.dimensions for s in result.output_shapes] == [(rows, 2)]
            np.testing.assert_array_equal(out.view(np.float32).reshape(rows, 2), x + 1)
        result, _ = run(controller, x, outputs=[24])
        assert result.status is ErrorStatus.INVALID_ARGUMENT


def test_an_omitted_argument():
    """TRANSPOSE without a permutation reverses the axes, as the HAL says."""

    def build(builder):
        x = builder.input("float32", (2, 3))
        builder.output(builder.operation("TRANSPOSE", x, builder.input("int32", (2,)), dimensions=(0, 0)))

    with served(prepared(build)) as controller:
        x = np.arange(6, dtype=np.float32).reshape(2, 3)
        pool, (argument,) = place(x)
        out = Memory.create(24)
        request = Request((argument, A(has_no_value=True)), (A(pool=1, length=24),), (pool, out))
        assert execute(controller, request).status is ErrorStatus.NONE
        np.testing.assert_array_equal(out.asarray(np.float32, (3, 2)), x.T)


def test_a_driver_in_c(tmp_path):
    """A model that a driver in C has prepared is served as one in Python."""

    def build(builder):
        builder.output(builder.operation("RELU", builder.input("float32", (4,))))

    device = library_class(str(compiled(tmp_path / "libtoy.so", "toy.c")))
    with served(prepared(build, device)) as controller:
        result, (out,) = run(controller, np.array([-1, 2, -3, 4], np.float32), outputs=[16])
        assert result.status is ErrorStatus.NONE
        assert out.view(np.float32).tolist() == [0, 2, 0, 4]


def test_a_model_file(connect, kit):
    """A network as LiteRT runs its file gives what the device's own process gives, bit by bit."""
    pytest.importorskip("ai_edge_litert")
    model = driver.load(VENDOR / "mobilenet_int8.tflite", form="file")
    shape = model.main.operands[model.main.inputs[0]].dimensions
    x = np.random.default_rng(1).integers(-128, 128, shape, np.int8)
    (expected,) = connect("litert").prepare(model).run(x)
    with served(device_class("litert")().prepare(model, Preparation())) as controller:
        result, (out,) = run(controller, x, outputs=[expected.nbytes])
        assert result.status is ErrorStatus.NONE
        assert out.tobytes() == expected.tobytes()


class Doubled(PreparedModel):
    """A driver's own class around another prepared model."""

    def __init__(self, inner):
        self._inner, self.is_static = inner, inner.is_static

    def bind(self, inputs, outputs, options):
        return self._inner.bind([array * 2 for array in inputs], outputs, options)


class DoublingDevice(ReferenceDevice):
    """Prepares models of that class."""

    def prepare(self, model, preparation):
        return Doubled(super().prepare(model, preparation))


def test_a_class_of_the_drivers_own():
    """What `Device.prepare` returns knows its model; what is made otherwise is told."""
    model = prepared(increment, DoublingDevice)
    assert model.prepared_from is model._inner.prepared_from
    by_hand = Doubled(prepared(increment))
    by_hand.prepared_from = model.prepared_from
    for each in (model, by_hand):
        with served(each) as controller:
            result, (out,) = run(controller, np.full(4, 3, np.float32), outputs=[16])
            assert result.status is ErrorStatus.NONE
            assert out.view(np.float32).tolist() == [7] * 4


def test_a_buffer_of_a_device_is_unknown_here():
    """Its token means nothing outside of the device: INVALID_ARGUMENT, and the burst goes on."""
    with served(prepared(increment)) as controller:
        request = Request((A(length=0),), (A(pool=1, length=16),), (DeviceBuffer(5), Memory.create(64)))
        assert execute(controller, request).status is ErrorStatus.INVALID_ARGUMENT
        result, (out,) = run(controller, np.zeros(4, np.float32), outputs=[16])
        assert (result.status, out.view(np.float32).tolist()) == (ErrorStatus.NONE, [1] * 4)


class TwoArguments:
    """An object whose `bind` takes no request."""

    def bind(self, inputs, outputs):
        """Never called."""


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (None, "prepared=None: this offer has no `bind` of its own"),
        (7, "prepared=7: it has no method bind"),
        (
            ReferenceModel,
            r"prepared=<class '.*ReferenceModel'>: its bind takes \(self, inputs, outputs, options\), not",
        ),
        (TwoArguments(), r"prepared=<.*TwoArguments .*: its bind takes \(inputs, outputs\), not one request"),
        (Doubled(prepared(increment)), "prepared=<.*Doubled .*: it does not say which model it runs; .*prepared_from"),
    ],
)
def test_what_binds_no_requests_is_refused_at_once(wrong, words):
    """The argument, its value and the remedy are named when the burst is made."""
    with pytest.raises(ValueError, match=words), served(wrong):
        pass


def test_a_clients_prepared_model_is_refused(device, kit):
    """It executes in its device's process; a burst is made where the driver's model is."""
    words = r"prepared=<.*: it has no method bind"
    with device.prepare(kit.add_model()) as model, pytest.raises(ValueError, match=words), served(model):
        pass


class HalfAnExecutor:
    """It keeps memory, and executes nothing."""

    def is_cache_entry_present(self, slot):
        return False


@pytest.mark.parametrize("wrong", [None, 7, HalfAnExecutor(), HalfAnExecutor])
def test_what_is_no_executor_is_refused_at_once(wrong):
    """The methods that it lacks are named when the burst is made."""
    words = r"executor=.*: give an object with the methods of burst.BurstExecutorWithCache"
    with pytest.raises(ValueError, match=words):
        ExecutionBurstServer.create_with_executor(None, wrong)
