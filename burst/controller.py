"""The client's side of a burst, the HAL's execution burst controller: queues, slots, requests and their results.

Results come in the order of their requests, so nothing is looked up: result n answers request n, and a result that says
otherwise ends the burst. A caller that stops waiting leaves a result behind that still comes; the next call that waits
takes that one first.
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import fmq
from burst._core import ffi, lib
from burst.channel import Channel
from burst.datum import DATUM, DATUM_DTYPE
from burst.dropped import DropList
from burst.ends import address_of, handles_of
from burst.errors import Busy, DeviceEnd, GeneralFailure, Malformed, PeerDied, Timeout, timed_out
from burst.exhaustion import running_out
from burst.memory import DeviceBuffer, Memory
from burst.messages import NO_TIMING, ErrorStatus, Request, Timing
from burst.real_time import lock_ends
from burst.request_checks import check_request
from burst.slots import SlotTable, identity_of, why
from burst.trace import Trace
from burst.wire import NOT_MEASURED, VERSIONS, RequestPacket, ResultPacket, Token, decode_result, encode_request
from fmq import LifePage, clock
from fmq._hot import start
from fmq.clock import FOREVER, deadline_of
from fmq.closing import Closing
from fmq.end import spin_ns
from fmq.errors import raise_errno
from fmq.region import Region

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fmq import Descriptor
    from fmq.region import Kind

CHANNEL_LENGTH = 1024  # elements of each queue
_MOST_PACKETS = 16  # that `packet` remembers
_HOLD_NS = 10_000  # that an execution keeps the GIL at least, so that a busy thread does not delay its result
_NO_DEADLINE = NOT_MEASURED
_receive = lib.burst_receive


class Offer(NamedTuple):
    """An offer of a burst, which a client sends to open it. The device duplicates the channels' far ends; the client
    closes its own.
    """

    requests: Descriptor
    results: Descriptor
    trace: Memory
    callback: Channel  #: the burst callback, on which the server asks for the memory behind slots
    context: Channel  #: the burst context: the client frees slots on it, and its end ends the burst
    versions: Sequence[int]  #: of the wire that the client speaks


class Accepted(NamedTuple):
    """A device's answer to an `Offer`."""

    version: int  #: of the wire that both sides speak from now on
    life: int  #: descriptor of the device's LifePage for this burst; the client closes it
    is_foreign: bool = False  #: the device is another account's: memory is handed over with all its pages


class Configure(Protocol):
    """How a prepared model opens a burst: it starts a listener, or raises StatusError."""

    def __call__(self, offer: Offer) -> Accepted: ...


def _one_of(versions: Sequence[int], chosen: int) -> int:
    if chosen not in versions:
        raise GeneralFailure(f"the device chose wire version {chosen!r:.20}; we speak {list(versions)}")
    return chosen


def _within(timeout: float | None) -> str:
    return "by its deadline" if timeout is None else f"within {timeout} s"


class NotSent(Exception):
    """The request did not go out, and nothing was executed: take the plain path."""


class Packet:
    """An encoded request. It is valid until one of its pools is freed; every execution changes its last bytes."""

    __slots__ = ("_caller", "address", "call", "data", "measure", "nbytes")

    def __init__(self, raw: bytes, measure: bool, caller: Any) -> None:
        self.data, self.nbytes, self.measure, self._caller = ffi.new("unsigned char[]", raw), len(raw), measure, caller
        self.address = address_of(self.data)  #: of its bytes; 0 if only `call` can send it
        #: Sends the packet and waits briefly: 0 for a result like `Controller.last`, else a code for `await_reply`.
        self.call: Callable[[], int] = partial(start, address_of(caller), self.address, self.nbytes)

    def __bytes__(self) -> bytes:
        return bytes(ffi.buffer(self.data, self.nbytes))


class Controller(Closing):
    """The client's end of one burst. One thread at a time may send, and one receive; another one gets Busy."""

    to_send = "pickle the model, and open a burst on the unpickled one"

    def __init__(
        self,
        configure: Configure,
        memory: Kind = "memfd",
        spin: float | str = fmq.end.DEFAULT_SPIN,
        length: int = CHANNEL_LENGTH,
        versions: Sequence[int] = VERSIONS,
    ) -> None:
        """`memory`: what the queues are made of. `spin`: seconds to poll for a result before sleeping, or "adaptive".

        Raise StatusError when the device refuses, PeerDied when it is gone, and ResourceExhaustedTransient when this
        process can open no more.
        """
        self._dropped = DropList(self._tell)
        self._slots = SlotTable(self._dropped)
        self._packets: dict[tuple[object, ...], tuple[Request, Packet]] = {}
        self._invalid: str | None = None
        self._device_end: Callable[[], DeviceEnd] = DeviceEnd
        self.last = ResultPacket(ErrorStatus.GENERAL_FAILURE, (), NO_TIMING)  #: the result that came last
        with running_out():
            self.trace = Trace.create()
            self._open(configure, memory, spin, length, versions=versions)
        self._caller.framed = self.version > 1
        self.address = address_of(self._caller)  #: of what `burst._hot` calls with

    def _open(
        self, configure: Configure, memory: Kind, spin: float | str, length: int, versions: Sequence[int]
    ) -> None:
        """Make the queues and the sockets, and have the device open its ends."""
        with ExitStack() as held:
            requests = fmq.MessageQueue.create(DATUM_DTYPE, length, memory=memory)
            held.callback(requests.close)
            results = fmq.MessageQueue.create(DATUM_DTYPE, length, memory=memory)
            held.callback(results.close)
            self._writer, self._reader = requests.writer(follows=True), results.reader(follows=True)
            self._writer.spin_ns = self._reader.spin_ns = spin_ns(spin)
            self._caller = self._new_caller(length)
            callback, context = self._open_sockets()
            held.callback(callback.close)
            held.callback(context.close)
            queues = requests.descriptor, results.descriptor
            offer = Offer(*queues, self.trace.memory, callback, context=context, versions=versions)
            try:
                self.version = self._accept(versions, configure(offer))
            except BaseException:
                self.close()
                raise

    def _accept(self, versions: Sequence[int], accepted: Accepted) -> int:
        """Return the wire version. From now on the device's death ends all waits: by its life page, and by the end of
        the context, which the device closes only after it has released the page.
        """
        try:
            page = Region.from_fd(accepted.life, LifePage.nbytes, writable=False)
        except fmq.InvalidDescriptor as error:
            raise GeneralFailure(f"the device's life page cannot be used: {error}") from error
        page.close()
        self._writer.follow(page)
        self._reader.follow(page, lib.burst_sockets_context(self._sockets))  # of the two, only the reader waits
        if accepted.is_foreign:
            lib.burst_sockets_fill(self._sockets)
        return _one_of(versions, accepted.version)

    def _new_caller(self, length: int) -> Any:
        self.trace.page.client.pid = os.getpid()
        ends = handles_of(self._writer, self._reader)
        caller = lib.burst_caller_new(*ends, self.trace.page, length, self._reader.spin_ns, _HOLD_NS)
        if not caller:
            raise MemoryError(f"length={length}: no memory for the results of so long a queue")
        return ffi.gc(caller, lib.burst_caller_free)

    def _open_sockets(self) -> tuple[Channel, Channel]:
        """Return the device's ends of callback and context. A thread in C hands over the memory behind our slots."""
        far, sockets = ffi.new("int[2]"), ffi.new("burst_sockets **")
        if code := lib.burst_sockets_open(self._slots.handle, far, sockets):
            raise OSError(-code, why())
        self._sockets = ffi.gc(sockets[0], lib.burst_sockets_free)
        return Channel(socket.socket(fileno=far[0])), Channel(socket.socket(fileno=far[1]))

    def lock(self) -> None:
        """Keep its queues and its trace in memory, from when each page is used. Raise ResourceExhaustedPersistent."""
        lock_ends(self._writer, self._reader, self.trace)

    def packet(self, request: Request, *, measure: bool = False) -> Packet:
        """Encode like `encode`, but remember the last few: requests cannot change, so they are not encoded again."""
        key = identity_of(request, measure)
        if known := self._packets.get(key):
            return known[1]
        with self._dropped:
            if len(self._packets) >= _MOST_PACKETS:
                self._packets.clear()
            packet = self.encode(request, measure=measure)
            self._packets[key] = request._replace(pools=()), packet
        return packet

    def encode(self, request: Request, *, measure: bool = False) -> Packet:
        """Return the packet of a request whose pools are `Memory` or `DeviceBuffer`.

        Raise InvalidArgument, and NotSent for what the first version of the wire cannot say.
        """
        check_request(request.inputs, request.outputs, len(request.pools))
        if self.version == 1 and (request.loop_timeout or any(isinstance(p, DeviceBuffer) for p in request.pools)):
            raise NotSent("wire version 1 has no loop timeout, and no buffers of the device")
        slots = tuple(map(self._slot, request.pools))
        fields = tuple(request.inputs), tuple(request.outputs), slots, measure, request.loop_timeout
        return Packet(encode_request(RequestPacket(*fields), self.version), measure, self._caller)

    def _slot(self, pool: Memory | DeviceBuffer) -> int | Token:
        return Token(pool.token) if isinstance(pool, DeviceBuffer) else self._slots.slot_of(pool)

    @property
    def is_ready(self) -> bool:
        """True if `burst._hot` may send what was sent before: nothing is in flight, and nothing else has changed."""
        return bool(self._caller.is_ready)

    @is_ready.setter
    def is_ready(self, is_ready: bool) -> None:
        self._caller.is_ready = is_ready

    @property
    def is_calling(self) -> bool:
        """True if a request that was sent by one call into C waits for its result."""
        return bool(self._caller.calling)

    def await_call(self) -> None:
        """Return when that has its result, or after a millisecond."""
        lib.burst_await_call(self._caller)

    @property
    def in_flight(self) -> int:
        """The number of requests that have no result yet."""
        return int(self._caller.id - self._caller.results)

    @property
    def sent(self) -> int:
        """The number of the last request; the first one's is 1."""
        return int(self._caller.id)

    @property
    def received(self) -> int:
        """The number of the last result."""
        return int(self._caller.results)

    @property
    def has_result(self) -> bool:
        """True if `receive` would not wait for a result."""
        return self._reader.available > 0

    @property
    def has_died(self) -> bool:
        """True if the device is gone."""
        return self._reader.peer == "dead"

    def arrival_fd(self) -> int:
        """Return a descriptor that is readable when `receive` would not wait. Call this again after each `receive`."""
        self._reader.rearm()
        return self._reader.fileno()

    def mark_begin(self) -> None:
        """Note that the client begins to make the next request."""
        self._caller.begin = clock.now()

    def send(
        self, packet: Packet, timeout: float | None = None, deadline: int | None = None, last: int | None = None
    ) -> ResultPacket:
        """Execute once. `timeout`: seconds to wait. `deadline`: absolute CLOCK_MONOTONIC ns; the device gets it, too.
        This call waits no longer, or, for what the device says of a missed deadline, until `last`.

        Raise NotSent, Timeout (the result is dropped when it comes), PeerDied, Busy.
        """
        if self._invalid:
            raise NotSent(self._invalid)
        self.due(deadline)
        try:
            code = start(self.address, address_of(packet.data), packet.nbytes)
            return self.await_reply(code, packet, timeout, deadline, last=last)
        except BaseException as error:
            self.interrupted(error)
            raise
        finally:
            self.due(None)

    def due(self, deadline: int | None) -> None:
        """Set the deadline of the requests from now on."""
        self._caller.deadline = _NO_DEADLINE if deadline is None else deadline

    def await_reply(
        self, code: int, packet: Packet, timeout: float | None, deadline: int | None = None, *, last: int | None = None
    ) -> ResultPacket:
        """Do the rest of `send` after `packet.call()` has returned `code`."""
        if self._invalid:
            raise NotSent(self._invalid)
        if code:
            end = FOREVER if timeout is None else deadline_of(timeout or 1e-9)
            code = self._await_code(code, packet, min(end, last or deadline or FOREVER), timeout)
        reply = self._result(code, packet.measure)
        if deadline is not None and reply.status is ErrorStatus.NONE and clock.now() > deadline:
            self._refuse(-errno.ETIMEDOUT, packet.nbytes, timeout)
        return reply

    def interrupted(self, error: BaseException) -> None:
        """Clean up after an error from `packet.call` or `await_reply`, in which Ctrl-C may have come anywhere."""
        if not isinstance(error, Busy):
            self._caller.calling = 0
            self._caller.result_bytes = 0  # C compares with the last result, which Python may not have decoded

    def start(self, packet: Packet, deadline: int | None = None) -> None:
        """Send a request. `deadline`: absolute CLOCK_MONOTONIC ns.

        Raise NotSent, PeerDied, Busy.
        """
        if self._invalid:
            raise NotSent(self._invalid)
        caller = self._caller
        if self.version == 1 and self.in_flight:
            raise Busy("in wire version 1 two requests at once would be one packet; receive() the result first")
        self.due(deadline)
        code = lib.burst_send(caller, packet.data, packet.nbytes)
        self.due(None)
        if code:
            self._refuse(code, packet.nbytes, None)

    def abandon(self, number: int) -> None:
        """Tell the device that it need not begin that request any more. Its result comes all the same; call `settle`
        then.
        """
        lib.burst_abandon(self._caller, number)

    def settle(self, number: int) -> None:
        """Note that the result of a request that was abandoned has come."""
        lib.burst_settle(self._caller, number)

    def receive(self, timeout: float | None = None, *, measure: bool = False) -> ResultPacket:
        """Return the next result, in the order of the requests. Raise Timeout, PeerDied, Busy."""
        code = self._wait(FOREVER if timeout is None else deadline_of(timeout))
        if code < 0:
            self._refuse(-errno.ETIMEDOUT if code == -errno.EAGAIN else code, 0, timeout)
        return self._result(code, measure)

    def again(self, *, measure: bool = False) -> ResultPacket:
        """Return the last result once more, for a caller that an interrupt kept from seeing it."""
        return self._result(self._caller.result_bytes, measure)

    def _wait(self, deadline: int) -> int:
        while (code := _receive(self._caller, deadline)) == -errno.EINTR:
            pass  # Python has run its signal handlers
        return int(code)

    def _await_code(self, code: int, packet: Packet, deadline: int, timeout: float | None) -> int:
        """Handle a code that is no usual result: take a late result first, wait on, or raise the error."""
        if code == -errno.EALREADY:
            while self.in_flight and (code := self._wait(deadline)) >= 0:
                self._result(code, measure=False)
            if self._invalid:
                raise NotSent(self._invalid)
            if not self.in_flight:
                code = lib.burst_send(self._caller, packet.data, packet.nbytes) or -errno.ETIMEDOUT
            elif code == -errno.ETIMEDOUT:
                self.trace.page.client.timeouts += 1
                raise Timeout(f"the result of an earlier request did not come {_within(timeout)}; nothing was sent")
        if code == -errno.ETIMEDOUT:  # the packet is out
            try:
                code = self._wait(deadline)
            finally:
                self._caller.calling = 0
        if code < 0:
            self._refuse(code, packet.nbytes, timeout)
        return code

    def note_end(self, end: Callable[[], DeviceEnd]) -> None:
        """Note how to find out why the device has died, for errors, as `Channel.note_end` does."""
        self._device_end = end

    def _refuse(self, code: int, nbytes: int, timeout: float | None) -> NoReturn:
        if code in {-errno.EAGAIN, -errno.EMSGSIZE}:
            raise NotSent(f"a packet of {nbytes} bytes does not fit into the channel")
        if code == -errno.ETIMEDOUT:
            self.trace.page.client.timeouts += 1
            late = clock.now() - int(self._caller.deadline)
            late_by = late / 1e9 if late > 0 else None  # of a deadline
            raise timed_out(timeout, "waiting for the answer", late_by)
        if code == -errno.EBUSY:
            raise Busy("this burst is executing in another thread; wait for it, or open another burst")
        if code == -errno.EPIPE:
            self._invalidate("the device died")
            raise self._device_end().error()
        try:
            raise_errno(code, "burst")
        except (fmq.Closed, fmq.Corrupt) as error:
            why = self._invalidate(f"the device ended this burst: {error}")
            raise GeneralFailure(why) from error

    def _invalidate(self, why: str) -> str:
        """Refuse all later requests, for this reason."""
        self._invalid = why
        self._writer.close()
        return why

    def _result(self, code: int, measure: bool) -> ResultPacket:
        """Return the result behind `code`: its bytes if it differs from the last one, or 0."""
        if code:
            raw = bytes(ffi.buffer(self._caller.result, code))
            try:
                self.last = decode_result(raw, self.version)._replace(timing=NO_TIMING, id=0)
            except Malformed as error:
                self._invalidate(f"the device's answer was malformed: {error}")
                self.last = ResultPacket(ErrorStatus.GENERAL_FAILURE, (), NO_TIMING)
                return self.last
        return self.last._replace(timing=self._timing()) if measure else self.last

    def _timing(self) -> Timing:
        times = self._caller.on_device, self._caller.in_driver
        timing = Timing(*(None if time == NOT_MEASURED else int(time) for time in times))
        timing.joined = self.trace.joined(self._caller.result_id)
        return timing

    @property
    def memories_sent(self) -> int:
        """The number of memories that the device was given."""
        return int(lib.burst_slots_sent(self._slots.handle))

    @property
    def control_bytes(self) -> int:
        """Bytes of packets, written and read."""
        return DATUM * int(self._writer.position + self._reader.position)

    def free_memory(self, memory: Memory) -> None:
        """Let the device unmap it. Packets that name it are invalid from now on. Unknown memory is no error."""
        self._slots.free_memory(memory)

    def _tell(self, slots: list[int]) -> None:
        self._slots.forget(slots)
        self._packets.clear()
        if lib.burst_sockets_tell(self._sockets, slots, len(slots)):
            raise PeerDied(why())

    def close(self) -> None:
        """End the burst on both sides. A second call does nothing."""
        self.is_ready = False
        self._writer.close()
        self._reader.close()
        lib.burst_sockets_close(self._sockets)
        self.trace.memory.close()  # it can still be read
