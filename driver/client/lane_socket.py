"""One socket of a lane: sends requests with the memory that they name, and takes answers."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from burst import DeviceBuffer, Malformed, PeerDied
from burst._hot import HotSocket
from burst.backing import fill_holes
from burst.exhaustion import DescriptorsLost, exhausted
from burst.request_checks import check_request
from driver.client.workspace import MOST_KNOWN
from driver.protocol.lane_codec import encode_request, in_turn
from fmq.clock import FOREVER

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from burst import Memory, Request
    from burst.channel import Channel, Message
    from burst.slots import SlotTable
    from driver.client.workspace import KnownRequest

MOST_NUMBERS = 4096
"""What is freed, or forgotten, in one message: it has 64 KiB at most."""


class LaneSocket(HotSocket):
    """A socket to the engine. The thread that holds `lock` uses it, and tells the device of freed memory afterwards."""

    def __init__(self, channel: Channel, slots: SlotTable) -> None:
        """Take over a channel; `slots`: of the lane."""
        self.channel, self._slots = channel, slots
        self.lock = threading.Lock()
        self._is_foreign = channel.is_foreign  # the device takes memory with all its pages alone
        self.sent: set[int] = set()  #: slots that are registered here
        self.freed: deque[int] = deque()  #: slots of which the device is to be told
        self._encoded: dict[tuple[int, KnownRequest, bool], bytes] = {}

    def encoded(self, model: int, request: Request, known: KnownRequest, measure: bool) -> bytes:
        """Return the packed request; `known` stands for it. Send memory that is new on this socket.

        Requests are immutable, so each is encoded only once. Raise InvalidArgument, Malformed, PeerDied.
        """
        key = model, known, measure
        if found := self._encoded.get(key):
            return found
        raw = self.packed(model, request, measure)
        if len(self._encoded) >= MOST_KNOWN:
            self._encoded.clear()
        self._encoded[key] = raw
        return raw

    def packed(self, model: int, request: Request, measure: bool) -> bytes:
        """Return a request that is sent once, packed. Send memory that is new on this socket. Raise as `encoded`."""
        check_request(request.inputs, request.outputs, len(request.pools))
        pools = [[p.token] if isinstance(p, DeviceBuffer) else self._slot(p) for p in request.pools]
        return encode_request(model, request, pools, measure=measure)

    def _slot(self, memory: Memory) -> int:
        slot = self._slots.slot_of(memory)
        if slot not in self.sent:
            if self._is_foreign:
                fill_holes(memory.fd)
            self.channel.send(["memory", slot, memory.to_wire()], [memory.fd])
            self.sent.add(slot)
        return slot

    def exchange(self, message: bytes, fds: Sequence[int] = (), timeout: float | None = None) -> Message:
        """Send a message with a number, and return its answer. Raise PeerDied, Timeout, ResourceExhaustedTransient."""
        self.channel.send_raw(message, fds)
        try:
            answer = self.channel.receive(timeout)
        except DescriptorsLost as error:
            raise exhausted(error, "this process") or error from error
        if answer.raw[1:10] != message[1:10]:  # the number, as it is packed
            answer.close()
            self._refuse()
        return answer

    def ask(self, number: int, end: int | None, request: bytes, timeout: float | None) -> bytes:
        """Have a packed request executed in turn, and return the outcome, the same bytes again if it is the same.

        Raise PeerDied, Timeout.
        """
        channel, answered = self.channel, None
        if timeout is None:  # else the wait for the answer ends by a clock
            by = FOREVER if end is None else end
            answered = self._exchange(channel.socket.fileno(), number, by, request)
            if answered:
                return answered
        message = in_turn(number, end, request)
        if answered is None:
            channel.send_raw(message)
        answer = channel.receive_bytes(timeout if answered is None else 0.0)
        if answer[1:10] != message[1:10]:
            self._refuse()
        return answer[10:]

    def _refuse(self) -> NoReturn:
        raise Malformed("the device has sent an answer to something else")

    def send_anew(self, request: Request) -> None:
        """Have the request's memory sent again with the next request that names it.

        The device had no room for the request, and perhaps for that.
        """
        self.free([self._slots.slot_of(pool) for pool in request.pools if not isinstance(pool, DeviceBuffer)])

    def free(self, slots: Iterable[int]) -> None:
        """Tell the device of these slots, now, or when the thread that uses the socket calls `tell_freed`."""
        if mine := self.sent.intersection(slots):
            self.freed.extend(mine)
            self.tell_freed()

    def tell_freed(self) -> None:
        """Tell the device, unless another thread uses the socket: that one does so afterwards."""
        while self.freed and self.lock.acquire(blocking=False):
            try:
                freed = [self.freed.popleft() for _ in range(min(len(self.freed), MOST_NUMBERS))]
                self._encoded.clear()  # some may name one of them
                self.sent.difference_update(freed)
                with suppress(PeerDied):  # the next request notices it
                    self.channel.send(["free_memory", *freed])
            finally:
                self.lock.release()
