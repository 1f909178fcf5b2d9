"""Many threads on the same objects: what holds with the interpreter's global lock holds without it."""

import collections
import contextlib
import itertools
import os
import re
import subprocess
import sys
import sysconfig
import threading

import numpy as np
import pytest
from fmq_peers import asleep, control_word, exchange_all, in_a_fork, must_raise, thread
from waiting import PATIENCE

import fmq

TAIL, DATA_WAIT = 256, 384  # csrc/fmq/layout.h


@pytest.fixture(autouse=True)
def _many_switches():
    """Where there is a global lock, it is passed on as often as it can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(*targets):
    """Runs the targets at once, each in a thread, and raises what one of them raised."""
    start = threading.Barrier(len(targets))

    def run(target):
        start.wait(20)
        target()

    with contextlib.ExitStack() as running:
        for target in targets:
            running.enter_context(thread(run, target))


def insist(function, *arguments):
    """Calls until no other thread is in the way."""
    while True:
        with contextlib.suppress(fmq.Busy, fmq.Timeout):
            return function(*arguments)
        os.sched_yield()


# ---- one end -------------------------------------------------------------------------------------------------------


def test_many_threads_on_one_pair_of_ends(pair):
    """Each call succeeds, times out or raises Busy, and every element arrives exactly once, each thread's in order."""
    w, r = pair("u8", 64)
    writers, count, got = 4, 300, collections.deque()

    def write(me):
        for i in range(count):
            insist(w.write, [me << 32 | i], 0)

    def read():
        while len(got) < writers * count:
            with contextlib.suppress(fmq.Busy, fmq.Timeout), r.peek(1, 0) as span:
                got.append(int(span.first[0]))
            os.sched_yield()

    together(*(lambda me=me: write(me) for me in range(writers)), read, read)
    assert sorted(got) == [me << 32 | i for me in range(writers) for i in range(count)]
    for me in range(writers):
        assert [value & 0xFFFFFFFF for value in got if value >> 32 == me] == list(range(count))


def test_what_a_thread_reserved_is_its_own(pair):
    """Spans of many threads never overlap, are published whole, and are as long as they were asked for."""
    w, r = pair("u4", 64)
    sizes, rounds, got = (1, 2, 3, 5), 100, []

    def fill(size):
        with w.reserve(size, 0) as span:
            assert len(span) == size
            span[:] = size

    def nothing():
        with w.reserve(0) as span:
            assert len(span) == 0

    def write(size):
        for _ in range(rounds):
            insist(fill, size)
            insist(nothing)

    def read():
        while len(got) < sum(sizes) * rounds:
            got.extend(insist(r.read, 1, 0).tolist())

    together(*(lambda size=size: write(size) for size in sizes), read)
    while got:
        size = got[0]
        assert got[:size] == [size] * size
        del got[:size]


def test_a_reservation_of_nothing_ends_no_other(pair):
    """One thread's empty block may begin and end while another thread's reservation is open, before or after it."""
    w, r = pair()
    with contextlib.ExitStack() as empty:
        assert len(empty.enter_context(w.reserve(0))) == 0
        with w.reserve(2) as span:
            empty.close()
            span[:] = 7
    assert list(r.read(2, 0)) == [7, 7]


def test_an_end_that_is_closed_under_its_threads(pair):
    """One thread waits inside, others get Busy; a close ends all of them with Closed, and returns after the last."""
    for _ in range(20):
        with fmq.MessageQueue.create("u1", 16) as queue, queue.writer() as w:
            r, busy = queue.reader(), threading.Event()

            def call(r=r, busy=busy):
                try:
                    while True:
                        with contextlib.suppress(fmq.Busy):
                            r.read(1, 10)
                        busy.set()
                        os.sched_yield()
                except fmq.Closed:
                    pass

            with thread(call), thread(call), thread(call):
                assert busy.wait(PATIENCE)
                asleep(control_word(queue, DATA_WAIT))
                r.close()
                assert w.peer == "released"
                queue.reader().close()


def test_a_reservation_that_is_closed_by_another_thread(pair):
    """The block ends with Closed and publishes nothing; its memory stays mapped for as long as the block holds it."""
    w, r = pair()

    def block():
        with w.reserve(4) as span:
            together(w.close, w.close)
            span[:] = 1

    with thread(must_raise, fmq.Closed, block):
        pass
    assert r.available == 0


def test_whoever_closes_finds_the_role_free(pair):
    """Of several threads that close one end, none returns before the role is released."""
    for _ in range(50):
        w, r = pair()

        def close(w=w, r=r):
            w.close()
            assert r.peer == "released"

        together(close, close, close)


def test_an_exchange_belongs_to_one_thread_at_a_time(pair):
    """Each call returns the answer to its own question or raises Busy, in which case nothing was sent."""
    callers, count = 3, 150
    with fmq.MessageQueue.create("u1", 64) as there, fmq.MessageQueue.create("u1", 64) as back:
        server = thread(exchange_all, there.descriptor, back.descriptor, callers * count)
        with server, there.writer() as w, back.reader() as r:
            exchange = fmq.Exchange(w, r)

            def call(me):
                for i in range(count):
                    question = bytes([me, i, me + i, 0])
                    assert insist(exchange, question) == question[::-1]

            together(*(lambda me=me: call(me) for me in range(callers)))


def test_an_answer_is_not_overwritten_before_it_is_returned(pair):
    """A second thread's exchange, begun when the first one has its answer but has not returned it, is Busy."""
    if hasattr(sys, "_is_gil_enabled") and not sys._is_gil_enabled():
        pytest.skip("without a global lock the first thread cannot be kept from returning")
    w, _ = pair()
    queue = fmq.MessageQueue.create("u1", 16)
    back, r = queue.writer(), queue.reader()
    exchange, got, one = fmq.Exchange(w, r), [], np.ones(1, "u1")
    taken, asked = control_word(queue, TAIL), exchange.__call__
    with queue, back, r, thread(lambda: got.append(exchange(b""))):
        asleep(control_word(queue, DATA_WAIT))
        sys.setswitchinterval(10)  # this thread does not give the global lock up, in which the other one would return
        back.write(one)
        while not taken[0]:
            pass
        back.write(2 * one)
        with pytest.raises(fmq.Busy):
            asked(b"")
        sys.setswitchinterval(1e-6)
        assert list(r.read(1)) == [2]
    assert got == [b"\1"]


def test_an_exchange_keeps_its_ends():
    """Who forgets the writer and the reader still has their memory: the exchange ends, and does not crash."""
    w = fmq.MessageQueue.create("u1", 8).writer()
    r = fmq.MessageQueue.create("u1", 8).reader()
    exchange = fmq.Exchange(w, r)
    del w, r
    with pytest.raises(fmq.Timeout):
        exchange(b"12", 0)


# ---- making and closing --------------------------------------------------------------------------------------------


def test_queues_come_and_go_in_many_threads():
    """Each thread's queues are its own, whatever numbers the kernel gives their descriptors, and nothing is left."""
    before = len(os.listdir("/proc/self/fd"))

    def live(me):
        for i in range(30):
            with fmq.MessageQueue.create("u2", 8 + me) as queue, queue.writer() as w, queue.reader() as r:
                w.write([me, i])
                copy = fmq.MessageQueue.open(queue.descriptor)
                assert copy.capacity == 8 + me
                copy.close()
                assert list(r.read(2, 0)) == [me, i]

    together(*(lambda me=me: live(me) for me in range(4)))
    assert len(os.listdir("/proc/self/fd")) <= before


def test_names_come_and_go_in_many_threads(name):
    """Of those who create one name, one succeeds; what others open under it is whole."""

    def live():
        for _ in range(30):
            with contextlib.suppress(FileExistsError):
                fmq.MessageQueue.create("u2", 8, name=name).close()
            with contextlib.suppress(FileNotFoundError):
                assert fmq.MessageQueue.open(name).capacity == 8
            with contextlib.suppress(FileNotFoundError):
                fmq.unlink(name)

    together(live, live, live)


def test_a_region_is_closed_once(monkeypatch):
    """A second thread that closes it meanwhile does not close what may have the descriptor's number by now."""
    region, close, closed = fmq.Region.create(4096), os.close, []

    def slow_close(fd):
        closed.append(fd)
        if closed == [number]:
            together(region.close)
        close(fd)

    number = region.fd
    monkeypatch.setattr(os, "close", slow_close)
    region.close()
    assert closed.count(number) == 1


def test_a_region_that_cannot_be_mapped_is_closed_once(monkeypatch):
    """Neither does its end as garbage close what another thread has opened since."""
    fd, close, closed = os.open(__file__, os.O_RDONLY), os.close, []
    monkeypatch.setattr(os, "close", lambda number: (closed.append(number), close(number)))
    with pytest.raises(PermissionError):
        fmq.Region(fd, 1)
    assert closed == [fd]


def test_a_role_is_of_its_queue_or_of_none():
    """Who takes a role while another thread closes the queue gets this queue's, or a ValueError that says closed."""

    def take(queue, role, got):
        with contextlib.suppress(ValueError):
            got.append(getattr(queue, role)())

    def reuse_numbers():
        for _ in range(3):
            fmq.MessageQueue.create("u1", 4).close()

    for _ in range(60):
        queue, got = fmq.MessageQueue.create("u1", 4), []
        takers = [lambda role=role: take(queue, role, got) for role in ("writer", "reader")]  # noqa: B023
        together(*takers, queue.close, reuse_numbers)
        assert [end.peer for end in got] in ([], ["nobody"], ["alive", "alive"])
        for end in got:
            end.close()


def test_one_thread_takes_a_role():
    """Of many that want it at once, one has it and the others get RoleTaken."""
    with fmq.MessageQueue.create("u1", 4) as queue:
        for role in ("writer", "reader") * 20:
            got, refused = [], []

            def take(role=role, got=got, refused=refused):
                try:
                    got.append(getattr(queue, role)())
                except fmq.RoleTaken:
                    refused.append(1)

            together(take, take, take)
            assert (len(got), len(refused)) == (1, 2)
            got[0].close()


def test_a_fork_beside_threads_that_take_roles():
    """A child keeps no role of its parent, also of those that another thread was just taking."""
    over = threading.Event()

    def take():
        with fmq.MessageQueue.create("u1", 4) as queue:
            while not over.is_set():
                with queue.writer():
                    pass

    def child():
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError), open(f"/proc/self/fdinfo/{number}") as told:
                assert not re.search(r"OFDLCK +ADVISORY +WRITE", told.read())

    with thread(take), thread(take):
        for _ in range(10):
            in_a_fork(child)
        over.set()


# ---- event flags ---------------------------------------------------------------------------------------------------


def test_a_token_goes_round_on_an_event_flag():
    """Each thread sleeps on its own bit and wakes the next one: every wake-up arrives, none arrives twice."""
    flag, threads, rounds = fmq.EventFlag(fmq.Region.create(8), 0), 4, 100
    passed = []

    def run(me):
        for i in range(rounds):
            assert flag.wait(1 << me, 10) == 1 << me
            passed.append((i, me))
            flag.wake(1 << (me + 1) % threads)

    flag.wake(1)
    together(*(lambda me=me: run(me) for me in range(threads)))
    assert passed == list(itertools.product(range(rounds), range(threads)))
    assert flag.wait(1, 0) == 1  # the token, after the last round


def test_a_bit_is_taken_by_one_thread():
    """Many wait for the same bit; each wake-up is taken by exactly one of them."""
    flag, count, taken = fmq.EventFlag(fmq.Region.create(8), 0), 200, collections.deque()
    bit, done, over = 1, 2, 4

    def take():
        while not (got := flag.wait(bit | over, 10)) & over:
            taken.append(got)
            flag.wake(done)
        flag.wake(over)  # for the next one

    def give():
        for _ in range(count):
            flag.wake(bit)
            assert flag.wait(done, 10) == done
        flag.wake(over)

    together(take, take, take, give)
    assert list(taken) == [bit] * count


# ---- caches and the lock itself ------------------------------------------------------------------------------------


def test_many_threads_read_the_same_new_dtypes():
    """The cache of parsed dtypes is filled by whoever comes first, and gives everybody the same answer."""

    def live():
        for n in range(1, 30):
            dtype = np.dtype([("a", "u1", (n,)), ("b", "f8")])
            with fmq.MessageQueue.create(dtype, 2) as queue:
                assert fmq.MessageQueue.open(queue.descriptor).dtype == dtype

    together(live, live, live)


@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this interpreter has its global lock always"
)
def test_importing_leaves_the_global_lock_off():
    """On free-threaded CPython neither fmq nor what it imports turns the lock on again."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHON_GIL"}
    command = [sys.executable, "-W", "error", "-c", "import sys, fmq; sys.exit(sys._is_gil_enabled())"]
    subprocess.run(command, check=True, env=environment)
