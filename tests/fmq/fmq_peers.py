"""The other side of a test: what runs in other processes and threads, and how a test waits for it without sleeping."""

import contextlib
import multiprocessing
import os
import secrets
import threading
import traceback
import warnings
from collections import Counter

import numpy as np
import pytest
from waiting import PATIENCE, until

import fmq

METHODS = ("fork", "spawn", "forkserver")
HEAD, TAIL, DATA_WAIT, SPACE_WAIT, EVENT = 128, 256, 384, 512, 640  # csrc/fmq/layout.h


def new_name():
    return f"/fmq-test-{os.getpid()}-{secrets.token_hex(4)}"


@contextlib.contextmanager
def process(target, *args, method="fork", fails=False):
    """Another process that runs target(*args), and must end well unless `fails`."""
    child = multiprocessing.get_context(method).Process(target=target, args=args, daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12+ warns of fork beside threads; ours expect it
        child.start()
    try:
        yield child
        child.join(PATIENCE)
        assert fails or child.exitcode == 0, f"{target.__name__} ended with {child.exitcode}"
    finally:
        child.kill()
        child.join()
        child.close()


def in_a_fork(function):
    """Runs function() in a forked child, which must return."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            function()
        except BaseException:  # noqa: BLE001 - told by the exit status, after the traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@contextlib.contextmanager
def thread(target, *args):
    """A thread that runs target(*args); its exception becomes the test's."""
    failed = []

    def run():
        try:
            target(*args)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failed.append(error)

    runner = threading.Thread(target=run, daemon=True)
    runner.start()
    yield runner
    runner.join(PATIENCE)
    assert not runner.is_alive(), f"{target} still runs"
    if failed:
        raise failed[0]


def control_word(queue, offset):
    """A live view of one word of the queue's control block."""
    return fmq.Descriptor.region(queue.descriptor).asarray(np.uint32, 1, offset)


def control_counter(queue, offset):
    """A live view of one counter of the queue's control block."""
    return fmq.Descriptor.region(queue.descriptor).asarray(np.uint64, 1, offset)


def must_raise(kind, function, *arguments):
    """For a lambda, where a with statement has no place."""
    with pytest.raises(kind):
        function(*arguments)


def take(queue, role):
    """A role, as soon as its last owner has let go: the kernel frees a dead process's locks last."""

    def attempt():
        try:
            return getattr(queue, role)()
        except fmq.RoleTaken:
            return None

    return until(attempt)


def bridges():
    """How many of this process's threads sleep for others."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as comm:
            names.append(comm.read().strip())
    return names.count("fmq-bridge")


def sleeps(runner):
    """Until the kernel has put this thread to sleep; look at the wait word first."""

    def state():
        with open(f"/proc/self/task/{runner.native_id}/status") as status:
            return "State:\tS" in status.read()

    return until(state)


@contextlib.contextmanager
def holder(queue, role="writer"):
    """A process that holds a role and does nothing; kill it, or it ends with the block."""
    ready, theirs = multiprocessing.Pipe()
    with process(hold, queue.descriptor, role, theirs, fails=True) as child:
        ready.recv()
        yield child
        child.kill()
    ready.close()
    theirs.close()


def open_memory():
    """How many descriptors of this process refer to each file of shared memory: other threads have other files."""
    found = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it has just been closed
            found[os.readlink(f"/proc/self/fd/{fd}")] += 1
    return Counter({file: count for file, count in found.items() if file.startswith(("/dev/shm/", "/memfd:"))})


def asleep(word):
    """Until somebody has announced on this wait word that he sleeps."""
    return until(lambda: word[0] % 2)


# ---- what other processes do ---------------------------------------------------------------------------------------


def write_array(descriptor, array, timeout=PATIENCE):
    with fmq.MessageQueue.open(descriptor).writer() as writer:
        writer.write(array, timeout)


def write_blocks(descriptor, first, count, block):
    """Blocks of ascending numbers, so that a gap or a tear is seen."""
    with fmq.MessageQueue.open(descriptor).writer() as writer:
        for i in range(first, first + count):
            writer.write(np.arange(i * block, (i + 1) * block), PATIENCE)


def read_blocks(descriptor, count, block):
    with fmq.MessageQueue.open(descriptor).reader() as reader:
        for i in range(count):
            assert np.array_equal(reader.read(block, PATIENCE), np.arange(i * block, (i + 1) * block))


def echo(there, back, count):
    """Sends every element of `there` back."""
    with fmq.MessageQueue.open(there).reader() as reader, fmq.MessageQueue.open(back).writer() as writer:
        for _ in range(count):
            writer.write(reader.read(1, PATIENCE), PATIENCE)


def exchange_all(there, back, count):
    """The serving side of an Exchange: every message goes back reversed."""
    with fmq.MessageQueue.open(there).reader() as reader, fmq.MessageQueue.open(back).writer() as writer:
        call = fmq.Exchange(writer, reader)
        message = b""
        for _ in range(count):
            message = call(message)[::-1]
        writer.write(np.frombuffer(message, np.uint8))


def hold(descriptor, role, ready):
    """Takes a role, says so, and does nothing until it is killed."""
    end = getattr(fmq.MessageQueue.open(descriptor), role)()
    ready.send(end.capacity)
    threading.Event().wait()


def hold_fat(descriptor, role, ready, nbytes):
    """As hold, with so much resident memory that the kernel needs a while to bury us."""
    ballast = np.ones(nbytes, np.uint8)
    hold(descriptor, role, ready)
    return ballast


def answer_event(descriptor):
    """Waits for bit 1 of the queue's flag, then sets bit 2."""
    flag = fmq.EventFlag(descriptor.region(), EVENT)
    assert flag.wait(1, PATIENCE) == 1
    flag.wake(2)


def collect(descriptor, pipe, n, timeout=PATIENCE):
    """A reader of n elements at once: says that it has come, and then what it got."""
    with fmq.MessageQueue.open(descriptor).reader() as reader:
        pipe.send("here")
        pipe.send(reader.read(n, timeout).tolist())
