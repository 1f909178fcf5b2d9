"""How both sides wait: they poll as long as they were told, and an idle burst costs nothing."""

import asyncio
import contextlib
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from inside import caller_of, controller_of, pipeline_of, reader_of

import driver

X = np.zeros((1, 4), np.float32)


@pytest.fixture
def low_power(device, kit):
    with device.prepare(kit.add_model(), preference="low_power") as prepared:
        yield prepared


def pause(seconds):
    """Rare requests are what is to be tested, so this does wait."""
    threading.Event().wait(seconds)


def cpu(burst):
    """Seconds of CPU that each side has spent on the burst."""
    found = burst.stats()["cpu_seconds"]
    return np.array([found["client"], found["device"]])


def switches(pid, tid=None):
    """How often threads of a process have gone to sleep."""
    tasks = [str(tid)] if tid else os.listdir(f"/proc/{pid}/task")
    lines = [line for task in tasks for line in Path(f"/proc/{pid}/task/{task}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def listener_switches(burst):
    page = controller_of(burst).trace.page.device
    return switches(page.pid, page.tid)


@pytest.fixture
def apart(two_cpus):
    """Gives each side a CPU of its own: who shares one with its peer does not poll."""
    ours, theirs = two_cpus

    def keep_apart(*bursts):
        for burst in bursts:
            burst.run(X)
            os.sched_setaffinity(controller_of(burst).trace.page.device.tid, {theirs})
        os.sched_setaffinity(0, {ours})
        for burst in bursts:
            burst.run(X)

    return keep_apart


def spent(burst, n, gap, choose=np.min):
    """CPU seconds of each side for a request, of n with a gap before each; the least or the most of three tries."""
    found = []
    for _ in range(3):
        before = cpu(burst)
        for _ in range(n):
            if gap:
                pause(gap)
            burst.run(X)
        found.append((cpu(burst) - before) / n)
    return choose(found, axis=0)


def test_default(fast, low_power):
    """50 us, and nothing for low power; both sides get the same."""
    for prepared, seconds in ((fast, 50e-6), (low_power, 0.0)):
        with prepared.burst() as burst:
            assert pipeline_of(burst).options.spin == seconds
            assert reader_of(controller_of(burst)).spin == seconds
    with low_power.burst(spin=1e-3) as burst:
        assert pipeline_of(burst).options.spin == 1e-3


@pytest.mark.parametrize("spin", [-1, 11, "sometimes", float("nan")])
def test_unknown(fast, spin):
    """What is neither seconds nor "adaptive" is refused."""
    with pytest.raises(ValueError, match="spin="):
        fast.burst(spin=spin)


def test_seconds(fast, apart):
    """The device polls for so long after each request, and not at all for 0: its CPU time says so."""
    with fast.burst(spin=4e-3) as polling, fast.burst(spin=0) as sleeping:
        apart(polling, sleeping)
        assert spent(polling, 20, 8e-3, np.max)[1] > 2e-3
        assert spent(sleeping, 20, 8e-3, np.min)[1] < 1.5e-3


def spent_on_long(burst):
    """CPU seconds of the client for each answer that takes 20 ms: seven samples."""
    found = []
    for _ in range(10):
        before = cpu(burst)[0]
        for _ in range(4):
            burst.run(X + 20e-3)
        found.append((cpu(burst)[0] - before) / 4)
    assert caller_of(burst).expected_ns > 15e6
    return found[3:]


@pytest.mark.stress
def test_long_answers_are_polled_for(slow, apart):
    """The client wakes shortly before an answer is due that takes 20 ms, and polls; with spin=0 it does not.

    It does not either while others take its processor, so it has several tries.
    """
    with slow.burst(spin=50e-6) as polling, slow.burst(spin=0) as sleeping:
        apart(polling, sleeping)
        assert any(np.quantile(spent_on_long(polling), 0.8) > 140e-6 for _ in range(8))
        assert any(np.median(spent_on_long(sleeping)) < 140e-6 for _ in range(8))


def streams(burst, n=12):
    """Requests 5 ms apart: how often this thread has gone to sleep for one, of the last ones."""
    for number in range(n):
        if number == n - 8:
            before = switches(os.getpid(), threading.get_native_id())
        pause(5e-3)
        burst.run(X)
    return (switches(os.getpid(), threading.get_native_id()) - before) / 8


def habits(burst):
    """Of the client: pauses and long answers in a row."""
    caller = caller_of(burst)
    return caller.pauses, caller.long_answers


def test_a_stream_is_not_polled_for(fast, apart):
    """When requests come 5 ms apart, the client sleeps for each answer, though it comes at once.

    Requests that follow each other are polled for again, by both sides.
    """
    with fast.burst() as burst:
        apart(burst)
        assert any(streams(burst) >= 1.7 for _ in range(8))  # the pause, and the answer, unless that was faster
        assert habits(burst)[0] == 3
        for _ in range(20):
            burst.run(X)
        assert habits(burst)[0] == 0
        tries = []
        for _ in range(8):
            before = listener_switches(burst)
            for _ in range(200):
                burst.run(X)
            tries.append((listener_switches(burst) - before) / 200)
        assert min(tries) < 0.5, tries


def test_a_window_that_is_asked_for_is_kept(fast, apart):
    """spin=2e-3 is more than a sleep costs, and polls in a stream, too: the client does not sleep for its answers."""
    with fast.burst(spin=2e-3) as burst:
        apart(burst)
        assert any(streams(burst) < 1.7 for _ in range(8))


def test_long_answers_are_slept_for(slow, apart):
    """After a few answers of 20 ms the client sleeps at once: it does not poll for what is far away."""
    with slow.burst() as burst:
        apart(burst)
        for _ in range(6):
            burst.run(X + 20e-3)
        assert habits(burst)[1] == 3
        assert any(burst.run(X) and habits(burst)[1] == 0 for _ in range(50))  # one that no other program holds up


def test_zero_sleeps(fast, apart):
    """With spin=0 the listener sleeps before every request, however fast they come, when it has a CPU of its own."""
    with fast.burst(spin=0) as burst:
        apart(burst)
        before = listener_switches(burst)
        for _ in range(200):
            burst.run(X)
        assert listener_switches(burst) - before > 100


def test_adaptive(fast, apart):
    """It polls while requests follow each other, does not while they are rare, and polls again when they are not."""
    with fast.burst(spin="adaptive") as burst, fast.burst(spin=2e-3) as fixed:
        apart(burst, fixed)
        sleeps = []
        for _ in range(2):
            rare = spent(burst, 30, 3e-3, np.min)[1]
            assert rare < 0.6 * spent(fixed, 30, 3e-3, np.max)[1]
            tries = []
            for _ in range(8):
                before = listener_switches(burst)
                for _ in range(200):
                    burst.run(X)
                tries.append((listener_switches(burst) - before) / 200)
            sleeps.append(min(tries))
        assert max(sleeps) < 0.5, sleeps


@pytest.mark.integration
@pytest.mark.parametrize("spin", [None, 0, "adaptive"])
@pytest.mark.parametrize("watched", [False, True], ids=["alone", "with asyncio"])
def test_idle(place, kit, spin, watched):
    """An idle burst wakes nobody up, on either side, and takes no CPU time, also after it was used in asyncio."""
    options = {} if spin is None else {"spin": spin}
    with driver.connect() as device, device.prepare(kit.add_model()) as fast, fast.burst(depth=2, **options) as burst:
        for _ in range(5):
            burst.run(X)
        if watched:
            asyncio.run(burst.run_async(X))
        engine, service = fast.device.engine_pid, fast.device.service_pid

        def state():
            """How often each thread has gone to sleep, but for this one, and the CPU time of the burst."""
            found = {}
            for pid in (engine, service, os.getpid()):
                for t in set(os.listdir(f"/proc/{pid}/task")) - {str(threading.get_native_id())}:
                    with contextlib.suppress(OSError):  # it has ended meanwhile
                        found[pid, t] = switches(pid, t)
            return found, cpu(burst)

        changed = {}

        def sleeps():
            """Whether nobody woke up meanwhile; whoever still polls or ends goes to sleep before a later look."""
            nonlocal changed
            counts, seconds = state()
            pause(0.4)
            after, seconds_after = state()
            changed = {t: count - counts.get(t, 0) for t, count in after.items() if count != counts.get(t)}
            return not changed and (seconds_after == seconds).all()

        kit.until(sleeps, lambda: f"never all asleep: {changed}")


SHORT = 300e-6  # seconds of an answer: longer than the window, shorter than what is polled for


def expected(burst, *, covers):
    """Run one whose answer is as regular as the client may find it, also on a busy machine."""
    caller = caller_of(burst)
    caller.covers, caller.expected_ns, caller.deviation_ns = covers, 900_000, 0
    caller.pauses = caller.queued_ns = 0
    burst.run(X + SHORT)


def covers_after(burst, alone_ns):
    """Whether the client covers answers once a trial has ended in which answers took so long without that."""
    caller = caller_of(burst)
    caller.took_ns[0], caller.is_trial, caller.trial_left = alone_ns, 1, 1
    expected(burst, covers=1)
    assert (caller.is_trial, caller.trial_left > 1000) == (0, True)
    return bool(caller.covers)


def test_the_window_covers_an_answer_where_that_is_better(slow, apart):
    """The better way of two that were tried is kept: polling until the answer is there, or for the window given."""
    with slow.burst() as burst:
        apart(burst)
        assert covers_after(burst, 10**9)
        assert not covers_after(burst, 1000)


def test_a_covered_answer_is_not_slept_for(slow, apart):
    """The client polls for the whole of it, and for an equal one without that it sleeps; in a stream it always does."""
    with slow.burst() as burst:
        apart(burst)
        caller_of(burst).trial_left, found = 10**6, {0: [], 1: []}
        for turn in range(16):
            before = switches(os.getpid(), threading.get_native_id())
            for _ in range(30):
                expected(burst, covers=turn % 2)
            found[turn % 2].append((switches(os.getpid(), threading.get_native_id()) - before) / 30)
        assert min(found[1]) < 0.5, found
        assert min(found[0]) > 0.5, found
        caller_of(burst).covers = 1
        assert any(streams(burst) >= 1.7 for _ in range(8))
