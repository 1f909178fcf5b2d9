"""What a device is. A new device is one class with these methods, named by an entry point `burst.devices`.

Caching, remoting and fallback are other implementations of the same two protocols, so they stack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from driver.nn import Model


class Bound(Protocol):
    """One execution, bound to its memory.

    It may have an attribute `native`, (function, context): the addresses of a C function `int32_t f(void *context)`
    that does what `run` does and returns an ErrorStatus, and of what it gets. The listener of a burst then calls that,
    without Python and its lock; both must live as long as this object.

    It may have a method `cancel()`, which any thread may call at any time, as often as it likes, and which returns at
    once. A run in progress, by `run` or by `native`, ends with ExecutionFailed or GENERAL_FAILURE at the next point
    where the device looks, unless it is done before; every run that begins later does so at once. There is no way back:
    who wants to run again binds again. It is called for clients that are gone.

    An execution may have a deadline: `driver.deadlines.checker()`, called in the thread that runs, gives what raises
    once it has passed, or None. Whoever can calls that before each operation; the result of those who cannot is
    dropped when it comes too late. In C, `burst_due()` is that deadline.
    """

    @property
    def run(self) -> Callable[[], object]:
        """Executes once. Raises ExecutionFailed, OutputInsufficientSize."""

    @property
    def shapes(self) -> Sequence[tuple[tuple[int, ...], bool]]:
        """(dimensions, its memory suffices) of each output; of a dynamic model, once it has run."""


class CacheFiles(NamedTuple):
    """How many files something is kept in, of each of the HAL's two kinds."""

    model: int  #: code: what must not be used if it was changed
    data: int  #: constants


class Saved(NamedTuple):
    """What a device keeps of a prepared model: bytes for each file."""

    model: Sequence[bytes | NDArray[np.uint8]] = ()
    data: Sequence[bytes | NDArray[np.uint8]] = ()


class PreparedModel(Protocol):
    """A model made ready to run on a device. Any number of threads may bind and run.

    It may have an attribute `serves_all`: True, and clients with equal models share it. Else each client has its own.

    It may have a method `saved(root) -> Saved | None`: what `Device.restore` will need to make it again in less time;
    None for a model that is not worth it. `root`: the bytes of the model, which are kept anyway, as an array of uint8;
    constants are views of it. It is called once it is prepared.

    It may have a method `rest()`: nothing has run on the device for a while, and nothing is bound to the model any
    more; it gives back memory that it can have again when the next request is bound. It is called in any thread.

    It may have a method `improved(pace) -> PreparedModel | None`: a better one in its place, for devices that make a
    quick one first. It is called once, in a thread of the engine's that yields to all others, while this one serves.
    Every later request runs on the better one, which is saved in the place of this one.
    """

    @property
    def is_static(self) -> bool:
        """True when the shapes of all outputs follow from those of the inputs."""

    def bind(
        self,
        inputs: Sequence[NDArray[Any] | None],
        outputs: Sequence[NDArray[Any]],
        pace: Callable[[], object],
        loop_timeout: float,
    ) -> Bound:
        """Inputs typed and shaped (None: omitted), outputs as raw uint8 memory; `pace` as in `Device.prepare`.

        `loop_timeout`: seconds that each WHILE may take; then the execution ends with LoopTimeout.

        Raises ExecutionFailed, ValueError.
        """


class Device(Protocol):
    """Runs models. Made once in the service, which asks it what it supports, and once in the engine, which runs it.

    It may have attributes `slots`, how many executions may go on at once, by default one for each processor; and
    `quantum`, the seconds for which a client may go on while equals wait. Executions let others through where they call
    `burst.turns.checkpoint()` in their thread: often, between operations, with nothing held that others wait for. Those
    that cannot stop, but can be broken off and begun again, run inside of `burst.turns.stoppable`.

    A device whose compilations can be kept has an attribute `cache_files`, a `CacheFiles`: how many files of its own
    each takes. That may be none: the model is kept besides, in any case. It then has a method, too,
    `restore(model, saved, root, pace) -> PreparedModel`: as `prepare`, of a model that was prepared before, with what
    the prepared model gave by `saved(root)`, and the same `root`. What it gets is exactly that: it was verified in
    memory that nobody else can change. It comes as arrays of uint8 in one block, each on the next page after the one
    before it, `root` last.

    A device to which it makes a difference what a model is prepared for has an attribute `takes_preference`: True.
    `prepare` and `restore` then get a keyword `preference` besides, one of `driver.options.PREFERENCES`: "low_power"
    asks for one thread, and "sustained_speed" for the most executions in an hour rather than the fastest.

    A device that is made of somebody's library may name its module by an attribute `library`: where that is not
    installed, `driver.compile` does without the device and says nothing, unless it is asked for it.
    """

    name: str
    version: str  #: identifies this build of the driver
    type: str  #: OTHER, CPU, GPU or ACCELERATOR

    def supported_operations(self, model: Model) -> list[bool]:
        """For each operation of the main subgraph of a valid model: True is a promise."""

    def prepare(self, model: Model, pace: Callable[[], object]) -> PreparedModel:
        """Compiles a valid, fully supported model. Calls `pace` often: it lets running bursts through."""


class Performance(NamedTuple):
    """What something takes on a device, relative to the CPU in the client's process: lower is better, 1.0 the same."""

    exec_time: float
    power_usage: float | None = None  #: None where it cannot be measured


class Capabilities(NamedTuple):
    """How fast a device is on this machine, as measured. What is missing, or None, it could not do."""

    operands: Mapping[str, Performance]  #: by HAL name of the type of an operation's first input
    relaxed_scalar: Performance | None = None  #: FLOAT32 in models that allow the precision of float16
    relaxed_tensor: Performance | None = None  #: TENSOR_FLOAT32 in those
    if_performance: Performance | None = None
    while_performance: Performance | None = None


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What is known about an installed device without starting it."""

    name: str
    version: str
    type: str
    capabilities: Capabilities | None = None  #: None until `driver.compile` has measured it, once per version
