"""A firmware that serves bursts by docs/protocol.md: it reads requests from one queue and writes results to the other.

It uses nothing of Burst's own server: `fmq` for the queues, the tables of elements (`FmqRequestDatum`,
`FmqResultDatum`), and the sockets. `python -m burst_test_devices.firmware FD` is a process that serves any number of
bursts, which a driver hands over through the socket FD; it ends with that socket, and so with the driver's process.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from burst import ErrorStatus, ExecutionBurst, Memory, OutputShape, PeerDied, Request, RequestArgument, StatusError
from burst.channel import MAX_FDS, Channel
from burst.datum import DATUM, DATUM_DTYPE, Datum, FmqRequestDatum, FmqResultDatum
from burst.errors import BurstError, InvalidArgument
from burst.wire import Token
from driver.deadlines import due
from driver.devices import device_class
from driver.engine.binding import BoundRequest
from driver.interface import BindOptions, Preparation
from driver.protocol.model_codec import decode, sealed
from fmq import Descriptor, FmqError, MessageQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from burst import BurstOffer
    from burst.execution import Execution
    from driver.interface import PreparedModel
    from driver.nn import Model

    Raw = np.ndarray[tuple[int], np.dtype[np.void]]

_NONE_GIVEN = 2**64 - 1  # no deadline, no loop timeout, not measured
_PATIENCE = 10.0  # seconds that a client has to hand over memory, or to read a result
_Q, _A = FmqRequestDatum, FmqResultDatum


class Terms(NamedTuple):
    """How a client wants its burst."""

    version: int
    spin: float | str


class Asked(NamedTuple):
    """What a request packet says. Pools are slots."""

    inputs: tuple[RequestArgument, ...]
    outputs: tuple[RequestArgument, ...]
    slots: tuple[int | Token, ...]
    measure: bool
    loop_timeout: int | None
    number: int
    deadline: int | None


class Answer(NamedTuple):
    """What comes of it."""

    status: int
    shapes: Sequence[OutputShape] = ()
    on_device: int | None = None  #: ns


class Malformed(Exception):
    """The packet is no request."""


class _Packet:
    """Takes a packet apart, element by element. Nothing that it says is believed before it was seen to be so."""

    def __init__(self, elements: Raw) -> None:
        self._left = [element.tobytes() for element in elements]

    def __len__(self) -> int:
        return len(self._left)

    def take(self, kind: Datum) -> tuple[int, ...]:
        """The payload of the next element, which is of that kind, and has no other bytes."""
        if not self._left:
            raise Malformed
        raw = self._left.pop(0)
        values = kind.struct.unpack(raw)
        if values[0] != kind.number or kind.struct.pack(*values) != raw:
            raise Malformed
        return values[1:]

    def arguments(self, count: int, pools: int, kind: Datum, dimension: Datum) -> tuple[RequestArgument, ...]:
        """The next `count` arguments, each with its dimensions."""
        found = []
        for _ in range(count):
            is_omitted, pool, offset, length, rank = self.take(kind)
            if rank > len(self):
                raise Malformed
            dimensions = tuple(self.take(dimension)[0] for _ in range(rank))
            if any((pool, offset, length, rank)) if is_omitted else pool >= pools:
                raise Malformed
            found.append(RequestArgument(bool(is_omitted), pool, offset, length, dimensions))
        return tuple(found)

    def pool(self, version: int) -> int | Token:
        """The next pool: a slot, or in version 2 a buffer of the device."""
        if version > 1 and self._left and self._left[0][0] == _Q.BUFFER_TOKEN.number:
            found: int | Token = Token(*self.take(_Q.BUFFER_TOKEN))
            is_wrong = found == Token(0)
        else:
            (found,) = self.take(_Q.POOL_IDENTIFIER)
            is_wrong = found < 0
        if is_wrong:
            raise Malformed
        return found


def read_request(elements: Raw, version: int) -> Asked:
    """The request in a packet. Raises Malformed."""
    packet = _Packet(elements)
    size, n_inputs, n_outputs, n_pools = packet.take(_Q.PACKET_INFORMATION)
    if size != len(elements) or n_inputs + n_outputs + n_pools > size:
        raise Malformed
    inputs = packet.arguments(n_inputs, n_pools, _Q.INPUT_OPERAND_INFORMATION, _Q.INPUT_OPERAND_DIMENSION_VALUE)
    outputs = packet.arguments(n_outputs, n_pools, _Q.OUTPUT_OPERAND_INFORMATION, _Q.OUTPUT_OPERAND_DIMENSION_VALUE)
    slots = tuple(packet.pool(version) for _ in range(n_pools))
    (measure,) = packet.take(_Q.MEASURE_TIMING)
    loop_timeout, number, deadline = _NONE_GIVEN, 0, _NONE_GIVEN
    if version > 1:
        (loop_timeout,) = packet.take(_Q.LOOP_TIMEOUT)
        number, deadline = packet.take(_Q.REQUEST_IDENTIFIER)
    if len(packet) or measure not in (0, 1) or (version > 1 and not number):
        raise Malformed
    times = (None if time == _NONE_GIVEN else time for time in (loop_timeout, deadline))
    return Asked(inputs, outputs, slots, bool(measure), next(times), number, next(times))


def number_of(elements: Raw, version: int) -> int:
    """The id of a request, as far as it can be read; else 0."""
    with suppress(Malformed):
        return _Packet(elements[-1:]).take(_Q.REQUEST_IDENTIFIER)[0] if version > 1 else 0
    return 0


def write_result(status: int, shapes: Sequence[OutputShape], times: Sequence[int], number: int, version: int) -> bytes:
    """The packet of a result."""
    if version == 1 and status > ErrorStatus.INVALID_ARGUMENT:
        status = ErrorStatus.GENERAL_FAILURE
    body = []
    for dimensions, is_sufficient in shapes:
        body.append(_element(_A.OPERAND_INFORMATION, is_sufficient, len(dimensions)))
        body += [_element(_A.OPERAND_DIMENSION_VALUE, d) for d in dimensions]
    body.append(_element(_A.EXECUTION_TIMING, *times))
    if version > 1:
        body.append(_element(_A.REQUEST_IDENTIFIER, number))
    return b"".join([_element(_A.PACKET_INFORMATION, 1 + len(body), status, len(shapes)), *body])


def _element(kind: Datum, *values: int) -> bytes:
    return kind.struct.pack(kind.number, *values)


class FirmwareBurst(ExecutionBurst):
    """One burst, served by a thread."""

    def __init__(
        self,
        bind: Callable[[Request], Execution],
        queues: tuple[Descriptor, Descriptor],
        callback: Channel,
        terms: Terms,
        on_end: Callable[[], object],
    ) -> None:
        self._bind, self._callback, self._version, self._on_end = bind, callback, terms.version, on_end
        with MessageQueue.open(queues[0]) as requests, MessageQueue.open(queues[1]) as results:
            self._reader, self._writer = requests.reader(), results.writer()
        self._reader.spin = terms.spin
        self.memories: dict[int, Memory] = {}
        self._is_over = threading.Lock()
        self._has_started = False

    @classmethod
    def of(cls, offer: BurstOffer) -> Self:
        """In the engine's process."""
        assert offer.bind
        queues, terms = (offer.requests, offer.results), Terms(offer.version, offer.spin)
        return cls(offer.bind, queues, offer.callback, terms, offer.on_end)

    def start(self) -> None:
        self._has_started = True
        threading.Thread(target=self._serve, name="firmware", daemon=True).start()

    def stop(self) -> None:
        self._callback.shutdown()
        self._writer.close()
        self._reader.close()
        if not self._has_started:
            self._end()

    def free_memory(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.memories.pop(slot, None)  # arrays of an execution that runs keep it mapped

    def _serve(self) -> None:
        with suppress(FmqError, BurstError):
            while True:
                self._answer(self._next_packet())
        self._end()

    def _end(self) -> None:
        if not self._is_over.acquire(blocking=False):
            return
        self._reader.close()
        self._writer.close()
        self._callback.close()
        self.memories.clear()
        self._on_end()

    def _next_packet(self) -> Raw:
        """In version 2 a packet says how long it is; in version 1 it is all that has arrived."""
        first = self._reader.read(1)
        if self._version == 1:
            more = self._reader.available
        else:
            size = int.from_bytes(first.tobytes()[4:8], "little")
            more = size - 1 if 0 < size <= self._reader.capacity else 0
        return np.concatenate([first, self._reader.read(more)]) if more else first

    def _answer(self, elements: Raw) -> None:
        taken, number = time.monotonic_ns(), number_of(elements, self._version)
        measure = False
        try:
            asked = read_request(elements, self._version)
            measure = asked.measure
            found = self.executed(asked)
        except StatusError as error:
            found = Answer(error.status, error.result.output_shapes if error.result else ())
        except Exception:  # noqa: BLE001 (one bad request must not end the burst)
            found = Answer(ErrorStatus.GENERAL_FAILURE)
        times = self.times(found, time.monotonic_ns() - taken, measure)
        raw = write_result(found.status, found.shapes, times, number, self._version)
        room = self._writer.capacity * DATUM
        raw = raw if len(raw) <= room else self.fitting(raw, room, number)
        self._writer.write(np.frombuffer(self.written(raw), DATUM_DTYPE), _PATIENCE)

    def written(self, raw: bytes) -> bytes:
        """The bytes of a result, as they go into the queue."""
        return raw

    def fitting(self, raw: bytes, room: int, number: int) -> bytes:
        """The answer to a request whose result is too long for the queue."""
        return write_result(ErrorStatus.GENERAL_FAILURE, (), (_NONE_GIVEN,) * 2, number, self._version)

    def executed(self, asked: Asked) -> Answer:
        """Executes once, if there is time for it."""
        if self.is_late(asked.deadline):
            return Answer(ErrorStatus.MISSED_DEADLINE_PERSISTENT)
        pools = tuple(self.pools(asked.slots))
        request = Request(asked.inputs, asked.outputs, pools, asked.loop_timeout)
        with due(asked.deadline):
            bound = self._bind(request)
            begun = time.monotonic_ns()
            bound.run()
        took = time.monotonic_ns() - begun
        if self.is_late(asked.deadline):
            return Answer(ErrorStatus.MISSED_DEADLINE_TRANSIENT)
        return Answer(ErrorStatus.NONE, tuple(bound.shapes), took)

    def is_late(self, deadline: int | None) -> bool:
        """Whether that time has passed."""
        return deadline is not None and time.monotonic_ns() > deadline

    def times(self, found: Answer, in_driver: int, measure: bool) -> tuple[int, int]:
        """What the result says of the times, in microseconds."""
        if not measure or found.on_device is None:
            return _NONE_GIVEN, _NONE_GIVEN
        return found.on_device // 1000, in_driver // 1000

    def pools(self, slots: Sequence[int | Token]) -> list[Memory | Token]:
        """The memory of each slot; asks the client for what is unknown, all or nothing."""
        missing = sorted({slot for slot in slots if not isinstance(slot, Token)} - self.memories.keys())
        got = [memory for n in range(0, len(missing), MAX_FDS) for memory in self._ask(missing[n : n + MAX_FDS])]
        self.memories.update(zip(missing, got, strict=True))
        return [slot if isinstance(slot, Token) else self.memories[slot] for slot in slots]

    def _ask(self, slots: list[int]) -> list[Memory]:
        message = self._callback.call(["get_memories", slots], timeout=_PATIENCE)
        try:
            status, *rest = message.body
            if status:
                raise InvalidArgument("the client has no memory for a slot of its request")
            fds = message.take_fds()
            return [Memory.from_wire(plain, fd) for plain, fd in zip(rest[0], fds, strict=True)]
        finally:
            message.close()


def _binding(model: Model, prepared: PreparedModel) -> Callable[[Request], Execution]:
    def bind(request: Request) -> Execution:
        if any(isinstance(pool, Token) for pool in request.pools):
            raise InvalidArgument("this firmware knows no buffers of the device")
        return BoundRequest(model, prepared, request, BindOptions())

    return bind


class _Host:
    """The firmware's process: bursts by number."""

    def __init__(self, driver: Channel) -> None:
        self._driver = driver
        self._bursts: dict[int, FirmwareBurst] = {}

    def run(self) -> None:
        """Serves until the driver is gone."""
        while True:
            message = self._driver.receive()
            fds = message.take_fds()
            match message.body:
                case ["configure", int(number), *what]:
                    self._driver.send([number, self._configured(number, what, fds)])
                case ["start", int(number)]:
                    self._bursts[number].start()
                case ["stop", int(number)]:
                    if burst := self._bursts.get(number):
                        burst.stop()
                case ["free_memory", int(number), *slots]:
                    if burst := self._bursts.get(number):
                        burst.free_memory(slots)

    def _configured(self, number: int, what: list[Any], fds: list[int]) -> str:
        """Makes a burst; returns what went wrong."""
        kind, wires, where, terms = what
        try:
            requests, results = (Descriptor.from_wire(wire, [fds.pop(0)], sealed=False) for wire in wires)
            callback = Channel.from_fd(fds.pop(0))
            region = sealed(fds, where)
            model = decode(region, where)
            device = device_class(str(kind))()
            bind = _binding(model, device.prepare(model, Preparation()))
            self._bursts[number] = FirmwareBurst(
                bind, (requests, results), callback, Terms(*terms), lambda: self._ended(number)
            )
        except Exception as error:  # noqa: BLE001 (the others go on)
            return f"{type(error).__name__}: {error}"
        return ""

    def _ended(self, number: int) -> None:
        del self._bursts[number]
        with suppress(PeerDied):
            self._driver.send([number, None])


if __name__ == "__main__":
    with suppress(PeerDied):
        _Host(Channel.from_fd(int(sys.argv[1]))).run()
    os._exit(0)  # without a goodbye: clients that wait learn of a death, as of that of the engine
