"""What goes wrong with a library, and UnsupportedError for what it cannot compute.

DriverError
+-- LibraryMissing    (ImportError)
+-- LibraryFailed
"""

from __future__ import annotations

import logging
import re

from driver.errors import DriverError

_log = logging.getLogger(__name__)
_SOURCE = r"[\w./+-]+\.(?:cc|cpp|cxx|cu|h|hpp):\d+"
_PLACES = re.compile(
    rf"\[ONNXRuntimeError\] : \d+ : \w+ : "
    rf"|Exception from {_SOURCE}:"
    rf"|Check '[^\n]*' failed at {_SOURCE}:"
    rf"|/{_SOURCE} [^()\n]*\((?:[^()\n]|\([^()\n]*\))*\)(?: const)?(?= )"  # and the function's declaration
    rf"|\b[\w-]+\.(?:cc|cpp|h):\d+ (?:operator\(\)|\w+)(?= )"  # and the function's name
    rf"|{_SOURCE}:?"
)
"""What a library's message says of its own sources."""
_LONGEST = 360
"""Characters of a library's message that are told: three lines."""


class LibraryMissing(DriverError, ImportError):
    """The library is not installed, has another version than the device needs, or lacks a part. Nothing was loaded."""


class LibraryFailed(DriverError):
    """A call of the library failed, or computed something wrong. What it was to make was not made."""

    status = 0  #: the library's number for what went wrong; 0 where there is none


def in_words(message: object) -> str:
    """Return a library's message for people: in one line, of bounded length, without places in its sources.

    What is left out is in the log.
    """
    full = text_of(message)
    text = " ".join(_PLACES.sub(" ", full).replace("Node number", "; Node number").replace(" ; ", "; ").split())
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
    if text != full:
        _log.info("in the library's words: %s", full)
    return text


def text_of(message: object) -> str:
    """Return a library's message as text, also where it quotes bytes of a model that are no UTF-8."""
    if isinstance(message, UnicodeDecodeError):  # which is raised in place of the error that has the message
        return message.object.decode(errors="replace")
    return str(message)


class UnsupportedError(Exception):
    """The library cannot compute this operation exactly. Never leaves the device."""


def require(condition: object, reason: str) -> None:
    """Raise UnsupportedError unless `condition` holds."""
    if not condition:
        raise UnsupportedError(reason)
