"""What a device is: base classes with defaults. A device is a subclass of `Device`, named by an entry point.

Three classes make a device: `Device` compiles a model, `PreparedModel` binds it to memory, `BoundExecution` runs it.
Override what the device does better than the default; the engine never looks for anything that is not declared here.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from contextlib import nullcontext
from functools import wraps
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from burst.errors import status_error
from burst.request_binder import request_binder
from driver.device_facts import Capabilities, DeviceInfo, DeviceStatus, Needs, Performance, Source, State
from driver.nn import LOOP_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray

    from burst import BurstOffer, ErrorStatus, ExecutionBurst, Request
    from burst.execution import Execution
    from driver.nn import Extension, ExtensionType, Model, OperandType
    from driver.nn.older import HalVersion
    from driver.options import Preference, Priority

__all__ = [
    "BindOptions",
    "BoundExecution",
    "BufferArgument",
    "BufferRequest",
    "BufferUse",
    "CacheFiles",
    "Capabilities",
    "Device",
    "DeviceInfo",
    "DeviceStatus",
    "DriverBuffer",
    "GrowingBuffer",
    "MemoryHandle",
    "Needs",
    "Performance",
    "Preparation",
    "PreparedModel",
    "Saved",
    "Source",
    "State",
]


def _at_once() -> None:
    """Let no burst through: there is none."""


class Preparation(NamedTuple):
    """How a model is prepared.

    preference: "low_power" asks for one thread, "sustained_speed" for the most in an hour; it may be ignored.
    deadline: CLOCK_MONOTONIC nanoseconds, or None. `pace` raises MissedDeadlineTransient once it has passed.
    """

    preference: Preference = "fast_single_answer"
    deadline: int | None = None
    pace: Callable[[], object] = _at_once  #: call it often: it lets running bursts through
    threads: int = 0  #: that suit the model, as was measured; 0: not known. See `PreparedModel.threads`


class BindOptions(NamedTuple):
    """How a request is bound.

    priority: of the executions of what is bound, for queues of the accelerator's own. Burst's run queue has already
    chosen by it.
    """

    loop_timeout: float = LOOP_TIMEOUT  #: seconds that each WHILE may take; then the execution ends with LoopTimeout
    priority: Priority = "medium"
    pace: Callable[[], object] = _at_once  #: as of `Preparation`


class BoundExecution:
    """One execution, bound to its memory. One thread runs it at a time.

    A subclass defines `run`, as a method or as an attribute, and sets `shapes`.

    An execution may have a deadline: `driver.deadlines.checker()`, called in the thread that runs, returns a function
    that raises once the deadline has passed, or None. Call that function before each operation; the result of a device
    that cannot do so is dropped when it comes too late. `driver.deadlines.deadline()`, called in that thread, is the
    deadline itself, for an accelerator that takes one; in C it is `burst_due()`.
    """

    run: Callable[[], object]
    """Executes once. Raises ExecutionFailed, OutputInsufficientSize, LoopTimeout."""

    shapes: Sequence[tuple[tuple[int, ...], bool]]
    """(dimensions, whether its memory suffices) of each output; exact after `run` where the model is not static."""

    is_static: bool | None = None
    """True if `shapes` are exact before `run`; None: as `PreparedModel.is_static` says."""

    native: tuple[int, int] | None = None
    """(function, context): addresses of a C function `int32_t f(void *context)` that does what `run` does and returns
    an ErrorStatus, and of its argument. A burst's listener then calls it without Python and without the GIL. Both must
    live as long as this object.
    """

    launch: Callable[[int], object] | None = None
    """For devices that work by themselves once they were told what to do: begins what `run` does, and returns at once.

    Its argument is an address. When the outputs are written, call `burst.executor.COMPLETED` with it: the address of a
    C function `void f(void *)`, to be called exactly once, in any thread, also one that must not wait: a host function
    of a GPU's stream, say. A burst's listener then calls `launch` in the place of `run` and goes on with the next
    request, which may be begun before this one has ended: memory that executions share is the device's concern. What
    an execution writes, those of its burst read that are launched or run later; in the device's own buffers, all
    do, and so do `DriverBuffer.copy_to` and `copy_across`.
    Answers go out in the order of the requests, deadlines are judged when they do, and each that goes on has one of
    `Device.slots`. It raises what `run` raises, and then has begun nothing. An execution that goes on a second longer
    than its deadline, or than its client lives, ends the engine.
    """

    copied_bytes: int = 0
    """Bytes of arguments that each run copies."""

    checked_bytes: int = 0
    """How many of `copied_bytes` are copied only to be checked in private memory."""

    is_infallible: bool = False
    """True: `run` of a static model raises nothing but StatusError once all outputs fit. The engine calls it bare."""

    def failure(self, status: ErrorStatus) -> Exception:
        """Return what `run` would have raised in the place of a run of `native` that has just returned `status`.

        By default an error that says the status alone.
        """
        return status_error(status)

    def cancel(self) -> None:
        """End the run in progress, by `run` or `native`, and every later one, with ExecutionFailed or GENERAL_FAILURE.

        The engine calls it for clients that are gone: from any thread, at any time, any number of times. It returns at
        once; the run ends at the next point where the device looks. By default a run goes on to its end.
        """

    def is_running(self) -> bool:
        """Return True if a run is in progress. Safe from any thread.

        The engine asks when it has cancelled the execution: a run that goes on for a second more ends the engine, so
        that the client that is gone does not hold a slot. By default the engine is not ended.
        """
        return False


class CacheFiles(NamedTuple):
    """How many files a compilation is kept in, of each of the HAL's two kinds."""

    model: int  #: code: what must not be used if it was changed
    data: int  #: constants


class Saved(NamedTuple):
    """The bytes that a device keeps of a prepared model, for each file."""

    model: Sequence[bytes | NDArray[np.uint8]] = ()
    data: Sequence[bytes | NDArray[np.uint8]] = ()


class PreparedModel(ABC):
    """A model made ready to run on a device. Any number of threads may bind and run."""

    is_static: bool = True
    """True if the shapes of all outputs follow from those of the inputs."""

    prepared_from: Model | None = None
    """The model that it runs. Set for what `Device.prepare` and `Device.restore` return; set it in one that you make
    otherwise, to serve bursts with it by `burst.ExecutionBurstServer.create`.
    """

    serves_all: bool = False
    """True if clients with equal models share it. By default each client has its own."""

    improves_after: int = 0
    """Number of executions after which the engine asks `improved` for a better model; 0: there is none."""

    threads: int = 0  #: of an execution, if it obeys `Preparation.threads`; 0: it does not. See engine/thread_choice.py

    burst_versions: Sequence[int] = (2, 1)
    """The versions of the wire that its own bursts speak. In version 1, the HAL's, clients send one request at a time
    and no deadlines, and take the plain path for buffers of the device and loop timeouts.
    """

    @abstractmethod
    def bind(
        self,
        inputs: Sequence[NDArray[Any] | None],
        outputs: Sequence[NDArray[Any]],
        options: BindOptions,
    ) -> BoundExecution:
        """Bind inputs, typed and shaped (None: omitted), and outputs, as raw uint8 memory. A `BufferArgument` is in the
        place of each array that lies in a DriverBuffer, which only a driver with `allocate` or `map_memory` gets.

        Raise ExecutionFailed, ValueError.
        """

    def saved(self, root: NDArray[np.uint8]) -> Saved | None:
        """Return what `Device.restore` needs to make this model again in less time; None: not worth keeping.

        Called after the model is prepared, for each client that keeps it. `root`: the bytes of the model, of which
        constants are views. They are kept in any case.
        """
        return None

    def rest(self) -> None:  # noqa: B027 (by default there is nothing to give back)
        """Give back memory that the next `bind` can make again.

        Called from any thread when nothing has run on the device for a while and nothing is bound to the model.
        """

    def burst_began(self, preference: Preference) -> None:  # noqa: B027 (by default it is no news)
        """Hint: a client has opened a burst on this model, so executions will follow. Once for each burst, before its
        first execution; `preference` is that of the preparation.

        Called from any thread, so it returns at once. What it raises is logged once, and harms no client.
        """

    def burst_ended(self) -> None:  # noqa: B027 (by default it is no news)
        """Hint: such a burst has ended: it was closed, or its client is gone. Called as `burst_began`."""

    def improved(self, preparation: Preparation) -> PreparedModel | None:
        """Return a better model to replace this one, for devices that first make a quick one; None: there is nothing
        better.

        Called once after `improves_after` executions, in a background thread of low priority, while this model serves,
        and others may be prepared or improved.
        Later requests run on the better model, which also replaces this one in the cache files. Until then the engine
        counts executions in Python and does not use `BoundExecution.native`.
        """
        return None

    def configure_execution_burst(self, offer: BurstOffer) -> ExecutionBurst | None:
        """Return a burst of the driver's own on this model: it reads and writes the queues itself, or has an executor
        that keeps the client's memory (`burst.ExecutionBurstServer.create_with_executor`), or runs this model or
        another one of the driver's (`burst.ExecutionBurstServer.create(offer, self)`). None: the engine serves it.

        The engine starts and stops it, and tells it what the client frees. `offer.on_end` must be called once, soon
        after `stop`. What the driver serves itself takes no turns with other executions, unless it uses `offer.ticket`.
        `offer.version` is one of `burst_versions`; a client that speaks none of these is served by the engine.

        Raise StatusError: the client gets no burst.
        """
        return None


@request_binder.register(PreparedModel)
def _binder(prepared: PreparedModel, offer: BurstOffer) -> Callable[[Request], Execution]:
    from driver.engine.model_binder import model_binder  # for who serves bursts, and no client

    return model_binder(prepared, offer)


class DriverBuffer(ABC):
    """Memory of the driver's own, in any layout: what `Device.allocate` returns, or `Device.map_memory`.

    `bind` gets it whole, as a `BufferArgument` in the place of the array of an input or output. The engine copies
    values in and out with the methods here, in other threads than those that execute, one call at a time for a buffer.
    No execution that writes the buffer runs meanwhile, unless the client is careless. Whether the buffer has a value is
    the engine's business.
    """

    nbytes: int
    """Bytes of memory that it occupies. They are charged to the client."""

    gpu_nbytes: int = 0
    """Bytes of a GPU's memory that it occupies besides. They are charged to the client, too, as `gpu_bytes`."""

    is_linear: bool = False
    """True: the value lies in the HAL's layout in memory that the CPU cannot use. Where `map_memory` has made such a
    buffer, an argument may lie at any offset in it.
    """

    in_place: bool = False
    """True: one execution may have it as an input and as an output, whose value takes the place of the other one when
    the run has succeeded. Else the engine allocates two for a client that asks for that, and they take turns.
    """

    def array(self) -> NDArray[np.uint8] | None:
        """Return the bytes of the value in the HAL's layout (row-major, without gaps), if the CPU can use them as they
        lie.

        None: the layout is the driver's own.
        """
        return None

    @abstractmethod
    def copy_from(self, source: NDArray[np.uint8]) -> None:
        """Make `source` the value: all of its bytes, in the HAL's layout. May raise anything; then it has no value."""

    @abstractmethod
    def copy_to(self, target: NDArray[np.uint8]) -> None:
        """Write the value to all of `target`, in the HAL's layout. May raise anything."""

    def copy_across(self, source: DriverBuffer) -> bool:
        """Make the value of another buffer of this driver its own; both have one type and the same dimensions.

        False, as by default: the engine copies by `copy_to` and `copy_from`, through its own memory. May raise
        anything; then this buffer has no value.
        """
        return False

    def close(self) -> None:  # noqa: B027 (memory that Python frees needs nothing)
        """Free the memory. Called exactly once, from any thread, when the client has released the buffer or is gone and
        what was bound to it is dropped.
        """


class GrowingBuffer(DriverBuffer):
    """Memory of the driver's own for a value whose dimensions change, such as a state that grows by a row in each run.

    What is bound to it follows it: each run reads the value of that moment and leaves one of whatever shape, and the
    engine binds nothing anew. `nbytes` is what the present value occupies; the engine reads it after each run and copy.
    """

    @abstractmethod
    def reshape(self, dimensions: tuple[int, ...]) -> None:
        """Make room for a value with these dimensions, which `copy_from` gives next. May raise anything."""

    @abstractmethod
    def drop(self) -> None:
        """Free what the value occupies: the client may not have so much, and the buffer has no value."""


class BufferArgument(NamedTuple):
    """An input or output in a driver's buffer, as `bind` gets it."""

    buffer: DriverBuffer
    dimensions: tuple[int, ...]
    """Of an input all are known, but for a growing buffer's; of an output what model and client say, 0: not known."""
    offset: int = 0  #: above 0 only in a linear buffer
    nbytes: int | None = None  #: how many bytes from there on are the argument's; None: the buffer's


class BufferUse(NamedTuple):
    """The use of a buffer: input or output `io_index` of a prepared model, in which part of all executions."""

    prepared: PreparedModel
    is_input: bool
    io_index: int
    frequency: float  #: above 0 and at most 1


class BufferRequest(NamedTuple):
    """A buffer that a client wants. It was checked: the uses fit each other."""

    type: OperandType | ExtensionType
    dimensions: tuple[int, ...]  #: all are known, but for a growing buffer: 0 where they stay open, () for any rank
    roles: tuple[BufferUse, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the value in the HAL's layout: what the arrays of `copy_from` and `copy_to` have."""
        return math.prod(self.dimensions) * self.type.element_size


class MemoryHandle(NamedTuple):
    """Memory of one of the driver's own kinds, as a client describes it. Only the types here were checked."""

    kind: str  #: one of `Device.own_memory_kinds`
    fd: int  #: the engine's, closed after `map_memory`: duplicate it to keep it
    nbytes: int  #: above 0
    fields: tuple[int, ...]  #: what the kind needs besides: at most 16 integers of 64 bits, signed


class Device(ABC):
    """Runs models. One instance lives in the service and says what it supports; another one runs models in the engine.

    Executions let more urgent ones through where they call `burst.run_queue.checkpoint()` in their thread: often,
    between operations, holding nothing that others wait for. An execution that cannot pause, but can be aborted and
    started again, runs inside `burst.run_queue.stoppable`.
    """

    name: str
    version: str  #: identifies this build of the driver
    type: str  #: OTHER, CPU, GPU or ACCELERATOR

    slots: int = os.cpu_count() or 1
    """How many executions may run at once."""

    quantum: float = 2e-3
    """Seconds that a client may run on while others of the same priority wait: long against the time that a thread
    takes to wake up and to load its model into the processor's caches.
    """

    cache_files: CacheFiles | None = None
    """How many files of its own the device needs to keep a compilation: CacheFiles(0, 0) if none, as the model is kept
    anyway. None: its compilations cannot be kept.
    """

    memory_kinds: frozenset[str] | None = None
    """The kinds of pools in which constants may lie that travel as handles: "ashmem" (`Memory.frozen`), "mmap_fd",
    "hardware_buffer_blob", "hardware_buffer". An operation on a constant in another kind is answered as not supported.
    None: all, as for every device that reads the arrays that it gets.
    """

    own_memory_kinds: frozenset[str] = frozenset()
    """Kinds of memory that this driver alone knows, named like an extension: "com.example.heap". See `map_memory`."""

    hal_version: HalVersion = "1.3"
    """The version of the HAL that the driver speaks, "1.0" to "1.3". It is asked about no operation, type or argument
    that is newer, and a model that it prepares has none: clients get the rest of a model answered as not supported.
    """

    extensions: tuple[Extension, ...] = ()
    """The vendor extensions that it knows. It is asked about no operation that uses another one."""

    asked_apart: bool = False
    """True if the service asks it about models in a process of its own, which may crash or hang: for devices that call
    code of others.
    """

    def is_outdated(self) -> bool:
        """Return True if the code that it was made of has been replaced since, so that new clients want another
        process.
        """
        return False

    watched: Callable[[str], AbstractContextManager[object]] = nullcontext
    """Within it a function of that name runs, in code of others. The engine sets it, to end if one never returns."""

    give_up: Callable[[str], object] | None = None
    """Call it, with the reason, when nothing but a new process helps: the context of a GPU is lost, say. It ends the
    engine; clients are told, and the next request starts a new one. The engine sets it.
    """

    looks_again_after: float | None = None
    """Seconds after which the engine of a device that was offline from its beginning ends, so that the next one looks
    at the hardware again; None: the device itself reports when it is available.
    """

    needs: Needs = Needs()
    """Its needs of the system. The service looks at the class, before it makes an instance."""

    own_files: tuple[str, ...] = ()
    """Paths of its code that Python does not know of: a shared library, and its folder."""

    library: str | None = None
    """The module that the device is made of; None: it needs no other."""

    status: DeviceStatus = DeviceStatus()
    """Its state, and with it whether it takes work now. `report` changes it."""

    on_report: Callable[[], object] | None = None
    """The function that `report` calls. The engine sets it."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Have what `prepare` and `restore` of this class return know its model, as `prepared_from`."""
        super().__init_subclass__(**arguments)
        for name in ("prepare", "restore"):
            if name in vars(cls):
                setattr(cls, name, _noting_model(vars(cls)[name]))

    @property
    def capabilities(self) -> Capabilities | None:
        """The driver's statements about the device's speed and power; None: Burst measures it.

        Override it as an attribute of the class, or as a property where the hardware has to be asked: the engine reads
        it when a client asks. Statements are about all that the device supports: a type without a figure costs
        infinitely much, and nothing is measured in its place.
        """
        return None

    def report(self, state: State, reason: str = "") -> None:
        """Tell the engine whether the device takes work from now on. Any thread, at any time; call it for each change.

        While the state is "busy" or "offline", preparations and executions are refused with DEVICE_UNAVAILABLE and the
        reason, on every path. An execution that has begun ends as the device ends it: its `run` may raise
        `burst.DeviceUnavailable`, its `native` return 1. Nothing is lost: prepared models serve again once the device
        is available.

        Raise ValueError for another state.
        """
        if state not in get_args(State):
            raise ValueError(f"state={state!r}: one of {', '.join(map(repr, get_args(State)))}")
        self.status = DeviceStatus(state, reason)
        if self.on_report is not None:
            self.on_report()

    @classmethod
    def missing(cls) -> str | None:
        """Return what the device needs and this machine lacks; None: nothing. By default it looks for `library`.

        Called in the client, before a process is started. `driver.connect` raises DeviceNotFound with this text, and
        `driver.compile` leaves the device out unless the caller names it. Load nothing here: it must be quick.
        """
        return None if cls.library is None or _is_there(cls.library) else f"the module {cls.library} is not installed"

    @classmethod
    def remedy(cls) -> str | None:
        """Return what a user can do about what `missing` says; None: install the extra of the device's name."""
        return None

    @abstractmethod
    def supported_operations(self, model: Model) -> list[bool]:
        """Return for each operation of the main subgraph of a valid model: True is a promise."""

    def explain(self, model: Model) -> Sequence[str | None]:
        """Return for each of these operations why it is not supported, for people: the tensor, its shape, the remedy.
        None: it is supported. By default from `supported_operations`, which then is all that is known.
        """
        reason = f"the device {self.name} does not support it"
        return [None if can else reason for can in self.supported_operations(model)]

    @abstractmethod
    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """Compile a valid, fully supported model. Calls `preparation.pace` often.

        Several threads may be in `prepare` and `restore` at once, with a model each: one for each account that has
        clients, so that no account waits for another's model. A device that can compile only one at a time takes a lock
        of its own, by `driver.deadlines.taking`.
        """

    def restore(
        self,
        model: Model,
        saved: Saved,
        root: NDArray[np.uint8],
        preparation: Preparation,
    ) -> PreparedModel:
        """Prepare a model that was prepared before, from what `PreparedModel.saved` returned.

        Called only for devices with `cache_files`. `saved` and `root` are exactly what was saved: verified, in memory
        that no other process can change. They are arrays of uint8 in one block, each on the page after the one before
        it, `root` last. By default the model is prepared again.
        """
        return self.prepare(model, preparation)

    def rest(self) -> None:  # noqa: B027 (by default there is nothing to give back)
        """Hint: nothing has run for a while, and nothing is bound. Gives back what the next `bind` can make again.

        Called from any thread, while nothing is prepared. What it raises is logged once, and harms no client.
        """

    def time_work(self, until: float) -> bool:
        """Note until that time (time.monotonic()) when its accelerator works on what is launched, for `burst trace`:
        each launched execution by `burst.work_notes`. False, the default: it does not. Safe from any thread.
        """
        return False

    def allocate(self, request: BufferRequest) -> DriverBuffer | None:
        """Memory for a driver-managed buffer, in any layout; None: the engine's own memory is used, as by default.

        One call at a time for a device. The buffer is also bound to models that replace those of its roles
        (`PreparedModel.improved`). Raise ValueError for what it cannot make, StatusError.
        """
        return None

    def allocate_growing(self, request: BufferRequest) -> GrowingBuffer | None:
        """Memory for a buffer whose dimensions stay open; None: the engine's own memory is used, as by default.

        Called, and to raise, as `allocate`.
        """
        return None

    def map_memory(self, handle: MemoryHandle) -> NDArray[np.uint8] | DriverBuffer:
        """Map memory of one of `own_memory_kinds`. Safe from any thread, several at once.

        An array of uint8 with one axis is used as other pools are, at any offset, and unmapped when Python frees it;
        if it is read-only, no output can lie in it. A DriverBuffer is used whole. The client may write to the memory at
        any time, and truncate it, which ends a process that touches it then: map it with `burst.Memory.from_fd`, which
        sees to that, if it can be truncated. The handle may be wrong in every way. Raise ValueError for one that
        describes no memory of the kind, which the client gets as INVALID_ARGUMENT, and `burst.GeneralFailure` for
        memory that the device cannot use.
        """
        raise ValueError(f"the driver {self.name} maps no memory of the kind {handle.kind}")


def _noting_model(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that does what `prepare` does, and notes in what that returns which model it was given."""

    @wraps(prepare)
    def noting(self: Device, model: Model, *arguments: Any, **named: Any) -> Any:
        prepared = prepare(self, model, *arguments, **named)
        if isinstance(prepared, PreparedModel):  # the engine refuses what is none
            prepared.prepared_from = model
        return prepared

    return noting


def _is_there(module: str) -> bool:
    """Return True if a module could be imported, as far as can be told without loading it."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # its package is missing, or it was made by hand
        return False
