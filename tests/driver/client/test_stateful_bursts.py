"""Bursts with state=: an output of each run is an input of the next one."""

import asyncio

import numpy as np
import pytest
from kills import kill

import driver
from burst import StatusError
from driver.client.open_input import NOT_GIVEN, open_inputs

FEED = {"output_0": "input_1"}  # the sum of all blocks, beside which the doubled sum is an output


def running_sum(width=4):
    """total = block + total, and total * 2. width 0: open."""
    builder = driver.ModelBuilder()
    block, total = builder.input("float32", (1, width)), builder.input("float32", (1, width))
    new = builder.operation("ADD", block, total, 0)
    builder.output(new)
    builder.output(builder.operation("ADD", new, new, 0))
    return builder.build()


def block(number, width=4):
    return np.full((1, width), number, np.float32)


@pytest.fixture(params=["device", "here"])
def prepared(request, device):
    """The model on a device, and in this process."""
    model = running_sum()
    with device.prepare(model) if request.param == "device" else driver.compile(model, ["cpu"]) as prepared:
        yield prepared


def test_a_run_reads_what_the_last_one_has_left(prepared):
    """Blocks come by name, by position, or in place; the state begins with zeros."""
    with prepared.burst(state=FEED) as burst:
        assert burst.run(input_0=block(1)).outputs[0][0, 0] == 1
        assert burst.run(block(2), None).outputs[0][0, 0] == 3
        burst.inputs[0][...] = 3
        result = burst.run()
        assert (result.outputs[0][0, 0], result.outputs[1][0, 0]) == (6, 12)
        assert burst.inputs[1][0, 0] == 6
        assert "StatefulBurst" in repr(burst)


def test_the_caller_may_give_a_state(prepared):
    """A state that is given, or written in place, is where the next runs begin."""
    with prepared.burst(state=FEED) as burst:
        burst.run(input_0=block(1))
        assert burst.run(block(1), block(10)).outputs[0][0, 0] == 11
        burst.inputs[1][...] = 0
        assert asyncio.run(burst.run_async(input_0=block(1))).outputs[0][0, 0] == 1
        assert burst.run(input_0=block(1)).outputs[0][0, 0] == 2


def test_a_run_that_fails_leaves_the_state(prepared):
    """The same block can be tried again."""
    with prepared.burst(state=FEED) as burst:
        burst.run(input_0=block(1))
        with pytest.raises(StatusError):
            burst.run(input_0=block(2), deadline=0)
        with pytest.raises(ValueError, match="shape"):
            burst.run(input_0=block(2, 5))
        assert burst.run(input_0=block(2)).outputs[0][0, 0] == 3


def test_a_state_outlives_its_device(home, kit):
    """recover=True goes on with it when the device dies."""
    with (
        kit.living("reference") as device,
        device.prepare(running_sum()) as prepared,
        prepared.burst(state=FEED, recover=True) as burst,
    ):
        burst.run(input_0=block(1))
        kill(device)
        assert burst.run(input_0=block(2)).outputs[0][0, 0] == 3
        assert burst.stats()["recoveries"] == 1


def test_blocks_of_another_width(device):
    """Where sizes are open, a state is given once more with blocks of another width; one that grows is refused."""
    with device.prepare(running_sum(0)) as prepared, prepared.burst(state=FEED) as burst:
        with pytest.raises(ValueError, match="input_shapes"):
            burst.run(input_0=block(1))
        burst.run(block(1), block(0))
        burst.run(block(1, 6), block(5, 6))
        assert burst.run(input_0=block(1, 6)).outputs[0].tolist() == [[7] * 6]
        with pytest.raises(ValueError, match="keeps its shape"):
            burst.run(block(1, 6), block(1, 1))


def test_requests_in_flight_are_refused(prepared):
    """They would all read the same state. So are names that are wrong."""
    with prepared.burst(state=FEED) as burst:
        for ask in (lambda: burst.submit(block(1), None), lambda: burst.stream([block(1)])):
            with pytest.raises(ValueError, match="one request after another"):
                ask()
    with pytest.raises(ValueError, match=r"state\['output_7'\]='input_1': there is no output 'output_7'"):
        prepared.burst(state={"output_7": "input_1"})


def test_the_example_for_open_sizes_has_the_known_ones():
    """What stands for an open input proposes shapes that can be copied: () for a scalar."""
    builder = driver.ModelBuilder()
    x, y = builder.input("float32", (0, 4)), builder.input("float32", ())
    builder.output(builder.operation("ADD", x, x, 0))
    del y
    open_one, scalar = open_inputs(builder.build(), [NOT_GIVEN, ()])
    assert scalar is None
    assert "burst(input_shapes=[(1, 4), ()])" in repr(open_one)
