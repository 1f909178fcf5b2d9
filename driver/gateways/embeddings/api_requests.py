"""What clients ask for, checked: requests for embeddings as OpenAI has them, and for ranks as Cohere has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from driver.gateways.embeddings.api_errors import ApiError, wrong
from driver.gateways.request_memory import json_object

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MOST_TEXTS = 2048
"""Of one request, as OpenAI has it."""
MOST_TEXT = 256 << 10
"""Bytes of one text in UTF-8. A tokenizer takes 250 times as much memory for it, until it is truncated."""


MOST_PAIRED = 8 << 20
"""Bytes of a query in all its pairs: it becomes tokens with each document."""


def most_bytes(text: str) -> int:
    """Return how many bytes a text has at most in UTF-8."""
    return len(text) if text.isascii() else 4 * len(text)


class EmbeddingsRequest(NamedTuple):
    """texts, or their token ids by the model's own tokenizer: one of the two is empty. dimensions: None: all."""

    model: str
    texts: Sequence[str]
    tokens: Sequence[Sequence[int]]
    dimensions: int | None = None
    is_base64: bool = False


class RankRequest(NamedTuple):
    """top_n: how many documents are told, the best first; None: all."""

    model: str
    query: str
    documents: Sequence[str]
    top_n: int | None = None
    returns_documents: bool = False


def embeddings_request(body: bytes) -> EmbeddingsRequest:
    """Parse a body. Raise ApiError."""
    said = _object(body)
    encoding, dimensions = said.get("encoding_format"), said.get("dimensions")
    if encoding not in (None, "float", "base64"):
        wrong("encoding_format", f"is {encoding!r:.40}: 'float' or 'base64'")
    if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
        wrong("dimensions", f"is {dimensions!r:.40}: an integer from 1")
    texts, tokens = _inputs(said.get("input"))
    return EmbeddingsRequest(_name(said), texts, tokens, dimensions, is_base64=encoding == "base64")


def rank_request(body: bytes) -> RankRequest:
    """Parse a body. Raise ApiError."""
    said = _object(body)
    query, documents, top_n = said.get("query"), said.get("documents"), said.get("top_n")
    if not isinstance(query, str):
        wrong("query", "must be a string")
    if not isinstance(documents, list):
        wrong("documents", "must be a list of strings, or of objects with a 'text'")
    _check_count("documents", documents)
    documents = [each.get("text") if isinstance(each, dict) else each for each in documents]
    if top_n is not None and (type(top_n) is not int or top_n < 1):
        wrong("top_n", f"is {top_n!r:.40}: an integer from 1")
    if most_bytes(_text("query", query)) * len(documents) > MOST_PAIRED:
        wrong("query", f"is too long for {len(documents)} documents; send fewer at once")
    texts, returns = [_text("documents", each) for each in documents], said.get("return_documents") is True
    return RankRequest(_name(said), query, texts, top_n, returns_documents=returns)


def _object(body: bytes) -> dict[str, Any]:
    try:
        return json_object(body)
    except ValueError as error:
        raise ApiError(str(error)) from None


def _name(said: Mapping[str, Any]) -> str:
    name = said.get("model")
    if not isinstance(name, str):
        wrong("model", "must be a string")
    return name


def _inputs(given: Any) -> tuple[list[str], list[list[int]]]:
    """Return the texts, and the token ids of others: one of the two lists is empty."""
    if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int):
        given = [given]
    if not isinstance(given, list):
        wrong("input", "must be a string, a list of strings, a list of token ids, or a list of such lists")
    _check_count("input", given)
    if isinstance(given[0], list):
        return [], [_tokens(each) for each in given]
    return [_text("input", each) for each in given], []


def _check_count(param: str, given: list[Any]) -> None:
    if not 1 <= len(given) <= MOST_TEXTS:
        wrong(param, f"has {len(given)} texts: from 1 to {MOST_TEXTS}")


def _text(param: str, given: Any) -> str:
    if not isinstance(given, str):
        wrong(param, f"has {given!r:.40} where a string is expected")
    try:
        size = len(given.encode())
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can say
        wrong(param, "has a text that is not valid Unicode")
    if not 1 <= size <= MOST_TEXT:
        wrong(param, f"has a text of {size} bytes: from 1 to {MOST_TEXT}")
    return given


def _tokens(given: Any) -> list[int]:
    if not isinstance(given, list) or not given or not all(type(each) is int for each in given):
        wrong("input", "has a list of token ids that is empty, or has something else in it")
    return given
