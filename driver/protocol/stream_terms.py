"""What a stream of results is asked for by: requests that the engine executes in turn, and when it ends.

| the client sends | which is | the answers |
|---|---|---|
| `[number, end, most, room, stop, requests]` | executed step by step | `[number, outcome, goes on, count]` |
| `["go_on", number, room]` | room for so many results in all | |

The first step executes the first request, the steps after it the others in turn, again and again: what one writes, the
next one reads, in buffers of the device or in memory. `end`: of the stream, CLOCK_MONOTONIC ns. `most`: steps. `room`:
so many results may be written in all before the client says more. `stop`: nil, or `[output, values]`. An outcome has
the shapes of the outputs that lie in memory; `count` steps, one after the other, had it: short ones come together.
`goes on` is said of the last of these: another one follows, or why none does; what fails is last, and alone.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from burst import Malformed
from burst.channel import MAX_BYTES, Message, pack

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

STREAM = b"\x96\xcf"
"""How the message begins: an array of six elements, and the mark of the number."""

GOES_ON, UNTIL, MOST, FAILED = range(4)
"""What the answer to a step says besides: another one follows, or why none does."""

MOST_STEPS = 2**20
MOST_ROOM = 64  # results that are written, and not read
MOST_VALUES = 64  # that an output may have to end a stream
MOST_ELEMENTS = 4096  # of the output that may end it

_HEAD, _UINT64 = Struct(">2sQBQ"), 0xCF
_MOST_REQUESTS = 1 + MOST_ROOM
_MOST_BESIDES = 1024  # bytes of a message beside its requests


class Stop(NamedTuple):
    """The end of a stream: all elements of an output are one of `values`, or true, if there are none."""

    output: int
    values: tuple[int, ...] = ()

    def is_met(self, found: NDArray[Any]) -> bool:
        """Return True if this value of the output ends the stream."""
        if not found.size:
            return False
        return bool(np.isin(found, self.values).all() if self.values else found.all())


class StreamTerms(NamedTuple):
    """The terms of a client's stream. `end`: CLOCK_MONOTONIC ns, FOREVER for none. `requests`: packed, of one model."""

    number: int
    end: int
    most: int
    room: int
    stop: Stop | None
    requests: tuple[bytes, ...]

    def request_of(self, step: int) -> bytes:
        """Return the request of a step, counted from 0."""
        return self.requests[step and 1 + (step - 1) % (len(self.requests) - 1)]

    def pack(self) -> bytes:
        """Return the message. Raise Malformed if it is too long."""
        if (nbytes := sum(map(len, self.requests))) > MAX_BYTES - _MOST_BESIDES:
            raise Malformed(
                f"a stream of {len(self.requests)} requests takes {nbytes} bytes; at most {MAX_BYTES - _MOST_BESIDES} "
                "are allowed: open the burst with a smaller depth"
            )
        stop = self.stop and [self.stop.output, list(self.stop.values)]
        rest = pack([self.most, self.room, stop, list(self.requests)])[1:]  # without the head of an array
        return _HEAD.pack(STREAM, self.number, _UINT64, self.end) + rest


def unpack_terms(raw: bytes) -> StreamTerms:
    """Return what a message that begins as STREAM asks for. Raise Malformed unless `pack` would have written it."""
    match Message(raw, []).body:
        case [int(number), int(end), int(most), int(room), plain, [_, _, *_] as requests] if (
            1 <= most <= MOST_STEPS
            and 1 <= room <= MOST_ROOM
            and len(requests) <= _MOST_REQUESTS
            and all(type(request) is bytes for request in requests)
        ):
            terms = StreamTerms(
                number=number,
                end=end,
                most=int(most),  # of a bool it is other bytes
                room=int(room),
                stop=_stop(plain),
                requests=tuple(requests),
            )
            if raw[10] == _UINT64 and end >= 0 and terms.pack() == raw:
                return terms
    raise Malformed(
        f"a stream is [number, end, most, room, stop, requests]: 1 to {MOST_STEPS} steps, room for 1 to {MOST_ROOM} "
        f"results, 2 to {_MOST_REQUESTS} packed requests"
    )


def answer_to_steps(number: int, outcome: bytes, goes_on: int, count: int = 1) -> bytes:
    """Return the answer to so many steps of that stream, at most MOST_ROOM, which had this packed outcome."""
    return pack([number, 0, 0, 0])[:-3] + outcome + bytes([goes_on, count])


def _stop(plain: object) -> Stop | None:
    """Decode what ends a stream. Raise Malformed."""
    match plain:
        case None:
            return None
        case [int(output), list(values)] if output >= 0 and len(values) <= MOST_VALUES:
            if all(type(value) is int and value < 2**63 for value in values):
                return Stop(int(output), tuple(values))
    raise Malformed(f"{plain!r:.60} ends no stream: [output, values] does, with at most {MOST_VALUES} integers")
