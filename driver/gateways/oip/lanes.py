"""Bursts for requests on memory of the client's: what lies in shared memory is used in place, the rest beside it.

A lane is a burst and some memory of ours, for the inputs and outputs of a request that are not in shared memory. A
request has a lane to itself.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from burst import BurstError, DeviceUnavailable, ErrorStatus, Memory, MissedDeadlineTransient, Request, RequestArgument
from driver.gateways.oip.refusal import invalid
from driver.options import ExecuteOptions
from fmq import FmqError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from burst import Result
    from driver.client.surface import AnyBurst, AnyPreparedModel
    from driver.gateways.oip.inference import GivenTensor, ModelPorts, TensorPort, WantedTensor
    from driver.gateways.oip.regions import RegionUse

_ALIGN = 64
_GUESS = 1 << 22  # bytes of an output whose size only its execution tells
_GONE = "this model is being unloaded"


class InPlaceCall(NamedTuple):
    """A request with its tensors in the model's order. wanted: None for an output that was not asked for."""

    given: Sequence[GivenTensor]
    wanted: Sequence[WantedTensor | None]
    regions: RegionUse
    deadline: float | None


class Lane:
    """One burst, and memory for what does not lie in shared memory."""

    def __init__(self, burst: AnyBurst, ports: ModelPorts) -> None:
        self.burst, self._ports = burst, ports
        self._own: Memory | None = None
        self._latest: tuple[Any, Request] | None = None
        self._guesses = [_GUESS if port.known_bytes is None else port.known_bytes for port in ports.outputs]

    def execute(self, call: InPlaceCall) -> Result:
        """Raises Refusal where an output does not fit in its place, and what the burst raises."""
        call.regions.note(self)
        try:
            result = self._execute(call)
            if result.status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE and self._grow(call, result):
                result = self._execute(call)
            result.raise_for_status()
        except BaseException:
            self.drop_memory()  # the device may still write to it
            raise
        return result

    def _execute(self, call: InPlaceCall) -> Result:
        key = _key(call)
        if key and self._latest and self._latest[0] == key:
            request = self._latest[1]  # known to the burst, which need not encode it again
        else:
            request = self._request(call)
            self._latest = (key, request) if key else None
        return self.burst.execute_as(request, ExecuteOptions(deadline=call.deadline))

    def _request(self, call: InPlaceCall) -> Request:
        pools = {region.name: n for n, region in enumerate(call.regions, 1)}
        regions, end = list(call.regions), 0
        inputs, fills, outputs = [], [], []
        for port, given in zip(self._ports.inputs, call.given, strict=True):
            dimensions = () if port.is_known else given.shape
            if given.place:
                inputs.append(_placed(given.place, pools, call.regions, dimensions))
            else:
                nbytes = port.nbytes(given.shape)
                inputs.append(RequestArgument(pool=0, offset=end, length=nbytes, dimensions=dimensions))
                fills.append((end, port, given))
                end = _aligned(end + nbytes)
        for port, wanted, guess in zip(self._ports.outputs, call.wanted, self._guesses, strict=True):
            if wanted and wanted.place:
                _check_room(port, wanted.place.nbytes, port.known_bytes)
                outputs.append(_placed(wanted.place, pools, call.regions, ()))
            else:
                outputs.append(RequestArgument(pool=0, offset=end, length=guess))
                end = _aligned(end + guess)
        own = self._memory(end)
        for offset, port, given in fills:
            own.asarray(port.dtype, given.shape, offset)[...] = port.array(given)
        return Request(tuple(inputs), tuple(outputs), (own, *(region.memory for region in regions)))

    def _memory(self, nbytes: int) -> Memory:
        if self._own is None or self._own.nbytes < nbytes:
            self.drop_memory()
            self._own = Memory.create(max(nbytes, 1))
        return self._own

    def _grow(self, call: InPlaceCall, result: Result) -> bool:
        """After an output did not fit. Whether another try may succeed. Raises Refusal for one in shared memory."""
        is_larger = False
        for n, (port, shape) in enumerate(zip(self._ports.outputs, result.output_shapes, strict=True)):
            needed, wanted = port.nbytes(shape.dimensions), call.wanted[n]
            if wanted and wanted.place:
                _check_room(port, wanted.place.nbytes, needed)
            elif needed > self._guesses[n]:
                self._guesses[n], is_larger = needed, True
        return is_larger

    def drop_memory(self) -> None:
        """The next request gets new memory."""
        self._latest = None
        own, self._own = self._own, None
        if own is not None:
            self.forget(own)

    def forget(self, memory: Memory) -> None:
        """The device may unmap it. Any thread, while no request names it."""
        self._latest = None  # which keeps memory mapped
        with suppress(BurstError, FmqError, ValueError):  # the burst is closed, or its device has died
            self.burst.free_memory(memory)

    def close(self) -> None:
        """Ends the burst."""
        self.burst.close()


def _key(call: InPlaceCall) -> Any:
    """What is equal for requests on the same places; None where not all of it lies in shared memory."""
    wanted = [each.place if each else None for each in call.wanted]
    if None in wanted or any(each.place is None for each in call.given):
        return None
    shapes = [(each.place, each.shape) for each in call.given]
    return shapes, wanted, [*map(id, call.regions)]


def _check_room(port: TensorPort, room: int, needed: int | None) -> None:
    if needed is not None and needed > room:
        raise invalid(f"output {port.name!r} has {needed} bytes; its place in shared memory has {room}")


def _placed(place: Any, pools: dict[str, int], regions: RegionUse, dimensions: tuple[int, ...]) -> RequestArgument:
    return RequestArgument(
        pool=pools[place.region],
        offset=regions[place.region].begin + place.offset,
        length=place.nbytes,
        dimensions=dimensions,
    )


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


class Lanes:
    """At most so many lanes of one model, opened as they are needed. Any thread."""

    def __init__(self, prepared: AnyPreparedModel, ports: ModelPorts, most: int) -> None:
        self._prepared, self._ports, self._most = prepared, ports, most
        self._free: list[Lane] = []
        self._count, self._is_closed = 0, False
        self._changed = threading.Condition()

    def execute(self, call: InPlaceCall) -> tuple[Result, list[Any]]:
        """Waits for a lane until the deadline, and executes there. The arrays are copies of the outputs that are not in
        shared memory, None for the others. Raises as `Lane.execute`.
        """
        lane = self._taken(call.deadline)
        try:
            result = lane.execute(call)
            arrays = [
                None if wanted is None or wanted.place else output.copy()
                for wanted, output in zip(call.wanted, result.outputs, strict=True)
            ]
        finally:
            self._give_back(lane)
        return result, arrays

    def _taken(self, deadline: float | None) -> Lane:
        with self._changed:
            while not self._free and self._count >= self._most and not self._is_closed:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise MissedDeadlineTransient("the deadline passed while the request waited for its turn")
                self._changed.wait(left)
            if self._is_closed:
                raise DeviceUnavailable(_GONE)
            if self._free:
                return self._free.pop()
            self._count += 1
        try:
            return Lane(self._prepared.burst(recover=True), self._ports)
        except BaseException:
            self._lose()
            raise

    def _lose(self) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify()

    def _give_back(self, lane: Lane) -> None:
        with self._changed:
            is_over = self._is_closed
            if not is_over:
                self._free.append(lane)
                self._changed.notify()
        if is_over:
            lane.close()

    def stats(self) -> list[dict[str, Any]]:
        """Of each burst that is free now."""
        with self._changed:
            lanes = list(self._free)
        return [lane.burst.stats() for lane in lanes]

    def close(self) -> None:
        """Ends those that are free; the others end with their request."""
        with self._changed:
            self._is_closed = True
            lanes, self._free = self._free, []
            self._changed.notify_all()
        for lane in lanes:
            lane.close()
