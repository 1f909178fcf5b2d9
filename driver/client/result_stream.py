"""Streams of results: one request, repeated on what it leaves, until an output or a count ends it.

A stream is the same object wherever its steps run: on one device the engine repeats them
(`driver.client.device_stream`); a burst in this process, or on several devices, is run again for each result.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Literal, Self

from driver.client.names import by_position
from driver.protocol.stream_terms import MOST, UNTIL
from fmq.closing import Closing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from burst import Result
    from driver.client.stream_plan import StreamPlan
    from driver.client.surface import AnyBurst

_ENDS: Mapping[int, Literal["until", "most"]] = {UNTIL: "until", MOST: "most"}


class ResultStream(Closing):
    """Results in the order of their steps: `for result in stream`, or `async for`. One thread or task takes them.

    It ends by itself, by `close`, at the end of its `with` block, or when it is dropped.
    """

    to_send = "take its results, and send those"

    ended_by: Literal["until", "most"] | None = None
    """Why it has ended by itself; None: it has not, or failed."""

    repeated = 0
    """The number of steps that were executed again after the device's death, with `recover=True`."""

    @property
    def skipped(self) -> int:
        """The number of results that newer ones have replaced before they were taken, by policy "latest"."""
        return 0

    @property
    @abstractmethod
    def state(self) -> dict[str, Any]:
        """The value of each fed input in the next step, by name: an array, or a buffer of the device.

        With it, a stream goes on: `burst.stream_results({**inputs, **stream.state}, …)`. Raise ValueError before the
        stream has ended by itself.
        """

    @abstractmethod
    def _next(self) -> Result | None:
        """Return the next result; None after the last one."""

    @abstractmethod
    async def _next_async(self) -> Result | None:
        """Do as `_next`, for asyncio."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Result:
        """Return the next result. Raise StatusError, PeerDied, ResultsHeld; MissedDeadline* at the deadline."""
        if (result := self._next()) is None:
            raise StopIteration
        return result

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Result:
        """Do as `__next__`, for asyncio."""
        if (result := await self._next_async()) is None:
            raise StopAsyncIteration
        return result

    def close_with_burst(self) -> None:
        """End it with its burst: whoever takes its next result gets GeneralFailure."""
        self.close()

    def _end_by(self, goes_on: int) -> None:
        self.ended_by = _ENDS.get(goes_on)

    def _check_ended(self) -> None:
        if not self.ended_by:
            raise ValueError("the stream has not ended by itself: its state is ahead of its results; take all of them")


class RepeatedRun(ResultStream):
    """A stream of a burst that is run again for each result, when it is asked for."""

    def __init__(self, burst: AnyBurst, plan: StreamPlan, inputs: Any, deadline: float | None) -> None:
        """Use `burst.stream_results`."""
        model = burst.model
        self._burst, self._plan, self._deadline, self._done = burst, plan, deadline, 0
        self._names = tuple(tensor.name for tensor in model.inputs)
        self._given = list(by_position(inputs, self._names, model.optional))
        self._is_closed = False

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self.ended_by is not None

    def _next(self) -> Result | None:
        if self._is_over:
            return None
        return self._followed(self._burst.run(*self._given, deadline=self._deadline))

    async def _next_async(self) -> Result | None:
        if self._is_over:
            return None
        return self._followed(await self._burst.run_async(*self._given, deadline=self._deadline))

    def _followed(self, result: Result) -> Result:
        """Feed it back, and look whether it is the last one."""
        plan = self._plan
        for output, name in plan.feedback:
            self._given[name] = result.outputs[output].copy()
        self._done += 1
        if plan.stop and plan.stop.is_met(result.outputs[plan.stop.output]):
            self._end_by(UNTIL)
        elif self._done >= plan.most:
            self._end_by(MOST)
        return result

    @property
    def state(self) -> dict[str, Any]:
        self._check_ended()
        return {self._names[n]: self._given[n] for _, n in self._plan.feedback}

    def close(self) -> None:
        """End it: no step follows."""
        self._is_closed = True
