"""What a driver in C may offer beyond executions: memory, figures, needs, hints, compilations that are kept."""

import mmap
import os

import numpy as np
import pytest

import driver
from burst import ErrorStatus, InvalidArgument, Memory, Request, RequestArgument
from driver import BufferDesc, BufferRole
from driver.client import discovery
from driver.devices import device_class
from driver.interface import Needs

KIND = "com.example.toy"


def argument(nbytes, pool):
    return RequestArgument(pool=pool, length=nbytes)


@pytest.mark.integration
@pytest.mark.parametrize("way", ["execute", "execute_fenced"])
def test_buffers_in_a_native_layout(toy, place, model, x, way):
    """A buffer of the driver, whose elements lie in reverse order: values are copied in and out in the HAL layout, and
    one execution leaves its result there for the next one."""
    with driver.connect(str(toy)) as device, device.prepare(model) as prepared:
        roles = [BufferRole(0, 0, 1.0)]
        first = device.allocate(BufferDesc(()), [prepared], roles, [])
        second = device.allocate(BufferDesc(()), [prepared], roles, roles)
        third = device.allocate(BufferDesc(()), [prepared], [], roles)
        first.copy_from(x)
        for source, target in ((first, second), (second, third)):
            result = run(prepared, way, Request((argument(0, 0),), (argument(0, 1),), (source, target)))
            assert result.status is ErrorStatus.NONE, result
        y = (x + 1) * x
        out = np.empty_like(x)
        third.copy_to(out)
        np.testing.assert_array_equal(out, (y + 1) * y)


def run(prepared, way, request):
    found = getattr(prepared, way)(request)
    return found.result() if way == "execute_fenced" else found


def test_memory_of_its_own_kind(toy, place, model, x):
    """Memory that only the driver knows how to map is used in place; a handle that is wrong is INVALID_ARGUMENT, in the
    driver's words."""
    fd = os.memfd_create("toy")
    os.ftruncate(fd, 2 * mmap.PAGESIZE)
    os.pwrite(fd, x.tobytes(), mmap.PAGESIZE)
    with driver.connect(str(toy)) as device, device.prepare(model) as prepared:
        source = Memory.from_handle(fd, x.nbytes, KIND, (mmap.PAGESIZE,))
        target = Memory.create(x.nbytes)
        request = Request((argument(0, 0),), (argument(x.nbytes, 1),), (source, target))
        result = prepared.execute(request)
        assert result.status is ErrorStatus.NONE, result
        np.testing.assert_array_equal(target.asarray(np.float32, (1, 4)), (x + 1) * x)
        wrong = Memory.from_handle(fd, x.nbytes, KIND)
        with pytest.raises(InvalidArgument, match="driver 'toy': map_memory: give whole floats, and one field"):
            prepared.execute(Request((argument(0, 0),), (argument(x.nbytes, 1),), (wrong, target))).raise_for_status()
    os.close(fd)


def test_figures_and_needs(toy):
    """What the driver states of its speed and power, and what it needs of the system, are what the device has."""
    kind = device_class(str(toy))
    assert kind.needs == Needs(("/sys/class/toy",), (), ("ioctl",))
    stated = kind().capabilities
    assert stated.operands == {"TENSOR_FLOAT32": driver.Performance(0.25, 0.5)}
    assert stated.relaxed_tensor == driver.Performance(0.125, None)


def test_hints_of_a_burst(toy, place, model, x):
    """The driver hears when a burst on its model begins, with the preference, and when it has ended."""
    with driver.connect(str(toy)) as device, device.prepare(model, preference="sustained_speed") as prepared:
        with prepared.burst() as burst:
            burst.run(x)
        log = discovery.Place(discovery.runtime_dir(), str(toy)).log
        while "toy: ended 0" not in log.read_text():
            device.call("status")
        assert "toy: began 2" in log.read_text()


def test_compilations_are_kept(toy, place, model, x, tmp_path):
    """What `save` put is given back to `prepare` when the model is restored."""
    kept = []
    for _ in range(2):
        with driver.compile(model, devices=[str(toy)], cache_dir=tmp_path) as compiled:
            np.testing.assert_array_equal(compiled.run(x)[0], (x + 1) * x)
            kept += [one["outcome"] for one in compiled.stats()["compilations"]]
    assert kept == ["saved", "restored"]
