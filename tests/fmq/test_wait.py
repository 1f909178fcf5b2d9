"""Waiting: deadlines, signals, other threads, and the peace of a sleeper."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from fmq_peers import DATA_WAIT, SPACE_WAIT, asleep, control_word, must_raise, process, thread, write_array
from waiting import PATIENCE, at_least, until

import fmq


@pytest.fixture
def queue():
    with fmq.MessageQueue.create("u1", 4) as made:
        yield made


@pytest.fixture(params=["read", "into", "peek", "write", "reserve", "exchange"])
def waiting(request, queue):
    """(call that waits for ever, the word on which it sleeps, what ends it), for every call that can wait."""
    w, r = queue.writer(), queue.reader()
    data, space = control_word(queue, DATA_WAIT), control_word(queue, SPACE_WAIT)
    w.spin = r.spin = 0
    if request.param in ("write", "reserve"):
        w.write([1, 2, 3, 4])
    other = fmq.MessageQueue.create("u1", 4)
    exchange = fmq.Exchange(other.writer(), r)
    yield {
        "read": (lambda timeout=None: r.read(1, timeout), data, lambda: w.write([9])),
        "into": (lambda timeout=None: r.read(1, timeout, np.empty(1, "u1")), data, lambda: w.write([9])),
        "peek": (lambda timeout=None: r.peek(1, timeout).__enter__(), data, lambda: w.write([9])),
        "write": (lambda timeout=None: w.write([9], timeout), space, lambda: r.read(1)),
        "reserve": (lambda timeout=None: w.reserve(1, timeout).__enter__(), space, lambda: r.read(1)),
        "exchange": (
            lambda timeout=None: exchange(b"", *([] if timeout is None else [fmq.clock.deadline_of(timeout)])),
            data,
            lambda: w.write([9]),
        ),
    }[request.param]
    w.close()
    r.close()


def test_every_wait_ends_with_what_it_waits_for(waiting):
    """The other side's step wakes the sleeper."""
    call, word, step = waiting
    with thread(call):
        asleep(word)
        step()


def test_every_wait_ends_at_its_deadline(waiting):
    """Timeout, a TimeoutError, not early, and the end works afterwards."""
    call, _, step = waiting
    for timeout in (0.001, 0.02):
        with at_least(timeout), pytest.raises(fmq.Timeout) as told:
            call(timeout)
        assert isinstance(told.value, TimeoutError)
    step()
    call(PATIENCE)


@pytest.mark.parametrize("timeout", [-1, -1e-9, float("nan"), float("-inf")])
def test_impossible_timeouts_are_refused(pair, timeout):
    """Seconds from 0 on, or None; nothing is transferred when the argument is wrong, even if it could be."""
    w, r = pair()
    w.write([1])
    for call in (lambda: r.read(1, timeout), lambda: w.write([2], timeout), lambda: r.peek(1, timeout).__enter__()):
        with pytest.raises(ValueError, match="timeout="):
            call()
    assert r.available == 1


def test_long_timeouts_are_legal(pair):
    """Anything up to infinity means a long time."""
    w, r = pair()
    for timeout in (1e9, 1e300, float("inf"), None):
        w.write([1], timeout)
        r.read(1, timeout)


@pytest.mark.parametrize("spin", [-1, 11, float("nan")])
def test_impossible_spin_windows_are_refused(pair, spin):
    """The window is bounded, because nobody can interrupt a spinner."""
    w, _ = pair()
    with pytest.raises(ValueError, match="spin="):
        w.spin = spin
    w.spin = 1e-3
    assert w.spin == 1e-3


def test_every_wait_obeys_ctrl_c(waiting):
    """KeyboardInterrupt reaches the program from inside every wait, nothing is transferred, and the end works on."""
    call, word, step = waiting

    def interrupt():
        asleep(word)
        os.kill(os.getpid(), signal.SIGINT)

    with thread(interrupt), pytest.raises(KeyboardInterrupt):
        call()
    step()
    call(1)


def test_a_handler_that_returns_does_not_end_the_wait(waiting):
    """A signal whose handler does nothing, many times, and the wait goes on to its data."""
    call, word, step = waiting
    seen = []
    old = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))

    def nudge():
        for i in range(5):
            asleep(word)
            os.kill(os.getpid(), signal.SIGUSR1)
            until(lambda wanted=i + 1: len(seen) >= wanted)
        step()

    with thread(nudge):
        call()
    signal.signal(signal.SIGUSR1, old)
    assert len(seen) == 5


def test_every_wait_frees_the_gil(waiting):
    """Another Python thread counts on while this one sleeps."""
    call, word, step = waiting
    counted = []

    def count():
        asleep(word)
        counted.append(sum(range(100_000)))
        step()

    with thread(count):
        call()
    assert counted


def test_spinning_frees_the_gil_too(pair):
    """A window of ten seconds does not stop the other threads, and ends with the data."""
    w, r = pair()
    r.spin = 10
    with thread(lambda: r.read(1)):
        w.write([1])


def test_a_second_thread_is_told_busy(waiting):
    """While one thread waits in an end, another one gets Busy at once, and the first is not disturbed."""
    call, word, step = waiting
    with thread(call):
        asleep(word)
        with pytest.raises(fmq.Busy):
            call()
        step()


def test_close_ends_every_wait(queue):
    """close() from another thread: the waiter gets Closed, and so does every later call."""
    w, r = queue.writer(), queue.reader()
    with thread(lambda: must_raise(fmq.Closed, r.read, 1)):
        asleep(control_word(queue, DATA_WAIT))
        r.close()
    for call in (lambda: r.read(1), lambda: r.available, lambda: r.peek(1).__enter__(), lambda: r.peer):
        with pytest.raises(fmq.Closed):
            call()
    w.write([1] * 4)
    with pytest.raises(fmq.Closed):
        w.write([1], 10)


def test_closing_twice_is_harmless(pair):
    """Also by `with`."""
    w, _ = pair()
    with w:
        w.close()
    w.close()


def test_the_peers_close_is_told_after_its_last_words(queue):
    """What was written before the close is read; then Closed, not before."""
    w, r = queue.writer(), queue.reader()
    w.write([1, 2])
    w.close()
    assert r.peer == "released"
    assert list(r.read(2)) == [1, 2]
    with pytest.raises(fmq.Closed):
        r.read(1)
    with pytest.raises(fmq.Closed):
        r.try_read(1)


def test_the_peers_close_ends_a_wait(queue):
    """A sleeper is woken by the other side's close, reader and writer alike."""
    w, r = queue.writer(), queue.reader()
    with thread(lambda: must_raise(fmq.Closed, r.read, 1)):
        asleep(control_word(queue, DATA_WAIT))
        w.close()
    r.close()
    w, r = queue.writer(), queue.reader()
    w.write([0] * 4)
    with thread(lambda: must_raise(fmq.Closed, w.write, [1])):
        asleep(control_word(queue, SPACE_WAIT))
        r.close()


def test_waiting_for_a_peer_that_has_not_come(queue):
    """Nobody on the other side yet is no error: the wait lasts until he comes and writes."""
    with queue.reader() as r:
        assert r.peer == "nobody"
        with process(write_array, queue.descriptor, np.array([7], "u1")):
            assert list(r.read(1, 10)) == [7]


@pytest.mark.parametrize("what", ["read", "write", "event"])
def test_a_sleeper_never_wakes_while_nothing_happens(what, queue):
    """No context switch while 0.3 s pass: a sleep has no timeout of its own (outside the main thread)."""
    w, r = queue.writer(), queue.reader()
    region = queue.descriptor.region()
    flag, word = fmq.EventFlag(region, 640), {"read": DATA_WAIT, "write": SPACE_WAIT, "event": 644}[what]
    w.spin = r.spin = 0
    if what == "write":
        w.write([0] * 4)
    calls = {"read": lambda: r.read(1), "write": lambda: w.write([1]), "event": lambda: flag.wait(1)}
    ends = {"read": lambda: w.write([1]), "write": lambda: r.read(1), "event": lambda: flag.wake(1)}
    with thread(calls[what]) as sleeper:
        asleep(region.asarray(np.uint32, 1, word))
        status = Path(f"/proc/self/task/{sleeper.native_id}/status")
        until(lambda: "State:\tS" in status.read_text())
        before = switches(status)
        with contextlib.suppress(fmq.Timeout):
            fmq.EventFlag(region, 648).wait(1, 0.3)  # passes time in this thread
        assert switches(status) == before
        ends[what]()


def switches(status):
    return [int(n) for n in re.findall(r"ctxt_switches:\s+(\d+)", status.read_text())]


def test_nobody_makes_a_system_call_while_nobody_sleeps(pair):
    """The fast path stays in user space: traffic between two awake ends switches no context voluntarily."""
    w, r = pair(capacity=64)
    status = Path(f"/proc/self/task/{threading.get_native_id()}/status")
    tries = []
    for _ in range(5):  # another thread of this process may want the global lock now and then
        before = switches(status)[0]
        for _ in range(2000):
            w.write([1, 2, 3])
            r.read(3)
        tries.append(switches(status)[0] - before)
    assert min(tries) <= 2, tries


LOOKS = """
import contextlib, os, resource, threading, warnings
import fmq

def looks():
    with fmq.MessageQueue.create("u1", 4) as queue, queue.writer(), queue.reader() as r:
        r.spin = 0
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        with contextlib.suppress(fmq.Timeout):
            r.read(1, 0.75)
        return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before

def other():
    found.append(looks())
    child = os.fork()
    if not child:
        os._exit(min(looks(), 100))
    found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: fork in a process with threads
found = [looks()]
thread = threading.Thread(target=other)
thread.start()
thread.join()
print(*found)
"""


@pytest.mark.integration
def test_only_the_main_thread_looks_for_signals():
    """A sleeper in the main thread wakes ten times a second, where handlers run; another thread's does not, and does in
    the child that it forks off, whose main thread it is.
    """
    done = subprocess.run([sys.executable, "-c", LOOKS], capture_output=True, text=True, check=True)
    main, other, child = map(int, done.stdout.split())
    assert main >= 5
    assert other <= 4
    assert child >= 5
