"""IF and WHILE on the onnxruntime device: what they compute, refuse, and how they end."""

import threading

import numpy as np
import pytest
from waiting import at_least

from driver.errors import ExecutionFailed, LoopTimeout
from driver.nn import Interpreter, ModelBuilder

pytest.importorskip("onnxruntime", reason="needs the extra 'onnxruntime'")

from driver.devices.onnxruntime import OnnxRuntimeDevice, device
from driver.interface import BindOptions, Preparation

X = np.array([[1, -2], [3, 0.5]], np.float32)
ONE, ZERO = np.array([1], np.float32), np.array([0], np.int32)


@pytest.fixture(scope="module")
def onnxruntime():
    return OnnxRuntimeDevice(threads=1)


def now():
    """No burst wants to run."""


def apply(operation, constant, dtype="float32"):
    """A model of one operation with a constant."""
    m = ModelBuilder()
    m.output(m.operation(operation, m.input(dtype, (2, 2)), np.full((2, 2), constant, dtype), 0))
    return m.build()


def given(dtype="float32"):
    """A model that gives what it gets."""
    m = ModelBuilder()
    m.output(m.operation("RESHAPE", m.input(dtype, (2, 2)), np.array([2, 2], np.int32)))
    return m.build()


def choice(then, otherwise, dtype="float32", dimensions=(2, 2)):
    m = ModelBuilder()
    m.output(m.operation("IF", m.input("bool8", (1,)), then, otherwise, m.input(dtype, dimensions)))
    return m.build()


def below(limit, *kinds):
    """A condition: input 0 is below the limit."""
    m = ModelBuilder()
    i, *_ = (m.input(dtype, dimensions) for dtype, dimensions in kinds)
    m.output(m.operation("LESS", i, np.array([limit], np.int32)))
    return m.build()


KINDS = (("int32", (1,)), ("float32", (1,)), ("float32", (1,)))


def adding(step=1):
    """A body: input 0 counts, input 2 is added to input 1."""
    m = ModelBuilder()
    i, x, y = (m.input(*kind) for kind in KINDS)
    m.output(m.operation("ADD", i, np.array([step], np.int32), 0), m.operation("ADD", x, y, 0))
    return m.build()


def counting(limit, step=1):
    """WHILE i < limit: i += step, x += y, where x has state and y is input only; outputs i and x."""
    m = ModelBuilder()
    m.output(*m.operation("WHILE", below(limit, *KINDS), adding(step), *(m.input(*kind) for kind in KINDS)))
    return m.build()


def nested(outer, inner):
    """A loop in a loop: the inner one begins anew in each turn of the outer."""
    m = ModelBuilder()
    i, x, y = (m.input(*kind) for kind in KINDS)
    _, total = m.operation("WHILE", below(inner, *KINDS), adding(), np.array([0], np.int32), x, y)
    m.output(m.operation("ADD", i, np.array([1], np.int32), 0), total)
    body = m.build()
    m = ModelBuilder()
    m.output(*m.operation("WHILE", below(outer, *KINDS), body, *(m.input(*kind) for kind in KINDS)))
    return m.build()


def bind(onnxruntime, model, feeds, loop_timeout=10.0):
    """The execution, and its outputs."""
    assert onnxruntime.supported_operations(model) == [True] * len(model.main.operations)
    want = Interpreter(model).bind(feeds)
    shapes = [(o.type.dtype, o.dimensions) for o in (model.main.operands[i] for i in model.main.outputs)]
    found = [np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8) for dtype, shape in shapes]
    bound = onnxruntime.prepare(model, Preparation()).bind(feeds, found, BindOptions(loop_timeout))
    return bound, [raw.view(dtype).reshape(shape) for raw, (dtype, shape) in zip(found, shapes, strict=True)], want


def agree(onnxruntime, model, *feeds):
    bound, found, want = bind(onnxruntime, model, feeds)
    bound.run()
    want.run()
    for got, tensor in zip(found, want.results, strict=True):
        np.testing.assert_allclose(got, tensor.array, rtol=1e-6)


@pytest.mark.parametrize("condition", [0, 1, 7])
def test_if(onnxruntime, condition):
    """Any byte but 0 is true, and the other branch does nothing."""
    flag = np.array([condition], np.uint8)
    agree(onnxruntime, choice(apply("ADD", 1), apply("MUL", 3)), flag, X)
    agree(onnxruntime, choice(given(), apply("SUB", 3)), flag, X)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("second", [0, 1])
def test_if_in_an_if(onnxruntime, first, second):
    """Branches may hold branches."""
    branches = choice(apply("ADD", 1), apply("MUL", 2)), choice(given(), apply("SUB", 4))
    m = ModelBuilder()
    a, b, x = m.input("bool8", (1,)), m.input("bool8", (1,)), m.input("float32", (2, 2))
    m.output(m.operation("IF", a, *branches, b, x))
    agree(onnxruntime, m.build(), *(np.array([flag], np.uint8) for flag in (first, second)), X)


def test_if_of_half_floats(onnxruntime):
    """Data in other forms outside of a branch than in it."""
    model = choice(apply("ADD", 1, "float16"), given("float16"), "float16")
    for condition in (0, 1):
        agree(onnxruntime, model, np.array([condition], np.uint8), X.astype(np.float16))


@pytest.mark.parametrize("limit", [0, 1, 2, 10])
def test_while(onnxruntime, limit):
    """The condition is looked at first; the state goes round, and the rest stays."""
    agree(onnxruntime, counting(limit), ZERO, 2 * ONE, ONE / 2)


def test_while_in_a_while(onnxruntime):
    """A loop within a loop sees what is around both."""
    agree(onnxruntime, nested(3, 4), ZERO, 2 * ONE, ONE / 2)


def test_shapes_that_grow_are_refused(onnxruntime):
    """A value whose shape changes from turn to turn has no shape beforehand."""
    kinds = ("int32", (1,)), ("float32", (0,))
    m = ModelBuilder()
    i, x = (m.input(*kind) for kind in kinds)
    m.output(m.operation("ADD", i, np.array([1], np.int32), 0), m.operation("CONCATENATION", x, x, 0))
    body = m.build()
    m = ModelBuilder()
    m.output(*m.operation("WHILE", below(4, *kinds), body, *(m.input(*kind) for kind in kinds)))
    assert onnxruntime.supported_operations(m.build()) == [False]


def test_branches_that_cannot_be_lowered_are_refused(onnxruntime):
    """What an operation in a branch is refused for, the branch is."""
    m = ModelBuilder()
    m.output(m.operation("ELU", m.input("float32", (2, 2)), -1.0))
    assert onnxruntime.supported_operations(choice(given(), m.build())) == [False]


def test_subgraphs_that_multiply_are_refused(onnxruntime):
    """A few subgraphs that refer to each other over and over make no endless graph: they are refused."""
    inner = apply("ADD", 1)
    for _ in range(5):
        m = ModelBuilder()
        chosen, x = m.input("bool8", (1,)), m.input("float32", (2, 2))
        for _ in range(20):
            x = m.operation("IF", chosen, inner, inner, *((x,) if len(inner.main.inputs) == 1 else (chosen, x)))
        m.output(x)
        inner = m.build()
    assert not any(onnxruntime.supported_operations(inner))


def test_while_without_end(onnxruntime):
    """After its loop timeout a WHILE ends with LoopTimeout; the next run is none the worse."""
    feeds = [ZERO.copy(), 2 * ONE, ONE]
    bound, *_ = bind(onnxruntime, counting(5, step=0), feeds, loop_timeout=0.05)
    for _ in range(2):
        with at_least(0.05), pytest.raises(LoopTimeout, match=r"0\.05 s"):
            bound.run()
    feeds[0][:] = 5
    bound.run()


def test_cancel(onnxruntime):
    """An execution that is cancelled while it runs ends with an error, long before its loop timeout."""
    bound, *_ = bind(onnxruntime, counting(5, step=0), [ZERO, 2 * ONE, ONE], loop_timeout=1000.0)
    failed = []

    def run():
        with pytest.raises(ExecutionFailed) as caught:
            bound.run()
        failed.append(str(caught.value))

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        bound.cancel()
        thread.join(0.01)
    assert "cancelled" in failed[0]
    bound.cancel()  # nothing runs


def test_cancel_without_loops(onnxruntime, monkeypatch):
    """A large model can be ended between two of its operations, too."""
    monkeypatch.setattr(device, "LARGE", 1)
    m = ModelBuilder()
    x, weights, bias = m.input("float32", (512, 512)), m.input("float32", (512, 512)), np.zeros(512, np.float32)
    for _ in range(200):
        x = m.operation("FULLY_CONNECTED", x, weights, bias, 0)
    m.output(x)
    feeds = [np.zeros((512, 512), np.float32)] * 2
    bound = onnxruntime.prepare(m.build(), Preparation()).bind(feeds, [np.zeros(2**20, np.uint8)], BindOptions())
    failed = []
    thread = threading.Thread(target=lambda: failed.append(_failure(bound)))
    thread.start()
    while thread.is_alive():
        bound.cancel()
        thread.join(0.001)
    assert "cancelled" in failed[0]


def _failure(bound):
    try:
        bound.run()
    except ExecutionFailed as error:
        return str(error)
    return "it ran to its end"
