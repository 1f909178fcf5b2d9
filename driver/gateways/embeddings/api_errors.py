"""What a client is told when it does not get what it asked for, in OpenAI's form."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from driver.gateways.http_answer import HttpAnswer
from driver.gateways.refusal import refusal_of
from driver.replicas import QueueFull

if TYPE_CHECKING:
    from typing import NoReturn

_LOG = logging.getLogger("burst.embeddings")
_CODES = {
    408: "request_timeout",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    503: "overloaded",
    504: "timeout",
}


class ApiError(Exception):
    """A request that is not answered otherwise. param: the field of the request that is wrong. code: for programs."""

    def __init__(self, text: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(text)
        self.text, self.param, self.status, self.code = text, param, status, code


def wrong(param: str, text: str) -> NoReturn:
    """Raise the error of a field. `text`: what it must be."""
    raise ApiError(f"'{param}' {text}", param)


def refused(status: int, text: str, *, param: str | None = None, code: str | None = None) -> HttpAnswer:
    """Return the answer of an error."""
    kind = "invalid_request_error" if status < 429 else "rate_limit_error" if status == 429 else "server_error"
    code = code or _CODES.get(status)
    return HttpAnswer.of({"error": {"message": text, "type": kind, "param": param, "code": code}}, status)


def answer_of(error: Exception) -> HttpAnswer:
    """Return the answer of an error. Where no more requests are taken for now, it says how long to wait."""
    if isinstance(error, ApiError):
        return refused(error.status, error.text, param=error.param, code=error.code)
    refusal = refusal_of(error, _note)
    answer = refused(refusal.code.http, refusal.text)
    if isinstance(error, QueueFull):
        answer.fields.append(("Retry-After", str(math.ceil(error.retry_after))))
    return answer


def _note(error: Exception) -> None:
    _LOG.error("a request failed", exc_info=error)
