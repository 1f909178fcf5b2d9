"""`burst top`: bursts of real processes, seen from outside."""

import contextlib
import dataclasses
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from inside import controller_of
from rich.console import Console, Group

import driver
from burst import MissedDeadlinePersistent, Timeout
from burst.trace import STAGES
from driver.cli.command import burst as command
from driver.cli.top import COLUMNS, view
from driver.client import discovery
from driver.monitor import Watcher

X = np.ones((1, 4), np.float32)
TOP = [sys.executable, "-m", "driver.cli", "top"]
SLOW = "burst_test_devices.odd:Slow"


@contextlib.contextmanager
def bursts_of(device, kit, count=1, priority="medium", **options):
    """Of this process."""
    with device.prepare(kit.add_model(), priority=priority) as prepared, contextlib.ExitStack() as stack:
        yield [stack.enter_context(prepared.burst(**options)) for _ in range(count)]


def shown(sample, sort="rate", width=80, height=None):
    """The lines on a terminal of that size."""
    out = io.StringIO()
    Console(width=width, height=height or 500, file=out).print(Group(*view(sample, sort, width, height)))
    return out.getvalue().splitlines()


# ---- figures


@pytest.mark.integration
def test_figures_agree_with_what_the_client_measured(place, client):
    """Rate, median and 99th percentile of a client in another process, and where its time went."""
    peer = client(SLOW)
    peer.run([0.0])
    watcher = Watcher([SLOW])
    frames = [0.05] * 2 + [0.01] * 38
    took = peer.run(frames)
    sample = watcher.sample()
    (found,) = sample.bursts
    p50, p99 = np.percentile(took, [50, 99])
    assert 0 < found.rate <= len(frames) / sum(frames)  # what was watched is longer than the requests took
    assert found.latency.p50 == pytest.approx(p50, rel=0.1)
    assert found.latency.p99 == pytest.approx(p99, rel=0.1)
    assert found.stages.keys() == set(STAGES)
    assert 10e3 <= found.stages["execute"].p50 <= found.latency.p50
    assert (found.pid, found.program[:6], found.program[-3:], found.model) == (peer.pid, "python", " -c", "ADD")
    assert (found.results, found.in_flight, found.queued, found.path) == (len(frames) + 1, 0, 0, "burst")
    assert found.device_cpu < 0.5 > found.client_cpu


def test_the_application_of_a_burst_is_seen(place, kit):
    """As it was declared, whole in the figures, and in the table of a wide terminal."""
    name = "é" * 99 + "!"  # longer than the notes have room for
    with (
        driver.connect(application="camera") as one,
        driver.connect(application=name) as other,
        bursts_of(one, kit),
        bursts_of(other, kit),
    ):
        sample = Watcher().sample()
        first, second = sample.bursts
        assert first.application == "camera"
        assert name.endswith(second.application)
        assert len(second.application) > 60
        wide, narrow = (shown(sample, width=width) for width in (100, 80))
        assert any(" camera " in line for line in wide)
        assert not any(" camera " in line for line in narrow)


def test_figures_are_of_the_time_between_two_looks(place, kit):
    """What came before the last look is in no figure but the totals; results of a fast burst are gathered meanwhile."""
    with driver.connect() as device, bursts_of(device, kit, spin=0) as (burst,):
        burst.run(X)
        watcher = Watcher()
        assert watcher.sample().bursts[0].rate == 0
        burst.run(X)
        found, after = watcher.sample().bursts[0], watcher.sample().bursts[0]
        assert (found.results, after.results, found.latency is None) == (2, 2, False)
        assert (after.rate, after.latency, after.path) == (0, None, "")


def test_what_waits_is_seen_where_it_waits(place, kit):
    """Requests in the queue, in flight and unread, and an execution that waits for its turn, by priority."""
    name = kit.odd("Single")
    with (
        driver.connect(name) as device,
        bursts_of(device, kit, depth=4, priority="low") as (low,),
        bursts_of(device, kit, priority="high") as (high,),
    ):
        for burst in (low, high):
            burst.run(0 * X)
        watcher = Watcher()
        futures = [low.submit(0.2 * X) for _ in range(3)]
        kit.until(lambda: any(found.queued == 2 for found in watcher.sample().bursts))
        urgent = high.submit(0 * X)
        kit.until(lambda: watcher.sample().devices[0].run_queue["high"].waiting)
        found = {burst.priority: burst for burst in watcher.sample().bursts}
        assert found["high"].is_waiting
        assert not found["low"].is_waiting
        assert (found["low"].in_flight, found["low"].depth, found["high"].in_flight) == (3, 4, 1)
        for future in (urgent, *futures):
            future.result()
        queues = watcher.sample().devices[0].run_queue
        assert [queues[name].bursts for name in ("high", "medium", "low")] == [1, 0, 1]
        assert queues["high"].waits_per_s > 0 < queues["high"].waited
        assert queues["high"].waiting == queues["low"].waiting == 0


def test_what_is_lost_is_counted(place, kit):
    """Timeouts, requests that were cancelled or replaced, and what went the plain path."""
    with driver.connect(SLOW) as device, bursts_of(device, kit, policy="latest") as (burst,):
        burst.run(0 * X)

        def times_out():  # a busy device says that it came too late
            with pytest.raises((Timeout, MissedDeadlinePersistent)) as caught:
                burst.run(0.1 * X, timeout=0.01)
            return "no result within" in str(caught.value)

        kit.until(times_out)
        futures = [burst.submit(0.05 * X) for _ in range(4)]
        futures[-1].result()
        watcher = Watcher()
        found = watcher.sample().bursts[0]
        figures = burst.stats()
        assert (found.drops, found.timeouts) == (figures["drops"], figures["timeouts"])
        assert found.drops > 0 < found.timeouts


# ---- what comes and goes


def test_bursts_come_and_go(place, kit):
    """A new burst gets a row, and loses it when it is closed; each has one number for all who look."""
    watcher = Watcher()
    assert watcher.sample().devices == []
    with driver.connect() as device, bursts_of(device, kit, 2):
        kit.until(lambda: len(watcher.sample().bursts) == 2)
        numbers = {burst.number for burst in watcher.sample().bursts}
        assert numbers == {burst.number for burst in Watcher().sample().bursts}
        with bursts_of(device, kit, 40):
            kit.until(lambda: len(watcher.sample().bursts) == 42)
            assert {burst.number for burst in watcher.sample().bursts} > numbers
        kit.until(lambda: {burst.number for burst in watcher.sample().bursts} == numbers)
        assert watcher.sample().devices[0].bursts == 2


@pytest.mark.integration
def test_a_killed_client_has_no_row(place, client, kit):
    """kill -9 of a client takes its row away, and leaves the others'."""
    victim, other = client(), client()
    watcher = Watcher()
    assert {burst.pid for burst in watcher.sample().bursts} == {victim.pid, other.pid}
    victim.process.kill()
    kit.until(lambda: {burst.pid for burst in watcher.sample().bursts} == {other.pid})
    kit.until(lambda: watcher.sample().devices[0].clients == 1)


@pytest.mark.integration
def test_a_killed_device_is_gone(place, client, kit, process):
    """And the one that is started after it is found."""
    client()
    watcher = Watcher()
    (device,) = watcher.sample().devices
    engine = process(device.engine_pid)
    engine.kill()
    assert engine.has_ended()
    assert watcher.sample().devices == []
    kit.until(lambda: not place.pids())
    again = client()
    kit.until(lambda: [burst.pid for burst in watcher.sample().bursts] == [again.pid])
    assert watcher.sample().devices[0].engine_pid != device.engine_pid


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ([], "No device of this account is running"),
        (["litert"], "not running; it starts with its first client"),
    ],
)
def test_nobody_is_started(place, devices, words):
    """Without devices it says so, and what to do; a device that is named and does not run is not started either."""
    found = CliRunner().invoke(command, ["top", "--every", "0.1", "--count", "1", *devices])
    assert (found.exit_code, words in found.output) == (0, True), found.output
    assert place.pids() == place.files() == []


@pytest.mark.integration
def test_a_device_that_does_not_answer_is_told(place, client, monkeypatch):
    """Who listens and says nothing is given up after a while, and named; the others are shown."""
    monkeypatch.setattr("driver.monitor.device._PATIENCE", 0.1)
    with discovery.listen(discovery.Place(place.path, "mute")):
        peer = client()
        watcher = Watcher()
        sample = watcher.sample()
        assert list(sample.absent) == ["mute"]
        assert [burst.pid for burst in sample.bursts] == [peer.pid]
        assert shown(sample)[0].startswith("mute: ")
    (place.path / "mute.sock").unlink()
    assert watcher.sample().absent == {}


@pytest.mark.integration
def test_nobody_is_kept_from_ending(place, kit):
    """Who looks on is no client: a device whose clients have left ends while it is looked at."""
    watcher = Watcher()
    with driver.connect() as device, bursts_of(device, kit):
        kit.until(lambda: watcher.sample().bursts)
        kit.until(lambda: watcher.sample().devices[0].clients == 1)
    kit.until(lambda: not watcher.sample().devices)
    kit.until(lambda: not place.pids())


def test_looking_wakes_nobody(place, kit):
    """A hundred looks, and no thread of the device has been woken up."""
    with driver.connect() as device, bursts_of(device, kit, 8, spin=0) as bursts:
        for burst in bursts:
            burst.run(X)
        watcher = Watcher()
        pids = device.service_pid, device.engine_pid

        def woken():
            """Whether the device was, meanwhile: by us, or by a timer of its own."""
            before = switches(pids)
            for _ in range(100):
                watcher.sample()
            return switches(pids) != before

        assert len(watcher.sample().bursts) == 8
        assert not all(woken() for _ in range(5))


def switches(pids):
    """How often the threads of processes have gone to sleep, by thread; one may end while we look."""
    found = {}
    for task in [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found[task.name] = re.search(r"^voluntary.*", (task / "status").read_text(), re.MULTILINE)[0]
    return found


@pytest.mark.integration
def test_a_served_device_by_its_path(place, tmp_path, client):
    """It is found by the path of its socket, and not without it."""
    folder = Path(f"{place.path}-home")
    words = [sys.executable, "-m", "driver.cli", "serve", "reference", "--dir", str(folder)]
    folder.mkdir(mode=0o700)
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd="/") as server:
        server.stdout.readline()
        try:
            path = f"{folder}/reference.sock"
            peer = client(path)
            assert [(burst.pid, burst.device) for burst in Watcher([path]).sample().bursts] == [(peer.pid, path)]
            assert Watcher().sample().devices == []
        finally:
            server.terminate()


def test_a_client_that_writes_rubbish(place, kit):
    """Whatever a client writes into its trace, its row has figures, and nothing that a terminal would obey."""
    random = np.random.default_rng(5)
    with driver.connect() as device, bursts_of(device, kit, 2) as (burst, victim):
        memory = controller_of(burst).trace.memory.asarray()
        kept = memory.copy()
        watcher = Watcher()
        for _ in range(20):
            memory[24:] = random.integers(0, 256, memory.size - 24, np.uint8)
            sample = watcher.sample()
            assert len(sample.bursts) == 2
            assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", "".join(shown(sample)))
            Watcher().sample()
        memory[:] = kept
        assert burst.run(X).outputs[0].tolist() == victim.run(X).outputs[0].tolist()


# ---- the command


@pytest.mark.integration
def test_64_bursts_fit_the_terminal(place, kit):
    """All lines fit; the first bursts of the order are there, and how many are not."""
    with driver.connect() as device, bursts_of(device, kit, 64) as bursts:
        watcher = Watcher()
        for n, burst in enumerate(bursts):
            for _ in range(n % 8):
                burst.run(X)
        sample = watcher.sample()
    order = [burst.number for burst in sorted(sample.bursts, key=COLUMNS["rate"])]
    for width, height in ((80, 24), (120, 40), (200, 24)):
        lines = shown(sample, "rate", width, height)
        assert len(lines) <= height
        assert max(map(len, lines)) <= width
        (head,) = (n for n, line in enumerate(lines) if "rate/s" in line)
        rows = lines[head + 1 : -1]
        assert lines[-1].strip() == f"… {64 - len(rows)} more"
        assert [int(row.split()[0]) for row in rows] == order[: len(rows)]
        assert len(shown(sample, "rate", width)) - 64 == head + 1
        assert all(stage in "".join(lines) for stage in STAGES)


def test_any_column_sorts(place, kit):
    """Also where there is nothing to compare."""
    with driver.connect() as device, bursts_of(device, kit, 3) as (burst, *_):
        watcher = Watcher()
        burst.run(X)
        sample = watcher.sample()
    for sort in COLUMNS:
        assert len([line for line in shown(sample, sort) if " ADD " in line]) == 3


@pytest.mark.integration
def test_json_lines(place, client):
    """An object per look, a line each, with all that is known."""
    peer = client()
    peer.run([0.0] * 10)
    done = subprocess.run([*TOP, "--json", "--count", "2", "--every", "0.1"], capture_output=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 2
    for found in lines:
        ((device,), (burst,)) = found["devices"], found["bursts"]
        assert (device["address"], device["clients"], device["bursts"]) == ("reference", 1, 1)
        assert device["rss"] > device["pss"] > 10e6
        assert device["run_queue"]["medium"]["bursts"] == 1
        assert (burst["pid"], burst["model"], burst["results"]) == (peer.pid, "ADD", 10)
    assert lines[0]["at"] < lines[1]["at"]


@pytest.mark.integration
def test_what_accounts_hold(place, client, kit):
    """Each account and application has a line if asked, with what it holds of what it may, and has spent."""
    peer = client()
    peer.run([0.0])
    ask = [*TOP, "--accounts", "--count", "1", "--every", "0.1"]

    def in_engine():
        done = subprocess.run([*ask, "--json"], capture_output=True, check=True)
        ((device,),) = [json.loads(line)["devices"] for line in done.stdout.splitlines()]
        (found,) = [row for row in device["accounts"] if row["process"] == "engine" and row["application"] is None]
        return found

    # Of the peer, its burst and the watcher: an engine forgets a connection a moment after its end.
    found = kit.until(lambda: (row := in_engine())["holdings"]["threads"]["held"] == 3 and row)
    assert found["uid"] == os.getuid()
    assert found["holdings"]["life_words"] == {"held": 1, "most": 1860}
    assert found["spent"]["preparing_seconds"] > 0
    words = subprocess.run(ask, capture_output=True, check=True, text=True, env=os.environ | {"COLUMNS": "200"}).stdout
    assert re.search(rf"uid {os.getuid()}: .*life words 1/1860, ", words)
    assert f"uid {os.getuid()} in the service: " in words


@pytest.mark.integration
def test_ctrl_c_ends_it_well(place, client):
    """On a terminal, while it shows a burst: the exit code is 0, and nothing of Python is said."""
    client()
    near, far = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    with subprocess.Popen([*TOP, "--every", "0.1"], stdin=far, stdout=far, stderr=far, env=environment) as process:
        os.close(far)
        said = b""
        while b"ADD" not in said:
            said += os.read(near, 65536)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the terminal is gone with the process
            while more := os.read(near, 65536):
                said += more
    os.close(near)
    assert process.returncode == 0
    assert b"Traceback" not in said


def test_wrong_arguments_are_told(place):
    """With the remedy, and exit code 2."""
    for arguments in (["--sort", "colour"], ["--every", "0"], ["--count", "0"], ["x" * 200]):
        found = CliRunner().invoke(command, ["top", *arguments])
        assert found.exit_code == 2, found.output


@pytest.mark.parametrize("width", [80, 120, 160, 220])
def test_names_come_before_figures(place, kit, width):
    """Where the names of a program and its model do not fit beside all columns, others make room."""
    with driver.connect() as device, bursts_of(device, kit):
        sample = Watcher().sample()
    (burst,) = sample.bursts
    names = {"program": "video_reader.py", "model": "yolov8n_320.onnx", "application": "a" * 64}
    figures = {"pid": 12345, "rate": 0.0, "latency": None, "client_cpu": 0.0, "device_cpu": 0.0}  # each as wide as ever
    sample = dataclasses.replace(sample, bursts=[dataclasses.replace(burst, **names, **figures)])
    head, line = shown(sample, width=width)[-2:]
    assert names["program"] in line
    assert names["model"] in line
    assert max(len(head), len(line)) <= width
    assert ("encode" in head) == (width >= 160)
    assert {"rate/s", "p99", "flight", "lost", "cpu"} <= set(head.split())
