"""Results of a burst for asyncio. The first await has the loop watch the result queue; other bursts pay nothing.

A loop watches a copy of the descriptor, and closes it when it stops: so its number means the same until then, whatever
becomes of the burst.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import ref

from burst import Busy
from driver.client.completion import call_in
from driver.client.tasks import Tasks

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop as _Loop

    from burst import Controller
    from driver.client.pipeline import Pipeline


class _Watched:
    """A copy of a controller's descriptor, closed with its last reference.

    Nothing else would close it when a loop is closed between a call to it (`call_in`) and its next turn.
    """

    def __init__(self, controller: Controller, fd: int) -> None:
        self.controller, self.fd = controller, os.dup(fd)

    def __del__(self) -> None:
        os.close(self.fd)


class Arrivals:
    """The event loops that take one pipeline's results. Any number of loops and tasks may wait, beside threads.

    Loops that watch hold this object, which refers to the pipeline weakly: tasks that wait hold it.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._weak = ref(pipeline)
        pipeline.session.controller.is_ready = False  # from now on `run` has to tell the loops
        self._watched: dict[_Loop, _Watched] = {}
        self._refused: set[_Loop] = set()  # loops that watch as soon as another thread stops receiving
        self._looking = threading.RLock()
        self.tasks = Tasks()

    @property
    def _pipeline(self) -> Pipeline:
        """The pipeline, where it is the caller, and so exists."""
        pipeline = self._weak()
        assert pipeline is not None
        return pipeline

    # ---- what the pipeline calls, in any thread

    def tell(self) -> None:
        """Have tasks and loops look again: there may be room for the first task in the queue, or another device."""
        self.tasks.tell(self._pipeline)
        for loop, watched in list(self._watched.items()):
            if watched.controller is not self._pipeline.session.controller:
                call_in(loop, self._look, loop)

    def renew(self) -> None:
        """Have the loops look again: the controller was closed while tasks wait."""
        for loop in list(self._watched):
            call_in(loop, self._look, loop)

    def rearm(self) -> None:
        """Note that a thread has stopped running or receiving: from now on the descriptor shows new results."""
        if self._watched:
            self.watch_fd()
        while self._refused:
            with suppress(KeyError):  # another thread took the last one
                loop = self._refused.pop()
                call_in(loop, self.watch, loop)

    def close(self) -> None:
        """Stop watching: nothing will come any more, and the pipeline may be gone."""
        for loop in list(self._watched):
            if not call_in(loop, self._unwatch, loop):
                self._unwatch(loop)

    # ---- what loops call, each in its thread

    def watch(self, loop: _Loop) -> None:
        """Have the loop take results from now on."""
        if (pipeline := self._weak()) is None or pipeline.session.is_closed:
            return
        controller, watched = pipeline.session.controller, self._watched.get(loop)
        if watched and watched.controller is controller:
            return
        self._unwatch(loop)
        for other in [other for other in list(self._watched) if other.is_closed()]:
            self._unwatch(other)
        self._refused.add(loop)  # before we try, so that a thread that receives now sees it afterwards
        fd = self.watch_fd()
        if fd >= 0:
            self._refused.discard(loop)
            self._watched[loop] = _Watched(controller, fd)
            loop.add_reader(self._watched[loop].fd, self._look, loop)

    def watch_fd(self) -> int:
        """Return a descriptor that is readable when there is something to `look` at; -1 while a thread receives.

        That thread calls `rearm` afterwards. Loops ask one after the other, or each would take the other for it.
        """
        found, session = [-1], self._pipeline.session
        with self._looking, suppress(Busy):  # in the C call of `Burst.run`, which does not take our locks
            self._pipeline.in_flight.as_receiver(
                0, lambda: found.append(-1 if session.is_closed else session.controller.arrival_fd())
            )
        return found[-1]

    def _unwatch(self, loop: _Loop) -> None:
        watched = self._watched.pop(loop, None)
        if watched:
            loop.remove_reader(watched.fd)

    def _look(self, loop: _Loop) -> None:
        if (pipeline := self._weak()) is None:
            self._unwatch(loop)
            return
        was_idle = not pipeline.in_flight.requests
        pipeline.look()
        if was_idle or pipeline.session.is_closed:
            self._unwatch(loop)  # with no request in flight, only an end makes it readable
        else:
            if pipeline.is_recovering:
                self._unwatch(loop)  # until the recovering thread calls `rearm`: the descriptor would stay readable
            self.watch(loop)
