"""A lane of one request's own, on which the device itself judges every deadline.

The usual client answers in the device's place when a deadline has passed, and stops waiting at one.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from burst import Malformed, Result, Timeout
from burst.backing import fill_holes
from burst.channel import Channel, close_all
from driver.protocol.fences import FenceState, look
from driver.protocol.lane_codec import (
    LAUNCHED,
    decode_outcome,
    encode_request,
    fields_of,
    in_turn,
    launch,
    launch_behind,
    question,
)
from fmq.closing import Closing

if TYPE_CHECKING:
    from burst import Request
    from burst.channel import Message
    from driver.client.prepared_model import RemotePreparedModel

_numbers = count(2**32)  # of slots and executions: beyond those of the client's own lane, which these belong to, too


class RawLane(Closing):
    """A connection for one request. Each way of executing returns the device's own answer, however late."""

    to_send = "prepare the model where the lane is needed"

    def __init__(self, model: RemotePreparedModel, request: Request) -> None:
        """Open it. Raise PeerDied, Timeout."""
        _, (fd, life_fd) = model.device.call("lane")
        self._channel = Channel.from_fd(fd)
        self._channel.watch(life_fd)
        slots = [next(_numbers) for _ in request.pools]
        for slot, pool in zip(slots, request.pools, strict=True):
            fill_holes(pool.fd)
            self._channel.send(["memory", slot, pool.to_wire()], [pool.fd])
        self._packed = encode_request(model.home.number, request, slots, measure=False)

    def in_turn(self, deadline: int | None, patience: float) -> Result:
        """Execute it as `execute` does. Raise PeerDied, Timeout."""
        return _result(self._asked(in_turn(next(_numbers), deadline, self._packed), patience))

    def launched(self, deadline: int | None, patience: float) -> Result:
        """Execute it as `execute_async` does. Raise PeerDied, Timeout."""
        return _result(self._asked(launch(next(_numbers), deadline, None, self._packed), patience))

    def fenced(self, deadline: int | None, patience: float) -> Result:
        """Execute it as `execute_fenced` does, without fences before it. Raise PeerDied, Timeout."""
        number = next(_numbers)
        answer = self._asked(launch_behind(0, number, deadline, None, request=self._packed), patience)
        fences = answer.take_fds()
        try:
            if answer.raw[10:] != LAUNCHED:
                return _result(answer)
            if look(fences[0], patience) == FenceState.ACTIVE:
                raise Timeout(f"a fenced execution has not ended within {patience:g} s")
        finally:
            close_all(fences)
        match self._asked(question(next(_numbers), number), patience).body:
            case [_, outcome, _]:
                return Result(*fields_of(outcome))
        raise Malformed("the device sent a malformed answer about a fenced execution")

    def _asked(self, message: bytes, patience: float) -> Message:
        self._channel.send_raw(message)
        return self._channel.receive(patience)

    def close(self) -> None:
        """End it."""
        self._channel.close()


def _result(answer: Message) -> Result:
    """Return what an answer tells: it begins with its number."""
    return Result(*decode_outcome(answer.raw[10:]))
