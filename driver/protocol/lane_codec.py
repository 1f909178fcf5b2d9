"""The messages of a lane, the way for requests that goes past the service, straight to the engine.

| the client sends | which is | the answer |
|---|---|---|
| `[number, end, request]` | executed; the next message of its socket is read afterwards | `[number, outcome]` |
| `[number, end, duration, request]` | executed some time | `[number, outcome]`, when it has ended |
| `[number, end, duration, fences, request]` | executed when its fences are signalled | `[number, outcome]` at once |
| `[number, execution]` | a question how that one with fences has ended | `[number, outcome, times since the fences]` |

`number` is the client's. It, `end` and `duration` have the nine bytes of a 64-bit integer each, and the number of
fences one byte: the bytes of a request, by which the engine recognises it, begin at the same place in all messages of a
kind.
Memory is registered once, by descriptor, and named by its slot from then on.
"""

from __future__ import annotations

import struct
from operator import index
from struct import Struct
from typing import TYPE_CHECKING, Any

from burst import ErrorStatus, Malformed, OutputShape, RequestArgument, Timing
from burst.channel import MAX_BYTES, Message, pack
from burst.messages import NO_CAUSE
from burst.wire import RequestPacket, Token
from driver.deadlines import checked
from driver.protocol.rpc import cause_in
from fmq.clock import FOREVER

if TYPE_CHECKING:
    from burst import Request
    from burst.executor import Outcome

IN_TURN, LAUNCH, FENCED, QUESTION = b"\x93\xcf", b"\x94\xcf", b"\x95\xcf", b"\x92\xcf"
"""How messages with a number begin: an array of so many elements, and the mark of the number."""

_TWO, _THREE, _FOUR = Struct(">2sQBQ"), Struct(">2sQBQBQ"), Struct(">2sQBQBQB")
_UINT64, _MARK = 0xCF, b"\xcf"  # msgpack: eight bytes follow, the highest first
_MOST_FENCES = 0x7F  # that one byte says
_MOST_BYTES = MAX_BYTES - _FOUR.size  # of a packed request
_NO_VALUE = RequestArgument(has_no_value=True)
_STATUSES = tuple(ErrorStatus)  # by number: quicker than the constructor
_LONGEST_LOOP = 2**63  # ns; what is not said is 2^64 - 1 on the wire


def _pool(plain: object) -> int | Token:
    """Decode a pool. Raise Malformed."""
    match plain:
        case int(slot) if type(slot) is int:
            return slot
        case [int(token)]:
            return Token(token)
    raise Malformed(f"{plain!r:.60} is not a pool: a pool is a slot, or [token]")


def _argument(plain: object) -> RequestArgument:
    """Decode an argument. Raise Malformed."""
    match plain:
        case None:
            return _NO_VALUE
        case [int(pool), int(offset), int(length), list(dims)] if min(pool, offset, length) >= 0:
            if all(isinstance(d, int) and 0 <= d < 2**32 for d in dims):
                return RequestArgument(
                    has_no_value=False, pool=pool, offset=offset, length=length, dimensions=tuple(dims)
                )
    raise Malformed(f"{plain!r:.60} is not an argument: an argument is [pool, offset, length, dimensions], or nil")


def in_turn(number: int, end: int | None, request: bytes) -> bytes:
    """Return the message that has a packed request executed in turn. `end`: CLOCK_MONOTONIC ns."""
    return _TWO.pack(IN_TURN, number, _UINT64, FOREVER if end is None else end) + request


def launch(number: int, end: int | None, duration: int | None, request: bytes) -> bytes:
    """Return the message that launches a packed request. `duration`: ns."""
    by, within = FOREVER if end is None else end, FOREVER if duration is None else duration
    return _THREE.pack(LAUNCH, number, _UINT64, by, _UINT64, within) + request


def launch_behind(fences: int, number: int, end: int | None, duration: int | None, request: bytes) -> bytes:
    """Return the message that launches a packed request behind so many fences."""
    by, within = FOREVER if end is None else end, FOREVER if duration is None else duration
    return _FOUR.pack(FENCED, number, _UINT64, by, _UINT64, within, fences) + request


def question(number: int, execution: int) -> bytes:
    """Return the message that asks how a fenced execution has ended."""
    return _TWO.pack(QUESTION, number, _UINT64, execution)


def split_in_turn(raw: bytes) -> tuple[int, bytes]:
    """Return end and packed request of a message that begins as IN_TURN. Raise Malformed."""
    if raw[10:11] != _MARK or len(raw) <= _TWO.size:
        raise Malformed("a message with a number is cut off, or its end is no integer of nine bytes")
    return int.from_bytes(raw[11:19]), raw[19:]


def split(raw: bytes) -> tuple[int, int, int, int, bytes]:
    """Return number, end, duration, number of fences and packed request of a message that begins as LAUNCH or FENCED.

    Of a QUESTION the execution is in the place of the end. Raise Malformed.
    """
    duration, fences, mark = FOREVER, 0, _UINT64
    try:
        match raw[:2]:
            case b"\x94\xcf":
                _, number, first, end, mark, duration = _THREE.unpack_from(raw)
                at = _THREE.size
            case b"\x95\xcf":
                _, number, first, end, mark, duration, fences = _FOUR.unpack_from(raw)
                at = _FOUR.size
            case b"\x92\xcf":
                _, number, first, end = _TWO.unpack_from(raw)
                at = _TWO.size
            case _:
                raise Malformed("a message with a number has 2 to 5 elements")
    except struct.error as error:
        raise Malformed(f"a message of {len(raw)} bytes is cut off") from error
    if first != _UINT64 or mark != _UINT64 or fences > _MOST_FENCES:
        raise Malformed("number, end and duration are integers of nine bytes, and fences one of one byte")
    return number, end, duration, fences, raw[at:]


LAUNCHED = pack([0, [], [None, None], ""])
"""The outcome, packed, of a launch behind fences that has succeeded."""


def answer_to(raw: bytes, outcome: bytes) -> bytes:
    """Return the answer with a packed outcome to a message that began like this."""
    return b"\x92" + raw[1:10] + outcome


def encode_outcome(outcome: Outcome) -> bytes:
    """Encode an outcome."""
    more = [] if outcome.cause == NO_CAUSE else [outcome.cause]
    return pack([int(outcome.status), outcome.shapes, outcome.timing, outcome.text[:1000], *more])


def decode_outcome(raw: bytes) -> tuple[Any, ...]:
    """Return the fields of a Result, from a packed outcome. Raise Malformed."""
    return fields_of(Message(raw, []).body)


def fields_of(outcome: Any) -> tuple[Any, ...]:
    """Return them, from a decoded outcome."""
    match outcome:
        case [int(status), list(shapes), [device, driver], str(text), *more] if 0 <= status < len(_STATUSES):
            found = tuple(OutputShape(tuple(dims), bool(enough)) for dims, enough in shapes)
            return _STATUSES[status], (), found, Timing(device, driver), text, cause_in(more)
        case _:
            raise Malformed("the device sent a malformed answer")


def encode_request(model: int, request: Request, pools: list[Any], *, measure: bool) -> bytes:
    """Return a packed request. `pools`: a slot, or [token], for each. Raise Malformed if it is too long."""
    arguments = [[_plain_argument(a) for a in side] for side in (request.inputs, request.outputs)]
    raw = pack([model, *arguments, pools, measure, request.loop_timeout])
    if len(raw) > _MOST_BYTES:
        raise Malformed(f"a request of {len(raw)} bytes; at most {_MOST_BYTES} are allowed")
    return raw


def decode_request(raw: bytes) -> tuple[int, RequestPacket]:
    """Return the number of the prepared model and the request, of a packed one. Raise Malformed."""
    match Message(raw, []).body:
        case [int(model), list(inputs), list(outputs), list(pools), bool(measure), int() | None as loop]:
            arguments = tuple(map(_argument, inputs)), tuple(map(_argument, outputs))
            return model, RequestPacket(*arguments, tuple(map(_pool, pools)), measure, loop)
    raise Malformed("a request is [model, inputs, outputs, slots, measure, loop timeout]")


def with_loop_timeout(request: Request, seconds: float | None) -> Request:
    """Return the request with that loop timeout; the request itself for None. Raise ValueError."""
    if seconds is None:
        return request
    return request._replace(loop_timeout=min(checked("loop_timeout", seconds), _LONGEST_LOOP))


def _plain_argument(a: RequestArgument) -> Any:
    """Encode an argument."""
    if a.has_no_value:
        return None
    return [index(a.pool), index(a.offset), index(a.length), [index(d) for d in a.dimensions]]
