"""Memory for a model as LiteRT reads it: the flatbuffer, its small constants, and behind them the client's own pages.

A model arrives in sealed shared memory, with its weights. The library needs one range of addresses, so those pages are
mapped a second time, behind the flatbuffer: no weight is copied.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import numpy as np
from cffi import FFI

from driver.devices.lowering.alignment import ALIGNMENT
from driver.protocol.model_memory import map_again, same_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_ffi = FFI()
_ffi.cdef(
    """
    void *mmap(void *address, size_t bytes, int protection, int flags, int fd, long offset);
    int munmap(void *address, size_t bytes);
    """
)
_libc: Any = _ffi.dlopen(None)
_FAILED = 2 ** (8 * _ffi.sizeof("void *")) - 1


def aligned(nbytes: int) -> NDArray[np.uint8]:
    """Memory that LiteRT can use in place, with a margin behind it: vector kernels read a little beyond the end."""
    block = np.empty(nbytes + 2 * ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + nbytes]


def shared_root(arrays: Sequence[NDArray[Any]]) -> NDArray[np.uint8] | None:
    """Return the largest read-only memory of bytes that these arrays are views of, or None."""
    roots = [_root(array) for array in arrays if array.nbytes]
    found = max(roots, key=lambda root: root.nbytes, default=None)
    if found is None or found.flags.writeable or found.dtype != np.uint8:
        return None
    return found


def _root(array: NDArray[Any]) -> NDArray[Any]:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class Image:
    """`front` bytes to write into, and behind them, from the next page on, the pages of `root`.

    bytes: the front. nbytes: of everything. behind: where `root` begins. shareable: no two operations read the same
    weights, so that XNNPACK can tell packed ones apart. half: float32 is to be computed as float16.
    """

    def __init__(self, front: int, root: NDArray[np.uint8] | None) -> None:
        """Raise OSError when those pages cannot be mapped twice: they are private, or there is no room."""
        self.shareable = self.half = False
        if root is None:
            self.bytes, self.nbytes, self.behind = aligned(front), front, front
            self.bytes[:] = 0  # between constants, too: models are compared
            return
        skew = root.ctypes.data % mmap.PAGESIZE
        pages = -(-front // mmap.PAGESIZE) * mmap.PAGESIZE
        self.behind, self.nbytes = pages + skew, pages + skew + root.nbytes
        self._mapping = _mapped_twice(pages, root, skew)
        memory: Any = _ffi.buffer(self._mapping, front)
        self.bytes = np.frombuffer(memory, np.uint8)

    @classmethod
    def of(cls, front: NDArray[np.uint8], root: NDArray[np.uint8] | None, *, shareable: bool, half: bool) -> Image:
        """Return an image that is in memory already: the front on a page, and `root` on the page after it."""
        image = cls.__new__(cls)
        image.half = half
        image.bytes, image.shareable, image.behind, image.nbytes = front, shareable, front.nbytes, front.nbytes
        if root is not None:
            image.behind += -front.nbytes % mmap.PAGESIZE
            image.nbytes = image.behind + root.nbytes
            assert root.ctypes.data == image.address + image.behind
        return image

    @property
    def root(self) -> int:
        """Bytes behind the front."""
        return self.nbytes - self.behind

    @property
    def address(self) -> int:
        """The address of the first byte."""
        return self.bytes.ctypes.data

    def buffer(self) -> Any:
        """Return all of it."""
        return _ffi.buffer(_ffi.cast("char *", self.address), self.nbytes)

    def equals(self, other: Image) -> bool:
        """Return True if all bytes are the same."""
        if self.nbytes != other.nbytes:
            return False
        return same_bytes(self.address, other.address, self.nbytes)


def _mapped_twice(front: int, root: NDArray[np.uint8], skew: int) -> Any:
    """`front` zeroed bytes, and behind them the shared pages of `root`. Raise OSError."""
    total = front + skew + root.nbytes
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    base = _libc.mmap(_ffi.NULL, total, mmap.PROT_READ | mmap.PROT_WRITE, private, -1, 0)
    if int(_ffi.cast("uintptr_t", base)) == _FAILED:
        raise OSError(_ffi.errno, f"no room for {total} bytes of addresses")
    mapping = _ffi.gc(_ffi.cast("unsigned char *", base), lambda p: _libc.munmap(p, total))
    map_again(root, skew, int(_ffi.cast("uintptr_t", base)) + front)
    return mapping
