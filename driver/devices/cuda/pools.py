"""Clients' memory as the GPU reaches it: each mapping of a pool is pinned once, and unpinned before it goes.

A mapping is known by its root: the array over all of its bytes, of which the arguments of requests are views. It lives
until the client frees the pool or is gone, and everything that is bound to it has ended. Where CUDA refuses to pin a
mapping, its arguments go through pinned memory of our own: one more copy by the CPU, which is counted.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from driver.devices.cuda.driver_api import CudaFailed, CudaOutOfMemory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from driver.devices.cuda.context import CudaContext, PinnedMemory, Registration

_log = logging.getLogger(__name__)
MOST_STAGED = 256 << 20
"""Bytes of pinned memory for what cannot be pinned where it lies."""

_SMALLEST = 4096


def root_of(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array of which all others on that mapping are views."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class PinnedPools:
    """The pools that are pinned, of all clients of a context. Any thread."""

    def __init__(self, context: CudaContext) -> None:
        self._context, self._lock = context, threading.Lock()
        self._known: dict[int, Registration | None] = {}  # by id of the root; None: it cannot be pinned

    def pin(self, array: NDArray[Any]) -> bool:
        """Return True if the memory of this array is pinned, now or since an earlier call.

        Raise CudaFailed when the context is lost.
        """
        root = root_of(array)
        with self._lock:
            if id(root) not in self._known:
                self._known[id(root)] = self._registered(root)
                weakref.finalize(root, self._forget, id(root)).atexit = False
            return self._known[id(root)] is not None

    def _registered(self, root: NDArray[Any]) -> Registration | None:
        try:
            return self._context.register(root.ctypes.data, root.nbytes, is_read_only=not root.flags.writeable)
        except CudaFailed as error:
            if error.is_lost:
                raise
            _log.warning("a pool of %d bytes cannot be pinned, and is copied: %s", root.nbytes, str(error))  # no frames
            return None

    def _forget(self, key: int) -> None:
        """Forget a root that goes; its memory is unmapped after this."""
        if registration := self._known.pop(key, None):  # without the lock: any thread may drop a root while it has it
            registration.close()


class Staging:
    """Pinned memory in blocks, for arguments that lie elsewhere. Blocks are used again. Any thread."""

    def __init__(self, context: CudaContext, most: int = MOST_STAGED) -> None:
        self._context, self._lock, self._most = context, threading.Lock(), most
        self._free: dict[int, list[PinnedMemory]] = {}
        self.nbytes = 0  #: of all blocks

    def take(self, nbytes: int) -> PinnedMemory:
        """Return a block with at least so many bytes. Raise CudaOutOfMemory, CudaFailed."""
        size = max(_SMALLEST, 1 << (nbytes - 1).bit_length())
        with self._lock:
            if blocks := self._free.get(size):
                return blocks.pop()
            if self.nbytes + size > self._most:
                self._trim()
            if self.nbytes + size > self._most:
                call = f"staging {nbytes} bytes beside {self.nbytes} of {self._most}"
                raise CudaOutOfMemory(2, "too many arguments lie in pools that cannot be pinned", call)
            block = self._context.pinned(size)
            self.nbytes += size
            return block

    def give_back(self, block: PinnedMemory) -> None:
        """Take a block back that is not used any more."""
        self._free.setdefault(block.nbytes, []).append(block)  # without the lock, as what goes away calls this

    def _trim(self) -> None:
        """Free blocks that are not used."""
        for size, blocks in list(self._free.items()):
            while blocks:
                blocks.pop().close()
                self.nbytes -= size
