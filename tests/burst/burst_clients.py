"""Clients without manners, for the tests of bursts: they send what they like and see every answer."""

import contextlib
import threading
import weakref

import numpy as np
from waiting import PATIENCE

import fmq
from burst import Offer, PeerDied, Request, Trace
from burst.channel import Channel
from burst.datum import DATUM, DATUM_DTYPE
from burst.dropped import DropList
from burst.slots import SlotTable
from burst.wire import RequestPacket, decode_result, encode_request
from fmq.clock import deadline_of
from fmq.region import Region


class RawClient:
    """It has the queues' memory, their ends and the sockets."""

    def __init__(self, configure, version, lengths=(1024, 1024), dtype=DATUM_DTYPE):
        self.version = version
        self.queues = [fmq.MessageQueue.create(dtype, length) for length in lengths]
        self.callback, callback = Channel.pair()
        self.context, context = Channel.pair()
        self.writer, self.reader = self.queues[0].writer(follows=True), self.queues[1].reader(follows=True)
        self._exchange = fmq.Exchange(self.writer, self.reader)
        try:
            with callback, context:
                queues = (queue.descriptor for queue in self.queues)
                accepted = configure(Offer(*queues, Trace.create().memory, callback, context, [version]))
            page = Region.from_fd(accepted.life, fmq.LifePage.nbytes, writable=False)
            page.close()
            for end in (self.writer, self.reader):
                end.follow(page)
        except BaseException:
            self.close()
            raise

    def exchange(self, packet=b"", timeout=PATIENCE):
        """Sends a packet and returns all that came back; without one, only waits."""
        return self._exchange(packet, deadline_of(timeout))

    def send(self, packet):
        self.writer.write(np.frombuffer(packet, DATUM_DTYPE), 0)

    def wait_taken(self):
        """Until the device has taken all that was sent, packet by packet."""
        with contextlib.suppress(ZeroDivisionError), self.writer.reserve(self.writer.capacity, PATIENCE):
            raise ZeroDivisionError  # nothing is sent

    def results(self, number):
        """What came, decoded, up to the answer to the request of that id (version 2)."""
        found, raw = [], b""
        while not found or found[-1].id != number:
            raw += bytes(self.exchange())
            while raw:
                nbytes = DATUM * int.from_bytes(raw[8:12], "little")
                assert 0 < nbytes <= len(raw), "a result is published at once"
                assert not found or found[-1].id != number, "an answer after the last one"
                found.append(decode_result(raw[:nbytes], self.version))
                raw = raw[nbytes:]
        return found

    def control(self, which):
        """The control page of the request (0) or the result queue (1), as 64-bit words."""
        return self.queues[which]._place.control.asarray(np.uint64, 512)

    def close(self):
        for end in (self.writer, self.reader, self.callback, self.context, *self.queues):
            end.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Lender(RawClient):
    """One that hands over its memory when it is asked, from a thread, or says what `answer(self, slots)` does."""

    def __init__(self, configure, version, **options):
        super().__init__(configure, version, **options)
        self.slots, self.asked, self.answer, self.number = SlotTable(DropList(self._tell)), [], None, 2**32
        self.lent = weakref.WeakSet()
        self._thread = threading.Thread(target=self._lend)
        self._thread.start()

    def _lend(self):
        with contextlib.suppress(PeerDied):
            while True:
                with contextlib.closing(self.callback.receive()) as message:
                    slots = message.body[1]
                self.asked.append(slots)
                (self.answer or Lender._hand_over)(self, slots)

    def _hand_over(self, slots):
        known = {self.slots.slot_of(memory): memory for memory in self.lent}
        if set(slots) <= set(known):
            memories = [known[slot] for slot in slots]
            self.callback.send([0, [m.to_wire() for m in memories]], [m.fd for m in memories])
        else:
            self.callback.send([4, "unknown"])

    def encode(self, request, measure=False):
        """With the next id."""
        self.number += 1
        self.lent |= set(request.pools)
        slots = tuple(map(self.slots.slot_of, request.pools))
        packet = RequestPacket(tuple(request.inputs), tuple(request.outputs), slots, measure, id=self.number)
        return encode_request(packet, self.version)

    def outcome(self, packet):
        """What comes of a raw packet: one result. In version 2 a packet that lies about its size may be several, and
        the request for nothing that follows them is answered with its id.
        """
        if self.version == 1:
            return [decode_result(self.exchange(packet), 1)]
        self.send(packet)
        self.wait_taken()
        self.send(self.encode(Request((), (), ())))
        *results, last = self.results(self.number)
        assert last.status in {2, 4}, "nothing can be done for a request for nothing"
        return results

    def free_memory(self, memory):
        self.lent.discard(memory)
        self.slots.free_memory(memory)

    def _tell(self, slots):
        self.context.send(["free_memory", *slots])

    def close(self):
        self.callback.shutdown()
        self._thread.join(PATIENCE)
        super().close()
