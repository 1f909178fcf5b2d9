"""A burst as a device sees it: what a client offers, and what the device makes of it.

A device gets a `BurstOffer` and returns an `ExecutionBurst`: usually an `ExecutionBurstServer` (burst/server.py), which
does all but execute; or one of its own that reads and writes the queues itself, as docs/protocol.md describes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from burst.memory import Memory
from burst.trace import Trace
from burst.wire import VERSIONS
from fmq import LifePage
from fmq.end import DEFAULT_SPIN
from fmq.process_bound import ProcessBound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from burst.channel import Channel
    from burst.errors import Result
    from burst.execution import Execution
    from burst.messages import Request
    from burst.run_queue import Ticket
    from burst.wire import Token
    from fmq import Descriptor


def _nothing() -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class BurstOffer(ProcessBound):
    """A burst that a client wants to open.

    A device that makes an `ExecutionBurst` of it owns `callback` from then on, and calls `on_end` once. The descriptors
    of the queues are closed with the offer: keep it, attach the queues, or duplicate them.

    Attributes:
        requests: the queue that the client writes.
        results: the queue that the client reads.
        callback: a socket to the client. On it the device asks for the memory behind slots.
        bind: binds a request to the prepared model as every other path does: it checks the request, and knows the
            buffers of the device. Its pools are `Memory`, and `Token` for buffers. Raises StatusError. None outside of
            a device.
        bind_to: returns what binds requests, as `bind` does, to a prepared model of the driver's that it is given; this
            need not be the one that the client has opened the burst on. Raises ValueError for one that takes other
            arguments. None outside of a device.
        trace: where both sides note the times of requests, and the device why one failed.
        version: of the wire.
        spin: seconds that the client wants the device to poll for a request before it sleeps, or "adaptive".
        priority: of its executions: "low", "medium" or "high".
        ticket: of the device's run queue, for this burst alone: with it executions wait for their turn.
        on_end: to be called once, in any thread, when the burst is over and has freed everything.
        life: tells the client of this process's death. Closing it says that the burst is over; the engine closes it,
            too, when the burst is stopped or has ended. If another process serves the burst and dies, `life.die()`
            before `on_end()` says so: the client gets PeerDied, and may recover.
        around: entered by the thread that serves the burst before it waits for a request, and left when it has ended.
        memory_from: maps memory that came over `callback`; it gets a description and a descriptor, which it owns.
            Raises StatusError. A device's counts what it maps, and refuses what another account may not hand over.
        real_time: the priority (SCHED_FIFO) of the thread that serves the burst, whose memory is locked; 0: an ordinary
            one.
    """

    to_send = "open a burst where it is needed"

    requests: Descriptor
    results: Descriptor
    callback: Channel
    bind: Callable[[Request], Execution] | None = None
    bind_to: Callable[[Any], Callable[[Request], Execution]] | None = None
    trace: Trace = field(default_factory=Trace.create)
    version: int = VERSIONS[0]
    spin: float | str = DEFAULT_SPIN
    priority: str = "medium"
    ticket: Ticket | None = None
    on_end: Callable[[], object] = _nothing
    life: LifePage = field(default_factory=LifePage)
    around: AbstractContextManager[object] = field(default_factory=nullcontext)
    memory_from: Callable[[Any, int], Memory] = Memory.from_wire
    real_time: int = 0


class ExecutionBurst(ProcessBound, ABC):
    """A device's end of one burst. Any thread may call its methods, also after the burst has ended; all return soon."""

    to_send = "open a burst where it is needed"

    @abstractmethod
    def start(self) -> None:
        """Begin to serve. Called once, unless `stop` came first."""

    @abstractmethod
    def stop(self) -> None:
        """End the burst, because its client has gone or wants no more. It may be called several times. A running
        execution ends as soon as it can; `BurstOffer.on_end` is called when all is freed.
        """

    @abstractmethod
    def free_memory(self, slots: Iterable[int]) -> None:
        """Free these slots for the client; the burst may know none of them. Memory in use is let go after the run."""

    def forget_plans(self) -> None:
        """Forget what requests were bound to, which has changed: the device's state, a buffer, the compilation."""

    @property
    def answered(self) -> int:
        """Requests answered so far. While this number stays the same, the burst is idle."""
        return 0

    @property
    def bound(self) -> int:
        """Requests that it remembers. An idle burst with several is told to `forget_plans`, which frees memory."""
        return 0


@runtime_checkable
class BurstExecutorWithCache(Protocol):
    """Executes requests on memory that it keeps by slot: the HAL's IBurstExecutorWithCache.

    A server calls one of these methods at a time, most of them in its listener's thread. It may have a method `cancel`,
    which ends the execution in progress and all later ones; any thread calls that when the burst is stopped.
    """

    def is_cache_entry_present(self, slot: int) -> bool:
        """Return True if the slot's memory is there. The executor may drop entries of its own accord between
        executions.
        """

    def add_cache_entry(self, slot: int, memory: Memory) -> None:
        """Keep the memory of a slot that is not present. It is the executor's from now on."""

    def remove_cache_entry(self, slot: int) -> None:
        """Let go of a slot's memory: the client has freed it, or the burst is over. The slot may be unknown."""

    def execute(
        self,
        request: Request,
        slots: Sequence[int | Token],
        measure: bool,
        deadline: int | None,
        loop_timeout: int | None,
    ) -> Result:
        """Execute once. `request` has no pools: an argument's `pool` is a position in `slots`, all of which are
        present; a `Token` in place of a slot is a buffer of the device, which `BurstOffer.bind` knows.

        `deadline`: CLOCK_MONOTONIC nanoseconds. `loop_timeout`: nanoseconds for each WHILE. None: there is none. With
        `measure` the result may have a `time_on_device`; else Burst takes the time that this call took.

        Returns a result with a status and, where the model leaves an output's shape open, or one has too little memory,
        the shapes. Any exception is a GENERAL_FAILURE; a StatusError has its own status.
        """
