"""A cell: the service and the engine of one account, behind a broker. `driver.service.broker` forks it.

The broker hands each client of the account over as the socket that it has accepted. A cell without clients asks to end,
and the broker lets it go unless a client is on its way. What the two tell each other is in `Cell` and `Broker`.
"""

from __future__ import annotations

import math
import os
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from burst import GeneralFailure, PeerDied
from burst.channel import Channel, Message, close_all
from burst.exhaustion import DescriptorsLost
from driver.config import device_uid
from driver.engine import state
from driver.engine.limits import WEIGHT, weights
from driver.protocol.rpc import take_fd
from driver.service.client_source import AcceptedClient

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from driver.service.engine_group import EngineGroup

PAGE = 32
"""Cells in one answer: each comes with a descriptor."""

_PATIENCE = 5.0  # seconds for the broker to answer
_STEP, _MOST_NICE = 1.25, 19  # the kernel's: one nice value less gets so much more time
_OOM_SCORE = 300  # thousandths of the memory, added to what a process of another account has
AUTOGROUP = Path("/proc/self/autogroup")
_GROUP_PATIENCE = 2.0  # seconds


class Cell:
    """The broker, as a cell's service sees it: its `ClientSource`."""

    def __init__(
        self,
        channel: Channel,
        account: int | None = None,
        group: EngineGroup | None = None,
        *,
        is_second: bool = False,
    ) -> None:
        """`account`: of all clients; None: the kernel says whose each is. `group`: of the engine. `is_second`: the
        account has another cell, whose clients are to come over.
        """
        self._channel, self._came, self._account, self.group = channel, 0, account, group
        self.is_second = is_second
        self._asking, self._answers = threading.Lock(), SimpleQueue[tuple[list[Any], list[int]]]()
        self._asked = 0
        self.on_renew: Callable[[], object] = list  #: what the service does when the broker has it renew its engine

    def fileno(self) -> int:
        return self._channel.fileno()

    def accept(self) -> AcceptedClient | None:
        try:
            message = self._channel.receive()
        except DescriptorsLost as error:
            self._note_lost(Message(error.raw, []).body)
            raise
        match message.body:
            case ["client"]:
                self._came += 1
                return AcceptedClient(self._connected(message, self._account))
            case ["watcher"]:
                watching = None if self._account is None else device_uid()
                return AcceptedClient(self._connected(message, watching), is_watcher=True)
            case ["cells", *values]:
                self._answers.put((values, message.take_fds()))
            case ["renew"]:
                self.on_renew()
        return None

    def _connected(self, message: Message, uid: int | None) -> Channel:
        """Return a connection that the broker handed over. `uid`: whose it is, as it may have no number here."""
        channel = Channel.from_fd(take_fd(message))
        channel.known_uid = uid
        return channel

    def _note_lost(self, body: list[Any]) -> None:
        """Note that no descriptor was left for a connection, which has ended by that."""
        if body == ["client"]:
            self._came += 1
            self.left()

    def turn_away(self, error: OSError, close: Callable[[socket.socket], object]) -> None:
        """Do nothing: the broker accepts."""

    def ready(self) -> None:
        """Tell the broker that the service begins to serve."""
        self._channel.send(["ready"])

    def left(self) -> None:
        with suppress(PeerDied):
            self._channel.send(["left"])

    def retire(self, finish: Callable[[], object]) -> bool:
        """Ask to end. The broker closes the channel if it agrees."""
        finish()
        with suppress(PeerDied):
            self._channel.send(["idle", self._came])
        return False

    @contextmanager
    def ending(self) -> Iterator[None]:
        with suppress(PeerDied):
            self._channel.send(["ending"])
        yield

    def begin_beside(self) -> bool:
        """Have the broker begin another cell for the account's next client."""
        with suppress(PeerDied):
            self._channel.send(["renewing"])
        return True

    def stay(self) -> None:
        with suppress(PeerDied):
            self._channel.send(["staying"])

    def hand_over(self) -> bool:
        """Do nothing: the broker hands over no more clients. It still says when this cell may end."""
        return False

    def cells(self, first: int) -> tuple[list[object], list[int]]:
        with self._asking:
            self._asked += 1
            try:
                self._channel.send(["cells", self._asked, first])
                while True:
                    (number, *values), fds = self._answers.get(timeout=_PATIENCE)
                    if number == self._asked:
                        return values, fds
                    close_all(fds)  # the late answer to a question before
            except (Empty, PeerDied) as error:
                raise GeneralFailure("the broker of the device does not answer") from error

    def close(self) -> None:
        self._channel.close()


def settle(uid: int) -> None:
    """Give this process, and what it forks, the priority of that account, and its place when memory runs out.

    The kernel divides processors between sessions where it groups them (autogroup), else between threads.
    """
    os.setsid()
    own = os.getpriority(os.PRIO_PROCESS, 0)  # which only a privileged process may lower
    nice = min(_MOST_NICE, own + nice_of(uid, weights()))
    os.setpriority(os.PRIO_PROCESS, 0, nice)
    if nice:
        _weigh_session(nice)
    if uid != os.getuid():
        state.keep_for(uid)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))


def _weigh_session(nice: int) -> None:
    """Give this process's autogroup that nice value, where the kernel has autogroups.

    It takes one such change of unprivileged processes in 0.1 s, from all of them together, and refuses the others with
    EAGAIN.
    """
    until = time.monotonic() + _GROUP_PATIENCE
    with suppress(OSError):
        while True:
            try:
                AUTOGROUP.write_text(str(nice))
            except BlockingIOError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)
            else:
                return


def nice_of(uid: int, found: dict[int, int]) -> int:
    """Return the nice value that stands for an account's weight: 0 for the greatest that is configured."""
    most = max(WEIGHT, *found.values()) if found else WEIGHT
    return min(_MOST_NICE, round(math.log(most / found.get(uid, WEIGHT), _STEP)))
