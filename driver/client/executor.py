"""The contract of executors. They nest: each does some of the work, and hands the rest to the one behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from burst import Controller

if TYPE_CHECKING:
    from collections.abc import Callable

    from burst import Memory, Result
    from burst.controller import Configure
    from driver.client.buffers import RequestBuffers
    from driver.client.completion import Completion
    from driver.client.fenced import FencedExecution
    from driver.client.job import Job
    from driver.client.remote_executor import Home, RemoteExecutor
    from driver.client.surface import AnyBurst
    from driver.nn import Model
    from driver.options import Options


class Fallback(Protocol):
    """An executor of requests that a burst's device does not answer. It is asked only after an error."""

    def perform_at(self, error: BaseException, home: Home, perform: Callable[[Executor], Result], /) -> Result:
        """Return what `perform` makes by what executes the request after that error of the device where the burst was
        at home.

        Raise the error if the request would fail there, too.
        """

    def perform_with_fallback(
        self, attempt: Callable[[], Result], job: Job, home: Callable[[BaseException], Home], /
    ) -> Result:
        """Return what `attempt` gives, or what the fallback gives where that may do better.

        `home`: called after a failure, where the burst was at home.
        """

    @property
    def home(self) -> Home | None:
        """The place where the device has prepared the model; None while another device takes its place."""

    def report(self) -> dict[str, Any]:
        """Return counts and reasons, for `Burst.stats`."""


def open_controller(configure: Configure, options: Options) -> Controller:
    """Return the client's end of a new burst. Raise StatusError, PeerDied."""
    return Controller(configure, options.memory, options.spin)


OpenController: TypeAlias = "Callable[[Configure, Options], Controller]"


class BurstParts(NamedTuple):
    """Parts that executors in front give to a burst that one behind them opens."""

    fallback: Fallback | None = None
    buffers: RequestBuffers | None = None  #: a layout of requests, in place of the burst's own
    open_controller: OpenController = open_controller


PLAIN = BurstParts()


class Executor(Protocol):
    """A model, made ready to run. Any thread, many jobs at once.

    `RemoteExecutor` and `driver.runtime`'s `LocalExecutor` execute; the others stand before these.
    """

    @property
    def model(self) -> Model:
        """The model that it executes."""

    @property
    def remote(self) -> RemoteExecutor | None:
        """The executor on the one device that executes; None in this process, and on several devices."""

    def perform(self, job: Job) -> Result:
        """Execute the job while the caller waits, without a thread between them. Raise PeerDied, Timeout."""

    def start(self, job: Job) -> Completion:
        """Execute it in the background. Never wait for a device; what fails belongs to the completion."""

    def launch(self, job: Job) -> FencedExecution:
        """Execute it when its fences are signalled. Raise StatusError, PeerDied."""

    def open_burst(self, options: Options, parts: BurstParts = PLAIN) -> AnyBurst:
        """Return a burst that executes it. Raise StatusError, PeerDied, ValueError."""

    def free_memory(self, memory: Memory) -> None:
        """Let the device unmap a pool. Unknown memory is no error."""

    def close(self) -> None:
        """Free the model; bursts on it go on until they are closed."""


class Forwarding:
    """An executor before another one: what it does not do itself, that one does."""

    def __init__(self, behind: Executor) -> None:
        self._behind = behind

    @property
    def model(self) -> Model:
        return self._behind.model

    @property
    def remote(self) -> RemoteExecutor | None:
        return self._behind.remote

    def free_memory(self, memory: Memory) -> None:
        """Let the devices unmap a pool."""
        self._behind.free_memory(memory)

    def close(self) -> None:
        """Close the executor behind it."""
        self._behind.close()


in_front: list[Callable[[Executor], Executor]] = []
"""Each puts something in front of a model that this process has prepared on a device, and of what the ones before it
have put there: `driver.recording` records it."""
