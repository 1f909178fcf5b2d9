"""IF and WHILE on the litert device: beside the reference, and what ends a loop that does not end by itself."""

import ctypes
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, seed, settings
from inside import programs_of
from waiting import PATIENCE, at_least, until

from burst import ErrorStatus, RequestArgument
from driver.errors import ExecutionFailed, LoopTimeout
from driver.nn import Model, ModelBuilder, Operand, Operation, Subgraph, validate
from driver.vts.graphs import RandomGraph, disagreement, graphs

pytest.importorskip("ai_edge_litert", reason="needs the extra 'litert'")

from driver.devices.litert import LiteRtDevice
from driver.devices.litert.lower import control
from driver.devices.litert.weights import aligned
from driver.interface import BindOptions, Preparation

GENERAL_FAILURE, MISSED_DEADLINE_TRANSIENT = 2, 5
TYPES = {
    "float32": {},
    "float16": {},
    "int32": {},
    "quant8_asymm": {"scale": 0.25, "zero_point": 130},
    "quant8_asymm_signed": {"scale": 0.25, "zero_point": 3},
}


@pytest.fixture(scope="module")
def litert():
    return LiteRtDevice(threads=1)


def drawn(kind, shape, number):
    """Random data of a type of TYPES."""
    random = np.random.default_rng(number)
    if kind.startswith("quant8"):
        return random.integers(0, 256, shape, np.uint8).view("i1" if kind.endswith("signed") else "u1")
    return random.integers(-9, 9, shape).astype(kind)


def step(kind, shape, name="ADD"):
    """A model of x op y, in one scale."""
    m, quantisation = ModelBuilder(), TYPES[kind]
    x, y = (m.input(kind, shape, **quantisation) for _ in range(2))
    m.output(m.operation(name, x, y, 0, **quantisation))
    return m.build()


def choice(kind, shape, then, otherwise):
    m = ModelBuilder()
    condition, x, y = m.input("bool8", (1,)), *(m.input(kind, shape, **TYPES[kind]) for _ in range(2))
    m.output(m.operation("IF", condition, then, otherwise, x, y))
    return m.build()


def state(m, kind, shape):
    """How often, and two tensors."""
    return m.input("int32", (1,)), *(m.input(kind, shape, **TYPES[kind]) for _ in range(2))


def below(limit, kind, shape):
    m = ModelBuilder()
    i, *_ = state(m, kind, shape)
    m.output(m.operation("LESS", i, np.array([limit], np.int32)))
    return m.build()


def counting(limit, kind="float32", shape=(2, 3), by=1, inner=None):
    """WHILE i < limit: i += by, x = inner(x, y), which is x + y; outputs i and x. y stays as it is."""
    m = ModelBuilder()
    i, x, y = state(m, kind, shape)
    i = m.operation("ADD", i, np.array([by], np.int32), 0)
    if inner is None:
        m.output(i, m.operation("ADD", x, y, 0, **TYPES[kind]))
    else:
        m.output(i, inner(m, x, y))
    body = m.build()
    m = ModelBuilder()
    m.output(*m.operation("WHILE", below(limit, kind, shape), body, *state(m, kind, shape)))
    return m.build()


def bind(litert, model, feeds, loop_timeout=2.0):
    """A binding, and its outputs."""
    prepared = litert.prepare(model, Preparation())
    operands = [model.main.operands[i] for i in model.main.outputs]
    outputs = [aligned(int(np.prod(o.dimensions)) * o.type.element_size) for o in operands]
    bound = prepared.bind(feeds, outputs, BindOptions(loop_timeout))
    return bound, [raw.view(o.type.dtype).reshape(o.dimensions) for raw, o in zip(outputs, operands, strict=True)]


def check(litert, model, *feeds):
    """It is supported, and twice in a row gives what the reference gives."""
    assert all(litert.supported_operations(model))
    bound, outputs = bind(litert, model, feeds)
    for _ in range(2):
        for output in outputs:
            output.view(np.uint8)[...] = 7
        bound.run()
        assert disagreement(lambda _: outputs, RandomGraph(model, feeds, "medium")) is None


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("condition", [0, 1, 7, 255])
def test_branches(litert, kind, condition):
    """Any byte but 0 is true, for branches of every type."""
    model = choice(kind, (2, 3), step(kind, (2, 3)), step(kind, (2, 3), "SUB"))
    check(litert, model, np.array([condition], np.uint8), drawn(kind, (2, 3), 1), drawn(kind, (2, 3), 2))


def test_a_condition_that_is_computed(litert):
    """The result of a comparison needs no conversion, before the branch, and after it as its result."""
    m = ModelBuilder()
    x, y = m.input("float32", (2, 3)), m.input("float32", (1,))
    branch = ModelBuilder()
    a, b = branch.input("float32", (2, 3)), branch.input("float32", (1,))
    branch.output(branch.operation("GREATER", a, b))
    found = m.operation("IF", m.operation("LESS", y, np.zeros(1, np.float32)), *[branch.build()] * 2, x, y)
    m.output(m.operation("LOGICAL_NOT", found))
    for sign in (-1, 1):
        check(litert, m.build(), drawn("float32", (2, 3), 1), np.array([sign], np.float32))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("limit", [0, 1, 5])
def test_loops(litert, kind, limit):
    """No iteration gives the initial values; others see what the one before gave, and an input stays what it was."""
    feeds = np.zeros(1, np.int32), drawn(kind, (2, 3), 1), drawn(kind, (2, 3), 2)
    check(litert, counting(limit, kind), *feeds)


def test_bytes_that_go_round(litert):
    """Booleans keep their bytes round a loop, and steer it from there."""
    m = ModelBuilder()
    flags, more = m.input("bool8", (1,)), m.input("bool8", (2,))
    m.output(m.operation("LOGICAL_NOT", flags), m.operation("LOGICAL_NOT", more))
    body = m.build()
    m = ModelBuilder()
    flags, more = m.input("bool8", (1,)), m.input("bool8", (2,))
    m.output(m.operation("LOGICAL_AND", flags, flags))
    condition = m.build()
    m = ModelBuilder()
    m.output(*m.operation("WHILE", condition, body, m.input("bool8", (1,)), m.input("bool8", (2,))))
    for flag in (0, 1, 9):
        check(litert, m.build(), np.array([flag], np.uint8), np.array([0, 200], np.uint8))


def test_nested(litert):
    """Branches in branches, branches in loops, loops in branches and loops in loops."""
    kind, shape = "float32", (2, 3)
    plain = [step(kind, shape, name) for name in ("ADD", "SUB", "MUL")]

    def branch_in_branch(m, x, y):
        condition = m.operation(
            "LESS",
            m.operation("REDUCE_SUM", x, np.array([0, 1], np.int32), False),
            np.zeros(1, np.float32),
        )
        return m.operation("IF", condition, plain[0], plain[2], x, y)

    def loop(m, x, y):
        return m.operation("WHILE", below(3, kind, shape), counting_body(), np.zeros(1, np.int32), x, y)[1]

    def counting_body():
        m = ModelBuilder()
        i, x, y = state(m, kind, shape)
        m.output(m.operation("ADD", i, np.array([1], np.int32), 0), branch_in_branch(m, x, y))
        return m.build()

    feeds = [drawn(kind, shape, number) / 8 for number in (1, 2)]
    for inner in (branch_in_branch, loop):
        check(litert, counting(3, kind, shape, inner=inner), np.zeros(1, np.int32), *feeds)
        m = ModelBuilder()
        x, y = m.input(kind, shape), m.input(kind, shape)
        m.output(inner(m, x, y))
        for condition in (0, 1):
            model = choice(kind, shape, m.build(), plain[1])
            check(litert, model, np.array([condition], np.uint8), *feeds)


def around(graph):
    """A model that runs that graph in a branch, and in a loop as often as its last input says; and its inputs."""
    main, m = graph.model.main, ModelBuilder()
    operands = [main.operands[i] for i in main.inputs]
    results = [main.operands[i] for i in main.outputs]

    def inputs(m, operands):
        return [m.input(o.type, o.dimensions, **quantisation(o)) for o in operands]

    condition, body = ModelBuilder(), ModelBuilder()
    i, n, *_ = condition.input("int32", (1,)), condition.input("int32", (1,)), *inputs(condition, results + operands)
    condition.output(condition.operation("LESS", i, n))
    i, n, *carried = body.input("int32", (1,)), body.input("int32", (1,)), *inputs(body, results + operands)
    always = body.operation("EQUAL", i, i)
    found = body.operation("IF", always, graph.model, graph.model, *carried[len(results) :])
    found = found if isinstance(found, tuple) else (found,)
    one = np.ones(1, np.int32)
    body.output(body.operation("ADD", i, one, 0), body.operation("MUL", n, one, 0), *found)
    given = [m.input("int32", (1,)), m.input("int32", (1,)), *inputs(m, results + operands)]
    m.output(*m.operation("WHILE", condition.build(), body.build(), *given))
    return m.build()


def quantisation(operand):
    return {"scale": operand.scale, "zero_point": operand.zero_point} if operand.type.is_quantised else {}


def is_closed(graph):
    """All shapes are known, and no input has a scale for each channel."""
    main = graph.model.main
    is_known = all(o.type.is_scalar or (o.dimensions and 0 not in o.dimensions) for o in main.operands)
    return is_known and not any(main.operands[i].channel_quant for i in main.inputs)


@pytest.mark.integration
@settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@seed(6)
@given(graphs(largest=4))
def test_random_subgraphs(graph):
    """A random graph gives in a branch in a loop what the reference gives, if it is supported there."""
    assume(is_closed(graph))
    model = around(graph)
    validate(model)
    litert = LiteRtDevice(threads=1)
    assume(all(litert.supported_operations(model)))
    operands = [model.main.operands[i] for i in model.main.inputs]
    starts = [np.zeros(o.dimensions, o.type.dtype) for o in operands[2 : 2 + len(graph.model.main.outputs)]]
    feeds = [np.zeros(1, np.int32), np.full(1, 2, np.int32), *starts, *graph.feeds]
    bound, outputs = bind(litert, model, feeds)
    bound.run()
    assert disagreement(lambda _: outputs, graph._replace(model=model, feeds=tuple(feeds))) is None, graph


def growing():
    m = ModelBuilder()
    i, x = m.input("int32", (1,)), m.input("float32", (0,))
    m.output(m.operation("LESS", i, np.array([4], np.int32)))
    condition = m.build()
    m = ModelBuilder()
    i, x = m.input("int32", (1,)), m.input("float32", (0,))
    m.output(m.operation("ADD", i, np.array([1], np.int32), 0), m.operation("CONCATENATION", x, x, 0))
    body = m.build()
    m = ModelBuilder()
    m.output(*m.operation("WHILE", condition, body, m.input("int32", (1,)), m.input("float32", (2,))))
    return m.build()


def unsupported_inside():
    """TFLite's ELU knows no factor but 1."""
    return counting(3, inner=lambda m, x, y: m.operation("ELU", m.operation("ADD", x, y, 0), 0.5))


def constants_alone():
    m = ModelBuilder()
    ones = np.ones((2, 3), np.float32)
    given = np.zeros(1, np.int32), ones, ones
    body = ModelBuilder()
    i, x, y = state(body, "float32", (2, 3))
    body.output(body.operation("ADD", i, np.array([1], np.int32), 0), body.operation("ADD", x, y, 0))
    m.output(*m.operation("WHILE", below(3, "float32", (2, 3)), body.build(), *given))
    m.input("float32", (1,))
    return m.build()


def deep(levels):
    """IF x < y, in IF x < y, …; each refers to the next one twice."""
    names = "SUBGRAPH_INPUT", "SUBGRAPH_INPUT", "SUBGRAPH_OUTPUT"
    x, y, z = (Operand("TENSOR_FLOAT32", (1,), lifetime=name) for name in names)
    condition, none = Operand("TENSOR_BOOL8", (1,)), Operand("INT32", lifetime="CONSTANT_COPY", value=np.int32(0))
    add = Subgraph([x, y, z, none], [Operation("ADD", (0, 1, 3), (2,))], (0, 1), (2,))
    choices = []
    for level in range(levels):
        inner = Operand("SUBGRAPH", lifetime="SUBGRAPH", value=level)
        operations = [Operation("LESS", (0, 1), (3,)), Operation("IF", (3, 4, 4, 0, 1), (2,))]
        choices.append(Subgraph([x, y, z, condition, inner], operations, (0, 1), (2,)))
    return Model(choices[0], (*choices[1:], add))


def shown_condition():
    m = ModelBuilder()
    x, y = m.input("float32", (1,)), m.input("float32", (1,))
    condition = m.operation("LESS", x, y)
    m.output(condition, m.operation("IF", condition, *[step("float32", (1,))] * 2, x, y))
    return m.build()


@pytest.mark.parametrize(
    "make", [growing, unsupported_inside, constants_alone, lambda: deep(control.MOST_DEEP + 1), shown_condition]
)
def test_what_is_refused(litert, make):
    """Shapes that change, subgraphs with what TFLite cannot do, nothing but constants, more than 16 subgraphs one in
    the other, a condition that its client could change.
    """
    model = make()
    validate(model)
    assert litert.supported_operations(model)[-1] is False


def test_deep(litert):
    """Sixteen branches, one in the other, each of which is referred to twice."""
    for feeds in ((1, 2), (2, 1)):
        check(litert, deep(control.MOST_DEEP), *(np.array([x], np.float32) for x in feeds))


def test_many_subgraphs(litert, monkeypatch):
    """A model that would become too many subgraphs is refused before they are made."""
    monkeypatch.setattr(control, "MOST_NESTED", 2)
    model = choice("float32", (1,), step("float32", (1,)), step("float32", (1,), "SUB"))
    assert litert.supported_operations(model) == [True]
    assert litert.supported_operations(deep(3)) == [True, False]


def _endless_inside(m, x, y):
    body = ModelBuilder()
    i, a, b = state(body, "float32", (2, 3))
    body.output(body.operation("MUL", i, np.array([1], np.int32), 0), body.operation("ADD", a, b, 0))
    return m.operation("WHILE", below(5, "float32", (2, 3)), body.build(), np.zeros(1, np.int32), x, y)[1]


def _in_a_branch():
    m = ModelBuilder()
    i, x, y = state(m, "float32", (2, 3))
    branch = ModelBuilder()
    _, a, b = state(branch, "float32", (2, 3))
    branch.output(_endless_inside(branch, a, b))
    branch = branch.build()
    m.output(i_plus(m, i), m.operation("IF", m.operation("LESS", i, np.ones(1, np.int32)), branch, branch, i, x, y))
    return m.build()


ENDLESS = {
    "a loop": lambda: counting(5, by=0),
    "in a loop": lambda: counting(5, inner=_endless_inside),
    "in a branch": _in_a_branch,
}


def i_plus(m, i):
    return m.operation("ADD", i, np.ones(1, np.int32), 0)


def feeds_of(start=0):
    return np.full(1, start, np.int32), np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)


@pytest.mark.parametrize("make", ENDLESS.values(), ids=ENDLESS)
def test_a_loop_without_end(litert, make):
    """After its loop timeout, and soon, it ends with LoopTimeout, and the C function with its status; always again."""
    model = make()
    assert all(litert.supported_operations(model))
    bound, _ = bind(litert, model, feeds_of(), 0.05)
    execute = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(bound.native[0])
    for _ in range(2):
        with at_least(0.1):
            with pytest.raises(LoopTimeout, match=r"0\.05 s"):
                bound.run()
            assert execute(bound.native[1]) == MISSED_DEADLINE_TRANSIENT


def test_a_loop_that_ends(litert):
    """What ended with a timeout before runs to its end when it has one."""
    feeds = feeds_of()
    bound, (count, total) = bind(litert, counting(5, by=0), feeds, 0.05)
    with pytest.raises(LoopTimeout):
        bound.run()
    feeds[0][:] = 5
    bound.run()
    assert count == 5
    assert (total == 1).all()


@pytest.mark.parametrize("path", ["run", "native"])
def test_cancelled_in_a_loop(litert, path):
    """A loop without end stops when it is cancelled, and no later run begins; another binding of the model does."""
    model = counting(5, by=0)
    prepared = litert.prepare(model, Preparation())
    bounds = [prepared.bind(feeds_of(5 * k), [aligned(4), aligned(24)], BindOptions(2 * PATIENCE)) for k in (0, 1)]
    execute = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(bounds[0].native[0])
    found = []

    def work():
        try:
            found.append(bounds[0].run() if path == "run" else execute(bounds[0].native[1]))
        except ExecutionFailed as error:
            found.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    until(lambda: next(iter(programs_of(prepared).values())).turn.running)
    bounds[0].cancel()
    thread.join()
    assert found[0] == GENERAL_FAILURE or "it was cancelled" in found[0]
    for _ in range(2):
        with pytest.raises(ExecutionFailed, match="it was cancelled"):
            bounds[0].run()
    bounds[1].run()


@pytest.mark.parametrize("path", ["plain", "burst"])
def test_in_a_process(connect, kit, path):
    """A request's loop timeout ends a loop in the device, on both paths, the first time and when it is known; and the
    model can be used again.
    """
    model = counting(5, by=0)
    with connect("litert").prepare(model) as prepared, prepared.burst() as burst:
        ends = burst if path == "burst" else prepared
        request, _ = kit.request(list(feeds_of()), 4)
        more = RequestArgument(pool=2, length=24)  # which the loop leaves as it is
        request = request._replace(outputs=(*request.outputs, more))
        for _ in range(3):
            with at_least(0.05):
                status = ends.execute(request, loop_timeout=0.05).status
            assert status == ErrorStatus.MISSED_DEADLINE_TRANSIENT
        arrays = feeds_of(5)
        found = burst.run(*arrays).outputs if path == "burst" else prepared.run(*arrays)
        assert found[0].item() == 5
        np.testing.assert_array_equal(found[1], arrays[1])


def test_indices_in_a_loop(litert):
    """Indices that go round a loop lie where no client can change them: inputs and outputs of their type are copied."""
    m = ModelBuilder()
    i, rows, x = m.input("int32", (1,)), m.input("int32", (2,)), m.input("float32", (4, 2))
    m.output(m.operation("LESS", i, np.array([3], np.int32)))
    condition = m.build()
    m = ModelBuilder()
    i, rows, x = m.input("int32", (1,)), m.input("int32", (2,)), m.input("float32", (4, 2))
    found = m.operation("GATHER", x, 0, m.operation("EXPAND_DIMS", rows, 0))
    found = m.operation("TILE", m.operation("RESHAPE", found, np.array([2, 2], np.int32)), np.array([2, 1], np.int32))
    one = np.ones(1, np.int32)
    m.output(m.operation("ADD", i, one, 0), m.operation("SUB", np.full(2, 3, np.int32), rows, 0), found)
    body = m.build()
    m = ModelBuilder()
    given = m.input("int32", (1,)), m.input("int32", (2,)), m.input("float32", (4, 2))
    m.output(*m.operation("WHILE", condition, body, *given))
    feeds = np.zeros(1, np.int32), np.array([0, 2], np.int32), np.arange(8, dtype=np.float32).reshape(4, 2)
    check(litert, m.build(), *feeds)
    bound, _ = bind(litert, m.build(), feeds)
    assert bound.copied_bytes >= 2 * (4 + 8)
