"""What is closed is gone: descriptors, mappings, threads, roles."""

import functools
import gc
import multiprocessing
import os
import re
from pathlib import Path

import pytest
import stress
from fmq_peers import hold, in_a_fork, process

import fmq


def held():
    """(descriptors, mappings, threads) of this process."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        mappings = len(re.findall(r"memfd:fmq|/dev/shm", maps.read()))
    return len(os.listdir("/proc/self/fd")), mappings, len(os.listdir("/proc/self/task"))


def alone(test):
    """Runs it in a fork, where no other thread of this process opens or closes anything meanwhile."""

    @functools.wraps(test)
    def run(**fixtures):
        in_a_fork(lambda: test(**fixtures))

    return run


@pytest.mark.integration
@pytest.mark.parametrize("how", ["anonymous", "posix", "named", "by descriptor", "failing"])
@pytest.mark.parametrize("count", [300, pytest.param(stress.times(10_000), marks=pytest.mark.stress)])
@alone
def test_queues_leave_nothing(how, name, count):
    """Create, use and close; also with errors on the way."""

    def once():
        memory = "posix" if how in ("posix", "named") else "memfd"
        with fmq.MessageQueue.create("u1", 8, name=name if how == "named" else None, memory=memory) as queue:
            opened = fmq.MessageQueue.open(queue.descriptor) if how == "by descriptor" else queue
            with queue.writer() as w, opened.reader() as r:
                w.write([1])
                r.read(1)
                if how == "failing":
                    with pytest.raises(fmq.RoleTaken):
                        queue.writer()
                    with pytest.raises(fmq.Timeout):
                        r.read(1, 0)
            opened.close()
        if how == "named":
            fmq.unlink(name)

    once()
    before = held()
    for _ in range(count):
        once()
    assert held() == before


@alone
def test_forgotten_ends_leave_nothing():
    """Without a single close: garbage collection gives everything back."""

    def once():
        queue = fmq.MessageQueue.create("u1", 8)
        queue.writer().write([1])
        queue.reader().read(1)
        fmq.EventFlag(fmq.Region.create(4096), 0).wake(1)

    once()
    before = held()
    for _ in range(300):
        once()
    assert held() == before


@alone
def test_an_idle_end_costs_one_descriptor_and_one_mapping():
    """The queue's own descriptor can be given back while its end works on."""
    fmq.MessageQueue.create("u1", 8).writer().close()
    before = held()
    with fmq.MessageQueue.create("u1", 8) as queue:
        end = queue.writer()
    descriptors, mappings, threads = held()
    assert descriptors - before[0] == 1
    assert mappings - before[1] == 2  # the queue, and the page of its life word
    assert threads == before[2]
    end.close()


def test_one_thread_for_all_lives():
    """However many roles a process holds, one thread announces them all."""
    queues = [fmq.MessageQueue.create("u1", 8) for _ in range(50)]
    ends = [end for queue in queues for end in (queue.writer(), queue.reader())]
    names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert names.count("fmq-life") == 1
    for end in ends:
        end.close()


@pytest.mark.integration
def test_killed_peers_leave_nothing():
    """A dead process's roles, locks and memory go with it."""
    queue = fmq.MessageQueue.create("u1", 8)

    def once():
        ready, theirs = multiprocessing.Pipe()
        with process(hold, queue.descriptor, "writer", theirs, fails=True) as child:
            ready.recv()
            child.kill()
            child.join()
        ready.close()
        theirs.close()

    once()
    before = held()
    for _ in range(20):
        once()
    assert held() == before
