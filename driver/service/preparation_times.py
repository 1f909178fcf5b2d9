"""The least times of preparations on a device, over its restarts: one that never fits is refused at once.

It is kept beside what the device knows of model files, and void when the device, its runtime, this library or the
processor changes. Only what takes long enough to be worth a file is kept.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from blake3 import blake3

from driver.service.file_records import state_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from driver.engine.cache.blobs import BlobStore
    from driver.interface import Device
    from driver.protocol.model_memory import SealedModel
    from driver.protocol.prepare_arguments import PrepareArguments

_WORTH_KEEPING = 5_000_000  # ns
_VALUE_BYTES = 8
_MOST_BYTES = 2**18


class PreparationTimes:
    """The least times of preparations in ns, by their keys. Any thread."""

    def __init__(self, device: Device, name: str, account: int | None = None) -> None:
        """Open nothing yet; arguments as of `FileRecords`."""
        self._of = device, name, account

    @cached_property
    def _store(self) -> BlobStore:
        return state_file(*self._of, what="times", most_value=_VALUE_BYTES, most_bytes=_MOST_BYTES)

    def known(self, key: bytes) -> int:
        """Return the least time of those preparations; 0: it is not known."""
        return int.from_bytes(self._store.get(key) or b"", "little")

    def note(self, key: bytes, known: int, found: int) -> None:
        """Keep a time, unless it is about the one that is known, or not worth it. 0: none was found."""
        if found >= _WORTH_KEEPING and abs(found - known) > known // 8:
            self._store.set(key, found.to_bytes(_VALUE_BYTES, "little"))

    def close(self) -> None:
        """Save what was noted. The next use opens the file again."""
        if store := self.__dict__.pop("_store", None):
            store.close()


def structure_of(memory: SealedModel, where: Any) -> bytes:
    """Return a digest of a model without the values of its constants: what takes the same time has the same."""
    offset, nbytes = where[:2]
    structure = memory.asarray()[offset : offset + nbytes]
    return blake3(b"%d " % memory.nbytes + structure.tobytes()).digest()


def key_of(uid: int, arguments: PrepareArguments | None, what: bytes) -> bytes:
    """Return the key of a preparation for that account, which can find out nothing about another's.

    `arguments`: None for the validation before it, which is the same for all.
    """
    terms: Sequence[object] = (uid,) if arguments is None else (uid, arguments.preference, arguments.priority)
    return blake3(repr(terms).encode() + what).digest()
