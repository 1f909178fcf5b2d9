"""What a device knows of the model files that clients have brought: which passed a trial, and which are quarantined.

It is kept in the state folder of the device's account, and void when the device, its runtime, this library or the
processor changes, as the records of cache files are.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING

from driver.config import device_uid
from driver.engine import state
from driver.engine.cache.records import build

if TYPE_CHECKING:
    from driver.engine.cache.blobs import BlobStore
    from driver.interface import Device

_MOST_BYTES = 2 * 2**20
_DELAY = 0.1  # seconds until it is saved that a file has passed
_MOST_REASON = 1000  # characters
_PASSED, _REFUSED, _SUSPECT = b"+", b"-", b"?"  # first byte of a value
_MOST_SUSPICIONS = 2


def state_file(
    device: Device, name: str, account: int | None, *, what: str, most_value: int, most_bytes: int
) -> BlobStore:
    """Open one of the device's files, by digests, in the state folder. `what`: its suffix. `account`: of clients."""
    from driver.engine.cache.blobs import BlobStore  # takes some milliseconds

    is_own = account in {None, device_uid()}
    stem = re.sub(r"[^A-Za-z0-9_.-]", "_", name) + ("" if is_own else f".{account}")
    return BlobStore(
        state.folder() / f"{stem}.{what}",
        build_id=build(device),
        max_key_bytes=32,
        max_value_bytes=most_value,
        max_total_bytes=most_bytes,
        select="lru",
        capacity="fit",
        delay=_DELAY,
    )


class FileRecords:
    """Files by their `file_digest`. Any thread."""

    def __init__(self, device: Device, name: str, account: int | None = None) -> None:
        """`name`: of the device, as its clients call it. Nothing is opened yet.

        `account`: another one than the device's own has records of its own: no account can quarantine another's files.
        """
        self._device, self._name, self._account = device, name, account

    @cached_property
    def _store(self) -> BlobStore:
        its = self._device, self._name, self._account
        return state_file(*its, what="files", most_value=4 * _MOST_REASON + 1, most_bytes=_MOST_BYTES)

    def has_passed(self, digest: bytes) -> bool:
        """Return True if the file needs no further trial."""
        found = self._store.get(digest)
        return found is not None and found[:1] != _REFUSED

    def quarantined(self, digest: bytes) -> str | None:
        """Say why the file may not run; None: it may."""
        found = self._store.get(digest) or b""
        return found[1:].decode(errors="replace") if found[:1] == _REFUSED else None

    def note_passed(self, digest: bytes) -> None:
        """Note that a trial of the file ended well. What is known already stays."""
        if self._store.get(digest) is None:
            self._store.set(digest, _PASSED)

    def close(self) -> None:
        """Save what was noted. The next use opens the file again."""
        if store := self.__dict__.pop("_store", None):
            store.close()

    def quarantine(self, digest: bytes, reason: str) -> None:
        """Refuse the file from now on. Saved at once."""
        self._store.set(digest, _REFUSED + reason[:_MOST_REASON].encode())
        self._store.flush()

    def suspect(self, digest: bytes, reason: str) -> None:
        """Note that the engine ended, perhaps for this file, and refuse the file if that has happened too often."""
        found = self._store.get(digest) or b""
        count = 1 + (found[1] if found[:1] == _SUSPECT else 0)
        if count > _MOST_SUSPICIONS:
            self.quarantine(digest, f"{reason}, {count} times")
        else:
            self._store.set(digest, _SUSPECT + bytes([count]))
            self._store.flush()
