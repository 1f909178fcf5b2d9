"""The device's records of the cache files that it has written, kept where no client can change them.

A record says how long the files are, where the newest contents lie in them, and what their keyed digest is. It belongs
to one user and token. All records become void when the device, its driver, this library or the processor changes:
`build` names them.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NamedTuple

import msgpack
from blake3 import blake3

from driver.config import device_uid
from driver.engine import state
from driver.engine.cache.processor import processor
from driver.protocol.prepare_arguments import SavedTerms
from fmq.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from driver.interface import Device

_KEY_BYTES = 32
MOST_RECORDS = 8192
_RECORD_BYTES = 2048  # enough for 65 files
_WRONG = (ValueError, TypeError, msgpack.UnpackException)


class CacheRecord(NamedTuple):
    """A record of one set of files."""

    where: tuple[int, int]  #: offset and length of the structure within the model
    offsets: tuple[int, ...]  #: of the contents within each file
    sizes: tuple[int, ...]  #: of the contents
    lengths: tuple[int, ...]  #: of the files
    digest: bytes  #: of the contents
    grows: bool  #: contents are being appended, or were when the device died
    file: bytes  #: the digest of the file that the model is; b"" for others
    terms: SavedTerms = SavedTerms()


class CacheRecords:
    """The records of one device for one account, in a folder of the device's account; files there have mode 0600."""

    def __init__(self, device: Device, name: str, uid: int) -> None:
        """Open the file. `uid`: of the clients. Each has its own: none can crowd out another account's records.

        Raise OSError if the files cannot be made or read.
        """
        from driver.engine.cache.blobs import BlobStore  # SQLite takes some milliseconds, and `build` needs none

        folder = state.folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._build = build(device)
        self._key = _key(folder / "key")
        stem = re.sub(r"[^A-Za-z0-9_.-]", "_", name) + ("" if uid == device_uid() else f".{uid}")
        self._path = folder / f"{stem}.records"
        self._store = BlobStore(
            self._path,
            build_id=self._build,
            max_key_bytes=64,
            max_value_bytes=_RECORD_BYTES,
            max_total_bytes=MOST_RECORDS * 256,
            select="lru",
            capacity="fit",
        )

    def get(self, uid: int, token: bytes) -> CacheRecord | None:
        """Return the record for this user's token, or None."""
        found = self._store.get(_name(uid, token))
        try:
            where, offsets, sizes, lengths, digest, grows, file, *said = msgpack.unpackb(found or b"\0", use_list=False)
            terms = SavedTerms.of(said[0]) if said else SavedTerms()
            return CacheRecord(where, offsets, sizes, lengths, digest=digest, grows=grows, file=file, terms=terms)
        except _WRONG:
            return None

    def put(self, uid: int, token: bytes, record: CacheRecord) -> None:
        """Store a record durably: it outlives a kill of this process. Raise OSError."""
        self._store.set(_name(uid, token), msgpack.packb(list(record)))
        if not self._store.flush():
            raise OSError(f"{self._path}: cannot be written; see the log")

    def digest(self, uid: int, token: bytes, where: tuple[int, int], own: Iterable[memoryview], model: bytes) -> bytes:
        """Return the keyed digest of files with these contents: the device's own, and a model with that
        `digest_of_model`.

        Only this account can compute it.
        """
        parts = list(own)
        hasher = blake3(key=self._key)
        hasher.update(msgpack.packb([self._build, uid, token, where, [part.nbytes for part in parts], model]))
        for part in parts:
            hasher.update(part)
        return hasher.digest()

    def digest_of_model(self, model: memoryview) -> bytes:
        """Return the keyed digest of a model's bytes. Releases the GIL meanwhile."""
        return blake3(key=self._key).update(model).digest()


def digest_of_value(uid: int, kind: str, dimensions: Sequence[int], value: NDArray[np.uint8]) -> bytes:
    """Return the keyed digest of a buffer's value, saved by a client of that account. Raise OSError."""
    hasher = blake3(key=_key(state.made() / "key"))
    hasher.update(msgpack.packb(["value", uid, kind, list(dimensions)]))
    return hasher.update(value).digest()  # type: ignore[arg-type]  # an array is a buffer


def build(device: Device) -> str:
    """Name everything that must be unchanged for a compilation to be usable."""
    return f"{device.name}\n{device.version}\n{__version__}\n{processor()}"


def _name(uid: int, token: bytes) -> bytes:
    return uid.to_bytes(8, "big") + token


def _key(path: Path) -> bytes:
    """Return the account's key, made on first use. Raise OSError."""
    new = path.with_name(f"key.{os.getpid()}")
    if not path.exists():
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(os.urandom(_KEY_BYTES))
        try:
            os.link(new, path)  # never replaces one that another process has made meanwhile
        except FileExistsError:
            pass
        finally:
            new.unlink()
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        status = os.fstat(file.fileno())
        key = file.read(_KEY_BYTES + 1)
    if len(key) != _KEY_BYTES or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise OSError(f"{path}: not a key of {_KEY_BYTES} bytes that belongs to this account with mode 0600; remove it")
    return key
