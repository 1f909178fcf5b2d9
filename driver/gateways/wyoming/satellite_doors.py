"""Checks wake words for Home Assistant: the mistakes that `burst serve --wyoming` is usually run with."""

from __future__ import annotations

import json
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driver.finding import Finding, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path("/")  #: of the file system
PORT = 10400
"""Where Home Assistant expects wake words."""

_WITHIN = 2.0  # seconds for an answer
_MOST = 1 << 20  # bytes of one
_LISTENS = "0A"
_LOOPBACK = {"127.0.0.1", "::1"}
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 (where to reach what listens everywhere)


def wake_words() -> Iterator[Finding]:
    """Report what converts sound, who listens at the port, for which machines, and whether it answers."""
    if find_spec("wyoming") is None:
        return
    if find_spec("audioop") is None:
        why = "sound of another form than 16 kHz, 16 bit, mono is converted by Python alone, 50 times as slowly"
        yield Finding(
            "wake words, audioop", "note", "missing", why, remedy="pip install audioop-lts, or send such sound"
        )
    hosts = _listeners()
    subject = f"wake words, port {PORT}"
    if not hosts:
        yield Finding(subject, "ok", "no process listens")
        return
    if hosts <= _LOOPBACK:
        why = "Home Assistant on another machine, or in a container with a network of its own, cannot connect"
        yield Finding(subject, "note", "only this machine may connect", why, remedy="--wyoming tcp://0.0.0.0:10400")
    else:
        yield Finding(subject, "ok", "other machines may connect")
    yield _described(min(hosts, key=lambda host: (host not in _ANY, host)))


def _listeners() -> set[str]:
    """Return the addresses at which a process listens at the port."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in text_of(ROOT / "proc/net" / name).splitlines()[1:]:
            fields = line.split()
            host, _, port = fields[1].partition(":")
            if fields[3] == _LISTENS and int(port, 16) == PORT:
                found.add(_address(host))
    return found


def _address(host: str) -> str:
    """Return the address in the kernel's words of four bytes, each of which is a number of this machine."""
    words = [int(host[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(host), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))


def _described(host: str) -> Finding:
    """Return what it says of itself."""
    subject, why = "wake words, answer", "Home Assistant finds no wake word there"
    remedy = f"another program may have the port: ss -ltnp 'sport = :{PORT}'"
    try:
        kind, data = _asked(_ANY.get(host, host))
        if kind == "error":
            why = "Home Assistant is told the same"
            return Finding(
                subject, "warning", repr(data["text"])[1:121], why, remedy="--satellites; burst_satellites of --metrics"
            )
        names = [model["name"] for program in data["wake"] for model in program["models"]]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return Finding(
            subject, "warning", f"no answer of a wake word server ({type(error).__name__})", why, remedy=remedy
        )
    return Finding(subject, "ok", ", ".join(map(_shown, names)) or "it has no wake words")


def _asked(host: str) -> tuple[str, Any]:
    """Type and data of the answer."""
    with socket.create_connection((host, PORT), _WITHIN) as client:
        client.settimeout(_WITHIN)
        client.sendall(b'{"type": "describe"}\n')
        with client.makefile("rb") as answer:
            head = json.loads(answer.readline(_MOST))
            data = head.get("data") or json.loads(answer.read(min(head["data_length"], _MOST)))
    return head["type"], data


def _shown(name: Any) -> str:
    return repr(name)[1:41]
