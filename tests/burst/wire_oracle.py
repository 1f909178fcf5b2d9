"""The codec in Python, after the table in `burst.wire`: what csrc/burst/wire.c is compared with, packet by packet.

It is written to be read, and refuses with the same words as the C. `Malformed` names the element.
"""

import struct

from burst.datum import DATUM, FmqRequestDatum, FmqResultDatum
from burst.errors import Malformed
from burst.messages import ErrorStatus, OutputShape, RequestArgument, Timing
from burst.wire import NOT_MEASURED, RequestPacket, ResultPacket, Token

INPUT = FmqRequestDatum.INPUT_OPERAND_INFORMATION, FmqRequestDatum.INPUT_OPERAND_DIMENSION_VALUE
OUTPUT = FmqRequestDatum.OUTPUT_OPERAND_INFORMATION, FmqRequestDatum.OUTPUT_OPERAND_DIMENSION_VALUE


def malformed(element, what):
    return Malformed(f"element {element}: {what}")


class PacketWriter:
    """Puts a packet together: its elements from the second on, and at last the first, which counts them."""

    def __init__(self):
        self.body = []

    @property
    def element(self):
        """The index of the next element."""
        return 1 + len(self.body)

    def put(self, datum, *values):
        """The next element. Raises Malformed when a value does not fit."""
        self.body.append(_pack(self.element, datum, values))

    def put_each(self, datum, values):
        """An element for each value."""
        for value in values:
            self.put(datum, value)

    def finish(self, information, *values):
        """The whole packet; `values` follow its size in the first element."""
        return b"".join([_pack(0, information, (self.element, *values)), *self.body])


def _pack(element, datum, values):
    try:
        return datum.struct.pack(datum.number, *values)
    except struct.error as error:
        raise malformed(element, f"{datum.name} cannot hold {values}: {error}") from None


class PacketReader:
    """Takes a packet apart from its first element to its last, and never looks beyond."""

    def __init__(self, packet):
        self.data = bytes(packet)
        self.element = 0  # index of the next element
        self.size, rest = divmod(len(self.data), DATUM)
        if rest or not self.size:
            raise malformed(self.size, f"{len(self.data)} bytes are not one or more elements of {DATUM}")

    def take(self, datum):
        """The values of the next element, which must be a `datum` that packs to the very same bytes."""
        start = self.element * DATUM
        raw = self.data[start : start + DATUM]
        if not raw:
            raise malformed(self.element, f"the packet ends where {datum.name} is due")
        values = datum.struct.unpack(raw)
        if values[0] != datum.number:
            raise malformed(self.element, f"discriminator {values[0]} where {datum.number}, {datum.name}, is due")
        if datum.struct.pack(*values) != raw:
            raise malformed(self.element, f"{datum.name} has padding that is not 0, or a bool neither 0 nor 1")
        self.element += 1
        return values[1:]

    def next_is(self, datum):
        """True if the next element, if there is one, begins like a `datum`."""
        return self.data[self.element * DATUM : self.element * DATUM + 1] == bytes([datum.number])

    def take_each(self, datum, count):
        """The single values of the next `count` elements, all of them `datum`."""
        if count > self.size - self.element:
            raise malformed(self.element - 1, f"announces {count} elements; {self.size - self.element} follow")
        return tuple([self.take(datum)[0] for _ in range(count)])

    def check_size(self, announced, least):
        """Compare the size that the packet announces, and the least that its counts add up to, with what came."""
        if announced != self.size:
            raise malformed(0, f"packetSize is {announced}, but {self.size} elements came")
        if least > self.size:
            raise malformed(0, f"its counts announce {least} elements or more, but {self.size} came")

    def finish(self):
        """Nothing may be left over."""
        if self.element != self.size:
            raise malformed(self.element, "the packet goes on after its last element")


# ---- requests --------------------------------------------------------------------------------------------------------


def encode_request(packet, version):
    """The packet that asks for one execution, which must be one that can be said."""
    writer = PacketWriter()
    for (information, dimension), side in ((INPUT, packet.inputs), (OUTPUT, packet.outputs)):
        for has_no_value, pool, offset, length, dimensions in side:
            writer.put(information, has_no_value, pool, offset, length, len(dimensions))
            writer.put_each(dimension, dimensions)
    for slot in packet.slots:
        datum = FmqRequestDatum.BUFFER_TOKEN if isinstance(slot, Token) else FmqRequestDatum.POOL_IDENTIFIER
        writer.put(datum, slot.token if isinstance(slot, Token) else slot)
    writer.put(FmqRequestDatum.MEASURE_TIMING, packet.measure)
    if version >= 2:
        writer.put(FmqRequestDatum.LOOP_TIMEOUT, _or_none(packet.loop_timeout))
        writer.put(FmqRequestDatum.REQUEST_IDENTIFIER, packet.id, _or_none(packet.deadline))
    return writer.finish(FmqRequestDatum.PACKET_INFORMATION, *map(len, packet[:3]))


def decode_request(packet, version):
    """The request in `packet`. Raises Malformed."""
    reader = PacketReader(packet)
    size, inputs, outputs, pools = reader.take(FmqRequestDatum.PACKET_INFORMATION)
    reader.check_size(size, least=(2 if version == 1 else 4) + inputs + outputs + pools)
    request = RequestPacket(
        tuple([_take_argument(reader, INPUT, pools) for _ in range(inputs)]),
        tuple([_take_argument(reader, OUTPUT, pools) for _ in range(outputs)]),
        tuple([_take_slot(reader, version) for _ in range(pools)]),
        _take_measure(reader),
    )
    if version >= 2:
        (loop_timeout,) = reader.take(FmqRequestDatum.LOOP_TIMEOUT)
        number, deadline = reader.take(FmqRequestDatum.REQUEST_IDENTIFIER)
        if not number:
            raise malformed(reader.element - 1, "a request's id is not 0")
        request = request._replace(loop_timeout=_known(loop_timeout), id=number, deadline=_known(deadline))
    reader.finish()
    return request


def _take_argument(reader, kinds, pools):
    element, (information, dimension) = reader.element, kinds
    has_no_value, pool, offset, length, rank = reader.take(information)
    argument = RequestArgument(has_no_value, pool, offset, length, reader.take_each(dimension, rank))
    if not has_no_value and pool >= pools:
        raise malformed(element, f"poolIndex is {pool}, but the packet names {pools} pools")
    if has_no_value and argument != RequestArgument(has_no_value=True):
        raise malformed(element, "an argument without a value has a location or dimensions")
    return argument


def _take_slot(reader, version):
    element = reader.element
    if version >= 2 and reader.next_is(FmqRequestDatum.BUFFER_TOKEN):
        token = Token(*reader.take(FmqRequestDatum.BUFFER_TOKEN))
        if not token.token:
            raise malformed(element, "token 0 stands for no buffer")
        return token
    slot = reader.take(FmqRequestDatum.POOL_IDENTIFIER)[0]
    if slot < 0:
        raise malformed(element, f"slot {slot} is negative")
    return slot


def _take_measure(reader):
    element = reader.element
    measure = reader.take(FmqRequestDatum.MEASURE_TIMING)[0]
    if measure not in (0, 1):
        raise malformed(element, f"measureTiming is {measure}, neither 0 nor 1")
    return bool(measure)


# ---- results ---------------------------------------------------------------------------------------------------------


def encode_result(result, version):
    """The packet that answers a request. Raises Malformed."""
    D = FmqResultDatum
    status = result.status
    if version == 1 and ErrorStatus.INVALID_ARGUMENT < status <= ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT:
        status = ErrorStatus.GENERAL_FAILURE
    _check_status(status, len(result.output_shapes), version)
    writer = PacketWriter()
    for shape in result.output_shapes:
        writer.put(D.OPERAND_INFORMATION, shape.is_sufficient, len(shape.dimensions))
        writer.put_each(D.OPERAND_DIMENSION_VALUE, shape.dimensions)
    _check_timing(writer.element, status, result.timing)
    writer.put(D.EXECUTION_TIMING, *map(_or_none, result.timing))
    if version >= 2:
        writer.put(D.REQUEST_IDENTIFIER, result.id)
    return writer.finish(D.PACKET_INFORMATION, status, len(result.output_shapes))


def decode_result(packet, version):
    """The result in `packet`. Raises Malformed."""
    D = FmqResultDatum
    reader, number = PacketReader(packet), 0
    size, status, operands = reader.take(D.PACKET_INFORMATION)
    reader.check_size(size, least=(2 if version == 1 else 3) + operands)
    _check_status(status, operands, version)
    shapes = tuple([_take_shape(reader) for _ in range(operands)])
    timing = Timing(*map(_known, reader.take(D.EXECUTION_TIMING)))
    _check_timing(reader.element - 1, status, timing)
    if version >= 2:
        (number,) = reader.take(D.REQUEST_IDENTIFIER)
    reader.finish()
    return ResultPacket(ErrorStatus(status), shapes, timing, number)


def _take_shape(reader):
    is_sufficient, rank = reader.take(FmqResultDatum.OPERAND_INFORMATION)
    return OutputShape(reader.take_each(FmqResultDatum.OPERAND_DIMENSION_VALUE, rank), is_sufficient)


def _check_status(status, operands, version):
    last = ErrorStatus.INVALID_ARGUMENT if version == 1 else ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT
    if not ErrorStatus.NONE <= status <= last:
        raise malformed(0, f"errorStatus is {status:d}, not one of 0 to {last:d}")
    if operands and status not in (ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE):
        raise malformed(0, f"{operands} output shapes with errorStatus {status:d}, which has none")


def _check_timing(element, status, timing):
    known = [time for time in timing if time is not None]
    if known and status != ErrorStatus.NONE:
        raise malformed(element, f"a time with errorStatus {status:d}, which has none")
    if known != sorted(known):
        raise malformed(element, f"timeOnDevice {known[0]} is more than timeInDriver {known[1]}")


def _or_none(value):
    return NOT_MEASURED if value is None else value


def _known(value):
    return None if value == NOT_MEASURED else value
