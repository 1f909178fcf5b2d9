"""A model lowered and made ready to run for inputs of given shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import numpy as np

from driver.devices.lowering import placing
from driver.devices.lowering.alignment import ALIGNMENT, aligned, offset_in
from driver.devices.lowering.errors import require
from driver.devices.lowering.node import draft, naming
from driver.devices.onnxruntime.library import Session, exact_options, library, optimised_file
from driver.devices.onnxruntime.lower import LOWERINGS, OrtGraph, OrtNode
from driver.devices.onnxruntime.lower.control import placed
from driver.devices.onnxruntime.lower.node import stored_type
from driver.devices.onnxruntime.onnx_file import taken_apart
from driver.devices.onnxruntime.writer import model as model_bytes
from driver.interface import Saved
from driver.nn.types import byte_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from driver.devices.lowering.placing import Tensors
    from driver.devices.onnxruntime.providers import ExecutionProvider
    from driver.nn import Model, Operation, Subgraph
    from driver.nn.operation import Call, Tensor
    from driver.nn.plan import Prepared


_MOST_WRITTEN = 1 << 28
"""Bytes of weights up to which a program is kept as ONNX Runtime optimises it: it writes them all once more."""

Trial = Callable[[bytes, "Weights"], str | None]
"""Why a graph of one operation cannot be run; None: it can."""


def obstacles(model: Model, trial: Trial | None = None) -> list[str | None]:
    """Return for each operation of the main subgraph why it cannot be lowered; for every size of dimensions left open.

    `trial`: is asked about each operation that can be.
    """
    draft_it = partial(_draft, model.referenced, trial)
    return placing.obstacles(model, draft_it, partial(placed, referenced=model.referenced))


def _draft(
    referenced: Sequence[Subgraph],
    trial: Trial | None,
    operation: Prepared,
    call: Call,
    graph: Subgraph,
    tensors: Tensors,
) -> None:
    found = OrtGraph(graph, tensors, referenced, is_draft=True)
    draft(found, partial(OrtNode, found, operation.operation, call), operation.operation, LOWERINGS)
    if trial is not None:
        reason = trial(*_alone(referenced, operation.operation, call, graph, tensors=tensors))
        require(reason is None, reason or "")


def _alone(
    referenced: Sequence[Subgraph], operation: Operation, call: Call, graph: Subgraph, tensors: Tensors
) -> tuple[bytes, Weights]:
    """Return a graph of one operation, whose inputs are those of its operands that are no constants."""
    found = OrtGraph(graph, tensors, referenced)
    given = [i for i in dict.fromkeys(operation.inputs) if (tensor := tensors.get(i)) is not None and not tensor.fixed]
    inputs = [(found.input(i), stored_type(found.tensor(i)), found.tensor(i).shape) for i in given]
    LOWERINGS[operation.type](OrtNode(found, operation, call))
    outputs = [found.output(i) for i in operation.outputs]
    return model_bytes(found.writer.graph(inputs, outputs)), found.writer.weights


class OrtPort(NamedTuple):
    """An input or output of the session."""

    number: int  #: among the model's inputs or outputs
    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int


class OrtDescription(NamedTuple):
    """A lowered model without its weights, in plain values."""

    inputs: Sequence[OrtPort]
    outputs: Sequence[OrtPort]
    operations: Sequence[str]  #: by ONNX's names
    work: int  #: multiply-adds of an execution
    loops: int
    tables: Sequence[str]  #: the weights that are inputs as well, so that optimisers leave them alone
    graph: bytes  #: ONNX
    is_optimised: bool = False  #: ONNX Runtime has made the graph of one, and leaves it as it is


Weights = list[tuple[str, "NDArray[Any]"]]
"""Constants outside the graph, by their names in it."""


def lowered(
    model: Model, operations: Sequence[Prepared], tensors: Tensors, pace: Callable[[], object]
) -> tuple[OrtDescription, Weights]:
    """Return a model for ONNX Runtime. `tensors`: constants and inputs, None for omitted ones. Raises
    ExecutionFailed.
    """
    graph = model.main
    found = OrtGraph(graph, tensors, model.referenced)
    given = [(n, i) for n, i in enumerate(graph.inputs) if tensors.get(i) is not None]
    inputs = [_port(n, found.input(i), stored_type(found.tensor(i)), found.tensor(i)) for n, i in given]
    for operation in operations:
        with naming(operation, "onnxruntime"):
            call = placed(operation, graph, tensors, model.referenced)
            LOWERINGS[operation.operation.type](OrtNode(found, operation.operation, call))
        pace()
    outputs = [_port(n, *found.output(i), found.tensor(i)) for n, i in enumerate(graph.outputs)]
    written = found.writer.graph(
        [(port.name, port.type, port.shape) for port in inputs], [(port.name, port.type) for port in outputs]
    )
    names, tables = found.writer.operations, [name for name, *_ in found.writer.tables]
    description = OrtDescription(
        inputs, outputs, names, found.work, loops=found.loops, tables=tables, graph=model_bytes(written)
    )
    return description, found.writer.weights


class OrtProgram:
    """A session and its inputs and outputs."""

    def __init__(
        self,
        lower: Callable[[], tuple[OrtDescription, Weights]],
        threads: Callable[[int], int],
        provider: ExecutionProvider | None,
        *,
        is_quick: bool = False,
    ) -> None:
        """`lower`: as `lowered`. The session has the weights that it reads; they are lowered again when needed.
        `is_quick`: as `exact_options` has it. Raise LibraryFailed.
        """
        self._lower, self._threads, self.provider, self._is_quick = lower, threads, provider, is_quick
        description, weights = lower()
        self.is_optimised = description.is_optimised
        self.inputs, self.outputs = description.inputs, description.outputs
        self.operations, self.work, self.loops = list(description.operations), description.work, description.loops
        self.threads = threads(description.work)
        options = exact_options(self.threads, is_quick=is_quick)
        lane = None if provider is None or self.loops else provider.lane()
        in_place = description.tables if provider is None else ()
        if self.is_optimised:
            options.graph_optimization_level = library().GraphOptimizationLevel.ORT_DISABLE_ALL
            in_place = [name for name, _ in weights]
        self.session = Session(
            description.graph, weights, provider=provider, options=options, lane=lane, in_place=in_place
        )
        if provider is not None:
            provider.check(self.session.on_cpu)

    def improved(self) -> OrtProgram:
        """Return the program, made thoroughly and faster to run. Raise LibraryFailed."""
        return OrtProgram(self._lower, self._threads, self.provider)

    def saved(self, root: NDArray[np.uint8]) -> Saved:
        """Return what `restored` takes."""
        description, weights = self._lower()
        if self.provider is None and not (self._is_quick or self.is_optimised):
            description, weights = _optimised(description, weights, exact_options(self.threads))
        return saved(description, weights, root)


def _optimised(description: OrtDescription, weights: Weights, options: Any) -> tuple[OrtDescription, Weights]:
    """Return a program as ONNX Runtime has optimised it, if it can be written, and has no table to be read in place."""
    if description.tables or sum(array.nbytes for _, array in weights) > _MOST_WRITTEN:
        return description, weights
    found = optimised_graph(description.graph, weights, dict(weights), options)
    if found is None:
        return description, weights
    graph, kept = found
    return description._replace(graph=graph, is_optimised=True), kept


def optimised_graph(
    graph: bytes, weights: Weights, places: Mapping[str, NDArray[Any]], options: Any
) -> tuple[bytes, Weights] | None:
    """Return a graph as ONNX Runtime optimises it, and its weights; None: it cannot be written.

    A weight that the optimisers have left as it was stays where it lies: `places` has the bytes of each by its name.
    """
    written = optimised_file(graph, weights, options)
    if written is None:
        return None
    found = taken_apart(written)
    return found.graph, [(name, _as_it_was(array, places.get(name))) for name, array in found.weights]


def _as_it_was(array: NDArray[Any], place: NDArray[Any] | None) -> NDArray[Any]:
    if place is None:
        return array
    known = place.reshape(-1).view(np.uint8)
    if not np.array_equal(known, array.reshape(-1).view(np.uint8)):
        return array
    return known.view(array.dtype).reshape(array.shape)


def saved(description: Any, weights: Weights, root: NDArray[np.uint8], alignment: int = ALIGNMENT) -> Saved:
    """Plain values and weights, for `restored`. Weights that lie in `root`, aligned, are not saved a second time."""
    places, block, end = [], [np.empty(0, np.uint8)], 0
    for name, array in weights:
        offset = offset_in(root, array, alignment)
        places.append((name, array.dtype.str, array.shape, offset is not None, end if offset is None else offset))
        if offset is None:
            block += [array.reshape(-1).view(np.uint8), np.zeros(-array.nbytes % ALIGNMENT, np.uint8)]
            end += array.nbytes + block[-1].nbytes
    return Saved([msgpack.packb([description, places])], [np.concatenate(block)])


def restored_program(saved: Saved, root: NDArray[np.uint8]) -> tuple[OrtDescription, Weights]:
    """Return a program that was saved by this version of the device, as `lowered` does, and the bytes of the model."""
    (inputs, outputs, *rest), weights = restored(saved, root)
    sources, targets = ([OrtPort(*port) for port in side] for side in (inputs, outputs))
    return OrtDescription(sources, targets, *rest), weights


def restored(saved: Saved, root: NDArray[np.uint8]) -> tuple[Any, Weights]:
    """Return what `saved` was given, from memory with these contents."""
    plain, places = msgpack.unpackb(saved.model[0], use_list=False)
    weights: Weights = []
    for name, dtype, shape, lies_there, offset in places:
        block: Any = root if lies_there else saved.data[0]
        nbytes = np.dtype(dtype).itemsize * math.prod(shape)
        weights.append((name, aligned(block[offset : offset + nbytes]).view(dtype).reshape(shape)))
    return plain, weights


def _port(number: int, name: str, type_: str, tensor: Tensor) -> OrtPort:
    return OrtPort(number, name, type_, tensor.shape, nbytes=byte_size(tensor.type, tensor.shape))
