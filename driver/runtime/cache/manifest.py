"""The files of the cache folder: how they are named, and the manifest that says which of them belong together.

An entry's names begin with 64 letters that its token gives. Then follows, as in Android's runtime, '1' for a model file
or '2' for a data file, and its index; and here also `.<generation>`, so that a set of several files is replaced at
once: whichever generation the manifest names is the entry, and all others are leftovers.

::

    AB…1<index>.<generation>   AB…2<index>.<generation>   what a device wrote
    AB….json                   the manifest; AB….json.<generation> until it is renamed into place
    AB….hits                   a byte for each use, and the time of the last one
    AB….lock                   held by the process that compiles or removes the entry

A manifest is read as if any process had written it: it can choose among names of this form, and nothing else.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field

from fmq.printable import printable

TOKEN_BYTES = 32
MOST_FILES = 32  # of each kind, as in the HAL
MOST_MANIFEST_BYTES = 1 << 16
_MOST_TEXT = 300
_LATEST = 1e11  # seconds: the year 5138
_GENERATION = re.compile(r"[0-9a-f]{16}")
_NAME = re.compile(
    rf"([A-P]{{64}})(\.json|\.lock|\.hits|\.json\.{_GENERATION.pattern}|[12]\d{{1,2}}\.{_GENERATION.pattern})", re.ASCII
)


def stem_of(token: bytes) -> str:
    """Return two letters for each byte: the low half's, then the high half's. Raise ValueError."""
    if len(token) != TOKEN_BYTES:
        raise ValueError(f"token={token!r}: {len(token)} bytes; a token has {TOKEN_BYTES}")
    return "".join(chr(ord("A") + half) for byte in token for half in (byte & 15, byte >> 4))


def parsed_name(name: str) -> tuple[bytes, str] | None:
    """Return the token and what follows its letters; None when a file is not of the cache."""
    if not (match := _NAME.fullmatch(name)):
        return None
    halves = [ord(letter) - ord("A") for letter in match[1]]
    return bytes(low | high << 4 for low, high in zip(halves[::2], halves[1::2], strict=True)), match[2]


@dataclass(frozen=True)
class Counts:
    """The number of files of each kind that a device wants. Raises ValueError."""

    model: int
    data: int

    def __post_init__(self) -> None:
        for name, count in vars(self).items():
            if type(count) is not int or not 0 <= count <= MOST_FILES:
                raise ValueError(f"{name}={count!r}: from 0 to {MOST_FILES} files")


@dataclass(frozen=True)
class About:
    """The facts that `burst cache list` tells of an entry: the model in words, the device and its version, when it was
    made.
    """

    model: str
    device: str
    version: str
    made: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Manifest:
    """A list of the files that are the entry."""

    generation: str
    counts: Counts
    about: About

    @property
    def model_files(self) -> list[str]:
        """The ends of the model files' names, after the letters."""
        return [f"1{index}.{self.generation}" for index in range(self.counts.model)]

    @property
    def data_files(self) -> list[str]:
        """The ends of the data files' names, after the letters."""
        return [f"2{index}.{self.generation}" for index in range(self.counts.data)]

    def as_bytes(self) -> bytes:
        """Return the bytes of the manifest's file."""
        texts = {name: _text(getattr(self.about, name)) for name in ("model", "device", "version")}
        files = {"model_files": self.counts.model, "data_files": self.counts.data}
        return json.dumps({"generation": self.generation, **files, **texts, "made": self.about.made}, indent=1).encode()


def parsed_manifest(raw: bytes) -> Manifest | None:
    """Return the manifest; None when it is damaged in any way."""
    try:
        found = json.loads(raw)
        counts = Counts(found["model_files"], found["data_files"])
        model, device, version = (_text(found[name]) for name in ("model", "device", "version"))
        generation, made = found["generation"], found["made"]
        if not _GENERATION.fullmatch(generation) or type(made) not in {int, float} or not 0 <= made <= _LATEST:
            return None
        return Manifest(generation, counts, About(model, device, version, float(made)))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _text(text: str) -> str:
    """Return one line of at most so much: a device's words may hold anything."""
    if not isinstance(text, str):
        raise TypeError(f"{text!r}: the manifest needs text here")
    return printable(text[:_MOST_TEXT])
