"""A stream that goes on after the death of its device: the steps since its last checkpoint are executed again.

The device repeats the steps of one segment by itself. At its end, what the next step would read is copied to this
process; that is a checkpoint, as the inputs of the first step are. What was executed again is not told twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from burst import GeneralFailure, PeerDied
from driver.client.burst_requests import CLOSED_IN_FLIGHT
from driver.client.device_buffers import Buffer
from driver.client.names import by_position
from driver.client.result_stream import ResultStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from burst import Result
    from driver.client.device_stream import DeviceStream
    from driver.client.remote_executor import RemoteExecutor
    from driver.client.stream_plan import StreamPlan

    MakeSegment = Callable[[StreamPlan, tuple[Any, ...]], DeviceStream]

_MOST_DEATHS = 10  # over the same result


class RecoveringStream(ResultStream):
    """A stream on one device, in segments. A death of the device costs the time of the steps since a checkpoint."""

    def __init__(self, executor: RemoteExecutor, plan: StreamPlan, inputs: Any, segment: MakeSegment) -> None:
        """Use `burst.stream_results`. The first step has run afterwards. `segment`: makes one of the executor's."""
        self._executor, self._plan, self._make = executor, plan, segment
        model = executor.model
        self._names = tuple(tensor.name for tensor in model.inputs)
        self._given = list(by_position(inputs, self._names, model.optional))  # of the next segment
        self._kept = [self._copied(n, each) for n, each in enumerate(self._given)]  # of the one from the checkpoint
        self._at = self._told = self._deaths = self._skipped = 0  # steps, of which `_told` have been taken or skipped
        self._is_closed, self._has_burst = False, True
        self._segment: DeviceStream | None = None
        self._home = executor.home.connection
        try:
            self._begin()
        except PeerDied as died:
            self._recover(died)

    def _copied(self, n: int, value: Any) -> Any:
        """Return the value of an input in memory of this process, which is ours."""
        if isinstance(value, Buffer):
            found = np.empty(value.dimensions, self._executor.model.inputs[n].dtype)
            value.copy_to(found)
            return found
        return value.copy() if isinstance(value, np.ndarray) else value

    def _begin(self) -> DeviceStream:
        """Begin a segment. Raise as `DeviceStream` does."""
        self._home = self._executor.present_home().connection
        most = min(self._plan.checkpoint, self._plan.most - self._at)
        segment = self._make(self._plan._replace(most=most), tuple(self._given))
        self._segment = segment
        if self._is_closed:  # meanwhile
            segment.close()
        return segment

    def _recover(self, died: PeerDied) -> None:
        """Begin a segment from the checkpoint, on the device's next life. Raise what the caller is to get."""
        died.__traceback__ = None  # its frames would hold results as long as the dead connection is held
        self._deaths += 1
        if self._is_closed or type(died) is not PeerDied:
            raise died
        if self._deaths > _MOST_DEATHS:
            name = self._executor.device.address
            raise PeerDied(f"device {name!r} died {_MOST_DEATHS} times over the same step; the stream gives it up")
        self._skipped, self._segment, self._given = self.skipped, None, list(self._kept)
        self.repeated += self._told - self._at
        self._executor.revived(self._home, lambda _: self._begin())

    # ---- results

    def _next(self) -> Result | None:
        while self._goes_on:
            try:
                result = (self._segment or self._begin())._next()
            except PeerDied as died:
                self._recover(died)
            else:
                if result is None or self._is_news():
                    return result
        return None

    async def _next_async(self) -> Result | None:
        import asyncio  # the drop-in of a runtime does without

        while self._goes_on:
            try:
                segment = self._segment
                if segment is None:
                    segment = await asyncio.to_thread(self._begin)
                result = await segment._next_async()
            except PeerDied as died:
                await asyncio.to_thread(self._recover, died)
            else:
                if result is None or self._is_news():
                    return result
        return None

    @property
    def _goes_on(self) -> bool:
        """True unless it has ended. Raises GeneralFailure if it has ended with its burst."""
        if not (self._has_burst or self.ended_by):
            raise GeneralFailure(CLOSED_IN_FLIGHT)
        return not (self._is_closed or self.ended_by)

    def _is_news(self) -> bool:
        """Note the result that a segment has just given; return False if the caller had it before a death."""
        segment = self._segment
        assert segment
        done = self._at + segment.done
        is_news = done > self._told
        if is_news:
            self._told, self._deaths = done, 0
        if segment.ended_by == "until" or done == self._plan.most:
            self.ended_by = segment.ended_by
        elif segment.ended_by:
            self._note_checkpoint(segment, done)
        return is_news

    def _note_checkpoint(self, segment: DeviceStream, done: int) -> None:
        """Keep what the next step reads. After a death meanwhile, the segment is executed again."""
        self._skipped, self._segment = self.skipped, None
        given, kept = list(self._kept), list(self._kept)
        try:
            for name, value in segment.state.items():
                n = self._names.index(name)
                given[n], kept[n] = value, self._copied(n, value)
        except PeerDied:
            self._given = list(self._kept)
        else:
            self._given, self._kept, self._at = given, kept, done

    @property
    def skipped(self) -> int:
        return self._skipped + (self._segment.skipped if self._segment else 0)

    @property
    def state(self) -> dict[str, Any]:
        self._check_ended()
        assert self._segment
        return self._segment.state

    def close(self) -> None:
        """End it, within a step."""
        self._is_closed = True
        if self._segment:
            self._segment.close()

    def close_with_burst(self) -> None:
        if not self._is_closed:
            self._has_burst = False
            self.close()
