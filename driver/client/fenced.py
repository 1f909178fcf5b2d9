"""Fenced executions: launched now, run once their fences are signalled, completed by a fence that others can wait for.

    a = prepared.execute_fenced(first, wait_for=[camera_eventfd])
    b = prepared.execute_fenced(second, wait_for=[a])       # the device goes from a to b without the client
    select.poll().register(b.fence)                         # or b.wait(), b.result(), await b

`driver.protocol.fences` describes fences and their errors. A bare poll of `fence` sees the death of the device once the
kernel has closed its descriptors, about 80 ms later per GB of its memory; `wait` and `result` see it at once.
"""

from __future__ import annotations

import os
import select
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from burst import ErrorStatus, GeneralFailure, InvalidArgument, OutputShape, Result, StatusError, Timeout, Timing
from burst.channel import close_all
from burst.exhaustion import exhausted, running_out
from burst.messages import NO_CAUSE, NO_TIMING, Cause
from driver.client.completion import Completion
from driver.client.layout import layouts_of
from driver.client.receiver import RECEIVER
from driver.deadlines import earlier, seconds_left
from driver.nn import combine_dimensions
from driver.protocol.fences import FenceState, check_most, look, state_of_pipe
from fmq.closing import Closing

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Generator, Iterator, Sequence

    from numpy.typing import NDArray

    from burst import Request
    from driver.nn import Model


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


Waitable: TypeAlias = int | _HasDescriptor


@contextmanager
def duplicates(wait_for: Sequence[Waitable | None]) -> Iterator[list[int]]:
    """Return copies of the fences' descriptors, to be sent; null fences are left out.

    Raise InvalidArgument, ResourceExhaustedTransient.
    """
    check_most(len(wait_for))
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
        unusable = InvalidArgument(f"wait_for: fence {n}, descriptor {fd}, cannot be used: {error}")
        raise exhausted(error, "this process") or unusable from error


class ExecutionInfo(NamedTuple):
    """The end of a fenced execution, as the HAL's callback reports it."""

    status: ErrorStatus
    launched: Timing  #: since the launch
    fenced: Timing  #: since all fences were signalled


class Ending(NamedTuple):
    """The end of a fenced execution, with the message and the cause of a failure."""

    info: ExecutionInfo
    message: str = ""
    cause: Cause = NO_CAUSE


class FencedExecution(Completion, Closing):
    """An execution launched by `prepared.execute_fenced`. Any number of threads may wait for it.

    It cannot be cancelled. Its result may have any status; outputs are views of the request's pools, the timing counts
    from the launch. When this object is closed or garbage, the execution goes on; only its fence is closed here.
    """

    def __init__(
        self,
        fence: int,
        ask: Callable[[], Ending],
        outputs: Callable[[], tuple[NDArray[Any], ...]],
        *,
        watch: Callable[[select.poll], object] | None = None,
        forget: Callable[[], object] | None = None,
        success: Callable[[], Ending] | None = None,
    ) -> None:
        """Use `prepared.execute_fenced`. Owns `fence`, a pipe.

        ask: called once when it has ended; raises GeneralFailure while it is pending, PeerDied. watch: makes a poll
        return when the device dies or the connection ends. forget: called when the ending is not needed any more.
        success: called instead of `ask` when the fence is signalled, where that tells all; raises DriverError.
        """
        self._fence, self._ask, self._outputs, self._watch, self._forget = fence, ask, outputs, watch, forget
        self._success, self._has_succeeded = success, False
        self._ending: Ending | None = None
        self._asking = threading.RLock()

    @property
    def fence(self) -> int:
        """A descriptor to poll or pass on, never to read: see `protocol.fences`. It is closed with this object."""
        return self._fence

    def fileno(self) -> int:
        """Return the fence, for select and asyncio."""
        return self.fence

    def wait(self, timeout: float | None = None) -> FenceState:
        """Wait for the end: SIGNALED or ERROR; ACTIVE if it is still pending after `timeout` seconds.

        ERROR also when the device has died. Raise ValueError for what is no timeout.
        """
        end = earlier(timeout, None) if timeout else None
        fence = self._fence
        if fence < 0:
            return FenceState.UNKNOWN
        if self._has_succeeded:
            return FenceState.SIGNALED
        poll = select.poll()
        poll.register(fence, select.POLLIN)
        self.watch(poll)
        left = 0 if timeout == 0 else None if end is None else seconds_left(end)
        found = dict(poll.poll(None if left is None else left * 1e3))
        state = state_of_pipe(found.get(fence, 0))
        if state is FenceState.ACTIVE and found:  # the connection has ended; the fence may have been signalled before
            state = look(fence, kind="pipe")
            state = FenceState.ERROR if state is FenceState.ACTIVE else state
        if state is FenceState.SIGNALED:
            self._has_succeeded = True
        return state

    def watch(self, poll: select.poll) -> None:
        """Make `poll` return when the device dies or the connection ends."""
        if self._watch is not None:
            self._watch(poll)

    def done(self) -> bool:
        """Return True if it has ended, in success or failure."""
        return self.is_done or self.wait(0) != FenceState.ACTIVE

    def cancel(self) -> bool:
        """Return False: the device has it."""
        return False

    def info(self) -> ExecutionInfo:
        """Return how it ended and, if it was measured, how long it took since the launch and since the fences.

        The status is GENERAL_FAILURE while it is pending. Raise PeerDied.
        """
        return self.details().info

    def details(self) -> Ending:
        """Return how it ended, with the message and the cause of a failure. Raise PeerDied."""
        if self._ending is None and not self.done():
            return _failure("this fenced execution is still pending: wait for its fence")
        return self._told()

    def _told(self) -> Ending:
        """Return how it ended. It has."""
        with self._asking:  # the device tells it once
            if self._ending is None and self._has_succeeded and self._success is not None:
                self._ending = self._success()
            if self._ending is None:
                try:
                    self._ending = self._ask()
                except GeneralFailure as error:
                    return _failure(str(error))
            return self._ending

    def sleep(self, timeout: float | None) -> None:
        """Wait for the fence, and ask the device how it ended. Raise Timeout."""
        if self.wait(timeout) == FenceState.ACTIVE:
            raise Timeout(f"this fenced execution has not ended within {timeout} s")
        self._settle()

    def _settle(self) -> None:
        """Ask how it ended, once. The device answers at once."""
        with self._asking:
            self.attempt(self._outcome)
        self.call_back()

    def _outcome(self) -> Result:
        info, text, cause = self._told()
        outputs = () if info.status else self._outputs()
        return Result(info.status, outputs, timing=info.launched, message=text, cause=cause)

    def _have_attended(self) -> None:
        RECEIVER.call(self.attend)

    def copied(self) -> int:
        """Return a copy of the fence to watch, for an event loop, which has only one reader per descriptor.

        Raise OSError, ResourceExhaustedTransient.
        """
        with running_out():
            return os.dup(self._fence)

    def attend(self) -> None:
        """Attend to it in the thread of the receiver's loop, which is never closed."""
        import asyncio

        loop = asyncio.get_running_loop()
        try:
            copy = -1 if self.done() else self.copied()
        except (OSError, StatusError):  # there are no more descriptors, or threads
            copy = -1
        if copy < 0:
            try:
                loop.run_in_executor(None, self._settle_at_the_end)  # a device that is stopped now holds up no other
            except Exception as error:  # noqa: BLE001 (no thread can be started, and nothing else would end this)
                self.fail(exhausted(error, "this process") or error).call_back()
            return

        def ended() -> None:
            loop.remove_reader(copy)
            os.close(copy)
            self.attend()

        loop.add_reader(copy, ended)

    def _settle_at_the_end(self) -> None:
        with suppress(StatusError):  # which `_settle` meets again
            self.wait()
        self._settle()

    def __await__(self) -> Generator[Any, None, Result]:
        while not self.done():
            yield from self._ended().__await__()
        return self.result(0)

    async def _ended(self) -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        done = loop.create_future()
        copy = self.copied()
        loop.add_reader(copy, _complete, done)
        try:
            await done
        finally:
            loop.remove_reader(copy)
            os.close(copy)

    def close(self) -> None:
        """Close the fence here. May be called twice."""
        fence, self._fence = self._fence, -1
        if fence >= 0:
            os.close(fence)
            if self._ending is None and self._forget is not None:
                self._forget()

    def __del__(self) -> None:
        self.close()


def _complete(done: asyncio.Future[None]) -> None:
    if not done.done():  # the event loop may call this more than once
        done.set_result(None)


def output_shapes(model: Model, request: Request) -> tuple[OutputShape, ...]:
    """Return the output shapes, from the model and the request; () if the model alone fixes them all."""
    layouts = layouts_of(model)
    if layouts.are_outputs_known:
        return ()
    operands = layouts.outputs
    found = (combine_dimensions(o.dimensions, a.dimensions) for o, a in zip(operands, request.outputs, strict=True))
    return tuple(OutputShape(dimensions or ()) for dimensions in found)


SUCCESS = Ending(ExecutionInfo(ErrorStatus.NONE, NO_TIMING, NO_TIMING))
"""The ending of an execution that has succeeded and was not measured."""


def _failure(text: str) -> Ending:
    return Ending(ExecutionInfo(ErrorStatus.GENERAL_FAILURE, NO_TIMING, NO_TIMING), text)
