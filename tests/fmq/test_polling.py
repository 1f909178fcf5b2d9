"""Whether a wait polls: on one processor, and in a control group with a quota. Shown by what the waiting thread does:
a wait that is over long before its window has announced a sleep.
"""

import os
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from fmq_peers import DATA_WAIT, EVENT, control_word, must_raise, process
from waiting import PATIENCE, until

import fmq

WINDOW = 10  # seconds of polling, the most that an end takes
GROUPS = Path("/sys/fs/cgroup")
HALF = {"cpu.max": "50000 100000", "cpu.cfs_quota_us": "50000"}
needs_two = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two processors")


def reader_on(descriptor, cpu, group=None):
    """A reader that polls for long, on that processor, in a control group."""
    if group:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    os.sched_setaffinity(0, {cpu})
    reader = fmq.MessageQueue.open(descriptor).reader()
    reader.spin = WINDOW
    return reader


def read_on(descriptor, cpu):
    """Reads two elements there, one by one."""
    with reader_on(descriptor, cpu) as reader:
        reader.read(1, PATIENCE)
        reader.read(1, PATIENCE)


def sleep_on(descriptor, cpu, group=None):
    """Waits there in vain until a wait has announced a sleep; then takes what comes, and does so once more."""
    queue = fmq.MessageQueue.open(descriptor)
    word = control_word(queue, DATA_WAIT)
    with reader_on(descriptor, cpu, group) as reader:
        for _ in range(2):
            before = int(word[0])

            def has_announced(before=before):
                must_raise(fmq.Timeout, reader.read, 1, WINDOW / 100)
                return word[0] != before

            until(has_announced)
            fmq.EventFlag(descriptor.region(), EVENT).wake(1)
            reader.read(1, PATIENCE)


@contextmanager
def writer_on(cpu, queue):
    """A writer whose elements come from that processor."""

    def write(writer):
        os.sched_setaffinity(0, {cpu})  # of this thread
        writer.write([1], PATIENCE)

    with queue.writer() as writer:

        def put():
            thread = threading.Thread(target=write, args=(writer,))
            thread.start()
            thread.join()

        yield put


@contextmanager
def quota_of_half_a_processor():
    """A control group, where this process may make one."""
    mounts = [GROUPS, GROUPS / "cpu", GROUPS / "cpu,cpuacct"]
    group = next((at for at in mounts if (at / "cgroup.procs").exists()), GROUPS) / f"fmq-test-{os.getpid()}"
    try:
        group.mkdir()
        name = next(name for name in HALF if (group / name).exists())
        (group / name).write_text(HALF[name])
    except (OSError, StopIteration):
        if group.exists():
            group.rmdir()
        pytest.skip("this process may not make a control group with a quota")
    try:
        yield group
    finally:
        until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def test_one_processor_is_not_polled_away():
    """A reader that may use one processor alone sleeps at once, though its peer never said where it runs, and though it
    was forked from a process that had just found that it may use more.
    """
    cpu = min(os.sched_getaffinity(0))
    with fmq.MessageQueue.create("u1", 8) as queue, queue.reader() as reader:
        reader.spin = 0.01
        with pytest.raises(fmq.Timeout):
            reader.read(1, 0.02)
    with (
        fmq.MessageQueue.create("u1", 8) as queue,
        writer_on(cpu, queue) as put,
        process(sleep_on, queue.descriptor, cpu),
    ):
        for _ in range(2):
            assert queue.event_flag.wait(1, PATIENCE) == 1
            put()


@needs_two
def test_a_quota_is_not_polled_away():
    """A reader in a group with half a processor sleeps soon, though its peer runs on another one."""
    mine, other = sorted(os.sched_getaffinity(0))[:2]
    with (
        quota_of_half_a_processor() as group,
        fmq.MessageQueue.create("u1", 8) as queue,
        writer_on(other, queue) as put,
        process(sleep_on, queue.descriptor, mine, group),
    ):
        for _ in range(2):
            assert queue.event_flag.wait(1, PATIENCE) == 1
            put()


@needs_two
def test_without_a_quota_the_window_is_kept():
    """The control: the same reader elsewhere polls for all of it, and gets its element so."""
    mine, other = sorted(os.sched_getaffinity(0))[:2]
    with fmq.MessageQueue.create("u1", 8) as queue, writer_on(other, queue) as put:
        put()
        word = control_word(queue, DATA_WAIT)
        with process(read_on, queue.descriptor, mine) as child:
            until(lambda: taken(queue) and polls(child.pid))
            before = int(word[0])
            put()
        assert before % 2 == 0
        assert word[0] == before


def taken(queue):
    return fmq.Descriptor.region(queue.descriptor).asarray("u8", 1, 256)[0] == 1


def polls(pid):
    """Its main thread has been running for longer than any wait of less than its window."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11]) >= 5
