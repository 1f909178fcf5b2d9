"""Buffers that one execution reads and writes: an extension of ours, with a second memory where a driver needs one."""

import numpy as np
import pytest

import driver
from burst import GeneralFailure, InvalidArgument, Memory, Request, RequestArgument
from driver import BufferDesc, BufferRole

ROLES = [BufferRole(0, 0)], [BufferRole(0, 0)]
IN_PLACE = BufferDesc(in_place=True)


def doubling():
    """x, twice."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (0,))
    builder.output(builder.operation("CONCATENATION", x, x, 0))
    return builder.build()


def two_states():
    """a + b and a - b."""
    builder = driver.ModelBuilder()
    a, b = builder.input("float32", (2,)), builder.input("float32", (2,))
    builder.output(builder.operation("ADD", a, b, 0))
    builder.output(builder.operation("SUB", a, b, 0))
    return builder.build()


def value(buffer):
    found = np.zeros(buffer.dimensions, np.float32)
    buffer.copy_to(found)
    return found.reshape(-1).tolist()


REQUEST = (RequestArgument(pool=0),), (RequestArgument(pool=0),)


@pytest.mark.parametrize("way", ["burst", "plain", "async", "fenced"])
@pytest.mark.parametrize("name", ["reference", "litert"])
def test_a_value_of_one_size(connect, kit, name, way):
    """Each execution reads what the one before it has left in the same buffer, on every path."""
    if name == "litert":
        pytest.importorskip("ai_edge_litert")
    with connect(name).prepare(kit.add_model()) as prepared, prepared.burst() as burst:
        buffer = prepared.device.allocate(IN_PLACE, [prepared], *ROLES)
        buffer.copy_from(np.zeros((1, 4), np.float32))
        execute = {
            "burst": burst.execute,
            "plain": prepared.execute,
            "async": lambda request: prepared.execute_async(request).result(),
            "fenced": lambda request: prepared.execute_fenced(request).result(kit.patience),
        }[way]
        for n in range(1, 8):
            execute(Request(*REQUEST, (buffer,)))
            assert value(buffer) == [n] * 4
        buffer.copy_from(np.full((1, 4), 9, np.float32))
        execute(Request(*REQUEST, (buffer,)))
        assert value(buffer) == [10] * 4


@pytest.mark.parametrize("on", ["device", "shared"])
def test_a_value_that_grows(device, on):
    """It has the size of then."""
    if on == "device":
        model = device.prepare(doubling())
        buffer = device.allocate(IN_PLACE, [model], *ROLES)
    else:
        model = driver.compile(doubling(), devices=["cpu"])
        buffer = model.allocate(IN_PLACE, *ROLES)
    with model:
        buffer.copy_from(np.ones(1, np.float32))
        for n in range(1, 7):
            model.execute(Request(*REQUEST, (buffer,))).raise_for_status()
            assert value(buffer) == [1] * 2**n


def test_two_of_them(device):
    """Both are read before either is written; and one alone may be written from memory."""
    with device.prepare(two_states()) as prepared, prepared.burst() as burst:
        buffers = [device.allocate(IN_PLACE, [prepared], [BufferRole(0, n)], [BufferRole(0, n)]) for n in range(2)]
        for buffer, begin in zip(buffers, (5, 2), strict=True):
            buffer.copy_from(np.full(2, begin, np.float32))
        a, b, memory = 5, 2, Memory.create(16)
        memory.asarray(np.float32)[:] = 1
        both = (RequestArgument(pool=0), RequestArgument(pool=1))
        other = RequestArgument(pool=0), RequestArgument(pool=1, length=8)
        outputs = RequestArgument(pool=0), RequestArgument(pool=1, offset=8, length=8)
        one = Request(other, outputs, (buffers[0], memory))
        for n in range(6):
            if n % 3 == 2:  # so they take turns at different times
                burst.execute(one).raise_for_status()
                a += 1
            else:
                burst.execute(Request(both, both, tuple(buffers))).raise_for_status()
                a, b = a + b, a - b
            assert [value(buffer) for buffer in buffers] == [[a] * 2, [b] * 2]


def test_an_execution_that_fails(connect, kit):
    """The value of before stays, and the next execution reads it."""
    device = connect("Failing")
    with device.prepare(kit.add_model()) as prepared, prepared.burst() as burst:
        buffer = device.allocate(IN_PLACE, [prepared], *ROLES)
        buffer.copy_from(np.full((1, 4), -1, np.float32))
        for execute in (burst.execute, prepared.execute):
            assert execute(Request(*REQUEST, (buffer,))).status == GeneralFailure.status
            assert value(buffer) == [-1] * 4
        buffer.copy_from(np.zeros((1, 4), np.float32))
        burst.execute(Request(*REQUEST, (buffer,))).raise_for_status()
        assert value(buffer) == [1] * 4


def test_a_fork(device, kit):
    """A fork is in place, too, and goes its own way."""
    with device.prepare(kit.add_model()) as prepared:
        buffer = device.allocate(IN_PLACE, [prepared], *ROLES)
        buffer.copy_from(np.zeros((1, 4), np.float32))
        prepared.execute(Request(*REQUEST, (buffer,))).raise_for_status()
        fork = buffer.fork()
        for _ in range(2):
            prepared.execute(Request(*REQUEST, (fork,))).raise_for_status()
        assert (value(buffer), value(fork)) == ([1] * 4, [3] * 4)


def test_who_does_not_ask(device, kit):
    """The HAL's rule: no execution reads and writes one buffer. And who asks needs a role of each kind."""
    with device.prepare(kit.add_model()) as prepared:
        buffer = device.allocate(BufferDesc(), [prepared], *ROLES)
        buffer.copy_from(np.zeros((1, 4), np.float32))
        assert prepared.execute(Request(*REQUEST, (buffer,))).status == InvalidArgument.status
        with pytest.raises(InvalidArgument, match="in_place: the buffer needs a role as an input and one as an output"):
            device.allocate(IN_PLACE, [prepared], [BufferRole(0, 0)], [])
