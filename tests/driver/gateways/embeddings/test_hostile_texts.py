"""Clients that send too much, too slowly, or go away: others are answered, and memory is bounded before it is taken."""

import asyncio
import json
import os
import select
import signal
import socket
import threading
import time
from contextlib import AsyncExitStack, ExitStack, closing

import numpy as np
import pytest

pytest.importorskip("tokenizers")
from text_nets import WORDS, serving, vector_of, write_embedder, write_ranker
from waiting import PATIENCE, until

import driver
from driver.gateways.embeddings import vector_api
from driver.gateways.embeddings.api_errors import ApiError, answer_of
from driver.gateways.embeddings.api_requests import MOST_TEXT, embeddings_request, rank_request
from driver.gateways.embeddings.model_folder import read_folder
from driver.gateways.embeddings.process import VectorLimits
from driver.gateways.embeddings.text_models import TextModel
from driver.replicas import QueueFull

SMALL = VectorLimits(message=64 << 10, requests=4, connections=8, patience=2.0, memory=600 << 10)
MANY = [" ".join(WORDS[4 + n % 9 : 34 + n % 9]) for n in range(2048)]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A server that is modest."""
    place = tmp_path_factory.mktemp("small")
    with serving([write_embedder(place / "texts"), write_ranker(place / "ranks")], limits=SMALL) as asker:
        yield asker


def connected(asker):
    host, port = asker.address.removeprefix("http://").removesuffix("/v1").split(":")
    return socket.create_connection((host, int(port)), PATIENCE)


def packet(body, fields="", path="/v1/embeddings"):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{fields}Content-Length: {len(body)}\r\n\r\n".encode() + body


def is_served(asker):
    np.testing.assert_allclose(asker.vectors("w1 w2")[0], vector_of("w1 w2"), atol=1e-5)


class Held:
    """In the place of a model's runs: they begin, and end when they may."""

    def __init__(self, model, monkeypatch):
        self.begun = self.cancelled = 0
        self.may_end = threading.Event()
        self._vectors = model.vectors
        monkeypatch.setattr(model, "vectors", self.vectors)

    async def vectors(self, *given):
        self.begun += 1
        try:
            while not self.may_end.is_set():
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return await self._vectors(*given)


class TestSize:
    def test_a_body(self, small):
        """Is refused by its length, before it comes."""
        status, found = small.ask("/v1/embeddings", b" " * (SMALL.message + 1))
        assert (status, found["error"]["code"]) == (413, "request_too_large")

    @pytest.mark.parametrize("body", [b"," * 60_000, b"[" * 60_000, b'{"a":' * 10_000], ids=["list", "deep", "objects"])
    def test_what_would_become_large(self, small, body):
        """JSON whose values could take more memory than a machine may have is refused before it is decoded."""
        status, found = small.ask("/v1/embeddings", body)
        assert (status, found["error"]["type"]) == (429, "rate_limit_error")
        assert "send fewer texts" in found["error"]["message"] or "no room" in found["error"]["message"]
        is_served(small)

    def test_tokens(self, asker, monkeypatch):
        """Of one request there may be so many, counted while texts become tokens."""
        monkeypatch.setattr(vector_api, "MOST_TOKENS", 1000)
        for given in (MANY[:100], [[5] * 30] * 100):
            status, found = asker.ask("/v1/embeddings", {"model": "texts", "input": given})
            assert (status, found["error"]["param"]) == (400, "input")
            assert "at most 1000 in one request" in found["error"]["message"]

    def test_a_query(self, asker, monkeypatch):
        """Counts with each document that it stands before: so many pairs at a time become tokens."""
        asked = {"model": "ranks", "query": "w1 " * 2000, "documents": ["w2"] * 2048}
        status, found = asker.ask("/v1/rerank", asked)
        assert (status, found["error"]["param"]) == (400, "query")
        tokenizer, sizes = asker.server.models["ranks"].tokenizer, []
        encode_pairs = tokenizer.encode_pairs

        def noted(query, texts):
            sizes.append(sum(len(query) + len(text) for text in texts))
            return encode_pairs(query, texts)

        monkeypatch.setattr(tokenizer, "encode_pairs", noted)
        status, found = asker.ask("/v1/rerank", asked | {"documents": ["w2"] * 1000})
        assert (status, len(found["results"])) == (200, 1000)
        assert len(sizes) > 20
        assert max(sizes) <= MOST_TEXT

    def test_an_answer(self, small):
        """Its memory is counted, too: a short request can ask for a long answer."""
        status, found = small.ask("/v1/embeddings", {"model": "texts", "input": ["w1"] * 2048})
        assert (status, found["error"]["type"]) == (429, "rate_limit_error")
        is_served(small)

    def test_a_text_of_many_tokens(self, asker):
        """The longest text becomes the most tokens, of which the model's length is kept."""
        text = "w1 " * (MOST_TEXT // 3)
        (found,) = asker.vectors(text)
        np.testing.assert_allclose(found, vector_of(text), atol=1e-5)


class TestTime:
    def test_half_a_body(self, small):
        """A client that drips has one deadline for all of it."""
        with closing(connected(small)) as sock:
            sock.sendall(packet(b"{}")[:-1].replace(b"Content-Length: 2", b"Content-Length: 60000"))
            while not select.select([sock], [], [], SMALL.patience / 20)[0]:
                sock.sendall(b" ")
            assert b" 408 " in sock.recv(65536)
        is_served(small)

    def test_no_answer_in_time(self, tmp_path):
        """A request that takes too long is given up, and says so."""
        with serving([write_embedder(tmp_path / "texts")], limits=VectorLimits(within=1e-6)) as asker:
            status, found = asker.ask("/v1/embeddings", {"model": "texts", "input": ["w1"] * 2048})
            assert (status, found["error"]["code"]) == (504, "timeout")

    def test_a_full_queue(self):
        """Clients are told when to come back: OpenAI's do so by themselves."""
        answer = answer_of(QueueFull("full", 2.2))
        assert (answer.status, dict(answer.fields)["Retry-After"]) == (429, "3")


class TestGone:
    def test_a_client_that_goes_away(self, asker, monkeypatch):
        """Its request is cancelled, and its place is free again."""
        held = Held(asker.server.models["texts"], monkeypatch)
        with closing(connected(asker)) as sock:
            sock.sendall(packet({"model": "texts", "input": "w1"}))
            until(lambda: held.begun)
        until(lambda: held.cancelled)
        held.may_end.set()
        is_served(asker)

    def test_runs_that_have_not_begun(self, tmp_path):
        """Of a request that is cancelled, they never do."""

        async def cancel():
            async with AsyncExitStack() as stack:
                model = TextModel(read_folder(str(write_embedder(tmp_path / "texts"))), "onnxruntime")
                await model.open(stack)
                before = model.stats()["requests"]
                task = asyncio.create_task(model.vectors(model.tokenizer.encode(MANY), time.monotonic() + PATIENCE))
                while model.stats()["requests"] == before:
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                assert task.cancelled()
                return model.stats()["requests"] - before

        assert asyncio.run(cancel()) <= 2


class TestMany:
    def test_requests_of_a_machine(self, small, monkeypatch):
        """So many at once; one more is refused, and the others are answered."""
        held = Held(small.server.models["texts"], monkeypatch)
        with ExitStack() as stack:
            socks = [stack.enter_context(closing(connected(small))) for _ in range(SMALL.requests + 1)]
            for count, sock in enumerate(socks[:-1], 1):
                sock.sendall(packet({"model": "texts", "input": "w1"}))
                until(lambda count=count: held.begun == count)
            socks[-1].sendall(packet({"model": "texts", "input": "w1"}))
            assert b" 429 " in socks[-1].recv(65536)
            held.may_end.set()
            for sock in socks[:-1]:
                assert b" 200 " in sock.recv(65536)

    def test_connections_of_a_machine(self, small):
        """Silent ones make room for others."""
        with ExitStack() as stack:
            for _ in range(2 * SMALL.connections):
                stack.enter_context(closing(connected(small)))
            until(lambda: _is_answered(small))

    def test_many_clients(self, asker):
        """Texts of several requests run together, and each client gets its own vectors."""
        texts = [" ".join(WORDS[4 : 5 + n]) for n in range(32)]
        found = {}

        def ask(n):
            found[n] = [asker.vectors(texts[n])[0] for _ in range(5)]

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(texts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for n, text in enumerate(texts):
            np.testing.assert_allclose(found[n], [vector_of(text)] * 5, atol=1e-5)
        assert max(asker.server.models["texts"].stats()["batches"]) > 1


def _is_answered(asker):
    try:
        return asker.ask("/health")[0] == 200
    except OSError:
        return False


class TestBrowsers:
    @pytest.mark.parametrize(
        ("fields", "status"),
        [
            ({"Origin": "https://evil.example"}, 403),
            ({"Sec-Fetch-Site": "cross-site"}, 403),
            ({"Host": "evil.example"}, 403),
            ({"Host": "localhost:1"}, 200),
        ],
    )
    def test_a_page(self, asker, fields, status):
        """What a page sends, or asks under a name that was made to mean this machine, is refused."""
        asked = {"model": "texts", "input": "w1"}
        assert asker.ask("/v1/embeddings", asked, fields=fields.items())[0] == status


@pytest.mark.integration
def test_a_device_that_dies(asker):
    """Is started again for the next texts, and nobody is told."""
    is_served(asker)
    with driver.connect("onnxruntime") as device:
        os.kill(device.engine_pid, signal.SIGKILL)
    is_served(asker)


class TestMutants:
    BODIES = (
        {"model": "texts", "input": ["w1", "w2 w3"], "dimensions": 4, "encoding_format": "base64"},
        {"model": "texts", "input": [[4, 5], [6]], "user": "me"},
        {"model": "ranks", "query": "w1", "documents": ["w1", {"text": "w2"}], "top_n": 1, "return_documents": True},
    )
    PARTS = (b"null", b"[", b"]", b"{}", b'"', b",", b":", b"-1", b"1e999", b"NaN", b"true", b"\\ud800", b"\xff", b"\0")

    def mutant(self, random):
        """A body in which a piece is gone, doubled, or another."""
        body = json.dumps(self.BODIES[random.integers(len(self.BODIES))]).encode()
        for _ in range(random.integers(1, 4)):
            begin = int(random.integers(len(body)))
            end = begin + int(random.integers(8))
            part = (body[begin:end] * 2, b"", self.PARTS[random.integers(len(self.PARTS))])[random.integers(3)]
            body = body[:begin] + part + body[end:]
        return body

    @pytest.mark.parametrize("parse", [embeddings_request, rank_request])
    def test_ten_thousand(self, parse):
        """Each is a request with fields of the right types, or an error for its client."""
        random, requests = np.random.default_rng(11), 0
        for _ in range(10_000):
            try:
                request = parse(self.mutant(random))
            except ApiError:
                continue
            requests += 1
            texts = request.texts if parse is embeddings_request else [request.query, *request.documents]
            assert all(isinstance(text, str) and text for text in texts)
            if parse is embeddings_request:
                assert all(type(number) is int for ids in request.tokens for number in ids)
                assert bool(request.texts) != bool(request.tokens)
        assert requests > 100

    def test_over_http(self, asker):
        """The server answers each, and is there afterwards."""
        random = np.random.default_rng(12)
        for _ in range(300):
            path = "/v1/rerank" if random.integers(2) else "/v1/embeddings"
            status, found = asker.ask(path, self.mutant(random))
            assert status in (200, 400, 404), found
        is_served(asker)
