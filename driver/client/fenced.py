"""Fenced executions: launched now, run when others are done, and told of by a fence that anybody can wait for.

    a = prepared.execute_fenced(first, wait_for=[camera_eventfd])
    b = prepared.execute_fenced(second, wait_for=[a])       # the device goes from a to b without us
    select.poll().register(b.fence)                         # or b.wait(), b.result(), await b

`driver.protocol.fences` says what a fence is, and what one looks like that is in error. A bare poll of `fence` sees
the death of the device when the kernel has closed its descriptors, some 80 ms later per GB of its memory; `wait` and
`result` see it at once.
"""

from __future__ import annotations

import asyncio
import math
import os
import select
import threading
from collections import deque
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeAlias

from burst import ErrorStatus, GeneralFailure, InvalidArgument, OutputShape, Result, Timeout, Timing
from burst.channel import close_all
from burst.messages import NO_TIMING
from driver.client.slots import SlotRegistry
from driver.deadlines import nanoseconds
from driver.errors import DriverError
from driver.nn import combine_dimensions
from driver.protocol.fences import FenceState, look
from driver.protocol.rpc import call

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from numpy.typing import NDArray

    from burst import Memory, Request
    from burst.channel import Channel
    from driver.nn import Model

_MOST_FENCES = 64  # that one execution waits for


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


Waitable: TypeAlias = int | _HasDescriptor


class FencedOptions(NamedTuple):
    """How a request is to be executed; times in nanoseconds."""

    measure: bool
    deadline: int | None
    duration: int | None

    @classmethod
    def of(cls, measure: bool, deadline: float | None, duration: float | None) -> FencedOptions:
        """From seconds. Raises InvalidArgument."""
        for name, value in (("deadline", deadline), ("duration", duration)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise InvalidArgument(f"{name}={value!r}: must be seconds, 0 or more, or None for no limit")
        times = (None if t is None else nanoseconds(t) for t in (deadline, duration))
        return cls(bool(measure), *times)


@contextmanager
def duplicates(wait_for: Sequence[Waitable | None]) -> Iterator[list[int]]:
    """Copies of descriptors, while they are sent; none of what is null. Raises InvalidArgument."""
    if len(wait_for) > _MOST_FENCES:
        raise InvalidArgument(f"wait_for: {len(wait_for)} fences; an execution can wait for at most {_MOST_FENCES}")
    fds: list[int] = []
    try:
        for n, fence in enumerate(wait_for):
            fd = fence if isinstance(fence, int) else -1 if fence is None else fence.fileno()
            if fd >= 0:
                fds.append(_duplicate(n, fd))
        yield fds
    finally:
        close_all(fds)


def _duplicate(n: int, fd: int) -> int:
    try:
        return os.dup(fd)
    except OSError as error:
        raise InvalidArgument(f"wait_for: fence {n}, descriptor {fd}, cannot be used: {error}") from error


class ExecutionInfo(NamedTuple):
    """What the HAL's callback tells of a fenced execution."""

    status: ErrorStatus
    launched: Timing  #: since the launch
    fenced: Timing  #: since all fences were signalled


class FencesClient:
    """The client's side of one connection to the engine. Any thread."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._lock, self._pid = channel, threading.Lock(), os.getpid()
        self._slots = SlotRegistry(partial(call, channel))
        self._forgotten: deque[int] = deque()

    def launch(
        self, model: int, request: Request, options: FencedOptions, fds: list[int], count: int
    ) -> tuple[int, int]:
        """Its number and its fence. `fds`: of `count` fences those that are not null. Raises StatusError, PeerDied."""
        with self._lock:
            plain = self._slots.encode(model, request, options.measure)
            times = options.deadline, options.duration
            (number,), (fence,) = call(self._channel, "execute", plain, *times, count, self._dropped(), fds=fds)
            return number, fence

    def _dropped(self) -> list[int]:
        return [self._forgotten.popleft() for _ in range(len(self._forgotten))]

    def ask(self, number: int) -> tuple[ExecutionInfo, str]:
        """What came of an execution. Raises GeneralFailure before that is known, PeerDied."""
        if os.getpid() != self._pid:
            raise DriverError("this execution was launched before a fork; use it in the process that launched it")
        with self._lock:
            values, _ = call(self._channel, "info", number, self._dropped())
        status, launched, fenced, text = values
        self.forget(number)
        return ExecutionInfo(ErrorStatus(status), Timing(*launched), Timing(*fenced)), text

    def forget(self, number: int) -> None:
        """Nobody will ask for it: the device is told with the next call. Finalizers may come here."""
        self._forgotten.append(number)

    def free_memory(self, memory: Memory) -> None:
        """The device may unmap it."""
        with self._lock:
            self._slots.free_memory(memory)

    def watch(self, poll: select.poll) -> None:
        """Has `poll` end when the device dies, or the connection ends."""
        fd = self._channel.fileno()
        if fd >= 0:
            poll.register(fd, 0)  # its end is told in any case, and nothing else

    def close(self) -> None:
        """What is pending is not executed."""
        self._channel.close()


class FencedExecution:
    """One that was launched by `prepared.execute_fenced`. Any thread, and any number of them, may wait for it.

    When it is closed, or let go, it goes on; only its fence is closed here.
    """

    def __init__(
        self, path: FencesClient, number: int, fence: int, outputs: Callable[[], tuple[NDArray[Any], ...]]
    ) -> None:
        """Use `prepared.execute_fenced`. Owns `fence`."""
        self._path, self._number, self._fence, self._outputs = path, number, fence, outputs
        self._told: tuple[ExecutionInfo, str] | None = None

    @property
    def fence(self) -> int:
        """A descriptor to poll and to pass on, never to read: see `protocol.fences`. It is closed with this object."""
        return self._fence

    def fileno(self) -> int:
        """The same, for select and asyncio."""
        return self._fence

    def wait(self, timeout: float | None = None) -> FenceState:
        """SIGNALED or ERROR, as soon as it is so; ACTIVE when it is neither after so many seconds.

        ERROR also when the device died.
        """
        if self._fence < 0:
            return FenceState.UNKNOWN
        state = look(self._fence)
        if state != FenceState.ACTIVE or timeout == 0:
            return state
        poll = select.poll()
        poll.register(self._fence, select.POLLIN)
        self._path.watch(poll)
        found = poll.poll(None if timeout is None else max(0.0, timeout) * 1e3)
        state = look(self._fence)
        has_ended = any(fd != self._fence for fd, _ in found)
        return FenceState.ERROR if state == FenceState.ACTIVE and has_ended else state

    def done(self) -> bool:
        """Whether it has ended, one way or the other."""
        return self.wait(0) != FenceState.ACTIVE

    def info(self) -> ExecutionInfo:
        """How it ended, and when it was to be measured how long that took, since the launch and since the fences.

        GENERAL_FAILURE until it has ended. Raises PeerDied.
        """
        return self._information()[0]

    def _information(self) -> tuple[ExecutionInfo, str]:
        if self._told is None:
            if not self.done():
                return _failure(f"fenced execution {self._number} is still pending: wait for its fence")
            try:
                self._told = self._path.ask(self._number)
            except GeneralFailure as error:
                return _failure(str(error))
        return self._told

    def result(self, timeout: float | None = None) -> Result:
        """The result, waiting for it, with any status; outputs are views of the request's pools.

        Its timing is that since the launch. Raises PeerDied, and Timeout: it goes on, ask again.
        """
        if self.wait(timeout) == FenceState.ACTIVE:
            raise Timeout(f"fenced execution {self._number} has not ended within {timeout} s")
        info, text = self._information()
        outputs = () if info.status else self._outputs()
        return Result(info.status, outputs, timing=info.launched, message=text)

    def __await__(self) -> Generator[Any, None, Result]:
        """The result, as `result` gives it."""
        yield from self._ended().__await__()
        return self.result(0)

    async def _ended(self) -> None:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        copy = os.dup(self._fence)  # of one number a loop keeps one reader
        loop.add_reader(copy, _set, done)
        try:
            await done
        finally:
            loop.remove_reader(copy)
            os.close(copy)

    def close(self) -> None:
        """Closes the fence here. Harmless when done twice."""
        fence, self._fence = self._fence, -1
        if fence >= 0:
            os.close(fence)
            if self._told is None:
                self._path.forget(self._number)

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _set(done: asyncio.Future[None]) -> None:
    if not done.done():  # a loop may call once more than is needed
        done.set_result(None)


def output_shapes(model: Model, request: Request) -> tuple[OutputShape, ...]:
    """Of outputs, which the model and the request know; () where the model knows them all."""
    operands = [model.main.operands[i] for i in model.main.outputs]
    if all(o.is_known for o in operands):
        return ()
    found = (combine_dimensions(o.dimensions, a.dimensions) for o, a in zip(operands, request.outputs, strict=True))
    return tuple(OutputShape(dimensions or ()) for dimensions in found)


def _failure(text: str) -> tuple[ExecutionInfo, str]:
    return ExecutionInfo(ErrorStatus.GENERAL_FAILURE, NO_TIMING, NO_TIMING), text
