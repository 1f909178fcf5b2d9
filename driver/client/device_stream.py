"""A stream of results whose steps the engine of a device repeats, without its client between them.

The first step is an execution like any other: it tells the shapes of the outputs that results have. The next ones are
requests that the engine executes in turn (`driver.protocol.stream_terms`): what is fed back lies in two buffers of the
device that take turns, in one if its size may change, or, where results have it, too, in the memory of the step before.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from burst import (
    ErrorStatus,
    GeneralFailure,
    OutputShape,
    PeerDied,
    Request,
    RequestArgument,
    Result,
    ResultsHeld,
    StatusError,
)
from burst.dropped import later
from burst.errors import status_error
from burst.messages import NO_TIMING
from driver.client.burst_requests import CLOSED_IN_FLIGHT
from driver.client.device_buffers import Buffer, BufferDesc, BufferRole, BufferWish, check_buffers
from driver.client.job import Job, perform_with_room
from driver.client.layout import layouts_of, nbytes
from driver.client.names import by_position, copies
from driver.client.result_stream import ResultStream
from driver.client.stream_feed import StreamFeed
from driver.client.workspace import InputSet, OutputSet, input_shapes
from driver.deadlines import Wait
from driver.protocol.lane_codec import with_loop_timeout
from driver.protocol.stream_terms import MOST, MOST_ROOM, UNTIL, StreamTerms
from fmq.clock import FOREVER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from burst import Memory
    from driver.client.remote_executor import RemoteExecutor
    from driver.client.stream_plan import StreamPlan
    from driver.options import Options

_ON_DEVICE = OutputShape((0,), is_sufficient=True)
"""The shape of an output that results do not have."""

_HINT = "; an output that is fed back and in `also` or `until` keeps the shape of the first step: leave it out of these"


class StepMemory:
    """Where the steps of a stream read and write: inputs, outputs, and for each fed value that stays there two buffers.

    What a stream that has ended had is used again: then the device knows its requests.
    """

    def __init__(
        self,
        executor: RemoteExecutor,
        plan: StreamPlan,
        inputs: Any,
        loop_timeout: float | None = None,
        *,
        used: StepMemory | None = None,
    ) -> None:
        """Fill the inputs, and allocate what `used`, of a stream that has ended, does not have.

        Raise ValueError, StatusError, PeerDied.
        """
        self._model, self._plan = model, _ = executor.model, plan
        self._loop_timeout = loop_timeout
        self._graph, self._fed = model.main, {n for _, n in plan.feedback}
        self.shown = [(m, n) for m, n in plan.feedback if m in plan.told]  #: fed back, and told
        is_open = any(0 in self._graph.operands[self._graph.outputs[m]].dimensions for m, _ in self.shown)
        self.hint = _HINT if is_open else ""
        self.names = tuple(tensor.name for tensor in model.inputs)
        given = by_position(inputs, self.names, model.optional)
        self._given = {n: a for n, a in enumerate(given) if isinstance(a, Buffer)}
        for n, buffer in self._given.items():
            if not buffer.is_on_device:
                raise ValueError(f"input {self.names[n]!r}: that buffer lies in shared memory; give its array")
        arrays = [None if n in self._given else array for n, array in enumerate(given)]
        self._first_sizes = layouts_of(model).of_outputs(None).sizes
        if used and not used.suits(executor, plan):
            used = None
        self._inputs: InputSet = InputSet(model, input_shapes(model, arrays), used._inputs.memory if used else None)
        self._inputs.fill(arrays)
        self._outputs, self._spare = list[OutputSet](), used._unheld() if used else deque[OutputSet]()
        self.buffers: dict[tuple[int, int], list[Buffer]] = used.buffers if used else self._allocated(executor)
        check_buffers([*self._given.values()], executor.device.connection)

    def suits(self, executor: RemoteExecutor, plan: StreamPlan) -> bool:
        """Return True if a stream by this plan can have it."""
        if (plan.feedback, plan.told) != (self._plan.feedback, self._plan.told):
            return False
        with suppress(ValueError, StatusError, PeerDied):
            check_buffers([each for pair in self.buffers.values() for each in pair], executor.present_home().connection)
            return True
        return False

    def _unheld(self) -> deque[OutputSet]:
        """Return the memory of outputs, in the order of its use; another one in the place of what the caller holds."""
        found = (*self._outputs, *self._spare)
        return deque(OutputSet(self._model, each.sizes) if each.is_held() else each for each in found)

    def _allocated(self, executor: RemoteExecutor) -> dict[tuple[int, int], list[Buffer]]:
        """Return the two buffers of each state, or twice one that is updated in place if its size may change."""
        wishes = list[tuple[tuple[int, int], BufferWish]]()
        for m, n in self._plan.states:
            dimensions = self._graph.operands[self._graph.inputs[n]].dimensions
            is_open = not dimensions or 0 in dimensions
            wish = BufferWish(BufferDesc(in_place=is_open), [executor], [BufferRole(0, n)], [BufferRole(0, m)])
            wishes += [((m, n), wish)] * (1 if is_open else 2)
        turns = dict[tuple[int, int], list[Buffer]]()
        for (pair, _), buffer in zip(wishes, executor.device.allocate_all([w for _, w in wishes]), strict=True):
            turns.setdefault(pair, []).append(buffer)
        return {pair: [its[0], its[-1]] for pair, its in turns.items()}

    def told(self, shapes: Sequence[OutputShape]) -> list[OutputShape]:
        """Return the shapes of the outputs that results have."""
        return [shape for n, shape in enumerate(shapes) if n in self._plan.told]

    def sizes(self, shapes: Sequence[OutputShape] = (), least: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the bytes of each output that results have, of these shapes, and so many at least; 1 of another."""
        sizes, told = list(least or self._first_sizes), self._plan.told
        for n, found in enumerate(shapes):
            if n in told:
                needed = nbytes(self._graph.operands[self._graph.outputs[n]], found.dimensions)
                sizes[n] = max(needed, sizes[n]) if least else needed
        return tuple(size if n in told else 1 for n, size in enumerate(sizes))

    def outputs(self, sizes: Sequence[int]) -> OutputSet:
        """Return memory for outputs of these sizes in bytes."""
        found = self._spare.popleft() if self._spare else None
        if found is None or tuple(found.sizes) != tuple(sizes):
            found = OutputSet(self._model, sizes)
        self._outputs.append(found)
        return found

    def forget_given(self) -> None:
        """Let go of the caller's buffers."""
        self._given.clear()

    def forget_outputs(self) -> None:
        """Let go of the outputs up to now: they were too small."""
        self._outputs.clear()
        self._spare.clear()

    def request(self, step: int, to: OutputSet, before: OutputSet | None, shapes: Sequence[OutputShape]) -> Request:
        """Return the request of a step. `before`: the outputs of the step before it, of these shapes."""
        inputs, outputs = list(self._inputs.arguments), list(to.arguments)
        pools: list[Memory | Buffer] = [self._inputs.memory, to.memory]

        def in_buffer(buffer: Buffer) -> RequestArgument:
            pools.append(buffer)
            return RequestArgument(pool=len(pools) - 1)

        for n, buffer in self._given.items():
            if step == 0 or n not in self._fed:
                inputs[n] = in_buffer(buffer)
        for (m, n), turns in self.buffers.items():
            outputs[m] = in_buffer(turns[step % 2])
            if step:
                inputs[n] = in_buffer(turns[(step - 1) % 2])
        if before and self.shown:
            pools.append(before.memory)
            for m, n in self.shown:
                its, where = shapes[m].dimensions, before.arguments[m]
                length = nbytes(self._graph.operands[self._graph.outputs[m]], its)
                inputs[n] = RequestArgument(pool=len(pools) - 1, offset=where.offset, length=length, dimensions=its)
                outputs[m] = outputs[m]._replace(dimensions=its)
        return with_loop_timeout(Request(tuple(inputs), tuple(outputs), tuple(pools)), self._loop_timeout)


class EndedMemory:
    """The memory of a burst's last stream that has ended, and that nobody refers to, for the next one. Any thread."""

    def __init__(self) -> None:
        self._kept: deque[StepMemory] = deque(maxlen=1)
        self._is_closed = False

    def keep(self, memory: StepMemory) -> None:
        """Keep it, in the place of another one's, without the buffers that the caller gave."""
        if not self._is_closed:
            memory.forget_given()
            self._kept.append(memory)

    def take(self) -> StepMemory | None:
        """Return it, once."""
        with suppress(IndexError):
            return self._kept.pop()
        return None

    def close(self) -> None:
        """Keep none."""
        self._is_closed = True
        self._kept.clear()


class Turns(NamedTuple):
    """The memory of the results of consecutive steps, which take turns, and where these arrive.

    begin: the number of the first one. requests: keep their memory.
    """

    begin: int
    sets: list[OutputSet]
    feed: StreamFeed
    requests: list[Request]


class DeviceStream(ResultStream):
    """A stream on one device. It goes on in larger memory where a result has outgrown what there was."""

    def __init__(
        self,
        executor: RemoteExecutor,
        plan: StreamPlan,
        inputs: Any,
        options: Options,
        *,
        deadline: float | None,
        ended: EndedMemory,
    ) -> None:
        """Use `burst.stream_results`. The first step has run afterwards."""
        self._executor, self._plan, self._wait = executor, plan, Wait.of(None, deadline)
        self._is_latest, depth = options.policy == "latest", options.depth + 1
        self._depth = min(MOST_ROOM, depth + depth % 2)  # even, as two buffers take turns
        self._ended = ended
        self._at_last: Any = None  # where its memory is kept for the next stream
        self._memory = StepMemory(executor, plan, inputs, options.loop_timeout, used=ended.take())
        self._turns: Turns | None = None
        self._freed, self._skipped, self._is_closed, self._has_burst = 0, 0, False, True
        self._at_end: Any = None  # where it is dropped
        self._first: Result | None = self._first_step()

    def _first_step(self) -> Result:
        memory = self._memory
        outputs = memory.outputs(memory.sizes())

        def grown(result: Result) -> Request | None:
            nonlocal outputs
            before, needed = outputs.sizes, memory.sizes(result.output_shapes, outputs.sizes)
            if needed == tuple(before):
                return None
            outputs = memory.outputs(needed)
            return memory.request(0, outputs, None, ())

        job = Job(memory.request(0, outputs, None, ()), self._wait)
        result = perform_with_room(self._executor.perform, job, grown)
        result.raise_for_status()
        self._done, self._last, self._shapes = 1, outputs, result.output_shapes
        found = self._found(memory.told(result.output_shapes))
        stop = self._plan.stop
        if stop and stop.is_met(found.outputs[stop.output]):
            self._end_by(UNTIL)
        elif self._plan.most == 1:
            self._end_by(MOST)
        else:
            self._open(memory.sizes(result.output_shapes))
        return found

    def _found(self, told: Iterable[OutputShape]) -> Result:
        """Return the result of the last step in its memory. The caller cannot write what the next step reads there."""
        found = self._last.result(self._seen(iter(told)), NO_TIMING)
        for m, _ in self._memory.shown:
            found.outputs[m].flags.writeable = False
        return found

    def _seen(self, told: Iterator[OutputShape]) -> tuple[OutputShape, ...]:
        """Return a shape for each output, from those of the outputs that results have."""
        return tuple([next(told) if n in self._plan.told else _ON_DEVICE for n in range(len(self._last.sizes))])

    def _open(self, sizes: Sequence[int]) -> None:
        """Have the engine go on from here, with memory for outputs of these sizes in bytes."""
        memory, begin, depth = self._memory, self._done, self._depth
        if self._turns:
            memory.forget_outputs()
        count = depth if self._plan.told else 1
        sets = [memory.outputs(sizes) for _ in range(count)] * (depth // count)
        requests = [memory.request(begin, sets[0], self._last, self._shapes)]
        turns = range(1, 1 + (depth if count > 1 else 2))  # those without results differ in their buffers alone
        requests += [memory.request(begin + n, sets[n % depth], sets[n - 1], self._shapes) for n in turns]
        feed = StreamFeed(depth, self._wait.by, is_latest=self._is_latest)
        end = FOREVER if self._wait.end is None else self._wait.end
        terms = StreamTerms(
            number=0, end=end, most=self._plan.most - begin, room=depth, stop=self._plan.stop, requests=()
        )
        self._executor.open_stream(requests, terms, feed)
        if self._at_end:
            self._at_end.detach()
        self._at_end = weakref.finalize(self, later, feed.close)
        self._at_end.atexit = False
        self._skipped = self.skipped
        self._turns, self._freed = Turns(begin, sets, feed, requests), 0
        if self._is_closed:  # meanwhile
            feed.end()

    # ---- results

    def _next(self) -> Result | None:
        while turns := self._awaited():
            if not turns.feed.has_news:
                turns.feed.news().result()
            if result := self._taken(turns):
                return result
        return self._at_first()

    async def _next_async(self) -> Result | None:
        while turns := self._awaited():
            await turns.feed.news()
            if result := self._taken(turns):
                return result
        return self._at_first()

    def _at_first(self) -> Result | None:
        first, self._first = self._first, None
        if not (first or self.ended_by or self._has_burst):
            raise GeneralFailure(CLOSED_IN_FLIGHT)
        return first

    def _awaited(self) -> Turns | None:
        """Return where the next result arrives, with room for it; None: it is the first one, or none comes.

        Raise ResultsHeld, and DriverError in a forked child.
        """
        turns = self._turns
        if self._first or self.ended_by or self._is_closed or turns is None:
            return None
        self._executor.device.check_process()
        if not self._is_latest:
            self._free(turns)
        return turns

    def _free(self, turns: Turns) -> None:
        """Let the engine write where the caller holds no result any more. Raise ResultsHeld."""
        freed, left, depth = self._freed, turns.feed.left, self._depth
        while freed < left and not (self._plan.told and turns.sets[freed % depth].is_held()):
            freed += 1
        if left - freed == depth:
            raise ResultsHeld(
                f"all {depth} results that there is memory for are held: copy what is to be kept, or open the burst "
                "with a greater depth"
            )
        if freed - self._freed >= depth // 2 or left - self._freed == depth:
            self._freed = freed
            turns.feed.give_room(freed + depth)

    def _taken(self, turns: Turns) -> Result | None:
        """Return the next result; None: the stream goes on in larger memory, or another thread or task has closed it.

        Raise StatusError, PeerDied.
        """
        if self._is_closed:
            return None
        result, goes_on = turns.feed.pop(partial(self._result_of, turns))
        if result.status == ErrorStatus.NONE:
            self._end_by(goes_on)
            return result
        if result.status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE and (sizes := self._grown(turns, result)):
            self._open(sizes)
            return None
        self._is_closed = True
        raise status_error(result.status, result.message + self._memory.hint, result.cause)

    def _result_of(self, turns: Turns, number: int, result: Result) -> Result:
        """Return the result of a step in its memory; a copy, where newer ones are to take that."""
        if result.status != ErrorStatus.NONE:
            return result
        self._last, self._done = turns.sets[number % self._depth], turns.begin + number + 1
        found = self._found(result.output_shapes)
        if not self._is_latest:
            return found
        own = found._replace(outputs=copies(found.outputs))
        turns.feed.give_room(number + 1 + self._depth)  # from now on the engine may write there
        return own

    def _grown(self, turns: Turns, result: Result) -> Sequence[int] | None:
        """Return the sizes that the step needs which had no room, with some to spare. None: it lacked something else.

        It has left the state as it was before it.
        """
        number = turns.feed.left - 1
        if number:  # those before it were dropped, perhaps
            self._last, self._done = turns.sets[(number - 1) % self._depth], turns.begin + number
        before = turns.sets[0].sizes
        needed = self._memory.sizes(self._seen(iter(result.output_shapes)), before)
        grown = [size if size == old else size + size // 2 for size, old in zip(needed, before, strict=True)]
        return None if needed == tuple(before) else grown

    def _end_by(self, goes_on: int) -> None:
        super()._end_by(goes_on)
        if self.ended_by:
            self._at_last = weakref.finalize(self, self._ended.keep, self._memory)
            self._at_last.atexit = False

    @property
    def done(self) -> int:
        """The number of steps up to the newest result that was taken."""
        return self._done

    @property
    def skipped(self) -> int:
        return self._skipped + (self._turns.feed.skipped if self._turns else 0)

    @property
    def state(self) -> dict[str, Any]:
        self._check_ended()
        if self._at_last:
            self._at_last.detach()  # its buffers are the caller's
        memory, fed, last = self._memory, dict[str, Any](), (self._done - 1) % 2
        for m, n in self._plan.feedback:
            kept = memory.buffers.get((m, n))
            fed[memory.names[n]] = self._last.given[m].copy() if kept is None else kept[last]
        return fed

    def close(self) -> None:
        """End it, within a step. What it has left on the device is of no use any more."""
        self._is_closed = True
        if self._turns and not self.ended_by:
            self._turns.feed.end()

    def close_with_burst(self) -> None:
        if not self._is_closed:
            self._has_burst = False
            self.close()
