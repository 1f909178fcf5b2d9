"""A queue's passport: what another process needs to attach, and the checks it makes on arrival."""

from __future__ import annotations

import ast
import enum
import functools
import hashlib
import os
import weakref
from dataclasses import dataclass, field
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any

import numpy as np

from fmq._core import ffi, lib
from fmq.errors import InvalidDescriptor
from fmq.region import Region

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike

_TEXT_AT, _TEXT_MOST = 1024, 2048  # where the control page holds the dtype in words, for those who open by name
_WIRE_VERSION = 1


class Flavour(enum.IntEnum):
    """How many may use a queue, and what happens when it is full."""

    SYNCHRONIZED = 1  #: one writer, one reader, nothing is ever lost, blocking allowed


@dataclass(frozen=True, slots=True)
class Geometry:
    """What is fixed about a queue: element dtype, capacity in elements, flavour."""

    dtype: np.dtype[Any]
    capacity: int
    flavour: Flavour = Flavour.SYNCHRONIZED
    nbytes: int = field(init=False)  #: of the whole region

    def __post_init__(self) -> None:
        size = self.dtype.itemsize
        if self.dtype.hasobject or not size:
            raise ValueError(f"dtype={self.dtype}: elements are plain data of a fixed size, without objects")
        if not isinstance(self.capacity, int) or self.capacity < 1:
            raise ValueError(f"capacity={self.capacity!r}: a queue holds at least one element")
        text = _text(self.dtype)
        if len(text) > _TEXT_MOST:
            raise ValueError(f"dtype with {len(self.dtype.fields or ())} fields: too long to describe")
        if _dtype(text) != self.dtype:
            raise ValueError(f"dtype={self.dtype}: cannot be described to another process; wrap it in a field")
        nbytes = lib.fmq_bytes(self.capacity, size) if self.capacity < 2**63 and size < 2**32 else 0
        if not nbytes:
            raise ValueError(f"capacity={self.capacity} of {size} bytes each: a queue holds less than 1 TiB")
        object.__setattr__(self, "nbytes", nbytes)

    def format(self, region: Region) -> None:
        """Makes a queue of zeroed memory."""
        text = _text(self.dtype)
        region.asarray(np.uint8, len(text), _TEXT_AT)[:] = np.frombuffer(text, np.uint8)
        code = lib.fmq_format(region.base, region.nbytes, self.capacity, self.dtype.itemsize, _hash(text))
        assert code == 0, "the region was made for this geometry"

    @classmethod
    def read(cls, region: Region) -> Geometry:
        """What a region says that it is. Raises InvalidDescriptor when that cannot be."""
        numbers = ffi.new("uint64_t *"), ffi.new("uint32_t *"), ffi.new("uint64_t *")
        if code := lib.fmq_geometry(region.base, region.nbytes, *numbers):
            raise InvalidDescriptor(f"the memory holds no queue that this version can use: {os.strerror(-code)}")
        capacity, size, digest = (n[0] for n in numbers)
        text = bytes(region.asarray(np.uint8, _TEXT_MOST, _TEXT_AT)).rstrip(b"\0")
        if _hash(text) != digest:
            raise InvalidDescriptor("the queue's dtype does not match its own hash: the memory is damaged")
        try:
            geometry = cls(_dtype(text), int(capacity))
        except ValueError as error:
            raise InvalidDescriptor(f"the memory holds no queue: {error}") from error
        if geometry.dtype.itemsize != size:
            raise InvalidDescriptor(
                f"dtype {geometry.dtype} has {geometry.dtype.itemsize} bytes; the queue says {size}"
            )
        return geometry


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Descriptor:
    """Names a queue in messages: its geometry, and its memory by descriptor or by name.

    It pickles through `multiprocessing` (an argument of `Process`, an item of a `Queue`) with its file descriptor; over
    a Unix socket of one's own, send `to_wire()` and the fds beside it.
    """

    dtype: np.dtype[Any]
    capacity: int
    flavour: Flavour
    sealed: bool
    name: str | None = None
    fd: int = -1  #: borrowed from the queue, or owned by a descriptor that arrived; -1 when the queue has a name

    def region(self) -> Region:
        """Attaches the memory after checking all that was said about it."""
        if self.name is not None:
            region = Region.open(self.name)
        else:
            nbytes = Geometry(self.dtype, self.capacity, self.flavour).nbytes
            region = Region.from_fd(os.dup(self.fd), nbytes, sealed=self.sealed)
        found = Geometry.read(region)
        if (found.dtype, found.capacity, found.flavour) != (self.dtype, self.capacity, self.flavour):
            raise InvalidDescriptor(
                f"the memory holds {found.capacity} x {found.dtype}; the descriptor says {self.capacity} x {self.dtype}"
            )
        return region

    def to_wire(self) -> tuple[list[Any], list[int]]:
        """The part for msgpack, and the file descriptors to send beside it."""
        plain = [_WIRE_VERSION, _text(self.dtype).decode(), self.capacity, int(self.flavour), self.sealed, self.name]
        return plain, [self.fd] if self.name is None else []

    @classmethod
    def from_wire(cls, plain: object, fds: Sequence[int]) -> Descriptor:
        """The reverse, from somebody who is not trusted. Owns the fds, whatever comes. Raises InvalidDescriptor."""
        try:
            return _owning(cls._from_wire(plain, fds))
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    @classmethod
    def _from_wire(cls, plain: object, fds: Sequence[int]) -> Descriptor:
        match plain:
            case [int(version), str(text), int(capacity), int(flavour), bool(sealed), None] if version == _WIRE_VERSION:
                pass
            case _:
                raise InvalidDescriptor(f"{plain!r:.100} is not a queue descriptor of version {_WIRE_VERSION}")
        if len(fds) != 1 or flavour not in tuple(Flavour):
            raise InvalidDescriptor(f"{len(fds)} file descriptors and flavour {flavour}: 1 and a known one are needed")
        try:
            geometry = Geometry(_dtype(text.encode()), capacity, Flavour(flavour))
        except ValueError as error:
            raise InvalidDescriptor(str(error)) from error
        return cls(geometry.dtype, capacity, geometry.flavour, sealed, None, fds[0])

    def __reduce__(self) -> tuple[Any, ...]:
        carried = None if self.name is not None else reduction.DupFd(self.fd)
        return _unpickle, (self.dtype, self.capacity, int(self.flavour), self.sealed, self.name, carried)


def _unpickle(
    dtype: np.dtype[Any], capacity: int, flavour: int, sealed: bool, name: str | None, carried: Any
) -> Descriptor:
    fd = -1 if carried is None else carried.detach()
    descriptor = Descriptor(dtype, capacity, Flavour(flavour), sealed, name, fd)
    return descriptor if carried is None else _owning(descriptor)


def _owning(descriptor: Descriptor) -> Descriptor:
    """Closes the file descriptor when nobody needs the descriptor any more; queues have their own duplicate."""
    weakref.finalize(descriptor, os.close, descriptor.fd).atexit = False
    return descriptor


def geometry(dtype: DTypeLike, capacity: int, flavour: Flavour = Flavour.SYNCHRONIZED) -> Geometry:
    """The geometry of a queue to be made. Raises ValueError naming the argument."""
    return Geometry(np.dtype(dtype), capacity, Flavour(flavour))


def _text(dtype: np.dtype[Any]) -> bytes:
    """One spelling per dtype, on every machine: byte order, names and offsets included."""
    return repr(np.lib.format.dtype_to_descr(dtype)).encode()


@functools.lru_cache(maxsize=64)  # parsing leaves cyclic garbage, which a device does not collect while bursts live
def _dtype(text: bytes) -> np.dtype[Any]:
    """The reverse, from bytes that somebody else wrote: literals only, and short ones."""
    if len(text) > _TEXT_MOST:
        raise InvalidDescriptor(f"a dtype of {len(text)} bytes: at most {_TEXT_MOST} are allowed")
    try:
        dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(ast.literal_eval(text.decode()))
    except (ValueError, SyntaxError, TypeError, LookupError, OverflowError, RecursionError, MemoryError) as error:
        raise InvalidDescriptor(f"{text!r:.100} is no dtype") from error
    if _text(dtype) != text:
        raise InvalidDescriptor(f"{text!r:.100} is not how dtype {dtype} is written")
    return dtype


def _hash(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
