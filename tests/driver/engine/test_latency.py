"""An open burst is a hint to the machine: given once, for as long as a burst lives, and not for "low_power"."""

import errno
import logging
import os
import struct
import subprocess
import threading
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest

import driver
from driver.engine import utilisation
from driver.engine.client import EngineClient
from driver.engine.latency import DEVICE_FILE, MOST_LATENCY, LatencyHint
from driver.engine.process import IdleMonitor
from driver.engine.utilisation import FULL

X = np.ones((1, 4), np.float32)
USUAL = "fast_single_answer"
ENEMY = """
import signal, sys
import driver
m = driver.ModelBuilder()
x = m.input("float32", (1, 4))
m.output(m.operation("ADD", x, x, 0))
prepared = driver.connect("reference").prepare(m.build())
bursts = [prepared.burst() for _ in range(50)]
print("ready", flush=True)
signal.pause()
"""


@pytest.fixture
def requested(tmp_path):
    """Stands for the device file."""
    file = tmp_path / "cpu_dma_latency"
    file.touch()
    return file


def held(file, pid="self"):
    """How often a process has that file open."""
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(fd))
        except FileNotFoundError:  # the listing's own
            continue
    return links.count(str(file))


class TestIdleStates:
    """The request to the kernel lives as long as its descriptor."""

    def test_one_for_all_bursts(self, requested):
        """A thousand bursts hold one request, from the first that begins to the last that ends, in any order."""
        hint = LatencyHint(requested)
        for _ in range(1000):
            hint.began(USUAL)
        assert held(requested) == 1
        assert struct.unpack("i", requested.read_bytes()) == (MOST_LATENCY,)
        assert [hint.ended("sustained_speed") for _ in range(1000)] == [False] * 999 + [True]
        assert held(requested) == 0

    def test_none_for_low_power(self, requested):
        """Such a burst asks for nothing, and takes nothing back that another one has."""
        hint = LatencyHint(requested)
        hint.began("low_power")
        assert held(requested) == 0
        hint.began(USUAL)
        assert not hint.ended("low_power")
        assert held(requested) == 1
        assert hint.ended(USUAL)
        assert held(requested) == 0

    def test_where_it_may_not_be_opened(self, tmp_path, caplog):
        """Bursts begin and end all the same, and the log says so once."""
        caplog.set_level(logging.DEBUG)
        hint = LatencyHint(tmp_path / "nothing")
        for _ in range(3):
            hint.began(USUAL)
            assert hint.ended(USUAL)
        assert caplog.text.count("change nothing about the idle states") == 1

    def test_threads_that_come_and_go_together(self, requested):
        """Bursts that begin and end in many threads at once leave nothing open."""
        hint, start = LatencyHint(requested), threading.Barrier(8)

        def work():
            start.wait()
            for _ in range(50):
                hint.began(USUAL)
                hint.ended(USUAL)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert held(requested) == 0


class Kernel:
    """Clamps of threads, as a kernel that has them keeps them: a new thread has that of the one that starts it."""

    def __init__(self, monkeypatch):
        self.clamps = {}
        monkeypatch.setattr(utilisation, "least", self.least)
        monkeypatch.setattr(utilisation, "set_least", self.set_least)

    def least(self):
        return self.clamps.get(threading.get_native_id(), 0)

    def set_least(self, value):
        self.clamps[threading.get_native_id()] = value


@pytest.fixture
def kernel(monkeypatch):
    return Kernel(monkeypatch)


class TestClock:
    """The thread that serves a burst, or prepares for it, is clamped to full utilisation meanwhile, and no other."""

    def test_it_gets_back_what_it_had(self, kernel, requested):
        """Its own clamp returns, and nothing is asked of other threads: they might be another program's."""
        hint = LatencyHint(requested)
        kernel.set_least(300)
        with hint.around(USUAL):
            assert list(kernel.clamps.values()) == [FULL]
        assert list(kernel.clamps.values()) == [300]

    def test_low_power_asks_for_none(self, kernel, requested):
        """Nor does one that the bench takes away."""
        with LatencyHint(requested).around("low_power"), LatencyHint(requested, frozenset()).around(USUAL):
            assert not kernel.clamps

    def test_a_kernel_without_clamps(self, kernel, requested, monkeypatch, caplog):
        """The rest of the hint is given, and the log says what is not."""
        caplog.set_level(logging.DEBUG)

        def refuse(value):
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")

        monkeypatch.setattr(utilisation, "set_least", refuse)
        hint = LatencyHint(requested)
        for _ in range(2):
            with hint.around(USUAL):
                hint.began(USUAL)
                assert held(requested) == 1
                assert hint.ended(USUAL)
        assert caplog.text.count("change nothing about the clock: [Errno 95] Operation not supported") == 1

    def test_a_burst_whose_end_fails_gives_back_the_rest(self):
        """What fails is raised; its claim and its hint have ended all the same."""
        client, hints, claim, burst = (MagicMock() for _ in range(4))
        client._engine.burst_ended.side_effect = OSError(errno.EMFILE, "Too many open files")
        with pytest.raises(OSError, match="Too many"):
            EngineClient._burst_ended(client, hints, claim, burst)
        assert (hints.ended.call_count, claim.give_back.call_count) == (1, 1)

    def test_the_kernel_itself(self):
        """Where this kernel has clamps, a thread has one meanwhile; where it has none, it says so."""
        before, found, why = utilisation.least(), None, None
        try:
            with utilisation.clamped():
                found = utilisation.least()
        except OSError as error:
            why = error.errno
        assert (found, why) in {(FULL, None), (None, errno.EOPNOTSUPP)}
        assert utilisation.least() == before


class TestArenas:
    """Free memory stays the process's while a burst lives."""

    def test_it_is_trimmed_afterwards(self, monkeypatch, requested, kit):
        """A look that finds nothing to drop trims, but not while a burst lives."""
        trimmed, looked = threading.Event(), threading.Event()
        monkeypatch.setattr("driver.engine.process.trim", trimmed.set)
        hint = LatencyHint(requested)
        idle = IdleMonitor(0.001, list, looked.set, keeps_arenas=lambda: hint.keeps_arenas)
        hint.began(USUAL)
        for _ in range(3):
            looked.clear()
            idle.begin()
            assert looked.wait(kit.patience)
        assert not trimmed.is_set()
        hint.ended(USUAL)
        idle.begin()
        assert trimmed.wait(kit.patience)

    def test_parts_can_be_taken_away(self, requested):
        """As the bench does, to see what each is worth."""
        hint = LatencyHint(requested, frozenset({"clock"}))
        hint.began(USUAL)
        assert (held(requested), hint.keeps_arenas) == (0, False)
        hint.ended(USUAL)


@pytest.mark.skipif(not os.access(DEVICE_FILE, os.W_OK), reason="this account may not open the device file")
class TestDevices:
    """A device in its sandbox reaches the file, and its engine has it open as long as a burst lives."""

    def test_while_a_burst_lives(self, place, kit):
        """One descriptor for several bursts of several clients; it goes with the last."""
        with driver.connect() as device, driver.connect() as other, ExitStack() as later:
            pid = device.engine_pid
            prepared = device.prepare(kit.add_model())
            assert held(DEVICE_FILE, pid) == 0
            with prepared.burst() as burst, prepared.burst():
                burst.run(X)
                later.enter_context(other.prepare(kit.add_model()).burst())
                assert held(DEVICE_FILE, pid) == 1
            prepared.run(X)
            assert held(DEVICE_FILE, pid) == 1
            later.close()
            kit.until(lambda: held(DEVICE_FILE, pid) == 0)
            assert held(DEVICE_FILE, device.service_pid) == 0

    def test_low_power(self, place, kit):
        """Its bursts ask for nothing."""
        with driver.connect() as device, device.prepare(kit.add_model(), preference="low_power").burst() as burst:
            burst.run(X)
            assert held(DEVICE_FILE, device.engine_pid) == 0

    def test_a_client_that_is_killed(self, place, kit):
        """Fifty bursts of a client hold one descriptor, and kill -9 of that client frees it."""
        with driver.connect() as device:
            client = kit.python(ENEMY, stdout=subprocess.PIPE, text=True)
            assert client.stdout.readline() == "ready\n"
            assert held(DEVICE_FILE, device.engine_pid) == 1
            client.kill()
            kit.until(lambda: held(DEVICE_FILE, device.engine_pid) == 0)
            client.wait()
            client.stdout.close()
