"""Encodes and decodes models.

A model travels as one sealed memfd: the constants, each on a 64-byte boundary, then the structure as a stream of small
msgpack objects. It is sealed against writing, so what was checked stays true, and both processes of a device use the
same pages as weights. The objects are small, so that the engine can pause after each while bursts run.
"""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING, Any, Protocol

import msgpack
import numpy as np
from cffi import FFI

from driver.nn import InvalidModel, Model, Operand, OperandLifeTime, OperandType, Operation, Subgraph
from driver.nn.types import byte_size
from fmq import InvalidDescriptor, Region

if TYPE_CHECKING:
    from collections.abc import Callable

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


_VERSION = 1
_ALIGN = 64
_MAX_STRUCTURE = 64 * 2**20
_MAX_COUNT = 2**18  # operands or operations of a subgraph: one bit for each fits into a message
_MAX_NAME = 100
_UNREADABLE = (ValueError, TypeError, LookupError, ArithmeticError, msgpack.UnpackException, InvalidDescriptor)


def encode(model: Model) -> tuple[int, list[int]]:
    """A sealed memfd, which the caller closes, and the place of the structure in it: [offset, nbytes]."""
    fd = os.memfd_create("burst-model", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", closefd=False) as file:
            packer, objects = msgpack.Packer(), []
            for graph in (model.main, *model.referenced):
                objects += [[len(graph.operands), len(graph.operations), graph.inputs, graph.outputs]]
                objects += [_operand(o, file) for o in graph.operands]
                objects += [[o.type, o.inputs, o.outputs] for o in graph.operations]
            header = [_VERSION, model.relaxed, 1 + len(model.referenced)]
            structure = b"".join(packer.pack(o) for o in (header, *objects))
            offset = file.tell()
            file.write(structure)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, FROZEN | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd, [offset, len(structure)]


def _operand(operand: Operand, file: Any) -> list[Any]:
    value: Any = operand.value
    if operand.lifetime.is_constant:
        array = np.ascontiguousarray(value)
        file.write(bytes(-file.tell() % _ALIGN))
        value = [file.tell(), array.nbytes]
        file.write(array.reshape(-1).view(np.uint8).data)
    return [
        int(operand.type),
        operand.dimensions,
        operand.scale,
        operand.zero_point,
        int(operand.lifetime),
        value,
        operand.channel_quant,
        operand.number_of_consumers,
    ]


def decode(region: ModelBytes, where: object, pace: Callable[[], object] = lambda: None) -> Model:
    """Decodes a model in `sealed` memory. Constants are views of the memory and keep it mapped.

    Checks only that the bytes form a model; `driver.nn.validate` checks the model. Raises InvalidModel.
    """
    try:
        return _Decoder(region, where, pace).model()
    except _UNREADABLE as error:
        raise InvalidModel(f"the model's bytes cannot be read: {error or type(error).__name__}") from error


class _Decoder:
    def __init__(self, region: ModelBytes, where: object, pace: Callable[[], object]) -> None:
        match where:
            case [int(offset), int(size)] if (
                offset >= 0 and 0 < size <= _MAX_STRUCTURE and offset + size <= region.nbytes
            ):
                pass
            case _:
                raise ValueError(f"structure at {where!r:.60} is outside the model's {region.nbytes} bytes")
        self._bytes = region.asarray()
        self._size, self._pace = size, pace
        self._unpacker = msgpack.Unpacker(max_buffer_size=size, use_list=False, max_ext_len=0)
        self._unpacker.feed(bytes(self._bytes[offset : offset + size]))

    def _next(self) -> Any:
        self._pace()
        return self._unpacker.unpack()

    def model(self) -> Model:
        version, relaxed, graphs = self._next()
        if version != _VERSION or not 1 <= graphs <= _MAX_COUNT:
            raise ValueError(f"unsupported version {version!r:.20} with {graphs!r:.20} subgraphs")
        main, *referenced = [self._graph() for _ in range(graphs)]
        if self._unpacker.tell() != self._size:
            raise ValueError("there are bytes after the last subgraph")
        return Model(main, tuple(referenced), bool(relaxed))

    def _graph(self) -> Subgraph:
        n_operands, n_operations, inputs, outputs = self._next()
        if max(n_operands, n_operations) > _MAX_COUNT:
            raise ValueError(f"{n_operands} operands and {n_operations} operations; at most {_MAX_COUNT} are allowed")
        operands = [self._operand(n, *self._next()) for n in range(n_operands)]
        return Subgraph(operands, [self._operation(*self._next()) for _ in range(n_operations)], inputs, outputs)

    def _operand(
        self, n: int, kind: int, dims: Any, scale: float, zero: int, life: int, value: Any, quant: Any, uses: Any
    ) -> Operand:
        if not isinstance(kind, int):
            raise TypeError(f"an operand's type must be a number, not {type(kind).__name__}")
        try:
            if OperandLifeTime(life).is_constant:
                value = self._constant(OperandType.parse(kind), dims, *value)
            return Operand(kind, dims, scale, zero, life, value, quant, uses)
        except InvalidModel as error:
            raise InvalidModel(f"operand {n}: {error}") from None

    @staticmethod
    def _operation(kind: str, inputs: Any, outputs: Any) -> Operation:
        if not isinstance(kind, str) or len(kind) > _MAX_NAME:
            raise TypeError(f"an operation's type must be a name of at most {_MAX_NAME} letters")
        return Operation(kind, inputs, outputs)

    def _constant(self, kind: OperandType, dimensions: Any, offset: int, nbytes: int) -> NDArray[Any]:
        """A read-only view with the operand's dtype and dimensions; of bytes that do not fit them, as they lie there,
        for `driver.nn.validate` to refuse.
        """
        if not 0 <= offset <= offset + nbytes <= len(self._bytes):
            raise ValueError(
                f"a constant of {nbytes} bytes at {offset} is outside the model's {len(self._bytes)} bytes"
            )
        raw = self._bytes[offset : offset + nbytes]
        if nbytes != byte_size(kind, dimensions):
            return raw
        try:
            return raw.view(kind.dtype).reshape(dimensions)
        except ValueError:  # dimensions below 0, or too many of them
            return raw
