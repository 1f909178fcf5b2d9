"""kill -9 at seeded random moments while blocks stream: told at once, nothing lost or invented, a successor goes on."""

import gc
import multiprocessing
import os
import random
import signal
import time

import numpy as np
import pytest
import stress
from fmq_peers import process, take

import fmq

BLOCK, CAPACITY = 16, 100  # so that blocks wrap, and both sides sleep now and then
MOST_MS = 100


def stream_out(descriptor, ready):
    """Writes blocks whose numbers go on where the queue's last writer stopped, for ever."""
    with take(fmq.MessageQueue.open(descriptor), "writer") as w:
        w.spin = 0
        number = int(descriptor.region().asarray(np.uint64, 1, 128)[0])
        ready.send(number)
        while True:
            w.write(np.arange(number, number + BLOCK))
            number += BLOCK


def stream_in(descriptor, ready):
    """Reads blocks for ever; the number of each element is its position in the stream."""
    with take(fmq.MessageQueue.open(descriptor), "reader") as r:
        r.spin = 0
        number = int(descriptor.region().asarray(np.uint64, 1, 256)[0])
        ready.send(number)
        while True:
            assert np.array_equal(r.read(BLOCK), np.arange(number, number + BLOCK))
            number += BLOCK


def time_until_told(step, killed_at):
    """Goes on with `step` until PeerDied, and says how many milliseconds after the kill that was."""
    while True:
        try:
            step()
        except fmq.PeerDied:
            return (time.monotonic() - killed_at()) * 1e3


class Killer:
    """Kills a process after a while, counted in steps of the survivor so that no run depends on the clock."""

    def __init__(self, child, after):
        self.child, self.after, self.at = child, after, None

    def tick(self):
        self.after -= 1
        if self.after == 0:
            self.at = time.monotonic()
            os.kill(self.child.pid, signal.SIGKILL)


def kill_writers(count, seed):
    """The reader survives `count` writers. Every element of all of them arrives, once and in order."""
    rng, queue, number, worst = random.Random(seed), fmq.MessageQueue.create("i8", CAPACITY), 0, 0.0
    with queue.reader() as r:
        r.spin = 0
        for _ in range(count):
            ready, theirs = multiprocessing.Pipe()
            with process(stream_out, queue.descriptor, theirs, fails=True) as child:
                assert ready.recv() == number
                killer = Killer(child, rng.randint(1, 400))

                def step(killer=killer):
                    nonlocal number
                    n = rng.choice((1, 7, BLOCK, 40))
                    assert np.array_equal(r.read(n), np.arange(number, number + n))
                    number += n
                    killer.tick()

                worst = max(worst, time_until_told(step, lambda killer=killer: killer.at))
            left = r.available
            assert np.array_equal(r.read(left), np.arange(number, number + left))
            number += left
            assert number % BLOCK == 0, "a block was published in part"
            ready.close()
            theirs.close()
    return worst


def kill_readers(count, seed):
    """The writer survives `count` readers, none of which sees a gap, from its predecessor's position on."""
    rng, queue, number, worst = random.Random(seed), fmq.MessageQueue.create("i8", CAPACITY), 0, 0.0
    with queue.writer() as w:
        w.spin = 0
        for _ in range(count):
            ready, theirs = multiprocessing.Pipe()
            with process(stream_in, queue.descriptor, theirs, fails=True) as child:
                started_at = ready.recv()
                assert number - CAPACITY <= started_at <= number
                killer = Killer(child, rng.randint(1, 400))

                def step(killer=killer):
                    nonlocal number
                    n = rng.choice((1, 7, BLOCK, 40))
                    w.write(np.arange(number, number + n))
                    number += n
                    killer.tick()

                worst = max(worst, time_until_told(step, lambda killer=killer: killer.at))
                assert child.exitcode in (None, -signal.SIGKILL), "the reader saw a gap"
            ready.close()
            theirs.close()
    return worst


def check(kill, count, seed):
    fmq.MessageQueue.create("u1", 1).writer().close()  # what a process opens once, and keeps
    gc.collect()  # what earlier tests have left is closed now, and not in between
    before = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    worst = kill(count, seed)
    print(f"{kill.__name__}: seed {seed}, {count} kills, told after {worst:.2f} ms at worst (bound {MOST_MS} ms)")
    assert not [entry for entry in set(os.listdir("/dev/shm")) - before[0] if f"-{os.getpid()}-" in entry]
    assert len(os.listdir("/proc/self/fd")) <= before[1]
    return worst


@pytest.mark.integration
@pytest.mark.parametrize("kill", [kill_writers, kill_readers])
def test_twenty_kills(kill):
    """The survivor is told each time, has read a gapless prefix, and a successor goes on."""
    check(kill, 1, 0)
    check(kill, 20, 1)


@pytest.mark.stress
@pytest.mark.parametrize("kill", [kill_writers, kill_readers])
def test_three_hundred_kills(kill, tally):
    """The same with 300, or as many as the budget allows, from a printed seed."""
    tally("kills of a bare queue's ends", rounds := stress.times(300))
    assert check(kill, rounds, random.randrange(2**32)) < MOST_MS
