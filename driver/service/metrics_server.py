"""Metrics and health of a served device over HTTP: /metrics for Prometheus, /healthz for supervisors.

By default only this machine can connect. The answers hold numbers, no names and no data.

Metrics are sums over all accounts, without names of accounts or models. Everything is read at a scrape, from counts
that exist anyway; between scrapes it costs nothing.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from contextlib import suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from burst import BurstError
from burst.trace import STAGES
from driver.engine.totals import SUMMED
from driver.errors import DeviceFailed
from driver.options import PRIORITIES
from driver.service.health import WITHIN
from driver.service.visits import Visit, Visits, account_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client import Metric

    from burst import Trace
    from driver.service.health import HealthMonitor

_BACKLOG = 64
_SCRAPES = 4  # at once; further ones are told to come again, so that threads are left for /healthz


def listen(address: str) -> socket.socket:
    """Listens at "HOST:PORT", at ":PORT" for this machine alone, or at the path of a socket. Raises DeviceFailed."""
    try:
        if "/" in address:
            return _at_path(Path(address))
        if not (match := re.fullmatch(r"(?:\[(.+)\]|([^:\[\]]*)):(\d{1,5})", address)) or int(match[3]) > 65535:
            raise DeviceFailed(f"--metrics {address}: give HOST:PORT, such as 127.0.0.1:9464, or the path of a socket")
        host, port = match[1] or match[2] or "127.0.0.1", int(match[3])
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise DeviceFailed(
            f"--metrics {address}: cannot listen there ({error.strerror}); use another address"
        ) from error


def _at_path(path: Path) -> socket.socket:
    """Replaces a socket at which no process listens any more."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            listener.bind(str(path))
        except OSError:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if not path.is_socket() or probe.connect_ex(str(path)) == 0:
                    raise
            path.unlink()
            listener.bind(str(path))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def where(listener: socket.socket) -> str:
    """The address as a user would type it."""
    if listener.family == socket.AF_UNIX:
        return str(listener.getsockname())
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"


def expose(monitor: HealthMonitor, fd: int) -> None:
    """Serves metrics in threads of this process until it ends. Owns `fd`, a listening socket."""
    registry = CollectorRegistry()
    registry.register(MetricsCollector(monitor))
    handler = type("Handler", (_Handler,), {"registry": registry, "monitor": monitor})
    server = _Server(socket.socket(fileno=fd), handler)
    os.register_at_fork(after_in_child=server.socket.close)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()


class _Handler(MetricsHandler):
    monitor: HealthMonitor
    server: _Server
    server_version, sys_version = "Burst", ""

    def do_GET(self) -> None:  # noqa: N802 (http.server looks for that name)
        self.server.has_asked(self.request)
        match self.path.partition("?")[0]:
            case "/metrics":
                self._scraped()
            case "/healthz":
                trouble = self.monitor.trouble()
                self._answer(503 if trouble else 200, trouble or "ok")
            case _:
                self._answer(404, "try /metrics or /healthz")

    def _scraped(self) -> None:
        if not self.server.scrapes.acquire(blocking=False):
            self._answer(503, f"{_SCRAPES} scrapes are running; ask again")
            return
        try:
            super().do_GET()
        finally:
            self.server.scrapes.release()

    def _answer(self, status: int, words: str) -> None:
        body = f"{words}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    """A thread for each connection, as many as `visits` admits, and each until its deadline."""

    daemon_threads = True
    address_family = socket.AF_UNIX  # of the socket that it makes at first: the sandbox refuses others

    def __init__(self, listener: socket.socket, handler: Any) -> None:
        super().__init__(("", 0), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.scrapes = threading.Semaphore(_SCRAPES)
        self._visits, self._of = Visits(), dict[Any, Visit]()

    def process_request(self, request: Any, client_address: Any) -> None:
        def end() -> None:
            with suppress(OSError):  # it has ended already
                request.shutdown(socket.SHUT_RDWR)

        visit = self._visits.enter(account_of(request), end)
        if visit is None:
            self.shutdown_request(request)
            return
        self._of[request] = visit
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._left(request)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._left(request)

    def has_asked(self, request: Any) -> None:
        """Its request is complete."""
        self._of[request].has_asked = True

    def _left(self, request: Any) -> None:
        self._visits.leave(self._of.pop(request))

    def service_actions(self) -> None:
        """Called twice a second, and after each connection."""
        self._visits.end_overdue()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that disconnect before their answer."""


_BOUNDS = [digit * 10.0**power for power in range(-6, 1) for digit in (1, 2, 5)]  # seconds
_LONGEST = 3600 * 10**9
"""Nanoseconds. A client can write anything into its trace; longer times are ignored."""

_OF_FLOWS = {
    "executions": ("burst_executions", "Executions that have finished.", CounterMetricFamily),
    "waits": ("burst_waits", "Executions that had to wait in the run queue.", CounterMetricFamily),
    "yields": ("burst_yields", "Times that an execution yielded to others.", CounterMetricFamily),
    "waiting": ("burst_waiting", "Executions that wait in the run queue now.", GaugeMetricFamily),
    "waited": ("burst_wait_seconds", "Time that executions spent waiting in the run queue.", CounterMetricFamily),
    "used": ("burst_contended_seconds", "Time that executions took while others waited.", CounterMetricFamily),
}


class MetricsCollector(Collector):
    """The metrics of one device. Any thread."""

    def __init__(self, monitor: HealthMonitor) -> None:
        self._monitor, self._stages, self._lock = monitor, StageHistogram(), threading.Lock()

    def describe(self) -> list[Metric]:
        """No metrics: registering this must not call the device."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The device's counts, if it answers, and figures of its processes."""
        device, service = self._monitor.device, self._monitor.service
        info = {"device": device.name, "version": device.version, "type": device.type}
        yield InfoMetricFamily("burst_device", "The device being served.", value=info)
        trouble = self._monitor.trouble()
        yield GaugeMetricFamily(
            "burst_healthy", "1 if the device answers and its self test passed, else 0.", float(not trouble)
        )
        with self._lock, suppress(BurstError):  # it does not answer: burst_healthy says so
            yield from self._of_device()
        clients, outcomes = service.counts()
        yield GaugeMetricFamily("burst_clients", "Connected clients.", clients)
        preparations = CounterMetricFamily("burst_preparations", "Preparations by outcome.", labels=["outcome"])
        for outcome in ("prepared", "refused", "saved", "declined", "restored", "not_restored"):
            preparations.add_metric([outcome], outcomes[outcome])
        yield preparations
        yield from _of_processes({"service": device.service_pid, "engine": device.engine_pid})

    def _of_device(self) -> Iterator[Metric]:
        device = self._monitor.device
        (slots, _, sums, bursts, models), _ = device.call("figures", timeout=WITHIN)
        yield GaugeMetricFamily("burst_slots", "Executions that may run at once.", slots)
        yield GaugeMetricFamily("burst_bursts", "Open bursts.", bursts)
        yield GaugeMetricFamily("burst_models", "Models in memory; equal models count once.", models)
        for n, field in enumerate(SUMMED):
            name, words, family = _OF_FLOWS[field]
            metric = family(name, words, labels=["priority"])
            for priority, flow in zip(PRIORITIES, sums, strict=True):
                metric.add_metric([priority], flow[n])
            yield metric
        self._stages.look(device.traces())
        yield self._stages.metric()


class StageHistogram:
    """Time per stage of burst requests. Counts the requests that are in the traces at a scrape."""

    def __init__(self) -> None:
        names = (*STAGES, "total")
        self._counts = {name: np.zeros(len(_BOUNDS) + 1, np.int64) for name in names}
        self._seconds = dict.fromkeys(names, 0.0)
        self._seen: dict[int, int] = {}  # by inode of a burst's trace: the last request counted

    def look(self, traces: Iterable[Trace]) -> None:
        """Counts the new requests in these traces, and closes them."""
        seen = {}
        for trace in traces:
            inode = os.fstat(trace.memory.fd).st_ino
            seen[inode] = self._count(trace, self._seen.get(inode, 0))
            trace.memory.close()
        self._seen = seen

    def _count(self, trace: Trace, last: int) -> int:
        records = trace.records()
        times = trace.stages(records)
        is_new = (records["id"] > last) & (times["total"] <= _LONGEST)
        for name, ns in times.items():
            seconds = ns[is_new] / 1e9
            self._counts[name] += np.bincount(np.searchsorted(_BOUNDS, seconds), minlength=len(_BOUNDS) + 1)
            self._seconds[name] += float(seconds.sum())
        return max(last, int(records["id"].max(initial=0)))

    def metric(self) -> Metric:
        """A histogram for each stage."""
        words = "Time per stage of burst requests; sampled: the last 256 of each burst at each scrape."
        metric = HistogramMetricFamily("burst_request_seconds", words, labels=["stage"])
        bounds = [*(f"{bound:g}" for bound in _BOUNDS), "+Inf"]
        for stage, counts in self._counts.items():
            buckets = list(zip(bounds, np.cumsum(counts).tolist(), strict=True))
            metric.add_metric([stage], buckets, self._seconds[stage])
        return metric


def _of_processes(pids: dict[str, int]) -> Iterator[Metric]:
    memory = GaugeMetricFamily("burst_memory_bytes", "Proportional set size (PSS).", labels=["process", "kind"])
    cpu = CounterMetricFamily("burst_cpu_seconds", "Processor time.", labels=["process"])
    start = GaugeMetricFamily("burst_start_time_seconds", "Start time, seconds since 1970.", labels=["process"])
    open_ = GaugeMetricFamily("burst_descriptors", "Open descriptors.", labels=["process"])
    for process, pid in pids.items():
        try:
            ticks = os.sysconf("SC_CLK_TCK")
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            cpu.add_metric([process], (int(fields[11]) + int(fields[12])) / ticks)
            start.add_metric([process], _boot() + int(fields[19]) / ticks)
            open_.add_metric([process], len(os.listdir(f"/proc/{pid}/fd")))
            for kind, nbytes in _pss(pid).items():
                memory.add_metric([process, kind], nbytes)
        except (OSError, ValueError, LookupError):  # it has just ended, or this kernel lacks the file
            continue
    yield from (memory, cpu, start, open_)


def _pss(pid: int) -> dict[str, int]:
    """Bytes by kind: anon (private), file (mapped files), shmem (shared pools and queues)."""
    lines: Any = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    found = {words[0]: int(words[1]) * 1024 for words in lines}
    return {kind: found[f"Pss_{kind.capitalize()}:"] for kind in ("anon", "file", "shmem")}


def _boot() -> float:
    lines = Path("/proc/stat").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("btime ")))
