"""The client's side of the plain path: one connection, one call at a time."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from burst import DeviceBuffer, InvalidArgument, PeerDied, Result, Timeout
from burst.backing import fill_holes
from burst.channel import pack
from burst.dropped import DropList
from burst.request_checks import check_request
from burst.slots import SlotTable
from driver.deadlines import seconds_left
from driver.protocol.plain_codec import decode_answer, encode_request, with_deadline
from fmq import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from burst import Memory, Request
    from burst.channel import Channel
    from driver.client.workspace import KnownRequest


class SlotRegistry:
    """Which memory the device knows under which slot, on one connection. Used under the connection's lock."""

    def __init__(self, send: Callable[..., object], dropped: DropList[int], *, is_foreign: bool) -> None:
        """`send(method, *arguments, fds=())` tells the device of new memory; `dropped` of what is freed.
        `is_foreign`: the device is another account's, and takes memory with all its pages alone.
        """
        self._send, self._slots, self._is_foreign = send, SlotTable(dropped), is_foreign
        self._sent: set[int] = set()
        self.free_memory = self._slots.free_memory  #: any thread, without the lock

    def encode(self, model: int, request: Request, measure: bool) -> list[Any]:
        """The request as plain values. Sends memory that the device does not know yet. Raises InvalidArgument."""
        check_request(request.inputs, request.outputs, len(request.pools))
        pools = [[p.token] if isinstance(p, DeviceBuffer) else self._slot(p) for p in request.pools]
        return encode_request(model, request, pools, measure)

    def _slot(self, memory: Memory) -> int:
        slot = self._slots.slot_of(memory)
        if slot not in self._sent:
            if self._is_foreign:
                fill_holes(memory.fd)
            self._send("memory", slot, memory.to_wire(), fds=[memory.fd])
            self._sent.add(slot)
        return slot

    def forget(self, slots: list[int]) -> None:
        """The device is told to unmap the memory of these slots."""
        self._slots.forget(slots)
        self._sent.difference_update(slots)


class PlainClient:
    """Executes requests over one connection. One thread at a time; `free_memory` from any."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._dropped = channel, DropList(self._tell)
        self._lock = self._dropped.lock
        self._slots = SlotRegistry(partial(_send, channel), self._dropped, is_foreign=channel.is_foreign)
        self._last: tuple[int, KnownRequest, bool, bytes] | None = None
        self._answer: tuple[bytes, tuple[Any, ...]] = b"", ()

    def execute(
        self, model: int, request: Request, known: KnownRequest, *, measure: bool, deadline: int | None
    ) -> Result:
        """`known`: stands for this request. Raises PeerDied, and Timeout; then the connection is over."""
        with self._lock:
            try:
                self._send(model, request, known, measure, deadline)
            except InvalidArgument as error:
                return error.as_result()
            raw = self._channel.receive(seconds_left(deadline)).raw
        if self._dropped.is_due:
            with suppress(PeerDied):  # this answer is there; the next request notices the death
                self._dropped.tell_due()
        if deadline is not None and clock.now() > deadline:
            raise Timeout("the answer came after the deadline")
        if raw != self._answer[0]:
            self._answer = raw, decode_answer(raw)
        return Result(*self._answer[1])

    def _send(self, model: int, request: Request, known: KnownRequest, measure: bool, deadline: int | None) -> None:
        raw = self._encoded(model, request, known, measure)
        if deadline is not None:
            raw = with_deadline(raw, deadline)
        self._channel.send_raw(raw)

    def _encoded(self, model: int, request: Request, known: KnownRequest, measure: bool) -> bytes:
        """The encoded request. Requests are immutable, so the last one is encoded only once."""
        last = self._last
        if last and last[1] is known and (last[0], last[2]) == (model, measure):
            return last[3]
        raw = pack(["execute", *self._slots.encode(model, request, measure)])
        self._last = model, known, measure, raw
        return raw

    def free_memory(self, memory: Memory) -> None:
        """The device unmaps it: now, or after the execution that another thread waits for."""
        self._slots.free_memory(memory)

    def _tell(self, slots: list[int]) -> None:
        self._last = None  # it may name one of them
        self._slots.forget(slots)
        _send(self._channel, "free_memory", *slots)

    def close(self) -> None:
        """Ends the connection; the device frees what belongs to it."""
        self._channel.close()


def _send(channel: Channel, *message: object, fds: Sequence[int] = ()) -> None:
    channel.send(message, fds)
