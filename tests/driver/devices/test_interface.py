"""The base classes of a device: what a device is without its own answers, and who finds out that it is none."""

import ast
from pathlib import Path

import pytest

import driver
from driver.devices import device_class
from driver.errors import DeviceNotFound
from driver.interface import BoundExecution

SOURCES = Path(driver.__file__).parent
BASES = (driver.Device, driver.PreparedModel, BoundExecution)


class Plain(driver.Device):
    """Defines only what it must."""

    name, version, type = "plain", "1", "CPU"

    def supported_operations(self, model):
        return [False for _ in model.main.operations]

    def prepare(self, model, pace, preference):
        return PlainModel()


class PlainModel(driver.PreparedModel):
    def bind(self, inputs, outputs, pace, loop_timeout):
        return BoundExecution()


def test_a_device_that_defines_only_what_it_must_has_answers_to_all():
    """Nothing is kept, shared, improved, cancelled or given back, and a restored model is a prepared one."""
    device, prepared, bound = Plain(), PlainModel(), BoundExecution()
    assert (device.cache_files, device.library) == (None, None)
    assert device.slots >= 1
    assert device.quantum > 0
    assert isinstance(device.restore(None, driver.Saved(), None, None, "low_power"), PlainModel)
    assert (prepared.is_static, prepared.serves_all, prepared.can_improve) == (True, False, False)
    assert prepared.saved(None) is prepared.improved(None) is prepared.rest() is None
    assert (bound.native, bound.copied_bytes, bound.checked_bytes, bound.is_infallible) == (None, 0, 0, False)
    assert bound.cancel() is None


def test_a_device_lacks_nothing_that_it_must_define():
    """Python refuses to make one, by the name of the method."""
    with pytest.raises(TypeError, match="prepare"):
        type("Half", (driver.Device,), {"supported_operations": Plain.supported_operations})()


@pytest.mark.parametrize("name", ["driver.nn:Model", "driver.devices:names"])
def test_what_is_no_subclass_is_refused_with_the_remedy(name):
    """A class of that shape is not enough: the engine would find its defaults missing one by one."""
    with pytest.raises(DeviceNotFound, match=f"{name} is not a device; make it a subclass of driver.Device"):
        device_class(name)


def test_nothing_of_a_device_is_looked_for_by_name():
    """What a device may define stands in the base classes, where mypy sees it; no getattr, no hasattr."""
    known = {name for base in BASES for name in (*vars(base), *vars(base).get("__annotations__", ())) if name[0] != "_"}
    assert {"slots", "restore", "improved", "native", "shapes"} <= known
    found = [
        f"{path.relative_to(SOURCES)}:{node.lineno} {node.args[1].value}"
        for path in sorted(SOURCES.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"getattr", "hasattr"}
        and isinstance(node.args[1], ast.Constant)
        and node.args[1].value in known
    ]
    assert found == []
