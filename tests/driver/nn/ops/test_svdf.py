import numpy as np
import pytest

from driver.nn import ExecutionFailed, InvalidModel

LIMITS = {np.float32: {"rtol": 1e-5, "atol": 1e-5}, np.float16: {"rtol": 5e-3, "atol": 5e-3}}


def svdf(x, features, times, bias, state, rank):
    """The definition, one filter of one row at a time."""
    batch, (filters, memory) = len(x), times.shape
    window = state.reshape(batch, filters, memory).astype(np.float64)
    out = np.tile(np.zeros(filters // rank) if bias is None else bias.astype(np.float64), (batch, 1))
    for b in range(batch):
        for f in range(filters):
            window[b, f, -1] = sum(float(u) * float(v) for u, v in zip(x[b], features[f], strict=True))
            out[b, f // rank] += sum(float(u) * float(v) for u, v in zip(window[b, f], times[f], strict=True))
    shifted = np.concatenate([window[..., 1:], np.zeros((batch, filters, 1))], -1)
    return shifted.reshape(batch, -1), out


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("dtype", LIMITS)
def test_svdf(evaluate, dtype, rank, has_bias):
    """SVDF gives its memory, older by one, and the sum over memory and rank; the bias may be omitted."""
    rng = np.random.default_rng(1)
    shapes = (2, 3), (6, 3), (6, 4), (6 // rank,), (2, 24)
    x, features, times, bias, state = (rng.standard_normal(s).astype(dtype) * dtype(0.5) for s in shapes)
    bias = bias if has_bias else None
    memory, out = svdf(x, features, times, bias, state, rank)
    found = evaluate("SVDF", x, features, times, bias, state, rank, 0)
    np.testing.assert_allclose(found[0], memory, **LIMITS[dtype])
    np.testing.assert_allclose(found[1], out, **LIMITS[dtype])
    np.testing.assert_allclose(
        evaluate("SVDF", x, features, times, bias, state, rank, 1)[1], np.maximum(out, 0), **LIMITS[dtype]
    )


def test_svdf_of_arrays_out_of_order(evaluate):
    """Inputs may be views."""
    rng = np.random.default_rng(2)
    shapes = (3, 2), (3, 6), (4, 6), (3,), (24, 2)
    x, features, times, bias, state = (rng.standard_normal(s).astype(np.float32).T for s in shapes)
    for found, wanted in zip(
        evaluate("SVDF", x, features, times, bias, state, 2, 0), svdf(x, features, times, bias, state, 2), strict=True
    ):
        np.testing.assert_allclose(found, wanted, **LIMITS[np.float32])


def test_svdf_remembers_nothing_with_a_memory_of_one(evaluate):
    """The only column is the newest, and the next step starts from zero."""
    one = np.ones((1, 1), np.float32)
    memory, out = evaluate("SVDF", one, one, one, None, one * 7, 1, 0)
    assert (memory.tolist(), out.tolist()) == ([[0.0]], [[1.0]])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({5: 4}, "rank 4 has to divide"),
        ({5: 0}, "rank 0"),
        ({5: -1}, "rank -1"),
        ({6: 2}, "activation 2"),
        ({1: np.zeros((6, 2), np.float32)}, "input 1"),
        ({3: np.zeros(6, np.float32)}, "input 3"),
        ({4: np.zeros((2, 23), np.float32)}, "input 4"),
    ],
)
def test_svdf_refuses_bad_inputs(evaluate, change, reason):
    """Filters are units times rank, and everything else follows."""
    inputs = dict(enumerate([*(np.zeros(s, np.float32) for s in ((2, 3), (6, 3), (6, 4), (3,), (2, 24))), 2, 0]))
    with pytest.raises((ExecutionFailed, InvalidModel), match=reason):
        evaluate("SVDF", *(inputs | change).values())
