import numpy as np
import pytest

from driver.nn import ExecutionFailed, InvalidModel, ModelBuilder
from driver.nn.ops import lsh

REFUSAL = (ExecutionFailed, InvalidModel)
FINGERPRINTS = {
    5: 0xE80C8CA378EECE50,
    7: 0x8AE794852C469C69,
    8: 0x6D38E5707A7CE7C5,
    11: 0x835A5A1043939749,
    12: 0x81EFEABC7A1487EB,
    16: 0x47F7EC137ECD5C9D,
    17: 0x74E09F1227F5BF6F,
    19: 0xF46BC940E1CDE4E6,
    20: 0x0044DD337B5D7B47,
    32: 0x8BB67D040AF7C1D8,
    33: 0xABB456A14BA39007,
    35: 0xEA9CB782C1AD326C,
    36: 0x994473EEAB0C2793,
    64: 0x561E4F513C2D96A6,
    65: 0xC450E1480B18F69A,
    67: 0xB242F37C2262D443,
    68: 0x5A77618774162CAE,
    128: 0x4C8BD17C34E867CA,
    129: 0xD72B07001DEFDB20,
    300: 0xCACB3528591C7DBF,
}
"""What FarmHash itself says of the bytes 33 + (i * i + length) % 90, by length."""


def message(length):
    return bytes(33 + (i * i + length) % 90 for i in range(length))


def fingerprint(data):
    """The fingerprint of one message."""
    seed, row = np.frombuffer(data[:4], "<u4"), np.frombuffer(data[4:], np.uint8)
    row = np.pad(row, (0, max(0, 8 - row.size)))
    return int(lsh.fingerprints(lsh.Messages(seed.astype(np.uint64)[:, None], row[None], len(data)))[0, 0])


@pytest.mark.parametrize("length", FINGERPRINTS)
def test_fingerprints_are_those_of_farmhash(length):
    """Messages of every length class get the fingerprint that FarmHash gives them."""
    assert fingerprint(message(length)) == FINGERPRINTS[length]


def scores(seeds, rows, weights):
    """The sums that decide the bits, message by message."""
    return [
        sum(
            float(weight) * float(np.int64(np.uint64(fingerprint(np.float32(seed).tobytes() + row.tobytes()))))
            for row, weight in zip(rows, weights, strict=True)
        )
        for seed in np.ravel(seeds)
    ]


@pytest.fixture
def tensors(counting):
    """tensors(shape, dtype of the input, dtype of the floats) -> hashes [3, 4], input, weights."""

    def tensors(shape, dtype, floats):
        random = np.random.default_rng(7)
        hashes, weights = random.normal(size=(3, 4)), random.normal(size=shape[0])
        return hashes.astype(floats), counting(shape, dtype), weights.astype(floats)

    return tensors


CASES = pytest.mark.parametrize(
    ("shape", "dtype", "floats"),
    [
        ((5,), "f", np.float32),
        ((5, 2), "h", np.float32),
        ((2, 3, 4), "i", np.float16),
        ((3, 1), "q", np.float32),
        ((3, 100), "f", np.float32),
    ],
)


@CASES
def test_lsh_projection_dense(evaluate, quantised, tensors, shape, dtype, floats):
    """Dense LSH_PROJECTION lists the signs of the weighted sums."""
    hashes, x, weights = tensors(shape, dtype, floats)
    y = evaluate("LSH_PROJECTION", hashes, quantised(x, 0.5, 3) if dtype == "q" else x, weights, 2)
    assert y.dtype == np.int32
    assert y.tolist() == [int(score > 0) for score in scores(hashes, x, weights)]


@CASES
@pytest.mark.parametrize("kind", [1, 3])
def test_lsh_projection_sparse(evaluate, quantised, tensors, *, shape, dtype, floats, kind):
    """Sparse LSH_PROJECTION makes a number of the bits of each hash; type 3 keeps the numbers of the hashes apart."""
    hashes, x, _ = tensors(shape, dtype, floats)
    y = evaluate("LSH_PROJECTION", hashes, quantised(x, 0.5, 3) if dtype == "q" else x, None, kind)
    bits = ["".join(str(int(score > 0)) for score in scores(row, x, np.ones(len(x)))) for row in hashes]
    assert y.tolist() == [int(b, 2) + (16 * k if kind == 3 else 0) for k, b in enumerate(bits)]


@pytest.mark.parametrize("kind", [1, 3])
def test_all_32_bits(evaluate, kind):
    """A hash of 32 bits fills the number, its first bit the sign."""
    hashes, x = np.random.default_rng(3).normal(size=(2, 32)).astype(np.float32), np.ones((2, 3), np.float32)
    y = evaluate("LSH_PROJECTION", hashes, x, None, kind)
    for number, row in zip(y.view(np.uint32), hashes, strict=True):
        assert f"{number:032b}" == "".join(str(int(score > 0)) for score in scores(row, x, [1, 1]))


def test_more_messages_than_fit_one_strip(evaluate, monkeypatch):
    """Hashing strip by strip comes to the same bits."""
    random = np.random.default_rng(5)
    hashes, x = random.normal(size=(9, 8)).astype(np.float32), random.normal(size=(50, 3)).astype(np.float32)
    weights = random.normal(size=50).astype(np.float32)
    whole = evaluate("LSH_PROJECTION", hashes, x, weights, 2)
    for strip in (7, 100, 130):
        monkeypatch.setattr(lsh, "STRIP", strip)
        np.testing.assert_array_equal(evaluate("LSH_PROJECTION", hashes, x, weights, 2), whole)


def test_lsh_projection_takes_an_input_of_open_dimensions(run_model):
    """The number of rows may be left to the run."""
    m = ModelBuilder()
    m.output(m.operation("LSH_PROJECTION", np.ones((2, 3), np.float32), m.input("float32", (0, 2)), None, 3))
    (y,) = run_model(m.build(), np.ones((4, 2), np.float32))
    assert y.shape == (2,)


@pytest.mark.parametrize(
    ("bits", "weights", "kind"), [(4, None, 2), (4, 5, 1), (4, 5, 3), (4, 4, 2), (33, None, 3), (4, None, 0), (4, 5, 4)]
)
def test_lsh_projection_refuses(evaluate, bits, weights, kind):
    """Weights where they do not belong, or as many as there are no rows, too many bits, and unknown types fail."""
    given = None if weights is None else np.ones(weights, np.float32)
    with pytest.raises(REFUSAL, match="LSH_PROJECTION"):
        evaluate("LSH_PROJECTION", np.ones((2, bits), np.float32), np.ones((5, 2), np.float32), given, kind)
