"""EventFlag: sticky bits, consumed by the first waiter that sees them, between threads and processes."""

import subprocess
import sys
import threading
from pathlib import Path

import fmq_peers
import numpy as np
import pytest
import waiting
from fmq_peers import METHODS, asleep, process, thread
from waiting import PATIENCE, at_least

import fmq


@pytest.fixture
def region():
    with_flag = fmq.Region.create(4096)
    yield with_flag
    with_flag.close()


@pytest.fixture
def flag(region):
    return fmq.EventFlag(region, 0)


@pytest.fixture
def sleepers(region):
    """The flag's count of sleepers."""
    return region.asarray(np.uint32, 1, 4)


def test_bits_are_sticky_and_consumed_once(flag):
    """A bit set before the wait is there; a second wait does not see it again."""
    flag.wake(0b101)
    assert flag.wait(0b001, 0) == 0b001
    with pytest.raises(fmq.Timeout):
        flag.wait(0b001, 0)
    assert flag.wait(0b111, 0) == 0b100


def test_a_wait_ends_at_its_deadline(flag):
    """Nobody sets the bit: Timeout, which is a TimeoutError, not before its time; another bit does not count."""
    flag.wake(2)
    with at_least(0.02), pytest.raises(TimeoutError):
        flag.wait(1, 0.02)
    assert flag.wait(2, 0) == 2


def test_a_sleeper_is_woken_by_its_bit_only(flag, sleepers):
    """Bits outside the mask leave the sleeper asleep; the mask's bit ends the sleep with just that bit."""
    got = []
    with thread(lambda: got.append(flag.wait(0b10, 10))):
        asleep(sleepers)
        flag.wake(0b01)
        asleep(sleepers)
        assert not got
        flag.wake(0b10)
    assert got == [0b10]
    assert flag.wait(0b01, 0) == 0b01


def test_each_bit_has_its_own_waiter(flag, sleepers):
    """Two threads wait for different bits of one word, and each is given its own."""
    got = {}
    with thread(lambda: got.update(a=flag.wait(1, 10))), thread(lambda: got.update(b=flag.wait(2, 10))):
        fmq_peers.until(lambda: sleepers[0] == 2)
        flag.wake(3)
    assert got == {"a": 1, "b": 2}


def test_all_32_bits(flag):
    """The highest bit is a bit like the others."""
    flag.wake(2**32 - 1)
    assert flag.wait(2**31, 0) == 2**31
    assert flag.wait(2**32 - 1, 0) == 2**31 - 1


@pytest.mark.parametrize("mask", [0, -1, 2**32])
def test_an_empty_or_oversized_mask_is_refused(flag, mask):
    """A mask that can never come true is a mistake of the caller, in both directions."""
    for call in (flag.wake, flag.wait):
        with pytest.raises(ValueError, match="mask="):
            call(mask)


@pytest.mark.parametrize("offset", [-4, 2, 4092, 4096, 2**64])
def test_a_flag_lies_inside_its_region(region, offset):
    """Eight aligned bytes of the region, or ValueError."""
    with pytest.raises(ValueError, match="offset="):
        fmq.EventFlag(region, offset)


def test_a_negative_timeout_is_refused(flag):
    """Only None waits for ever."""
    with pytest.raises(ValueError, match="timeout=-1"):
        flag.wait(1, -1)


@pytest.mark.parametrize("method", METHODS)
def test_between_processes(method):
    """A flag in a queue's own memory reaches another process and back."""
    queue = fmq.MessageQueue.create("u1", 8)
    region = queue.descriptor.region()
    flag = fmq.EventFlag(region, fmq_peers.EVENT)
    with process(fmq_peers.answer_event, queue.descriptor, method=method):
        flag.wake(1)
        assert flag.wait(2, 10) == 2


def test_a_waker_that_died_before_it_woke_leaves_no_one_asleep(flag, region, sleepers):
    """Bits set without the system call, as by a process killed in between: the next wake makes the call."""
    got = []
    with thread(lambda: got.append(flag.wait(1, 10))):
        asleep(sleepers)
        region.asarray(np.uint32, 1)[0] |= 1
        flag.wake(1)
    assert got == [1]


def test_a_flood_of_other_bits_cannot_hold_a_waiter(flag, region):
    """A peer that changes the word all the time makes each sleep fail; the deadline ends the wait all the same."""
    word, over = region.asarray(np.uint32, 1), threading.Event()

    def flood():
        values = np.arange(4096, dtype=np.uint32) << 1
        while not over.is_set():
            for value in values:
                word[0] = value

    with thread(flood):
        for _ in range(20):
            with pytest.raises(fmq.Timeout):
                flag.wait(1, 0.005)
        over.set()


INTERRUPTED = """
import os, signal, sys, threading
import numpy as np
import fmq
sys.path.insert(0, sys.argv[1])
from waiting import until
region = fmq.Region.create(4096)
flag, sleepers = fmq.EventFlag(region, 0), region.asarray(np.uint32, 1, 4)

def interrupt():
    until(lambda: sleepers[0] % 2)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    flag.wait(1, 600)
except KeyboardInterrupt:
    flag.wake(1)
    print(flag.wait(1, 0))
"""


def test_ctrl_c_ends_a_wait():
    """KeyboardInterrupt, in a program of its own, and the flag goes on working."""
    command = [sys.executable, "-c", INTERRUPTED, str(Path(waiting.__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
