"""IF and WHILE, with subgraphs as models of their own."""

import numpy as np
import pytest
from waiting import at_least

from driver.nn import ExecutionFailed, Interpreter, LoopTimeout, Model, ModelBuilder, Operand, Operation, Subgraph

X = np.array([[1, -2], [3, 0.5]], np.float32)


def apply(operation, constant, dimensions=(2, 2)):
    """A model of one float operation with a constant."""
    m = ModelBuilder()
    x = m.input("float32", dimensions)
    m.output(m.operation(operation, x, np.full((2, 2), constant, np.float32), 0))
    return m.build()


def choice(then, otherwise, dimensions=(2, 2)):
    m = ModelBuilder()
    condition, x = m.input("bool8", (1,)), m.input("float32", dimensions)
    m.output(m.operation("IF", condition, then, otherwise, x))
    return m.build()


def counting(limit, step=1, dimensions=(1,), kept=()):
    """WHILE i < limit: i += step, x += y, where x has state and y is input only; outputs i and x."""
    m = ModelBuilder()
    i, _, _ = m.input("int32", (1,)), m.input("float32", dimensions), m.input("float32", dimensions)
    m.output(m.operation("LESS", i, np.array([limit], np.int32)))
    condition = m.build()
    m = ModelBuilder()
    i, x, y = m.input("int32", (1,)), m.input("float32", dimensions), m.input("float32", dimensions)
    m.output(m.operation("ADD", i, np.array([step], np.int32), 0), m.operation("ADD", x, y, 0))
    body = m.build()
    m = ModelBuilder()
    i, x, y = m.input("int32", (1,)), m.input("float32", dimensions), m.input("float32", dimensions)
    m.output(*m.operation("WHILE", condition, body, i, x, y))
    return m.build()


class TestIf:
    @pytest.mark.parametrize("condition", [0, 1, 7])
    def test_branches_of_if(self, run_model, condition):
        """Any byte but 0 is true; the other branch is not run."""
        (found,) = run_model(choice(apply("ADD", 1), apply("MUL", 3)), np.array([condition], np.uint8), X)
        np.testing.assert_array_equal(found, X + 1 if condition else X * 3)

    def test_if_of_unknown_dimensions(self, run_model):
        """Shapes that the model leaves open follow from what the branch gives."""
        model = choice(apply("ADD", 1, (0, 2)), apply("MUL", 3, (0, 2)), (0, 2))
        (found,) = run_model(model, np.array([1], np.uint8), X)
        np.testing.assert_array_equal(found, X + 1)

    def test_if_in_an_if(self, run_model):
        """Subgraphs may hold control flow of their own; each subgraph is made ready once."""
        m = ModelBuilder()
        a, b, x = m.input("bool8", (1,)), m.input("bool8", (1,)), m.input("float32", (2, 2))
        inner = choice(apply("ADD", 1), apply("ADD", 2))
        m2 = ModelBuilder()
        c, y = m2.input("bool8", (1,)), m2.input("float32", (2, 2))
        m2.output(m2.operation("IF", c, apply("ADD", 5), apply("ADD", 6), y))
        m.output(m.operation("IF", a, inner, m2.build(), b, x))
        model = m.build()
        assert len(model.referenced) == 6
        for first, second, added in ((1, 1, 1), (1, 0, 2), (0, 1, 5), (0, 0, 6)):
            flags = (np.array([flag], np.uint8) for flag in (first, second))
            np.testing.assert_array_equal(run_model(model, *flags, X)[0], X + added)

    def test_failure_in_a_branch_of_if(self, run_model):
        """What fails in a branch fails the operation, and the message says where."""
        m = ModelBuilder()
        x, axis = m.input("float32", (2, 2)), m.input("int32", (1,))
        m.output(m.operation("MEAN", x, axis, 0, dimensions=(2,)))
        branch = m.build()
        m = ModelBuilder()
        condition, x, axis = m.input("bool8", (1,)), m.input("float32", (2, 2)), m.input("int32", (1,))
        m.output(m.operation("IF", condition, branch, branch, x, axis))
        model = m.build()
        with pytest.raises(ExecutionFailed, match=r"operation 0 \(IF\): in its branch: operation 0 \(MEAN\): axis 5"):
            run_model(model, np.array([1], np.uint8), X, np.array([5], np.int32))


class TestWhile:
    @pytest.mark.parametrize("limit", [0, 1, 2, 3, 10])
    def test_while_of_fixed_shapes(self, run_model, limit):
        """No iteration copies the initial values; others see what the one before gave."""
        y = np.array([0.5], np.float32)
        count, total = run_model(counting(limit), np.array([0], np.int32), np.array([2], np.float32), y)
        assert (count.item(), total.item()) == (limit, 2 + 0.5 * limit)

    @pytest.mark.parametrize("limit", [0, 1, 4])
    def test_while_of_open_shapes(self, run_model, limit):
        """Dimensions that only the inputs tell hold all the way round."""
        x, y = np.array([1, 2], np.float32), np.array([3, 4], np.float32)
        count, total = run_model(counting(limit, dimensions=(0,)), np.array([0], np.int32), x, y)
        assert count.item() == limit
        np.testing.assert_array_equal(total, x + limit * y)

    def test_while_that_grows(self, run_model):
        """A value may have another shape after each iteration."""
        m = ModelBuilder()
        i, _ = m.input("int32", (1,)), m.input("float32", (0,))
        m.output(m.operation("LESS", i, np.array([4], np.int32)))
        condition = m.build()
        m = ModelBuilder()
        i, x = m.input("int32", (1,)), m.input("float32", (0,))
        m.output(m.operation("ADD", i, np.array([1], np.int32), 0), m.operation("CONCATENATION", x, x, 0))
        body = m.build()
        m = ModelBuilder()
        i, x = m.input("int32", (1,)), m.input("float32", (0,))
        m.output(*m.operation("WHILE", condition, body, i, x))
        count, grown = run_model(m.build(), np.array([1], np.int32), np.array([1, 2], np.float32))
        assert count.item() == 4
        np.testing.assert_array_equal(grown, [1, 2] * 8)

    def test_while_leaves_its_inputs_alone(self):
        """The initial values are not written to, and a second run of one binding begins with them again."""
        inputs = [np.array([0], np.int32), np.array([2], np.float32), np.array([1], np.float32)]
        before = [array.copy() for array in inputs]
        outputs = [np.zeros(4, np.uint8), np.zeros(4, np.uint8)]
        bound = Interpreter(counting(5)).bind(inputs, outputs)
        for _ in range(2):
            bound.run()
            assert [array.tolist() for array in inputs] == [array.tolist() for array in before]
            assert outputs[1].view(np.float32).item() == 7

    def test_while_without_end(self):
        """After its loop timeout a WHILE ends with LoopTimeout, and not before."""
        inputs = [np.array([0], np.int32), np.array([2], np.float32), np.array([1], np.float32)]
        outputs = [np.zeros(4, np.uint8), np.zeros(4, np.uint8)]
        bound = Interpreter(counting(5, step=0)).bind(inputs, outputs, loop_timeout=0.05)
        with at_least(0.05), pytest.raises(LoopTimeout, match=r"0\.05 s"):
            bound.run()

    def test_while_in_a_while_stops_inside(self):
        """A loop timeout inside of a subgraph ends the whole execution."""
        inner = counting(5, step=0)
        m = ModelBuilder()
        i, x, y = m.input("int32", (1,)), m.input("float32", (1,)), m.input("float32", (1,))
        m.output(*m.operation("WHILE", *_same_condition(), inner, i, x, y))
        inputs = [np.array([0], np.int32), np.array([2], np.float32), np.array([1], np.float32)]
        bound = Interpreter(m.build()).bind(inputs, [np.zeros(4, np.uint8)] * 2, loop_timeout=0.05)
        with pytest.raises(LoopTimeout):
            bound.run()


def _same_condition():
    m = ModelBuilder()
    i, _, _ = m.input("int32", (1,)), m.input("float32", (1,)), m.input("float32", (1,))
    m.output(m.operation("LESS", i, np.array([5], np.int32)))
    return [m.build()]


def test_a_subgraph_is_made_ready_once():
    """However many operations refer to a subgraph, its constants are transformed once."""
    branch = apply("ADD", 1).main
    operands = [
        Operand("TENSOR_BOOL8", (1,), lifetime="SUBGRAPH_INPUT"),
        Operand("SUBGRAPH", lifetime="SUBGRAPH", value=0),
        Operand("TENSOR_FLOAT32", (2, 2), lifetime="SUBGRAPH_INPUT"),
        Operand("TENSOR_FLOAT32", (2, 2)),
        Operand("TENSOR_FLOAT32", (2, 2), lifetime="SUBGRAPH_OUTPUT"),
    ]
    operations = [Operation("IF", (0, 1, 1, 2), (3,)), Operation("IF", (0, 1, 1, 3), (4,))]
    model = Model(Subgraph(operands, operations, (0, 2), (4,)), (branch,))
    out = np.zeros(16, np.uint8)
    interpreter = Interpreter(model)
    bound = interpreter.bind([np.array([1], np.uint8), X], [out])
    bound.run()
    np.testing.assert_array_equal(out.view(np.float32).reshape(2, 2), X + 2)
    assert len(interpreter._graphs) == 1
