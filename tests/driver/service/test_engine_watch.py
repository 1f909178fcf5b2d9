"""What an engine's runtime takes: measured, bounded, and told to the clients of that engine alone."""

import asyncio
import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from served_devices import GROUP, foreign
from waiting import PATIENCE, until
from worded_files import FILER, ONE, X, file_model

import driver
from burst import ErrorStatus, MissedDeadlineTransient, ResourceExhaustedPersistent, ResourceExhaustedTransient
from driver import libc
from driver.engine.limits import ENGINE_BYTES, NO_LIMIT, Limits, limits, memory_bytes
from driver.protocol.ledger_report import LedgerReport
from driver.service import engine_watch
from driver.service.trials import PatientTrial, TrialPlaces
from fmq import clock
from fmq.closing import Closing

MOST = "client_bytes = 16777216\nengine_bytes = 150994944\n"
HELPERS = str(Path(__file__).parents[1])
TAKES = "of memory, and was ended: 167772160 are allowed"


@pytest.fixture
def filer(place, monkeypatch, tmp_path):
    """A device whose engine may take 160 MiB, and its only client."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / ".config/burst/limits.toml"
    path.parent.mkdir(parents=True)
    path.write_text(MOST)
    with driver.connect(FILER) as device:
        yield device


WAYS = {
    "run": lambda prepared, _, x: prepared.run(x),
    "burst": lambda _, burst, x: burst.run(x).outputs,
    "submit": lambda _, burst, x: burst.submit(x).result().outputs,
    "run_async": lambda prepared, _, x: asyncio.run(prepared.run_async(x)),
    "burst.run_async": lambda _, burst, x: asyncio.run(awaited(burst, x)),
}


async def awaited(burst, x):
    return (await burst.run_async(x)).outputs


@pytest.mark.parametrize(
    ("way", "recover"),
    [("run", False), ("run_async", False), *product(("burst", "submit", "burst.run_async"), (False, True))],
)
def test_told_as_resources(filer, process, way, recover):
    """The client of a runtime that takes too much is told so, with the figures and the setting, as of any resource; and
    goes on, by the same objects, with another engine.
    """
    engine, run = process(filer.engine_pid), WAYS[way]
    with filer.prepare(file_model("one:take")) as prepared, prepared.burst(recover=recover) as burst:
        assert (run(prepared, burst, X)[0] == 1).all()
        for _ in range(2):
            with pytest.raises(ResourceExhaustedPersistent, match=f"{TAKES}.*raise engine_bytes in ") as caught:
                run(prepared, burst, ONE)
            assert caught.value.status == ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT
            assert engine.has_ended()
            engine = process(engine_of(prepared))
        if recover or "burst" not in way:
            assert (run(prepared, burst, X)[0] == 1).all()
        with prepared.burst() as another:
            assert (another.run(X).outputs[0] == 1).all()


@pytest.mark.parametrize("way", ["execute", "execute_async", "burst.execute", "execute_fenced"])
def test_told_as_a_status(filer, kit, way):
    """Whoever asks for a result, as a driver does, gets that status; the same request succeeds afterwards."""
    with filer.prepare(file_model("one:take")) as prepared, prepared.burst() as burst:
        ways = {"execute": prepared.execute, "execute_async": prepared.execute_async, "burst.execute": burst.execute}
        for _ in range(2):
            request, _ = kit.request([ONE], 16)
            if way == "execute_fenced":
                execution = prepared.execute_fenced(request)
                with pytest.raises(ResourceExhaustedPersistent, match=TAKES):
                    execution.result(PATIENCE)
                continue
            result = ways[way](request)
            result = result.result(PATIENCE) if way == "execute_async" else result
            assert result.status == ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT
            assert TAKES in result.message
        request, _ = kit.request([X], 16)
        assert prepared.execute(request).status == 0


def engine_of(prepared):
    """The engine where it is prepared from now on."""
    return prepared.present_home().connection.engine_pid


def test_prepare(filer, process):
    """A preparation is told so, too, and the next one succeeds."""
    engine = process(filer.engine_pid)
    with pytest.raises(ResourceExhaustedPersistent, match=r"it took .*; they may take 167772160 together"):
        filer.prepare(file_model("load:take"))
    with filer.prepare(file_model("another")) as prepared:
        assert (prepared.run(X)[0] == 1).all()
    assert not engine.has_ended(0)  # it was the trial that took it


def test_trials_at_once(filer, tmp_path):
    """Trials share what one engine may take: of three that take two fifths of it each, the largest is ended, and takes
    place once more when the others have ended. Every file is loaded.
    """

    def trials():
        return sum(len(server.children()) for server in psutil.Process(filer.service_pid).children())

    def loads():
        return (tmp_path / "loads").stat().st_size if (tmp_path / "loads").exists() else 0

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        devices = [stack.enter_context(driver.connect(FILER)) for _ in range(3)]
        asked = [pool.submit(device.prepare, file_model(f"load:part {n}")) for n, device in enumerate(devices)]
        until(lambda: loads() == 3)
        until(lambda: trials() == 2)
        (tmp_path / "enough").touch()
        assert [(each.result().run(X)[0] == 1).all() for each in asked] == [True] * 3
    assert loads() == 2 * 3 + 1


class ScriptedTrial(Closing):
    """A trial that is ended, while it loads or runs, for what several took together."""

    def __init__(self, ended):
        self.ended = ended

    def wait_until_loaded(self, _):
        self.go_through("load")

    def wait_until_run(self):
        self.go_through("run")

    def go_through(self, step):
        if step == self.ended:
            raise ResourceExhaustedTransient("others took much at the same time")

    def close(self):
        pass


class TestPatientTrial:
    """A trial that is ended for what several took together."""

    @pytest.mark.parametrize("ends", list(product(["load", "run"], [None, "load", "run"])))
    def test_a_second_time(self, ends):
        """It takes place twice; its client is told so only where it is ended alone, too."""
        begun = iter([*ends, None])
        again = contextlib.nullcontext() if ends[1] is None else pytest.raises(ResourceExhaustedTransient)
        with PatientTrial(lambda: ScriptedTrial(next(begun)), TrialPlaces(), None) as trial, again:
            trial.wait_until_loaded()
            trial.wait_until_run()
        assert len(list(begun)) == 1

    def test_a_second_time_it_is_alone(self):
        """It waits until the others of its account have ended, and no longer than it has time; others wait for it."""
        places, begun = TrialPlaces(), iter(["load", None])
        with places.held(None, alone=False):
            late = PatientTrial(lambda: ScriptedTrial(next(begun)), places, clock.now() + 10**7)
            with late, pytest.raises(MissedDeadlineTransient):
                late.wait_until_loaded()
        assert len(list(begun)) == 1
        with places.held(None, alone=True), pytest.raises(MissedDeadlineTransient):
            places.held(clock.now(), alone=False).__enter__()
        with places.held(clock.now(), alone=True):  # all are free
            pass


def test_several_clients(filer):
    """Where an engine has several clients, each may succeed when it tries again: all are told so."""
    with (
        driver.connect(FILER) as second,
        second.prepare(file_model("a neighbour")) as neighbour,
        neighbour.burst(recover=True) as burst,
        filer.prepare(file_model("one:take")) as prepared,
    ):
        assert (burst.run(X).outputs[0] == 1).all()
        assert filer.engine_pid == second.engine_pid
        with pytest.raises(ResourceExhaustedTransient, match="was ended: 184549376 are allowed"):
            prepared.run(ONE)
        with contextlib.suppress(ResourceExhaustedTransient):
            burst.run(X)
        assert (burst.run(X).outputs[0] == 1).all()


def test_it_is_in_the_ledger(filer, kit):
    """The memory of an engine is a figure of its account, with its limit."""

    def held():
        report = LedgerReport.read(filer.call, "service")
        (row,) = (row for row in report.rows if row.application is None)
        assert report.limits["engine_bytes"].account > ENGINE_BYTES
        return row.held.get("engine_bytes", 0)

    kit.until(lambda: 2**20 < held() < 160 << 20)


def test_another_account_notices_nothing(accounts):
    """The engine of one account is ended and begun again; the other's is the same, and so is the burst on it."""
    words = f"import sys; sys.path.insert(0, {HELPERS!r})", "from worded_files import *"
    with foreign("--group", GROUP, device=FILER, limits=MOST) as (address, broker):
        friend, other = accounts[:2]
        for client in (friend, other):
            prepared = "prepared = device.prepare(file_model('one:take')); burst = prepared.burst()"
            assert client.do(*words, f"device = driver.connect({address!r})", prepared) is None
        pids, run = "out = device.service_pid, device.engine_pid", "out = burst.run(X).outputs[0].tolist()"
        its, before = other.do(pids), friend.do(pids)
        assert friend.do(run) == other.do(run) == [1] * 4
        assert TAKES in other.do("prepared.run(ONE)")
        assert friend.do(run) == [1] * 4
        assert friend.do(pids) == before
        assert other.do("out = prepared.run(X)[0].tolist()") == [1] * 4
        assert other.do(pids)[1] != its[1]
        assert broker.poll() is None
        assert [client.do("device.close()") for client in (friend, other)] == [None, None]


class TestLimit:
    """What the engine of an account may take."""

    def test_by_clients(self):
        """What its clients may take, all of them what the account may, and what the engine may besides."""
        limits = Limits(client_bytes=10, device_bytes=100, account_bytes=25, engine_bytes=7)
        assert [limits.engine_most(clients) for clients in (0, 1, 2, 3, 1000)] == [17, 17, 27, 32, 32]

    def test_of_a_device_of_ones_own(self, place, monkeypatch, tmp_path):
        """A device that serves its own account alone may have all memory but an eighth, if limits.toml says nothing."""
        monkeypatch.setenv("HOME", str(tmp_path))
        most, memory = limits(is_own=True).engine_most, memory_bytes()
        assert most(1) == most(100) == memory - memory // 8
        assert limits().engine_most(1) == memory // 4 + max(memory // 4, ENGINE_BYTES)
        with driver.connect("reference") as device:
            assert LedgerReport.read(device.call, "service").limits["engine_bytes"].account == memory - memory // 8
        path = tmp_path / ".config/burst/limits.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(MOST)
        assert limits(is_own=True).engine_most(1) == 160 << 20


class TestTimers:
    """What the watch waits with between two looks."""

    @pytest.mark.parametrize("missing", [[], ["_timer_create"], ["_timer_create", "_timer_settime"]])
    def test_none_in_the_c_library(self, monkeypatch, missing):
        """It goes on looking where the C library has no such timers."""
        for name in missing:
            monkeypatch.setattr(engine_watch, name, None)
        ended, rows, most = threading.Event(), [], iter([NO_LIMIT, NO_LIMIT, 0])
        account = SimpleNamespace(note=lambda _, found: rows.append(found))
        limits = SimpleNamespace(engine_most=lambda _: next(most))
        watch = engine_watch.EngineWatch(os.getpid(), limits, account, lambda *_: ended.set())
        watch.start()
        until(lambda: sum(range(1000)) and ended.is_set())  # it looks when this process has used time
        assert len(rows) == 3

    def test_of_an_older_c_library(self, monkeypatch):
        """They are found where glibc had them before 2.34, in librt."""
        monkeypatch.setattr(libc, "library", SimpleNamespace())
        assert libc.function("timer_create", "void *")
        assert not libc.function("no_such_function", "void *")
