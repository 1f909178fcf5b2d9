"""As tests/burst/fuzz_parsers.py, of what a client sends to a device: calls, and requests on the plain path.

What is claimed: each is answered with a status and in as many words as a message has room for; the status is not
GENERAL_FAILURE, which is how an exception that nobody foresaw is answered; no descriptor is left behind.
"""

import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import msgpack

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "burst"))

import fuzz_parsers
from lane_owners import lane_owner
from mutator import MessageMutator

import fmq
from burst import (
    ErrorStatus,
    InvalidArgument,
    Malformed,
    Memory,
    OutputShape,
    PeerDied,
    channel,
    images,
    memory,
)
from burst.channel import Message
from burst.wire import Token
from driver.engine import lane, lane_reader
from driver.protocol import lane_codec, rpc, stream_terms

ANSWERS = set(ErrorStatus) - {ErrorStatus.GENERAL_FAILURE}


class OneMessage:
    """Stands in for a channel: one message comes, then the peer is gone; what is sent is kept, as bytes."""

    def __init__(self, message):
        self._messages, self.sent = [message], []

    def receive(self):
        if not self._messages:
            raise PeerDied("it has said all")
        return self._messages.pop()

    def send(self, body, fds=()):
        self.send_raw(channel.pack(body))

    def send_raw(self, raw, fds=()):
        self.sent.append(raw)

    def send_at_once(self, raw):
        self.sent.append(raw)
        return True

    def await_reader(self, seconds):
        return True


class Calls:
    """rpc.serve, with handlers that take what those of services take: numbers, memory, descriptors."""

    name = "calls"
    modules = (channel, memory, images, fmq.descriptor, rpc)

    def __init__(self, seed):
        self._queue = fmq.MessageQueue.create("u4", 100)
        plain_queue, _ = self._queue.descriptor.to_wire()
        self._handlers = {"hello": self._hello, "memory": self._memory, "queue": self._open, "fd": self._take}
        bodies = [
            [1, "hello", 1],
            [2, "memory", ["ashmem", 4096, True]],
            [2, "memory", ["hardware_buffer", "nv12", 16, 8, [[0, 16], [1024, 64]], 51]],
            [3, "queue", plain_queue],
            [4, "fd"],
            [5, "nothing"],
        ]
        self.seeds = [msgpack.packb(body) for body in bodies]
        self.mutate = MessageMutator(seed)

    def close(self):
        self._queue.close()

    @staticmethod
    def _hello(_, version):
        if version != rpc.PROTOCOL:
            raise Malformed(f"protocol {version!r:.80}")
        return rpc.Reply([version])

    @staticmethod
    def _memory(message, plain_memory):
        return rpc.Reply([Memory.from_wire(plain_memory, rpc.take_fd(message)).nbytes])

    @staticmethod
    def _open(message, plain_queue):
        return rpc.Reply([fmq.Descriptor.from_wire(plain_queue, message.take_fds()).capacity])

    @staticmethod
    def _take(message):
        return rpc.Reply([], [rpc.take_fd(message)])

    def check(self, data):
        """Whether the call succeeded. An answer without room for the call's number ends the conversation instead."""
        fds = [os.dup(self._queue.descriptor.fds[0]) for _ in range(1 + (len(data) % 8 == 0))]
        conversation = OneMessage(Message(data, fds))
        rpc.serve(conversation, self._handlers)
        if not conversation.sent:
            assert len(data) > channel.MAX_BYTES - 2000
            return False
        (answer,) = map(msgpack.unpackb, conversation.sent)
        assert answer[1] in ANSWERS or is_no_memory(answer), answer
        return answer[1] == ErrorStatus.NONE


def is_no_memory(answer):
    """Whether it is the GENERAL_FAILURE for memory that is not what was said of it, or of a vendor's kind."""
    said = "cannot be mapped: ", "does not describe memory", ": this device knows ashmem"
    return answer[1] == ErrorStatus.GENERAL_FAILURE and any(words in answer[2] for words in said)


class Plain:
    """Requests on the plain path, from their bytes to the answer's; two slots have memory."""

    name = "plain"
    modules = (channel, lane, lane_reader, lane_codec)
    _execution = SimpleNamespace(is_static=True, shapes=(OutputShape((4,)),), run=lambda: None)

    def __init__(self, seed):
        self._channel = OneMessage(None)
        owner = lane_owner(self._model, self._model)
        self._reader = lane_reader.LaneReader(self._channel, lane.ClientLane(owner), lambda: None)
        for slot in (0, 1):
            memory = Memory.create(4096)
            self._reader.handle(Message(msgpack.packb(["memory", slot, memory.to_wire()]), [os.dup(memory.fd)]))
        one, two = [0, 0, 64, []], [1, 64, 64, [2, 3]]
        bodies = [[1, [one, None], [two], [0, 1], True, None], [1, [one], [], [1], False, 5]]
        bodies += [[1, [one], [[1, 0, 0, []]], [0, [7]], False, None], [2, [], [], [], False, None]]
        self.seeds = [lane_codec.in_turn(n, None, msgpack.packb(body)) for n, body in enumerate(bodies)]
        self.seeds.append(lane_codec.in_turn(9, 2**63, msgpack.packb(bodies[0])))
        self.mutate = MessageMutator(seed)

    def close(self):
        """There is nothing to close."""

    def _model(self, number):
        if number != 1:
            raise InvalidArgument("there is one model")
        return self._bind

    def _bind(self, request):
        for argument in (*request.inputs, *request.outputs):
            assert min(argument.pool, argument.offset, argument.length, *argument.dimensions, 0) == 0
            assert all(isinstance(number, int) for number in (*argument[1:4], *argument.dimensions))
        assert all(isinstance(pool, Memory | Token) for pool in request.pools)
        return self._execution

    def check(self, data):
        """Whether the request was executed. Only what begins like one comes here."""
        if data[:2] != lane_codec.IN_TURN:
            return False
        status, _, _, _, text, _ = self.answer(data)
        assert status in ANSWERS or text.startswith("Malformed: "), text
        return status == ErrorStatus.NONE

    def answer(self, data):
        """As the client sees it."""
        try:
            self._reader.handle(Message(data, []))
        except Malformed as error:  # there is no number to answer to
            return 0, None, None, None, str(error), None
        number, outcome = msgpack.unpackb(self._channel.sent.pop())
        assert number == int.from_bytes(data[2:10])
        return lane_codec.fields_of(outcome)


class Streams:
    """What opens a stream of results: what is read is what would be written again."""

    name = "streams"
    modules = (channel, stream_terms)

    def __init__(self, seed):
        requests = (b"\x90" * 20, b"\x91" * 20, b"\x92" * 30)
        stops = None, stream_terms.Stop(0), stream_terms.Stop(2, (-1, 2, 2**40))
        terms = stream_terms.StreamTerms(number=7, end=2**63, most=100, room=4, stop=None, requests=requests)
        self.seeds = [terms._replace(stop=stop).pack() for stop in stops]
        self.mutate = MessageMutator(seed)

    def close(self):
        """There is nothing to close."""

    def check(self, data):
        """Whether it opens a stream. Only what begins like one comes here."""
        if data[:2] != stream_terms.STREAM:
            return False
        try:
            terms = stream_terms.unpack_terms(data)
        except Malformed:
            return False
        assert terms.pack() == data
        return True


fuzz_parsers.TARGETS |= {"calls": Calls, "plain": Plain, "streams": Streams}

if __name__ == "__main__":
    logging.disable()
    fuzz_parsers.main()
