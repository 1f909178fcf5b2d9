"""Memory of a kind that a device cannot decode: what it supports, what it prepares, and what it answers.

The HAL: getSupportedOperations has to notice handles that the driver cannot decode; preparations and executions on
these fail, and GENERAL_FAILURE is recommended.
"""

import fcntl
import mmap
import os
from itertools import product

import numpy as np
import pytest

import driver
from burst import GeneralFailure, Memory, Usage
from burst.memory import frozen_memory
from driver import BufferDesc, BufferRole

PAGE = mmap.PAGESIZE
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
X = np.ones(8, np.float32)


def sealed(pages, written):
    """A descriptor of sealed memory, for reading, of which those pages were written with ones."""
    fd = os.memfd_create("pool", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, pages * PAGE)
    for page in written:
        os.pwrite(fd, np.ones(PAGE // 4, np.float32), page * PAGE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.close(fd)
    return readable


def mapped(pages, written):
    fd = sealed(pages, written)
    try:
        return Memory.from_fd(fd, pages * PAGE, mmap.PROT_READ)
    finally:
        os.close(fd)


def blob(pages, written):
    fd = sealed(pages, written)
    try:
        return Memory.from_hardware_buffer(fd, "blob", pages * PAGE, usage=Usage.CPU_READ)
    finally:
        os.close(fd)


def image(pages, written):
    fd = sealed(pages, written)
    try:
        return Memory.from_hardware_buffer(fd, "gray", PAGE, pages, usage=Usage.CPU_READ)
    finally:
        os.close(fd)


def ashmem(pages, written):
    def fill(room):
        for page in written:
            room[page * PAGE : (page + 1) * PAGE].view(np.float32)[:] = 1

    return Memory.frozen_by(pages * PAGE, fill)


POOLS = {"ashmem": ashmem, "mmap_fd": mapped, "hardware_buffer_blob": blob, "hardware_buffer": image}
HOLES = {"none": range(4), "behind": [0], "before": [3], "in the constant": [1, 2], "between": [0, 3], "all": []}
"""Which of four pages are written; constants lie at the beginnings of the first and of the last."""


def values(pool, page):
    return pool.asarray(np.uint8, X.nbytes, page * PAGE).view(np.float32)


def adding(*constants):
    """x + each constant in turn."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", X.shape)
    for constant in constants:
        x = builder.operation("ADD", x, builder.constant(constant, by_reference=True), 0)
    builder.output(x)
    return builder.build()


@pytest.fixture(params=["reference", "AshmemAlone", "Nothing"])
def asked(request, connect):
    """Two connections to a device, and the kinds that it can decode."""
    module = "burst_test_devices.memory_kinds:" if request.param != "reference" else ""
    kinds = {"reference": set(POOLS), "AshmemAlone": {"ashmem"}, "Nothing": set()}[request.param]
    return connect(module + request.param), connect(module + request.param), kinds


@pytest.mark.parametrize("kind", POOLS)
def test_what_is_promised_is_prepared(asked, kind):
    """If a device says that it supports an operation, it prepares it, by this connection or another one, whatever was
    asked before, alone or beside others, and computes it; else GENERAL_FAILURE, with the kind and the remedy.
    """
    device, other, kinds = asked
    for written in HOLES.values():
        pool = POOLS[kind](4, written)
        for pages in ((0,), (3,), (0, 3)):
            model = adding(*(values(pool, page) for page in pages))
            supported = device.supported_operations(model)
            assert supported in ([True] * len(pages), [False] * len(pages))
            assert supported[0] or kind not in kinds
            for connection, again in product((device, other), (False, True)):
                asked_first = [connection.supported_operations(model)] if again else []
                assert asked_first in ([], [supported])
                if supported[0]:
                    with connection.prepare(model) as prepared:
                        expected = X + sum(1 for page in pages if page in written)
                        np.testing.assert_array_equal(prepared.run(X)[0], expected)
                    continue
                with pytest.raises(
                    GeneralFailure, match=f"memory of kind {kind}, which the device cannot decode: copy"
                ):
                    connection.prepare(model)


def test_the_promise_holds_for_parts(connect):
    """A model that is divided runs on the device whatever parts of a pool with holes its steps use."""
    device = connect("burst_test_devices.memory_kinds:AshmemAlone")
    for written in HOLES.values():
        pool = mapped(4, written)
        model = adding(values(pool, 0), values(pool, 3))
        supported = device.supported_operations(model)
        for page, is_supported in zip((0, 3), supported, strict=True):
            assert device.supported_operations(adding(values(pool, page))) == [is_supported]


def test_memory_comes_before_other_reasons(connect):
    """An operation that the device lacks does not hide memory that it cannot decode, nor the other way round."""
    device = connect("burst_test_devices.memory_kinds:AshmemAlone")
    builder = driver.ModelBuilder()
    x = builder.input("float32", X.shape)
    first = builder.operation("ADD", x, builder.constant(values(mapped(4, range(4)), 0), by_reference=True), 0)
    builder.output(builder.operation("ADD", first, X, 0))
    model = builder.build()
    assert device.supported_operations(model) == [False, True]
    with pytest.raises(GeneralFailure, match=r"operation 0 \(ADD\) is not supported"):
        device.prepare(model)


def test_a_constant_of_another_drivers_kind(device):
    """By the wire alone, as no client can map such memory: not supported, and GENERAL_FAILURE."""
    pool = ashmem(4, range(4))
    model = adding(values(pool, 0))
    frozen_memory(pool.asarray()).kind = "com.example.heap"
    assert device.supported_operations(model) == [False]
    with pytest.raises(GeneralFailure, match=r"memory of kind com\.example\.heap, which the device cannot decode"):
        device.prepare(model)


def vendor(nbytes=32):
    fd = os.memfd_create("heap")
    os.ftruncate(fd, nbytes)
    try:
        return Memory.from_handle(fd, nbytes, "com.example.heap", (1,))
    finally:
        os.close(fd)


@pytest.mark.parametrize("where", ["a device", "compiled", "the CPU"])
def test_copies_of_buffers(device, where):
    """IBuffer::copyTo and copyFrom give GENERAL_FAILURE for memory that cannot be mapped, and the buffer goes on."""
    model = adding(X)
    if where == "a device":
        prepared = device.prepare(model)
        buffer = device.allocate(BufferDesc(), [prepared], [BufferRole(0, 0)], [])
    else:
        prepared = driver.compile(model, [device if where == "compiled" else "cpu"])
        buffer = prepared.allocate(BufferDesc(), [BufferRole(0, 0)], [])
    with prepared, buffer:
        buffer.copy_from(X)
        for call in (buffer.copy_to, buffer.copy_from):
            with pytest.raises(GeneralFailure, match=r"'com\.example\.heap': this device knows ashmem"):
                call(vendor())
        buffer.copy_from(X)
        found = Memory.create(X.nbytes)
        buffer.copy_to(found)
        assert found.asarray(np.float32).tolist() == X.tolist()
