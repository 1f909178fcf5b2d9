"""A device with a vendor extension, through every way that a model and a request can take."""

import numpy as np
import pytest
from burst_test_devices.extended import FIXED, NAME

import driver
from burst import InvalidArgument
from driver.errors import NotPlaced
from driver.nn import Model, Operand, Operation, Subgraph
from driver.vts import SMOKE, Target, catalogue, run

DEVICE = "burst_test_devices.extended:FixedPoint"
X = np.array([1.5, -2.25, 100.0, 0.1], np.float32)
BEHIND = bytes([4])  # bits behind the point
EXPECTED = np.rint(X * 16) / 16 * 2 * 0.5


@pytest.fixture(scope="module")
def fixed(shared):
    """The device, connected."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        shared.enter(monkeypatch)
        with driver.connect(DEVICE) as device:
            yield device


def fixed_model(*, behind: bytes | None = BEHIND, first: str = "test.fixed.FROM_FLOAT", size: int = 4) -> Model:
    """x -> fixed -> + itself -> * the constant 0.5 -> float."""
    number, scalar = FIXED.type("TENSOR_FIXED16"), FIXED.type("FIXED16")
    half = np.array(8, np.int16)
    operands = [
        Operand("TENSOR_FLOAT32", (size,), lifetime="INPUT", extra={"name": "x"}),
        *(Operand(number, (size,), extension_params=behind) for _ in range(3)),
        Operand(scalar, (), lifetime="CONSTANT", value=half, extension_params=behind),
        Operand("TENSOR_FLOAT32", (size,), lifetime="OUTPUT"),
    ]
    steps = [
        Operation(first, [0], [1]),
        Operation(FIXED.operation("ADD"), [1, 1], [2]),
        Operation(FIXED.operation("SCALE"), [2, 4], [3]),
        Operation(FIXED.operation("TO_FLOAT"), [3], [5]),
    ]
    return Model(Subgraph(operands, steps, [0], [5]), extensions=((NAME, 77),))


def mixed_model() -> Model:
    """The same, with an ADD of the HAL in front: x + x."""
    graph = fixed_model().main
    zero, sizes = Operand("INT32", (), lifetime="CONSTANT", value=np.zeros((), np.int32)), ("TENSOR_FLOAT32", (4,))
    operands = [*graph.operands, zero, Operand(*sizes)]
    add, first = Operation("ADD", [0, 0, 6], [7]), Operation(graph.operations[0].type, [7], [1])
    return Model(Subgraph(operands, [add, first, *graph.operations[1:]], graph.inputs, graph.outputs))


def test_it_is_known_by_name(fixed):
    """The device's extensions, by name."""
    assert fixed.extensions == (NAME, "hal.oem")


def test_a_model_of_it_runs_on_every_path(fixed):
    """Plain, in a burst, asynchronously and fenced: the same answer."""
    model = fixed_model()
    assert fixed.explain(model) == [None] * 4
    with fixed.prepare(model) as prepared:
        (plain,) = prepared.run(X)
        with prepared.burst() as burst:
            found = [burst.run(X).outputs[0].copy() for _ in range(3)]
    for one in (plain, *found):
        np.testing.assert_array_equal(one, EXPECTED)


def test_its_operands_can_be_inputs_and_outputs(fixed):
    """Tensors of an extension's type come and go as their bytes mean."""
    number = FIXED.type("TENSOR_FIXED16")
    operands = [
        Operand(number, (0,), lifetime="INPUT", extension_params=BEHIND),
        Operand(number, (0,), lifetime="OUTPUT", extension_params=BEHIND),
    ]
    model = Model(Subgraph(operands, [Operation(FIXED.operation("ADD"), [0, 0], [1])], [0], [1]))
    with fixed.prepare(model) as prepared:
        (found,) = prepared.run(np.array([1, 2, 32767], np.int16))
    assert found.tolist() == [2, 4, 32767]


def test_it_is_kept_in_cache_files(fixed, tmp_path):
    """A compilation of it comes back out of the cache."""
    compiled = [driver.compile(fixed_model(), [fixed], cache_dir=tmp_path) for _ in range(2)]
    assert [one.stats()["compilations"][0]["outcome"] for one in compiled] == ["saved", "restored"]
    for one in compiled:
        np.testing.assert_array_equal(one.run(X)[0], EXPECTED)
        one.close()


def test_a_model_is_divided_between_it_and_the_hal(fixed):
    """What is of the HAL runs on the CPU, what is of the extension on its device."""
    with driver.compile(mixed_model(), ["cpu", fixed]) as compiled:
        assert len(compiled.placement()) == 2
        np.testing.assert_array_equal(compiled.run(X / 2)[0], EXPECTED)


def test_others_refuse_it_with_the_reason(fixed, shared, monkeypatch):
    """A device that does not know the extension, the CPU, and the device itself where its own rule is broken."""
    shared.enter(monkeypatch)
    with driver.connect("reference") as reference:
        assert reference.explain(mixed_model()) == [None, *[f"the device does not know the extension {NAME}"] * 4]
        with pytest.raises(InvalidArgument, match=rf"not know the extension {NAME}; nor are 3 others"):
            reference.prepare(fixed_model())
    reasons = fixed.explain(fixed_model(behind=None))
    assert "operand 1: extension_params has to be one byte" in reasons[0]
    with pytest.raises(InvalidArgument, match="extension_params has to be one byte"):
        fixed.prepare(fixed_model(behind=b"\0\0"))
    with pytest.raises(NotPlaced, match=rf"FROM_FLOAT\): cpu: the device does not know the extension {NAME}$"):
        driver.compile(fixed_model(), ["cpu"])


def test_oem_operations_are_the_devices_own(fixed):
    """A device that names hal.oem runs OEM_OPERATION."""
    operands = [Operand("TENSOR_OEM_BYTE", (3,), lifetime=life) for life in ("INPUT", "OUTPUT")]
    with fixed.prepare(Model(Subgraph(operands, [Operation("OEM_OPERATION", [0], [1])], [0], [1]))) as prepared:
        assert bytes(prepared.run(np.frombuffer(b"oem", np.uint8))[0]) == b"oem"


def test_many_reasons_are_shortened_not_lost(fixed):
    """Thousands of refused operations are all answered, the first with words."""
    sizes = "TENSOR_FLOAT32", (1,)
    count = 3000
    operands = [Operand(*sizes, lifetime="INPUT"), *(Operand(*sizes) for _ in range(count - 1))]
    operands.append(Operand(*sizes, lifetime="OUTPUT"))
    steps = [Operation("ABS", [n], [n + 1]) for n in range(count)]
    reasons = fixed.explain(Model(Subgraph(operands, steps, [0], [count])))
    assert len(reasons) == count
    assert all(reasons)


def test_the_kit_passes(shared, monkeypatch):
    """`burst vts` has rows for extensions, and a device with one passes them."""
    shared.enter(monkeypatch)
    found = [test for test in catalogue(scope=SMOKE) if test.category == "extension"]
    tests = [test for test in found if not test.name.startswith("extension/file/")]  # it runs no model files
    with Target(DEVICE) as target:
        outcomes = list(run(tests, target))
    assert len(outcomes) > 8
    assert {o.outcome for o in outcomes} == {"passed"}
