"""Tensors in memory of a GPU, by DLPack: ours for PyTorch, CuPy and others, and theirs for us. Nothing is copied.

A capsule is made and read by Python's C API, through ctypes. What a capsule describes lives until its consumer calls
its deleter: until then `_lent` keeps the tensor.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import DTypeLike

CUDA = 2  #: DLPack's number of NVIDIA's GPUs
_NAME, _USED = b"dltensor", b"used_dltensor"
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}  # of a numpy kind
_KINDS = {code: kind for kind, code in _CODES.items()} | {4: "bfloat"}
_BFLOAT = 4


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_api = ctypes.pythonapi
_new, _get, _is_valid, _rename = (
    getattr(_api, f"PyCapsule_{verb}") for verb in ("New", "GetPointer", "IsValid", "SetName")
)
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, _Destructor)
_lent: dict[int, Any] = {}
_numbers = itertools.count(1)


class GpuTensor:
    """A part of a `GpuPool` as a tensor: `torch.from_dlpack(tensor)`, `cupy.from_dlpack(tensor)`.

    `address` is for the GPU alone. The pool lives as long as the tensor, and what was made of it by others.
    """

    def __init__(
        self, owner: object, address: int, dtype: DTypeLike, shape: tuple[int, ...], device: tuple[int, int]
    ) -> None:
        """`device`: DLPack's type and number."""
        self._owner, self.address, self.dtype, self.shape, self._device = owner, address, np.dtype(dtype), shape, device
        if _code(self.dtype) is None or not self.dtype.isnative:
            raise ValueError(f"dtype={self.dtype}: DLPack has whole numbers, floats, complex numbers and bools")

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self._device[0] != CUDA:
            raise AttributeError("it lies in memory of the CPU")
        data = self.address, False
        return {"version": 3, "shape": self.shape, "typestr": self.dtype.str, "data": data, "strides": None}

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Return a capsule without a version, which every consumer takes. No stream has work on it that a consumer
        would have to wait for: results come when the GPU is done.
        """
        if copy or (dl_device is not None and tuple(dl_device) != self._device):
            raise BufferError(f"dl_device={dl_device}, copy={copy}: it stays where it is, on device {self._device}")
        return _capsule(self)


def _code(dtype: np.dtype[Any]) -> int | None:
    """Return DLPack's number of a kind of elements; None: it has none. ml_dtypes adds bfloat16 to numpy."""
    return _BFLOAT if dtype.name == "bfloat16" else _CODES.get(dtype.kind)


def lent_tensors() -> int:
    """Return how many tensors of this process others have, or could still take out of a capsule."""
    return len(_lent)


def _capsule(tensor: GpuTensor) -> object:
    number, rank = next(_numbers), len(tensor.shape)
    shape = (ctypes.c_int64 * max(1, rank))(*tensor.shape)
    managed = _Managed()
    device_type, device_id = tensor.__dlpack_device__()
    managed.tensor = _Tensor(
        data=tensor.address,
        device_type=device_type,
        device_id=device_id,
        ndim=rank,
        code=_code(tensor.dtype) or 0,
        bits=8 * tensor.dtype.itemsize,
        lanes=1,
        shape=ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)),
        strides=None,  # without gaps
    )
    managed.context, managed.deleter = number, _deleter
    _lent[number] = tensor, shape, managed
    capsule: object = _new(ctypes.addressof(managed), _NAME, _destructor)
    return capsule


def _give_back(managed: Any) -> None:
    """Give the memory back. The consumer calls it when it is done."""
    _lent.pop(managed.contents.context, None)


def _drop(capsule: int) -> None:
    """Give the tensor of a capsule back that no consumer took. Python calls it when the capsule is gone."""
    if _capsule_is(capsule, _NAME):
        _lent.pop(ctypes.cast(_pointer_in(capsule), ctypes.POINTER(_Managed)).contents.context, None)


_deleter, _destructor = _Deleter(_give_back), _Destructor(_drop)  # which C calls: they are never freed


def _capsule_is(capsule: Any, name: bytes) -> bool:
    _is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.c_void_p, ctypes.c_char_p)
    return bool(_is_valid(capsule, name))


def _pointer_in(capsule: Any) -> int:
    _get.restype, _get.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p)
    return int(_get(capsule, _NAME))


class BorrowedTensor(NamedTuple):
    """A tensor of another library, valid within `borrowed`. dtype: as numpy would write it, for people."""

    address: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


@contextmanager
def borrowed(source: Any, device: tuple[int, int], stream: int) -> Iterator[BorrowedTensor]:
    """Yield a tensor of another library on that device. Its library lets `stream` wait for the work that makes it.

    Raise ValueError for what lies elsewhere, or has gaps.
    """
    if not hasattr(source, "__dlpack__") or not hasattr(source, "__dlpack_device__"):
        raise ValueError(f"source: a {type(source).__name__} has no __dlpack__; give an array or a tensor")
    where = tuple(int(part) for part in source.__dlpack_device__())
    if where != device:
        raise ValueError(f"source: it lies on DLPack's device {where}, and the pool on {device}; move it there first")
    capsule = source.__dlpack__(stream=stream)
    if not _capsule_is(id(capsule), _NAME):
        raise ValueError(f"source: {type(source).__name__}.__dlpack__ returns {capsule!r:.80}, and no DLPack capsule")
    managed = ctypes.cast(_pointer_in(id(capsule)), ctypes.POINTER(_Managed))
    _rename.restype, _rename.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
    _rename(capsule, _USED)
    try:
        yield _described(managed.contents.tensor)
    finally:
        if managed.contents.deleter:
            managed.contents.deleter(managed)


def _described(tensor: Any) -> BorrowedTensor:
    shape = tuple(tensor.shape[n] for n in range(tensor.ndim))
    step = 1
    for n in reversed(range(tensor.ndim)):
        if tensor.strides and shape[n] > 1 and tensor.strides[n] != step:
            raise ValueError(f"source: a tensor of shape {shape} with gaps between its elements; make it contiguous")
        step *= shape[n]
    nbytes = math.prod(shape) * tensor.lanes * -(-tensor.bits // 8)
    return BorrowedTensor(
        int(tensor.data or 0) + tensor.byte_offset, nbytes, f"{_KINDS.get(tensor.code, '?')}{tensor.bits}", shape
    )
