"""Whether a wait polls: on one processor, and in a control group with a quota. Shown by what the waiting thread does:
it announces a sleep long before its window ends.
"""

import os
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from fmq_peers import DATA_WAIT, control_word, process, until

import fmq

WINDOW = 10  # seconds of polling, the most that an end takes
GROUPS = Path("/sys/fs/cgroup")
HALF = {"cpu.max": "50000 100000", "cpu.cfs_quota_us": "50000"}
needs_two = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two processors")


def read_on(descriptor, cpu, group=None):
    """Reads two elements one by one on that processor, polling for long; in a control group."""
    if group:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    os.sched_setaffinity(0, {cpu})
    with fmq.MessageQueue.open(descriptor).reader() as reader:
        reader.spin = WINDOW
        reader.read(1, 20)
        reader.read(1, 20)


@contextmanager
def writer_on(cpu, queue):
    """A writer whose elements come from that processor."""

    def write(writer):
        os.sched_setaffinity(0, {cpu})  # of this thread
        writer.write([1], 10)

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
    with fmq.MessageQueue.create("u1", 8) as queue, writer_on(cpu, queue) as put:
        word = control_word(queue, DATA_WAIT)
        with process(read_on, queue.descriptor, cpu):
            until(lambda: word[0] % 2, WINDOW / 2)
            first = int(word[0])
            put()
            until(lambda: word[0] > first and word[0] % 2, WINDOW / 2)
            put()


@needs_two
def test_a_quota_is_not_polled_away():
    """A reader in a group with half a processor sleeps soon, though its peer runs on another one."""
    mine, other = sorted(os.sched_getaffinity(0))[:2]
    with (
        quota_of_half_a_processor() as group,
        fmq.MessageQueue.create("u1", 8) as queue,
        writer_on(other, queue) as put,
    ):
        put()
        word = control_word(queue, DATA_WAIT)
        with process(read_on, queue.descriptor, mine, group):
            until(lambda: word[0] % 2, WINDOW / 2)
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
