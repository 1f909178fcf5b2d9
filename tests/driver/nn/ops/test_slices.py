import numpy as np
import pytest

from driver.nn import ExecutionFailed, Interpreter, InvalidModel, Model, ModelBuilder, Operand, Operation, Subgraph
from driver.nn.operands import constant_operand
from driver.nn.validate import required_version

REFUSAL = (ExecutionFailed, InvalidModel)
HUGE = 2**31 - 1


@pytest.mark.parametrize("dtype", "fhqs")
def test_pad(move, counting, dtype):
    """PAD surrounds the data with real zeros: the zero point where it is quantised."""
    x = counting((2, 3), dtype)
    fill = 3 if x.dtype.itemsize == 1 else 0
    expected = np.full((2 + 1, 3 + 2 + 4), fill, x.dtype)
    expected[1:, 2:5] = x
    np.testing.assert_array_equal(move("PAD", x, [[1, 0], [2, 4]]), expected)


@pytest.mark.parametrize(
    "paddings", [[[1, 0]], [[1, 0], [-1, 0]], [1, 0, 1, 0], [[0, HUGE], [HUGE, 0]], [[HUGE, HUGE], [0, 0]]]
)
def test_pad_refuses(move, counting, paddings):
    """Negative paddings, lists of another shape, and results above 4 GiB fail before anything is allocated."""
    with pytest.raises(REFUSAL, match=r"PAD|dimensions"):
        move("PAD", counting((2, 3)), paddings)


SLICES = [
    pytest.param([1, 0], [3, 4], [1, 2], (0, 0, 0), np.s_[1:3, 0:4:2], id="plain"),
    pytest.param([-3, -1], [4, -5], [2, -1], (0, 0, 0), np.s_[1:4:2, ::-1], id="negative"),
    pytest.param([2, 1], [2, 2], [1, 1], (1, 2, 0), np.s_[0:2, 1:4], id="masks"),
    pytest.param([3, 3], [0, 0], [-1, -2], (3, 3, 0), np.s_[::-1, ::-2], id="masks of negative strides"),
    pytest.param([2, 0], [3, 4], [1, 1], (0, 0, 1), np.s_[2, 0:4], id="shrink"),
    pytest.param([2, 1], [3, 2], [1, 1], (0, 0, 3), np.s_[2:3, 1], id="shrink all"),
    pytest.param([-99, 1], [99, 99], [3, 1], (0, 0, 0), np.s_[::3, 1:], id="clamped"),
]


@pytest.mark.parametrize("dtype", "fhqs")
@pytest.mark.parametrize(("begins", "ends", "strides", "masks", "index"), SLICES)
def test_strided_slice(move, counting, *, dtype, begins, ends, strides, masks, index):
    """STRIDED_SLICE means what Python slices mean, with masks for whole axes and for dropped ones."""
    x = counting((4, 4), dtype)
    np.testing.assert_array_equal(move("STRIDED_SLICE", x, begins, ends, strides, *masks), x[index])


@pytest.mark.parametrize(
    ("begins", "ends", "strides", "shrink", "reason"),
    [
        ([0, 0], [4, 4], [1, 0], 0, "stride of axis 1 is 0"),
        ([0, 0], [4, 4], [1, 1], 1, "axis 0 shrinks but takes 4"),
        ([1, 0], [0, 4], [-1, 1], 1, "stride -1"),
        ([0], [4], [1], 0, "2 elements"),
    ],
)
def test_strided_slice_refuses(move, counting, *, begins, ends, strides, shrink, reason):
    """Zero strides, shrinking axes that do not shrink, and short lists fail."""
    with pytest.raises(REFUSAL, match=reason):
        move("STRIDED_SLICE", counting((4, 4)), begins, ends, strides, 0, 0, shrink)


def test_strided_slice_of_nothing():
    """An extent of 0 is served when the dimensions of the result are left open."""
    operands = [
        Operand("TENSOR_FLOAT32", [4], lifetime="SUBGRAPH_INPUT"),
        *map(constant_operand, ([3], [1], [1], 0, 0, 0)),
        Operand("TENSOR_FLOAT32", [0], lifetime="SUBGRAPH_OUTPUT"),
    ]
    model = Model(Subgraph(operands, [Operation("STRIDED_SLICE", range(7), [7])], [0], [7]))
    bound = Interpreter(model).bind([np.ones(4, np.float32)])
    bound.run()
    assert bound.results[0].shape == (0,)


@pytest.mark.parametrize("dtype", "fhqs")
def test_pad_v2(move, counting, dtype):
    """PAD_V2 surrounds the data with a scalar: quantised data with its stored value."""
    x = counting((2, 3), dtype)
    fill = {"f": np.float32(-1.5), "h": np.float16(-1.5), "q": 200, "s": -100}[dtype]
    expected = np.full((2 + 1, 3 + 2 + 4), fill, x.dtype)
    expected[1:, 2:5] = x
    np.testing.assert_array_equal(move("PAD_V2", x, [[1, 0], [2, 4]], fill), expected)


@pytest.mark.parametrize(
    ("dtype", "fill"), [("q", -1), ("q", 256), ("s", 128), ("s", -129), ("q", 1.0), ("f", 1), ("h", np.float32(1))]
)
def test_pad_v2_refuses(move, counting, dtype, fill):
    """A fill value of another type, or outside of the type's range, fails."""
    with pytest.raises(REFUSAL, match="PAD_V2"):
        move("PAD_V2", counting((2, 3), dtype), [[1, 0], [2, 4]], fill)


@pytest.mark.parametrize(("operation", "args"), [("PAD", ()), ("PAD_V2", (0.0,))])
def test_padding_of_rank_5_is_refused(counting, operation, args):
    """At most four dimensions are padded."""
    m = ModelBuilder()
    with pytest.raises(InvalidModel, match="rank"):
        m.operation(operation, m.input("float32", (1,) * 5), np.zeros((5, 2), np.int32), *args)


@pytest.mark.parametrize(("zero_point", "version"), [(0, 1), (3, 2)])
def test_pad_gate(zero_point, version):
    """Quantised data whose zero is not stored as 0 is padded since HAL 1.2."""
    m = ModelBuilder()
    x = m.input("quant8_asymm", (2,), scale=0.5, zero_point=zero_point)
    m.output(m.operation("PAD", x, [[1, 1]]))
    assert required_version(m.build()) == version


@pytest.mark.parametrize("dtype", "fhqsi")
@pytest.mark.parametrize(
    ("begins", "sizes", "index"),
    [
        ([0, 0, 0], [2, 3, 4], np.s_[:, :, :]),
        ([1, 0, 2], [1, 2, 1], np.s_[1:2, 0:2, 2:3]),
        ([1, 1, 0], [-1, -1, -1], np.s_[1:, 1:, :]),
        ([0, 3, 0], [1, 0, -1], np.s_[0:1, 3:3, :]),
    ],
)
def test_slice(move, counting, *, dtype, begins, sizes, index):
    """SLICE takes so many elements from where it is told; -1 means all that follow, and 0 none."""
    x = counting((2, 3, 4), dtype)
    y = move("SLICE", x, begins, sizes, dimensions=(0, 0, 0))
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, x[index])


@pytest.mark.parametrize(
    ("begins", "sizes"),
    [
        ([0, -1], [1, 1]),
        ([0, 4], [1, -1]),
        ([0, 1], [1, 3]),
        ([0, 0], [1, -2]),
        ([0], [1]),
        ([0, 0], [HUGE, 1]),
        ([HUGE, 0], [HUGE, 1]),
        ([[0, 0]], [1, 1]),
    ],
)
def test_slice_refuses(move, counting, begins, sizes):
    """Parts that reach out of the tensor and lists of another length fail."""
    with pytest.raises(REFUSAL, match="SLICE"):
        move("SLICE", counting((2, 3)), begins, sizes)


def test_slice_of_an_empty_tensor(run_model):
    """What is empty can be sliced again, and keeps its other dimensions."""
    m = ModelBuilder()
    x = m.input("float32", (2, 3))
    nothing = m.operation("SLICE", x, m.input("int32", (2,)), [0, 3], dimensions=(0, 3))
    m.output(m.operation("SLICE", nothing, [0, 1], [-1, 2], dimensions=(0, 2)))
    (y,) = run_model(m.build(), np.ones((2, 3), np.float32), np.zeros(2, np.int32))
    assert y.shape == (0, 2)
