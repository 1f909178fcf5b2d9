"""Models that are .onnx files: ONNX Runtime runs them as they are, with its own optimisations, on clients' memory.

ONNX Runtime computes the shapes of outputs in each run, and refuses memory of another shape. So an output is bound to
the client's memory once its shape is expected: from the file, or from an earlier run with inputs of the same shapes.
Before that, and where runs differ, ONNX Runtime allocates it, and it is copied.
"""

from __future__ import annotations

import math
import time
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from burst import OutputShape
from driver.deadlines import check
from driver.devices.files import CHOOSING, checked_input, source_of
from driver.devices.gpu_place import GpuPlace, address_of, checked_gpu_input, overlap, places_of
from driver.devices.lowering.errors import in_words
from driver.devices.onnxruntime.library import Session, library, session_options
from driver.devices.onnxruntime.onnx_file import SplitOnnxFile, taken_apart
from driver.devices.onnxruntime.program import optimised_graph, restored, saved
from driver.devices.onnxruntime.providers import INDEX_OPERATORS
from driver.devices.onnxruntime.state import StateExecution, in_state, tensor_bytes
from driver.devices.stoppable import StoppableRuns
from driver.errors import ExecutionFailed, OutputInsufficientSize
from driver.formats.onnx_schema import DTYPES, TYPES
from driver.interface import BoundExecution, BufferArgument, PreparedModel
from driver.nn import InvalidModel
from driver.nn.file_form import PACKED, file_of, tensor_type

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from numpy.typing import NDArray

    from driver.devices.gpu_place import Room
    from driver.devices.lowering.model import ThreadRule
    from driver.devices.onnxruntime.library import Place
    from driver.devices.onnxruntime.providers import ExecutionProvider
    from driver.interface import BindOptions, Saved
    from driver.nn import Model, Operand

    Shape = tuple[int, ...]
    Shapes = tuple[Shape | None, ...]


_LONG = 5e-3
"""Seconds. Runs that take longer make way for others, and end at their deadline."""

_MOST_SHAPES = 64
"""The most sets of input shapes of which a model remembers the output shapes."""


class OnnxFilePort(NamedTuple):
    """An input or output of the file."""

    name: str
    type: str
    shape: tuple[int | str | None, ...]
    dtype: str  #: as `driver.nn.file_form.tensor_type` takes it; ONNX Runtime's word of what is PACKED
    stored: np.dtype[Any]  #: of an element in memory

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return self.stored.itemsize

    def nbytes(self, shape: Shape) -> int:
        """Return the bytes of a tensor with this shape."""
        return self.size * math.prod(shape)

    @property
    def chooses(self) -> bool:
        """True if its values may choose an address, a size or a branch."""
        return self.dtype in CHOOSING


class OnnxFileModel(PreparedModel):
    """A file made ready to run, in any number of threads at once. No run leaves anything behind for the next."""

    serves_all = True

    def __init__(
        self,
        model: Model,
        file: SplitOnnxFile,
        threads: ThreadRule,
        provider: ExecutionProvider | None = None,
        external: Mapping[str, NDArray[np.uint8]] = MappingProxyType({}),
        *,
        is_optimised: bool = False,
    ) -> None:
        """`external`: as of `taken_apart`. `is_optimised`: the file comes from `optimised`.

        Raise InvalidModel, LibraryFailed.
        """
        self._model, self.provider, self.loops, settings = model, provider, file.loops, file.settings
        self._settings = settings
        self._threads = threads(file.work) if settings is None else settings.number(threads.measured)
        lane = None if provider is None or self.loops else provider.lane()
        options, in_place = self._options(external), frozenset[str]()
        if is_optimised:
            options.graph_optimization_level = library().GraphOptimizationLevel.ORT_DISABLE_ALL
            in_place = frozenset(name for name, _ in file.weights)
        self.session = Session(
            file.graph, file.weights, provider=provider, options=options, lane=lane, in_place=in_place
        )
        if provider is not None:
            provider.check(self.session.on_cpu, INDEX_OPERATORS)
        self._has_half_weights = any(array.dtype == np.float16 for _, array in file.weights)
        graph = model.main
        self.required = len(self.session.inputs)
        taken = self.session.inputs + (self.session.optional if len(graph.inputs) > self.required else [])
        self.inputs = _ports("input", taken, [graph.operands[i] for i in graph.inputs])
        self.outputs = _ports("output", self.session.outputs, [graph.operands[i] for i in graph.outputs])
        self.has_packed = any(port.type == PACKED.name for port in (*self.inputs, *self.outputs))
        is_asked = settings is not None and settings.threads > 0
        if provider is None and not (self.loops or self.has_packed or is_asked):
            self.threads = self._threads if threads.chosen(file.work) else 0
        # ONNX Runtime says [] for scalars and for unknown ranks.
        self._is_scalar = [graph.operands[i].type.is_scalar for i in graph.outputs]
        self.is_static = not self.has_packed and all(
            all(type(d) is int for d in port.shape) and (port.shape or scalar)
            for port, scalar in zip(self.outputs, self._is_scalar, strict=True)
        )
        self._learned: dict[Shapes, tuple[Shape, ...]] = {}
        self._varying: set[int] = set()
        # A file may name an input or another output as an output. ONNX Runtime writes to the memory of neither.
        names = [port.name for port in self.outputs]
        given = {port.name for port in self.inputs}
        self._unbound = {n for n, name in enumerate(names) if name in given or name in names[:n]}
        distinct = list(dict.fromkeys(names))
        #: for each output its place among the results of a run, which has each name once
        self.places = [distinct.index(name) for name in names]
        self._slowest = _LONG  # seconds; of the first run nothing is known

    @property
    def has_half(self) -> bool:
        """True if an input, an output or a large weight is of float16."""
        kinds = [port.type for port in (*self.inputs, *self.outputs)]
        return "FLOAT16" in kinds or self._has_half_weights

    def bind(
        self,
        inputs: Sequence[NDArray[Any] | None],
        outputs: Sequence[NDArray[Any]],
        options: BindOptions,
    ) -> BoundExecution:
        if self.has_packed:
            from driver.devices.onnxruntime.packed_execution import PackedExecution  # few files need it

            return PackedExecution(self, inputs, outputs, options.loop_timeout)
        given = [self._given(*each) for each in zip(range(len(self.inputs)), self.inputs, inputs, strict=True)]
        if any(in_state(each) for each in (*inputs, *outputs)):
            return StateExecution(self, given, outputs, options.loop_timeout)
        rooms = places_of(outputs)
        return self._on_cuda(given, rooms) or OnnxFileExecution(self, given, rooms, options.loop_timeout)

    def _on_cuda(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> BoundExecution | None:
        """Bind it in the GPU's memory, for outputs that always have the same shapes and fit; None: not there."""
        if not self.session.lane or not self.is_static or self._unbound:
            return None
        shapes = [tuple(int(d or 0) for d in port.shape) for port in self.outputs]
        rows = list(zip(self.outputs, shapes, outputs, strict=True))
        if any(port.nbytes(shape) > room.nbytes for port, shape, room in rows):
            return None
        if any(isinstance(room, GpuPlace) and port.chooses for port, _, room in rows):
            return None
        if any(a is None for a in inputs):
            return None
        if overlap(inputs, [room for room in outputs if isinstance(room, GpuPlace)]):
            return None
        from driver.devices.onnxruntime.on_cuda import cuda_execution  # takes a while

        sources = [(port.name, port.type, a.shape, _room(a)) for port, a in zip(self.inputs, inputs, strict=True)]
        targets = [(p.name, p.type, shape, _room(room, p.nbytes(shape))) for p, shape, room in rows]
        return cuda_execution(self.session, sources, targets)

    def _given(self, number: int, port: OnnxFilePort, given: Any) -> Any:
        """Return an input as a session can read it; None: it is left out. Raise ValueError."""
        where = f"input {number} ({port.name})"
        if given is None and number >= self.required:
            return None
        if isinstance(given, BufferArgument):
            if in_state(given):
                return given
            return checked_gpu_input(where, given, port.size, chooses=port.chooses)
        return checked_input(where, "an .onnx file", given, port.stored)

    def expected(self, given: Shapes) -> list[Shape | None]:
        """Return the shapes of the outputs for inputs of these shapes, None for one that is left out; None: of any
        shape.
        """
        learned = self._learned.get(given)
        if learned is None:
            sizes = {
                name: size
                for port, shape in zip(self.inputs, given, strict=True)
                for name, size in zip(port.shape, shape or (), strict=False)
                if isinstance(name, str)
            }
            pairs = zip(self.outputs, self._is_scalar, strict=True)
            declared = [_declared(port.shape, sizes) if port.shape or is_scalar else None for port, is_scalar in pairs]
        else:
            declared = list(learned)
        return [None if n in self._varying else shape for n, shape in enumerate(declared)]

    def learn(self, given: Shapes, found: tuple[Shape, ...]) -> None:
        """Note the shapes of outputs that a run has made."""
        known = self._learned.get(given)
        if known is None:
            if len(self._learned) >= _MOST_SHAPES:
                self._learned.clear()
            self._learned[given] = found
        else:
            self._varying.update(n for n, shape in enumerate(found) if shape != known[n])

    def may_bind(self, output: int) -> bool:
        """Return True if ONNX Runtime writes that output to memory that it is given."""
        return output not in self._unbound

    def copy_always(self, outputs: Collection[int]) -> None:
        """Note that these outputs are never again bound to their memory."""
        self._unbound.update(outputs)

    @property
    def is_long(self) -> bool:
        """True if a run may take long."""
        return bool(self.loops) or self._slowest >= _LONG

    def took(self, seconds: float) -> None:
        """Note how long a run took: the slower of the last ones decides."""
        self._slowest = max(seconds, self._slowest / 2)

    def saved(self, root: NDArray[np.uint8]) -> Saved | None:
        """Return the optimised graph, and its weights."""
        given = file_of(self._model)
        if self.provider is not None or given is None or self._settings is not None:
            return None
        file = taken_apart(given.data, given.external)
        found = optimised_graph(file.graph, file.weights, file.sources, self._options(given.external))
        if found is None:
            return None
        graph, weights = found
        return saved([graph, file.work, file.loops], weights, root, alignment=1)

    def _options(self, external: Mapping[str, NDArray[np.uint8]]) -> Any:
        """ONNX Runtime's own, so that it computes what it computes for any other program."""
        options = session_options(self._threads)
        if self._settings is not None:
            self._settings.add_to(options, library(), self._threads)
        if external:
            names, contents = list(external), list(external.values())
            options.add_external_initializers_from_files_in_memory(names, contents, [c.nbytes for c in contents])
        return options


def optimised(saved: Saved, root: NDArray[np.uint8]) -> SplitOnnxFile:
    """Return the file that ONNX Runtime has optimised, from what `OnnxFileModel.saved` has saved."""
    (graph, work, loops), weights = restored(saved, root)
    return SplitOnnxFile(graph, weights, work, loops)


def _ports(what: str, found: Sequence[Any], operands: Sequence[Operand]) -> list[OnnxFilePort]:
    """Return the inputs or outputs of the file, which have to be those of the model. Raise InvalidModel."""
    if len(found) != len(operands):
        raise InvalidModel(f"the model has {len(operands)} {what}s, and its .onnx file has {len(found)}")
    ports = []
    for number, (argument, operand) in enumerate(zip(found, operands, strict=True)):
        name, kind, shape = _said_of(f"{what} {number}", argument)
        where = f"{what} {number} ({name})"
        word = kind.removeprefix("tensor(").removesuffix(")")
        type_ = word.upper()
        if operand.type == PACKED and type_ not in TYPES:
            ports.append(OnnxFilePort(name, PACKED.name, (), kind, stored=PACKED.dtype))
            continue
        if type_ not in TYPES or kind != f"tensor({word})":
            raise InvalidModel(f"{where}: the model says {operand.type.name}, but the file has {kind}")
        dtype = DTYPES[TYPES[type_]]
        stored = tensor_type(dtype, None).dtype
        if operand.type.dtype != stored or operand.type == PACKED:
            raise InvalidModel(f"{where}: the model says {operand.type.name}, but the file has {kind}")
        declared = operand.dimensions
        is_open = not shape or not declared or what == "output"
        if not is_open and (
            len(shape) != len(declared)
            or any(type(own) is int and size not in {0, own} for own, size in zip(shape, declared, strict=True))
        ):
            raise InvalidModel(f"{where}: the model says {list(declared)}, but the file has {list(shape)}")
        ports.append(OnnxFilePort(name, type_, shape, dtype, stored=stored))
    return ports


def _said_of(where: str, argument: Any) -> tuple[str, str, tuple[int | str | None, ...]]:
    """Return the name, type and shape of an input or output. Raise InvalidModel."""
    try:
        return argument.name, argument.type, tuple(argument.shape)
    except UnicodeDecodeError:
        raise InvalidModel(f"{where}: its name, or that of one of its sizes, is no UTF-8 in the .onnx file") from None


def _declared(shape: Sequence[int | str | None], sizes: dict[str, int]) -> Shape | None:
    """Return a shape with the sizes for its names; None where there are none."""
    found = [sizes.get(d) if isinstance(d, str) else d for d in shape]
    return None if None in found else tuple(found)  # type: ignore[arg-type]


class OnnxFileExecution(BoundExecution):
    """An execution on its memory.

    copied_bytes: of arguments that are not aligned to their elements, and of indices, sizes and conditions, which are
    the `checked_bytes`.
    """

    def __init__(
        self,
        owner: OnnxFileModel,
        inputs: Sequence[NDArray[Any] | GpuPlace | None],
        outputs: Sequence[NDArray[Any] | GpuPlace],
        loop_timeout: float,
    ) -> None:
        """Bind the arrays. `inputs`: None for one that is left out."""
        self._owner, self._outputs, self._is_static = owner, outputs, owner.is_static
        self._runs = StoppableRuns(owner.loops, loop_timeout)
        self._given = tuple(None if array is None else array.shape for array in inputs)
        self._before: list[Callable[[], object]] = []
        pairs = zip(owner.inputs, inputs, strict=True)
        self._sources = [self._source(port, array) for port, array in pairs if array is not None]
        sources = [memory for *_, memory in self._sources]
        self._is_apart = not overlap(sources, outputs)
        self._bind(owner.expected(self._given))
        rows = list(zip(owner.outputs, outputs, self._expected, strict=True))
        self.shapes = tuple(
            OutputShape(shape or (), shape is not None and port.nbytes(shape) <= memory.nbytes)
            for port, memory, shape in rows
        )
        self._lacks_room = self._is_static and not all(is_sufficient for _, is_sufficient in self.shapes)
        for n in (*self._copied, *self._private):
            port, _, shape = rows[n]
            if shape is not None:
                self._count(port, port.nbytes(shape))

    def _source(self, port: OnnxFilePort, array: NDArray[Any] | GpuPlace) -> Place:
        """Return what ONNX Runtime reads: the memory itself if possible, else a copy."""
        if isinstance(array, GpuPlace):
            return port.name, port.type, array.shape, array
        place, fill = source_of(array, port.dtype)
        if fill is not None:
            self._before.append(fill)
            self._count(port, place.nbytes)
        return port.name, port.type, array.shape, place

    def _count(self, port: OnnxFilePort, nbytes: int) -> None:
        self.copied_bytes += nbytes
        self.checked_bytes += nbytes if port.chooses else 0

    def _bind(self, expected: Sequence[Shape | None]) -> None:
        self._expected, self._copied = expected, list[int]()
        self._bound: list[int] = []
        self._addresses: list[tuple[int, int, int]] = []  # an output, its place in results, where it is to lie
        self._private: dict[int, Callable[[], object]] = {}  # outputs in memory of our own, and what copies them
        targets: list[Place | str] = []
        for n, (port, memory, shape) in enumerate(zip(self._owner.outputs, self._outputs, expected, strict=True)):
            place = None if shape is None or not self._owner.may_bind(n) else self._place(n, memory, port.nbytes(shape))
            if shape is not None and place is not None:
                targets.append((port.name, port.type, shape, place))
                self._bound.append(n)
                if place.nbytes:
                    self._addresses.append((n, self._owner.places[n], address_of(place)))
            else:
                self._copied.append(n)
                if self._owner.places[n] == len(targets):  # else it is another output, too
                    targets.append(port.name)
        self._binding = self._owner.session.binding(self._sources, targets)

    def _place(self, n: int, memory: NDArray[np.uint8] | GpuPlace, nbytes: int) -> Room | None:
        """Return where ONNX Runtime writes an output: to its memory, or to our own, from where it is copied.

        None: it does not fit, or cannot be copied.
        """
        port = self._owner.outputs[n]
        if nbytes > memory.nbytes:
            return None
        is_usable = self._is_apart and address_of(memory) % port.size == 0 and not port.chooses
        if isinstance(memory, GpuPlace):
            return memory.first(nbytes) if is_usable else None
        if is_usable:
            return memory[:nbytes]
        place = np.empty(nbytes, np.uint8)
        self._private[n] = partial(np.copyto, memory[:nbytes], place)
        return place

    def run(self) -> None:
        """Execute once, without the GIL. Raise OutputInsufficientSize, ExecutionFailed, LoopTimeout,
        MissedDeadlineTransient.
        """
        if self._lacks_room:
            raise OutputInsufficientSize(tuple(self.shapes))
        for copy in self._before:
            copy()
        check("queued")
        began = time.perf_counter()
        fault = self._runs.run(self._binding.attempt, is_long=self._owner.is_long)
        if fault and self._owner.provider is not None:
            self._owner.provider.examine(fault)
        if fault and not self._runs.is_cancelled and self._bound:
            fault = self._run_unbound()
        if fault:
            raise ExecutionFailed(0, "the file", in_words(fault))
        self._owner.took(time.perf_counter() - began)
        for copy in self._private.values():
            copy()
        self._copy_strays()
        if self._copied:
            self._copy()

    def _run_unbound(self) -> str | None:
        """Run once more with no output bound to its memory: another shape than the expected one may be the fault."""
        expected, bound = self._expected, set(self._bound)
        self._bind([None] * len(self._outputs))
        fault = self._runs.run(self._binding.attempt, is_long=True)
        if fault is None:
            found = self._results()
            wrong = {n for n in bound if tuple(found[n].shape()) != expected[n]}
            self._owner.copy_always(wrong or bound)  # ONNX Runtime refuses the right shape if the file says another one
        return fault

    def _results(self) -> list[Any]:
        """Return the results of the last run, one for each output."""
        found = self._binding.results()
        return [found[place] for place in self._owner.places]

    def _copy_strays(self) -> None:
        """Have outputs copied that the run has not written to their memory, for whatever reason."""
        found = self._binding.results()
        strays = [n for n, place, address in self._addresses if found[place].data_ptr() != address]
        if strays:
            self._copied += strays
            self._owner.copy_always(strays)

    def _copy(self) -> None:
        """Copy what ONNX Runtime has allocated."""
        values, shapes = self._results(), []
        for n, (port, memory, expected) in enumerate(
            zip(self._owner.outputs, self._outputs, self._expected, strict=True)
        ):
            shape, is_sufficient = expected, True
            if n in self._copied:
                shape = tuple(values[n].shape())
                nbytes = port.nbytes(shape)
                is_sufficient = nbytes <= memory.nbytes
                if nbytes and is_sufficient:
                    _store(memory, tensor_bytes(values[n], nbytes))
            assert shape is not None
            shapes.append(OutputShape(shape, is_sufficient))
        self._settle(tuple(shapes))

    def _settle(self, shapes: tuple[OutputShape, ...]) -> None:
        """Judge the shapes that a run has made, and bind what it can to its memory for the next."""
        owner, found = self._owner, tuple(shape for shape, _ in shapes)
        is_new = found != tuple(shape for shape, _ in self.shapes)
        self.shapes = shapes
        owner.learn(self._given, found)
        if self._is_static and is_new:  # the file says wrongly that its outputs have always the same shapes
            owner.is_static = False
            raise OutputInsufficientSize(shapes)
        if not all(is_sufficient for _, is_sufficient in shapes):
            raise OutputInsufficientSize(shapes)
        expected = owner.expected(self._given)
        if expected != list(self._expected) or not all(map(owner.may_bind, self._bound)):
            self._bind(expected)

    def cancel(self) -> None:
        """End the run in progress before its next operation, with ExecutionFailed. Safe from any thread."""
        self._runs.cancel()


def _room(given: NDArray[Any] | GpuPlace, nbytes: int | None = None) -> NDArray[np.uint8] | GpuPlace:
    """Return the bytes of an argument, or the first `nbytes`."""
    if isinstance(given, GpuPlace):
        return given if nbytes is None else given.first(nbytes)
    return given.reshape(-1).view(np.uint8)[:nbytes]


def _store(memory: NDArray[np.uint8] | GpuPlace, contents: NDArray[np.uint8]) -> None:
    if isinstance(memory, GpuPlace):
        memory.write(contents)
    else:
        np.copyto(memory[: contents.nbytes], contents)
