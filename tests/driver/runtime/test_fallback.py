"""What a device fails to do is done by the CPU in this process: the same results, counted, logged once, or refused."""

import asyncio
import contextlib
import logging
from concurrent.futures import CancelledError
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints

import numpy as np
import pytest
from same_arrays import equal
from worded_files import FILER, ONE, file_model

import driver
from burst import ErrorStatus, PeerDied
from driver.devices import device_class
from driver.devices.files import RUNTIMES
from driver.runtime import comeback

X = np.arange(1, 5, dtype=np.float32)


def counts(compiled):
    return {kind: n for kind, n in compiled.stats()["fallbacks"].items() if kind != "reasons" and n}


def two_adds():
    """x + 1, then * itself, then + 1: a step of `Picky`'s kind on both sides of a MUL."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (4,))
    x = builder.operation("ADD", x, np.ones(4, np.float32), 0)
    x = builder.operation("MUL", x, x, 0)
    builder.output(builder.operation("ADD", x, np.ones(4, np.float32), 0))
    return builder.build()


# ---- when compiling


@pytest.mark.parametrize("name", ["Refusing", "Crashing"])
def test_a_device_that_refuses_or_dies_in_preparation_is_replaced(settled, runtime_kit, kit, name, caplog):
    """The whole model goes to the CPU: the same results, one count, one line in the log."""
    model = kit.add_model(relaxed=True) if name == "Crashing" else runtime_kit.mixed_model()
    with caplog.at_level(logging.WARNING, "driver.runtime"), driver.compile(model, [settled(name), "cpu"]) as compiled:
        assert {device for device, _ in compiled.placement()} == {"cpu"}
        assert counts(compiled) == {"compile": 1}
        if name == "Refusing":
            equal(compiled.run(X), runtime_kit.mixed(X))
    (line,) = [record.getMessage() for record in caplog.records]
    assert settled(name) in line


@pytest.mark.parametrize("name", ["Refusing", "Crashing"])
def test_without_the_cpu_in_the_list_a_failure_is_raised(settled, runtime_kit, kit, name):
    """As the device put it; and with require_device, too, or when there is no next device."""
    model = kit.add_model(relaxed=True) if name == "Crashing" else runtime_kit.mixed_model()
    error = PeerDied if name == "Crashing" else driver.GeneralFailure
    for options in ({"devices": [settled(name)]}, {"require_device": settled(name)}):
        for fallback in ("cpu", "next"):
            with pytest.raises(error):
                driver.compile(model, fallback=fallback, **options)


def test_a_failed_preparation_goes_to_the_cpu_or_to_the_next_device(settled, runtime_kit):
    """By default the whole model is the CPU's, as the HAL's documents say; fallback="next" asks the next best first."""
    devices = [settled("Refusing", 0.1), settled("reference", 0.5), "cpu"]
    cases = (
        ({}, "cpu", "compile"),
        ({"fallback": "cpu"}, "cpu", "compile"),
        ({"fallback": "next"}, devices[1], "dropped"),
    )
    cases = (*((devices, *case) for case in cases), (devices[:2], {"fallback": "next"}, devices[1], "dropped"))
    for among, options, place, kind in cases:
        with driver.compile(runtime_kit.mixed_model(), among, **options) as compiled:
            assert compiled.placement() == [(place, (0, 1, 2))]
            assert counts(compiled) == {kind: 1}
            equal(compiled.run(X), runtime_kit.mixed(X))
    with pytest.raises(ValueError, match="fallback='nowhere'"):
        driver.compile(runtime_kit.mixed_model(), devices, fallback="nowhere")


def test_a_device_that_does_not_start_is_left_out(settled, runtime_kit, kit):
    """The others get its share."""
    devices = [kit.odd("Broken"), settled("Picky"), "cpu"]
    with driver.compile(runtime_kit.mixed_model(), devices) as compiled:
        assert [device for device, _ in compiled.placement()] == [devices[1], "cpu", devices[1]]
        assert counts(compiled) == {"dropped": 1}


def test_a_device_that_dies_while_it_is_measured_is_left_out(place, kit):
    """What cannot even do that gets nothing, and has no figures."""
    with driver.compile(kit.add_model(), [kit.odd("Crashing"), "cpu"]) as compiled:
        assert compiled.placement() == [("cpu", (0,))]
        assert counts(compiled) == {"dropped": 1}
    assert not (place.path / "capabilities").exists()


def test_a_device_of_ours_without_its_library_is_no_failure(monkeypatch, kit):
    """By default: an extra that is not installed is nobody's concern. Whoever asks for the device by name is told."""
    broken = kit.odd("Broken")
    monkeypatch.setattr(device_class(broken), "library", "no_such_library", raising=False)
    monkeypatch.setattr("driver.runtime.compilation.installed", lambda: [broken])
    with driver.compile(kit.add_model()) as compiled:
        assert compiled.placement() == [("cpu", (0,))]
        assert counts(compiled) == {}
    with pytest.raises(driver.DeviceNotFound, match="is not installed: the module no_such_library"):
        driver.compile(kit.add_model(), [broken, "cpu"])


def test_an_installed_device_that_cannot_be_loaded_is_left_out(monkeypatch, kit):
    """By default; who asks for it by name is told."""
    monkeypatch.setattr("driver.runtime.compilation.installed", lambda: ["no.such:Device"])
    with driver.compile(kit.add_model()) as compiled:
        assert compiled.placement() == [("cpu", (0,))]
        assert counts(compiled) == {"dropped": 1}
    with pytest.raises(driver.DeviceNotFound, match=r"no\.such"):
        driver.compile(kit.add_model(), ["no.such:Device", "cpu"])


# ---- when executing, on one device


@pytest.fixture
def failing(settled, kit):
    """x + 1 on a device that fails over an x that begins below 0."""
    with driver.compile(kit.add_model(), [settled("Failing"), "cpu"]) as compiled:
        assert compiled.placement() == [(kit.odd("Failing"), (0,))]
        yield compiled


def test_a_failed_execution_is_done_again_here(failing, kit, caplog):
    """On the plain path and in a burst, each time; the device stays in use, and the log says it once."""
    good, bad = np.ones((1, 4), np.float32), np.full((1, 4), -2, np.float32)
    with caplog.at_level(logging.WARNING, "driver.runtime"), failing.burst(depth=4) as burst:
        for array in (good, bad, good, bad):
            equal(failing.run(array), [array + 1])
            equal(burst.run(array).outputs, [array + 1])
        futures = [burst.submit(array) for array in (good, bad, good, bad, good)]
        for future, array in zip(futures, (good, bad, good, bad, good), strict=True):
            equal(future.result(kit.patience).outputs, [array + 1])
        equal(asyncio.run(asynchronously(burst, bad)).outputs, [bad + 1])
        request, _ = kit.request([bad], 64)
        equal(failing.execute(request).outputs, [bad + 1])
        assert burst.stats()["fallbacks"]["whole"] == 8
    assert counts(failing) == {"whole": 8}
    assert failing.placement() == [(kit.odd("Failing"), (0,))]
    assert len(caplog.records) == 1


def test_without_a_spare_the_error_is_the_callers(settled, kit):
    """require_device: nothing falls back silently, at execution neither."""
    bad = np.full((1, 4), -2, np.float32)
    with driver.compile(kit.add_model(), require_device=settled("Failing")) as compiled, compiled.burst() as burst:
        for run in (compiled.run, burst.run):
            with pytest.raises(driver.GeneralFailure):
                run(bad)
        assert not counts(compiled)


async def asynchronously(burst, array):
    return await burst.run_async(array)


WAYS = {
    "plain": lambda compiled, _, x: compiled.run(x),
    "run": lambda _, burst, x: burst.run(x).outputs,
    "submit": lambda _, burst, x: burst.submit(x).result(20).outputs,
    "asyncio": lambda _, burst, x: asyncio.run(asynchronously(burst, x)).outputs,
}


@pytest.fixture
def without_return(monkeypatch):
    """A device that dies is not looked for again during this test."""
    monkeypatch.setattr(comeback, "FIRST_WAIT", 60)


@pytest.mark.parametrize("how", WAYS)
def test_a_device_that_dies_is_replaced_at_once(settled, kit, how, without_return):
    """The execution that killed it gets its result, the next ones run here at once, and placement() says so."""
    x = np.ones((1, 4), np.float32)
    with driver.compile(kit.add_model(), [settled("Crashing"), "cpu"]) as compiled, compiled.burst() as burst:
        for n in range(3):
            equal(WAYS[how](compiled, burst, x + n), [x + n + 1])
        assert compiled.placement() == [("cpu", (0,))]
        equal(compiled.run(x), [x + 1])
        with compiled.burst() as another:
            equal(another.run(x).outputs, [x + 1])
        assert counts(compiled)["whole"] >= 1


@pytest.mark.parametrize("policy", ["block", "latest"])
def test_frames_in_flight_on_a_device_that_dies_are_executed_here(settled, kit, policy, without_return):
    """Each future has the result of its own frame, those sent after the death too; with "latest", or was replaced."""
    x = np.ones((1, 4), np.float32)
    with (
        driver.compile(kit.add_model(), [settled("Crashing"), "cpu"]) as compiled,
        compiled.burst(depth=3, policy=policy) as burst,
    ):
        futures = [burst.submit(x + n) for n in range(9)]
        for n, future in enumerate(futures):
            with contextlib.suppress(*[CancelledError] if policy == "latest" and n < 8 else []):
                equal(future.result(kit.patience).outputs, [x + n + 1])
        assert futures[-1].exception() is None
        equal(burst.run(x).outputs, [x + 1])
        assert burst.stats()["in_flight"] == 0


def test_a_closed_burst_does_not_fall_back(settled, kit):
    """What was in flight is told that it was closed, and nothing is executed here."""
    slow = np.full((1, 4), 0.3, np.float32)
    with driver.compile(kit.add_model(), [settled("Slow"), "cpu"]) as compiled:
        with compiled.burst() as burst:
            future = burst.submit(slow)
        with pytest.raises(driver.GeneralFailure, match="closed"):
            future.result()
        with pytest.raises(ValueError, match="closed"):
            burst.run(slow)
        assert not counts(compiled)


def test_what_is_the_same_everywhere_is_not_done_again(failing, settled, kit):
    """Wrong arguments, outputs that are too small and deadlines go to the caller, and nothing is counted."""
    request, _ = kit.request([np.ones((1, 4), np.float32)], 15)
    assert failing.execute(request).status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
    assert failing.execute(request._replace(inputs=())).status == ErrorStatus.INVALID_ARGUMENT
    with pytest.raises(ValueError, match="dtype"):
        failing.run(np.ones((1, 4)))
    assert not counts(failing)
    with driver.compile(endless_model(), [settled("reference"), "cpu"]) as compiled:
        request, _ = kit.request([np.zeros(1, np.float32)], 64)
        assert compiled.execute(request, loop_timeout=0.001).status == ErrorStatus.MISSED_DEADLINE_TRANSIENT
        assert not counts(compiled)


def endless_model():
    """A WHILE whose condition always holds."""
    condition, body, builder = driver.ModelBuilder(), driver.ModelBuilder(), driver.ModelBuilder()
    x = condition.input("float32", (1,))
    condition.output(condition.operation("EQUAL", x, x))
    body.output(body.operation("ADD", body.input("float32", (1,)), np.ones(1, np.float32), 0))
    builder.output(builder.operation("WHILE", condition.build(), body.build(), builder.input("float32", (1,))))
    return builder.build()


# ---- when executing, on several


@pytest.fixture
def in_steps(settled):
    """in_steps(name): `two_adds` with the MUL on that odd device, and the ADDs on another one."""
    opened = []

    def in_steps(name, *more):
        opened.append(driver.compile(two_adds(), [settled("Picky", 0.5), settled(name, 0.9), *more]))
        assert [device for device, _ in opened[-1].placement()] == [settled("Picky"), settled(name), settled("Picky")]
        return opened[-1]

    yield in_steps
    for compiled in opened:
        compiled.close()


def expected(x):
    return [(x + 1) * (x + 1) + 1]


def test_a_failing_step_is_done_here(in_steps, kit):
    """It alone: the other steps stay on their devices, and the failing one is tried there again the next time."""
    compiled = in_steps("Failing", "cpu")
    with compiled.burst(depth=2) as burst:
        for x in (X, -X - 1, X):
            equal(compiled.run(x), expected(x))
            equal(burst.run(x).outputs, expected(x))
            equal(burst.submit(x).result(kit.patience).outputs, expected(x))
        assert [step["runs"]["burst"] for step in burst.stats()["steps"]] == [6, 6, 6]
    assert counts(compiled) == {"step": 3}
    assert compiled.placement()[1] == (kit.odd("Failing"), (1,))


def test_a_step_whose_device_dies_moves_here(in_steps, kit, without_return):
    """The chain goes on with the step on the CPU; so do the plain path and later bursts, and placement() says so."""
    compiled = in_steps("Crashing", "cpu")
    with compiled.burst() as burst:
        for x in (X, X + 1):
            equal(burst.run(x).outputs, expected(x))
        assert [step["device"] for step in burst.stats()["steps"]] == [kit.odd("Picky"), "cpu", kit.odd("Picky")]
    assert counts(compiled) == {"step": 1}
    assert [device for device, _ in compiled.placement()] == [kit.odd("Picky"), "cpu", kit.odd("Picky")]
    equal(compiled.run(X), expected(X))
    with compiled.burst() as burst:
        equal(burst.run(X).outputs, expected(X))
    assert counts(compiled) == {"step": 1}


def test_frames_in_flight_survive_a_death(in_steps, kit):
    """Those that were on the dead device are executed here, and all results come, in order."""
    compiled = in_steps("Crashing", "cpu")
    with compiled.burst(depth=3) as burst:
        futures = [burst.submit(X + n) for n in range(6)]
        for n, future in enumerate(futures):
            equal(future.result(kit.patience).outputs, expected(X + n))


def test_a_device_that_lies_about_shapes_is_not_believed(in_steps, kit):
    """A shape that contradicts the model is a failure of the device, and the step is done again here."""
    compiled = in_steps("Liar", "cpu")
    with compiled.burst() as burst:
        equal(burst.run(X).outputs, expected(X))
        equal(burst.submit(X).result(kit.patience).outputs, expected(X))
        equal(compiled.run(X), expected(X))
    assert counts(compiled) == {"step": 3}


def test_a_failing_step_without_a_spare_fails(in_steps, kit):
    """Where the CPU is not in the list the error is the caller's, and the chain stays usable."""
    compiled = in_steps("Failing")
    with compiled.burst() as burst:
        for run in (compiled.run, burst.run, lambda x: burst.submit(x).result(kit.patience)):
            with pytest.raises(driver.GeneralFailure):
                run(-X - 1)
        equal(burst.run(X).outputs, expected(X))
    assert not counts(compiled)


def test_when_the_cpu_fails_too_the_whole_is_tried(settled, kit, caplog):
    """A step that cannot be computed here either takes the whole model along: then its error is the caller's. What ran
    nowhere is not counted; the log says once for each kind that the CPU refused it as well."""
    builder = driver.ModelBuilder()
    x, where = builder.input("float32", (4,)), builder.input("int32", (1,))
    x = builder.operation("ADD", x, np.ones(4, np.float32), 0)
    x = builder.operation("MUL", x, x, 0)
    builder.output(builder.operation("GATHER", x, 0, where))
    devices = [settled("Picky"), "cpu"]
    with driver.compile(builder.build(), devices) as compiled, compiled.burst() as burst:
        equal(burst.run(X, np.ones(1, np.int32)).outputs, [np.full(1, 9, np.float32)])
        for run in (burst.run, compiled.run, lambda *a: burst.submit(*a).result(kit.patience)):
            with pytest.raises(driver.GeneralFailure):
                run(X, np.full(1, 99, np.int32))
        assert not counts(compiled)
        first, second = [record.getMessage() for record in caplog.records]
        for line in (first, second):
            assert "failed (GeneralFailure: " in line
            assert "; the CPU in this process refused the request, too (" in line
        equal(burst.run(X, np.ones(1, np.int32)).outputs, [np.full(1, 9, np.float32)])


def test_a_request_that_every_runtime_refuses(tmp_path, home):
    """Is refused in the words of the file's own runtime, whichever was tried after it, on each path."""
    onnx = pytest.importorskip("onnx", reason="no onnx")
    for package in ("onnxruntime", "openvino"):
        pytest.importorskip(package, reason=f"no {package}")
    value, single = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    ends = [value("a", single, ["n", "m"]), value("b", single, ["k", "l"])], [value("y", single, None)]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Concat", ["a", "b"], ["y"], axis=0)], "g", *ends)
    opsets = [onnx.helper.make_opsetid("", 18)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "net.onnx")
    a, b = np.ones((2, 3), np.float32), np.ones((4, 5), np.float32)
    shapes = {"a": a.shape, "b": b.shape}
    with driver.compile(driver.load(tmp_path / "net.onnx")) as compiled, compiled.burst(input_shapes=shapes) as burst:
        for run in (compiled.run, burst.run, lambda **given: burst.submit(**given).result()):
            with pytest.raises(driver.GeneralFailure, match="Non concat axis dimensions must match") as caught:
                run(a=a, b=b)
            assert not any(suffix in str(caught.value) for suffix in (".cpp", ".cc", ".h:"))
            assert len(str(caught.value)) < 400


def test_a_request_over_which_the_other_runtime_dies(home, monkeypatch):
    """Is refused in the words of the file's own runtime, on each path, and the other one is asked no more."""
    second, devices = f"{FILER.partition(':')[0]}:Second", import_module("driver.devices")
    monkeypatch.setitem(RUNTIMES, "onnx", second)
    monkeypatch.setattr(devices, "entries", lambda: EntryPoints([EntryPoint(second, second, devices.GROUP)]))
    with driver.compile(file_model("one:fail twin:crash"), [FILER, "cpu"]) as compiled, compiled.burst() as burst:
        for run in (burst.run, compiled.run, lambda x: burst.submit(x).result()):
            with pytest.raises(driver.GeneralFailure, match="it fails over this"):
                run(ONE)
        assert not counts(compiled)
        equal(burst.run(X + 1).outputs, [X + 2])
