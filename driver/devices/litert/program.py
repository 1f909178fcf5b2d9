"""A model lowered and compiled for inputs of given shapes."""

from __future__ import annotations

import math
import mmap
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgpack
import numpy as np

from burst._core import ffi, lib
from driver.devices.litert.cuts import cost, crossing, cuts, products
from driver.devices.litert.library import TensorBuffers
from driver.devices.litert.lower import LOWERINGS, LiteRtGraph, LiteRtNode, Lowering
from driver.devices.litert.lower.control import TABLE as CONTROL
from driver.devices.litert.lower.control import looping
from driver.devices.litert.lower.node import Crossing, LiteRtForm, stored_type
from driver.devices.litert.weights import Image, aligned
from driver.devices.lowering import placing
from driver.devices.lowering.errors import LibraryFailed
from driver.devices.lowering.node import draft, naming
from driver.devices.lowering.placing import Tensors, place
from driver.interface import Saved
from driver.nn.arena import lay_out
from driver.nn.types import byte_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from driver.devices.litert.library import Compiled
    from driver.nn import Model, Subgraph
    from driver.nn.operation import Call, Tensor
    from driver.nn.plan import Prepared


LARGE_WEIGHTS, MOST_USES = 2**21, 4
"""A relaxed model is computed in float16 if it has at least so many weights and uses each, on average, at most so often
in an execution.
"""


def obstacles(model: Model) -> list[str | None]:
    """Return for each operation of the main subgraph, whether it can be lowered; for every size of dimensions left
    open.
    """
    return placing.obstacles(model, partial(_draft, Lowering(model, LOWERINGS, is_draft=True)))


def _draft(lowering: Lowering, operation: Prepared, call: Call, graph: Subgraph, tensors: Tensors) -> None:
    found = LiteRtGraph(graph, tensors, lowering)
    draft(found, partial(LiteRtNode, found, operation.operation, call), operation.operation, LOWERINGS)


class LiteRtPort(NamedTuple):
    """An input or output of the compiled model."""

    number: int  #: among the model's inputs or outputs
    type: str
    shape: tuple[int, ...]
    nbytes: int
    copied: bool  #: checked in private memory


class Segment(NamedTuple):
    """A segment, which runs in one go. Its tensors are places among the inputs, the outputs and the intermediate
    tensors.
    """

    inputs: list[int]
    outputs: list[int]
    loops: int  #: the most WHILEs that it runs in sequence


class Between(NamedTuple):
    """A tensor that one segment passes to another: TFLite type, dimensions, and its place in the common block."""

    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class LiteRtDescription(NamedTuple):
    """A lowered model without its flatbuffer, in plain values."""

    inputs: Sequence[LiteRtPort]
    outputs: Sequence[LiteRtPort]
    shapes: Sequence[tuple[int, ...]]  #: of the outputs
    segments: Sequence[Segment]
    between: Sequence[Between]
    block: int  #: bytes of the block
    operations: Sequence[str]  #: by TFLite's names
    products: int  #: multiply-adds of an execution

    @classmethod
    def of(cls, plain: Sequence[Any]) -> LiteRtDescription:
        """Return the program from what msgpack read."""
        found = cls(*plain)
        return found._replace(
            inputs=[LiteRtPort(*port) for port in found.inputs],
            outputs=[LiteRtPort(*port) for port in found.outputs],
            segments=[Segment(*segment) for segment in found.segments],
            between=[Between(*between) for between in found.between],
        )


def lowered(
    model: Model, operations: Sequence[Prepared], tensors: Tensors, pace: Callable[[], object]
) -> tuple[LiteRtDescription, Image]:
    """Return a model for LiteRT. `tensors`: constants and inputs, None for omitted ones. Raise ExecutionFailed."""
    lowering = Lowering(model, LOWERINGS)
    graphs = _lowered(lowering, operations, tensors, pace)
    inputs, outputs, places = _ports(graphs)
    count = len(places)
    segments = [_segment(graph, places) for graph in graphs]
    between, block = _between(graphs, segments, count, places)
    for graph in graphs:
        graph.writer.inputs, graph.writer.outputs = list(graph.takes.values()), list(graph.gives.values())
    is_plain = len(lowering.writer.sections) == 1
    image = lowering.writer.finish([] if is_plain else [graph.writer for graph in graphs], pace)
    image.half = model.relaxed and _gains_by_half(model, lowering.products)
    shapes = [graphs[-1].tensor(i).shape for i in model.main.outputs]
    names = lowering.writer.names
    return LiteRtDescription(
        inputs, outputs, shapes, segments, between=between, block=block, operations=names, products=lowering.products
    ), image


def _gains_by_half(model: Model, products: int) -> bool:
    """Return True if float16 makes the model faster on a processor that computes in float32 and only converts float16.

    It does where weights are read from memory once or a few times in an execution and do not fit into a cache: half as
    many bytes are read. Convolutions, which use each weight often, take three times as long.
    """
    weights = sum(
        math.prod(o.dimensions) for o in model.main.operands if o.type.name == "TENSOR_FLOAT32" and o.value is not None
    )
    return weights >= LARGE_WEIGHTS and products <= MOST_USES * weights


class Runnable(Protocol):
    """The facts about a model that an execution of it needs."""

    turn: Any  #: burst_turn: one execution runs at a time
    between: TensorBuffers  #: memory of the tensors between segments

    @property
    def compiled(self) -> Compiled:
        """The model that LiteRT runs."""

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """The shapes of the outputs."""

    @property
    def inputs(self) -> Sequence[LiteRtPort]:
        """Those that it reads."""

    @property
    def outputs(self) -> Sequence[LiteRtPort]:
        """All of them."""

    @property
    def segments(self) -> Sequence[Segment]:
        """The segments that run, one after the other."""


class LiteRtProgram:
    """The compiled model, its segments and ports, and the lock that lets one execution run at a time.

    between: memory of the tensors between segments. All executions share it, as they take turns.
    """

    def __init__(
        self,
        description: LiteRtDescription,
        image: Image,
        threads: Callable[[int], int],
        compiled: Callable[[Image, int], Compiled],
    ) -> None:
        """Compile the segments. Raise LibraryFailed."""
        self.description, self.image = description, image
        self.shapes, self.segments = description.shapes, description.segments
        self.inputs, self.outputs = description.inputs, description.outputs
        self.operations = list(description.operations)
        self.threads = threads(description.products)
        self.copied_weights = image.bytes.nbytes
        block = aligned(description.block)
        self.between = TensorBuffers([(b.type, b.shape, block[b.offset :][: b.nbytes]) for b in description.between])
        self.turn = ffi.new("burst_turn *")
        lib.burst_turn_init(self.turn)
        try:
            self.compiled = compiled(image, self.threads)
        except LibraryFailed:
            if not image.half:
                raise
            image.half = False  # this processor, or one of the operations, has no float16
            self.compiled = compiled(image, self.threads)
        self.compiled.ask(_address(ffi.addressof(lib, "burst_foreign_ends")), _address(self.turn))

    def saved(self, root: NDArray[np.uint8]) -> Saved | None:
        """Return what `restored` takes; None where LiteRT reads weights outside `root`."""
        image = self.image
        if image.root not in {0, root.nbytes} or (image.root and root.ctypes.data % mmap.PAGESIZE):
            return None
        plain = msgpack.packb([self.description, bool(image.root), image.shareable, image.half])
        return Saved([plain, image.bytes])


def restored(saved: Saved, root: NDArray[np.uint8]) -> tuple[LiteRtDescription, Image]:
    """Return a program that was saved by this version of the device, as `lowered` does; `root` follows it in memory."""
    plain, front = saved.model
    description, has_root, shareable, half = msgpack.unpackb(plain, use_list=False)
    assert isinstance(front, np.ndarray)
    image = Image.of(front, root if has_root else None, shareable=shareable, half=half)
    return LiteRtDescription.of(description), image


def _address(pointer: Any) -> int:
    return int(ffi.cast("uintptr_t", pointer))


def _lowered(
    lowering: Lowering, operations: Sequence[Prepared], tensors: Tensors, pace: Callable[[], object]
) -> list[LiteRtGraph]:
    """Return the segments of the main subgraph."""
    main, calls = lowering.model.main, []
    for operation in operations:
        with naming(operation, "litert"):
            calls.append(place(operation, main, tensors))
        lowering.products += products(operation.operation, calls[-1])
        pace()
    costs = [cost(o, call) for o, call in zip(main.operations, calls, strict=True)]
    begins = set(cuts(costs, crossing(main, calls), looping(lowering.model)))
    graphs = [LiteRtGraph(main, tensors, lowering)]
    for i in main.inputs:
        if tensors.get(i) is not None:
            with naming(operations[0], "litert"):
                graphs[0].expect(i)
    for operation, call in zip(operations, calls, strict=True):
        if operation.index in begins:
            graphs.append(LiteRtGraph(main, tensors, lowering, graphs[-1]))
        with naming(operation, "litert"):
            LOWERINGS[operation.operation.type](LiteRtNode(graphs[-1], operation.operation, call))
        pace()
    graphs[-1].close()
    return graphs


def _ports(graphs: Sequence[LiteRtGraph]) -> tuple[list[LiteRtPort], list[LiteRtPort], dict[Crossing, int]]:
    """Return the inputs that are read, the outputs, and the place of each in this order."""
    last, main = graphs[-1], graphs[-1].subgraph
    private = last.lowering.private
    taken = {key for graph in graphs for key in graph.takes}
    # TFLite may keep in an output what it still reads, or a loop variable.
    exposed = {i for operation in main.operations for i in operation.inputs}
    exposed |= {i for operation in main.operations if operation.type in CONTROL for i in operation.outputs}
    ports: tuple[list[LiteRtPort], list[LiteRtPort]] = [], []
    places: dict[Crossing, int] = {}
    for n, i in enumerate(main.inputs):
        if last.tensors.get(i) is not None and (i, LiteRtForm(stored_type(last.tensor(i)))) in taken:
            tensor = last.tensor(i)
            places[i, LiteRtForm(stored_type(tensor))] = len(places)
            ports[0].append(_port(n, tensor, stored_type(tensor), copied=i in last.copied or tensor.type in private))
    for n, i in enumerate(main.outputs):
        tensor, form = last.tensor(i), last.results[i]
        places[i, form] = len(places)
        ports[1].append(_port(n, tensor, form.type, copied=i in exposed and tensor.type in private))
    return *ports, places


def _port(number: int, tensor: Tensor, type_: str, *, copied: bool) -> LiteRtPort:
    return LiteRtPort(number, type_, tensor.shape, byte_size(tensor.type, tensor.shape), copied=copied)


def _segment(graph: LiteRtGraph, places: dict[Crossing, int]) -> Segment:
    """Add to `places` the tensors that it passes to other segments."""
    outputs = [places.setdefault(key, len(places)) for key in graph.gives]
    return Segment([places[key] for key in graph.takes], outputs, graph.loops)


def _between(
    graphs: Sequence[LiteRtGraph], segments: Sequence[Segment], first: int, places: dict[Crossing, int]
) -> tuple[list[Between], int]:
    """Return the tensors between segments, from place `first` on, and the bytes of their block."""
    crossing = {places[key]: (graph, key[1], tensor) for graph in graphs for key, tensor in graph.gives.items()}
    found = {k: (form.type, graph.writer.dimensions(t)) for k, (graph, form, t) in crossing.items() if k >= first}
    sizes = {k: math.prod(shape) * np.dtype(type_.lower()).itemsize for k, (type_, shape) in found.items()}
    offsets, nbytes = lay_out([(segment.inputs, segment.outputs) for segment in segments], sizes)
    return [Between(*found[k], offsets[k], sizes[k]) for k in sorted(found)], nbytes
