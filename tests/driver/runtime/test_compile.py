"""driver.compile: what runs where, and that it computes the model."""

import pickle

import numpy as np
import pytest
from same_arrays import equal

import driver
from burst import ErrorStatus, MissedDeadlinePersistent

X = np.arange(4, dtype=np.float32)


@pytest.fixture
def mixed(settled, runtime_kit):
    """A model whose middle operation falls to the CPU."""
    with driver.compile(runtime_kit.mixed_model(), [settled("Picky"), "cpu"]) as compiled:
        yield compiled


def test_each_operation_runs_where_it_costs_least(mixed, kit, runtime_kit):
    """The device has what it supports, because it is faster; the CPU has the rest; the results are the model's."""
    assert mixed.placement() == [(kit.odd("Picky"), (0,)), ("cpu", (1,)), (kit.odd("Picky"), (2,))]
    for n in range(3):
        equal(mixed.run(X + n), runtime_kit.mixed(X + n))
    assert not any(mixed.stats()["fallbacks"][kind] for kind in ("dropped", "compile", "step", "whole"))


def test_an_explicit_request_keeps_its_pools(mixed, kit, runtime_kit):
    """The steps read and write the pools of the request; what goes between them needs none of the caller's."""
    request, _ = kit.request([X], 128)
    (whole,) = request.outputs
    two = whole._replace(length=64), whole._replace(offset=64, length=64)
    result = mixed.execute(request._replace(outputs=two))
    assert result.status == ErrorStatus.NONE
    equal(result.outputs, runtime_kit.mixed(X))
    assert [array.ctypes.data for array in result.outputs] == [
        request.pools[1].asarray(offset=offset).ctypes.data for offset in (0, 64)
    ]


def test_a_request_that_does_not_fit_is_answered_as_by_a_device(mixed, kit):
    """Wrong counts are INVALID_ARGUMENT; outputs that are too small are told with the sizes they need. No fallback."""
    request, _ = kit.request([X], 128)
    assert mixed.execute(request).status == ErrorStatus.INVALID_ARGUMENT
    (whole,) = request.outputs
    two = whole._replace(length=64), whole._replace(offset=64, length=15)
    result = mixed.execute(request._replace(outputs=two))
    assert result.status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
    assert [shape.is_sufficient for shape in result.output_shapes] == [True, False]
    assert not mixed.stats()["fallbacks"]["whole"]


def test_a_slower_device_gets_nothing(settled, runtime_kit):
    """Measured as slower than the CPU, it is not worth it; at the same speed, neither."""
    for exec_time in (2.0, 1.0):
        with driver.compile(runtime_kit.mixed_model(), [settled("Picky", exec_time), "cpu"]) as compiled:
            assert compiled.placement() == [("cpu", (0, 1, 2))]
            equal(compiled.run(X), runtime_kit.mixed(X))


def test_low_power_chooses_by_power_where_it_is_known(settled, runtime_kit):
    """A fast device that needs more power than the CPU is chosen for speed alone, and where nobody knows its power."""
    for power, preference, device in (
        (3.0, "fast_single_answer", "reference"),
        (3.0, "low_power", "cpu"),
        (None, "low_power", "reference"),
    ):
        devices = [settled("reference", 0.5, power), "cpu"]
        with driver.compile(runtime_kit.mixed_model(), devices, preference) as compiled:
            assert compiled.placement() == [(device, (0, 1, 2))]


def test_on_one_device_nothing_stands_between(settled, runtime_kit):
    """A device that has all of the model gets the model itself, and its burst runs the code of every burst."""
    model = runtime_kit.mixed_model()
    with driver.compile(model, [settled("reference"), "cpu"]) as compiled, compiled.burst() as burst:
        assert compiled.prepared.model is model
        assert isinstance(burst, driver.Burst)
        assert type(burst).run is driver.Burst.run
        equal(burst.run(X).outputs, runtime_kit.mixed(X))
    with driver.compile(model, ["reference"]) as compiled, compiled.burst() as burst:
        assert type(burst) is driver.Burst


def test_the_cpu_is_this_process(runtime_kit, place, monkeypatch):
    """By default, with nothing faster installed, no process is started; run, bursts and futures are direct calls."""
    monkeypatch.setattr("driver.runtime.compilation.installed", lambda: ["reference"])
    with driver.compile(runtime_kit.mixed_model()) as compiled, compiled.burst() as burst:
        assert compiled.placement() == [("cpu", (0, 1, 2))]
        equal(compiled.run(X), runtime_kit.mixed(X))
        burst.inputs[0][...] = X
        first = burst.run()
        equal(burst.submit(X + 1).result().outputs, runtime_kit.mixed(X + 1))
        equal(first.outputs, runtime_kit.mixed(X))
        assert burst.stats()["runs"]["burst"] == 2
    assert place.pids() == []
    with pytest.raises(ValueError, match="closed"):
        burst.run()


def test_the_cpu_makes_room_for_open_shapes(kit):
    """Outputs that only the run tells the size of are given as much as they need, on the plain path and in bursts."""
    x = np.ones((2, 3000), np.float32)
    with driver.compile(kit.reshape_model(), ["cpu"]) as compiled, compiled.burst() as burst:
        for shape in ((3000, 2), (6000, 1)):
            assert compiled.run(x, np.array(shape, np.int32))[0].shape == shape
            assert burst.run(x, np.array(shape, np.int32)).outputs[0].shape == shape


@pytest.mark.parametrize("seed", range(12))
def test_any_graph_on_any_devices_gives_the_same(settled, seed):
    """Random graphs on three devices, on the plain path and in a chain: what the whole model gives here, bit by bit."""
    random = np.random.default_rng(seed)
    builder = driver.ModelBuilder()
    values = [builder.input("float32", (4,)) for _ in range(2)]
    for _ in range(int(random.integers(4, 20))):
        a, b = (values[random.integers(len(values))] for _ in range(2))
        kind = random.choice(["ADD", "MUL", "SUB", "NEG"])
        values.append(builder.operation(kind, a) if kind == "NEG" else builder.operation(kind, a, b, 0))
    builder.output(values[int(random.integers(2, len(values) - 1))], values[-1])
    model = builder.build()
    arrays = [random.standard_normal(4, np.float32) for _ in range(2)]
    with driver.compile(model, ["cpu"]) as here:
        expected = here.run(*arrays)
    devices = [settled("Picky", 0.5), [settled("reference", 0.9), "cpu"][seed % 2]]
    with driver.compile(model, devices) as compiled, compiled.burst() as burst:
        for _ in range(2):
            equal(compiled.run(*arrays), expected)
            equal(burst.run(*arrays).outputs, expected)
            equal(burst.submit(*arrays).result(20).outputs, expected)


def test_control_flow_runs_on_one_of_several_devices(settled, runtime_kit):
    """IF with known sizes stays whole on the device that has it."""
    with driver.compile(runtime_kit.if_model(), [settled("Picky"), "cpu"]) as compiled:
        assert [device for device, _ in compiled.placement()] == ["cpu", settled("Picky"), "cpu"]
        for flag, plus in ((1, 1), (0, 2)):
            (found,) = compiled.run(np.full(1, flag, np.uint8), X)
            np.testing.assert_array_equal(found, (X * X + plus) * 2)


def test_what_cannot_be_cut_runs_whole(settled, runtime_kit):
    """An open shape between two devices takes the whole model to the CPU, or to a device that has all of it."""
    model = runtime_kit.if_model(size=0)
    with driver.compile(model, [settled("Picky"), "cpu"]) as compiled:
        assert compiled.placement() == [("cpu", (0, 1, 2))]
    devices = [settled("Picky", 0.5), settled("reference", 0.9)]
    with driver.compile(model, devices) as compiled:
        assert compiled.placement() == [("reference", (0, 1, 2))]
        np.testing.assert_array_equal(compiled.run(np.ones(1, np.uint8), X)[0], (X * X + 1) * 2)


def test_require_device_is_a_demand(settled, runtime_kit, kit):
    """It raises, with the operations, when anything would run elsewhere; and is met in silence."""
    picky = settled("Picky")
    with pytest.raises(driver.NotPlaced, match=r"1 \(MUL\) on cpu"):
        driver.compile(runtime_kit.mixed_model(), [picky, "cpu"], require_device=picky)
    with pytest.raises(driver.NotPlaced, match="MUL"):
        driver.compile(runtime_kit.mixed_model(), require_device=picky)
    with driver.compile(kit.add_model(), require_device=picky) as compiled:
        assert compiled.placement() == [(picky, (0,))]


def test_a_list_of_devices_is_respected(settled, runtime_kit, kit):
    """Without "cpu" in it nothing falls to the CPU; a name that does not exist, or comes twice, is an error."""
    with pytest.raises(driver.NotPlaced, match=r"operation 1 \(MUL\).*add 'cpu'"):
        driver.compile(runtime_kit.mixed_model(), [settled("Picky")])
    with pytest.raises(driver.DeviceNotFound, match="fastest"):
        driver.compile(runtime_kit.mixed_model(), ["fastest", "cpu"])
    for devices in ([], "cpu", ["cpu", "cpu"]):
        with pytest.raises(ValueError, match="devices="):
            driver.compile(kit.add_model(), devices)


def test_a_connected_device_stays_connected(connect, settled, runtime_kit):
    """compile closes what it opened, and leaves to others what is theirs."""
    settled("Picky")
    device = connect("Picky")
    with driver.compile(runtime_kit.mixed_model(), [device, "cpu"]) as compiled:
        equal(compiled.run(X), runtime_kit.mixed(X))
    assert device.supported_operations(runtime_kit.mixed_model()) == [True, False, True]
    with pytest.raises(ValueError, match="closed"):
        compiled.burst()


def test_a_compiled_model_is_pickled_as_a_recipe(mixed, runtime_kit):
    """What comes out is compiled for the same devices, and a connection of its own."""
    with pickle.loads(pickle.dumps(mixed)) as again:
        assert again.placement() == mixed.placement()
        mixed.close()
        equal(again.run(X), runtime_kit.mixed(X))


def test_a_burst_is_not_pickled(mixed):
    """The error says what to do instead, on the CPU and in a chain."""
    with driver.compile(mixed.model, ["cpu"]) as here:
        for model in (mixed, here):
            with model.burst() as burst, pytest.raises(TypeError, match="pickle its model"):
                pickle.dumps(burst)


def test_time_and_progress(settled, runtime_kit):
    """Each stage is told before it begins, and none begins when time is up."""
    told = []
    devices = [settled("Picky"), "cpu"]
    driver.compile(runtime_kit.mixed_model(), devices, progress=lambda *stage: told.append(stage)).close()
    words, parts = zip(*told, strict=True)
    assert words[0] == f"ask {devices[0]}"
    assert list(parts) == sorted(parts)
    assert parts[-1] == 1.0
    with pytest.raises(MissedDeadlinePersistent, match="timeout=0"):
        driver.compile(runtime_kit.mixed_model(), devices, timeout=0)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("preference", "fast"), ("priority", "urgent")],
)
def test_a_wrong_argument_is_named(kit, argument, value):
    """Before anything is started."""
    with pytest.raises(ValueError, match=f"{argument}="):
        driver.compile(kit.add_model(), **{argument: value})
