"""Frames on their way from one device to the next: the half of a chain that keeps track of memory and of who waits."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from burst import Busy, ErrorStatus, Result, Timeout
from driver.client.buffers import Buffers
from driver.client.future import Future
from driver.client.session import FAILURES
from driver.deadlines import nanoseconds
from driver.runtime.fallback import is_retryable
from driver.runtime.link import Link
from driver.runtime.places import Frame, StepInputs, with_temporaries

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from numpy.typing import NDArray

    from driver.client.future import Driver
    from driver.options import Options
    from driver.runtime.plan import Planned


class Flight(Future):
    """A frame on its way."""

    __slots__ = ("at", "frame", "step")

    def __init__(self, driver: Driver, frame: Frame) -> None:
        super().__init__(driver)
        self.frame, self.at = frame, 0
        self.step: Future | None = None  #: that is being executed


class Flights(ABC):
    """What `Chain` inherits."""

    def __init__(self, planned: Planned, options: Options) -> None:
        if options.policy == "latest":
            raise ValueError("policy='latest': a model on several devices takes 'block' or 'reject'")
        if options.input_shapes is not None:
            raise ValueError("input_shapes: a model on several devices knows the shapes of its inputs; leave it out")
        for n, i in enumerate(planned.model.main.inputs):
            if not planned.model.main.operands[i].is_known:
                raise ValueError(f"input {n} has an open shape, and bursts on several devices need to know it: use run")
        self._planned, self._options = planned, options
        self._links = [Link(part, options) for part in planned.parts]
        graph = with_temporaries(planned.model, planned.temporaries).main
        shapes = tuple(graph.operands[i].dimensions for i in graph.inputs)
        self._buffers = Buffers(with_temporaries(planned.model, planned.temporaries), shapes, options.depth)
        self._frames: dict[Any, Frame] = {}
        self._lock = threading.RLock()
        self._flights: deque[Flight] = deque()
        self._finished: deque[Flight] = deque()
        self._late: list[Frame] = []  # that nobody waits for, and a device may still be writing to
        self._runs = self._drops = self._copied = 0
        self._is_closed = False

    @property
    def inputs(self) -> tuple[NDArray[Any] | None, ...]:
        """Arrays of the next request, to be written in place."""
        return self._buffers.inputs.arrays[: len(self._planned.model.main.inputs)]

    def _fill(self, arrays: tuple[Any, ...]) -> None:
        if arrays:
            inputs = self._buffers.inputs
            self._copied += StepInputs(inputs.memory, (), self.inputs).fill(arrays)

    def _frame(self) -> Frame:
        """Of the next request."""
        for late in [late for late in self._late if not late.is_in_use]:
            late.outputs.is_busy = False
            self._late.remove(late)
        inputs, outputs = self._buffers.inputs, self._buffers.free_outputs()
        frame = self._frames.get((inputs, outputs))
        if frame is None:
            steps = [part.step for part in self._planned.parts]
            frame = Frame(self._planned.model, self._planned.temporaries, steps, inputs, outputs)
            self._frames[inputs, outputs] = frame
            for link, (_, writes) in zip(self._links, frame.sets, strict=True):
                link.aimed.know(writes)
        return frame

    def _put_aside(self, frame: Frame) -> None:
        """Its outputs are nobody's until no step writes to them any more; its inputs serve the next request.

        A step that is late for this frame comes before the same step of the next one, in the same burst.
        """
        frame.outputs.is_busy = True
        self._late.append(frame)

    def _instead(self, link: Link, frame: Frame, error: BaseException) -> bool:
        """The step on the CPU, or else the whole: True. Raises what cannot be helped."""
        if self._is_closed or not is_retryable(error):
            raise error
        if link.did_instead(error, *frame.sets[self._links.index(link)]):
            return False
        if self._planned.spare is None:
            raise error
        self._planned.spare.after(error).execute(frame.whole).raise_for_status()
        return True

    def submit(self, *arrays: Any, timeout: float | None = None, deadline: float | None = None) -> Future:
        """As `Burst.submit`, with policy "block" or "reject"."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                self._check()
                self._collect()
                if len(self._flights) < self._options.depth:
                    flight = self._admit(arrays, deadline)
                    break
                oldest = self._flights[0]
                if self._options.policy == "reject":
                    self._drops += 1
                    raise Busy(f"depth={self._options.depth} requests are in flight, and policy is 'reject'")
            self._wait(partial(self._has_landed, oldest), oldest, time_left(end, timeout))
        self._call_back()
        return flight

    def _admit(self, arrays: tuple[Any, ...], deadline: float | None) -> Flight:
        """Under the lock: the frame sets out."""
        self._fill(arrays)
        frame = self._frame()
        self._buffers.next_inputs()
        frame.outputs.is_busy = True
        flight = Flight(self, frame)
        flight.deadline = None if deadline is None else nanoseconds(deadline)
        self._flights.append(flight)
        self._go(flight)
        return flight

    def _go(self, flight: Flight) -> None:
        """Under the lock: as far as it gets without waiting."""
        try:
            if not self._is_on_its_way(flight):
                self._land(flight)
        except BaseException:  # an interrupt, perhaps: nobody takes it on
            flight.fail(CancelledError("the request was interrupted on its way"))
            self._land(flight)
            raise

    def _is_on_its_way(self, flight: Flight) -> bool:
        while flight.at < len(self._links) and not flight.done():
            link = self._links[flight.at]
            link.aimed.aim(*flight.frame.sets[flight.at])
            try:
                step = link.burst.submit(deadline=None if flight.deadline is None else flight.deadline / 1e9)
            except FAILURES as error:
                self._after(flight, error)
                continue
            if not step.done():
                flight.step = step
                step.add_done_callback(partial(self._arrived, flight))
                return True
            self._after(flight, step.exception(0))
        return False

    def _after(self, flight: Flight, error: BaseException | None) -> None:
        """Under the lock: a step has ended."""
        link = self._links[flight.at]
        flight.at += 1
        if error is None or flight.done():
            return
        try:
            if self._instead(link, flight.frame, error):
                flight.at = len(self._links)
        except (Exception, CancelledError) as final:  # noqa: BLE001 (it is what the caller gets)
            flight.fail(final)

    def _arrived(self, flight: Flight, step: Future) -> None:
        """A step is done; whoever finds that out first takes the frame on."""
        with self._lock:
            if flight.step is not step:
                return
            flight.step = None
            self._after(flight, step.exception(0))
            self._go(flight)
        self._call_back()

    def _land(self, flight: Flight) -> None:
        """Under the lock: there are no more steps for it."""
        frame = flight.frame
        if flight not in self._flights:  # it has landed by a callback, or the burst was closed
            return
        if not flight.done():
            self._runs += 1
            flight.finish(Result(ErrorStatus.NONE, frame.outputs.arrays(())))
        self._flights.remove(flight)
        self._buffers.give_back(frame.inputs)
        frame.outputs.is_busy = False
        if frame.is_in_use:
            self._put_aside(frame)
        self._finished.append(flight)

    def _collect(self) -> None:
        """Under the lock: takes on whatever has arrived."""
        for link in self._links if self._flights else ():
            link.look()

    def _has_landed(self, flight: Flight) -> bool:
        return flight not in self._flights

    def _wait(self, until: Callable[[], bool], flight: Flight, timeout: float | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while not until():
            with self._lock:  # who has it takes the frame to its next step, perhaps
                step = flight.step
            if step is not None:
                step.exception(time_left(end, timeout))
                self._arrived(flight, step)

    def wait_for(self, future: Future, timeout: float | None) -> None:
        """Until it is done. Raises Timeout."""
        assert isinstance(future, Flight)
        self._wait(future.done, future, timeout)
        self._call_back()

    def drop(self, future: Future) -> bool:
        """Cancels it, unless it is done."""
        with self._lock:
            if future.done():
                return False
            future.fail(CancelledError())
            self._drops += 1
        future.call_back()
        return True

    def _call_back(self) -> None:
        while self._finished:
            with suppress(IndexError):  # another thread took the last one
                self._finished.popleft().call_back()

    @abstractmethod
    def arrival(self, future: Future) -> asyncio.Future[None]:
        """Done in the running loop when `future` is."""

    def _check(self) -> None:
        if self._is_closed:
            raise ValueError("this burst is closed; open another")


def time_left(end: float | None, timeout: float | None) -> float | None:
    """Seconds until `end`; `timeout` is what was asked for. Raises Timeout when there are none."""
    if end is None:
        return None
    left = end - time.monotonic()
    if left <= 0 and timeout:
        raise Timeout(f"no result within {timeout} s; the burst stays usable")
    return max(0.0, left)
