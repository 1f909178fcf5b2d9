import numpy as np
import pytest

from driver.nn import ExecutionFailed, Interpreter, InvalidModel, Model, ModelBuilder, Operand, Operation, Subgraph
from driver.nn.operands import constant_operand
from driver.nn.validate import required_version, validate

REFUSAL = (ExecutionFailed, InvalidModel)
HUGE = 2**31 - 1


@pytest.mark.parametrize("dtype", "fhqs")
@pytest.mark.parametrize(("target", "result"), [([4, 6], (4, 6)), ([-1], (24,)), ([2, 1, -1, 3], (2, 1, 4, 3))])
def test_reshape(move, counting, dtype, target, result):
    """RESHAPE keeps the elements in order; one dimension may be left to compute."""
    y = move("RESHAPE", counting((2, 3, 4), dtype), target)
    np.testing.assert_array_equal(y, counting(result, dtype))


TARGETS = [[5, 5], [-1, -1], [-1, 5], [1, 1, 1, 1, 24], [-2, 12], [0, -1], [HUGE] * 4, [-1, HUGE], [2] * 10_000]


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: str(t[:5]))
def test_reshape_refuses(move, counting, target):
    """Targets that do not hold all elements fail."""
    with pytest.raises(REFUSAL, match="RESHAPE"):
        move("RESHAPE", counting((2, 3, 4)), target)


@pytest.mark.parametrize("dtype", "fhqs")
@pytest.mark.parametrize(
    ("axes", "result"), [(None, (3,)), ([0], (3, 1, 1)), ([-1, 0, 0], (3, 1)), (np.zeros(0, np.int32), (1, 3, 1, 1))]
)
def test_squeeze(move, counting, dtype, axes, result):
    """SQUEEZE removes the listed axes of size 1, all of them when the list is omitted, none when it is empty."""
    np.testing.assert_array_equal(move("SQUEEZE", counting((1, 3, 1, 1), dtype), axes), counting(result, dtype))


def test_squeeze_of_a_single_element(move, counting):
    """When no axis remains the result has dimensions [1]."""
    assert move("SQUEEZE", counting((1, 1)), None).shape == (1,)


@pytest.mark.parametrize("axes", [[1], [4], [-5], [[0]]])
def test_squeeze_refuses(move, counting, axes):
    """Axes of another size or out of range fail, and so does what is no list."""
    with pytest.raises(REFUSAL, match="SQUEEZE"):
        move("SQUEEZE", counting((1, 3, 1, 1)), axes)


@pytest.mark.parametrize("operation", ["SQUEEZE", "TRANSPOSE"])
@pytest.mark.parametrize(("declared", "is_valid"), [((), True), ((0,), True), ((2,), True), ((1, 2), False)])
def test_an_omitted_list_is_still_declared_as_one(operation, declared, is_valid):
    """The omitted input of SQUEEZE and TRANSPOSE has at most one dimension."""
    operands = [
        Operand("TENSOR_FLOAT32", [1, 2], lifetime="SUBGRAPH_INPUT"),
        Operand("TENSOR_INT32", declared, lifetime="NO_VALUE"),
        Operand("TENSOR_FLOAT32", [], lifetime="SUBGRAPH_OUTPUT"),
    ]
    model = Model(Subgraph(operands, [Operation(operation, [0, 1], [2])], [0], [2]))
    if is_valid:
        validate(model)
    else:
        with pytest.raises(InvalidModel, match="1-D"):
            validate(model)


@pytest.mark.parametrize("dtype", "fhqsi")
@pytest.mark.parametrize(
    ("axis", "result"),
    [(0, (1, 2, 3)), (1, (2, 1, 3)), (2, (2, 3, 1)), (-1, (2, 3, 1)), (-2, (2, 1, 3)), (-3, (1, 2, 3))],
)
def test_expand_dims(move, counting, dtype, axis, result):
    """EXPAND_DIMS puts an axis of size 1 before the named one; -1 is behind the last."""
    np.testing.assert_array_equal(move("EXPAND_DIMS", counting((2, 3), dtype), axis), counting(result, dtype))


@pytest.mark.parametrize("axis", [3, -4])
def test_expand_dims_refuses(move, counting, axis):
    """Axes out of range fail."""
    with pytest.raises(REFUSAL, match="axis"):
        move("EXPAND_DIMS", counting((2, 3)), axis)


ANYTHING = {
    "TENSOR_FLOAT32": {},
    "TENSOR_FLOAT16": {},
    "TENSOR_INT32": {},
    "TENSOR_BOOL8": {},
    "TENSOR_QUANT8_ASYMM": {"scale": 1.0},
    "TENSOR_QUANT8_ASYMM_SIGNED": {"scale": 1.0},
    "TENSOR_QUANT8_SYMM": {"scale": 1.0},
    "TENSOR_QUANT16_SYMM": {"scale": 1.0},
    "TENSOR_QUANT16_ASYMM": {"scale": 1.0},
    "TENSOR_QUANT8_SYMM_PER_CHANNEL": {"channel_quant": ([1.0], 0)},
}


@pytest.mark.parametrize("name", ANYTHING)
@pytest.mark.parametrize("rank", [1, 2, 6])
def test_rank(run_model, name, rank):
    """RANK counts the dimensions of a tensor of any type; its result is a scalar."""
    m = ModelBuilder()
    x = m.input(name, (1,) * rank, **ANYTHING[name])
    y = m.operation("RANK", x)
    m.output(y)
    assert y.operand.type.name == "INT32"
    (result,) = run_model(m.build(), np.zeros((1,) * rank, x.operand.type.dtype))
    assert result.shape == ()
    assert result == rank


def test_rank_steers_what_follows(run_model):
    """The scalar that RANK gives can be an axis."""
    m = ModelBuilder()
    x = m.input("float32", (2, 3))
    m.output(m.operation("EXPAND_DIMS", x, m.operation("RANK", x)))
    (y,) = run_model(m.build(), np.ones((2, 3), np.float32))
    assert y.shape == (2, 3, 1)


@pytest.mark.parametrize("value", [np.float32(-2.5), np.float16(0.25), np.int32(-7)])
@pytest.mark.parametrize("target", [[5], [2, 3], [1, 2, 1, 2, 1]])
def test_fill(evaluate, value, target):
    """FILL repeats a scalar into the dimensions it is told; the type of the scalar is that of the result."""
    y = evaluate("FILL", target, value)
    assert y.dtype == value.dtype
    np.testing.assert_array_equal(y, np.full(target, value))


def test_fill_of_constants_is_static(run_model):
    """A model that knows all of FILL's inputs knows the dimensions of its result."""
    m = ModelBuilder()
    y = m.operation("FILL", [2, 3], 1.5)
    m.output(m.operation("ADD", m.input("float32", (2, 3)), y, 0))
    model = m.build()
    assert y.operand.dimensions == (2, 3)
    assert Interpreter(model).is_static
    assert required_version(model) == 3
    np.testing.assert_array_equal(run_model(model, np.ones((2, 3), np.float32))[0], np.full((2, 3), 2.5))


@pytest.mark.parametrize(
    "target",
    [[-1], [HUGE, HUGE], [HUGE, 2], [2] * 1000, [HUGE] * 32, np.zeros(0, np.int32), [[2, 3]]],
    ids=lambda t: str(t[:5]),
)
def test_fill_refuses(evaluate, target):
    """Negative dimensions, none, too many, and results above 4 GiB fail before anything is allocated."""
    with pytest.raises(REFUSAL, match=r"FILL|dimensions"):
        evaluate("FILL", target, 1.0)


def test_fill_gives_the_type_of_its_scalar():
    """A float cannot fill an INT32 tensor."""
    operands = [
        constant_operand([2]),
        constant_operand(1.0),
        Operand("TENSOR_INT32", [2], lifetime="SUBGRAPH_OUTPUT"),
    ]
    with pytest.raises(InvalidModel, match="cannot give TENSOR_INT32"):
        validate(Model(Subgraph(operands, [Operation("FILL", [0, 1], [2])], [], [2])))
