"""What a device is. A new device is one class with these methods, named by an entry point `burst.devices`.

Caching, remoting and fallback are other implementations of the same two protocols, so they stack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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
    """

    @property
    def run(self) -> Callable[[], object]:
        """Executes once. Raises ExecutionFailed, OutputInsufficientSize."""

    @property
    def shapes(self) -> Sequence[tuple[tuple[int, ...], bool]]:
        """(dimensions, its memory suffices) of each output; of a dynamic model, once it has run."""


class PreparedModel(Protocol):
    """A model made ready to run on a device. Any number of threads may bind and run.

    It may have an attribute `serves_all`: True, and clients with equal models share it. Else each client has its own.
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
    """Runs models. Made once in the service, which asks it what it supports, and once in the engine, which runs it."""

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
