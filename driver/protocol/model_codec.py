"""Encodes and decodes models.

A model travels as one sealed memfd: the constants, each on a 64-byte boundary, then the structure as a stream of small
msgpack objects. It is sealed against writing, so what was checked stays true, and both processes of a device use the
same pages as weights. The objects are small, so that the engine can pause after each while bursts run.

Constants in pools that no process can write any more stay where they are: the pools' handles travel with the memfd.
Their offsets, and those in the memfd, count from the start of the range of addresses that `SealedModel` describes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from burst.channel import close_all
from burst.freezing import FROZEN
from burst.memory import frozen_memory
from driver.nn import ExtensionType, InvalidModel, Model, Operand, OperandLifeTime, OperandType, Operation, Subgraph
from driver.nn.extension import PREFIX_BITS
from driver.nn.operands import check_rank
from driver.nn.types import byte_size
from driver.nn.validate import GraphRules, located, validate_references
from driver.protocol.model_memory import MOST_HANDLES, Handle, SealedModel, is_made_whole, pages, same_bytes
from fmq import InvalidDescriptor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from burst.memory import FrozenMemory
    from driver.protocol.model_memory import ModelBytes


_VERSION = 1
_ALIGN = 64
_MAX_STRUCTURE = 32 * 2**20
_MAX_COUNT = 2**18  # operands or operations of all subgraphs: one bit for each fits into a message
_MAX_OBJECT = 4 * 2**20  # bytes: unpacking one holds the GIL
_CHUNK = 2**16  # bytes that are unpacked without a look at what they are
_MAX_NAME = 201  # of an extension and its operation
_MAX_TEXT = 512  # bytes
_MAX_EXTENSIONS, _MAX_TYPES = 64, 2**12  # of each extension
_DTYPE = re.compile(r"[<|][biufcV][0-9]{1,5}")
_BY_REFERENCE = OperandLifeTime.CONSTANT_REFERENCE
_UNREADABLE = (ValueError, TypeError, LookupError, ArithmeticError, msgpack.UnpackException, InvalidDescriptor)


class EncodedModel:
    """A model as it travels. It closes its memfd when it is dropped."""

    def __init__(self, layout: _Layout) -> None:
        """Make memory for the layout. Raise OSError."""
        self._layout = layout
        self.fd = os.memfd_create("burst-model", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        layout.write(self.fd)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, FROZEN | fcntl.F_SEAL_SEAL)

    @property
    def fds(self) -> list[int]:
        """The descriptors to send: the model's memfd, then the pools of its handles. They stay ours."""
        return [self.fd, *(memory.fd for memory in self._layout.handles)]

    @property
    def where(self) -> list[Any]:
        """[offset, bytes] of the structure; with handles also a list of [kind, offset, bytes] of each."""
        return self._layout.where

    def is_of(self, layout: _Layout) -> bool:
        """Return True if writing `layout` would give the same bytes: its model may have changed since this was
        encoded.
        """
        ours = self._layout
        if (ours.structure, ours.end, ours.handles) != (layout.structure, layout.end, layout.handles):
            return False
        with mmap.mmap(self.fd, 0, prot=mmap.PROT_READ) as memory:
            begin = np.frombuffer(memory, np.uint8).ctypes.data
            return all(same_bytes(begin + at, array.ctypes.data, array.nbytes) for at, array in layout.copied)

    def __del__(self) -> None:
        with suppress(AttributeError):  # none was made
            os.close(self.fd)


class _Layout:
    """Where the constants of a model go.

    copied: constants and their offsets in the memfd. end: of those, where the structure begins. handles: the parts of
    pools that are not copied.
    """

    def __init__(self, model: Model, most_handles: int) -> None:
        graphs, self._codes = (model.main, *model.referenced), dict(model.extensions)
        given = [o.value for graph in graphs for o in graph.operands if o.lifetime == _BY_REFERENCE]
        self.handles = _handles_of(given, most_handles)
        self.copied: list[tuple[int, NDArray[Any]]] = []
        self._starts, self._base = {}, 0
        for memory, handle in self.handles.items():
            self._starts[memory] = self._base - handle.offset
            self._base += pages(handle.nbytes)
        self.end = 0
        packer, objects = msgpack.Packer(), []
        for graph in graphs:
            objects += [[len(graph.operands), len(graph.operations), graph.inputs, graph.outputs]]
            objects += [self._operand(o) for o in graph.operands]
            objects += [[o.type, o.inputs, o.outputs] for o in graph.operations]
        header: list[Any] = [_VERSION, model.relaxed, 1 + len(model.referenced)]
        if model.extensions:
            header.append(_extensions_to_wire(model))
        self.structure = b"".join(packer.pack(o) for o in (header, *objects))

    @property
    def where(self) -> list[Any]:
        """The places of the model in its memory, as `EncodedModel` has them."""
        there = [self._base + self.end, len(self.structure)]
        return [*there, [list(handle) for handle in self.handles.values()]] if self.handles else there

    def write(self, fd: int) -> None:
        """Write the memfd."""
        with open(fd, "wb", closefd=False) as file:
            for start, array in self.copied:
                file.write(bytes(start - file.tell()))
                file.write(array.data)
            file.write(self.structure)

    def _operand(self, operand: Operand) -> list[Any]:
        value = self._constant(operand) if operand.lifetime.is_constant else operand.value
        return [
            operand_code(operand, self._codes),
            operand.dimensions,
            operand.scale,
            operand.zero_point,
            int(operand.lifetime),
            value,
            operand.channel_quant,
            operand.number_of_consumers,
            *([] if operand.extension_params is None else [operand.extension_params]),
        ]

    def _constant(self, operand: Operand) -> list[int]:
        if operand.lifetime == _BY_REFERENCE and (found := _in_pool(operand.value)) and found[0] in self.handles:
            return [self._starts[found[0]] + found[1], operand.value.nbytes]
        array: NDArray[Any] = np.ascontiguousarray(operand.value).reshape(-1).view(np.uint8)
        start = self.end + -self.end % _ALIGN
        self.copied.append((start, array))
        self.end = start + array.nbytes
        return [self._base + start, array.nbytes]


def _in_pool(value: Any) -> tuple[FrozenMemory, int] | None:
    """Return the frozen pool in which a constant lies and its offset in the pool's memory, if devices can use it
    there.
    """
    memory = frozen_memory(value)
    if memory is None or not value.nbytes or not value.flags.c_contiguous:
        return None
    offset = memory.offset + value.ctypes.data - memory.address
    return (memory, offset) if offset % _ALIGN == 0 else None


def _handles_of(values: Sequence[Any], most: int) -> dict[FrozenMemory, Handle]:
    """Return the part of each frozen pool in which constants lie, unless the pool has holes; of too many pools the
    largest parts.
    """
    found: dict[FrozenMemory, list[tuple[int, int]]] = {}
    for value in values:
        if place := _in_pool(value):
            found.setdefault(place[0], []).append((place[1], place[1] + value.nbytes))
    handles = {}
    for memory, used in found.items():
        if is_made_whole(memory.fd, used):
            start = min(used)[0] // mmap.PAGESIZE * mmap.PAGESIZE
            handles[memory] = Handle(memory.kind, start, max(end for _, end in used) - start)
    kept = sorted(handles, key=lambda memory: handles[memory].nbytes, reverse=True)[:most]
    return {memory: handle for memory, handle in handles.items() if memory in kept}


def encode(model: Model, most_handles: int = MOST_HANDLES, known: EncodedModel | None = None) -> EncodedModel:
    """Return the model as it travels; `known` if that is still the same.

    `most_handles`: how many pools may travel as handles; the constants in others are copied. 0: the memfd holds all.
    """
    layout = _Layout(model, most_handles)
    return known if known is not None and known.is_of(layout) else EncodedModel(layout)


def handles_in(where: object) -> list[Handle]:
    """Return the handles that travel with a model, as another process describes them. Raise InvalidModel."""
    match where:
        case [_, _]:
            return []
        case [_, _, [*plain]] if len(plain) <= MOST_HANDLES:
            return [_handle(one) for one in plain]
    raise InvalidModel(f"{where!r:.80} is not [offset, bytes] of the structure, and at most {MOST_HANDLES} handles")


def _handle(plain: object) -> Handle:
    match plain:
        case [str(kind), int(offset), int(nbytes)]:
            return Handle(kind, offset, nbytes)
    raise InvalidModel(f"{plain!r:.80} is no handle: [kind, offset, bytes]")


def sealed(fds: list[int], where: object) -> SealedModel:
    """Map the memory of a model that another process sent. Owns `fds`.

    Raise InvalidModel unless all of it is sealed against writing, shrinking and growing, and all of its pages exist.
    """
    try:
        handles = handles_in(where)
        if len(fds) != 1 + len(handles):
            raise InvalidModel(f"{len(fds)} descriptors came for a model with {len(handles)} handles")
        return SealedModel(fds, handles)
    finally:
        close_all(fds)


def decode(region: ModelBytes, where: object, pace: Callable[[], object] = lambda: None) -> Model:
    """Decode a model in `sealed` memory. Constants are views of the memory and keep it mapped.

    Checks only that the bytes form a model; `decode_valid` checks the model. Raise InvalidModel.
    """
    return _Decoder(region, where, pace, is_checked=False).model()


def decode_valid(region: ModelBytes, where: object, pace: Callable[[], object] = lambda: None) -> Model:
    """Decode a model, and check it against the rules of `driver.nn.validate`.

    Each rule is checked as soon as what it is about has been read, so a model costs no more than what comes before its
    first fault. `pace` is called before each operand and operation, and may raise. Raise InvalidModel.
    """
    model = _Decoder(region, where, pace, is_checked=True).model()
    validate_references(model, pace)
    return model


def operations_on(model: Model, is_meant: Callable[[Any], bool]) -> list[bool]:
    """Say of each operation of the main subgraph whether it, or a subgraph that it runs, reads a constant for whose
    value `is_meant` is true. For valid models.
    """
    known: dict[int, bool] = {}

    def reads(operand: Operand) -> bool:
        if operand.lifetime.is_constant:
            return is_meant(operand.value)
        return operand.lifetime == OperandLifeTime.SUBGRAPH and runs(operand.value)

    def runs(number: int) -> bool:
        if number not in known:
            graph = model.referenced[number]
            known[number] = any(reads(graph.operands[i]) for op in graph.operations for i in op.inputs)
        return known[number]

    return [any(reads(model.main.operands[i]) for i in operation.inputs) for operation in model.main.operations]


def operand_code(operand: Operand, prefixes: Mapping[str, int]) -> int:
    """Return the code of an operand's type in a model with these prefixes."""
    kind = operand.type
    return prefixes[kind.extension] << PREFIX_BITS | kind.number if isinstance(kind, ExtensionType) else int(kind)


def _extensions_to_wire(model: Model) -> list[Any]:
    """Return of each extension its name, its prefix, and [number, name, dtype, is_scalar] of the operand types used."""
    graphs = (model.main, *model.referenced)
    used = {o.type: None for graph in graphs for o in graph.operands if isinstance(o.type, ExtensionType)}
    return [
        [name, prefix, [[t.number, t.name, t.dtype.str, t.is_scalar] for t in used if t.extension == name]]
        for name, prefix in model.extensions
    ]


def _extensions_from_wire(plain: Any = ()) -> tuple[tuple[tuple[str, int], ...], dict[int, ExtensionType]]:
    """Return the names and prefixes, and the operand types by their codes. Raise InvalidModel, and what malformed data
    raises.
    """
    if len(plain) > _MAX_EXTENSIONS:
        raise ValueError(f"{len(plain)} extensions; at most {_MAX_EXTENSIONS} are allowed")
    prefixes: list[tuple[str, int]] = []
    types: dict[int, ExtensionType] = {}
    for name, prefix, its in plain:
        prefixes.append((name, prefix))
        if len(its) > _MAX_TYPES:
            raise ValueError(f"{len(its)} operand types of an extension; at most {_MAX_TYPES} are allowed")
        for number, word, dtype, is_scalar in its:
            if not (isinstance(dtype, str) and _DTYPE.fullmatch(dtype)):
                raise ValueError(f"{dtype!r:.40} is no dtype of an operand type")
            kind = ExtensionType(name, number, word, np.dtype(dtype), is_scalar=bool(is_scalar))
            if types.setdefault(prefix << PREFIX_BITS | number, kind) != kind:
                raise ValueError(f"extension {name}: two operand types have the number {number}")
    return tuple(prefixes), types


class _Decoder:
    def __init__(self, region: ModelBytes, where: object, pace: Callable[[], object], *, is_checked: bool) -> None:
        self._bytes, self._where, self._pace, self._is_checked = region.asarray(), where, pace, is_checked
        self._left = [_MAX_COUNT, _MAX_COUNT]  # operands and operations that further subgraphs may have
        self._unpacker = msgpack.Unpacker(
            max_buffer_size=_MAX_STRUCTURE,
            use_list=False,
            max_str_len=_MAX_TEXT,
            max_bin_len=_MAX_OBJECT,
            max_array_len=_MAX_COUNT,
            max_map_len=0,
            max_ext_len=0,
        )

    def model(self) -> Model:
        """Read the model. Raise InvalidModel."""
        try:
            self._start, self._end = self._bounds()
            self._next_byte = self._start
            return self._model()
        except InvalidModel:
            raise
        except _UNREADABLE as error:
            raise InvalidModel(f"the model's bytes cannot be read: {error or type(error).__name__}") from error

    def _bounds(self) -> tuple[int, int]:
        match self._where:
            case [int(offset), int(size), *_] if (
                offset >= 0 and 0 < size <= _MAX_STRUCTURE and offset + size <= len(self._bytes)
            ):
                return offset, offset + size
        raise ValueError(
            f"structure at {self._where!r:.60} is not in the model's {len(self._bytes)} bytes, or has more than "
            f"{_MAX_STRUCTURE}"
        )

    def _next(self) -> Any:
        """Return the next object of the stream."""
        self._pace()
        begin = self._unpacker.tell()
        while True:
            try:
                return self._unpacker.unpack()
            except msgpack.OutOfData:
                if self._unpacker.tell() - begin > _MAX_OBJECT:
                    raise ValueError(f"an object of the structure has more than {_MAX_OBJECT} bytes") from None
                self._feed()

    def _feed(self) -> None:
        """Let the unpacker have some more of the structure."""
        start, stop = self._next_byte, min(self._next_byte + _CHUNK, self._end)
        if start == stop:
            raise ValueError("the structure ends too early")
        self._unpacker.feed(bytes(self._bytes[start:stop]))
        self._next_byte = stop

    def _model(self) -> Model:
        version, relaxed, graphs, *extensions = self._next()
        if version != _VERSION or not 1 <= graphs <= _MAX_COUNT:
            raise ValueError(f"unsupported version {version!r:.20} with {graphs!r:.20} subgraphs")
        prefixes, self._types = _extensions_from_wire(*extensions)
        main, *referenced = [self._graph(number, graphs - 1) for number in range(graphs)]
        if self._start + self._unpacker.tell() != self._end:
            raise ValueError("there are bytes after the last subgraph")
        return Model(main, tuple(referenced), bool(relaxed), prefixes)

    def _graph(self, number: int, referenced: int) -> Subgraph:
        n_operands, n_operations, inputs, outputs = self._next()
        self._count(n_operands, n_operations)
        inputs, outputs = _indices(inputs), _indices(outputs)
        operands, operations = list[Operand](), list[Operation]()
        with located(number):
            rules = GraphRules(n_operands, n_operations, referenced, is_main=not number) if self._is_checked else None
            for n in range(n_operands):
                operands.append(self._operand(n, *self._next()))
                if rules:
                    rules.operand(operands[-1])
            if rules:
                rules.lists(inputs, outputs)
            for _ in range(n_operations):
                operations.append(self._operation(*self._next()))
                if rules:
                    rules.operation(operations[-1])
            if rules:
                rules.end()
        return Subgraph(operands, operations, inputs, outputs)

    def _count(self, *counts: int) -> None:
        """Count what a subgraph has."""
        self._left = [left - max(0, count) for left, count in zip(self._left, counts, strict=True)]
        if min(self._left) < 0:
            raise ValueError(
                f"{counts[0]} operands and {counts[1]} operations; at most {_MAX_COUNT} are allowed in all subgraphs"
            )

    def _operand(
        self,
        n: int,
        code: int,
        dims: Any,
        scale: float,
        zero: int,
        life: int,
        value: Any,
        quant: Any,
        uses: Any,
        params: Any = None,
    ) -> Operand:
        if not isinstance(code, int) or not isinstance(params, bytes | None):
            raise TypeError(f"an operand's type must be a number, not {type(code).__name__}, and its parameters bytes")
        if not isinstance(dims, tuple) or not isinstance(life, int) or not isinstance(uses, int | None):
            raise TypeError("an operand's dimensions must be a list, its lifetime and its number of consumers numbers")
        try:
            kind = self._types.get(code) or OperandType.parse(code)
            check_rank(dims)  # before anything is computed from them
            if OperandLifeTime.parse(life).is_constant:
                value = self._constant(kind, dims, *value)
            elif not isinstance(value, int | None):
                raise TypeError("the value of an operand that is no constant must be a number")
            return Operand(
                kind,
                dims,
                scale,
                zero,
                lifetime=life,
                value=value,
                channel_quant=quant,
                number_of_consumers=uses,
                extension_params=params,
            )
        except InvalidModel as error:
            raise InvalidModel(f"operand {n}: {error}") from None

    @staticmethod
    def _operation(kind: str, inputs: Any, outputs: Any) -> Operation:
        if not isinstance(kind, str) or len(kind) > _MAX_NAME:
            raise TypeError(f"an operation's type must be a name of at most {_MAX_NAME} letters")
        return Operation(kind, _indices(inputs), _indices(outputs))

    def _constant(self, kind: OperandType | ExtensionType, dimensions: Any, offset: int, nbytes: int) -> NDArray[Any]:
        """Return a read-only view with the operand's dtype and dimensions; of bytes that do not fit them, as they lie
        there, for `driver.nn.validate` to refuse. Code in C relies on the alignment.
        """
        if not 0 <= offset <= offset + nbytes <= len(self._bytes):
            raise ValueError(
                f"a constant of {nbytes} bytes at {offset} is outside the model's {len(self._bytes)} bytes"
            )
        if offset % _ALIGN:
            raise ValueError(f"a constant lies at {offset}, which is no multiple of {_ALIGN}")
        raw = self._bytes[offset : offset + nbytes]
        if nbytes != byte_size(kind, dimensions):
            return raw
        try:
            return raw.view(kind.stored_dtype).reshape(dimensions)
        except ValueError:  # dimensions below 0, or too many of them
            return raw


def _indices(plain: Any) -> tuple[int, ...]:
    if not isinstance(plain, tuple):
        raise TypeError(f"indices of operands must be a list, not {type(plain).__name__}")
    return tuple(map(int, plain))
