"""The client's side of a burst: queues, slots, and one request at a time."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import fmq
from burst.channel import Channel, ChannelLoop, Message
from burst.errors import Busy, GeneralFailure, InvalidArgument, Malformed, PeerDied, Timeout
from burst.memory import Memory, SlotTable
from burst.messages import NO_TIMING, ErrorStatus, Request
from burst.wire import DATUM, DATUM_DTYPE, ResultPacket, decode_result, encode_request
from fmq.clock import FOREVER, deadline_of

if TYPE_CHECKING:
    from fmq import Descriptor
    from fmq.region import Kind

CHANNEL_LENGTH = 1024  # elements of each queue
_callbacks = ChannelLoop("burst-callbacks")
os.register_at_fork(after_in_child=_callbacks.forget)

_HOLD = 10e-6  # seconds that an execution keeps the GIL: a busy thread of the application does not delay its result


class Configure(Protocol):
    """What a prepared model offers: starts a listener on these queues, or raises StatusError."""

    def __call__(self, requests: Descriptor, results: Descriptor, callback: Channel, context: Channel) -> None:
        """The channels' far ends are duplicated to the service; the caller closes its own."""


class NotSent(Exception):
    """The request did not go out, and nothing was executed: take the plain path."""


@dataclass(slots=True)
class Counts:
    """What a burst has done so far."""

    requests: int = 0
    timeouts: int = 0
    memories_sent: int = 0
    control_bytes: int = 0  #: of packets, written and read


class Controller:
    """One burst. One thread at a time; a second one gets Busy."""

    def __init__(
        self,
        configure: Configure,
        memory: Kind = "memfd",
        spin: float = fmq.end.DEFAULT_SPIN,
        length: int = CHANNEL_LENGTH,
    ) -> None:
        """`memory`: what the queues are made of. `spin`: seconds to poll for a result before sleeping.

        Raises StatusError when the device refuses, PeerDied when it is gone.
        """
        self.counts = Counts()
        self._slots, self._lock = SlotTable(), threading.Lock()
        self._late = False  # a result is still to come for a caller who stopped waiting
        self._invalid: str | None = None
        self._last: tuple[bytes, ResultPacket] | None = None
        with (
            fmq.MessageQueue.create(DATUM_DTYPE, length, memory=memory) as requests,
            fmq.MessageQueue.create(DATUM_DTYPE, length, memory=memory) as results,
        ):
            self._writer, self._reader = requests.writer(), results.reader()
            self._writer.spin = self._reader.spin = spin
            self._exchange = fmq.Exchange(self._writer, self._reader, hold=min(spin, _HOLD)).__call__
            self._callback, callback = Channel.pair()
            self._context, context = Channel.pair()
            _callbacks.add(self._callback, self._hand_over, self._callback.close)
            try:
                with callback, context:
                    configure(requests.descriptor, results.descriptor, callback, context)
            except BaseException:
                self.close()
                raise

    def encode(self, request: Request, *, measure: bool = False) -> bytes:
        """The packet of a request whose pools are `Memory`. It stays good until one of them is freed."""
        with self._lock:
            slots = [self._slots.slot_of(memory) for memory in request.pools]
        return encode_request(request.inputs, request.outputs, slots, measure)

    def send(self, packet: bytes, timeout: float | None = None) -> ResultPacket:
        """One execution. Raises NotSent, Timeout (the result, when it comes, is dropped), PeerDied, Busy."""
        if self._invalid:
            raise NotSent(self._invalid)
        deadline = FOREVER if timeout is None else deadline_of(timeout or 1e-9)
        try:
            raw = self._roundtrip(packet, deadline)
            self.counts.requests += 1
            self.counts.control_bytes += len(packet) + len(raw)
        except BufferError as error:
            raise NotSent(str(error)) from error
        except fmq.Timeout as error:
            self._find_late(len(packet))
            self.counts.timeouts += 1
            raise Timeout(f"no result within {timeout} s; the burst stays usable") from error
        except fmq.PeerDied as error:
            self._invalid = "the device died"
            raise PeerDied("the device's process is gone") from error
        except fmq.Busy as error:
            raise Busy("this burst is executing in another thread; a burst takes one request at a time") from error
        except (fmq.Closed, fmq.Corrupt) as error:
            self._invalid = f"the device ended this burst: {error}"
            raise GeneralFailure(self._invalid) from error
        except BaseException:  # a signal's handler raised, such as KeyboardInterrupt
            self._find_late(len(packet))
            raise
        last = self._last
        return last[1] if last and last[0] == raw else self._decode(raw)

    def _roundtrip(self, packet: bytes, deadline: int) -> bytes:
        if self._late:  # wire version 1 has no request ids: the late result comes first
            self.counts.control_bytes += len(self._exchange(b"", deadline))
            self._late = False
        return self._exchange(packet, deadline)

    def _find_late(self, sent: int) -> None:
        """After an exception out of `_roundtrip`: how far our ends moved says whether a result is still to come."""
        moved = (self._writer.position + self._reader.position) * DATUM - self.counts.control_bytes
        self._late = moved == (0 if self._late else sent)
        self.counts.control_bytes += moved

    def _decode(self, raw: bytes) -> ResultPacket:
        try:
            result = decode_result(raw)
        except Malformed as error:
            self._invalid = f"the device's answer was malformed: {error}"
            return ResultPacket(ErrorStatus.GENERAL_FAILURE, (), NO_TIMING)
        self._last = raw, result
        return result

    def free_memory(self, memory: Memory) -> None:
        """The device may unmap it. Packets that name it are of no more use. Unknown memory is no error."""
        with self._lock:
            slot = self._slots.forget(memory)
        if slot is not None:
            self._context.send(["free_memory", slot])

    def _hand_over(self, message: Message) -> None:
        """The device asks for the memory behind slots: all of it or none."""
        match message.body:
            case ["get_memories", list(slots)]:
                pass
            case _:
                raise Malformed("the device asks for something that this version does not know")
        try:
            with self._lock:
                memories = self._slots.memories(slots)
            answer, fds = [0, [m.to_wire() for m in memories]], [m.fd for m in memories]
        except (InvalidArgument, ValueError) as error:  # unknown, or closed by its owner
            self._callback.send([int(ErrorStatus.INVALID_ARGUMENT), str(error)])
            return
        self._callback.send(answer, fds)
        self.counts.memories_sent += len(memories)

    def close(self) -> None:
        """Ends the burst on both sides. Harmless when done twice."""
        _callbacks.discard(self._callback)
        for end in (self._writer, self._reader, self._context, self._callback):
            end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
