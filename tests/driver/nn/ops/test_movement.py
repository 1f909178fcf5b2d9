import itertools

import numpy as np
import pytest

from driver.nn import ExecutionFailed, Interpreter, InvalidModel, ModelBuilder

REFUSAL = (ExecutionFailed, InvalidModel)
HUGE = 2**31 - 1


@pytest.mark.parametrize("dtype", "fhqs")
@pytest.mark.parametrize("order", [[0, 2, 1], [2, 0, 1]])
def test_transpose(move, counting, dtype, order):
    """TRANSPOSE: axis i of the result is axis order[i] of the input."""
    x = counting((2, 3, 4), dtype)
    y = move("TRANSPOSE", x, order)
    for index in itertools.product(*map(range, x.shape)):
        assert y[tuple(index[i] for i in order)] == x[index]


def test_transpose_without_order(move, counting):
    """An omitted order reverses the axes."""
    np.testing.assert_array_equal(move("TRANSPOSE", counting((2, 3)), None), counting((2, 3)).T)


@pytest.mark.parametrize("order", [[0, 0], [0, 2], [0], [1, 0, 2]])
def test_transpose_refuses(move, counting, order):
    """An order that is no permutation fails."""
    with pytest.raises(REFUSAL, match="TRANSPOSE"):
        move("TRANSPOSE", counting((2, 3)), order)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_concatenation_of_floats(evaluate, counting, dtype, axis):
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
def test_concatenation_refuses(evaluate, counting, shape, axis):
    """Negative axes and shapes that differ elsewhere fail."""
    with pytest.raises(REFUSAL, match="CONCATENATION"):
        evaluate("CONCATENATION", counting((2, 3)), counting(shape), axis)


@pytest.mark.parametrize("dtype", "fhqsi")
@pytest.mark.parametrize(("axis", "count"), [(0, 2), (1, 3), (-1, 2), (-3, 1)])
def test_split(move, counting, dtype, axis, count):
    """SPLIT cuts one axis into equal pieces, an output for each."""
    x = counting((2, 3, 4), dtype)
    pieces = move("SPLIT", x, axis, count, outputs=count)
    pieces = pieces if count > 1 else (pieces,)
    assert len(pieces) == count
    size = x.shape[axis] // count
    for number, piece in enumerate(pieces):
        np.testing.assert_array_equal(piece, x.take(range(number * size, (number + 1) * size), axis))


@pytest.mark.parametrize(
    ("axis", "count", "outputs"), [(0, 3, 2), (0, 2, 3), (3, 2, 2), (-3, 2, 2), (1, 2, 2), (0, 0, 1), (0, HUGE, 2)]
)
def test_split_refuses(move, counting, axis, count, outputs):
    """Counts other than that of the outputs, pieces that are not equal, and axes out of range fail."""
    with pytest.raises(REFUSAL, match="SPLIT"):
        move("SPLIT", counting((2, 3)), axis, count, outputs=outputs)


@pytest.mark.parametrize("dtype", "fhqsi")
@pytest.mark.parametrize(
    ("shape", "multiples"),
    [((3,), [2]), ((2, 3), [1, 1]), ((2, 3), [3, 2]), ((2, 1, 3), [1, 4, 2]), ((1, 2, 1, 2, 1), [2, 1, 2, 2, 1])],
)
def test_tile(move, counting, dtype, shape, multiples):
    """TILE: an element of the result is that of the input at the remainders of its indices."""
    x = counting(shape, dtype)
    y = move("TILE", x, multiples)
    assert y.shape == tuple(d * m for d, m in zip(shape, multiples, strict=True))
    for index in np.ndindex(y.shape):
        assert y[index] == x[tuple(i % d for i, d in zip(index, shape, strict=True))]


@pytest.mark.parametrize("multiples", [[2], [1, 1, 1], [0, 1], [1, -1], [HUGE, HUGE], [HUGE, 1], [[1, 1]]])
def test_tile_refuses(move, counting, multiples):
    """Multiples below 1, too few or many of them, and results above 4 GiB fail before anything is allocated."""
    with pytest.raises(REFUSAL, match=r"TILE|dimensions"):
        move("TILE", counting((2, 3)), multiples)


@pytest.mark.parametrize("dtype", "fhqs")
@pytest.mark.parametrize(("axis", "groups"), [(0, 2), (1, 3), (1, 2), (-1, 2), (2, 1), (2, 4)])
def test_channel_shuffle(move, counting, dtype, axis, groups):
    """CHANNEL_SHUFFLE: channel k * groups + j of the result is channel j * size of a group + k of the input."""
    x = counting((2, 6, 4), dtype)
    y = move("CHANNEL_SHUFFLE", x, groups, axis)
    size = x.shape[axis] // groups
    for k, j in itertools.product(range(size), range(groups)):
        np.testing.assert_array_equal(y.take(k * groups + j, axis), x.take(j * size + k, axis))


@pytest.mark.parametrize(("groups", "axis"), [(0, 0), (-1, 0), (4, 1), (2, 2), (2, -3)])
def test_channel_shuffle_refuses(move, counting, groups, axis):
    """Groups that do not divide the axis and axes out of range fail."""
    with pytest.raises(REFUSAL, match="CHANNEL_SHUFFLE"):
        move("CHANNEL_SHUFFLE", counting((2, 6)), groups, axis)


@pytest.mark.parametrize(
    ("operation", "args"), [("TILE", ([2, 3],)), ("CHANNEL_SHUFFLE", (2, 0)), ("TRANSPOSE", ([1, 0],))]
)
def test_inputs_of_any_strides(counting, operation, args):
    """What lies scattered in memory is moved like what lies in order."""
    m = ModelBuilder()
    m.output(m.operation(operation, m.input("float32", (4, 6)), *args))
    model, x = Interpreter(m.build()), counting((4, 6))
    results = []
    for array in (x, np.asfortranarray(x)):
        bound = model.bind([array])
        bound.run()
        results.append(bound.results[0].data)
    np.testing.assert_array_equal(*results)
