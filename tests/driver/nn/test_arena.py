"""Where temporaries and scratch lie."""

import itertools
import random

import numpy as np
import pytest

from driver.nn import Interpreter, ModelBuilder
from driver.nn.arena import ALIGN, Layout, Scratch, lay_out, memory


@pytest.mark.parametrize("seed", range(20))
def test_what_is_needed_at_the_same_time_lies_apart(seed):
    """From its writer to its last reader a value shares no byte with another, and all lie in the block."""
    rng = random.Random(seed)
    sizes = {value: rng.choice([0, 1, 63, 64, 65, 1000, 4096]) for value in range(40)}
    operations = [([rng.randrange(value) for _ in range(3) if value], [value]) for value in range(40)]
    places, nbytes = lay_out(operations, sizes)
    last = {value: n for n, (reads, writes) in enumerate(operations) for value in (*writes, *reads)}
    for n in range(40):
        alive = sorted((places[v], places[v] + sizes[v]) for v in range(n + 1) if last[v] >= n)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(alive))
        assert alive[-1][1] <= nbytes
    assert all(place % ALIGN == 0 for place in places.values())


def test_a_chain_needs_two_places():
    """However long a chain of operations is, its temporaries take turns in two places."""
    sizes = dict.fromkeys(range(100), 1024)
    operations = [([value - 1] if value else [], [value]) for value in range(100)]
    assert lay_out(operations, sizes)[1] == 2048


def test_gaps_are_joined():
    """Neighbours that are free make room for one that is as large as both."""
    layout = Layout()
    one, two, three = (layout.take(64) for _ in range(3))
    layout.give_back(one, 64)
    layout.give_back(two, 64)
    assert layout.take(128) == one
    layout.give_back(three, 64)
    assert layout.take(200) == three
    assert layout.nbytes == three + 256


def test_scratch_is_used_in_turn():
    """Arrays of one operation lie apart, those of the next one lie there again, on cache lines."""
    scratch = Scratch()
    first = [scratch.array((n,), np.float32) for n in (3, 100_000, 5)]
    assert not any(np.shares_memory(a, b) for a in first for b in first if a is not b)
    scratch.begin()
    again = scratch.array((3,), np.float64)
    assert np.shares_memory(again, first[0])
    assert all(array.ctypes.data % ALIGN == 0 for array in (*first, again, memory(10)))
    with pytest.raises(ValueError, match="too large"):
        scratch.array((1 << 40,), np.float64)


def test_a_plan_is_made_before_the_first_run():
    """Shapes and places are known once a fully specified model is prepared; binding only allocates."""
    m = ModelBuilder()
    x = m.input("float32", (4, 4))
    for _ in range(5):
        x = m.operation("ADD", x, np.ones((4, 4), np.float32), 0)
    m.output(x)
    interpreter = Interpreter(m.build())
    (plan,) = interpreter._plans.values()
    assert plan.nbytes == 128
    interpreter.bind([np.zeros((4, 4), np.float32)], [np.zeros(64, np.uint8)])
    assert list(interpreter._plans.values()) == [plan]
