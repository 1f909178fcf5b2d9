"""Models that were valid until something wrote into them: refused, failed or computed, and nothing else."""

import random
import re
import resource
from collections import Counter
from contextlib import contextmanager
from contextvars import Context
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import stress
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from driver.nn import (
    OPERATIONS,
    ExecutionFailed,
    Interpreter,
    InvalidModel,
    ModelBuilder,
    OperandLifeTime,
    OperandType,
    Operation,
    required_version,
    validate,
)
from driver.nn.types import byte_size
from driver.vts.graphs import graphs
from driver.vts.sketch import data

NUMBERS = (-(2**31), -7, -1, 0, 1, 2, 3, 5, 9, 100)
REALS = (-100.0, -1.0, 0.0, 0.5, 3.0, float("nan"), float("inf"), -float("inf"))
SIZES = (-1, 0, 1, 2, 3, 5, 2**31, 2**32 - 1, 2**40)
SCALES = (float("nan"), float("inf"), -1.0, 0.0, 1e-45, 1e-30, 0.5, 3e38, 1e39)
VALUES = (None, 0, -1, 7, "7", b"7", [1], np.zeros(3), np.zeros(2, np.uint8), np.zeros((), np.int32), np.array([None]))
QUANTS = (None, ((1.0,), 0), ((), 0), ((float("nan"), 1.0), 1), ((0.5,) * 3, -1), ((0.5, 0.25), 3))


def edited_dimensions(rng, operand):
    dimensions = list(operand.dimensions)
    match rng.randrange(4):
        case 0 if dimensions:
            dimensions[rng.randrange(len(dimensions))] = rng.choice(SIZES)
        case 1:
            dimensions.insert(rng.randint(0, len(dimensions)), rng.choice(SIZES))
        case 2 if dimensions:
            del dimensions[rng.randrange(len(dimensions))]
        case _:
            dimensions = [1] * rng.choice((0, 1, 4, 5, 33))
    return dimensions


def edited_contents(rng, operand):
    """A constant with one element, or one more dimension, changed."""
    if not isinstance(operand.value, np.ndarray) or not operand.value.size or operand.value.dtype.kind not in "fiu":
        return operand
    value = operand.value.copy()
    if value.dtype.kind == "f":
        number = rng.choice(REALS)
    else:
        info = np.iinfo(value.dtype)
        number = min(max(rng.choice(NUMBERS), info.min), info.max)
    value.reshape(-1)[rng.randrange(value.size)] = number
    if value.ndim and rng.random() < 0.2:
        value = np.resize(value, [*value.shape[:-1], value.shape[-1] + 1])
        return replace(operand, value=value, dimensions=value.shape)
    return replace(operand, value=value)


CHOICES = {
    "type": list(OperandType),
    "scale": SCALES,
    "zero_point": (*NUMBERS, 127, 255, 2**40),
    "lifetime": list(OperandLifeTime),
    "value": VALUES,
    "channel_quant": QUANTS,
    "number_of_consumers": (None, -1, 0, 1, 2),
}


def edited_operand(rng, operand):
    name = rng.choice([*CHOICES, "dimensions", "contents", "contents", "contents"])
    if name == "contents":
        return edited_contents(rng, operand)
    if name == "dimensions":
        return replace(operand, dimensions=edited_dimensions(rng, operand))
    return replace(operand, **{name: rng.choice(CHOICES[name])})


def edited_indices(rng, indices, count):
    indices = list(indices)
    match rng.randrange(3):
        case 0 if indices:
            indices[rng.randrange(len(indices))] = rng.randint(-1, count)
        case 1 if indices:
            del indices[rng.randrange(len(indices))]
        case _:
            indices.insert(rng.randint(0, len(indices)), rng.randint(-1, count))
    return tuple(indices)


def edited_operation(rng, operation, count):
    match rng.randrange(3):
        case 0:
            return replace(operation, type=rng.choice((*OPERATIONS, "OEM_OPERATION", "65536", "", "RELU\0")))
        case 1:
            return replace(operation, inputs=edited_indices(rng, operation.inputs, count))
        case _:
            return replace(operation, outputs=edited_indices(rng, operation.outputs, count))


def changed(rng, items, edit):
    """`items` with one of them edited."""
    items, n = list(items), rng.randrange(len(items))
    items[n] = edit(items[n])
    return tuple(items)


def edited(rng, main):
    """`main` with something wrong somewhere, or merely different."""
    count = len(main.operands)
    match rng.randrange(10):
        case 0 if main.operations:
            return replace(main, operations=changed(rng, main.operations, lambda o: edited_operation(rng, o, count)))
        case 1:
            return replace(main, operations=tuple(rng.sample(main.operations, rng.randint(0, len(main.operations)))))
        case 2:
            return replace(main, inputs=edited_indices(rng, main.inputs, count))
        case 3:
            return replace(main, outputs=edited_indices(rng, main.outputs, count))
        case 4:
            extra = Operation(rng.choice([*OPERATIONS]), *(edited_indices(rng, (), count) for _ in range(2)))
            return replace(main, operations=(*main.operations, extra))
        case _:
            return replace(main, operands=changed(rng, main.operands, lambda o: edited_operand(rng, o)))


def feed(operand):
    """Some data for an input, of dimensions that fit where they are unknown."""
    shape = operand.dimensions or (() if operand.type.is_scalar else (2,))
    return data(operand.type, tuple(d or 1 for d in shape), 0)


SAID = {"refused": r"operand|operation", "failed": r"^operation \d+ \(\w+\): .", "computed": r"^$", "untried": r"^$"}
LARGEST_INPUT = 1 << 20
"""Bytes of an input that are fed."""


def outcome(model):
    """What becomes of a model (refused, failed, computed, too large to try) and what was said; all else is raised."""
    try:
        validate(model)
    except InvalidModel as error:
        return "refused", str(error)
    assert 0 <= required_version(model) <= 3
    main = model.main
    if any(byte_size(main.operands[i].type, main.operands[i].dimensions) > LARGEST_INPUT for i in main.inputs):
        return "untried", ""
    try:
        feeds = [feed(main.operands[i]) for i in main.inputs]
    except MemoryError:
        return "untried", ""
    try:
        bound = Interpreter(model).bind(feeds)
        bound.run()
    except ExecutionFailed as error:
        return "failed", str(error)
    for index, tensor in zip(main.outputs, bound.results, strict=True):
        assert tensor.data.dtype == main.operands[index].type.stored_dtype
    return "computed", ""


def fuzz(count):
    outcomes = Counter()

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @seed(count)
    @given(graphs(largest=4), st.integers(0, 2**32), st.integers(1, 3))
    def corrupt(graph, number, edits):
        rng, main = random.Random(number), graph.model.main
        for _ in range(edits):
            main = edited(rng, main)
        what, said = outcome(replace(graph.model, main=main))
        outcomes[what] += 1
        assert re.search(SAID[what], said)

    with at_most(4 * 2**30):
        corrupt()
    return outcomes


@contextmanager
def at_most(nbytes):
    """Of memory: operands of up to 4 GiB each are valid, and several of them are not to be had."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    present = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (present + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_memory_that_is_not_to_be_had():
    """A model whose temporaries do not fit fails to bind, and says how much it wanted."""
    m = ModelBuilder()
    x = m.input("float32", (1,))
    for _ in range(3):
        x = m.operation("TILE", x, [800])
    m.output(m.operation("MEAN", x, [0], 1))
    with at_most(2**30), pytest.raises(ExecutionFailed, match=r"operation 0 \(TILE\): 20505\d+ bytes for temporaries"):
        Context().run(Interpreter(m.build()).bind, [np.ones(1, np.float32)])  # no other test says where memory is from


@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.integration)])
def test_corrupted_models_are_refused_or_run(count):
    """Validation raises InvalidModel and nothing else; what passes is computed, or fails at a named operation."""
    outcomes = fuzz(count)
    assert outcomes["refused"] > count / 2
    assert outcomes["computed"] > 0  # what is drawn depends on which modules are there


@pytest.mark.stress
def test_a_great_many_corrupted_models():
    """The same, for long; every outcome occurs."""
    outcomes = fuzz(stress.times(10_000))
    assert min(outcomes[o] for o in ("refused", "failed", "computed")) > stress.times(100)
