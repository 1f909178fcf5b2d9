import numpy as np
import pytest

from driver.nn import ExecutionFailed, Interpreter, InvalidModel, ModelBuilder
from driver.nn.validate import required_version

REFUSAL = (ExecutionFailed, InvalidModel)
HUGE = 2**31 - 1


@pytest.mark.parametrize("dtype", "fhqsi")
@pytest.mark.parametrize("axis", [0, 1, -1, -3])
@pytest.mark.parametrize("indices", [[1], [1, 0, 1], [[0], [1]], [[[1, 1]], [[0, 1]]]], ids=str)
def test_gather(move, counting, dtype, axis, indices):
    """GATHER replaces one axis by the dimensions of the indices."""
    x, chosen = counting((2, 3, 2), dtype), np.array(indices)
    y, front = move("GATHER", x, axis, indices), axis % 3
    assert y.dtype == x.dtype
    assert y.shape == (*x.shape[:front], *chosen.shape, *x.shape[front + 1 :])
    for index in np.ndindex(y.shape):
        before, inside, after = np.split(index, [front, front + chosen.ndim])
        assert y[index] == x[(*before, chosen[tuple(inside)], *after)]


@pytest.mark.parametrize(
    ("axis", "indices"), [(0, [2]), (0, [0, -1]), (1, [[3]]), (0, [HUGE]), (0, [-HUGE - 1]), (2, [0]), (-3, [0])]
)
def test_gather_refuses(move, counting, axis, indices):
    """Indices out of range, negative ones too, and axes out of range fail."""
    with pytest.raises(REFUSAL, match=r"GATHER.*has to be in"):
        move("GATHER", counting((2, 3)), axis, indices)


@pytest.mark.parametrize(("operation", "args"), [("GATHER", (0,)), ("EMBEDDING_LOOKUP", ())])
def test_indices_are_looked_at_in_every_run(operation, args):
    """Indices that are data leave the model static; each run takes them, and checks them, as they are then."""
    m = ModelBuilder()
    values, chosen = m.input("float32", (3, 2)), m.input("int32", (2,))
    m.output(m.operation(operation, *((values, *args, chosen) if operation == "GATHER" else (chosen, values))))
    model = Interpreter(m.build())
    assert model.is_static
    table, indices = np.arange(6, dtype=np.float32).reshape(3, 2), np.array([2, 0], np.int32)
    bound = model.bind([table, indices])
    for wanted in ([2, 0], [1, 1]):
        indices[:] = wanted
        bound.run()
        np.testing.assert_array_equal(bound.results[0].data, table[wanted])
    indices[1] = 3
    with pytest.raises(ExecutionFailed, match=r"index 3 has to be in 0\.\.2"):
        bound.run()


@pytest.mark.parametrize("dtype", "fhqsi")
@pytest.mark.parametrize("shape", [(3, 2), (3, 2, 2)])
def test_embedding_lookup(evaluate, quantised, counting, dtype, shape):
    """EMBEDDING_LOOKUP takes the named rows."""
    x = counting(shape, dtype)
    values = quantised(x, 0.5, 3) if dtype in "qs" else x
    y = evaluate("EMBEDDING_LOOKUP", [2, 0, 2, 1], values)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, np.array([x[2], x[0], x[2], x[1]]))


@pytest.mark.parametrize(("lookups", "shape"), [([3], (3, 2)), ([0, -1], (3, 2)), ([[0]], (3, 2)), ([0], (3,))])
def test_embedding_lookup_refuses(evaluate, counting, lookups, shape):
    """Row numbers out of range, lookups that are no list and values that are no rows fail."""
    with pytest.raises(REFUSAL, match="EMBEDDING_LOOKUP"):
        evaluate("EMBEDDING_LOOKUP", lookups, counting(shape))


KEYS = [-5, 0, 7, 9]


@pytest.mark.parametrize("dtype", "fqi")
@pytest.mark.parametrize("row", [(), (2,), (2, 3)])
def test_hashtable_lookup(evaluate, quantised, counting, dtype, row):
    """HASHTABLE_LOOKUP takes the rows whose keys are named, and zero bytes for keys that are not there."""
    x = counting((4, *row), dtype)
    x += 10  # nothing that is found is zero
    values = quantised(x, 0.5, 3) if dtype == "q" else x
    lookups = [7, 1, -5, 9, -HUGE - 1, HUGE, 7]
    rows, hits = evaluate("HASHTABLE_LOOKUP", lookups, KEYS, values)
    assert rows.dtype == x.dtype
    for lookup, found, hit in zip(lookups, rows, hits, strict=True):
        assert hit == (lookup in KEYS)
        np.testing.assert_array_equal(found, x[KEYS.index(lookup)] if lookup in KEYS else 0 * x[0])


def test_hits_of_hashtable_lookup_are_quantised_by_1():
    """Hits are 8-bit numbers that mean 0 and 1, whatever the values mean."""
    m = ModelBuilder()
    values = m.constant(np.ones((1, 2), np.uint8), scale=0.5, zero_point=3)
    rows, hits = m.operation("HASHTABLE_LOOKUP", m.input("int32", (1,)), [4], values)
    m.output(rows, hits)
    assert [(v.operand.scale, v.operand.zero_point) for v in (rows, hits)] == [(0.5, 3), (1.0, 0)]
    assert required_version(m.build()) == 0


@pytest.mark.parametrize(
    ("lookups", "keys", "shape"), [([[7]], KEYS, (4, 2)), ([7], [KEYS], (4, 2)), ([7], KEYS, (3, 2))]
)
def test_hashtable_lookup_refuses(evaluate, counting, lookups, keys, shape):
    """Lookups and keys that are no lists, and keys without their row, fail."""
    with pytest.raises(REFUSAL, match="HASHTABLE_LOOKUP"):
        evaluate("HASHTABLE_LOOKUP", lookups, keys, counting(shape))


def test_keys_in_disorder_do_no_harm(evaluate, counting):
    """Keys that are not ascending may be missed; whatever is found is a row that is there."""
    x = counting((4, 2))
    rows, hits = evaluate("HASHTABLE_LOOKUP", [9, 7, 0], KEYS[::-1], x)
    for row, hit in zip(rows, hits, strict=True):
        assert row.tolist() in (x.tolist() if hit else [[0.0, 0.0]])
