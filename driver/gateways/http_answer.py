"""An answer over HTTP, before a server sends it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

BROWSER_FIELDS = "origin", "sec-fetch-site"
"""Header fields by which the request of a page is known; programs send none of them."""
FOR_NO_BROWSER = "this address is not for browsers"


class HttpAnswer(NamedTuple):
    """Status, header fields, and parts of the body."""

    status: int
    fields: list[tuple[str, str]]
    body: list[Any]

    @classmethod
    def of(cls, said: object, status: int = 200) -> HttpAnswer:
        """Return it in JSON."""
        return cls(status, [("content-type", "application/json")], [json.dumps(said).encode()])
