"""Random graphs: valid ones, comparisons of devices on them, and the smallest difference that a wrong device shows."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import stress
from hypothesis import HealthCheck, given, seed, settings

from driver.nn import OPERATIONS, OperandLifeTime, OperandType, validate
from driver.nn.ops import window
from driver.vts.graphs import (
    compare,
    disagreement,
    graphs,
    reference,
    smallest_difference,
    without,
)
from driver.vts.makers import IMAGE_MAKERS, MAKERS

F, H, Q, I, B = (OperandType[f"TENSOR_{n}"] for n in ("FLOAT32", "FLOAT16", "QUANT8_ASYMM", "INT32", "BOOL8"))


def examples(count):
    """`count` graphs, the same in every run."""

    def decorate(test):
        quiet = settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        return quiet(seed(count)(given(graphs())(test)))

    return decorate


def with_inputs_only(graph):
    """The same graph with every constant fed as an input, so that nothing can be prepared ahead."""
    main = graph.model.main
    constants = [i for i, operand in enumerate(main.operands) if operand.lifetime.is_constant]
    operands = [
        replace(o, lifetime=OperandLifeTime.SUBGRAPH_INPUT, value=None) if o.lifetime.is_constant else o
        for o in main.operands
    ]
    values = [np.asarray(main.operands[i].value) for i in constants]
    fed = replace(main, operands=tuple(operands), inputs=(*main.inputs, *constants))
    return graph._replace(model=replace(graph.model, main=fed), feeds=(*graph.feeds, *values))


def check_graph(graph):
    """It is valid, and runs; and it gives the same when all that was prepared beforehand is done at run time."""
    validate(graph.model)
    fed = with_inputs_only(graph)
    validate(fed.model)
    assert all(o.value is None for o in fed.model.main.operands)
    assert disagreement(lambda _: reference(fed), graph) is None, graph


@examples(50)
def test_every_graph_is_valid_and_runs(graph):
    """Constants as constants and constants as inputs are two ways to compute a graph, and they agree."""
    check_graph(graph)


@pytest.mark.stress
@examples(stress.times(5000))
def test_a_great_many_graphs(graph):
    """The same, for long."""
    check_graph(graph)


@pytest.mark.integration
def test_graphs_are_mixed():
    """Types, lengths, constants, inputs and unknown dimensions all vary."""
    types, lengths, unknown, kinds = Counter(), Counter(), Counter(), Counter()

    @examples(200)
    def look(graph):
        operands = graph.model.main.operands
        types.update({o.type for o in operands})
        lengths[len(graph.model.main.operations)] += 1
        kinds.update(o.type for o in graph.model.main.operations)
        unknown["dimension"] += any(0 in o.dimensions for o in operands)
        unknown["rank"] += any(not o.dimensions and not o.type.is_scalar for o in operands)

    look()
    assert {F, H, Q, OperandType.TENSOR_QUANT8_ASYMM_SIGNED, I} <= types.keys()
    assert len(lengths) >= 6
    assert max(lengths) == 8
    assert min(unknown["dimension"], unknown["rank"]) > 10
    assert len(kinds) > 2 * len((MAKERS | IMAGE_MAKERS).keys() & OPERATIONS.keys()) // 3


@pytest.mark.integration
@pytest.mark.parametrize("name", sorted((MAKERS | IMAGE_MAKERS).keys() & OPERATIONS.keys()))
def test_every_maker_makes_its_operation(name):
    """Graphs of one operation alone are valid and run, and they are of that operation."""

    @settings(max_examples=3, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(graphs([name], largest=2))
    def run(graph):
        check_graph(graph)
        assert {o.type for o in graph.model.main.operations} == {name}

    run()


def test_unknown_operations_are_refused():
    """Asking for operations that nobody draws is an error that names them."""
    with pytest.raises(ValueError, match=r"operations=.'NOTHING'.*none of them"):
        graphs(["NOTHING"])


def operations_of(graph):
    return [o.type for o in graph.model.main.operations]


def rewriting(rewrite):
    """A device that runs another model than it was given."""

    def run(graph):
        main = graph.model.main
        return reference(graph._replace(model=replace(graph.model, main=rewrite(main))))

    return run


def test_two_devices_that_agree():
    """The reference does not differ from itself."""
    assert smallest_difference(reference, examples=20) is None


@pytest.mark.integration
def test_a_wrong_padding_is_found_and_shrunk(monkeypatch):
    """A device that puts the odd element of SAME padding before the image is found, on one operation."""

    def run(graph):
        with monkeypatch.context() as patch:
            patch.setattr(
                window.Axis, "checked", lambda a: replace(a, head=max(a.head, a.tail), tail=min(a.head, a.tail))
            )
            return reference(graph)

    found, said = smallest_difference(run, operations=[*IMAGE_MAKERS, "ADD", "RESHAPE", "RELU"])
    assert len(operations_of(found)) == 1
    assert operations_of(found)[0] in IMAGE_MAKERS
    assert said.startswith("output 0: ")
    assert max(max(o.dimensions, default=1) for o in found.model.main.operands) <= 4


def with_kernel(monkeypatch, name, build):
    """A device that computes one operation in its own way."""

    def run(graph):
        with monkeypatch.context() as patch:
            patch.setitem(OPERATIONS, name, replace(OPERATIONS[name], build=build))
            return reference(graph)

    return run


@pytest.mark.integration
def test_a_wrong_zero_point_is_found_and_shrunk(monkeypatch):
    """A device that is off by one step when it dequantises is found, on one element of one operation."""
    right = OPERATIONS["DEQUANTIZE"].build

    def off_by_one(call):
        source = call.tensor(0)
        call.inputs = [replace(source, zero_point=source.zero_point + 1)]
        right(call)

    found, said = smallest_difference(with_kernel(monkeypatch, "DEQUANTIZE", off_by_one))
    assert operations_of(found) == ["DEQUANTIZE"]
    assert found.feeds[0].size == 1
    assert "1 of 1 elements are wrong" in said


@pytest.mark.integration
def test_a_wrong_fusion_is_found_and_shrunk():
    """A device that errs only where one operation follows another shows it on just these two."""

    def rewrite(main):
        written = {i for o in main.operations for i in o.outputs}
        wrong = [
            replace(o, type="RELU") if o.type == "RELU1" and o.inputs[0] in written else o for o in main.operations
        ]
        return replace(main, operations=tuple(wrong))

    found, _ = smallest_difference(rewriting(rewrite))
    assert len(operations_of(found)) == 2
    assert operations_of(found)[1] == "RELU1"


@pytest.mark.integration
def test_wrong_rounding_is_found_by_its_bias(monkeypatch):
    """A device that rounds where it should cut off is never off by more than one step, and is found all the same."""

    right = OPERATIONS["CAST"].build

    def rounding(call):
        source, out = call.array(0), call.outputs[0].data
        if source.dtype.kind == "f" and out.dtype == np.uint8:
            call.step(lambda: np.copyto(out, np.clip(np.rint(source), 0, 255), casting="unsafe"))
        else:
            right(call)

    device = with_kernel(monkeypatch, "CAST", rounding)
    found, said = smallest_difference(device, operations=["CAST", "RELU"])
    assert operations_of(found) == ["CAST"]
    assert "bias" in said


@pytest.mark.integration
@examples(25)
def test_a_graph_without_an_operation_computes_the_same(graph):
    """Taking an operation out, and feeding what it gave, changes no result of the others."""
    main = graph.model.main
    for number in range(len(main.operations)):
        smaller = without(graph, number)
        if smaller is None:
            assert len(main.operations) == 1
            continue
        validate(smaller.model)
        assert operations_of(smaller) == [o.type for n, o in enumerate(main.operations) if n != number]
        pairs = zip(main.outputs, reference(graph), strict=True)
        kept = [array for i, array in pairs if i not in main.operations[number].outputs]
        given = reference(smaller)
        found = [any(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for b in given) for a in kept]
        assert all(found)


def test_missing_outputs_are_a_difference():
    """A device that gives too few outputs, or of other dimensions, differs."""
    graph, said = smallest_difference(lambda _graph: [])
    assert said == "0 outputs instead of 1"
    assert "[2, 1] instead of [2]" in compare(np.zeros((2, 1)), np.zeros(2), F, "conv")
    assert str(graph).splitlines()[0].startswith("0: SUBGRAPH_INPUT TENSOR_")


@pytest.mark.parametrize(
    ("kind", "level", "near", "far"),
    [
        (F, "strict", 0.9e-6, 3e-6),
        (F, "medium", 0.9e-5, 3e-5),
        (F, "relaxed", 0.9e-3, 3e-3),
        (F, "conv", 2e-2, 5e-2),
        (H, "strict", 0.9e-3, 3e-3),
        (H, "medium", 0.9e-2, 3e-2),
        (H, "relaxed", 1, 3),
        (I, "strict", 1, 2),
        (I, "conv", 1, 2),
        (Q, "strict", 1, 2),
        (Q, "medium", 2, 3),
        (Q, "relaxed", 10, 11),
        (B, "conv", 0, 1),
    ],
)
def test_tolerances(kind, level, near, far):
    """One element may be off by what the HAL's fuzz tests allow, and by no more."""
    expected = np.zeros(3, kind.dtype)

    def off(by):
        return compare((expected + np.array([0, by, 0])).astype(kind.dtype), expected, kind, level)

    assert off(near) is None
    assert "1 of 3 elements are wrong, such as" in off(far)


def test_bias_counts_from_ten_elements_on():
    """Elements that are each near enough are refused together when they all lean to one side."""
    assert compare(np.full(9, 1, np.uint8), np.zeros(9, np.uint8), Q, "strict") is None
    assert "bias 1" in compare(np.full(10, 1, np.uint8), np.zeros(10, np.uint8), Q, "strict")
    assert compare(np.full(10, 1, np.int32), np.zeros(10, np.int32), I, "strict") is None


def test_what_has_no_tolerance_is_not_compared():
    """Expected values that are infinite, huge or not a number are skipped; a NaN where a number belongs is not."""
    wild = np.array([np.inf, np.nan, 1e9, 1], np.float32)
    assert compare(np.array([0, 0, 0, 1], np.float32), wild, F, "strict") is None
    assert "nan instead of 1" in compare(np.array([0, 0, 0, np.nan], np.float32), wild, F, "conv")
    assert compare(np.array([2], np.uint8), np.array([1], np.uint8), B, "strict") is None
