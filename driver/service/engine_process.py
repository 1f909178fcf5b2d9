"""The engine process, as its service forks it and sees it."""

from __future__ import annotations

import gc
import logging
import os
import select
import warnings
from typing import TYPE_CHECKING, NamedTuple

from burst.channel import Channel
from driver.engine import sandbox, state
from driver.engine.landlock import Access
from driver.engine.latency import KEPT
from driver.engine.process import main as run_engine
from driver.engine.real_time import USUAL, RealTime
from driver.engine.running_files import RunningFiles

if TYPE_CHECKING:
    from driver.interface import Device
    from driver.service.bounded_log import EngineLog
    from driver.service.client_source import ClientSource
    from driver.service.engine_group import EngineGroup
    from driver.service.low_priority import LowPriority

_log = logging.getLogger(__name__)
_END_TIMEOUT = 2.0  # seconds


class EngineProcess(NamedTuple):
    """The engine, as the service sees it."""

    channel: Channel
    pid: int
    running: RunningFiles


def start_engine(
    name: str,
    kind: type[Device],
    source: ClientSource,
    log: EngineLog,
    *,
    is_shared: bool,
    group: EngineGroup | None = None,
    low: LowPriority | None = None,
    real_time: RealTime = USUAL,
) -> EngineProcess:
    """Start the engine process. It ends when this process dies or closes its end of the channel.

    is_shared: accounts share it. `group`: it is in that control group. `low`: its priority at first, if that is not the
    usual one. `real_time`: what its owner says of that.

    By fork, because both processes begin with importing the same modules: a device starts
    in half the time. Only this thread exists yet, besides numpy's, which survive forks.
    """
    (near, far), running = Channel.pair(), RunningFiles()
    gc.freeze()
    with warnings.catch_warnings(), far:
        warnings.simplefilter("ignore", DeprecationWarning)
        if pid := os.fork():
            log.close_writable()
            if group:
                group.take(pid)
            if low:
                low.watch(pid)
            return EngineProcess(near, pid, running)
        try:
            log.redirect()
            near.close()
            source.close()
            if group:
                group.close()
            if low:
                low.enter()
            kept = sandbox.OF_CELLS | real_time.capabilities
            sandbox.enter_files(kind, {state.made(): Access.EDIT} | KEPT, kept, locks=real_time.locks)
            run_engine(name, kind, far, running, is_shared=is_shared, real_time=real_time)
        except BaseException:  # noqa: BLE001 (this process must not go on as a second service)
            _log.exception("the engine of device %r failed", name)
        finally:
            os._exit(1)


def exit_code(pid: int) -> int:
    """Return the exit status of a child that is about to end, or minus the signal; 0 if it takes long."""
    ended = os.pidfd_open(pid)
    try:
        found = select.select([ended], [], [], _END_TIMEOUT)[0]
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if found else 0
    finally:
        os.close(ended)
