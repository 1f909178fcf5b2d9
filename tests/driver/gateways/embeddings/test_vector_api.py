"""/v1/embeddings, /v1/rerank and /v1/models: every form of request, and values that numpy knows."""

import base64

import numpy as np
import pytest

pytest.importorskip("tokenizers")
from text_nets import CLS, LONGEST, SEP, SIZE, WORDS, ids_of, score_of, vector_of

TEXTS = ["w1 w2 w3", "w4", "W5 nonsense w6", *(" ".join(WORDS[4 : 4 + n]) for n in (40, 3, 17, 1, 29, 5, 11))] * 3
TOLERANCE = 1e-5


def close(found, expected):
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=TOLERANCE)


class TestEmbeddings:
    def test_a_text(self, asker):
        """Is pooled by the mean of its tokens, and has length 1."""
        (found,) = asker.vectors("w1 w2 w3")
        close(found, vector_of("w1 w2 w3"))

    def test_texts_of_many_lengths(self, asker):
        """They run together, sorted and padded, and each gets its own vector, in the order in which they came."""
        close(asker.vectors(TEXTS), [vector_of(text) for text in TEXTS])

    @pytest.mark.parametrize("is_whole", [False, True], ids=["plain", "with special tokens"])
    def test_token_ids(self, asker, is_whole):
        """In the place of texts stand their ids, with special tokens or without."""
        lists = [ids_of(text)[0][0 if is_whole else 1 : None if is_whole else -1].tolist() for text in TEXTS[:4]]
        close(asker.vectors(lists), [vector_of(text) for text in TEXTS[:4]])
        close(asker.vectors(lists[0]), [vector_of(TEXTS[0])])

    def test_long_texts(self, asker):
        """Are truncated to what the model reads, as text and as tokens, and so is their count."""
        long = " ".join(WORDS[4:] * 2)
        ids = [WORDS.index(word) for word in long.split()]
        close(asker.vectors([long]), [vector_of(long)])
        close(asker.vectors([ids]), [vector_of(long)])
        for given in ([long], [ids]):
            _, found = asker.ask("/v1/embeddings", {"model": "texts", "input": given})
            assert found["usage"] == {"prompt_tokens": LONGEST, "total_tokens": LONGEST}

    def test_the_form_of_the_answer(self, asker):
        """It is OpenAI's: a list with indices, the model's name, and tokens, special ones included."""
        status, found = asker.ask("/v1/embeddings", {"model": "texts", "input": ["w1 w2", "w3"], "user": "somebody"})
        assert status == 200
        assert {key: found[key] for key in ("object", "model", "usage")} == {
            "object": "list",
            "model": "texts",
            "usage": {"prompt_tokens": 7, "total_tokens": 7},
        }
        assert [(row["object"], row["index"]) for row in found["data"]] == [("embedding", 0), ("embedding", 1)]

    def test_base64(self, asker):
        """Little-endian float32, and the same values."""
        (told,) = asker.vectors("w1 w2 w3", encoding_format="base64")
        close(np.frombuffer(base64.b64decode(told), "<f4"), vector_of("w1 w2 w3"))

    def test_dimensions(self, asker):
        """The first numbers of a vector, which has length 1 again."""
        (found,) = asker.vectors("w1 w2 w3", dimensions=3)
        expected = vector_of("w1 w2 w3")[:3]
        close(found, expected / np.linalg.norm(expected))

    @pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings", "/v1/embeddings/", "/v1/embeddings?api=1"])
    def test_paths(self, asker, path):
        """The one that OpenAI has, without its version, with a slash or a query."""
        status, _ = asker.ask(path, {"model": "texts", "input": "w1"})
        assert status == 200


class TestRanks:
    DOCUMENTS = ("w7 w8", "w1 w2 w3", "w9", "w4 w5 w6 w1")

    def ranked(self, asker, **words):
        asked = {"model": "ranks", "query": "w1 w2", "documents": list(self.DOCUMENTS), **words}
        status, found = asker.ask("/v1/rerank", asked)
        assert status == 200, found
        return found

    def test_scores(self, asker):
        """All documents, the best first, with the model's logit as a number from 0 to 1."""
        rows = self.ranked(asker)["results"]
        expected = [score_of("w1 w2", text) for text in self.DOCUMENTS]
        assert [row["index"] for row in rows] == np.argsort(expected)[::-1].tolist()
        close([row["relevance_score"] for row in rows], sorted(expected, reverse=True))

    def test_top_n_and_documents(self, asker):
        """The best ones alone, with their texts; documents may be objects."""
        rows = self.ranked(
            asker, top_n=2, return_documents=True, documents=[{"text": text} for text in self.DOCUMENTS]
        )["results"]
        assert [row["document"]["text"] for row in rows] == [self.DOCUMENTS[row["index"]] for row in rows]
        assert len(rows) == 2

    def test_what_it_counts(self, asker):
        """The tokens of all pairs."""
        count = sum(len(ids_of("w1 w2", text)[0]) for text in self.DOCUMENTS)
        found = self.ranked(asker)
        assert found["usage"]["total_tokens"] == found["meta"]["tokens"]["input_tokens"] == count


class TestModels:
    def test_all_and_one(self, asker):
        """All that are served, and one by its name."""
        _, found = asker.ask("/v1/models")
        assert [row["id"] for row in found["data"]] == ["texts", "ranks"]
        assert asker.ask("/v1/models/ranks") == (200, found["data"][1])

    def test_health(self, asker):
        """Probes of containers get an answer."""
        assert asker.ask("/health") == (200, {"status": "ok"})


class TestWrong:
    """Each mistake is told in OpenAI's form, with the field that is wrong."""

    @pytest.mark.parametrize(
        ("changes", "param", "told"),
        [
            ({"input": ""}, "input", "from 1 to"),
            ({"input": []}, "input", "has 0 texts"),
            ({"input": [""]}, "input", "from 1 to"),
            ({"input": None}, "input", "must be a string"),
            ({"input": {"text": "w1"}}, "input", "must be a string"),
            ({"input": ["w1", 1]}, "input", "where a string"),
            ({"input": ["w1", [1]]}, "input", "where a string"),
            ({"input": [1, "w1"]}, "input", "something else"),
            ({"input": [[1], []]}, "input", "is empty"),
            ({"input": [[True]]}, "input", "something else"),
            ({"input": [1.5]}, "input", "where a string"),
            ({"input": [[CLS, len(WORDS)]]}, "input", "check_embedding_ctx_length"),
            ({"input": [-1]}, "input", "has the token -1"),
            ({"input": "\ud800"}, "input", "not valid Unicode"),
            ({"input": ["w1"] * 2049}, "input", "from 1 to 2048"),
            ({"input": "w" * (256 << 10) + "w"}, "input", "a text of 262145 bytes"),
            ({"dimensions": SIZE + 1}, "dimensions", "this model has 8"),
            ({"dimensions": 0}, "dimensions", "an integer from 1"),
            ({"dimensions": True}, "dimensions", "an integer from 1"),
            ({"encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
            ({"model": None}, "model", "must be a string"),
            ({"model": "ranks"}, "model", "/v1/rerank"),
        ],
    )
    def test_a_field_of_embeddings(self, asker, changes, param, told):
        """Is named in the error, with what it must be."""
        status, found = asker.ask("/v1/embeddings", {"model": "texts", "input": "w1", **changes})
        error = found["error"]
        assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
        assert told in error["message"]

    @pytest.mark.parametrize(
        ("changes", "param"),
        [
            ({"query": None}, "query"),
            ({"query": ""}, "query"),
            ({"documents": "w1"}, "documents"),
            ({"documents": []}, "documents"),
            ({"documents": [{"title": "w1"}]}, "documents"),
            ({"top_n": 0}, "top_n"),
            ({"model": "texts"}, "model"),
        ],
    )
    def test_a_field_of_ranks(self, asker, changes, param):
        """Is named in the error."""
        asked = {"model": "ranks", "query": "w1", "documents": ["w1"], **changes}
        status, found = asker.ask("/v1/rerank", asked)
        assert (status, found["error"]["param"]) == (400, param)

    def test_another_model(self, asker):
        """The names of those that are there are told."""
        status, found = asker.ask("/v1/embeddings", {"model": "text-embedding-3-small", "input": "w1"})
        assert (status, found["error"]["code"]) == (404, "model_not_found")
        assert "there is texts, ranks" in found["error"]["message"]
        assert asker.ask("/v1/models/none")[0] == 404

    @pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"w1"', b"\xff", b"[" * 100_000, b"1" * 5000])
    def test_no_object(self, asker, body):
        """What is no JSON object is refused, however deep."""
        assert asker.ask("/v1/embeddings", body)[0] == 400

    def test_paths_and_methods(self, asker):
        """Others are refused with the status that says why."""
        assert asker.ask("/v1/chat/completions", {})[0] == 404
        assert asker.ask("/v1/embeddings")[0] == 405
        assert asker.ask("/v1/models", {})[0] == 405
        fields = {"Content-Encoding": "gzip"}
        assert asker.ask("/v1/embeddings", b"\x1f\x8b", fields=fields.items())[0] == 415


def test_the_special_tokens_are_those_of_the_tokenizer():
    """What the expected values rely on."""
    assert ids_of("w1")[0].tolist() == [CLS, WORDS.index("w1"), SEP]
