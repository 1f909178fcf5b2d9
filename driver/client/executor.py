"""The contract of executors. They nest: each does some of the work, and hands the rest to the one behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from burst import Memory, Result
    from driver.client.completion import Completion
    from driver.client.fenced import FencedExecution
    from driver.client.job import Job
    from driver.client.surface import AnyBurst
    from driver.nn import Model
    from driver.options import Options


class Executor(Protocol):
    """A model, made ready to run. Any thread, many jobs at once.

    A prepared model is one, on a device or in this process; `driver.runtime` has those that stand before others.
    """

    @property
    def model(self) -> Model:
        """The model that it executes."""

    def perform(self, job: Job) -> Result:
        """Execute the job while the caller waits, without a thread between them. Raises PeerDied, Timeout."""

    def start(self, job: Job) -> Completion:
        """Execute it in the background. Never wait for a device; what fails belongs to the completion."""

    def launch(self, job: Job) -> FencedExecution:
        """Execute it when its fences are signalled. Raises StatusError, PeerDied."""

    def open_burst(self, options: Options) -> AnyBurst:
        """Return a burst that executes it. Raises StatusError, PeerDied, ValueError."""

    def free_memory(self, memory: Memory) -> None:
        """Let the device unmap a pool. Unknown memory is no error."""

    def close(self) -> None:
        """Free the model; bursts on it go on until they are closed."""
