"""Where a model runs is measured on the model itself; files go to their own runtime; what falls back, and why not."""

import sys

import numpy as np
import pytest

import driver
from driver.client import discovery
from driver.nn.file_form import ModelFile, model_of_file
from driver.runtime import compilation, measuring, progress
from driver.runtime.plan import StepsExecutor

MEASURES = True
X = np.arange(4, dtype=np.float32)


@pytest.fixture
def timed(monkeypatch):
    """timed(cpu=2.0, ...): seconds that each plan takes from now on; the names of those that were measured."""
    measured, seconds = [], {}

    def of_plan(prepared, *_):
        where = "cut" if isinstance(prepared, StepsExecutor) else "cpu"
        where = prepared.remote.device.address if prepared.remote else where
        measured.append(where)
        return seconds[where]

    monkeypatch.setattr(compilation, "seconds_of", of_plan)

    def timed(**given):
        seconds.clear()
        seconds.update({name.replace("__", ":"): value for name, value in given.items()})
        measured.clear()
        return measured

    return timed


@pytest.fixture
def idle(monkeypatch):
    """idle(False): the machine is busy from now on."""
    monkeypatch.setattr(measuring.Load, "is_high", False)
    return lambda is_idle: monkeypatch.setattr(measuring.Load, "is_high", not is_idle)


@pytest.fixture
def picky(settled, place):
    """The device that lacks MUL, in a runtime directory of its own, with figures of nothing."""
    return settled("Picky")


def device_of(compiled):
    (step,) = compiled.placement()
    return step[0]


def test_the_fastest_gets_the_whole_model(settled, runtime_kit, timed, idle, tmp_path, monkeypatch):
    """Each device that takes all of it is timed on it once; the figures are said, kept, and not taken again."""
    del idle
    monkeypatch.setattr(measuring, "runtime_dir", lambda: tmp_path)
    devices = [settled("reference"), "cpu"]
    for seconds, expected in (((1e-3, 2e-3), "reference"), ((2e-3, 1e-3), "reference")):
        measured = timed(reference=seconds[0], cpu=seconds[1])
        with driver.compile(runtime_kit.mixed_model(), devices) as compiled:
            assert device_of(compiled) == expected
            assert compiled.placement().figures.seconds == {"reference": 1e-3, "cpu": 2e-3}
            assert "reference 1 ms" in str(compiled.placement())
        assert sorted(measured) == (["cpu", "reference"] if expected and seconds[0] < seconds[1] else [])


def test_a_busy_machine_is_measured_once_more(settled, runtime_kit, timed, idle, tmp_path, monkeypatch):
    """The second time settles it, even if the machine is always busy."""
    monkeypatch.setattr(measuring, "runtime_dir", lambda: tmp_path)
    devices, found = [settled("reference"), "cpu"], []
    idle(False)
    for cpu in (1e-3, 9e-3, 1e-4):
        measured = timed(reference=5e-3, cpu=cpu)
        with driver.compile(runtime_kit.mixed_model(), devices) as compiled:
            found.append((device_of(compiled), len(measured), compiled.placement().figures.was_busy))
    assert found == [("cpu", 2, True), ("reference", 2, True), ("reference", 0, True)]


def test_a_cut_has_to_be_measured_to_be_faster(settled, runtime_kit, timed, idle, tmp_path, monkeypatch):
    """A model is cut where the cut was faster than the best whole, and is whole where it was not."""
    del idle
    picky = settled("Picky", 0.1)
    for n, (cut, steps) in enumerate(((1e-3, 3), (3e-3, 1))):
        monkeypatch.setattr(measuring, "runtime_dir", lambda n=n: tmp_path / str(n))
        (tmp_path / str(n)).mkdir()
        timed(cut=cut, cpu=2e-3)
        with driver.compile(runtime_kit.mixed_model(), [picky, "cpu"]) as compiled:
            assert len(compiled.placement()) == steps
            np.testing.assert_array_equal(compiled.run(X)[0], runtime_kit.mixed(X)[0])


def test_many_steps_are_not_even_tried(settled, runtime_kit, timed, idle, tmp_path, monkeypatch):
    """More steps than four are no plan where one device takes all of the model."""
    del idle
    monkeypatch.setattr(measuring, "runtime_dir", lambda: tmp_path)
    builder = driver.ModelBuilder()
    x = builder.input("float32", (4,))
    for _ in range(3):
        x = builder.operation("MUL", builder.operation("ADD", x, x, 0), x, 0)
    builder.output(x)
    measured = timed(cpu=1e-3, cut=1e-9)
    with driver.compile(builder.build(), [settled("Picky", 0.01), "cpu"]) as compiled:
        assert compiled.placement() == [("cpu", tuple(range(6)))]
    assert measured == []


def test_one_device_is_neither_measured_nor_joined_by_others(runtime_kit, place, timed):
    """`device=` and a list of one start that device alone."""
    measured = timed()
    with driver.compile(runtime_kit.mixed_model(), device="reference") as compiled:
        assert device_of(compiled) == "reference"
        assert not discovery.find(discovery.Place(discovery.runtime_dir(), "litert"))
    assert measured == []
    with pytest.raises(ValueError, match="device='cpu': give it alone"):
        driver.compile(runtime_kit.mixed_model(), ["cpu"], device="cpu")
    assert place is not None


def test_what_was_measured_is_real(settled, runtime_kit, tmp_path, monkeypatch):
    """Seconds of an execution on each device, transport included."""
    monkeypatch.setattr(measuring, "runtime_dir", lambda: tmp_path)
    with driver.compile(runtime_kit.mixed_model(), [settled("reference"), "cpu"]) as compiled:
        seconds = compiled.placement().figures.seconds
    assert set(seconds) == {"reference", "cpu"}
    assert all(0 < value < 1 for value in seconds.values())
    assert len(list((tmp_path / "placements").glob("*.json"))) == 1


def file_model(portable=None):
    """In file form, of a file that no runtime takes."""
    plain = double_model()
    ports = [[plain.main.operands[i] for i in side] for side in (plain.main.inputs, plain.main.outputs)]
    return model_of_file(ModelFile("onnx", np.frombuffer(b"no model", np.uint8)), *ports, portable)


def double_model():
    builder = driver.ModelBuilder()
    x = builder.input("float32", (4,), name="x")
    builder.output(builder.operation("ADD", x, x, 0))
    return builder.build()


def test_a_file_that_no_runtime_takes_becomes_operations(settled, monkeypatch):
    """Where it can be imported; else the error says what each runtime has against it, and why it is not imported."""
    settled("reference")
    monkeypatch.setattr(compilation, "installed", lambda: ["reference", "onnxruntime"])
    with driver.compile(file_model(double_model)) as compiled:
        assert device_of(compiled) in {"cpu", "onnxruntime"}
        np.testing.assert_array_equal(compiled.run({"x": X})[0], 2 * X)

    def refuse():
        raise driver.ImportFailed("operator Frobnicate of y: the HAL has no such operation")

    with pytest.raises(driver.NotPlaced, match=r"onnxruntime: .*; and as operations of the HAL: operator Frob"):
        driver.compile(file_model(refuse))


def test_a_named_device_gets_the_form_that_it_runs(settled):
    """A device that runs no files gets operations, made when it is asked."""
    made = []

    def portable():
        made.append(1)
        return double_model()

    with driver.compile(file_model(portable), [settled("reference")]) as compiled:
        np.testing.assert_array_equal(compiled.run(x=X)[0], 2 * X)
        assert compiled.model.main.operations[0].type == "ADD"
    assert made


def test_progress_is_shown_in_a_terminal_and_nowhere_else(runtime_kit, monkeypatch):
    """After a second, in one line that is cleared; not when piped, and not where it is switched off."""

    class Terminal:
        def __init__(self, is_one):
            self.text, self.is_one = "", is_one

        closed = False

        def isatty(self):
            return self.is_one

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    monkeypatch.setattr(progress, "_UNSHOWN", 0.0)
    for is_terminal, given, is_shown in ((True, None, True), (False, None, False), (True, False, False)):
        monkeypatch.setattr(sys, "stderr", Terminal(is_terminal))
        driver.compile(runtime_kit.mixed_model(), ["cpu"], progress=given).close()
        assert bool(sys.stderr.text) is is_shown
        if is_shown:
            assert "prepare 3 operations on cpu" in sys.stderr.text
            assert sys.stderr.text.endswith("\r\x1b[K")
