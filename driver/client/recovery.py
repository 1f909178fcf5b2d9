"""What a burst does when its device dies: the device is started again, a bounded number of times.

A model that crashes the device again and again is the business of `driver.client.quarantine`.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from burst import BuffersLost, DeviceBuffer, PeerDied
from driver.client.quarantine import crash_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from burst import Controller, Request, Trace
    from driver.client.prepared_model import Home, RemotePreparedModel
    from driver.options import Options

_MOST_REVIVALS, _WITHIN = 10, 10.0  # seconds
_MOST_IN_A_ROW = 10  # deaths that one burst sees without an answer in between
_FOLLOWS = 1.0  # seconds within which an engine ends after its service


class Recovery:
    """The deaths that one burst has seen, and the controller that comes after the next."""

    def __init__(self, prepared: RemotePreparedModel, options: Options) -> None:
        self._prepared, self._options = prepared, options
        self._suspect: object = None  # what crashed the device last
        self._tokens: set[int] = set()
        self._in_a_row = 0

    def begin(self) -> tuple[Home, Controller]:
        """The first controller. Raises StatusError, PeerDied."""
        home = self._prepared.present_home()
        try:
            return home, self._prepared.new_controller(self._options, home)
        except PeerDied:
            if not self._options.recover:
                raise
            return self._prepared.revived(self._options, home.connection)

    def is_recoverable(self, error: BaseException, has_died: Callable[[], bool]) -> bool:
        """Whether the burst's device died, and is to be started again.

        The plain path ends with the service; the burst ends with the engine, which follows it at once.
        """
        end = time.monotonic() + _FOLLOWS
        while self._options.recover and type(error) is PeerDied:
            if has_died():
                return True
            if time.monotonic() > end:
                return False
            time.sleep(1e-3)
        return False

    def note_answer(self) -> None:
        """The device has answered since it died last."""
        self._in_a_row = 0

    def bind(self, request: Request) -> None:
        """From now on the burst is bound to the device's buffers that this request names."""
        self._tokens |= {pool.token for pool in request.pools if isinstance(pool, DeviceBuffer)}

    def successor(
        self, error: BaseException, home: Home, trace: Trace, waiting: Sequence[tuple[object, Request | None]]
    ) -> tuple[Home, Controller]:
        """A controller on the device's next life. Raises what all waiting requests are to get.

        `waiting`: the requests without an answer, each with an object that identifies it.
        """
        self._prepared.check_quarantine()
        if not (self._options.recover and isinstance(error, PeerDied)):
            raise error
        if self._tokens:
            names = ", ".join(map(str, sorted(self._tokens)))
            raise BuffersLost(
                f"the device died, and its buffers {names} with it; allocate new ones, and open another burst"
            )
        if crash := crash_of(trace, waiting, self._prepared.model):
            again, self._suspect = crash.suspect is not None and crash.suspect is self._suspect, crash.suspect
            self._prepared.note_crash(crash, again=again)
        self._in_a_row = 1 if trace.page.client.results else self._in_a_row + 1
        if self._in_a_row > _MOST_IN_A_ROW:
            self._in_a_row = 0  # of the next requests
            name = self._prepared.device.address
            raise PeerDied(
                f"device {name!r} died {_MOST_IN_A_ROW} times over the same requests; the burst gives them up"
            )
        return self._prepared.revived(self._options, home.connection)


class Revivals:
    """How often one connection's device was started again: at most ten times within ten seconds."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_MOST_REVIVALS)

    def count(self, name: str) -> None:
        """One more. Raises PeerDied when there were too many."""
        now = time.monotonic()
        if len(self._times) == _MOST_REVIVALS and now - self._times[0] < _WITHIN:
            raise PeerDied(
                f"device {name!r} died {_MOST_REVIVALS} times within {now - self._times[0]:.1f} s; it is not started "
                f"again before {_WITHIN:g} s have passed; see its log"
            )
        self._times.append(now)
