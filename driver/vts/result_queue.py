"""burst: results as they lie in the queue: element by element, and where the queue is too short for them."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from burst import Controller, ErrorStatus, Timeout
from burst.datum import DATUM, DATUM_DTYPE, FmqResultDatum
from burst.wire import decode_result
from driver.vts.bench import output_sizes
from driver.vts.kit import Failed, Test, check
from driver.vts.operations import prepared
from driver.vts.samples import SAMPLES, sample
from fmq import MessageQueue
from fmq import Timeout as QueueTimeout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from burst import Accepted, Offer, Request
    from burst.wire import ResultPacket
    from driver.client.prepared_model import RemotePreparedModel
    from driver.vts.target import Target

_LENGTH = 1024  # elements, as those of usual clients
_SIZE = slice(8, 12)  # where a result says how many elements it has
_KINDS = {kind.number: kind for kind in FmqResultDatum}


def tests() -> Iterator[Test]:
    """All tests of this file, in any scope: they take milliseconds."""
    for name in SAMPLES:
        yield Test(f"burst/short_queue/{name}", partial(short_queue, name))
        yield Test(f"burst/zeroed/{name}", partial(zeroed, name))


class _ResultQueue:
    """A burst whose results this kit reads itself, from a queue of `length` elements."""

    def __init__(self, model: RemotePreparedModel, length: int, patience: float) -> None:
        self._length, self._patience = length, patience
        with MessageQueue.create(DATUM_DTYPE, length) as results:
            configure = model.configure_burst(0.0)

            def configure_with_ours(offer: Offer) -> Accepted:
                return configure(offer._replace(results=results.descriptor))

            self._controller = Controller(configure_with_ours, spin=0.0)
            self._reader = results.reader()

    def executed(self, asked: Request, *, measure: bool) -> bytes:
        """Execute once, and return the packet of the result. Raise Timeout, PeerDied."""
        self._controller.start(self._controller.packet(asked, measure=measure))
        try:
            first = self._reader.read(1, self._patience).tobytes()
            size = int.from_bytes(first[_SIZE], "little")
            is_there = 1 < size <= self._length
            check(is_there, f"a result says that it has {size} elements, and its queue has room for {self._length}")
            return first + self._reader.read(size - 1, self._patience).tobytes()
        except QueueTimeout as error:
            raise Timeout(f"no whole result has come: {error}") from error

    @property
    def version(self) -> int:
        """The version of the wire that the device has chosen."""
        return self._controller.version

    def close(self) -> None:
        """End the burst."""
        self._controller.close()
        self._reader.close()


def _results(
    model: RemotePreparedModel, length: int, target: Target, asked: Request, *measured: bool
) -> Iterator[tuple[bytes, int]]:
    """Execute once for each of `measured`; yield the packet of the result, and the version of the wire.

    All in one burst; in version 1, where a controller has one request until it has received the result, in one each.
    """
    with ExitStack() as stack:
        queue: _ResultQueue | None = None
        for measure in measured:
            if queue is None or queue.version == 1:
                stack.close()
                queue = _ResultQueue(model, length, target.patience)
                stack.callback(queue.close)
            yield queue.executed(asked, measure=measure), queue.version


def _decoded(raw: bytes, version: int) -> ResultPacket:
    try:
        return decode_result(raw, version)
    except ValueError as error:
        raise Failed(f"a result cannot be read: {error}") from error


def short_queue(name: str, target: Target) -> None:
    """A result that is longer than its queue becomes an error that fits, and no part of it comes; so does the next."""
    case = sample(name)
    with prepared(case, target) as model:
        asked = target.bench.request(model, case, output_sizes(case))
        ((whole, version),) = _results(model, _LENGTH, target, asked, False)
        status = _decoded(whole, version).status
        check(not status, f"with a queue of {_LENGTH} elements, a valid request gets {status.name}")
        length = len(whole) // DATUM - 1
        for raw, version in _results(model, length, target, asked, True, True):
            found = _decoded(raw, version)
            what = f"a result of {length + 1} elements, in a queue of {length},"
            check(found.status, f"{what} gets {ErrorStatus.NONE.name}")
            check(not found.output_shapes, f"{what} gets {found.status.name} and {len(found.output_shapes)} shapes")
            check(found.timing == (None, None), f"{what} gets {found.status.name} and a timing")


def zeroed(name: str, target: Target) -> None:
    """Each byte of a result that has no meaning is zero, measured or not: nothing of the device's memory leaks."""
    case = sample(name)
    with prepared(case, target) as model:
        asked = target.bench.request(model, case, output_sizes(case))
        for raw, _ in _results(model, _LENGTH, target, asked, True, False, True):
            for number, at in enumerate(range(0, len(raw), DATUM)):
                _check_zeroed(raw[at : at + DATUM], number)


def _check_zeroed(element: bytes, number: int) -> None:
    kind = _KINDS.get(element[0])
    check(kind is not None, f"element {number} of a result is of kind {element[0]}, which there is not")
    assert kind
    clean = kind.struct.pack(*kind.struct.unpack(element))
    dirty = [at for at in range(DATUM) if element[at] != clean[at]]
    check(not dirty, f"element {number} of a result, {kind.name}, is not zero in bytes {dirty}: {element.hex()}")
