"""The client's side of the plain path: one connection, one call at a time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from burst import DeviceBuffer, InvalidArgument, Result, Timeout
from burst.channel import pack
from burst.request_checks import check_request
from burst.slots import SlotTable
from driver.deadlines import seconds_left
from driver.protocol.plain_codec import decode_answer, encode_request, with_deadline
from fmq import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from burst import Memory, Request
    from burst.channel import Channel


class SlotRegistry:
    """Which memory the device knows under which slot, on one connection."""

    def __init__(self, send: Callable[..., object]) -> None:
        """`send(method, *arguments, fds=())` tells the device of new and of freed memory."""
        self._send, self._slots = send, SlotTable()
        self._sent: set[int] = set()

    def encode(self, model: int, request: Request, measure: bool) -> list[Any]:
        """The request as plain values. Sends memory that the device does not know yet. Raises InvalidArgument."""
        check_request(request.inputs, request.outputs, len(request.pools))
        pools = [[p.token] if isinstance(p, DeviceBuffer) else self._slot(p) for p in request.pools]
        return encode_request(model, request, pools, measure)

    def _slot(self, memory: Memory) -> int:
        slot = self._slots.slot_of(memory)
        if slot not in self._sent:
            self._send("memory", slot, memory.to_wire(), fds=[memory.fd])
            self._sent.add(slot)
        return slot

    def free_memory(self, memory: Memory) -> None:
        """The device may unmap it."""
        slot = self._slots.forget(memory)
        if slot is not None:
            self._sent.discard(slot)
            self._send("free_memory", slot)


class PlainClient:
    """Executes requests over one connection. One thread at a time."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._slots = channel, SlotRegistry(partial(_send, channel))
        self._last: tuple[int, Request, bool, bytes] | None = None
        self._answer: tuple[bytes, tuple[Any, ...]] = b"", ()

    def execute(self, model: int, request: Request, *, measure: bool, deadline: int | None) -> Result:
        """Raises PeerDied, and Timeout at the deadline; the connection cannot be used afterwards."""
        try:
            self._send(model, request, measure, deadline)
        except InvalidArgument as error:
            return error.as_result()
        raw = self._channel.receive(seconds_left(deadline)).raw
        if deadline is not None and clock.now() > deadline:
            raise Timeout("the answer came after the deadline")
        if raw != self._answer[0]:
            self._answer = raw, decode_answer(raw)
        return Result(*self._answer[1])

    def _send(self, model: int, request: Request, measure: bool, deadline: int | None) -> None:
        raw = self._encoded(model, request, measure)
        if deadline is not None:
            raw = with_deadline(raw, deadline)
        self._channel.send_raw(raw)

    def _encoded(self, model: int, request: Request, measure: bool) -> bytes:
        """The encoded request. Requests are immutable, so the last one is encoded only once."""
        last = self._last
        if last and last[1] is request and (last[0], last[2]) == (model, measure):
            return last[3]
        raw = pack(["execute", *self._slots.encode(model, request, measure)])
        self._last = model, request, measure, raw
        return raw

    def free_memory(self, memory: Memory) -> None:
        """The device may unmap it."""
        self._last = None
        self._slots.free_memory(memory)

    def close(self) -> None:
        """Ends the connection; the device frees what belongs to it."""
        self._channel.close()


def _send(channel: Channel, *message: object, fds: Sequence[int] = ()) -> None:
    channel.send(message, fds)
