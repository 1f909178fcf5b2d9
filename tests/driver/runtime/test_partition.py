"""A model is cut into steps without anything lost, out of order, or in more pieces than needed."""

import itertools

import numpy as np
import pytest

import driver
from driver.nn import Interpreter, validate
from driver.runtime.partition import choose, is_open, partition

DEVICES = 3


def random_model(random, length, inputs=2):
    """Elementwise operations on whatever came before; some results are outputs, some are read by nobody."""
    builder = driver.ModelBuilder()
    values = [builder.input("float32", (3,)) for _ in range(inputs)]
    for _ in range(length):
        kind = random.choice(["ADD", "MUL", "SUB", "NEG", "ABS"])
        a, b = (values[random.integers(len(values))] for _ in range(2))
        values.append(builder.operation(kind, a, b, 0) if kind in ("ADD", "MUL", "SUB") else builder.operation(kind, a))
    made = values[inputs:]
    for n in {int(random.integers(len(made))), len(made) - 1}:
        builder.output(made[n])
    return builder.build()


def execute(model, arrays):
    bound = Interpreter(model).bind(arrays)
    with np.errstate(all="ignore"):
        bound.run()
    return [tensor.data.copy() for tensor in bound.results]


def composed(model, steps, arrays):
    """The outputs of the model by its steps alone."""
    values = dict(zip(model.main.inputs, arrays, strict=True))
    for step in steps:
        values |= zip(step.outputs, execute(step.model, [values[i] for i in step.inputs]), strict=True)
    return [values[i] for i in model.main.outputs]


@pytest.mark.parametrize("seed", range(40))
def test_steps_are_the_model(seed):
    """Every operation is in exactly one step, on its device; every step is valid; together they compute the model."""
    random = np.random.default_rng(seed)
    model = random_model(random, int(random.integers(1, 25)))
    chosen = [int(d) for d in random.integers(DEVICES, size=len(model.main.operations))]
    steps = partition(model, chosen)
    assert sorted(itertools.chain.from_iterable(step.operations for step in steps)) == list(range(len(chosen)))
    for step in steps:
        validate(step.model)
        assert {chosen[n] for n in step.operations} == {step.device}
        assert [o.type for o in step.model.main.operations] == [model.main.operations[n].type for n in step.operations]
    arrays = [random.standard_normal(3, np.float32) for _ in model.main.inputs]
    for ours, theirs in zip(composed(model, steps, arrays), execute(model, arrays), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def fewest(model, chosen):
    """The smallest number of steps, by trying every executable order."""
    writer = {i: n for n, o in enumerate(model.main.operations) for i in o.outputs}
    needs = [{writer[i] for i in o.inputs if i in writer} for o in model.main.operations]
    best = {(frozenset(), -1): 0}
    for _ in chosen:
        following = {}
        for (done, last), count in best.items():
            for n, device in enumerate(chosen):
                if n not in done and needs[n] <= done:
                    key = done | {n}, device
                    following[key] = min(following.get(key, 99), count + (device != last))
        best = following
    return min(best.values())


@pytest.mark.parametrize("seed", range(30))
def test_there_are_as_few_steps_as_can_be(seed):
    """No executable order of the operations changes devices less often."""
    random = np.random.default_rng(100 + seed)
    model = random_model(random, 9, inputs=3)
    chosen = [int(d) for d in random.integers(DEVICES, size=9)]
    assert len(partition(model, chosen)) == fewest(model, chosen)


def test_one_device_gets_the_model_itself():
    """Nothing is copied or renumbered where nothing is cut."""
    model = random_model(np.random.default_rng(0), 5)
    (step,) = partition(model, [2] * 5)
    assert step.model is model
    assert (step.device, step.operations) == (2, (0, 1, 2, 3, 4))


def test_control_flow_stays_whole(runtime_kit):
    """IF goes to one device with both of its subgraphs; steps without control flow carry none."""
    model = runtime_kit.if_model()
    steps = partition(model, [0, 1, 0])
    assert [step.operations for step in steps] == [(0,), (1,), (2,)]
    assert [len(step.model.referenced) for step in steps] == [0, 2, 0]
    arrays = [np.ones(1, np.uint8), np.arange(4, dtype=np.float32)]
    np.testing.assert_array_equal(composed(model, steps, arrays)[0], (arrays[1] ** 2 + 1) * 2)


def test_operands_keep_their_order(runtime_kit):
    """A step takes the model's inputs, temporaries of other steps, then outputs of other steps; gives outputs first."""
    first, middle, last = partition(runtime_kit.mixed_model(), [0, 1, 0])
    (a,), (b, c) = first.outputs, runtime_kit.mixed_model().main.outputs
    assert (first.inputs, middle.inputs, last.inputs) == (runtime_kit.mixed_model().main.inputs, (a,), (a, b))
    assert (middle.outputs, last.outputs) == ((b,), (c,))


def test_what_is_open_may_go_between_steps(runtime_kit):
    """Steps that give something of unknown size are known as such."""
    for size in (4, 0):
        steps = partition(runtime_kit.if_model(size), [0, 1, 0])
        assert [step.operations for step in steps] == [(0,), (1,), (2,)]
        assert is_open(steps) == (size == 0)


def test_control_flow_that_is_interpreted_is_a_step_of_its_own():
    """Two loops that could run one after the other on a device are two steps where their graphs run apart."""
    builder = driver.ModelBuilder()
    condition, x = builder.input("bool8", (1,)), builder.input("float32", (4,))
    branch = driver.ModelBuilder()
    branch.output(branch.operation("ABS", branch.input("float32", (4,))))
    inner = branch.build()
    for _ in range(2):
        x = builder.operation("IF", condition, inner, inner, x)
    builder.output(x)
    model = builder.build()
    assert [step.operations for step in partition(model, [0, 0])] == [(0, 1)]
    assert [step.operations for step in partition(model, [0, 0], interpreter=0)] == [(0,), (1,)]


def test_operations_go_where_they_cost_least(runtime_kit):
    """At the same cost to the earliest device, but to the CPU before all; never where they are not supported."""
    model = runtime_kit.mixed_model()
    everything: list[str | None] = [None] * 3
    both, one = {"a": everything, "b": everything}, {"a": [None, "too hot", None], "b": everything}
    assert choose(model, both, [[1.0, 2.0, 1.0], [2.0, 1.0, 1.0]], None) == [0, 1, 0]
    assert choose(model, both, [[1.0, 0.5, 1.0], [1.0, 1.0, 1.0]], 1) == [1, 0, 1]
    assert choose(model, one, [[0.1] * 3, [1.0] * 3], 1) == [0, 1, 0]


def test_an_operation_that_nobody_supports_is_named(runtime_kit):
    """NotPlaced says which one, and what each device has against it."""
    with pytest.raises(driver.NotPlaced, match=r"operation 1 \(MUL\): warm: too hot; add 'cpu'"):
        choose(runtime_kit.mixed_model(), {"warm": [None, "too hot", None]}, [[1.0] * 3], None)


def test_control_flow_of_unknown_size_goes_to_the_cpu(runtime_kit):
    """However cheap it is elsewhere."""
    for size, device in ((4, 0), (0, 1)):
        model = runtime_kit.if_model(size)
        assert choose(model, {"a": [None] * 3, "b": [None] * 3}, [[0.1] * 3, [1.0] * 3], 1)[1] == device


def test_many_operations_are_cut_at_once():
    """A thousand operations in two hundred steps are a matter of a moment, not of all orders."""
    model = random_model(np.random.default_rng(3), 1000)
    steps = partition(model, [n // 5 % 2 for n in range(1000)])
    assert sum(len(step.operations) for step in steps) == 1000
