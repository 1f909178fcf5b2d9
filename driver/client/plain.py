"""The client's side of the plain path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from burst import DeviceBuffer, Result, Timeout
from burst.channel import pack
from burst.memory import SlotTable
from driver.deadlines import seconds_left
from driver.protocol.plain_codec import EXECUTE_BY, UINT64, decode_answer, to_plain
from fmq import clock

if TYPE_CHECKING:
    from burst import Memory, Request
    from burst.channel import Channel


class PlainClient:
    """The client's side of one connection. One call at a time."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._slots = channel, SlotTable()
        self._sent: set[int] = set()
        self._last: tuple[int, Request, bool, bytes] | None = None
        self._answer: tuple[bytes, tuple[Any, ...]] = b"", ()

    def execute(self, model: int, request: Request, *, measure: bool, deadline: int | None) -> Result:
        """Raises PeerDied; Timeout at the deadline, after which this connection is of no more use."""
        self._send(model, request, measure, deadline)
        raw = self._channel.receive(seconds_left(deadline)).raw
        if deadline is not None and clock.now() > deadline:
            raise Timeout("an answer came too late")
        if raw != self._answer[0]:
            self._answer = raw, decode_answer(raw)
        return Result(*self._answer[1])

    def judged(self, model: int, request: Request, deadline: int, patience: float) -> Result:
        """What the device itself says of a request and its deadline, however late. Raises PeerDied, Timeout."""
        self._send(model, request, False, deadline)
        return Result(*decode_answer(self._channel.receive(patience).raw))

    def _send(self, model: int, request: Request, measure: bool, deadline: int | None) -> None:
        raw = self._encoded(model, request, measure)
        if deadline is not None:
            raw = EXECUTE_BY[:1] + raw[1:] + UINT64 + deadline.to_bytes(8)
        self._channel.send_raw(raw)

    def _encoded(self, model: int, request: Request, measure: bool) -> bytes:
        """Requests are immutable, so the last one is not encoded again."""
        last = self._last
        if last and last[1] is request and (last[0], last[2]) == (model, measure):
            return last[3]
        slots = [[p.token] if isinstance(p, DeviceBuffer) else self._slot(p) for p in request.pools]
        arguments = [[to_plain(a) for a in side] for side in (request.inputs, request.outputs)]
        raw = pack(["execute", model, *arguments, slots, measure, request.loop_timeout])
        self._last = model, request, measure, raw
        return raw

    def _slot(self, memory: Memory) -> int:
        slot = self._slots.slot_of(memory)
        if slot not in self._sent:
            self._channel.send(["memory", slot, memory.to_wire()], [memory.fd])
            self._sent.add(slot)
        return slot

    def free_memory(self, memory: Memory) -> None:
        """The device may unmap it."""
        self._last = None
        slot = self._slots.forget(memory)
        if slot is not None:
            self._sent.discard(slot)
            self._channel.send(["free_memory", slot])

    def close(self) -> None:
        """Ends the connection and frees on the other side what belonged to it."""
        self._channel.close()
