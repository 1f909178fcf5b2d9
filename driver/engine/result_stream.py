"""Streams of results: an execution that is repeated, each step on what the one before it has left.

A step is an execution like any other: it waits in the run queue by its priority and share, and its client's other
executions take their turns between two of them. While the client has no room for another result, a stream has no
thread.

Each message costs a system call here, and wakes a thread of the client's. So the results of short steps go in one: a
result waits for the next step as long as that is expected to end within _MOST_DELAY, no execution waits for a slot,
and the client has room for as many results as wait.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from burst import ErrorStatus, InvalidArgument, Malformed
from burst.run_queue import waiters
from burst.wire import Token
from driver.engine.schedule import LaunchedExecution, TimeLimits
from driver.protocol.lane_codec import decode_request
from driver.protocol.stream_terms import (
    FAILED,
    GOES_ON,
    MOST,
    MOST_ELEMENTS,
    MOST_ROOM,
    UNTIL,
    answer_to_steps,
)
from fmq.clock import FOREVER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from burst.executor import Outcome, Plan
    from burst.wire import RequestPacket
    from driver.engine.lane import ClientLane
    from driver.engine.lane_reader import LaneReader
    from driver.nn import Model
    from driver.protocol.stream_terms import StreamTerms


_MOST_DELAY = 1_000_000  # nanoseconds


class StreamRequests(NamedTuple):
    """The names in the requests of a stream.

    told: the outputs that lie in memory. tokens: of buffers. written: of those among them that are outputs.
    stops: slot and offset of the output that may end the stream, for each request. dtype: of that output.
    """

    told: tuple[int, ...]
    tokens: frozenset[int]
    written: frozenset[int]
    stops: dict[bytes, tuple[int, int]]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, terms: StreamTerms, model_of: Callable[[int], Model]) -> Self:
        """Check the requests of a stream, as far as binding does not. Raise InvalidArgument, Malformed."""
        decoded = {key: decode_request(key) for key in dict.fromkeys(terms.requests)}
        numbers, packets = {number for number, _ in decoded.values()}, [packet for _, packet in decoded.values()]
        told = {_in_memory(packet) for packet in packets}
        if len(numbers) > 1 or len(told) > 1:
            raise InvalidArgument("the requests of a stream are of one model, and have the same outputs in memory")
        tokens = frozenset(slot.token for packet in packets for slot in packet.slots if isinstance(slot, Token))
        pools = [packet.slots[a.pool] for packet in packets for a in packet.outputs]
        written = frozenset(slot.token for slot in pools if isinstance(slot, Token))
        (found,), stop = told, terms.stop
        if stop is None:
            return cls(found, tokens, written, stops={}, dtype=np.dtype(np.uint8))
        if stop.output not in found:
            raise InvalidArgument(f"output {stop.output} cannot end the stream: it does not lie in memory")
        graph = model_of(*numbers).main
        dtype = graph.operands[graph.outputs[stop.output]].type.stored_dtype
        places = {key: _place(packet, stop.output) for key, (_, packet) in decoded.items()}
        return cls(found, tokens, written, stops=places, dtype=dtype)


def _in_memory(packet: RequestPacket) -> tuple[int, ...]:
    """Return the outputs that lie in memory, and not in buffers. Raise InvalidArgument."""
    outputs, count = packet.outputs, len(packet.slots)
    if any(a.has_no_value or not 0 <= a.pool < count for a in outputs):
        raise InvalidArgument("each output of a stream's requests lies in one of their pools")
    return tuple(n for n, a in enumerate(outputs) if not isinstance(packet.slots[a.pool], Token))


def _place(packet: RequestPacket, output: int) -> tuple[int, int]:
    argument = packet.outputs[output]
    slot = packet.slots[argument.pool]
    assert not isinstance(slot, Token)
    return slot, argument.offset


class RepeatedExecution(LaunchedExecution):
    """A stream, from its opening to its end. A thread has one step of it at a time; `is_parked`: none wants the next.

    What it has to say goes over `socket`, with whose end it ends.
    """

    limit = "client_async"

    def __init__(self, terms: StreamTerms, lane: ClientLane, socket: LaneReader) -> None:
        """Bind the first step. Raise StatusError, Malformed, and whatever the device raises."""
        self._terms, self._lane, self.socket = terms, lane, socket
        self.requests = StreamRequests.of(terms, lane.model)
        self._key = terms.request_of(0)
        super().__init__(terms.number, lane.plan(self._key), TimeLimits.of(terms.end, FOREVER))
        self._done, self._room, self._goes_on, self._is_met = 0, terms.room, GOES_ON, False
        self.is_parked = False
        self._said: tuple[Outcome | None, bytes] = None, b""
        self._pace = 0  # nanoseconds that a step takes
        self._waiting, self._waiting_since = 0, 0  # results that are not sent, which all are as `_said`

    def check_alone(self, others: Iterable[LaunchedExecution]) -> None:
        """Raise InvalidArgument if another stream writes one of its buffers, or has one that it writes.

        Called under the schedule's lock.
        """
        mine = self.requests
        for other in others:
            if not isinstance(other, RepeatedExecution):
                continue
            its = other.requests
            if both := (mine.written & its.tokens) | (mine.tokens & its.written):
                raise InvalidArgument(
                    f"buffer {min(both)} is in stream {other.number}, which has not ended: close that, or use another"
                )

    def claimed_plan(self) -> Plan:
        self.plan = self._lane.plan(self._key)  # anew, if what it was bound to has changed
        return self.plan.claim()

    def judged(self, outcome: Outcome) -> Outcome:
        """Look whether the step was the last one."""
        if outcome.status != ErrorStatus.NONE:
            return outcome
        try:
            self._is_met = self._terms.stop is not None and self._terms.stop.is_met(self._stop_value(outcome))
        except Exception as error:  # noqa: BLE001 (one bad request must not end a process that serves many)
            return self._lane.failure(error)
        return outcome

    def _stop_value(self, outcome: Outcome) -> NDArray[Any]:
        """Return a copy of the output that may end the stream. Raise InvalidArgument."""
        stop, (slot, offset) = self._terms.stop, self.requests.stops[self._key]
        assert stop
        shape = outcome.shapes[stop.output].dimensions
        if (count := math.prod(shape)) > MOST_ELEMENTS:
            raise InvalidArgument(
                f"output {stop.output} has {count} elements; one that ends a stream has at most {MOST_ELEMENTS}"
            )
        (memory,) = self._lane.memory.resolve([slot])
        return memory.asarray(self.requests.dtype, count, offset).copy()

    def goes_on(self, outcome: Outcome) -> bool:
        """Say how a step ended if another one follows. Called under the schedule's lock."""
        if outcome.status != ErrorStatus.NONE:
            return False
        self._done += 1
        if self._is_met or self._done >= self._terms.most:
            self._goes_on = UNTIL if self._is_met else MOST
            return False
        self._key, now = self._terms.request_of(self._done), time.monotonic_ns()
        self._pace = max(now - self.begin, self._pace - self._pace // 8)
        self.run, self.begin = None, now
        self.is_parked = self._done >= self._room
        self._add(outcome)
        if not self._may_wait:
            self._say(GOES_ON)
        return True

    @property
    def _may_wait(self) -> bool:
        """True if the results that are not sent may wait for that of the next step."""
        is_soon = self.begin + self._pace <= self._waiting_since + _MOST_DELAY
        return is_soon and self._room - self._done > self._waiting and not waiters()

    def give_room(self, room: int) -> bool:
        """Have room for so many results in all; True if a step can run now that could not before. Raise Malformed."""
        if room > self._done + MOST_ROOM:
            raise Malformed(f"room for {room} results, of which {self._done} are there; at most {MOST_ROOM} more")
        self._room = max(self._room, room)
        was_parked, self.is_parked = self.is_parked, self.is_parked and self._done >= self._room
        return was_parked and not self.is_parked

    def invalidate_outputs(self) -> None:
        if self.run:  # between two steps the last one has left a value, which stays
            self.plan.invalidate_outputs()

    def conclude(self, outcome: Outcome) -> None:
        self._add(outcome)
        self._say(self._goes_on or FAILED)

    def _add(self, outcome: Outcome) -> None:
        """Have a result sent with the next message, which is of those that are as this one."""
        shapes = outcome.shapes
        told = outcome._replace(shapes=tuple([shapes[n] for n in self.requests.told]) if shapes else ())
        if told != self._said[0]:
            self._say(GOES_ON)
            self._said = told, self._lane.answer(told)
        if not self._waiting:
            self._waiting_since = self.begin
        self._waiting += 1

    def _say(self, goes_on: int) -> None:
        """Send the results that wait; `goes_on`: after the last one."""
        assert self.socket
        if self._waiting:
            self.socket.post(answer_to_steps(self.number, self._said[1], goes_on, self._waiting))
            self._waiting = 0
