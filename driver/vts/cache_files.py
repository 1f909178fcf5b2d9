"""Cache files for the tests of caching: their content, ways to damage them, and wrong descriptors to send instead."""

from __future__ import annotations

import os
import socket
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from burst import ErrorStatus, StatusError
from driver.interface import CacheFiles
from driver.options import Cache
from driver.vts.burst import plain
from driver.vts.kit import Failed, check, skip
from driver.vts.operations import prepared
from driver.vts.samples import sample
from fmq.closing import Closing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from driver.vts.cases import Case
    from driver.vts.target import Target

    Damage = Callable[[np.random.Generator, bytes], bytes]

TOKEN_BYTES = 32
_JUNK = b"what was there before"


class CacheFileSet(Closing):
    """The files of one compilation, model files first, as memfds; and a token."""

    def __init__(self, counts: CacheFiles, token: bytes | None = None) -> None:
        self.counts, self.token = counts, token or os.urandom(TOKEN_BYTES)
        self.fds = [os.memfd_create("burst-vts-cache", os.MFD_CLOEXEC) for _ in range(sum(counts))]

    def cache(self, fds: Sequence[int] | None = None, token: bytes | None = None) -> Cache:
        """Return the argument for the device; optionally with other descriptors or another token."""
        found = self.fds if fds is None else fds
        files = list(found[: self.counts.model]), list(found[self.counts.model :])
        return Cache(self.token if token is None else token, *files)

    def is_code(self, number: int) -> bool:
        """Return True if a change of this file must prevent the restoring: it is a model file."""
        return number < self.counts.model

    def read(self) -> list[bytes]:
        """Return the content of each file."""
        return [os.pread(fd, os.fstat(fd).st_size, 0) for fd in self.fds]

    def write(self, contents: Sequence[bytes]) -> None:
        """Replace the content of each file."""
        for fd, content in zip(self.fds, contents, strict=True):
            overwrite(fd, content)

    def move(self) -> None:
        """Move the file offset of each, for readers and writers that forget to seek."""
        for number, fd in enumerate(self.fds, 1):
            os.lseek(fd, 17 * number, os.SEEK_SET)

    def fill_with_junk(self) -> None:
        """Fill the files with unrelated bytes."""
        self.write([_JUNK * (n + 1) for n in range(len(self.fds))])
        self.move()

    def reopened(self, number: int, flags: int) -> int:
        """Open one of the files again; the caller owns the descriptor."""
        return os.open(f"/proc/self/fd/{self.fds[number]}", flags | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the descriptors, which frees the memory."""
        while self.fds:
            os.close(self.fds.pop())


def overwrite(fd: int, content: bytes) -> None:
    """Replace the content of a file."""
    os.ftruncate(fd, 0)
    done = 0
    while done < len(content):
        done += os.pwrite(fd, content[done:], done)


@dataclass(frozen=True, slots=True)
class Change:
    """One change to one file."""

    number: int  #: of the file
    content: bytes
    what: str


def _read_only(files: CacheFileSet, number: int) -> list[int]:
    return [files.reopened(number, os.O_RDONLY)]


def _write_only(files: CacheFileSet, number: int) -> list[int]:
    return [files.reopened(number, os.O_WRONLY)]


def _pipe(_: CacheFileSet, __: int) -> list[int]:
    return list(os.pipe2(os.O_CLOEXEC))[::-1]


def _socket(_: CacheFileSet, __: int) -> list[int]:
    return [end.detach() for end in socket.socketpair()]


def _null(_: CacheFileSet, __: int) -> list[int]:
    return [os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)]


def _folder(_: CacheFileSet, __: int) -> list[int]:
    return [os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]


_IN_PLACE: dict[str, Callable[[CacheFileSet, int], list[int]]] = {
    "read_only": _read_only,
    "write_only": _write_only,
    "pipe": _pipe,
    "socket": _socket,
    "dev_null": _null,
    "folder": _folder,
}
DESCRIPTORS = tuple(_IN_PLACE)
"""Kinds of descriptors that cannot be cache files."""


@contextmanager
def with_descriptor(kind: str, files: CacheFileSet, number: int) -> Iterator[Cache]:
    """Yield the files, with one replaced by a descriptor of that kind."""
    made = _IN_PLACE[kind](files, number)
    try:
        yield files.cache([*files.fds[:number], made[0], *files.fds[number + 1 :]])
    finally:
        for fd in made:
            os.close(fd)


_COUNTS: dict[str, Callable[[Cache, int], Cache]] = {
    "none": lambda c, _: c._replace(model_files=(), data_files=()),
    "model_file_more": lambda c, fd: c._replace(model_files=(*c.model_files, fd)),
    "data_file_more": lambda c, fd: c._replace(data_files=(*c.data_files, fd)),
    "model_file_less": lambda c, _: c._replace(model_files=c.model_files[:-1]),
    "data_file_less": lambda c, _: c._replace(data_files=c.data_files[:-1]),
    "kinds_exchanged": lambda c, _: c._replace(model_files=c.data_files, data_files=c.model_files),
}
COUNTS = tuple(_COUNTS)
"""Ways to send another number of files than the device needs."""


def with_counts(way: str, files: CacheFileSet) -> Cache | None:
    """Return the files in other numbers; None where the numbers would be right."""
    found = _COUNTS[way](files.cache(), files.fds[-1])
    counts = len(found.model_files), len(found.data_files)
    return None if counts == files.counts else found


TOKENS = {"empty": 0, "byte_less": TOKEN_BYTES - 1, "byte_more": TOKEN_BYTES + 1}
"""Wrong lengths of tokens, by name."""


def truncations(contents: Sequence[bytes]) -> Iterator[Change]:
    """Yield each file cut to several lengths, from 0 to one byte less."""
    for number, content in enumerate(contents):
        size = len(content)
        for length in sorted({0, 1, 7, size // 2, size - 4096, size - 1} & set(range(size))):
            yield Change(number, content[:length], f"file {number}, of {size} bytes, cut to {length}")


def extensions(contents: Sequence[bytes]) -> Iterator[Change]:
    """Yield each file with extra bytes at its end."""
    for number, content in enumerate(contents):
        for more in (b"\0", b"\xff", bytes(4096), content):
            if more:
                yield Change(number, content + more, f"file {number} with {len(more)} extra bytes")


def flips(contents: Sequence[bytes], most: int) -> Iterator[Change]:
    """Yield each file with one bit flipped, at positions from its beginning to its end."""
    for number, content in enumerate(contents):
        bits = 8 * len(content)
        for bit in np.unique(np.linspace(0, bits - 1, min(most, bits)).astype(int)):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            yield Change(number, bytes(flipped), f"file {number} with bit {bit} flipped")


def _flip_some(random: np.random.Generator, content: bytes) -> bytes:
    found = np.frombuffer(content, np.uint8).copy()
    places = random.integers(0, len(found), random.integers(1, 9))
    found[places] ^= random.integers(1, 256, len(places), np.uint8)
    return found.tobytes()


def _cut(random: np.random.Generator, content: bytes) -> bytes:
    return content[: random.integers(0, len(content))]


def _insert(random: np.random.Generator, content: bytes) -> bytes:
    place = random.integers(0, len(content) + 1)
    return content[:place] + random.bytes(int(random.integers(1, 100))) + content[place:]


def _remove(random: np.random.Generator, content: bytes) -> bytes:
    begin, end = sorted(random.integers(0, len(content) + 1, 2))
    return content[:begin] + content[end:]


def _overwrite(random: np.random.Generator, content: bytes) -> bytes:
    begin, end = sorted(random.integers(0, len(content) + 1, 2))
    junk = (bytes(end - begin), b"\xff" * (end - begin), random.bytes(end - begin))[random.integers(3)]
    return content[:begin] + junk + content[end:]


def _move(random: np.random.Generator, content: bytes) -> bytes:
    place = random.integers(0, len(content) + 1)
    return content[place:] + content[:place]


_DAMAGE: tuple[Damage, ...] = (_flip_some, _cut, _insert, _remove, _overwrite, _move)


def corrupted(contents: Sequence[bytes], seed: int) -> Change:
    """Return one file with random damage, by seed; perhaps none."""
    random = np.random.default_rng(seed)
    number = int(random.choice([n for n, content in enumerate(contents) if content]))
    damage = _DAMAGE[random.integers(len(_DAMAGE))]
    return Change(number, damage(random, contents[number]), f"corruption {seed} ({damage.__name__[1:]}, file {number})")


# ---- models that a device has stored in cache files ------------------------------------------------------------------

FLOAT, QUANTISED = "convolution", "per_channel"
FAILS = (ErrorStatus.GENERAL_FAILURE,)


@dataclass(frozen=True, slots=True)
class KeptModel:
    """A model that the device has stored in files, and its outputs before that."""

    case: Case
    files: CacheFileSet
    expected: list[bytes]

    def check_restored(self, target: Target, what: str, cache: Cache | None = None) -> None:
        """Check that the restored model gives the same outputs on both paths."""
        try:
            with target.restored(self.case.model, cache or self.files.cache()) as model:
                check(
                    plain(model, self.case, target) == self.expected,
                    f"{what}: the restored model computes a different result",
                )
                with model.burst() as burst:
                    found = burst.run(*self.case.feeds, timeout=target.patience).outputs
                    same = [output.tobytes() for output in found] == self.expected
                    check(same, f"{what}: the restored model computes a different result in a burst")
        except StatusError as error:
            raise Failed(f"{what}: restoring gets {error.status.name}: {error}") from error


@contextmanager
def new_files(target: Target) -> Iterator[CacheFileSet]:
    """Yield as many empty files as the device needs."""
    counts = CacheFiles(*target.device.number_of_cache_files_needed())
    if counts == (0, 0):
        skip("this device stores no compilations")
    with CacheFileSet(counts) as files:
        yield files


@contextmanager
def kept_model(name: str, target: Target) -> Iterator[KeptModel]:
    """Yield one of the kit's models, stored in files of its own and freed on the device."""
    with new_files(target) as files:
        yield keep(name, files, target)


def keep(name: str, files: CacheFileSet, target: Target) -> KeptModel:
    """Store one of the kit's models in these files."""
    case = sample(name)
    with prepared(case, target, files.cache()) as model:
        if model.home.declined:
            skip(f"the device does not store this model: {model.home.declined}")
        return KeptModel(case, files, plain(model, case, target))


def check_refused(
    entry: KeptModel, cache: Cache, target: Target, what: str, allowed: Sequence[ErrorStatus] = FAILS
) -> None:
    """Check that restoring fails with one of these statuses."""
    try:
        with target.restored(entry.case.model, cache):
            pass
    except StatusError as error:
        wanted = " or ".join(status.name for status in allowed)
        if error.status not in allowed:
            raise Failed(f"{what}: restoring gets {error.status.name}, not {wanted}: {error}") from error
        return
    raise Failed(f"{what}: the device restores a model")
