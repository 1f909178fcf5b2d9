"""Weights as XNNPACK packs them: one copy for all prepared models of the same bytes, and between processes a cache.

XNNPACK can take packed weights from a file, and believes it: weights of another model of the same shape give that
model's answers, and damaged ones give NaN. So who may use which weights is decided here, and XNNPACK is given memory
that nobody can change any more.

- Within the process: a model whose bytes, all of them, are those of a model that is still prepared shares its memory.
- Between processes, if the user wants that: an entry of the cache has as its name, and again in its header, the digest
  of everything that makes the packed weights, and the digest of the packed weights. What is verified is the sealed
  memory that XNNPACK will use and not the file, which may change. What does not verify is packed again.

XNNPACK knows weights by the place of their first byte and not by the zero points that it packs with them: two layers
with the same weights would both be computed with the first one's (seen with LiteRT 2.3.0). Models that read weights
twice therefore share nothing (`Image.shareable`).
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import stat
import struct
import threading
import weakref
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driver.devices.litert.library import VERSION, Compiled, LibraryFailed, LibraryMissing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from driver.devices.litert.weights import Image

SMALLEST = 2**20
"""Bytes of a model from which on its packed weights are worth a file descriptor, and the time to write them into it."""

_log = logging.getLogger(__name__)
_MAGIC = b"burstpw1"
_HEADER = struct.Struct("<8s32sQ32s")  # magic, digest of what made it, bytes that follow, their digest
_SUFFIX, _NEW = ".packed", "new"
_F_SEAL_FUTURE_WRITE = 0x10
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PROCESSOR = (
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
    *("Features", "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),
)


class PackedMemory:
    """Memory that XNNPACK writes packed weights into, or finds them in. Closed when nobody refers to it."""

    def __init__(self) -> None:
        """Raises OSError."""
        self.fd = os.memfd_create("burst-packed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)

    @property
    def path(self) -> str:
        """By which XNNPACK opens it. It would close a descriptor that it is given, but not whenever it fails."""
        return f"/proc/self/fd/{self.fd}"

    @property
    def nbytes(self) -> int:
        """Of what is in it now."""
        return os.fstat(self.fd).st_size

    def freeze(self) -> None:
        """Nobody changes it from now on, through no descriptor. Raises OSError."""
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_WRITE)
        except OSError:  # Linux < 6.7 takes XNNPACK's read-only mapping for one that could be written through
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | _F_SEAL_FUTURE_WRITE)

    def digest(self) -> bytes:
        """Of all that is in it, which is not nothing."""
        with mmap.mmap(self.fd, 0, mmap.MAP_SHARED, mmap.PROT_READ) as memory:
            return _digest(memory)


class Packing:
    """Compiles models, and sees to it that those of the same bytes share their packed weights."""

    def __init__(self, cache: Cache | None = None) -> None:
        """`cache`: for other processes, and later ones."""
        self._cache = cache
        self._live: weakref.WeakSet[Compiled] = weakref.WeakSet()
        self._lock = threading.Lock()

    def compiled(self, image: Image, threads: int) -> Compiled:
        """The model, ready to run. Raises LibraryFailed."""
        if image.shareable and image.nbytes >= SMALLEST:
            with suppress(OSError, LibraryFailed):  # out of descriptors, say: then it has packed weights of its own
                return self._shared(image, threads)
        return Compiled(image, threads)

    def _shared(self, image: Image, threads: int) -> Compiled:
        memory, key = self._of_same(image), b""
        if memory is None and self._cache:
            key = self._cache.key(image)
            memory = self._cache.read(key)
        if memory is not None:
            compiled = Compiled(image, threads, memory)
        else:
            memory = PackedMemory()
            compiled = Compiled(image, threads, memory)
            if not memory.nbytes:
                return compiled  # nothing that XNNPACK takes
            memory.freeze()
            if self._cache:
                self._cache.write(key, memory)
        with self._lock:
            self._live.add(compiled)
        return compiled

    def _of_same(self, image: Image) -> PackedMemory | None:
        """The packed weights of a model that has the very same bytes."""
        with self._lock:
            live = list(self._live)
        return next((other.packed for other in live if other.image.equals(image)), None)


class Cache:
    """Packed weights in files: of this user alone, the latest used ones, up to so many bytes."""

    def __init__(self, folder: Path, most: int) -> None:
        """`most`: bytes. Raises LibraryMissing."""
        try:
            import_module("blake3")
        except ImportError:
            raise LibraryMissing("cache = true needs blake3; pip install 'burst-engine[litert]'") from None
        self._folder, self._most = folder, most

    def key(self, image: Image) -> bytes:
        """The digest of everything that makes the packed weights of a model."""
        return _digest(_MAGIC, VERSION.encode() + b"\0", _processor(), b"\0", image.buffer())

    def read(self, key: bytes) -> PackedMemory | None:
        """The entry, verified and frozen; None when there is none, or none that verifies."""
        try:
            with self._opened() as folder, _closed(_open(_name(key), os.O_RDONLY, folder)) as file:
                found = self._verified(key, file)
                os.utime(file)  # used now
                return found
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _log.warning("%s: %s; the weights are packed again", self._folder / _name(key), error)
            return None

    def _verified(self, key: bytes, file: int) -> PackedMemory:
        """Raises ValueError, OSError."""
        status = os.fstat(file)
        header = os.pread(file, _HEADER.size, 0) if stat.S_ISREG(status.st_mode) else b""
        if len(header) < _HEADER.size:
            raise ValueError("too short to be an entry")
        magic, made_of, nbytes, digest = _HEADER.unpack(header)
        if magic != _MAGIC or made_of != key:
            raise ValueError("the entry of something else")
        if not 0 < nbytes <= self._most or status.st_size != _HEADER.size + nbytes:
            raise ValueError(f"{status.st_size} bytes, which is not what its header says")
        memory = PackedMemory()
        _copy(file, _HEADER.size, memory.fd, nbytes)
        memory.freeze()
        if memory.nbytes != nbytes or memory.digest() != digest:
            raise ValueError("damaged")
        return memory

    def write(self, key: bytes, memory: PackedMemory) -> None:
        """Keeps it, unless another process is keeping something just now or the file system does not want to.

        What a crash leaves behind is overwritten by who writes next; what a power failure does to the file is seen by
        its digest, so nothing waits for the disk.
        """
        size = _HEADER.size + memory.nbytes
        if size > self._most:
            return
        try:
            with self._opened() as folder:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._make_room(folder, size)
                with _closed(_open(_NEW, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, folder)) as file:
                    os.fchmod(file, 0o600)
                    os.write(file, _HEADER.pack(_MAGIC, key, memory.nbytes, memory.digest()))
                    _copy(memory.fd, 0, file, memory.nbytes)
                os.replace(_NEW, _name(key), src_dir_fd=folder, dst_dir_fd=folder)
        except BlockingIOError:
            return
        except OSError as error:
            _log.warning("%s: %s; packed weights are not kept", self._folder, error)

    def _make_room(self, folder: int, size: int) -> None:
        """Drops those that were used longest ago, until `size` bytes fit in."""
        names = [name for name in os.listdir(folder) if name.endswith(_SUFFIX)]
        found = [(os.stat(name, dir_fd=folder, follow_symlinks=False), name) for name in names]
        left = self._most - size - sum(status.st_size for status, _ in found)
        for status, name in sorted(found, key=lambda pair: pair[0].st_mtime_ns):
            if left >= 0:
                break
            os.unlink(name, dir_fd=folder)
            left += status.st_size

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The folder, which is there then and closed to others. Raises OSError."""
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self._folder.mkdir(0o700)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        with _closed(os.open(self._folder, flags)) as folder:
            status = os.fstat(folder)
            if status.st_uid != os.geteuid():
                raise PermissionError(f"belongs to user {status.st_uid}; remove it, or set cache = false")
            if stat.S_IMODE(status.st_mode) != 0o700:
                os.fchmod(folder, 0o700)
            yield folder


def _name(key: bytes) -> str:
    return key.hex() + _SUFFIX


def _open(name: str, flags: int, folder: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)


@contextmanager
def _closed(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


def _copy(source: int, start: int, target: int, nbytes: int) -> None:
    """Raises OSError when there is less."""
    end = start + nbytes
    while start < end:
        count = os.sendfile(target, source, start, end - start)
        if not count:
            raise OSError("shorter than it was")
        start += count


def _digest(*parts: Any) -> bytes:
    """BLAKE3: clients choose the models, so it has to be one for which nobody finds two of the same digest; of those it
    is by far the quickest.
    """
    hasher = import_module("blake3").blake3()
    for part in parts:
        hasher.update(part)
    return bytes(hasher.digest())


@cache
def _processor() -> bytes:
    """What XNNPACK chooses its kernels by: kind and abilities of the processors."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = {line for line in lines if line.partition(":")[0].strip() in _PROCESSOR}
    return "\n".join([os.uname().machine, *sorted(found)]).encode()
