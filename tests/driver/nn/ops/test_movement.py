import itertools

import numpy as np
import pytest

from driver.nn import ExecutionFailed, InvalidModel

REFUSAL = (ExecutionFailed, InvalidModel)
TYPES = pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint8, np.int8])


@pytest.fixture
def move(evaluate, quantised):
    """evaluate, with parameters for 8-bit data."""

    def move(operation, x, *args):
        return evaluate(operation, quantised(x, 0.5, 3) if x.dtype.itemsize == 1 else x, *args)

    return move


def counting(shape, dtype=np.float32):
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


@TYPES
@pytest.mark.parametrize(("target", "result"), [([4, 6], (4, 6)), ([-1], (24,)), ([2, 1, -1, 3], (2, 1, 4, 3))])
def test_reshape(move, dtype, target, result):
    """RESHAPE keeps the elements in order; one dimension may be left to compute."""
    y = move("RESHAPE", counting((2, 3, 4), dtype), target)
    np.testing.assert_array_equal(y, counting(result, dtype))


@pytest.mark.parametrize("target", [[5, 5], [-1, -1], [-1, 5], [1, 1, 1, 1, 24], [-2, 12], [0, -1]])
def test_reshape_refuses(move, target):
    """Targets that do not hold all elements fail."""
    with pytest.raises(REFUSAL, match="RESHAPE"):
        move("RESHAPE", counting((2, 3, 4)), target)


@TYPES
@pytest.mark.parametrize(
    ("axes", "result"), [(None, (3,)), ([0], (3, 1, 1)), ([-1, 0, 0], (3, 1)), (np.zeros(0, np.int32), (1, 3, 1, 1))]
)
def test_squeeze(move, dtype, axes, result):
    """SQUEEZE removes the listed axes of size 1, all of them when the list is omitted, none when it is empty."""
    np.testing.assert_array_equal(move("SQUEEZE", counting((1, 3, 1, 1), dtype), axes), counting(result, dtype))


def test_squeeze_of_a_single_element(move):
    """When no axis remains the result has dimensions [1]."""
    assert move("SQUEEZE", counting((1, 1)), None).shape == (1,)


@pytest.mark.parametrize("axes", [[1], [4], [-5]])
def test_squeeze_refuses(move, axes):
    """Axes of another size or out of range fail."""
    with pytest.raises(REFUSAL, match="SQUEEZE"):
        move("SQUEEZE", counting((1, 3, 1, 1)), axes)


@TYPES
@pytest.mark.parametrize("order", [[0, 2, 1], [2, 0, 1]])
def test_transpose(move, dtype, order):
    """TRANSPOSE: axis i of the result is axis order[i] of the input."""
    x = counting((2, 3, 4), dtype)
    y = move("TRANSPOSE", x, order)
    for index in itertools.product(*map(range, x.shape)):
        assert y[tuple(index[i] for i in order)] == x[index]


def test_transpose_without_order(move):
    """An omitted order reverses the axes."""
    np.testing.assert_array_equal(move("TRANSPOSE", counting((2, 3)), None), counting((2, 3)).T)


@pytest.mark.parametrize("order", [[0, 0], [0, 2], [0], [1, 0, 2]])
def test_transpose_refuses(move, order):
    """An order that is no permutation fails."""
    with pytest.raises(REFUSAL, match="TRANSPOSE"):
        move("TRANSPOSE", counting((2, 3)), order)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_concatenation_of_floats(evaluate, dtype, axis):
    """CONCATENATION lines tensors up along one axis."""
    shapes = [[2, 3, 4] for _ in range(3)]
    for extent, shape in enumerate(shapes):
        shape[axis] = extent + 1
    parts = [counting(shape, dtype) for shape in shapes]
    np.testing.assert_array_equal(evaluate("CONCATENATION", *parts, axis), np.concatenate(parts, axis))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_concatenation_of_quantised(evaluate, quantised, requantise, dtype):
    """Each quantised input is requantised from its own parameters."""
    raw = np.arange(256).astype(np.uint8).view(dtype)
    parts = [quantised(raw, 0.5, 3), quantised(raw, 0.25, 100), quantised(raw, 2.0, -0)]
    expected = np.concatenate([requantise(p.real, 0.5, 3, dtype) for p in parts])
    np.testing.assert_array_equal(evaluate("CONCATENATION", *parts, 0, scale=0.5, zero_point=3), expected)


@pytest.mark.parametrize(("shape", "axis"), [((2, 3), -1), ((2, 3), 2), ((2, 4), 0), ((2, 3, 1), 0)])
def test_concatenation_refuses(evaluate, shape, axis):
    """Negative axes and shapes that differ elsewhere fail."""
    with pytest.raises(REFUSAL, match="CONCATENATION"):
        evaluate("CONCATENATION", counting((2, 3)), counting(shape), axis)


@TYPES
def test_pad(move, dtype):
    """PAD surrounds the data with real zeros: the zero point where it is quantised."""
    x = counting((2, 3), dtype)
    fill = 3 if x.dtype.itemsize == 1 else 0
    expected = np.full((2 + 1, 3 + 2 + 4), fill, dtype)
    expected[1:, 2:5] = x
    np.testing.assert_array_equal(move("PAD", x, [[1, 0], [2, 4]]), expected)


@pytest.mark.parametrize("paddings", [[[1, 0]], [[1, 0], [-1, 0]], [1, 0, 1, 0]])
def test_pad_refuses(move, paddings):
    """Negative paddings and lists of another shape fail."""
    with pytest.raises(REFUSAL, match="PAD"):
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


@TYPES
@pytest.mark.parametrize(("begins", "ends", "strides", "masks", "index"), SLICES)
def test_strided_slice(move, *, dtype, begins, ends, strides, masks, index):
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
def test_strided_slice_refuses(move, *, begins, ends, strides, shrink, reason):
    """Zero strides, shrinking axes that do not shrink, and short lists fail."""
    with pytest.raises(REFUSAL, match=reason):
        move("STRIDED_SLICE", counting((4, 4)), begins, ends, strides, 0, 0, shrink)
