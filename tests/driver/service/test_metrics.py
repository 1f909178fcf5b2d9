"""`burst serve --metrics`: figures for Prometheus, and health, of a device that is served."""

import contextlib
import http.client
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import older_kernel
import pytest
from click.testing import CliRunner
from held_processes import HeldProcess
from inside import controller_of
from prometheus_client.parser import text_string_to_metric_families
from served_devices import GROUP, foreign
from slow_to_close import LINGERS
from waiting import PATIENCE, at_least, nested

import driver
from burst.channel import refuse_descriptors
from driver.cli.command import burst as command
from driver.engine.process import Engine
from driver.service import health, metrics_server, probe
from driver.service.http_connections import account_of, is_misaddressed, machine_of
from driver.service.metrics_server import StageHistogram
from driver.service.peer_limiter import PeerLimiter

BEGAN = time.time() - 1  # seconds: no device of these tests has started before
X = np.ones((1, 4), np.float32)


class Served(SimpleNamespace):
    """One device: its socket's path and the port of its metrics."""

    def get(self, path, **fields):
        """Status and text."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            connection.request("GET", path, headers=fields)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def figures(self):
        """By name and labels."""
        status, text = self.get("/metrics")
        assert status == 200
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {(s.name, *sorted(s.labels.values())): s.value for s in samples}


@pytest.fixture(scope="module")
def served():
    """`burst serve reference`, ready."""
    with tempfile.TemporaryDirectory(prefix="burst-m-", dir="/tmp") as folder:
        words = [sys.executable, "-m", "driver.cli", "serve", "reference", "--dir", f"{folder}/run", "--metrics", ":0"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(words, **pipes, cwd="/") as process:
            try:
                lines = [process.stdout.readline() for _ in range(3)]
                port = re.search(r"http://127\.0\.0\.1:(\d+)/metrics", lines[1])
                assert "is ready after" in lines[2]
                assert "self test passed" in lines[2]
                yield Served(port=int(port[1]), address=f"{folder}/run/reference.sock")
            finally:
                process.kill()


def test_names_of_models_are_bounded(served, kit):
    """A client may call its models what it likes: 32 names have a label of their own, of printable characters."""
    with driver.connect(served.address) as device, contextlib.ExitStack() as stack:
        for n in range(35):
            named = kit.add_model().named(f"{n} 'x' \\ {'y' * 200}")
            stack.enter_context(stack.enter_context(device.prepare(named)).burst())
        found = {name: value for name, value in served.figures().items() if name[0] == "burst_model_bursts"}
    assert len(found) == 33
    assert found["burst_model_bursts", "(others)"] == 3
    assert all(len(label) < 104 for _, label in found)
    kit.until(lambda: served.figures()["burst_clients",] == 0)


def test_figures_of_all_clients(served, kit):
    """What clients have now and what they have done is there, and what was done stays when they have left."""
    before = served.figures()
    with driver.connect(served.address) as device, device.prepare(kit.add_model(), priority="high") as prepared:
        with prepared.burst() as burst:
            for _ in range(20):
                burst.run(X)
            prepared.run(X)
            during = served.figures()
        assert (during["burst_clients",], during["burst_bursts",], during["burst_models",]) == (1, 1, 1)
        assert during["burst_model_bursts", "ADD"] == 1
        executed = "burst_executions_total", "high"
        assert during[executed] - before[executed] == 21
        for stage in ("encode", "queue", "wake", "bind", "execute", "return", "total"):
            counted = "burst_request_seconds_count", stage
            assert during[counted] - before[counted] == 20
        assert during["burst_preparations_total", "prepared"] == before["burst_preparations_total", "prepared"] + 1
    kit.until(lambda: served.figures()["burst_clients",] == 0)
    after = served.figures()
    assert after[executed] == during[executed]
    assert after["burst_bursts",] == 0
    assert not any(name == "burst_model_bursts" for name, *_ in after)
    assert after["burst_request_seconds_count", "total"] == during["burst_request_seconds_count", "total"]
    assert after["burst_memory_bytes", "engine", "shmem"] > 0
    assert 0 < after["burst_descriptors", "service"] < 100
    nested(BEGAN, after["burst_start_time_seconds", "service"], time.time())


def test_what_accounts_hold(served, kit):
    """What each account holds in each process and has spent, by its number, beside what it may hold."""

    def of(name, process, figure, *more):
        return found[name, *sorted((process, figure, *more))]

    with driver.connect(served.address) as device, device.prepare(kit.add_model()) as prepared, prepared.burst():
        found, uid = served.figures(), str(os.getuid())
        measured = ("burst_held", *sorted(("service", "engine_bytes", uid)))
        kit.until(lambda: served.figures().get(measured, 0) > 2**20)

    assert 0 < of("burst_held", "engine", "mappings", uid) < of("burst_account_limit", "engine", "mappings")
    with pytest.raises(KeyError):  # there is no limit
        of("burst_account_limit", "engine", "gpu_bytes")
    assert of("burst_held", "engine", "life_words", uid) == 2  # of the burst, and of the self test's plain path
    assert of("burst_held", "service", "life_words", uid) == 2  # of the client and the monitor
    assert of("burst_spent_total", "engine", "preparing_seconds", uid) > 0


def test_nobody_is_named(served, kit):
    """Neither models nor clients nor applications are labels, and accounts by number alone: there are few of them."""
    with driver.connect(served.address) as device, device.prepare(kit.add_model()):
        _, text = served.get("/metrics")
    labels = {name for family in text_string_to_metric_families(text) for s in family.samples for name in s.labels}
    assert labels == {
        "device",
        "version",
        "type",
        "priority",
        "stage",
        "le",
        "outcome",
        "process",
        "kind",
        "uid",
        "figure",
    }


def test_a_name_that_was_made_to_mean_this_machine(served):
    """A page whose name resolves to 127.0.0.1 reads no metrics: its Host names that page."""
    for host, status in (("evil.example", 403), ("localhost:80", 200), ("[::1]", 200), ("127.0.0.1", 200)):
        assert served.get("/healthz", Host=host)[0] == status


@pytest.mark.parametrize(
    ("host", "machine"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::4", "2001:db8:1:3::/64"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("::1", "::1"),
        ("", ""),
    ],
)
def test_a_machine_with_many_addresses_is_one(host, machine):
    """The addresses of one network of IPv6, of which one machine can take any, count together."""
    assert machine_of(host) == machine


@pytest.mark.integration
@pytest.mark.parametrize("taken", ["its socket", "its folder", "its socket, and another one is there"])
def test_a_device_that_no_client_finds(served, taken):
    """/healthz says so as long as its socket is not where clients look for it; it answers those that are connected."""
    socket_path = Path(served.address)
    moved = socket_path.parent if "folder" in taken else socket_path
    away = moved.with_name("away")
    with driver.connect(served.address) as device, contextlib.ExitStack() as stack:
        moved.rename(away)
        stack.callback(away.rename, moved)
        if "another" in taken:
            stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)).bind(served.address)
        told = f"its socket {served.address} is no longer there, so no new client can connect: start the device again\n"
        assert served.get("/healthz") == (503, told)
        assert device.call("turns", timeout=PATIENCE)
    assert served.get("/healthz") == (200, "ok\n")


@pytest.mark.integration
def test_health(served):
    """/healthz and `burst serve --check` say that the device answers; while its engine hangs, that it does not."""
    check = ["serve", "--check", served.address]
    assert served.get("/healthz") == (200, "ok\n")
    assert CliRunner().invoke(command, check).output.startswith("reference, version")
    with driver.connect(served.address) as device:
        engine = HeldProcess(device.engine_pid)
    engine.signal(signal.SIGSTOP)
    try:
        assert served.get("/healthz") == (503, f"it did not answer within {health.WITHIN:g} s\n")
        with pytest.raises((driver.DeviceFailed, TimeoutError), match=r"within 0\.\d+ s|no answer"):
            probe.check(served.address, 0.1)
    finally:
        engine.signal(signal.SIGCONT)
        os.close(engine.fd)
    assert served.get("/healthz") == (200, "ok\n")
    assert served.get("/else") == (404, "try /metrics or /healthz\n")


def test_nothing_served_is_not_healthy(tmp_path):
    """`burst serve --check` exits with 1 and the reason where nothing is served."""
    done = CliRunner().invoke(command, ["serve", "--check", str(tmp_path / "x.sock")])
    assert done.exit_code == 1
    assert "no device is served there; start it" in done.stderr


def test_a_burst_that_lies(kit):
    """Whatever a client writes into its notes costs it its own sample, and no scrape."""
    stages = StageHistogram()
    with driver.connect("reference") as device, device.prepare(kit.add_model()) as prepared, prepared.burst() as burst:
        burst.run(X)
        notes = controller_of(burst).trace.memory.asarray()
        notes[:] = np.random.default_rng(3).integers(0, 256, notes.size, np.uint8)
        notes.view(np.uint64)[-2048:] = 2**63
        stages.look(device.traces())
    assert sum(stages._seconds.values()) < 3600 * 7 * 256


def test_only_for_its_own_account():
    """Another account cannot ask for the figures of all."""
    with pytest.raises(driver.InvalidArgument, match="only the device's own account and root"):
        Engine.figures(SimpleNamespace(), os.getuid() + 1, None)


class _Wrong:
    """A device whose sums are wrong."""

    def supported_operations(self, _):
        return [True]

    def prepare(self, _, **__):
        return contextlib.nullcontext(self)

    def run(self, x, **_):
        return (x + 1,)

    def burst(self):
        burst = SimpleNamespace(run=lambda x, **_: SimpleNamespace(outputs=(x,)))
        return contextlib.nullcontext(burst)


def test_a_wrong_sum_fails_the_self_test():
    """A device that computes wrongly is found out before it is called ready."""
    with pytest.raises(driver.DeviceFailed, match=r"the device computed .* = \[1.0"):
        health.self_test(_Wrong())


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost:70000", ":", "1.2.3.4:x", "::1:80"])
def test_addresses_that_are_none(address):
    """What is no address is told with an example."""
    with pytest.raises(driver.DeviceFailed, match=r"give HOST:PORT, such as 127\.0\.0\.1:9464"):
        metrics_server.listen(address)


def test_places_that_are_taken(tmp_path):
    """A port or a path that somebody uses is not taken from him; a socket that nobody listens at any more is."""
    path = tmp_path / "m.sock"
    with metrics_server.listen("127.0.0.1:0") as one, pytest.raises(driver.DeviceFailed, match="cannot listen there"):
        metrics_server.listen(metrics_server.where(one).split("/")[2])
    first = metrics_server.listen(str(path))
    with pytest.raises(driver.DeviceFailed, match="in use"):
        metrics_server.listen(str(path))
    first.close()
    with metrics_server.listen(str(path)) as again:
        assert metrics_server.where(again) == str(path)
    path.unlink()
    path.write_text("mine")
    with pytest.raises(driver.DeviceFailed):
        metrics_server.listen(str(path))
    assert path.read_text() == "mine"


def test_more_than_some_at_once(served, kit):
    """Whoever connects and says nothing does not keep others from an answer: too many of them are turned away."""
    with contextlib.ExitStack() as stack:
        mute = [stack.enter_context(socket.create_connection(("127.0.0.1", served.port))) for _ in range(12)]
        kit.until(lambda: len(select.select(mute, [], [], 1)[0]) >= 4)
    kit.until(lambda: _is_ok(served))


def _is_ok(served, path="/healthz"):
    try:
        return served.get(path)[0] == 200
    except ConnectionError:  # their threads have not ended yet
        return False


# ---- clients that hold connections


SLOW = """
import os, select, socket, sys
"".encode("idna")  # loaded while its file can be read
os.setuid(int(sys.argv[4]))
address = ("127.0.0.1", int(sys.argv[1]))
open_, closed = [], 0
def connect():
    sock = socket.create_connection(address)
    sock.sendall(b"GET /hea")
    open_.append(sock)
for _ in range(int(sys.argv[2])):
    connect()
print("ready", flush=True)
while True:
    for sock in select.select(open_, [], [], float(sys.argv[3]))[0]:
        open_.remove(sock)
        sock.close()
        connect()
    for sock in open_:
        try:
            sock.send(b"x")
        except OSError:
            pass
"""


@contextlib.contextmanager
def slow_clients(port, count, uid, every=3.0):
    """A process that holds so many connections, sends a byte on each every few seconds, and replaces those that end."""
    words = [sys.executable, "-S", "-c", SLOW, str(port), *map(str, (count, every, uid))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd="/") as process:
        try:
            assert process.stdout.readline() == b"ready\n"
            yield
        finally:
            process.kill()


@pytest.mark.integration
@pytest.mark.parametrize("count", [8, 40])
@pytest.mark.parametrize("is_foreign", [False, True], ids=["own account", "another account"])
def test_clients_that_send_a_byte_now_and_then(served, kit, count, is_foreign):
    """However many connections send a byte every 3 s, of the same account or another, every probe is answered; on a
    busy machine when it asks again: another connection may take its place before its request is there.
    """
    if is_foreign and os.geteuid():
        pytest.skip("only root can start processes of other accounts")
    with slow_clients(served.port, count, 12345 if is_foreign else os.getuid()):
        for _ in range(20):
            kit.until(lambda: _is_ok(served))
            kit.until(lambda: _is_ok(served, "/metrics"))


@contextlib.contextmanager
def in_this_process(monkeypatch, trouble=lambda: ""):
    """The server alone, with a deadline of half a second; its port."""
    monkeypatch.setattr("driver.service.metrics_server.PATIENCE", 0.5)
    handler = type("Handler", (metrics_server._Handler,), {"trouble": staticmethod(trouble)})
    with metrics_server._Server(metrics_server.listen(":0"), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.socket.getsockname()[1]
        finally:
            server.shutdown()
            thread.join()


def test_a_request_has_a_total_deadline(monkeypatch):
    """A client that goes on sending, a byte at a time, is cut off at the deadline all the same."""
    with (
        in_this_process(monkeypatch) as port,
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as sock,
        at_least(0.4),
        contextlib.suppress(ConnectionError),
    ):
        while not select.select([sock], [], [], 0.02)[0]:  # it has been closed then
            sock.sendall(b"G")


def test_scrapes_leave_room_for_health(monkeypatch):
    """While as many scrapes hang as may run at once, the next is told so, and /healthz answers."""
    go_on, began = threading.Event(), threading.Semaphore(0)

    def hang(_):
        began.release()
        go_on.wait(20)

    monkeypatch.setattr(metrics_server.MetricsHandler, "do_GET", hang)
    with in_this_process(monkeypatch) as port:
        monkeypatch.setattr("driver.service.metrics_server.PATIENCE", 20.0)
        server = Served(port=port)
        scrapes = [threading.Thread(target=_scrape, args=(server,)) for _ in range(4)]
        try:
            for scrape in scrapes:
                scrape.start()
                assert began.acquire(timeout=20)
            assert server.get("/metrics") == (503, "4 scrapes are running; ask again\n")
            assert server.get("/healthz") == (200, "ok\n")
        finally:
            go_on.set()
            for scrape in scrapes:
                scrape.join()


def test_a_complete_request_keeps_its_place(monkeypatch):
    """Where all places are of requests that are complete, a newcomer of another account gets none of them."""
    go_on, began = threading.Event(), threading.Semaphore(0)

    def trouble():
        began.release()
        go_on.wait(20)
        return ""

    accounts = iter("aab")
    monkeypatch.setattr(metrics_server, "MOST", 2)
    monkeypatch.setattr(metrics_server, "MOST_OF_ACCOUNT", 2)
    monkeypatch.setattr(metrics_server, "account_of", lambda _: next(accounts))
    with in_this_process(monkeypatch, trouble) as port, ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr("driver.service.metrics_server.PATIENCE", 20.0)
        server = Served(port=port)
        try:
            asked = [pool.submit(server.get, "/healthz") for _ in range(2)]
            for _ in asked:
                assert began.acquire(timeout=20)
            with pytest.raises((http.client.HTTPException, ConnectionError)):
                server.get("/healthz")
        finally:
            go_on.set()
        assert [each.result() for each in asked] == [(200, "ok\n")] * 2


def _scrape(server):
    with contextlib.suppress(http.client.HTTPException, OSError):
        server.get("/metrics")


def test_no_account_takes_the_place_of_another():
    """An account with many connections loses its own oldest; requests that are complete are not cut off."""
    limiter, ended = PeerLimiter(most=4, most_of_account=3), []
    mine = [limiter.enter("a", partial(ended.append, n)) for n in range(3)]
    assert limiter.enter("b", lambda: ended.append("b"))
    assert limiter.enter("a", lambda: ended.append(3))
    assert ended == [0]
    mine[1].work()
    assert limiter.enter("c", lambda: ended.append("c"))
    assert ended == [0, 2]
    limiter.leave(mine[1])
    assert limiter.enter("a", lambda: ended.append(4))
    assert ended == [0, 2]


def test_an_account_that_comes_takes_the_place_of_one_with_many():
    """What waits for its peer yields at once to another account, and to its own account after its time; work never."""
    limiter, ended = PeerLimiter(most=6, most_of_account=3), []
    crowd = [limiter.enter(account, partial(ended.append, (account, n))) for account in "ab" for n in range(3)]
    for visit in crowd:
        visit.wait(1e6, yields_in=1e6)
    crowd[0].work()
    assert not limiter.enter("a", lambda: None)
    for evicted in (("a", 1), ("b", 0)):
        limiter.enter("c", lambda: None).wait(1e6, yields_in=1e6)
        assert ended[-1] == evicted
    assert not limiter.enter("c", lambda: None)  # it has as many as the others now
    limiter.leave(crowd[1])
    limiter.leave(crowd[0])
    assert limiter.enter("a", lambda: None)


def test_connections_are_told_apart_by_account(tmp_path):
    """The kernel tells whose connection it is at a socket with a path; over TCP it is the machine's."""
    ends = [
        ("127.0.0.1:0", socket.AF_INET, "127.0.0.1"),
        ("[::1]:0", socket.AF_INET6, "::1"),
        (str(tmp_path / "m"), socket.AF_UNIX, os.getuid()),
    ]
    for address, family, account in ends:
        try:
            listener = metrics_server.listen(address)
        except driver.DeviceFailed:
            assert family == socket.AF_INET6
            continue
        with listener, socket.socket(family, socket.SOCK_STREAM) as client:
            client.connect(listener.getsockname())
            with listener.accept()[0] as connection:
                assert account_of(connection) == account


def test_no_descriptor_reaches_the_metrics(tmp_path):
    """The kernel refuses a message with descriptors at the socket of the metrics, whose threads serve all accounts."""
    with metrics_server.listen(str(tmp_path / "m")) as listener, socket.socket(socket.AF_UNIX) as client:
        if not refuse_descriptors(client):
            pytest.skip("before Linux 6.16 the kernel cannot refuse descriptors")
        client.connect(listener.getsockname())
        with pytest.raises(PermissionError):
            socket.send_fds(client, [b"x"], [0])
        client.send(b"x")


@pytest.mark.integration
@pytest.mark.parametrize("under", [(), older_kernel.UNDER], ids=["", "older kernel"])
def test_a_descriptor_that_takes_an_hour_to_close_holds_nobody(accounts, kit, under):
    """One account sends lingering sockets to the metrics, in requests and in place of some, more often than there are
    places; another one is told how the device is, as before.
    """
    with foreign("--group", GROUP, "--metrics", "{home}/metrics.sock", under=under) as (address, _):
        where = str(Path(address).parents[1] / "metrics.sock")
        hostile, other = accounts[:2]
        kit.until(lambda: other.do(f"where = {where!r}", IS_HEALTHY) == "HTTP/1.0 200 OK")
        said = hostile.do(LINGERS, f"where = {where!r}", SENDS_TO_METRICS)
        assert said == 0 if under else said in {0, 100}
        assert other.do(f"where = {where!r}", IS_HEALTHY) == "HTTP/1.0 200 OK"
        assert other.do(f"where = {where!r}", IS_HEALTHY) == "HTTP/1.0 200 OK"


SENDS_TO_METRICS = """
refused, held = 0, []
for n in range(100):
    slow, unread = lingering()
    held.append(unread)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(where)
        try:
            socket.send_fds(sock, [b"GET /healthz HTTP/1.0\\r\\n\\r\\n" if n % 2 else b"x"], [slow.fileno()])
        except PermissionError:
            refused += 1
        except BrokenPipeError:  # there is no place for so many of one account
            pass
        threading.Thread(target=os.close, args=(slow.detach(),), daemon=True).start()
out = refused
"""
IS_HEALTHY = """
import socket, struct
with socket.socket(socket.AF_UNIX) as sock:
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # also of a connection for which there is no room yet
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 60, 0))
    sock.connect(where)
    sock.sendall(b"GET /healthz HTTP/1.0\\r\\n\\r\\n")
    with sock.makefile("rb") as answer:
        out = answer.read().decode().partition("\\r\\n")[0]
"""


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "::"])
def test_a_name_at_any_address(host):
    """What counts is the address that the connection came to, not that at which the server listens."""
    how = {"family": socket.AF_INET6, "dualstack_ipv6": True} if ":" in host else {}
    with (
        socket.create_server((host, 0), **how) as listener,
        socket.create_connection(("127.0.0.1", listener.getsockname()[1])),
        listener.accept()[0] as connection,
    ):
        assert is_misaddressed("evil.example", connection)
        assert not is_misaddressed("127.0.0.1:8", connection)
