"""Requests and answers of the plain path as msgpack: one message each way.

They carry what a burst carries. Memory is registered once, by descriptor, and named by its slot from then on. Fenced
executions carry requests in the same form.
"""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

from burst import ErrorStatus, Malformed, OutputShape, RequestArgument, Timing
from burst.channel import Message, pack
from burst.messages import NO_CAUSE
from burst.wire import RequestPacket, Token
from driver.deadlines import checked
from driver.protocol.rpc import cause_in

if TYPE_CHECKING:
    from burst import Request
    from burst.executor import Outcome

EXECUTE, EXECUTE_BY = (
    pack(["execute", *[0] * n])[:9] for n in (6, 7)
)  # how requests begin, without and with a deadline: the array's head and the method's name
_UINT64 = b"\xcf"  # msgpack: eight bytes follow, big-endian
_NO_VALUE = RequestArgument(has_no_value=True)
_LONGEST_LOOP = 2**63  # ns; what is not said is 2^64 - 1 on the wire


def _pool(plain: object) -> int | Token:
    """Decode a pool. Raises Malformed."""
    match plain:
        case int(slot) if type(slot) is int:
            return slot
        case [int(token)]:
            return Token(token)
    raise Malformed(f"{plain!r:.60} is not a pool: a pool is a slot, or [token]")


def _argument(plain: object) -> RequestArgument:
    """Decode an argument. Raises Malformed."""
    match plain:
        case None:
            return _NO_VALUE
        case [int(pool), int(offset), int(length), list(dims)] if min(pool, offset, length) >= 0:
            if all(isinstance(d, int) and 0 <= d < 2**32 for d in dims):
                return RequestArgument(
                    has_no_value=False, pool=pool, offset=offset, length=length, dimensions=tuple(dims)
                )
    raise Malformed(f"{plain!r:.60} is not an argument: an argument is [pool, offset, length, dimensions], or nil")


def with_deadline(raw: bytes, deadline: int) -> bytes:
    """Return a request that begins as `EXECUTE`, with a deadline: CLOCK_MONOTONIC ns."""
    return EXECUTE_BY[:1] + raw[1:] + _UINT64 + deadline.to_bytes(8)


def split_deadline(raw: bytes) -> tuple[bytes, int]:
    """Return a request without its deadline, and the deadline. Raises Malformed."""
    if raw[-9:-8] != _UINT64:
        raise Malformed("the last element of execute must be its deadline, an unsigned integer of 64 bits")
    return EXECUTE[:1] + raw[1:-9], int.from_bytes(raw[-8:])


def encode_answer(outcome: Outcome) -> bytes:
    """Encode an answer."""
    more = [] if outcome.cause == NO_CAUSE else [outcome.cause]
    return pack([int(outcome.status), outcome.shapes, outcome.timing, outcome.text[:1000], *more])


def decode_answer(raw: bytes) -> tuple[Any, ...]:
    """Return the fields of a Result. Raises Malformed."""
    return fields_of(Message(raw, []).body)


def fields_of(answer: Any) -> tuple[Any, ...]:
    """Return the fields of a Result from a decoded answer."""
    match answer:
        case [int(status), list(shapes), [device, driver], str(text), *more] if 0 <= status <= max(ErrorStatus):
            found = tuple(OutputShape(tuple(dims), bool(enough)) for dims, enough in shapes)
            return ErrorStatus(status), (), found, Timing(device, driver), text, cause_in(more)
        case _:
            raise Malformed("the device sent a malformed answer")


def encode_request(model: int, request: Request, pools: list[Any], measure: bool) -> list[Any]:
    """Return a request as plain values. `pools`: a slot, or [token], for each of its pools."""
    arguments = [[_plain_argument(a) for a in side] for side in (request.inputs, request.outputs)]
    return [model, *arguments, pools, measure, request.loop_timeout]


def decode_request(plain: object) -> tuple[int, RequestPacket]:
    """Return the number of the prepared model, and the request. Raises Malformed."""
    match plain:
        case [int(model), list(inputs), list(outputs), list(pools), bool(measure), int() | None as loop]:
            arguments = tuple(map(_argument, inputs)), tuple(map(_argument, outputs))
            return model, RequestPacket(*arguments, tuple(map(_pool, pools)), measure, loop)
    raise Malformed("a request is [model, inputs, outputs, slots, measure, loop timeout]")


def with_loop_timeout(request: Request, seconds: float | None) -> Request:
    """Return the request with that loop timeout; the request itself for None. Raises ValueError."""
    if seconds is None:
        return request
    return request._replace(loop_timeout=min(checked("loop_timeout", seconds), _LONGEST_LOOP))


def _plain_argument(a: RequestArgument) -> Any:
    """Encode an argument."""
    if a.has_no_value:
        return None
    return [index(a.pool), index(a.offset), index(a.length), [index(d) for d in a.dimensions]]
