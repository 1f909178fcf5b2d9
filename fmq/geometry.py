"""Geometry: what never changes about a queue, and how its control page stores it."""

from __future__ import annotations

import ast
import enum
import functools
import hashlib
import operator
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fmq._core import ffi, lib
from fmq.errors import InvalidDescriptor

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from fmq.region import Region

CONTROL = 4096  #: bytes of the control page of csrc/fmq/layout.h; a broadcast queue has more (`Geometry.control_bytes`)
ALIGNMENT = 128  #: its offset in memory is a multiple of this
_TEXT_AT, _TEXT_MOST = 1024, 2048  # where it holds the dtype as text, for processes that open the queue by name


class Flavour(enum.IntEnum):
    """How many may use a queue, and what happens when it is full."""

    SYNCHRONIZED = 1  #: one writer, one reader; a full queue makes its writer wait, and nothing is ever lost
    UNSYNCHRONIZED = 2  #: one writer that never waits, any number of readers; a reader that is overtaken gets Overrun
    BROADCAST = 3  #: one writer, up to 64 readers, each of which gets all; the writer waits for the slowest that lives


@dataclass(frozen=True, slots=True)
class Geometry:
    """Element dtype, capacity in elements, flavour, and what follows from these.

    text: the dtype, as other processes read it. control_bytes: of the control page, or of the three of a broadcast
    queue. shape: the fmq_shape of the C core.
    """

    dtype: np.dtype[Any]
    capacity: int
    flavour: Flavour = Flavour.SYNCHRONIZED
    text: bytes = field(init=False, repr=False)
    ring_bytes: int = field(init=False)
    control_bytes: int = field(init=False, repr=False)
    shape: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        size = self.dtype.itemsize
        if self.dtype.hasobject or not size:
            raise ValueError(f"dtype={self.dtype}: elements are plain data of a fixed size, without objects")
        if self.capacity < 1:
            raise ValueError(f"capacity={self.capacity!r}: a queue holds at least one element")
        text = dtype_text(self.dtype).encode()
        if len(text) > _TEXT_MOST:
            raise ValueError(f"dtype with {len(self.dtype.fields or ())} fields: too long to describe")
        if _parsed(text) != self.dtype:
            raise ValueError(f"dtype={self.dtype}: cannot be described to another process; wrap it in a field")
        nbytes = lib.fmq_ring_bytes(self.capacity, size) if self.capacity < 2**63 and size < 2**32 else 0
        if not nbytes:
            raise ValueError(f"capacity={self.capacity} of {size} bytes each: a queue holds less than 1 TiB")
        shape = ffi.new("fmq_shape *", (self.capacity, _hash(text), size, int(self.flavour)))
        found = {"text": text, "ring_bytes": nbytes, "control_bytes": lib.fmq_control_bytes(self.flavour)}
        for name, value in (found | {"shape": shape}).items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, dtype: DTypeLike, capacity: int, flavour: Flavour = Flavour.SYNCHRONIZED) -> Geometry:
        """Return the geometry that a caller wants. Raise ValueError, which names the argument."""
        try:
            count = operator.index(capacity)
        except TypeError:
            raise ValueError(f"capacity={capacity!r}: a whole number of elements") from None
        if flavour not in tuple(Flavour):
            raise ValueError(f"flavour={flavour!r}: one of {[f'Flavour.{each.name}' for each in Flavour]}")
        return _made(np.dtype(dtype), count, Flavour(flavour))

    @classmethod
    def read(cls, control: Region, at: int) -> Geometry:
        """Return the geometry in a control page. Raise InvalidDescriptor for one that is impossible."""
        shape = ffi.new("fmq_shape *")
        if not 0 <= at <= control.nbytes - CONTROL:
            raise InvalidDescriptor(f"the memory holds no queue: {control.nbytes} bytes, a control page at {at}")
        if code := lib.fmq_shape_of(control.base + at, shape):
            raise InvalidDescriptor(f"the memory holds no queue that this version can use: {os.strerror(-code)}")
        if at > control.nbytes - lib.fmq_control_bytes(shape.flavour):
            raise InvalidDescriptor(f"the memory holds no queue: {control.nbytes} bytes, control pages at {at}")
        text = bytes(ffi.buffer(control.base + at + _TEXT_AT, _TEXT_MOST)).rstrip(b"\0")
        if _hash(text) != shape.dtype_hash:
            raise InvalidDescriptor("the queue's dtype does not match its own hash: the memory is damaged")
        try:
            geometry = _made(_parsed(text), shape.capacity, Flavour(shape.flavour))
        except ValueError as error:
            raise InvalidDescriptor(f"the memory holds no queue: {error}") from error
        if geometry.dtype.itemsize != shape.element_bytes:
            size = geometry.dtype.itemsize
            raise InvalidDescriptor(f"dtype {geometry.dtype} has {size} bytes; the queue says {shape.element_bytes}")
        return geometry

    def format(self, control: Region, at: int = 0) -> None:
        """Write a control page there."""
        page = ffi.buffer(control.base + at, self.control_bytes)
        page[:] = bytes(self.control_bytes)
        page[_TEXT_AT : _TEXT_AT + len(self.text)] = self.text
        code = lib.fmq_format(control.base + at, self.shape)
        assert code == 0, "the geometry was checked"


@functools.lru_cache(maxsize=64)
def _made(dtype: np.dtype[Any], capacity: int, flavour: Flavour) -> Geometry:
    """Return the geometry with these: nothing of it depends on the memory. Raise ValueError, InvalidDescriptor."""
    return Geometry(dtype, capacity, flavour)


@functools.lru_cache(maxsize=64)
def dtype_text(dtype: np.dtype[Any]) -> str:
    """Return the dtype as text, the same on every machine, with byte order, names and offsets."""
    return repr(np.lib.format.dtype_to_descr(dtype))


def parsed_dtype(text: str) -> np.dtype[Any]:
    """Return the dtype that an untrusted peer wrote as text. Raise InvalidDescriptor."""
    try:
        return _parsed(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidDescriptor(f"{text!r:.100} is no dtype") from error


@functools.lru_cache(maxsize=64)  # parsing leaves cyclic garbage, which a device does not collect while bursts live
def _parsed(text: bytes) -> np.dtype[Any]:
    """Parse bytes of another process: only literals, and only short ones."""
    if len(text) > _TEXT_MOST:
        raise InvalidDescriptor(f"a dtype of {len(text)} bytes: at most {_TEXT_MOST} are allowed")
    try:
        dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(ast.literal_eval(text.decode()))
    except (ValueError, SyntaxError, TypeError, LookupError, OverflowError, RecursionError, MemoryError) as error:
        raise InvalidDescriptor(f"{text!r:.100} is no dtype") from error
    if dtype_text(dtype).encode() != text:
        raise InvalidDescriptor(f"{text!r:.100} is not how dtype {dtype} is written")
    return dtype


@functools.lru_cache(maxsize=64)
def _hash(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
