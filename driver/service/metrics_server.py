"""Metrics and health of a served device over HTTP: /metrics for Prometheus, /healthz for supervisors.

By default only this machine can connect. The answers hold numbers, no names and no data.

Metrics are sums over all accounts, without names of applications or models; what accounts hold is by uid. Everything
is read at a scrape, from counts that exist anyway; between scrapes it costs nothing.

The server is the standard library's, while gateways and the page of the demos have aiohttp: this one runs in the
sandboxed process of the device, which should have neither an event loop nor nine more packages for two pages.
"""

from __future__ import annotations

import io
import logging
import os
import re
import select
import socket
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseServer
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from burst import BurstError, Malformed
from burst.channel import refuse_descriptors
from burst.trace import STAGES
from driver.client.cells import cells_of
from driver.client.connection import traces_of
from driver.client.served_sockets import is_dead
from driver.engine.totals import SUMMED
from driver.errors import DeviceFailed
from driver.options import PRIORITIES
from driver.service.health import WITHIN
from driver.service.http_connections import MISADDRESSED, MOST, MOST_OF_ACCOUNT, PATIENCE, account_of, is_misaddressed
from driver.service.ledger_metrics import LedgerReports, ledger_metrics
from driver.service.peer_limiter import PeerLimiter, PeerVisit
from driver.service.process_figures import KINDS, ProcessFigures
from driver.service.upkeep import RuntimeMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from numpy.typing import NDArray
    from prometheus_client import Metric

    from burst import Trace
    from driver.client.connection import Connection
    from driver.service.health import HealthMonitor

_log = logging.getLogger(__name__)
_BACKLOG = 64
_LEAST = 0.05  # seconds that an engine may take to answer
_SCRAPES = 4  # at once; further ones are told to come again, so that threads are left for /healthz


def listen(address: str) -> socket.socket:
    """Listen at "HOST:PORT", at ":PORT" for this machine alone, or at the path of a socket. Raise DeviceFailed."""
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
    """Listen at a path, in place of a socket at which no process listens any more."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    refuse_descriptors(listener)
    try:
        try:
            listener.bind(str(path))
        except OSError:
            if not path.is_socket() or not is_dead(str(path)):
                raise
            path.unlink()
            listener.bind(str(path))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def where(listener: socket.socket) -> str:
    """Return the address as a user would type it."""
    if listener.family == socket.AF_UNIX:
        return str(listener.getsockname())
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"


def expose(monitor: HealthMonitor, fd: int, close: Callable[[socket.socket], object]) -> None:
    """Serve a device's metrics in threads of this process until it ends. Owns `fd`, a listening socket. `close`: has a
    client's socket closed by nobody who serves others.
    """
    serve_metrics(MetricsCollector(monitor), monitor.trouble, fd, close)


def serve_metrics(
    collector: Collector,
    trouble: Callable[[], str],
    fd: int,
    close: Callable[[socket.socket], object] = socket.socket.close,
) -> None:
    """Serve a collector's metrics, as `expose` does. `trouble`: why /healthz is to be 503, empty if it is not."""
    registry = CollectorRegistry()
    registry.register(collector)
    handler = type("Handler", (_Handler,), {"registry": registry, "trouble": staticmethod(trouble)})
    server = _Server(socket.socket(fileno=fd), handler, close)
    os.register_at_fork(after_in_child=server.socket.close)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()


class _Handler(MetricsHandler):
    trouble: Callable[[], str]
    server: _Server
    server_version, sys_version = "Burst", ""

    def setup(self) -> None:
        super().setup()
        if self.request.family == socket.AF_UNIX:
            self.rfile.close()
            self.rfile = io.BytesIO(_headers_of(self.request))

    def do_GET(self) -> None:  # noqa: N802 (http.server looks for that name)
        self.server.note_request(self.request)
        if is_misaddressed(self.headers.get("Host"), self.request):
            self._answer(403, MISADDRESSED)
            return
        match self.path.partition("?")[0]:
            case "/metrics":
                self._scraped()
            case "/healthz":
                trouble = self.trouble()
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


_END_OF_HEADERS, _MOST_HEADERS = b"\r\n\r\n", 4096
_ENDS_OF_HEADERS = _END_OF_HEADERS, b"\n\n"


def _headers_of(sock: socket.socket) -> bytes:
    """Return what the client says until the end of the headers; b"" where descriptors come with it.

    Those stay in the socket: whoever takes them away closes them, which may take as long as the client likes.
    """
    with select.epoll() as arrivals:
        arrivals.register(sock, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)
        while True:
            (_, events), *_ = arrivals.poll()
            with suppress(BlockingIOError):
                found, _, flags, _ = sock.recvmsg(_MOST_HEADERS, 0, socket.MSG_PEEK | socket.MSG_DONTWAIT)
                if flags & socket.MSG_CTRUNC:
                    return b""
                if any(end in found for end in _ENDS_OF_HEADERS) or len(found) == _MOST_HEADERS:
                    return sock.recv(len(found))
            if events & (select.EPOLLRDHUP | select.EPOLLHUP):
                return b""


class _Server(ThreadingHTTPServer):
    """A thread for each connection, as many as its limiter admits, and each until its deadline."""

    daemon_threads = True

    def __init__(
        self,
        listener: socket.socket,
        handler: Any,
        close: Callable[[socket.socket], object] = socket.socket.close,
    ) -> None:
        BaseServer.__init__(self, listener.getsockname(), handler)  # TCPServer's makes a socket: the sandbox refuses
        self._close = close
        self.socket = listener
        self.scrapes = threading.Semaphore(_SCRAPES)
        self._limiter, self._of = PeerLimiter(MOST, MOST_OF_ACCOUNT), dict[Any, PeerVisit]()

    def process_request(self, request: Any, client_address: Any) -> None:
        def end() -> None:
            with suppress(OSError):  # it has ended already
                request.shutdown(socket.SHUT_RDWR)

        def asks() -> bool:
            try:
                return _END_OF_HEADERS in request.recv(_MOST_HEADERS, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except OSError:  # nothing is there, or it has ended
                return False

        connection = self._limiter.enter(account_of(request), end, asks)
        if connection is None:
            self.shutdown_request(request)
            return
        connection.wait(PATIENCE)
        self._of[request] = connection
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

    def close_request(self, request: Any) -> None:
        self._close(request)

    def note_request(self, request: Any) -> None:
        """Note that its request is complete: no newcomer may evict it. Its deadline goes on."""
        self._of[request].stay()

    def _left(self, request: Any) -> None:
        self._limiter.leave(self._of.pop(request))

    def service_actions(self) -> None:
        """End overdue connections. Called twice a second, and after each connection."""
        self._limiter.end_overdue()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect before their answer."""


_BOUNDS = [digit * 10.0**power for power in range(-6, 1) for digit in (1, 2, 5)]  # seconds
_LONGEST = 3600 * 10**9
"""Nanoseconds. A client can write anything into its trace; longer times are ignored."""

_MOST_MODELS = 32  # that have a label of their own
_OUTCOMES = ("prepared", "refused", "saved", "declined", "restored", "not_restored")
_OF_FLOWS = {
    "executions": ("burst_executions", "Executions that have finished.", CounterMetricFamily),
    "joined": ("burst_executions_joined", "Executions that were part of another one's run.", CounterMetricFamily),
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
        self._ledgers: list[LedgerReports] = []
        self._liars = deque[int](maxlen=_MOST_ENDED)  # engines, by their processes
        self._models: Counter[str] = Counter()  # open bursts by the name of their model
        self._flows = CounterSum(np.zeros((len(PRIORITIES), len(SUMMED))))
        self._outcomes = CounterSum(np.zeros(len(_OUTCOMES)))
        self._cpu = {process: CounterSum(np.zeros(())) for process in ("service", "engine")}

    def describe(self) -> list[Metric]:
        """Describe no metrics: registering this must not call the device."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the device's counts, if it answers, and figures of its processes."""
        device = self._monitor.device
        info = {"device": device.name, "version": device.version, "type": device.type}
        yield InfoMetricFamily("burst_device", "The device being served.", value=info)
        trouble = self._monitor.trouble()
        yield GaugeMetricFamily(
            "burst_healthy", "1 if the device answers and its self test passed, else 0.", float(not trouble)
        )
        with self._lock:
            engines = self._engines()
            if engines:
                yield from self._counted(engines)
            yield from self._of_processes(engines)

    def _engines(self) -> list[EngineFigures]:
        """Return the engines that answer in time. None answers: burst_healthy says so."""
        end = time.monotonic() + WITHIN  # for all of them: an account's engine that hangs must not hide the others
        try:
            with cells_of(self._monitor.device.connection, WITHIN) as cells:
                found = [_figures(cell.connection, end) for cell in cells.connected]
                answering = [cell for cell, each in zip(cells.connected, found, strict=True) if each]
                ledgers = [LedgerReports.of(cell.connection, end) for cell in answering]
                self._ledgers = [each for each in ledgers if each]
                traces = [trace for cell in answering for trace in self._traces(cell.connection, end)]
                self._models = Counter(trace.model for trace in traces)
                self._stages.look(traces)
        except BurstError:
            return []
        return [each for each in found if each is not None]

    def _traces(self, connection: Connection, end: float) -> list[Trace]:
        """Return the traces of an engine, unless it has sent something else before: that may take a thread to close."""
        pid = int(connection.engine_pid)
        try:
            return [] if pid in self._liars else traces_of(connection, _left(end))
        except Malformed as error:
            _log.error("an engine, process %d, gives no traces: %s", pid, error)
            self._liars.append(pid)
        except BurstError:  # it has just ended
            pass
        return []

    def _counted(self, engines: list[EngineFigures]) -> Iterator[Metric]:
        yield GaugeMetricFamily("burst_engines", "Engines: one, or one for each account.", len(engines))
        yield GaugeMetricFamily("burst_clients", "Connected clients.", sum(each.clients for each in engines))
        yield GaugeMetricFamily("burst_slots", "Executions that an engine may run at once.", engines[0].slots)
        yield GaugeMetricFamily("burst_bursts", "Open bursts.", sum(each.bursts for each in engines))
        yield self._by_model()
        models = sum(each.models for each in engines)
        yield GaugeMetricFamily("burst_models", "Models in memory; equal models of an engine count once.", models)
        flows = self._flows.total({each.pids: each.flows for each in engines})
        flows[:, SUMMED.index("waiting")] = np.sum([each.flows for each in engines], 0)[:, SUMMED.index("waiting")]
        for n, field in enumerate(SUMMED):
            name, words, family = _OF_FLOWS[field]
            metric = family(name, words, labels=["priority"])
            for priority, value in zip(PRIORITIES, flows[:, n], strict=True):
                metric.add_metric([priority], value)
            yield metric
        words = "Private memory of engines that no client accounts for."
        yield GaugeMetricFamily("burst_runtime_bytes", words, sum(each.runtime.runtime for each in engines))
        words = "What that grows by in an hour, by the last hour; 0 until an engine has worked for some minutes."
        growth = sum(each.runtime.growth or 0.0 for each in engines)
        yield GaugeMetricFamily("burst_runtime_growth_bytes", words, growth)
        yield from ledger_metrics(self._ledgers)
        yield self._stages.metric()
        preparations = CounterMetricFamily("burst_preparations", "Preparations by outcome.", labels=["outcome"])
        totals = self._outcomes.total({each.pids: each.outcomes for each in engines})
        for outcome, count in zip(_OUTCOMES, totals, strict=True):
            preparations.add_metric([outcome], count)
        yield preparations

    def _by_model(self) -> Metric:
        """Return so many names and no more, the most used first: clients choose them."""
        metric = GaugeMetricFamily("burst_model_bursts", "Open bursts by the name of their model.", labels=["model"])
        named = self._models.most_common(_MOST_MODELS)
        for model, count in named:
            metric.add_metric([model], count)
        if rest := self._models.total() - sum(count for _, count in named):
            metric.add_metric(["(others)"], rest)
        return metric

    def _of_processes(self, engines: list[EngineFigures]) -> Iterator[Metric]:
        """Yield sums over the services and over the engines; the times of start are those of our own, which come
        first.
        """
        memory = GaugeMetricFamily("burst_memory_bytes", "Proportional set size (PSS).", labels=["process", "kind"])
        cpu = CounterMetricFamily("burst_cpu_seconds", "Processor time.", labels=["process"])
        start = GaugeMetricFamily("burst_start_time_seconds", "Start time, seconds since 1970.", labels=["process"])
        open_ = GaugeMetricFamily("burst_descriptors", "Open descriptors.", labels=["process"])
        device = self._monitor.device
        own = device.service_pid, device.engine_pid
        all_pairs = {own: [ProcessFigures.of(pid) for pid in own]} | {each.pids: each.processes for each in engines}
        for n, process in enumerate(("service", "engine")):
            found = {(pids[n], each.start): each for pids, pair in all_pairs.items() if (each := pair[n])}
            if not found:
                continue
            seconds = self._cpu[process].total({key: np.array(each.cpu) for key, each in found.items()})
            cpu.add_metric([process], float(seconds))
            start.add_metric([process], next(iter(found.values())).start)
            open_.add_metric([process], sum(each.descriptors for each in found.values()))
            for kind, nbytes in zip(KINDS, np.sum([each.pss for each in found.values()], 0), strict=True):
                memory.add_metric([process, kind], float(nbytes))
        yield from (memory, cpu, start, open_)


class EngineFigures(NamedTuple):
    """The counts of one engine and its service."""

    pids: tuple[int, int]  #: of the service and the engine
    slots: int
    flows: NDArray[np.float64]  #: by priority, lowest first; then by `SUMMED`
    bursts: int
    models: int
    clients: int
    outcomes: NDArray[np.float64]
    processes: list[ProcessFigures | None]  #: the service and the engine
    runtime: RuntimeMemory


def _left(end: float) -> float:
    return max(_LEAST, end - time.monotonic())


def _figures(connection: Connection, end: float) -> EngineFigures | None:
    """Return its figures; None: it has ended, does not answer in time, or answers nonsense."""
    try:
        figures, _ = connection.call("figures", timeout=_left(end))
        memory, _ = connection.call("memory", timeout=_left(end))
        return _read(connection, figures, memory)
    except BurstError:
        return None
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        _log.error("an engine, process %s, gives no figures: %s", connection.engine_pid, error)
        return None


def _read(connection: Connection, figures: list[Any], memory: list[Any]) -> EngineFigures:
    """Read the answers of an engine, which something may have taken over. Raise what is wrong with them."""
    slots, _, sums, bursts, models, clients, outcomes, service, engine = figures
    flows, (private, runtime, growth) = np.array(sums, float), memory
    if flows.shape != (len(PRIORITIES), len(SUMMED)) or not np.isfinite(flows).all():
        raise ValueError(f"counts of flows have the shape {flows.shape}")
    return EngineFigures(
        (int(connection.service_pid), int(connection.engine_pid)),
        int(slots),
        flows,
        int(bursts),
        models=int(models),
        clients=int(clients),
        outcomes=np.array([outcomes.get(outcome, 0) for outcome in _OUTCOMES], float),
        processes=[each and _process(*each) for each in (service, engine)],
        runtime=RuntimeMemory(int(private), int(runtime), None if growth is None else float(growth)),
    )


def _process(cpu: Any, start: Any, descriptors: Any, pss: Any) -> ProcessFigures:
    anon, file, shmem = map(int, pss)
    return ProcessFigures(float(cpu), float(start), int(descriptors), [anon, file, shmem])


_MOST_ENDED = 256


class CounterSum:
    """The sum of a counter over engines that come and go. It never falls: what an engine had counted when it was last
    seen stays in.
    """

    def __init__(self, zero: NDArray[np.float64]) -> None:
        self._folded = zero
        self._last: dict[Any, NDArray[np.float64]] = {}

    def total(self, now: Mapping[Any, NDArray[np.float64]]) -> NDArray[np.float64]:
        """`now`: the counts of those that answer, each by what identifies it."""
        for key, counts in now.items():
            self._last.pop(key, None)
            self._last[key] = counts
        while len(self._last) > _MOST_ENDED:
            self._folded = self._folded + self._last.pop(next(iter(self._last)))
        total: NDArray[np.float64] = self._folded + np.sum(list(self._last.values()), 0)
        return total


class StageHistogram:
    """Time per stage of burst requests. Counts the requests that are in the traces at a scrape."""

    def __init__(self) -> None:
        names = (*STAGES, "total")
        self._counts = {name: np.zeros(len(_BOUNDS) + 1, np.int64) for name in names}
        self._seconds = dict.fromkeys(names, 0.0)
        self._seen: dict[int, int] = {}  # by inode of a burst's trace: the last request counted

    def look(self, traces: Iterable[Trace]) -> None:
        """Count the new requests in these traces, and close them."""
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
        """Return a histogram for each stage."""
        words = "Time per stage of burst requests; sampled: the last 256 of each burst at each scrape."
        metric = HistogramMetricFamily("burst_request_seconds", words, labels=["stage"])
        bounds = [*(f"{bound:g}" for bound in _BOUNDS), "+Inf"]
        for stage, counts in self._counts.items():
            buckets = list(zip(bounds, np.cumsum(counts).tolist(), strict=True))
            metric.add_metric([stage], buckets, self._seconds[stage])
        return metric
