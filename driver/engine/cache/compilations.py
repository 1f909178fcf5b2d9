"""The device's side of compilation caching: writes compilations into a client's files, and verifies them before use.

The files belong to the client, which may read them, change them at any moment, exchange them, or pass those of another
user. So nothing in them is trusted. The device keeps its own record (`records`) of each set of files that it has
written, and uses what it reads only if that is what it wrote for this user and token, to the last byte:

1. The lengths of the files are those of the record, so no client makes the device read more than it has written.
2. The contents are read once, into private memory. Later changes of the files have no effect. A model that the client
   has sent along, in memory that no process can change, is not read from its file.
3. The keyed digest of that memory is the record's. What was verified is what is used.

All files are verified alike, although the HAL allows data to be trusted more than code.

A device may write again after the preparation has returned: behind the present contents, which readers still use. It
writes a record that the files grow, then the new contents, then a record of these. Whenever the device is killed, the
record is right about the old contents or about the new.

Locks (flock) keep writers and readers of one file apart, unless they came by the same descriptors, which share a lock.
So a reader that declines files looks whether the device has written a new record meanwhile, and reads again by that.
The device waits for a lock no longer than `_PATIENCE`, as a client can take it, too.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from burst import GeneralFailure, InvalidArgument, Malformed
from burst.backing import is_at_hand
from driver.config import device_uid
from driver.engine.cache.memory import ModelMemory, PrivateMemory
from driver.interface import CacheFiles, Saved

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping, Sequence

    from driver.engine.cache.records import CacheRecord, CacheRecords
    from driver.interface import Device
    from driver.protocol.model_memory import ModelBytes
    from driver.protocol.prepare_arguments import SavedTerms, ThreadsFound

_log = logging.getLogger(__name__)
_TOKEN_BYTES, _MOST_FILES = 32, 32
_PATIENCE, _PAUSE = 0.5, 2e-3  # seconds
NONE = CacheFiles(0, 0)


def files_needed(device: Device) -> CacheFiles:
    """Return how many files a client must bring: the device's own, and one for the model. NONE: it caches nothing."""
    own = device.cache_files
    if own is None:
        return NONE
    if max(own.model, own.data + 1) > _MOST_FILES:
        raise ValueError(f"cache_files={own}: at most {_MOST_FILES} model files and {_MOST_FILES - 1} data files")
    return CacheFiles(own.model, own.data + 1)


class Declined(Exception):
    """An error: nothing was cached or restored, for this reason. Prepared models stay usable."""


class RestoredCompilation(NamedTuple):
    """A compilation that was read and verified."""

    model: ModelBytes
    where: tuple[int, int]
    saved: Saved
    digest: bytes  #: equal digests mean the same compilation
    file: bytes  #: the digest of the file that the model is; b"" for others
    found: ThreadsFound  #: that suited it before


class SentModel(NamedTuple):
    """A model that came with its cache files, and offset and length of its structure."""

    region: ModelBytes
    where: tuple[int, int]


class CacheOwner(NamedTuple):
    """The account that owns a set of files, and the client's token for them."""

    uid: int
    token: bytes


class VerifiedCache:
    """The cached compilations of one device. Any thread."""

    def __init__(self, device: Device, name: str) -> None:
        self._device, self._name = device, name
        self._needed, self._lock = files_needed(device), threading.Lock()
        self._records: dict[int, CacheRecords] = {}
        self._newest: WeakValueDictionary[CacheOwner, CacheWriter] = WeakValueDictionary()

    def check(self, counts: Sequence[int], token: object, fds: Sequence[int]) -> CacheFiles:
        """Check counts, token and descriptors of a client. Raise Malformed, InvalidArgument."""
        match list(counts):
            case [int(model), int(data)] if model + data == len(fds):
                given = CacheFiles(model, data)
            case _:
                raise Malformed(f"{counts!r:.40} cache files, but {len(fds)} descriptors")
        if given != self._needed or given == NONE:
            raise InvalidArgument(
                f"{given.model} model files and {given.data} data files came; the device needs {self._needed.model} "
                "and "
                f"{self._needed.data}: see number_of_cache_files_needed()"
            )
        if not isinstance(token, bytes) or len(token) != _TOKEN_BYTES:
            raise InvalidArgument(f"token={token!r:.80}: must be {_TOKEN_BYTES} bytes")
        return given

    def restored(
        self, owner: CacheOwner, counts: CacheFiles, fds: Sequence[int], sent: SentModel | None = None
    ) -> RestoredCompilation:
        """Read and verify these files. `sent`: the model, where the client has it. Raise GeneralFailure."""
        try:
            records = self._opened(owner.uid)
            with _locked(fds, fcntl.LOCK_SH):
                record = records.get(*owner)
                while True:
                    try:
                        return self._read(owner, record, counts, fds, sent=sent)
                    except Declined:
                        outdated, record = record, records.get(*owner)
                        if record == outdated:
                            raise
        except (OSError, ValueError, Declined) as error:
            raise GeneralFailure(f"the device does not use the cache files: {error}") from error

    def _read(
        self,
        owner: CacheOwner,
        record: CacheRecord | None,
        counts: CacheFiles,
        fds: Sequence[int],
        sent: SentModel | None,
    ) -> RestoredCompilation:
        records = self._opened(owner.uid)
        if record is None or len(record.lengths) != len(fds):
            raise Declined("this version of the device has no record of writing them")
        _check_lengths(record, fds)
        if sent and (sent.region.nbytes, sent.where) != (record.sizes[-1], record.where):
            raise Declined("they are of another model")
        sources = list(zip(fds, record.offsets, strict=True))
        memory = PrivateMemory(record.sizes[:-1] if sent else record.sizes)
        if sent:
            with ThreadPoolExecutor(1, "hashing") as thread:
                hashing = thread.submit(records.digest_of_model, sent.region.asarray().data)
                memory.fill(sources[:-1])
            own, model, digest_of_model = memory.arrays, sent.region, hashing.result()
        else:
            memory.fill(sources)
            *own, last = memory.arrays
            model, digest_of_model = ModelMemory(last), records.digest_of_model(last.data)
        if records.digest(*owner, record.where, [array.data for array in own], digest_of_model) != record.digest:
            raise Declined("they have changed since the device wrote them, or are of another model")
        saved = Saved(own[: counts.model], own[counts.model :])
        return RestoredCompilation(
            model, record.where, saved, record.digest, file=record.file, found=record.terms.found
        )

    def terms(self, owner: CacheOwner) -> SavedTerms | None:
        """Return how the model was prepared that is kept for this owner; None: none is known."""
        try:
            record = self._opened(owner.uid).get(*owner)
        except (OSError, ValueError):
            return None
        return record and record.terms

    def note_threads(self, owner: CacheOwner, digest: bytes, found: ThreadsFound) -> None:
        """Keep the numbers of threads that suit the compilation of that digest, if it is still what the files have.

        Raise OSError.
        """
        records = self._opened(owner.uid)
        record = records.get(*owner)
        if record is not None and record.digest == digest and record.terms.found != found:
            records.put(*owner, record._replace(terms=record.terms._replace(found=found)))

    def saving(self, owner: CacheOwner, fds: Sequence[int], terms: SavedTerms | None = None) -> CacheWriter:
        """Return a writer for these files, for now and later. The caller keeps the descriptors. `terms`: how the model
        is prepared. Raise OSError, Declined.

        Another account's files must answer by themselves: threads that improve models of all clients write them.
        """
        if owner.uid != device_uid() and not all(is_at_hand(fd) for fd in fds):
            raise Declined("a device of another account caches in memory and on local disks: give a cache_dir there")
        _check_access(fds)
        return CacheWriter(self._opened(owner.uid), owner, fds, self._newest, terms=terms)

    def _opened(self, uid: int) -> CacheRecords:
        """Return the records of an account's files, opened on first use. Raise OSError."""
        with self._lock:
            if uid not in self._records:
                from driver.engine.cache.records import CacheRecords

                self._records[uid] = CacheRecords(self._device, self._name, uid)
            return self._records[uid]


class CacheWriter:
    """A writer of one prepared model's cache files. They stay open until this object is gone."""

    def __init__(
        self,
        records: CacheRecords,
        owner: CacheOwner,
        fds: Sequence[int],
        newest: MutableMapping[CacheOwner, CacheWriter],
        terms: SavedTerms | None = None,
    ) -> None:
        """Take the files. `newest`: the latest writer of each owner. `terms`: how the model is prepared."""
        self._terms = terms
        self._records, self._owner, self._newest = records, owner, newest
        self._record: CacheRecord | None = None  # of what this writer has written
        self._lock = threading.Lock()
        self._fds: list[int] = []
        for fd in fds:
            self._fds.append(os.dup(fd))

    def __del__(self) -> None:
        for fd in self._fds:
            os.close(fd)

    def save(self, model: memoryview, where: tuple[int, int], saved: Saved, file: bytes = b"") -> bytes:
        """Write model and saved contents; return their digest. `file`: the digest of the file that the model is.

        Raise Declined, OSError.
        """
        own: list[Any] = [*saved.model, *saved.data]
        contents = [*(memoryview(part).cast("B") for part in own), model]
        if len(contents) != len(self._fds):
            raise Declined(f"the device gave the contents of {len(contents) - 1} files, not of as many as it declares")
        with self._lock, _locked(self._fds, fcntl.LOCK_EX):
            offsets = self._begun()
            for fd, offset, content in zip(self._fds, offsets, contents, strict=True):
                _write(fd, offset, content)
            sizes = tuple(content.nbytes for content in contents)
            lengths = tuple(offset + size for offset, size in zip(offsets, sizes, strict=True))
            digest_of_model = self._records.digest_of_model(model)
            digest = self._records.digest(*self._owner, where, contents[:-1], digest_of_model)
            record = _record(where, offsets, sizes, lengths, digest=digest, file=file)
            self._put(record._replace(terms=self._terms) if self._terms else record)
            return digest

    def _begun(self) -> tuple[int, ...]:
        """Return offsets for new contents: behind earlier ones, or 0 in emptied files. Raise OSError, Declined."""
        if self._record is None:
            self._newest[self._owner] = self
            for fd in self._fds:
                os.ftruncate(fd, 0)
            return (0,) * len(self._fds)
        if [os.fstat(fd).st_size for fd in self._fds] != list(self._record.lengths):
            raise Declined("the files have changed since the device wrote them")
        if self._newest.get(self._owner) is not self or self._records.get(*self._owner) != self._record:
            raise Declined("another compilation was cached under that token since")
        self._put(self._record._replace(grows=True))
        return self._record.lengths

    def _put(self, record: CacheRecord) -> None:
        self._records.put(*self._owner, record)
        self._record = record


def _record(
    where: tuple[int, int],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    lengths: tuple[int, ...],
    digest: bytes,
    file: bytes,
) -> CacheRecord:
    from driver.engine.cache.records import CacheRecord

    return CacheRecord(where, offsets, sizes, lengths, digest=digest, grows=False, file=file)


def _check_access(fds: Sequence[int]) -> None:
    """Raise Declined unless the descriptors may be read and written."""
    for fd in fds:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Declined("a cache file is not a regular file")
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
            raise Declined("a cache file is not open for reading and writing")


def _check_lengths(record: CacheRecord, fds: Sequence[int]) -> None:
    """Raise Declined unless the files have the lengths of the record."""
    _check_access(fds)
    for fd, length in zip(fds, record.lengths, strict=True):
        found = os.fstat(fd).st_size
        if found < length or (found > length and not record.grows):
            raise Declined(f"a file has {found} bytes; it had {length} when the device wrote it")


@contextmanager
def _locked(fds: Sequence[int], operation: int) -> Iterator[None]:
    """Hold locks on all files. Raise Declined if another process holds one for too long."""
    end = time.monotonic() + _PATIENCE
    with ExitStack() as stack:
        for fd in fds:
            _lock(fd, operation, end)
            stack.callback(fcntl.flock, fd, fcntl.LOCK_UN)
        yield


def _lock(fd: int, operation: int, end: float) -> None:
    while True:
        try:
            fcntl.flock(fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise Declined("another process has locked the cache files") from None
            time.sleep(_PAUSE)
        else:
            return


def _write(fd: int, offset: int, content: memoryview) -> None:
    while content:
        count = os.pwrite(fd, content, offset)
        offset, content = offset + count, content[count:]
