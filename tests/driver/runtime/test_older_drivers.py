"""Drivers that speak an older HAL: what is newer is never offered to them, and runs elsewhere."""

import numpy as np
import pytest

import driver
from burst import InvalidArgument
from driver.devices.reference import ReferenceDevice
from driver.nn import validate
from driver.nn.older import form_for_version, too_new
from driver.nn.validate import required_version
from driver.runtime.local import LocalDevice

X = np.linspace(-1, 1, 128, dtype=np.float32).reshape(1, 8, 8, 2)
WEIGHTS, BIAS = np.ones((3, 3, 3, 2), np.float32), np.zeros(3, np.float32)


def mixed_model():
    """CONV_2D with a layout that says what HAL 1.0 does, ABS of HAL 1.2, and ADD."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (1, 8, 8, 2))
    x = builder.operation("CONV_2D", x, WEIGHTS, BIAS, 1, 1, 1, 0, False)
    x = builder.operation("ABS", x)
    builder.output(builder.operation("ADD", x, x, 0))
    return builder.build()


def plain_model():
    """The same without ABS: HAL 1.0 has it, but for the layout and the permission to compute as float16."""
    builder = driver.ModelBuilder(relaxed=True)
    x = builder.input("float32", (1, 8, 8, 2))
    builder.output(builder.operation("CONV_2D", x, WEIGHTS, BIAS, 1, 1, 1, 0, False))
    return builder.build()


@pytest.mark.parametrize(("version", "reason"), [("1.0", "HAL 1.2"), ("1.1", "HAL 1.2"), ("1.2", None), ("1.3", None)])
def test_an_operation_is_offered_from_its_version_on(version, reason):
    """ABS came with HAL 1.2; CONV_2D is of HAL 1.0, as its layout says nothing new."""
    found = too_new(mixed_model(), version)
    assert [found[0], found[2]] == [None, None]
    assert (found[1] is None) if reason is None else (reason in found[1])


def test_types_and_arguments_count():
    """float16 came with HAL 1.2, signed quantisation with 1.3; so did a layout that is not the old one."""
    for dtype, quantisation, needs in (("float16", {}, 2), ("quant8_asymm_signed", {"scale": 1.0, "zero_point": 0}, 3)):
        builder = driver.ModelBuilder()
        x = builder.input(dtype, (4,), **quantisation)
        builder.output(builder.operation("ADD", x, x, 0, **quantisation))
        model = builder.build()
        assert [too_new(model, f"1.{n}") == [None] for n in range(4)] == [n >= needs for n in range(4)]
    builder = driver.ModelBuilder()
    x = builder.input("float32", (1, 2, 8, 8))
    builder.output(builder.operation("CONV_2D", x, WEIGHTS, BIAS, 1, 1, 1, 0, True))
    assert [too_new(builder.build(), f"1.{n}") == [None] for n in range(3)] == [False, False, True]


def test_outputs_of_open_size_need_1_2(kit):
    """Before, a request had to know the shapes of its outputs."""
    assert "HAL 1.2" in too_new(kit.reshape_model(), "1.1")[0]
    assert too_new(kit.reshape_model(), "1.2") == [None]


def test_a_model_is_put_into_the_older_form():
    """Without the arguments that the older HAL lacks and constants of its unknown types; inputs and outputs stay."""
    model = plain_model()
    older = form_for_version(model, "1.0")
    validate(older)
    assert (required_version(older), older.relaxed) == (0, False)
    assert all(operand.type.since == 0 for operand in older.main.operands)
    assert (older.inputs, older.outputs) == (model.inputs, model.outputs)
    assert form_for_version(model, "1.1").relaxed
    assert form_for_version(model, "1.3") is model
    with pytest.raises(ValueError, match=r"hal_version='2.0': one of '1.0'"):
        form_for_version(model, "2.0")


def test_what_is_newer_runs_elsewhere(settled):
    """The runtime offers a slice of the model; the driver, which looks, sees nothing newer."""
    old = settled("Old", 0.5)
    with driver.compile(mixed_model(), [old, "cpu"]) as compiled, driver.compile(mixed_model(), ["cpu"]) as here:
        assert compiled.placement() == [(old, (0,)), ("cpu", (1,)), (old, (2,))]
        np.testing.assert_array_equal(compiled.run(X)[0], here.run(X)[0])
        with compiled.burst() as burst:
            np.testing.assert_array_equal(burst.run(X).outputs[0], here.run(X)[0])
    with driver.compile(plain_model(), [old, "cpu"]) as compiled:
        assert compiled.placement() == [(old, (0,))]


def test_a_direct_preparation_names_the_operation(settled):
    """Whoever prepares it there is told which one, and what it needs."""
    with driver.connect(settled("Old", 0.5)) as device:
        assert device.supported_operations(mixed_model()) == [True, False, True]
        with pytest.raises(InvalidArgument, match=r"operation 1 \(ABS\).*needs HAL 1.2, and the device speaks 1.0"):
            device.prepare(mixed_model())
        with device.prepare(plain_model()) as prepared:
            assert prepared.run(X)[0].shape == (1, 8, 8, 3)


def test_a_driver_in_this_process_is_asked_in_the_same_way():
    """`LocalDevice` keeps to the version, too."""

    class OldHere(ReferenceDevice):
        hal_version = "1.1"

    assert LocalDevice(OldHere()).supported_operations(mixed_model()) == [True, False, True]
