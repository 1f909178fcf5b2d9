"""Paths, JSON and answers: /v1/embeddings and /v1/models as OpenAI has them, /v1/rerank and /v2/rerank as Cohere does.

Needs no network.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from driver.gateways.embeddings.api_errors import ApiError, answer_of, refused
from driver.gateways.embeddings.api_requests import MOST_TEXT, embeddings_request, most_bytes, rank_request
from driver.gateways.embeddings.pooling import normalized
from driver.gateways.fair_turns import FairTurns
from driver.gateways.http_answer import BROWSER_FIELDS, FOR_NO_BROWSER, HttpAnswer
from driver.gateways.request_memory import SMALL, json_bytes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from driver.gateways.embeddings.api_requests import EmbeddingsRequest, RankRequest
    from driver.gateways.embeddings.text_models import TextModel
    from driver.gateways.embeddings.text_tokenizer import TextTokens
    from driver.gateways.http_requests import WholeRequest

    Floats = NDArray[np.float32]

MOST_TOKENS = 300_000
"""Of one request, after its texts are truncated, as OpenAI has it."""
_SHORT = 4096  # characters that are tokenized at once, in the event loop: a thread would take longer to begin
_THREADS = 2
_NUMBER = 24  # bytes of a number in JSON
_ESCAPED = 12  # bytes of a character in JSON
_FEW = 1 << 15  # numbers that are written at once, in the event loop


class VectorApi:
    """Answers requests by the models. Of one event loop."""

    def __init__(self, models: Mapping[str, TextModel], within: float) -> None:
        """`within`: seconds in which a request is answered."""
        self._models, self._within, self._began = models, within, int(time.time())
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="burst-tokenizer")
        self._turns = FairTurns(_THREADS)
        self._posts: dict[str, Callable[[WholeRequest, float], Awaitable[HttpAnswer]]] = {
            "/embeddings": self._embed,
            "/rerank": self._rank,
        }

    def close(self) -> None:
        """End the tokenizers' threads."""
        self._threads.shutdown(cancel_futures=True)

    async def answer(self, request: WholeRequest) -> HttpAnswer:
        """Answer a request; never raise but CancelledError."""
        if any(name in request.fields for name in BROWSER_FIELDS):
            return refused(403, FOR_NO_BROWSER)
        if request.fields.get("content-encoding", "identity") != "identity":
            return refused(415, "compressed bodies are not taken")
        deadline = time.monotonic() + self._within
        try:
            async with asyncio.timeout(self._within):
                return await self._routed(request, deadline)
        except TimeoutError:
            return refused(504, f"there was no answer within {self._within:g} s; send fewer texts at once")
        except Exception as error:  # noqa: BLE001 (told to the client)
            return answer_of(error)

    async def _routed(self, request: WholeRequest, deadline: float) -> HttpAnswer:
        path = unquote(request.path).rstrip("/")
        for version in ("/v1", "/v2"):
            path = path.removeprefix(version)
        if call := self._posts.get(path):
            _check_method(request, "POST")
            if len(request.body) > SMALL:
                request.claim.add(json_bytes(request.body))
            return await call(request, deadline)
        if path == "/health":
            return HttpAnswer.of({"status": "ok"})
        if path == "/models" or path.startswith("/models/"):
            _check_method(request, "GET")
            return self._told(path.removeprefix("/models").removeprefix("/"))
        raise ApiError(f"there is no {request.path!r:.200} here: POST /v1/embeddings or /v1/rerank", status=404)

    def _told(self, name: str) -> HttpAnswer:
        rows = [
            {"id": each, "object": "model", "created": self._began, "owned_by": "burst"}
            for each in ([self._model(name).name] if name else self._models)
        ]
        return HttpAnswer.of(rows[0] if name else {"object": "list", "data": rows})

    def _model(self, name: str) -> TextModel:
        if name not in self._models:
            told = ", ".join(self._models)
            raise ApiError(
                f"the model {name!r:.200} does not exist; there is {told}", "model", status=404, code="model_not_found"
            )
        return self._models[name]

    # ---- embeddings

    async def _embed(self, request: WholeRequest, deadline: float) -> HttpAnswer:
        asked = embeddings_request(request.body)
        model = self._model(asked.model)
        with model.counts.of_one():
            return await self._embedded(request, asked, model, deadline)

    async def _embedded(
        self, request: WholeRequest, asked: EmbeddingsRequest, model: TextModel, deadline: float
    ) -> HttpAnswer:
        if model.ranks:
            raise ApiError(f"the model {model.name!r} ranks texts, and embeds none: POST /v1/rerank", "model")
        wanted = asked.dimensions or model.dimensions
        if wanted > model.dimensions:
            raise ApiError(f"'dimensions' is {wanted}: this model has {model.dimensions}", "dimensions")
        tokens = await self._tokens_of(asked, model, request.claim.account)
        request.claim.add(len(tokens) * (4 * model.dimensions + 2 * _NUMBER * wanted))
        vectors = await model.vectors(tokens, deadline, request.claim.account)
        if wanted < model.dimensions:
            vectors = vectors[:, :wanted]
            vectors = normalized(vectors) if model.normalizes else np.ascontiguousarray(vectors)
        encode = partial(_embeddings, is_base64=asked.is_base64)
        count = model.counts.note(tokens)
        if vectors.size <= _FEW:
            return encode(vectors, model.name, count)
        answer: HttpAnswer = await self._in_thread(request.claim.account, encode, vectors, model.name, count)
        return answer

    async def _in_thread(self, account: Hashable, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do some work in one of the threads, when it is that account's turn."""
        async with self._turns.taken(account):
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def _tokens_of(self, asked: EmbeddingsRequest, model: TextModel, account: Hashable) -> list[TextTokens]:
        if asked.texts:
            return await self._tokenized(model.tokenizer.encode, asked.texts, account)
        for ids in asked.tokens:
            for each in (min(ids), max(ids)):
                if not 0 <= each < model.tokenizer.vocabulary:
                    raise ApiError(
                        f"'input' has the token {each}, and this model has {model.tokenizer.vocabulary}: token ids are "
                        "those of this model's own tokenizer; send texts (LangChain: check_embedding_ctx_length=False)",
                        "input",
                    )
        return _bounded([model.tokenizer.of_ids(ids) for ids in asked.tokens])

    async def _tokenized(
        self,
        encode: Callable[[Sequence[str]], list[TextTokens]],
        texts: Sequence[str],
        account: Hashable,
        query: str = "",
    ) -> list[TextTokens]:
        """Return the tokens of texts, some of them at a time: a tokenizer takes much memory, and lets none stop it.

        `account`: whose turn it is to be. `query`: becomes tokens with each of them.
        """
        parts = list(_parts(texts, most_bytes(query)))
        if len(parts) == 1 and sum(map(len, texts)) + len(query) * len(texts) <= _SHORT:
            return _bounded(encode(texts))
        found: list[TextTokens] = []
        for part in parts:
            found += await self._in_thread(account, encode, part)
            _bounded(found)
        return found

    # ---- ranks

    async def _rank(self, request: WholeRequest, deadline: float) -> HttpAnswer:
        asked = rank_request(request.body)
        model = self._model(asked.model)
        with model.counts.of_one():
            return await self._ranked(request, asked, model, deadline)

    async def _ranked(self, request: WholeRequest, asked: RankRequest, model: TextModel, deadline: float) -> HttpAnswer:
        if not model.ranks:
            raise ApiError(f"the model {model.name!r} embeds texts: serve a cross-encoder for /v1/rerank", "model")
        if asked.returns_documents:
            request.claim.add(2 * _ESCAPED * sum(map(len, asked.documents)))

        def encode(texts: Sequence[str]) -> list[TextTokens]:
            return model.tokenizer.encode_pairs(asked.query, texts)

        account = request.claim.account
        tokens = await self._tokenized(encode, asked.documents, account, asked.query)
        scores = await model.scores(tokens, deadline, account)
        best = np.argsort(-scores, kind="stable")[: asked.top_n]
        rows: list[dict[str, Any]] = [{"index": int(n), "relevance_score": float(scores[n])} for n in best]
        if asked.returns_documents:
            for row in rows:
                row["document"] = {"text": asked.documents[row["index"]]}
        count = model.counts.note(tokens)
        meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}, "tokens": {"input_tokens": count}}
        usage = {"prompt_tokens": count, "total_tokens": count}
        return HttpAnswer.of({"model": model.name, "results": rows, "meta": meta, "usage": usage})


def _check_method(request: WholeRequest, method: str) -> None:
    if request.method != method:
        raise ApiError(f"{request.path!r:.200} takes {method}", status=405)


def _parts(texts: Sequence[str], beside: int) -> Iterator[Sequence[str]]:
    """Yield the texts in parts, each of about as many bytes as one text may have. `beside`: bytes more of each."""
    begin, size = 0, 0
    for n, text in enumerate(texts):
        its = most_bytes(text) + beside
        if n > begin and size + its > MOST_TEXT:
            yield texts[begin:n]
            begin, size = n, 0
        size += its
    yield texts[begin:]


def _bounded(tokens: list[TextTokens]) -> list[TextTokens]:
    count = sum(len(each.ids) for each in tokens)
    if count > MOST_TOKENS:
        raise ApiError(f"{count} tokens: at most {MOST_TOKENS} in one request; send fewer texts at once", "input")
    return tokens


def _embeddings(vectors: Floats, name: str, count: int, *, is_base64: bool) -> HttpAnswer:
    """Return the answer, made row by row: lists of all numbers would take ten times its size."""
    usage = json.dumps({"prompt_tokens": count, "total_tokens": count})
    parts: list[Any] = [b'{"object": "list", "data": [']
    for n, vector in enumerate(vectors.astype("<f4", copy=False)):
        told = json.dumps(base64.b64encode(vector.tobytes()).decode() if is_base64 else vector.tolist())
        parts.append(f'{"," if n else ""}{{"object": "embedding", "index": {n}, "embedding": {told}}}'.encode())
    parts.append(f'], "model": {json.dumps(name)}, "usage": {usage}}}'.encode())
    return HttpAnswer(200, [("content-type", "application/json")], parts)
