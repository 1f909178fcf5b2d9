"""The base classes of a device: what a device is without its own answers, and who finds out that it is none."""

import ast
from pathlib import Path

import numpy as np
import pytest
from sent_models import sent

import driver
from driver.devices import device_class
from driver.engine.models import ModelStore
from driver.errors import DeviceNotFound
from driver.interface import BoundExecution, Preparation
from driver.nn import OperandType

SOURCES = Path(driver.__file__).parent
BASES = (driver.Device, driver.PreparedModel, BoundExecution)


class Plain(driver.Device):
    """Defines only what it must."""

    name, version, type = "plain", "1", "CPU"

    def supported_operations(self, model):
        return [False for _ in model.main.operations]

    def prepare(self, model, preparation):
        return PlainModel()


class PlainModel(driver.PreparedModel):
    def bind(self, inputs, outputs, options):
        return BoundExecution()


def test_a_device_that_defines_only_what_it_must_has_answers_to_all():
    """Nothing is kept, shared, improved, cancelled or given back, and a restored model is a prepared one."""
    device, prepared, bound = Plain(), PlainModel(), BoundExecution()
    assert (device.cache_files, device.library, device.missing()) == (None, None, None)
    assert device.slots >= 1
    assert device.quantum > 0
    assert isinstance(device.restore(None, driver.Saved(), None, Preparation()), PlainModel)
    assert (prepared.is_static, prepared.serves_all, prepared.improves_after) == (True, False, 0)
    assert prepared.saved(None) is prepared.improved(None) is prepared.rest() is None
    assert (bound.native, bound.copied_bytes, bound.checked_bytes, bound.is_infallible) == (None, 0, 0, False)
    assert bound.cancel() is None


class Looking(Plain):
    """Keeps the constants that it gets."""

    def prepare(self, model, preparation):
        self.constants = [o.value for o in model.main.operands if o.lifetime.is_constant]
        return PlainModel()


CONSTANTS = [
    ("TENSOR_FLOAT32", (4,), {}, np.arange(4, dtype=np.float32)),
    ("TENSOR_FLOAT32", (2, 3), {}, np.arange(6, dtype=np.float32).view(np.uint8)),
    ("TENSOR_FLOAT16", (1, 2, 2), {}, np.arange(4, dtype=np.float16)),
    ("TENSOR_QUANT8_ASYMM", (2, 2), {"scale": 0.5, "zero_point": 3}, np.arange(4, dtype=np.uint8)),
    ("TENSOR_QUANT8_ASYMM_SIGNED", (3,), {"scale": 0.5}, np.arange(-1, 2, dtype=np.int8)),
    ("TENSOR_QUANT16_SYMM", (2,), {"scale": 0.5}, np.arange(2, dtype=np.int16)),
    (
        "TENSOR_QUANT8_SYMM_PER_CHANNEL",
        (2, 1),
        {"channel_quant": ((0.5, 2.0), 0)},
        np.array([[-3], [4]], np.int8),
    ),
    ("TENSOR_BOOL8", (3,), {}, np.array([True, False, True])),
    ("TENSOR_INT32", (0,), {}, np.empty(0, np.int32)),
    ("FLOAT32", (), {}, np.float32(2.5)),
    ("FLOAT16", (), {}, np.float16(2.5)),
    ("INT32", (), {}, np.array(7, np.int32)),
    ("BOOL", (), {}, np.bool_(True)),
]


def model_with_constants():
    """A model as a client may build it: values of the operand's dtype, as bytes, flat, or as numpy's booleans."""
    operands = [driver.Operand(t, d, lifetime="CONSTANT_COPY", value=value, **more) for t, d, more, value in CONSTANTS]
    x, y = (driver.Operand("TENSOR_FLOAT32", (4,), lifetime=lifetime) for lifetime in ("INPUT", "OUTPUT"))
    graph = driver.Subgraph([x, y, *operands], [driver.Operation("ABS", (0,), (1,))], (0,), (1,))
    return driver.Model(graph)


def test_constants_reach_a_device_as_arrays_of_their_operands():
    """Typed, shaped and read-only views of the model's memory, however the client gave the values."""
    device = Looking()
    shared = ModelStore(device).prepare(*sent(model_with_constants()), lambda: None)
    begin = shared.region.asarray().ctypes.data
    for (kind, dimensions, _, value), found in zip(CONSTANTS, device.constants, strict=True):
        assert (found.dtype, found.shape) == (OperandType[kind].stored_dtype, dimensions)
        assert found.tobytes() == np.asarray(value).tobytes()
        assert not found.flags.writeable
        assert not found.nbytes or 0 <= found.ctypes.data - begin < shared.region.nbytes  # nothing was copied


def test_a_device_lacks_nothing_that_it_must_define():
    """Python refuses to make one, by the name of the method."""
    with pytest.raises(TypeError, match="prepare"):
        type("Half", (driver.Device,), {"supported_operations": Plain.supported_operations})()


@pytest.mark.parametrize("name", ["driver.nn:Model", "driver.devices:names"])
def test_what_is_no_subclass_is_refused_with_the_remedy(name):
    """A class of that shape is not enough: the engine would find its defaults missing one by one."""
    with pytest.raises(DeviceNotFound, match=f"{name} is not a device; make it a subclass of driver.Device"):
        device_class(name)


@pytest.mark.sources
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
