"""ONNX Runtime, by its Python API: sessions made from bytes, and runs on existing memory."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from burst_engine.names import install_command
from driver.devices.gpu_place import GpuPlace, address_of
from driver.devices.lowering.errors import LibraryFailed, LibraryMissing, in_words, text_of
from driver.devices.stoppable import Attempt
from driver.formats.onnx_schema import TYPES
from driver.plugins import version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from driver.devices.onnxruntime.providers import ExecutionProvider

OLDEST = (1, 20)

_FATAL = 4  # of the log's severities: errors are raised, and a client could have megabytes of them logged


def version() -> str:
    """Return the version of the installed library, or "none". Its code is not loaded."""
    found = map(version_of, ("onnxruntime", "onnxruntime-gpu"))
    return next((version for version in found if version != "none"), "none")


def missing() -> str | None:
    """Return what the device needs and does not find; None: nothing."""
    found = version()
    if found == "none" or tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        return f"the device needs onnxruntime {'.'.join(map(str, OLDEST))} or later, and {found} is installed"
    return None


@cache
def library() -> Any:
    """ONNX Runtime's module. Raise LibraryMissing."""
    if lacks := missing():
        raise LibraryMissing(f"{lacks}; {install_command('onnxruntime')}")
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # read when the library is loaded
    try:
        return import_module("onnxruntime")
    except ImportError as error:
        raise LibraryMissing(
            f"onnxruntime {version()} cannot be loaded: {error}; {install_command('onnxruntime')}"
        ) from error


def session_options(threads: int) -> Any:
    """Return the options that all sessions have."""
    options = library().SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = _FATAL, threads
    options.inter_op_num_threads = 1
    # Threads that spin while they wait take processors from clients and from other devices.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def exact_options(threads: int, *, is_quick: bool = False) -> Any:
    """Return the options for models that have to be computed as the HAL says.

    `is_quick`: the session is made in a third of the time, but is slower to run: weights keep their layout.
    """
    options = session_options(threads)
    if is_quick:
        options.graph_optimization_level = library().GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    # Else ONNX Runtime fuses quantised operations to integer kernels: some round differently, SOFTMAX's overflows.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return options


def optimised_file(model: bytes, weights: Sequence[tuple[str, NDArray[Any]]], options: Any) -> NDArray[np.uint8] | None:
    """Return the file that ONNX Runtime makes of a model when it optimises it; None: it cannot be written.

    `options`: as `session_options` makes them; used up.
    """
    fd = os.memfd_create("graph")
    options.optimized_model_filepath = f"/proc/self/fd/{fd}"
    try:
        Session(model, weights, options=options)
        return np.fromfile(options.optimized_model_filepath, np.uint8)
    except LibraryFailed:
        return None
    finally:
        os.close(fd)


class SessionLane(Protocol):
    """The resources that a session has on a GPU of its own provider (`OrtLane`)."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held during runs."""

    def provider_options(self) -> dict[str, str]:
        """Return the options for the provider."""


class Session:
    """A model made ready to run, in any number of threads at once."""

    def __init__(
        self,
        model: bytes,
        weights: Sequence[tuple[str, NDArray[Any]]] = (),
        threads: int = 1,
        provider: ExecutionProvider | None = None,
        *,
        options: Any = None,
        lane: SessionLane | None = None,
        in_place: Collection[str] = (),
    ) -> None:
        """`weights`: constants that are no part of the model's bytes, by their names. `provider`: None is the CPU.
        `options`: as `session_options` makes them; None: `exact_options`. `lane`: of `provider.lane`.
        `in_place`: the weights that kernels read where they lie.

        Optimisers rewrite constants under the same name, and remove them. So `in_place` may only have those that they
        leave alone: all if none runs, and those that are inputs of the model as well. The session copies the others,
        whose memory may go once it is made.

        Raise LibraryFailed.
        """
        ort = library()
        if options is None:
            options = exact_options(threads)
        values = [ort.OrtValue.ortvalue_from_numpy(array) for _, array in weights]
        self._read = [(*weight, value) for weight, value in zip(weights, values, strict=True) if weight[0] in in_place]
        for name, _, value in self._read:
            options.add_initializer(name, value)
        if provider is not None:
            provider.add_to(options, lane.provider_options() if lane else {})
        own = ["CPUExecutionProvider"] if provider is None else None
        try:
            if weights:
                options.add_external_initializers([name for name, _ in weights], values)
            # Its fallback would print to standard output, and load a model that was refused a second time.
            self.session = ort.InferenceSession(model, options, providers=own, enable_fallback=0)
        except Exception as error:  # its errors share no other class
            if provider is not None:
                provider.examine(text_of(error))
            raise LibraryFailed(f"ONNX Runtime rejected the model: {in_words(error)}") from error

        self._is_copied, self.lane = provider is not None, lane
        #: the operators that the provider has left to the CPU, one for each node
        self.on_cpu = [] if provider is None else provider.nodes_elsewhere(self.session)

    @property
    def inputs(self) -> list[Any]:
        """The model's inputs: `name`, `type`, `shape`."""
        return list(self.session.get_inputs())

    @property
    def optional(self) -> list[Any]:
        """The inputs for which the model has a value, which come behind those."""
        return list(self.session.get_overridable_initializers())

    @property
    def outputs(self) -> list[Any]:
        """The model's outputs: `name`, `type`, `shape`."""
        return list(self.session.get_outputs())

    def on_values(self, outputs: list[str]) -> ValuesRun:
        """Run on ONNX Runtime's own values, in memory of the CPU, which makes all outputs."""
        return ValuesRun(self.session, outputs)

    def binding(self, inputs: Sequence[Place], outputs: Sequence[Place | str]) -> Binding:
        """Bind inputs and outputs to memory. An output that is only a name gets memory of ONNX Runtime's own."""
        lock = self.lane.lock if self.lane else None  # its runs share the lane's stream
        return Binding(self.session, inputs, outputs, is_copied=self._is_copied, lock=lock)


Place = tuple[str, str, tuple[int, ...], "NDArray[np.uint8] | GpuPlace"]
"""Name, ONNX type, dimensions and memory of an input or output."""


class ValuesRun:
    """A session's runs on values. One call takes all of them: to bind 60 inputs and outputs takes longer than to run.

    given: the inputs of the next run, by name. One thread runs it at a time.
    """

    def __init__(self, session: Any, outputs: list[str]) -> None:
        self._session, self._outputs = session._sess, outputs  # not the class around it, which looks at each value
        self.given: dict[str, Any] = {}
        self._found: Sequence[Any] = ()

    def run(self, options: Any = None) -> str | None:
        """Execute once, without the GIL. Returns the error message, or None; `options`: a RunOptions."""
        try:
            self._found = self._session.run_with_ort_values(self.given, self._outputs, options)
        except Exception as error:  # noqa: BLE001 - its errors share no other class
            return text_of(error)
        return None

    def attempt(self) -> Attempt:
        """Return an execution that can be ended."""
        return attempt_of(self.run)

    def taken(self) -> Sequence[Any]:
        """Return the outputs of the last run, and keep no value of it. Index them: iterating costs 40 us."""
        found, self._found, self.given = self._found, (), {}
        return found


class Binding:
    """A session and the memory that it reads and writes. One thread runs it at a time."""

    def __init__(
        self,
        session: Any,
        inputs: Sequence[Place],
        outputs: Sequence[Place | str],
        *,
        is_copied: bool = False,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        """`is_copied`: ONNX Runtime copies inputs to memory of the provider's when they are bound. `lock`: that runs
        take.
        """
        self._lock = lock or nullcontext()
        binding = session.io_binding()
        self._kept = session, binding, inputs, outputs
        self._before: list[Callable[[], object]] = []
        # What the two classes wrap: they take microseconds to look into devices and options.
        self._session, self._binding = session._sess, binding._iobinding
        here = library().OrtDevice.make("cpu", 0)._get_c_device()
        try:
            self._bind((inputs, binding.bind_input), (outputs, binding.bind_output), here, is_copied=is_copied)
        except Exception as error:  # as in `run`: a file may say sizes that no tensor has
            raise LibraryFailed(f"ONNX Runtime cannot bind the request: {in_words(error)}") from error

    def _bind(
        self,
        sources: tuple[Sequence[Place | str], Callable[..., object]],
        targets: tuple[Sequence[Place | str], Callable[..., object]],
        here: Any,
        *,
        is_copied: bool,
    ) -> None:
        for places, bind in (sources, targets):
            for place in places:
                if isinstance(place, str):
                    # A run would put its results into those of the last one.
                    self._before.append(partial(self._binding.bind_output, place, here))
                    self._before[-1]()  # outputs keep the order in which they were bound first
                else:
                    name, type_, shape, memory = place
                    is_there = isinstance(memory, GpuPlace)
                    if isinstance(memory, GpuPlace):
                        self._before.append(memory.buffer.settle)
                    where = ("cuda", memory.ordinal) if isinstance(memory, GpuPlace) else ("cpu", 0)
                    bound = partial(bind, name, *where, TYPES[type_], shape, address_of(memory))
                    if is_copied and places is sources[0] and not is_there:
                        self._before.append(bound)
                    else:
                        bound()

    def run(self, options: Any = None) -> str | None:
        """Execute once, without the GIL. Returns the error message, or None; `options`: a RunOptions."""
        try:
            with self._lock:
                for bind in self._before:
                    bind()
                self._session.run_with_iobinding(self._binding, options)
        except Exception as error:  # noqa: BLE001 - its errors share no other class
            return text_of(error)
        return None

    def attempt(self) -> Attempt:
        """Return an execution that can be ended."""
        return attempt_of(self.run)

    def results(self) -> Sequence[Any]:
        """Return the outputs after a run, as ONNX Runtime's own values. Index it: iterating costs 40 us."""
        return self._binding.get_outputs()  # type: ignore[no-any-return]


def attempt_of(run: Callable[[Any], str | None]) -> Attempt:
    """Return an execution that can be ended: ONNX Runtime looks at `terminate` before each operation, in loops, too."""
    options = library().RunOptions()
    return Attempt(partial(run, options), partial(setattr, options, "terminate", True))
