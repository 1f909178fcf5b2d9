"""Threads for work by account: whose work waits for whose."""

import threading

import pytest
from waiting import PATIENCE

from burst import ResourceExhaustedTransient
from burst.serving_thread import ServingThread
from driver.engine.account_threads import AccountThreads

E, V, W = 1001, 1002, 1003


@pytest.fixture
def gate():
    """Holds what waits for it, until the test is over."""
    event = threading.Event()
    yield event
    event.set()


def held(gate):
    """Work that has begun, and what ends it."""
    begun = threading.Event()

    def work():
        begun.set()
        assert gate.wait(PATIENCE)

    return begun, work


def test_no_account_waits_for_anothers_work(gate):
    """One account's work does not return, and more of its is queued: another's is done all the same."""
    threads, (begun, work) = AccountThreads("test", 2), held(gate)
    stuck = [threads.submit(E, work) for _ in range(50)]
    assert begun.wait(PATIENCE)
    assert threads.submit(V, lambda: "done").result(PATIENCE) == "done"
    assert not any(future.done() for future in stuck)


def test_work_of_an_account_is_done_in_order(gate):
    """One piece after the other, in one thread at a time."""
    threads, order = AccountThreads("test", 4), []
    begun, work = held(gate)
    first = threads.submit(E, work)
    assert begun.wait(PATIENCE)
    rest = [threads.submit(E, lambda n=n: order.append(n)) for n in range(20)]
    assert not order
    gate.set()
    for future in (first, *rest):
        future.result(PATIENCE)
    assert order == list(range(20))


def test_accounts_take_turns(gate):
    """More accounts than threads: the one that comes last waits for a piece of each, and not for all of their work."""
    threads, order = AccountThreads("test", 1), []
    begun, work = held(gate)
    threads.submit(E, work)
    assert begun.wait(PATIENCE)
    futures = [threads.submit(uid, lambda uid=uid: order.append(uid)) for uid in (E, E, E, V, V, W)]
    gate.set()
    for future in futures:
        future.result(PATIENCE)
    assert order == [V, W, E, V, E, E]


def test_what_is_cancelled_is_dropped(gate):
    """Work that has not begun; what was begun goes on."""
    threads, done = AccountThreads("test", 1), []
    begun, work = held(gate)
    running = threads.submit(E, work)
    assert begun.wait(PATIENCE)
    queued, last = threads.submit(E, lambda: done.append("queued")), threads.submit(E, lambda: done.append("last"))
    assert queued.cancel()
    assert not running.cancel()
    gate.set()
    last.result(PATIENCE)
    assert done == ["last"]


def test_an_error_is_the_results():
    """And the next piece is done."""
    threads = AccountThreads("test", 1)
    with pytest.raises(ZeroDivisionError):
        threads.submit(E, lambda: 1 / 0).result(PATIENCE)
    assert threads.submit(E, lambda: 7).result(PATIENCE) == 7


def test_threads_end(monkeypatch):
    """When there has been no work for a while; the next work starts another."""
    started = []

    class Noted(ServingThread):
        def start(self):
            started.append(self)
            super().start()

    monkeypatch.setattr("driver.engine.account_threads.LINGER", 0.0)
    monkeypatch.setattr("driver.engine.account_threads.ServingThread", Noted)
    threads = AccountThreads("fleeting", 1)
    for count in range(1, 4):
        assert threads.submit(E, lambda: 7).result(PATIENCE) == 7
        assert len(started) == count
        started[-1].join(PATIENCE)
        assert not started[-1].is_alive()


def test_no_thread_can_be_started(monkeypatch):
    """The asking client fails, and later ones do not."""
    threads = AccountThreads("test", 2)
    with monkeypatch.context() as patched:
        patched.setattr(ServingThread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("can't start")))
        with pytest.raises(ResourceExhaustedTransient, match="no thread can be started for test now: can't start"):
            threads.submit(E, lambda: None)
    assert threads.submit(E, lambda: 7).result(PATIENCE) == 7
