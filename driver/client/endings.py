"""What becomes of requests that get no result from the device that they were sent to: the half of a pipeline that is
seldom at work. They are sent again to the device's next life, or whoever waits for them is told why not.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

from burst import GeneralFailure, PeerDied
from driver import fork
from driver.client.future import Future
from driver.client.sending import Sending

if TYPE_CHECKING:
    from collections.abc import Callable

    from burst import Controller, Request
    from driver.client.buffers import Shot
    from driver.client.prepared_model import Home


CLOSED = "this burst was closed before the result came"


class Endings(Sending):
    """What `Pipeline` inherits."""

    is_recovering = False  #: in a thread of its own

    def end(self, error: BaseException, request: Request | None = None) -> Exception | None:
        """The device is gone, or ended this burst: everything is sent again, or everybody is told, and us.

        Who holds `_receiving` calls this. `request`: what was running, if it is not among those in flight.
        """
        final = None
        with self._lock:
            try:
                if self.is_closed:
                    raise error  # noqa: TRY301 (as the others)
                waiting: list[tuple[object, Request | None]] = [(f.future, f.shot.request) for f in self.flights]
                successor = self._deaths.successor(
                    error, self._home, self.controller.trace, waiting or [(request, request)]
                )
                self._move_to(*successor)
            except Exception as found:  # noqa: BLE001 (it is what all of them get)
                final = found
                self._fail(final)
        return final

    def take_last(self) -> None:
        """For an event loop, which does not stand still while a device is started: another thread does it."""
        if not self.options.recover:
            self.as_receiver(0, self._take_last)
        elif not self.is_recovering:
            self.is_recovering = True
            threading.Thread(target=self._recover_elsewhere, name="burst-recovery", daemon=True).start()

    def _recover_elsewhere(self) -> None:
        try:
            self.as_receiver(-1, self._take_last)
        finally:
            self.is_recovering = False
            self._call_back()

    def _take_last(self) -> None:
        """What a dead device left, until another one is there or everybody is told."""
        before = self.controller
        while self.flights and self.controller is before:
            self._take_one(0)

    def _move_to(self, home: Home, controller: Controller) -> None:
        """Under the lock: goes on there with everything that was not answered."""
        self.statistics.retire(self.controller)
        self.statistics.recoveries += 1
        self.controller.close()
        self._home, self.controller = home, controller
        self.statistics.tell(controller.trace)
        try:
            self.check()  # who closed this burst, or its model's, meanwhile, has closed the other controller
        except (PeerDied, ValueError):
            controller.close()
            raise
        self.buffers.forget_shots()
        flights = list(self.flights)
        self.flights.clear()
        for _, shot, future in flights:
            shot.outputs.is_busy = False
            if future.done():
                self.buffers.give_back(shot.inputs)
            else:
                self._send_again(self.shot(shot.inputs, shot.outputs), future)
        self._launch_staged()

    def _send_again(self, shot: Shot, future: Future) -> None:
        try:
            self.launch(shot, future)
        except Exception as error:  # noqa: BLE001 (that one gets it, and the others their results)
            self._finished.append(future.fail(error))

    def _fail(self, error: Exception) -> None:
        for _, shot, future in self.flights:
            self.give_up(shot, future, error)
            self._finished.append(future)
            shot.outputs.is_busy = False
            self.buffers.give_back(shot.inputs)
        self.flights.clear()
        if self.staged:
            inputs, future = self.staged
            self._finished.append(future.fail(error))
            self.buffers.give_back(inputs)
            self.staged = None

    def give_up(self, shot: Shot, future: Future, error: BaseException) -> None:
        """The device will not answer this request, which still has its memory: whoever waits is told."""
        future.fail(error)

    def recover(self, error: PeerDied, request: Request) -> None:
        """After the device died over an explicit request, which may be sent again. Raises what it cannot get over."""
        if not self.is_to_recover(error):
            raise error
        found: list[Exception | None] = []
        self.as_receiver(-1, lambda: found.append(self.end(error, request)))
        self._call_back()
        if found[0]:
            raise found[0]

    def quarantined(self) -> None:
        """The model crashed a device too often: whoever waits here is told, and comes by `end`."""
        if not (self.is_closed or self._has_ended):
            self.controller.close()
            if self.loops:
                self.loops.renew()

    def rescue(self, error: BaseException, shot: Shot) -> Future:
        """After an error in `run`: its result is still to come, or is asked for again, or it is the error."""
        future = Future(self)
        died = self.is_to_recover(error)
        with self._lock:
            if died and not self._has_ended:  # somebody has seen to it already
                self.launch(self.shot(shot.inputs, shot.outputs), future)
            elif died:
                self._keep(shot, future)
            elif self.controller.in_flight:
                self._add(shot, future)
        if died:
            return future  # who waits for it notices the death, and recovers
        future.fail(CancelledError())
        if isinstance(error, PeerDied):
            self.end(error)
            self._call_back()
        raise error

    def abandon(self) -> None:
        """In a forked child: the burst is the parent's, whose threads held the locks and whose inputs are in use."""
        self._new_locks()
        self.flights.clear()
        self._finished.clear()
        self.staged = self.loops = None
        self.buffers.inputs = fork.lost(self.check_process)

    def close(self) -> None:
        """Ends the burst on both sides; who still waits is told."""
        self.is_closed = True
        self.controller.close()
        with self._lock:
            self._fail(GeneralFailure(CLOSED))
        self.buffers.close()
        self._call_back()
        if self.loops:
            self.loops.close()

    # ---- the other half

    @abstractmethod
    def _take_one(self, timeout: float | None) -> None:
        """The next result."""

    @abstractmethod
    def as_receiver(self, wait: float, work: Callable[[], None]) -> bool:
        """Does that while nobody else receives."""
