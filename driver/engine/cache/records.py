"""What a device remembers of the files that it has written: enough to know them again, and kept where no client can.

A record says how long the files are, where in them the newest contents lie, and what the keyed digest of these is. It
belongs to one user's token. All records are void as soon as the device, its driver, this library or the processor is
another one: `build` names them.
"""

from __future__ import annotations

import os
import re
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgpack
from blake3 import blake3

from driver.engine.cache.blobs import BlobStore
from driver.engine.cache.processor import processor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from driver.interface import Device

_KEY_BYTES = 32
_MOST_RECORDS = 8192
_RECORD_BYTES = 2048  # of 65 files, with some to spare
_WRONG = (ValueError, TypeError, msgpack.UnpackException)


class CacheRecord(NamedTuple):
    """Of one set of files."""

    where: tuple[int, int]  #: the model's structure among its bytes
    offsets: tuple[int, ...]  #: of the contents in each file, in the order of the files
    sizes: tuple[int, ...]  #: of the contents
    lengths: tuple[int, ...]  #: of the files
    digest: bytes  #: of the contents
    grows: bool  #: something is being appended, or was when we died


class CacheRecords:
    """Of one device. Its folder is this account's own; files there have mode 0600."""

    def __init__(self, device: Device, name: str) -> None:
        """Raises OSError when there can be no such files."""
        folder = Path("~/.local/state/burst").expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._build = build(device)
        self._key = _key(folder / "key")
        stem = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
        self._path = folder / f"{stem}.records"
        self._store = BlobStore(
            self._path,
            build_id=self._build,
            max_key_bytes=64,
            max_value_bytes=_RECORD_BYTES,
            max_total_bytes=_MOST_RECORDS * 256,
            select="lru",
            capacity="fit",
        )

    def get(self, uid: int, token: bytes) -> CacheRecord | None:
        """That of the files which this user's token stands for, or None."""
        found = self._store.get(_name(uid, token))
        try:
            where, offsets, sizes, lengths, digest, grows = msgpack.unpackb(found or b"\0", use_list=False)
            return CacheRecord(where, offsets, sizes, lengths, digest, grows)
        except _WRONG:
            return None

    def put(self, uid: int, token: bytes, record: CacheRecord) -> None:
        """From now on, and after we are killed. Raises OSError when that cannot be."""
        self._store.set(_name(uid, token), msgpack.packb(list(record)))
        if not self._store.flush():
            raise OSError(f"{self._path}: cannot be written; see the log")

    def digest(self, uid: int, token: bytes, where: tuple[int, int], contents: Iterable[memoryview]) -> bytes:
        """Of files with these contents, which nobody else can compute."""
        parts = list(contents)
        hasher = blake3(key=self._key)
        hasher.update(msgpack.packb([self._build, uid, token, where, [part.nbytes for part in parts]]))
        for part in parts:
            hasher.update(part)
        return hasher.digest()


def build(device: Device) -> str:
    """What has to be the same for a compilation to be of use."""
    parts = (device.name, device.version, version("burst-engine"), processor())
    return "\n".join(parts)


def _name(uid: int, token: bytes) -> bytes:
    return uid.to_bytes(8, "big") + token


def _key(path: Path) -> bytes:
    """The account's key, made by whoever needs it first. Raises OSError."""
    new = path.with_name(f"key.{os.getpid()}")
    if not path.exists():
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(os.urandom(_KEY_BYTES))
        try:
            os.link(new, path)  # never over one that somebody else has made meanwhile
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
