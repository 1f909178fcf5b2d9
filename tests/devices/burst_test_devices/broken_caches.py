"""Devices that are wrong about their cache files, each in one way; only the first is right.

Run `burst vts burst_test_devices.broken_caches:Trusting`. They reach into the engine that runs them, because that does
on a device's behalf what the kit wants to see done wrong.
"""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from burst_test_devices.broken import WrongResults
from driver.devices.reference import ReferenceDevice
from driver.engine.cache import compilations
from driver.engine.cache.compilations import CacheWriter, VerifiedCache
from driver.engine.cache.records import CacheRecord, CacheRecords
from driver.interface import CacheFiles, PreparedModel, Saved

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from driver.engine.cache.compilations import CacheOwner, RestoredCompilation, SentModel
    from driver.interface import BindOptions, BoundExecution, Preparation
    from driver.nn import Model

    Root = NDArray[np.uint8]


class Keeping(ReferenceDevice):
    """A device whose restored models compute what they should as long as the file of code that it gave is as it was."""

    cache_files = CacheFiles(1, 0)

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """As the reference, with code to keep."""
        return _Kept(super().prepare(model, preparation))

    def restore(self, model: Model, saved: Saved, root: Root, preparation: Preparation) -> PreparedModel:
        """Wrong as soon as a byte of its code is."""
        device = self if bytes(saved.model[0]) == _CODE else WrongResults()
        return _Kept(device.prepare(model, preparation))


_CODE = bytes(range(256)) * 32


class _Kept(PreparedModel):
    """Another prepared model, with code."""

    def __init__(self, prepared: PreparedModel) -> None:
        self._prepared, self.is_static = prepared, prepared.is_static

    def bind(self, inputs: Any, outputs: Any, options: BindOptions) -> BoundExecution:
        return self._prepared.bind(inputs, outputs, options)

    def saved(self, _: object) -> Saved:
        return Saved([_CODE])


class Trusting(Keeping):
    """Does not look whether the files are what it wrote, as long as they have that length."""

    def __init__(self) -> None:
        _replace(CacheRecords, digest=lambda *_: bytes(32))


class Rereading(Keeping):
    """Verifies the files, and reads them again to use them."""

    def __init__(self) -> None:
        read = VerifiedCache._read

        def twice(
            self: VerifiedCache,
            owner: CacheOwner,
            record: CacheRecord | None,
            counts: CacheFiles,
            fds: Sequence[int],
            sent: SentModel | None,
        ) -> RestoredCompilation:
            found = read(self, owner, record, counts, fds, sent)
            end = time.monotonic() + _WINDOW
            code = bytes(found.saved.model[0])
            while code == bytes(found.saved.model[0]) and time.monotonic() < end:
                code = os.pread(fds[0], len(code), 0).ljust(len(code), b"\0")
            return found._replace(saved=Saved([np.frombuffer(code, np.uint8)], found.saved.data))

        _replace(VerifiedCache, _read=twice)


_WINDOW = 0.05  # seconds between reading once and reading again


class Rehashing(Keeping):
    """Takes for what it wrote whatever the files hold a moment later."""

    def __init__(self) -> None:
        save = CacheWriter.save

        def trusting(
            self: CacheWriter, model: memoryview, where: tuple[int, int], saved: Saved, file: bytes = b""
        ) -> bytes:
            written = save(self, model, where, saved, file)
            record = self._record
            assert record
            end, found = time.monotonic() + _WINDOW, written
            while found == written and time.monotonic() < end:
                places = zip(self._fds, record.sizes, record.offsets, strict=True)
                *own, last = (memoryview(os.pread(fd, size, at)) for fd, size, at in places)
                if [part.nbytes for part in (*own, last)] == list(record.sizes):
                    found = self._records.digest(*self._owner, where, own, self._records.digest_of_model(last))
            self._put(record._replace(digest=found))
            return found

        _replace(CacheWriter, save=trusting)


class Tokenless(Keeping):
    """Takes every token for the same."""

    def __init__(self) -> None:
        get, put, digest = CacheRecords.get, CacheRecords.put, CacheRecords.digest
        none = bytes(32)
        _replace(
            CacheRecords,
            get=lambda self, uid, _: get(self, uid, none),
            put=lambda self, uid, _, record: put(self, uid, none, record),
            digest=lambda self, uid, _, *contents: digest(self, uid, none, *contents),
        )


class Forgetful(Keeping):
    """Restores the model that it has restored first, whichever it is asked for."""

    def __init__(self) -> None:
        self._first: list[PreparedModel] = []

    def restore(self, model: Model, saved: Saved, root: Root, preparation: Preparation) -> PreparedModel:
        """Once and for all."""
        self._first = self._first or [super().restore(model, saved, root, preparation)]
        return self._first[0]


class Fussy(Keeping):
    """Prepares nothing that it cannot keep, if it is asked to."""

    def __init__(self) -> None:
        import driver.engine.client as module
        from burst import GeneralFailure

        save = module.EngineClient._save

        def insist(*arguments: Any) -> str:
            if declined := save(*arguments):
                raise GeneralFailure(declined)
            return ""

        _replace(module.EngineClient, _save=insist)


class Waiting(Keeping):
    """Waits for files that somebody else has locked, however long that takes."""

    def __init__(self) -> None:
        vars(compilations)["_PATIENCE"] = math.inf


def _replace(kind: type, **methods: Callable[..., object]) -> None:
    for name, method in methods.items():
        setattr(kind, name, method)
