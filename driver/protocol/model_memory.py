"""The memory in which a model travels: a sealed memfd, so what was checked once stays true."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING, Any, Protocol

from cffi import FFI

from driver.nn import InvalidModel
from fmq import InvalidDescriptor, Region

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_ffi = FFI()
_ffi.cdef("int memcmp(const void *one, const void *other, size_t nbytes);")
_libc: Any = _ffi.dlopen(None)  # calls release the GIL

FROZEN = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
"""The seals that the memory of a model must have."""


class ModelBytes(Protocol):
    """The bytes of a model."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""

    def asarray(self) -> NDArray[np.uint8]:
        """A view, which keeps the memory mapped."""


def sealed(fd: int) -> Region:
    """Maps the memory of a model that another process sent. Owns `fd`. Raises InvalidModel unless it is sealed."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & FROZEN != FROZEN:
        os.close(fd)
        raise InvalidModel("the model's memory is not sealed against writing, shrinking and growing")
    try:
        region = Region.from_fd(fd, os.fstat(fd).st_size, writable=False)
    except (ValueError, OSError, InvalidDescriptor) as error:
        raise InvalidModel(f"the model's memory cannot be used: {error}") from error
    region.close()
    return region


def same_memory(one: ModelBytes, other: ModelBytes) -> bool:
    """Whether two models of equal size have equal bytes."""
    return same_bytes(_address(one), _address(other), one.nbytes)


def _address(region: ModelBytes) -> int:
    return region.asarray().ctypes.data


def same_bytes(one: int, other: int, nbytes: int) -> bool:
    """Whether two ranges of memory have equal bytes. Releases the GIL meanwhile."""
    return not _libc.memcmp(_ffi.cast("void *", one), _ffi.cast("void *", other), nbytes)
