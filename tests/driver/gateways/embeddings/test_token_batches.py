"""Texts of like length run together, in few runs with little padding."""

import numpy as np
import onnx
import pytest

pytest.importorskip("tokenizers")
from text_nets import LONGEST, serving, vector_of, write_embedder

from driver.gateways.embeddings.pooling import POOLINGS, pooled
from driver.gateways.embeddings.text_tokenizer import TextTokens
from driver.gateways.embeddings.token_batches import MOST_ROWS, arrays, batched, padded_length

MOST = 512


@pytest.fixture(params=range(4))
def lengths(request):
    random = np.random.default_rng(request.param)
    return [*random.integers(1, MOST + 1, 100).tolist(), *random.integers(5, 20, 100).tolist()]


def test_each_text_is_in_one_run(lengths):
    """None is lost or run twice, and each fits."""
    runs = batched(lengths, MOST)
    assert sorted(text for run in runs for text in run.texts) == list(range(len(lengths)))
    for run in runs:
        assert max(lengths[text] for text in run.texts) <= run.length <= MOST
        assert len(run.texts) <= MOST_ROWS


def test_padding_and_runs(lengths):
    """Less than a fifth is padding, and a run has more than six texts on average."""
    runs = batched(lengths, MOST)
    assert sum(run.length * len(run.texts) for run in runs) < 1.25 * sum(lengths)
    assert len(runs) < len(lengths) / 6


def test_there_are_few_lengths():
    """So texts of several requests have the same one, and can run together."""
    padded = [padded_length(length, MOST) for length in range(1, MOST + 1)]
    assert padded == sorted(padded)
    assert len(set(padded)) < 40
    assert all(length <= its < length + max(8, length / 4) for length, its in enumerate(padded, 1))


def test_the_longest_is_no_multiple():
    """No text is padded beyond the model's length."""
    assert padded_length(99, 100) == padded_length(100, 100) == 100


def test_arrays():
    """What pads is the tokenizer's own token: models that count positions by it rely on that."""
    rows = [TextTokens(np.array([5, 6, 7]), np.array([0, 0, 1])), TextTokens(np.array([8]), np.array([0]))]
    found = arrays(rows, 4, pad=1)
    assert found["input_ids"].tolist() == [[5, 6, 7, 1], [8, 1, 1, 1]]
    assert found["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert found["token_type_ids"].tolist() == [[0, 0, 1, 0], [0, 0, 0, 0]]
    assert found["position_ids"].tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("kind", POOLINGS)
def test_padding_does_not_count(kind):
    """A text that is padded gets the vector that it gets alone, which is what the name of the pooling says."""
    tokens = np.random.default_rng(3).standard_normal((1, 3, 4)).astype(np.float32)
    (alone,) = pooled(kind, tokens, np.ones((1, 3), np.int64))
    padded = np.concatenate([tokens, np.full((1, 2, 4), 9, np.float32)], 1)
    np.testing.assert_allclose(pooled(kind, padded, np.array([[1, 1, 1, 0, 0]]))[0], alone, rtol=1e-6)
    (text,) = tokens
    expected = {
        "cls": text[0],
        "last": text[-1],
        "max": text.max(0),
        "mean": text.mean(0),
        "mean_sqrt": text.sum(0) / np.sqrt(3),
    }
    np.testing.assert_allclose(alone, expected[kind], rtol=1e-6)


def test_weights_beside_the_file(tmp_path):
    """As large models have them: model.onnx_data."""
    folder = write_embedder(tmp_path / "texts")
    model = onnx.load(folder / "model.onnx")
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="model.onnx_data", size_threshold=64)
    with serving([folder]) as asker:
        np.testing.assert_allclose(asker.vectors("w1 w2")[0], vector_of("w1 w2"), atol=1e-5)


@pytest.mark.parametrize("sizes", [{"rows": 1}, {"length": LONGEST}, {"rows": 1, "length": LONGEST}], ids=str)
def test_a_model_of_fixed_sizes(tmp_path, sizes):
    """Gets one text at a time, or texts padded to its length, and gives the same vectors."""
    texts = ["w1 w2 w3", "w4", "w5 w6"]
    with serving([write_embedder(tmp_path / "texts", **sizes)]) as asker:
        np.testing.assert_allclose(asker.vectors(texts), [vector_of(text) for text in texts], atol=1e-5)
