"""Weights as XNNPACK packs them: one copy for all prepared models of the same bytes.

XNNPACK can take packed weights from a file, and trusts it: weights of another model of the same shape give that
model's results, and damaged ones give NaN. So this module decides which model may use which weights, and gives XNNPACK
sealed memory: a model shares that of a prepared model if all their bytes are equal. Nothing is kept between processes,
because to verify packed weights takes longer than to pack them.

XNNPACK identifies weights by the address of their first byte and ignores the zero points that it packs with them: of
two layers with the same weights the second would use the zero points of the first (seen with LiteRT 2.3.0). Models that
read weights twice therefore share nothing (`Image.shareable`). Neither do models in float16: XNNPACK crashes
when it packs their weights into a file (seen with LiteRT 2.3.0).
"""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from driver.devices.litert.library import Compiled
from driver.devices.lowering.errors import LibraryFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver.devices.litert.weights import Image

C = TypeVar("C", bound=Compiled)

SMALLEST = 2**20
"""Smaller models do not share: their packed weights are not worth a file descriptor and the time to write them."""

_F_SEAL_FUTURE_WRITE = 0x10
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class PackedMemory:
    """Memory that XNNPACK writes packed weights into, or finds them in. Closed with the last reference to it."""

    fd = -1

    def __init__(self) -> None:
        """Make the memory. Raise OSError."""
        self.fd = os.memfd_create("burst-packed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    @property
    def path(self) -> str:
        """The path by which XNNPACK opens it. (It closes a descriptor that it is given, but not on every failure.)"""
        return f"/proc/self/fd/{self.fd}"

    @property
    def nbytes(self) -> int:
        """Its size now."""
        return os.fstat(self.fd).st_size

    def freeze(self) -> None:
        """Seal it: from now on no descriptor can change it. Raise OSError."""
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_WRITE)
        except OSError:  # Linux < 6.7 takes XNNPACK's read-only mapping for a writable one
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | _F_SEAL_FUTURE_WRITE)


class Packing:
    """Compiles models. Models of the same bytes share their packed weights."""

    def __init__(self) -> None:
        self._live: weakref.WeakSet[Compiled] = weakref.WeakSet()
        self._lock = threading.Lock()

    def compiled(self, image: Image, threads: int) -> Compiled:
        """Return the model, ready to run. Raise LibraryFailed."""
        return self.compiled_as(Compiled, image, threads)

    def compiled_as(self, kind: Callable[..., C], image: Image, threads: int) -> C:
        """Return the model as another kind of Compiled."""
        if image.shareable and not image.half and image.nbytes >= SMALLEST:
            with suppress(OSError, LibraryFailed):  # no descriptor is left, say: then it packs weights of its own
                return self._shared(kind, image, threads)
        return kind(image, threads)

    def _shared(self, kind: Callable[..., C], image: Image, threads: int) -> C:
        memory = self._of_same(image)
        if memory is not None:
            compiled = kind(image, threads, memory)
        else:
            memory = PackedMemory()
            compiled = kind(image, threads, memory)
            if not memory.nbytes:
                return compiled  # XNNPACK takes none of its operations
            memory.freeze()
        with self._lock:
            self._live.add(compiled)
        return compiled

    def _of_same(self, image: Image) -> PackedMemory | None:
        """Return the packed weights of a prepared model with the same bytes."""
        with self._lock:
            live = list(self._live)
        return next((other.packed for other in live if other.image.equals(image)), None)
