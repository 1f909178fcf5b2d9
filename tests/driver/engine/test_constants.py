"""Weights are in a device's memory once, however many clients prepare the same model."""

import contextlib
import gc
import re
from pathlib import Path

import numpy as np
import pytest

import driver

MEGABYTES = 40


def large_model(last=1.0):
    """x + c, with a constant of 40 MB, whose last element is `last`."""
    builder = driver.ModelBuilder()
    constant = np.ones(MEGABYTES << 18, np.float32)
    constant[-1] = last
    builder.output(builder.operation("ADD", builder.input("float32", constant.shape), constant, 0))
    return builder.build()


def shared_megabytes(pid):
    """Of the shared memory that the process has mapped, all that is resident."""
    return int(re.search(r"RssShmem:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


@contextlib.contextmanager
def prepared_by(clients, model):
    """The model on a device of its own, by so many clients; the device, and what they have."""
    with contextlib.ExitStack() as stack:
        devices = [stack.enter_context(driver.connect()) for _ in range(clients)]
        yield devices[0], [stack.enter_context(device.prepare(model)) for device in devices]


@pytest.mark.integration
def test_one_copy_for_all_clients(place, kit):
    """With 8 clients a device has no more than 1.05 times the memory of one, and each gets its results."""
    model, x = large_model(), np.arange(MEGABYTES << 18, dtype=np.float32)
    with prepared_by(8, model) as (device, prepared):
        for one in prepared:
            assert np.array_equal(one.run(x)[0][:5], x[:5] + 1)
            one._workspaces.clear()  # inputs and outputs, not weights
        mapped = Path(f"/proc/{device.engine_pid}/maps").read_text()
        assert mapped.count("memfd:burst-model") == 1
        kit.until(lambda: shared_megabytes(device.engine_pid) < 1.05 * MEGABYTES)
        assert shared_megabytes(device.engine_pid) >= MEGABYTES


def test_another_model_is_another(place):
    """A model that differs in its last byte has weights of its own."""
    x = np.zeros(MEGABYTES << 18, np.float32)
    with (
        driver.connect() as one,
        driver.connect() as other,
        one.prepare(large_model()) as ones,
        other.prepare(large_model(2.0)) as twos,
    ):
        assert [p.run(x)[0][-1] for p in (ones, twos)] == [1.0, 2.0]


def test_freed_with_the_last_client(place, kit):
    """While one of two clients has the model it stays usable; when none has, its memory is free."""
    model, x = large_model(), np.zeros(MEGABYTES << 18, np.float32)
    with driver.connect() as one:
        with driver.connect() as other:
            ones, twos = one.prepare(model), other.prepare(model)
            del twos
        gc.collect()
        assert ones.run(x)[0][0] == 1.0
        ones.close()
        kit.until(lambda: "memfd:burst-model" not in Path(f"/proc/{one.engine_pid}/maps").read_text())
