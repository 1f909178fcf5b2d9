"""The part that `PlainClient` and `FencesClient` have in common: requests become plain values, memory becomes slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from burst import DeviceBuffer
from burst.slots import SlotTable
from driver.protocol.plain_codec import encode_request

if TYPE_CHECKING:
    from collections.abc import Callable

    from burst import Memory, Request


class SlotRegistry:
    """Which memory the device knows under which slot, on one connection."""

    def __init__(self, send: Callable[..., object]) -> None:
        """`send(method, *arguments, fds=())` tells the device of new and of freed memory."""
        self._send, self._slots = send, SlotTable()
        self._sent: set[int] = set()

    def encode(self, model: int, request: Request, measure: bool) -> list[Any]:
        """The request as plain values. Sends memory that the device does not know yet."""
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
