import numpy as np
import pytest

from driver.nn import ExecutionFailed, Interpreter, InvalidModel, ModelBuilder

REFUSAL = (ExecutionFailed, InvalidModel)
HUGE = 2**31 - 1


@pytest.mark.parametrize("dtype", "fhqsi")
@pytest.mark.parametrize(("shape", "k"), [((7,), 1), ((7,), 7), ((3, 9), 4), ((2, 3, 20), 19), ((2, 2, 1), 1)])
def test_topk_v2(move, counting, dtype, shape, k):
    """TOPK_V2 gives the largest of the last axis, largest first, of equals the later one first."""
    x = np.random.default_rng(1).integers(-6 if dtype != "q" else 0, 7, shape).astype(counting((1,), dtype).dtype)
    values, indices = move("TOPK_V2", x, k)
    assert (values.dtype, indices.dtype) == (x.dtype, np.int32)
    assert values.shape == indices.shape == (*shape[:-1], k)
    for row in np.ndindex(shape[:-1]):
        best = sorted(((v, i) for i, v in enumerate(x[row].tolist())), reverse=True)[:k]
        assert [*zip(values[row].tolist(), indices[row].tolist(), strict=True)] == best


EXTREMES = {
    np.float32: [0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 3e38, -3e38, 1.0000001, 1.0],
    np.float16: [0.0, -0.0, np.inf, -np.inf, 6e-8, -6e-8, 65504, -65504, 1.001, 1.0],
    np.int32: [0, -1, HUGE, -HUGE - 1, 1, -HUGE, HUGE - 1],
}


@pytest.mark.parametrize("dtype", EXTREMES)
def test_topk_v2_of_extremes(evaluate, dtype):
    """Infinities, the smallest numbers and both zeros stand in their order, the zeros as equals."""
    x = np.array(EXTREMES[dtype], dtype)
    values, indices = evaluate("TOPK_V2", x, len(x))
    order = sorted(range(len(x)), key=lambda i: (float(x[i]), i), reverse=True)
    assert indices.tolist() == order
    assert values.tobytes() == x[order].tobytes()


@pytest.mark.parametrize("k", [0, -1, 4, HUGE])
def test_topk_v2_refuses(evaluate, k):
    """A k below 1, or above the last dimension, fails."""
    with pytest.raises(REFUSAL, match="TOPK_V2"):
        evaluate("TOPK_V2", np.ones((5, 3), np.float32), k)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_random_multinomial(evaluate, dtype):
    """RANDOM_MULTINOMIAL draws classes as often as their probabilities say; those of probability 0 never."""
    shares = np.array([[1, 2, 0, 3, 4], [0, 5, 0, 5, 0], [0, 0, 0, 0, 1]]) / [[10], [10], [1]]
    with np.errstate(divide="ignore"):
        logits = (np.log(shares) + np.array([[0], [9], [-9]])).astype(dtype)
    samples = 5000
    y = evaluate("RANDOM_MULTINOMIAL", logits, samples, [3, 4])
    assert (y.dtype, y.shape) == (np.int32, (3, samples))
    for row, share in zip(y, shares, strict=True):
        counts = np.bincount(row, minlength=5)
        assert (counts[share == 0] == 0).all()
        np.testing.assert_allclose(counts / samples, share, atol=0.03)


def draws(seeds, runs=2, shape=(2, 4), samples=50):
    m = ModelBuilder()
    m.output(m.operation("RANDOM_MULTINOMIAL", m.input("float32", shape), samples, m.input("int32", (2,))))
    model = Interpreter(m.build())
    assert model.is_static, "seeds are data"
    bound = model.bind([np.zeros(shape, np.float32), np.array(seeds, np.int32)])
    for _ in range(runs):
        bound.run()
        yield bound.results[0].data.tolist()


def test_seeds_decide():
    """The same seeds draw the same samples, others draw others, and zeros draw new ones in every run."""
    first, again = draws([5, -6])
    assert first == again
    assert first[0] != first[1], "rows are drawn independently"
    assert next(draws([5, 7])) != first
    assert next(draws([-6, 5])) != first
    new, newer = draws([0, 0])
    assert new != newer


def test_a_large_batch():
    """Every row draws among its own classes, however many rows there are."""
    (y,) = draws([1, 2], runs=1, shape=(5000, 3), samples=30)
    counts = np.bincount(np.ravel(y), minlength=3)
    assert counts.size == 3
    np.testing.assert_allclose(counts / 150_000, 1 / 3, atol=0.01)


@pytest.mark.parametrize(
    ("logits", "samples", "seeds"),
    [
        ([[0.0, 1.0]], 0, [1, 2]),
        ([[0.0, 1.0]], -1, [1, 2]),
        ([[0.0, 1.0]], 5, [1]),
        ([[0.0, 1.0]], 5, [[1, 2]]),
        ([[0.0, 1.0], [-np.inf, np.nan]], 5, [1, 2]),
        ([0.0, 1.0], 5, [1, 2]),
        ([[0.0, 1.0]] * 3, HUGE, [1, 2]),
    ],
)
def test_random_multinomial_refuses(evaluate, logits, samples, seeds):
    """Numbers of samples below 1 or enormous, other than two seeds, and rows without any finite logit fail."""
    with pytest.raises(REFUSAL, match=r"RANDOM_MULTINOMIAL|dimensions"):
        evaluate("RANDOM_MULTINOMIAL", np.array(logits, np.float32), samples, seeds)
