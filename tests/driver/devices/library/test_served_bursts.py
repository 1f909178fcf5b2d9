"""A driver in C that has Burst serve its bursts with a prepared model of its choice: `burst_offer.serve`."""

import gc
import re
import weakref

import numpy as np
import pytest
from c_drivers import compiled
from inside import controller_of

import driver
from burst import GeneralFailure, InvalidArgument
from driver.devices.library.device import library_class
from driver.interface import Preparation
from driver.vts import SMOKE, Target, catalogue, run

pytestmark = pytest.mark.integration


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """build(choice): the path of the driver that tests/devices/c/served.c is, with that choice."""

    def build(choice):
        path = tmp_path_factory.mktemp("served") / "libserved.so"
        return str(compiled(path, "served.c", flags=("-fvisibility=hidden", f"-DCHOICE={choice}")))

    return build


def scaled(factor):
    """x * factor, of [1, 4] of float32."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (1, 4))
    builder.output(builder.operation("MUL", x, builder.constant(np.full((1, 4), factor, np.float32)), 0))
    return builder.build()


def test_with_the_prepared_model_itself(build, model, x):
    """The burst computes what the plain path does, with several in flight, and the engine's listener serves it."""
    with driver.connect(build("THIS")) as device, device.prepare(model) as prepared, prepared.burst(depth=4) as burst:
        futures = [burst.submit(x * n) for n in range(8)]
        for n, future in enumerate(futures):
            np.testing.assert_array_equal(future.result(60).outputs[0], (x * n + 1) * x * n)
        np.testing.assert_array_equal(prepared.run(x)[0], (x + 1) * x)
        assert controller_of(burst).trace.page.device.tid


def test_with_another_prepared_model(build, x, kit):
    """The burst computes what that model says, also when its own client has released it, and others follow theirs."""
    words = "device 'served' cannot serve this burst: driver 'served': configure_burst: prepared=.*has released it"
    with driver.connect(build("FIRST")) as device:
        first, second = device.prepare(scaled(2)), device.prepare(scaled(3))
        with first, second, second.burst() as burst:
            np.testing.assert_array_equal(second.run(x)[0], x * 3)
            np.testing.assert_array_equal(burst.run(x).outputs[0], x * 2)
            first.close()
            np.testing.assert_array_equal(burst.run(x + 1).outputs[0], (x + 1) * 2)

            def is_refused():
                try:
                    second.burst().close()
                except InvalidArgument as error:
                    return re.search(words, str(error))

            burst.close()
            kit.until(is_refused)  # once the burst has let go of it


@pytest.mark.parametrize(
    ("choice", "kind", "words"),
    [
        ("NOTHING", InvalidArgument, "prepared=.*NULL.*: this driver has made no such model"),
        ("BOTH", GeneralFailure, "made a session of a burst that it has Burst serve"),
        ("LATE", InvalidArgument, "context=.*: it is of no burst that is being configured; give that of the offer"),
    ],
)
def test_wrongly(build, model, x, choice, kind, words):
    """The client's call of `burst()` fails with the reason, and the device goes on."""
    with driver.connect(build(choice)) as device, device.prepare(model) as prepared:
        if choice == "LATE":
            prepared.burst().close()
        with pytest.raises(kind, match=words):
            prepared.burst()
        np.testing.assert_array_equal(prepared.run(x)[0], (x + 1) * x)


def test_with_a_model_that_has_other_inputs(build, model, x):
    """It is refused when the burst is opened, with what both take."""
    with driver.connect(build("FIRST")) as device:
        builder = driver.ModelBuilder()
        a, b = builder.input("float32", (1, 4)), builder.input("float32", (1, 4))
        builder.output(builder.operation("ADD", a, b, 0))
        with device.prepare(builder.build()), device.prepare(model) as prepared:
            with pytest.raises(InvalidArgument, match="give a prepared model with the same inputs and outputs"):
                prepared.burst()
            np.testing.assert_array_equal(prepared.run(x)[0], (x + 1) * x)


def test_nothing_keeps_a_prepared_model(build, model):
    """The driver's `release` is called as before: the list of its models holds none of them."""
    device = library_class(build("THIS"))()
    prepared = weakref.ref(device.prepare(model, Preparation()))
    gc.collect()
    assert prepared() is None
    assert not device.driver.models


def test_it_passes_the_kit(build):
    """All that the kit does in bursts on models that the driver supports."""
    tests = [test for test in catalogue(scope=SMOKE) if test.category in {"burst", "request"}]
    with Target(build("THIS")) as target:
        found = list(run(tests, target))
    assert [o for o in found if o.outcome == "failed"] == []
    assert sum(o.outcome == "passed" and o.category == "burst" for o in found) >= 12
