"""While a device rests it gives memory back, and wakes up for nothing; the next request is right."""

import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from inside import programs_of

import driver
from burst.run_queue import Application, RunQueue, Share
from driver.devices.litert import LiteRtDevice
from driver.engine.client import EngineClient
from driver.engine.ledger import Ledger
from driver.engine.limits import limits
from driver.engine.process import IdleMonitor
from driver.interface import BindOptions, Preparation

SIDE = 1 << 22
SECONDS = 0.2


class Worker:
    """Answers when it is told to."""

    def __init__(self):
        self.answered, self.forgotten = 0, 0

    def forget_plans(self):
        self.forgotten += 1


class TestLook:
    """Who lets go, and when."""

    def test_after_a_whole_turn(self):
        """Who has answered nothing between two looks lets go, once; who has, does not."""
        idle, busy = Worker(), Worker()
        rest = IdleMonitor(1.0, lambda: [idle, busy])
        for _ in range(5):
            busy.answered += 1
            assert rest.look()
        assert (idle.forgotten, busy.forgotten) == (1, 0)

    def test_until_nothing_is_held(self):
        """When all have let go there is nothing to look at any more, until one answers again."""
        worker = Worker()
        rest = IdleMonitor(1.0, lambda: [worker])
        assert [rest.look() for _ in range(3)] == [True, False, False]
        worker.answered += 1
        assert [rest.look() for _ in range(3)] == [True, False, False]
        assert worker.forgotten == 2

    def test_nobody(self):
        """Without workers there is nothing to look at."""
        assert not IdleMonitor(1.0, list).look()


@pytest.fixture
def quick(place, monkeypatch, tmp_path):
    """Devices that start from now on rest after a fifth of a second."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / ".config/burst/limits.toml"
    path.parent.mkdir(parents=True)
    path.write_text(f"idle_seconds = {SECONDS}\n")


def wide_model():
    """(4 x + 4 x) in the first element, over temporaries of 16 MB each."""
    builder = driver.ModelBuilder()
    x = builder.operation("TILE", builder.input("float32", (1,)), np.array([SIDE], np.int32))
    for _ in range(3):
        x = builder.operation("ADD", x, x, 0)
    builder.output(builder.operation("SLICE", x, np.array([5], np.int32), np.array([1], np.int32)))
    return builder.build()


def megabytes(pid):
    """Of memory that no file stands behind."""
    found = re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return sum(map(int, found)) / 1024


def mappings(pid):
    """Of memory that clients have handed over, and of models."""
    return sorted(line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd" in line)


@pytest.mark.integration
@pytest.mark.parametrize("way", ["burst", "plain"])
def test_memory_comes_back(quick, kit, way):
    """After a rest the temporaries are gone from the device, what the client handed over is still mapped, and the next
    request is right; twice.
    """
    with driver.connect() as device, device.prepare(wide_model()) as prepared, prepared.burst() as burst:
        run = {"burst": lambda x: burst.run(x).outputs, "plain": prepared.run}[way]
        engine = device.engine_pid
        before = megabytes(engine)
        for value in (1.0, 2.0):
            for _ in range(3):
                assert run(np.array([value], np.float32))[0].tolist() == [8 * value]
            held, there = megabytes(engine), mappings(engine)
            assert held > before + 20
            kit.until(lambda: megabytes(engine) < before + 5)
            assert mappings(engine) == there


def test_others_go_on(quick, kit):
    """A burst that is in use keeps its memory while another one rests."""
    with (
        driver.connect() as device,
        device.prepare(wide_model()) as prepared,
        prepared.burst() as busy,
        prepared.burst() as idle,
    ):
        x = np.ones(1, np.float32)
        empty = megabytes(device.engine_pid)
        busy.run(x)
        one = megabytes(device.engine_pid) - empty
        idle.run(x)

        def idle_has_let_go():
            busy.run(x)
            return megabytes(device.engine_pid) < empty + 1.5 * one

        kit.until(idle_has_let_go)
        assert megabytes(device.engine_pid) > empty + 0.5 * one


def test_worth_it(monkeypatch, tmp_path):
    """A few small requests stay bound; many, and one with large temporaries, are worth giving back."""
    monkeypatch.setenv("HOME", str(tmp_path))
    application = Application(Share(RunQueue(1, 1e-3), 1), "")
    engine = SimpleNamespace(
        clients=set(),
        limits=limits(),
        ledger=Ledger(limits()),
        memory=None,
        real_time=SimpleNamespace(is_given=False),
        application=lambda _: application,
        note=lambda _: None,
    )
    client = EngineClient(engine, 0)
    nothing, few, many = (SimpleNamespace(bound=n) for n in (0, 4, 5))
    client._lane, client._bursts = few, [nothing, many]
    assert client.holders() == [many]
    temporaries = client.quota.room(2**20)
    assert client.holders() == [few, many]
    del temporaries
    assert client.holders() == [many]


def switches(pid):
    """How often threads of a process have gone to sleep."""
    texts = [Path(f"/proc/{pid}/task/{task}/status").read_text() for task in os.listdir(f"/proc/{pid}/task")]
    return sum(int(re.search(r"\nvoluntary_ctxt_switches:\s+(\d+)", text)[1]) for text in texts)


def test_no_wake_ups(quick, kit):
    """A device that has given back everything sleeps: no thread of its engine wakes in several times its idle time."""
    with driver.connect() as device, device.prepare(wide_model()) as prepared, prepared.burst() as burst:
        before = megabytes(device.engine_pid)
        burst.run(np.ones(1, np.float32))
        kit.until(lambda: megabytes(device.engine_pid) < before + 5)

        def sleeps():
            """Whether it does so now; it may be trimming yet at the first looks."""
            counts = switches(device.engine_pid)
            threading.Event().wait(4 * SECONDS)
            return switches(device.engine_pid) == counts

        kit.until(sleeps)
        assert burst.run(np.full(1, 3, np.float32)).outputs[0].tolist() == [24]


def test_programs(monkeypatch, tmp_path, kit):
    """A library's programs for other shapes than the last one's go, and are made again when they are needed."""
    monkeypatch.setenv("HOME", str(tmp_path))
    prepared = LiteRtDevice().prepare(kit.open_model(), Preparation())

    def run(rows):
        x, out = np.ones((rows, 4), np.float32), np.empty(rows * 16, np.uint8)
        prepared.bind([x], [out], BindOptions()).run()
        assert (out.view(np.float32) == 2).all()

    for rows in (1, 2, 3):
        run(rows)
    assert len(programs_of(prepared)) == 3
    prepared.rest()
    assert [shapes[0] for shapes in programs_of(prepared)] == [(3, 4)]
    run(1)
