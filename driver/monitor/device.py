"""One running device, its processes and its bursts, as they are seen from outside.

The device is asked for its traces when the set of its bursts has changed; all else is plain reads of memory that its
bursts write anyway. No connection stays open: a device without clients ends, and a watcher must not keep it alive.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import psutil

from burst import BurstError, Malformed, Memory, StatusError, Trace
from driver.client import discovery, served_sockets
from driver.client.cells import cells_of
from driver.client.connection import Connection, trace_memory
from driver.client.statistics import cpu_of_listener
from driver.errors import DeviceNotFound, DriverError
from driver.monitor.figures import AccountFigures, BurstFigures, DeviceFigures, Holding, Queue, Spread
from driver.monitor.gpus import gpu_memory_of
from driver.monitor.lateness import Moment, counted, late_frames
from driver.options import PRIORITIES
from driver.protocol.census import Census, CensusCounts
from driver.protocol.ledger_report import LedgerReport
from fmq import FmqError, InvalidDescriptor, LifePage
from fmq._core import lib
from fmq.printable import printable
from fmq.region import Region

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from driver.monitor.figures import GpuFigures


_Number = TypeVar("_Number", int, float)
_PATIENCE = 5.0  # seconds for a service to answer
_MEMORY_EVERY = 10.0  # seconds between two looks at the memory of engines
_EVERY = 0.5  # seconds between two questions, whatever comes and goes


class WatchedDevice:
    """A running device, watched until it ends: its engine, or all that we may see of those that it has by account."""

    def __init__(self, address: str, with_accounts: bool = False) -> None:
        """Find the device. `with_accounts`: each `refresh` also asks what accounts hold.

        Raise DeviceNotFound if it is not running, DriverError, BurstError.
        """
        self._with_accounts, self._accounts = with_accounts, list[AccountFigures]()
        self._memory: list[list[Any]] = []
        self.address, self._engines = address, dict[tuple[int, int], WatchedEngine]()
        with _connected(address) as connection:
            self.name, self.version = str(connection.name), str(connection.version)
            self._pids = _pids(connection)
            self._broker = _broker_of(connection)
            self._ask(connection)
        self._cpu, self._cpu_at = self._cpu_seconds(), time.monotonic()

    @property
    def has_ended(self) -> bool:
        """True if the engine has ended to which we have connected."""
        return self._engines[self._pids].has_ended

    @property
    def bursts(self) -> dict[int, WatchedBurst]:
        """Those that the last `refresh` found, by number."""
        return {number: burst for engine in self._present for number, burst in engine.bursts.items()}

    @property
    def changes(self) -> int:
        """The number of bursts that we may see have opened or ended, in the engines that are present."""
        return sum(engine.census.changes for engine in self._present)

    @property
    def _present(self) -> list[WatchedEngine]:
        return [engine for pids, engine in self._engines.items() if pids == self._pids or not engine.has_ended]

    def glance(self) -> None:
        """Note new results for the next `look`."""
        for burst in self.bursts.values():
            burst.glance()

    def look(self, gpus: Sequence[GpuFigures] = ()) -> tuple[DeviceFigures, list[BurstFigures]]:
        """Return the current figures of the device and of the bursts that the last `refresh` found.

        `gpus`: what they say now of the processes that use them.
        """
        bursts = self.bursts
        found = [burst.look() for burst in bursts.values()]
        return self._figures(bursts, found, gpus), found

    def refresh(self) -> None:
        """Find new bursts and forget closed ones. Raise what the constructor does."""
        patience = _EVERY if self._has_changed or self._with_accounts else _MEMORY_EVERY
        if time.monotonic() - self._asked_at > patience:
            with _connected(self.address) as connection:
                if _pids(connection) != self._pids:
                    raise DeviceNotFound(f"{self.address}: the device was restarted")
                self._ask(connection)

    def time_work(self, seconds: float) -> None:
        """Have it note for so long when its accelerator works, if it can. A device that has gone says nothing."""
        gone = suppress(BurstError, DriverError, FmqError, OSError)
        with gone, _connected(self.address) as connection, cells_of(connection, _PATIENCE) as cells:
            for cell in cells.connected:
                cell.connection.call("time_work", seconds, timeout=_PATIENCE)

    @property
    def _has_changed(self) -> bool:
        is_new = self._cells is not None and self._cells.changes != self._seen
        return is_new or any(engine.has_changed for engine in self._present)

    def _ask_cell(self, connection: Connection, known: dict[tuple[int, int], WatchedEngine]) -> None:
        """Ask one engine and its service. `known`: those that were there before."""
        pids = _pids(connection)
        engine = known.get(pids)
        if engine is None:
            engine = WatchedEngine(self.address, connection)
        elif engine.has_changed:
            engine.ask(connection)
        self._engines[pids] = engine
        with suppress(StatusError):  # an earlier release, or not for our eyes
            self._memory.append(connection.call("memory", timeout=_PATIENCE)[0])
        if self._with_accounts:
            self._accounts += accounts_of(connection.call)

    def _ask(self, connection: Connection) -> None:
        self._asked_at = time.monotonic()
        with cells_of(connection, _PATIENCE) as cells:
            self._cells = None if cells.counts is None else CensusCounts(_mapped(os.dup(cells.counts), Census.nbytes))
            self._seen = self._cells.changes if self._cells else 0
            known, self._engines, self._accounts, self._memory = self._engines, {}, [], []
            for cell in cells.connected:
                # What has taken the engine of one account over may answer nonsense: it is left out.
                with suppress(*(() if cell.uid is None else (Malformed, InvalidDescriptor))):
                    self._ask_cell(cell.connection, known)
        if self._pids not in self._engines:
            raise DeviceNotFound(f"{self.address}: the device was restarted")

    def _figures(
        self, bursts: dict[int, WatchedBurst], found: list[BurstFigures], gpus: Sequence[GpuFigures]
    ) -> DeviceFigures:
        engines = self._present
        every = [*(engine.processes for engine in engines), self._broker]
        return DeviceFigures(
            address=self.address,
            name=self.name,
            version=self.version,
            service_pid=self._pids[0],
            engine_pid=self._pids[1],
            engines=len(engines),
            clients=self._cells.clients if self._cells else sum(engine.census.clients for engine in engines),
            bursts=sum(engine.census.bursts for engine in engines),
            cpu=self._cpu_share(),
            rss=_sum(processes.rss() for processes in every),
            pss=_sum(processes.pss() for processes in every),
            run_queue={name: _queue(name, bursts, found) for name in reversed(PRIORITIES)},
            accounts=self._accounts,
            engine_memory=_sum(each[0] for each in self._memory),
            runtime_memory=_sum(each[1] for each in self._memory),
            runtime_growth=_sum(each[2] for each in self._memory),
            gpu_memory=gpu_memory_of(gpus, (pid for processes in every for pid in processes.pids)),
        )

    def _cpu_seconds(self) -> float | None:
        return _sum(engine.processes.cpu_seconds() for engine in self._present)

    def _cpu_share(self) -> float | None:
        before, then = self._cpu, self._cpu_at
        self._cpu, self._cpu_at = self._cpu_seconds(), time.monotonic()
        return _share(before, self._cpu, max(1e-9, self._cpu_at - then))


class WatchedEngine:
    """One engine of a device, and its service."""

    def __init__(self, address: str, connection: Connection) -> None:
        """Raise what `Connection.call` does."""
        self._address, self.bursts = address, dict[int, WatchedBurst]()
        _, fds = connection.call("census", timeout=_PATIENCE)
        memory, self._life = _mapped(fds[0], Census.nbytes), _mapped(fds[1], LifePage.nbytes)
        self.census, self.processes = CensusCounts(memory), Processes(*_pids(connection))
        self.ask(connection)

    @property
    def has_ended(self) -> bool:
        """True once its life word says that it is dead, or, should the kernel have been unable to mark that, once its
        process has ended.
        """
        return bool(lib.fmq_life_state(self._life.base) != lib.FMQ_ALIVE) or self.processes.has_last_ended

    @property
    def has_changed(self) -> bool:
        """True if bursts have opened or ended since `ask`."""
        return self.census.changes != self._seen

    def ask(self, connection: Connection) -> None:
        """Ask for traces. The inode of its trace identifies a burst: no other burst has it while we hold the trace."""
        self._seen = self.census.changes
        fds = trace_memory(connection, _PATIENCE)
        self.bursts = {number: burst for fd in fds for number, burst in self._burst(fd)}

    def _burst(self, fd: int) -> Iterator[tuple[int, WatchedBurst]]:
        number = os.fstat(fd).st_ino
        if known := self.bursts.get(number):
            os.close(fd)
            yield number, known
        else:
            memory = Memory.adopt(fd, Trace.nbytes_in(fd), writable=False)
            memory.close()  # the mapping stays
            yield number, WatchedBurst(Trace(memory), self._address, number)


def _queue(priority: str, bursts: dict[int, WatchedBurst], figures: list[BurstFigures]) -> Queue:
    """Return the run queue of one priority, from the figures just read."""
    found = [burst for burst in bursts.values() if burst.priority == priority]
    waiting = sum(burst.is_waiting for burst in figures if burst.priority == priority)
    return Queue(
        len(found),
        waiting,
        waits_per_s=sum(b.waits_per_s for b in found),
        waited=sum(b.waited for b in found),
        joined_per_s=sum(b.joined_per_s for b in found),
    )


def _pids(connection: Connection) -> tuple[int, int]:
    return int(connection.service_pid), int(connection.engine_pid)


def _broker_of(connection: Connection) -> Processes:
    """Return the process that listens for the service, if it is another one."""
    found = _family((connection.channel.peer_pid, connection.service_pid))
    return Processes(*(process.pid for process in found[:1]))


def _sum(found: Iterable[_Number | None]) -> _Number | None:
    """Return the sum; None: the kernel tells nothing."""
    known = [one for one in found if one is not None]
    return sum(known[1:], start=known[0]) if known else None


@contextmanager
def _connected(address: str) -> Iterator[Connection]:
    channel = served_sockets.connect(address) if served_sockets.is_path(address) else None
    channel = channel or discovery.running(address)
    if channel is None:
        raise DeviceNotFound(f"name={address!r}: not running; it starts with its first client")
    try:
        connection = Connection(channel, timeout=_PATIENCE)
        yield connection
    finally:
        channel.close()


def accounts_of(call: Callable[..., tuple[list[Any], list[int]]]) -> Iterator[AccountFigures]:
    """Yield the holdings of accounts in the engine and the service that `call` asks. Raise StatusError, PeerDied,
    Timeout.
    """
    for process in ("engine", "service"):
        report = LedgerReport.read(call, process, timeout=_PATIENCE)
        for row in report.rows:
            holdings = {figure: Holding(held, most) for figure, held, most in report.shares(row)}
            yield AccountFigures(process, row.uid, row.application, holdings, spent=row.spent)


def _mapped(fd: int, nbytes: int) -> Region:
    region = Region.from_fd(fd, nbytes, writable=False)
    region.close()  # the mapping stays
    return region


_LOOKS = 10
_STREAM = 64  # results in one glance: more are no stream, of which it could be said why a frame was late


class _Totals(NamedTuple):
    """Counters that only grow."""

    at: float
    results: int
    plain: int
    client_cpu: float
    device_cpu: float | None
    waits: int
    waited: float
    joined: int


class WatchedBurst:
    """A burst of another process. Its figures cover the time between two calls of `look`."""

    def __init__(self, trace: Trace, device: str, number: int) -> None:
        self.trace, self.device, self.number = trace, device, number
        self.pid, self.model = int(trace.page.client.pid), trace.model
        self.program, self._last = program_of(self.pid), self._totals()
        self.waits_per_s = self.waited = self.joined_per_s = 0.0
        self._seen, self._came = self._last.results, list[Any]()
        self._moments = [Moment.now(trace)]

    def glance(self) -> None:
        """Note the requests whose results came since the last glance, at most 256."""
        if int(self.trace.page.client.results) != self._seen:
            records = self.trace.records()
            new = records[records["id"] > self._seen]
            if len(new):
                self._came.append(new)
                self._seen = int(new["id"][-1])
                if len(new) < _STREAM:
                    self._moments.append(Moment.now(self.trace))

    def look(self) -> BurstFigures:
        """Return the figures since the last call."""
        client = self.trace.page.client
        before, now = self._last, self._totals()
        self._last, seconds = now, max(1e-9, now.at - before.at)
        results, plain = max(0, now.results - before.results), max(0, now.plain - before.plain)
        self.waits_per_s = max(0, now.waits - before.waits) / seconds
        self.waited = max(0.0, now.waited - before.waited) / seconds
        self.joined_per_s = max(0, now.joined - before.joined) / seconds
        stages, late = self._stages()
        return BurstFigures(
            device=self.device,
            number=self.number,
            pid=self.pid,
            program=self.program,
            model=self.model,
            application=self.trace.application,
            priority=self.priority,
            depth=int(client.depth),
            rate=(results + plain) / seconds,
            latency=stages.pop("total", None),
            stages=stages,
            **self._in_flight(),
            results=now.results,
            plain=now.plain,
            drops=int(client.drops),
            timeouts=int(client.timeouts),
            path=_path(results, plain),
            client_cpu=max(0.0, now.client_cpu - before.client_cpu) / seconds,
            device_cpu=_share(before.device_cpu, now.device_cpu, seconds),
            late=late,
        )

    @property
    def priority(self) -> str:
        """By name."""
        number = int(self.trace.page.device.priority)
        return PRIORITIES[number - 1] if 1 <= number <= len(PRIORITIES) else ""

    def _totals(self) -> _Totals:
        client, device = self.trace.page.client, self.trace.page.device
        busy = (int(client.busy_ns) - int(client.asleep_ns)) / 1e9
        return _Totals(
            time.monotonic(),
            results=int(client.results),
            plain=int(client.plain),
            client_cpu=busy,
            device_cpu=cpu_of_listener(self.trace),
            waits=int(device.waits),
            waited=int(device.waited_ns) / 1e9,
            joined=int(device.joined),
        )

    def _in_flight(self) -> dict[str, Any]:
        """Consistent counters: reads again if a result came meanwhile."""
        client, device = self.trace.page.client, self.trace.page.device
        for _ in range(_LOOKS):
            results, answered = int(client.results), int(device.answered)
            requests, running, begun = int(client.requests), int(device.running), int(device.begun)
            if results == int(client.results):
                break
        return {
            "in_flight": max(0, requests - results),
            "queued": max(0, requests - answered - (running != 0)),
            "unread": max(0, answered - results),
            "is_waiting": running not in {0, begun},
        }

    def _stages(self) -> tuple[dict[str, Spread], dict[str, int]]:
        self.glance()
        came, self._came = self._came, []
        moments, self._moments = self._moments, self._moments[-1:]
        if not came:
            return {}, {}
        each = [self.trace.stages(records) for records in came]
        late = counted(late_frames(self.trace, np.concatenate(came), moments))
        rows = [np.concatenate([ns[name] for ns in each]) for name in each[0]]
        ordered = np.sort(rows, axis=1) / 1e3
        spreads = zip(*(_percentile(ordered, share) for share in (0.50, 0.99)), strict=True)
        return {name: Spread(*spread) for name, spread in zip(each[0], spreads, strict=True)}, late


def _percentile(ordered: NDArray[np.float64], share: float) -> list[float]:
    """Return the percentile of each row, as np.percentile; ten times as fast for hundreds of short rows."""
    below, part = divmod(share * (ordered.shape[1] - 1), 1)
    lower, upper = ordered[:, int(below)], ordered[:, min(int(below) + 1, ordered.shape[1] - 1)]
    found: list[float] = (lower + part * (upper - lower)).tolist()
    return found


def _path(results: int, plain: int) -> str:
    if results and plain:
        return "both"
    return "burst" if results else "plain" if plain else ""


def _share(before: float | None, now: float | None, seconds: float) -> float | None:
    return None if before is None or now is None else max(0.0, now - before) / seconds


_PSS_EVERY = 10.0  # seconds: to add up a process's pages keeps it from mapping others meanwhile


def program_of(pid: int) -> str:
    """Return the program of a process: the script or module instead of the interpreter. Empty if it is not visible."""
    try:
        words = psutil.Process(pid).cmdline()
    except (psutil.Error, OSError, ValueError, OverflowError):
        return ""
    return printable(_named(words))


def _named(words: list[str]) -> str:
    name = PurePath(words[0]).name if words else ""
    if not name.startswith("python"):
        return name
    for word, following in zip(words[1:], [*words[2:], ""], strict=True):
        if word in {"-m", "-c"}:
            return following if word == "-m" else f"{name} -c"
        if not word.startswith("-"):
            return PurePath(word).name
    return name


class Processes:
    """Processes of a device, each a child of the one before. Figures are None if they are not visible, as in another
    container.
    """

    def __init__(self, *pids: int) -> None:
        self._all = _family(pids)
        self._pss: int | None = None
        self._pss_at = float("-inf")

    @property
    def pids(self) -> list[int]:
        """Those that are visible, by their numbers here."""
        return [process.pid for process in self._all]

    @property
    def has_last_ended(self) -> bool:
        """False also when it is not visible."""
        if not self._all:
            return False
        try:
            return not self._all[-1].is_running() or bool(self._all[-1].status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    def cpu_seconds(self) -> float | None:
        """CPU time of all, in seconds."""
        try:
            times = [process.cpu_times() for process in self._all]
        except psutil.Error:
            return None
        return sum(t.user + t.system for t in times) if times else None

    def rss(self) -> int | None:
        """Return the bytes in memory."""
        try:
            return sum(process.memory_info().rss for process in self._all) or None
        except psutil.Error:
            return None

    def pss(self) -> int | None:
        """Proportional share of memory in bytes; at most ten seconds old."""
        if time.monotonic() - self._pss_at > _PSS_EVERY:
            self._pss_at = time.monotonic()
            try:
                self._pss = sum(process.memory_full_info().pss for process in self._all) or None
            except psutil.Error:  # of another account
                self._pss = None
        return self._pss


def _family(pids: Sequence[int]) -> list[psutil.Process]:
    """Return the family; None if one is not the child of the one before: then the pids mean other processes in this
    namespace.
    """
    try:
        found = [psutil.Process(pid) for pid in pids]
        return found if all(child.ppid() == parent.pid for parent, child in pairwise(found)) else []
    except (psutil.Error, ValueError, OverflowError):
        return []
