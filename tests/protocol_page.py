"""docs/protocol.md in parts, for its tests: prose, hex blocks, messages, tables; its example as the codec has it."""

import itertools
import json
import re
from pathlib import Path

from burst import ErrorStatus, OutputShape, RequestArgument, Timing
from burst.channel import pack
from burst.datum import DATUM
from burst.wire import RequestPacket, ResultPacket

PAGE = (Path(__file__).parents[1] / "docs/protocol.md").read_text()
PROSE = " ".join(PAGE.split())
X, Y, SUM = RequestArgument(length=16), RequestArgument(offset=64, length=16), RequestArgument(offset=128, length=16)
EXAMPLE = RequestPacket((X, Y), (SUM,), (0,), measure=False, id=1)
ANSWER = ResultPacket(ErrorStatus.NONE, (OutputShape((1, 4)),), Timing(), 1)


def block(name):
    """The lines of a fenced block."""
    (found,) = re.findall(rf"^```{name}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return found.splitlines()


def raw(lines):
    """The bytes of hex lines, without what they say about themselves."""
    return bytes.fromhex("".join(line.partition("#")[0] for line in lines))


def said(lines):
    """The JSON values that the comments of hex lines spell."""
    text, values = "".join(line.partition("#")[2] for line in lines).strip(), []
    while text:
        value, end = json.JSONDecoder().raw_decode(text)
        values.append(value)
        text = text[end:].strip()
    return values


def messages(name="messages"):
    """The messages that a block spells, as bytes."""
    return [pack(value) for value in said(block(f"hex {name}"))]


def table(head):
    """The rows below a table's head, as lists of cells."""
    lines = [line.strip() for line in PAGE.splitlines()]
    (at,) = [n for n, line in enumerate(lines) if line.startswith(f"| {head} |")]
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[at + 2 :])
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


def camel(name):
    """A NAME_IN_CAPITALS as the page writes it."""
    first, *more = name.lower().split("_")
    return first + "".join(word.capitalize() for word in more)


def first(packet, elements, at):
    """The packet cut to its first elements, whose number stands at that byte."""
    shorter = bytearray(packet[: elements * DATUM])
    shorter[at] = elements
    return bytes(shorter)
