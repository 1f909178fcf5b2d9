"""Runs a demo in a thread, as the page's controls say; restarts it after changes and when its device dies."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import closing
from typing import TYPE_CHECKING, Any, Protocol

import burst
import driver
from driver.demos.latencies import ProcessCost
from driver.demos.web.rivals import Rivals

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path

    from driver.demos.latencies import TimedCall
    from driver.demos.web.board import Update
    from driver.demos.web.settings import Held, Setting, Values

AGAIN = 1.0  # seconds until something that failed is tried again
SECOND = 1.0


class Show(Protocol):
    """A show, as a page has it."""

    kind: str  #: "camera" or "audio"
    settings: Sequence[Setting]

    def about(self) -> dict[str, Any]:
        """Return what never changes, for the page."""

    def play(self, values: Held, stage: Stage) -> Generator[Update, None, None]:
        """Yield updates until the generator is closed."""

    def rest(self) -> None:
        """Release cameras and microphones. Called while paused."""


class Stage:
    """The surroundings of a show: it says where it runs, and waits so that changes act at once."""

    def __init__(self, say: Callable[..., None]) -> None:
        self.news = threading.Event()  # something has changed
        self.deaths = 0
        self._say, self._engine, self._restarts = say, 0, False
        self._begin, self._times = time.monotonic(), deque[float](maxlen=1000)
        self._cost = ProcessCost()

    def wait(self, seconds: float) -> None:
        """Sleep, but not longer than until something changes."""
        self.news.wait(seconds)

    def placed(self, prepared: driver.RemotePreparedModel) -> None:
        """Return where the network runs now."""
        device, before = prepared.device, self._engine
        self._engine = device.engine_pid
        if self._restarts:
            self._restarts = False
            self._say(notice=f"Engine process {before} died; the device was started again, and so was the stream.")
        self._say(
            status="running",
            place={
                "device": device.name,
                "version": device.version,
                "type": device.type,
                "engine": self._engine,
                "operations": len(prepared.model.main.operations),
            },
        )

    def reads_from(self, name: str) -> None:
        """Return where frames come from, if another way than at first."""
        self._say(notice=f"Frames come from {name}.")

    def noticed(self, prepared: driver.RemotePreparedModel, seconds: float) -> None:
        """Notice, after each execution, which took so long: it may have seen the device die and come back."""
        if prepared.device.engine_pid != self._engine:
            died = self._engine
            self.placed(prepared)
            self.died(f"Engine process {died} died and was restarted; one execution took {seconds:.2f} s.")

    def died(self, words: str) -> None:
        """Note that the device died."""
        self.deaths += 1
        self._say(deaths=self.deaths, notice=words)

    def restarts(self, error: Exception) -> None:
        """Note that the device died in a way that ended the stream."""
        self._restarts = True
        self.died(f"The device died and restarts: {error}")
        self._say(status="restarting the device")

    def records(self, path: Path | None) -> None:
        """Into that file, from now on."""
        self._say(recording=str(path) if path else None)

    def point(self, calls: dict[str, TimedCall]) -> dict[str, Any]:
        """Return the point of one execution on each path: when, and in milliseconds how long it took and how much of it
        the device.

        `costs` is the burst's `ProcessCost` so far.
        """
        if burst_call := calls.get("burst"):
            self._cost.add(burst_call)
        costs = self._cost.milliseconds
        paths = {
            path: [round(1e3 * call.seconds, 4), None if call.on_device is None else round(call.on_device / 1e3, 4)]
            for path, call in calls.items()
        }
        known = {} if costs is None else {"costs": round(costs, 4)}
        return {"t": round(time.monotonic() - self._begin, 4), "calls": paths, **known}

    def rate(self) -> float:
        """Return how many updates there were in the last second, this one included."""
        now = time.monotonic()
        self._times.append(now)
        while now - self._times[0] > SECOND:
            self._times.popleft()
        return float(len(self._times))


class ShowThread(threading.Thread):
    """Plays the show until it is stopped. `post` and `say` are called from this thread."""

    def __init__(self, show: Show, values: Values, post: Callable[[Update], None], say: Callable[..., None]) -> None:
        super().__init__(name=f"{show.kind} stream", daemon=True)
        self._show, self._values, self._post, self._say = show, values, post, say
        self._stage, self._rivals, self._is_over = Stage(say), Rivals(), False

    def changed(self) -> None:
        """Note that the values have changed. Called from another thread."""
        self._stage.news.set()

    def stop(self) -> None:
        """End it, and wait until it has ended."""
        self._is_over = True
        self._stage.news.set()
        self.join()

    def run(self) -> None:
        """Play, and play again."""
        try:
            while not self._is_over:
                self._round()
        finally:
            self._rivals.close()
            self._show.rest()
            self._say(status="stopped")

    def _round(self) -> None:
        """Play until the show has to begin anew."""
        try:
            self._take_up()
            if self._values["pause"]:
                self._show.rest()
                self._say(status="paused")
                self._stage.news.wait()
            else:
                self._play()
        except (ValueError, OSError, driver.DriverError, burst.BurstError) as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """Start a device that died again; try everything else again after a while, or after a change."""
        if isinstance(error, burst.PeerDied) and not isinstance(error, burst.Quarantined):
            self._stage.restarts(error)
        else:
            self._say(status="failed", notice=str(error))
            self._stage.news.wait(AGAIN)

    def _take_up(self) -> None:
        self._stage.news.clear()
        count = 0 if self._values["pause"] else int(self._values["rivals"])
        self._rivals.want(count, self._values["device"], self._values["rival_priority"])

    def _play(self) -> None:
        held = self._values.held()
        with closing(self._show.play(held, self._stage)) as updates:
            for update in updates:
                self._post(update)
                if self._stage.news.is_set():
                    self._take_up()
                    if self._is_over or held["pause"] or held.is_over:
                        return
