"""Every future is one of `concurrent.futures`: its functions, callbacks and a look at done() work."""

import asyncio
import concurrent.futures
import contextlib
import copy
import pickle
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial

import pytest
from frames import frame, held, number_of

import driver
from burst import MissedDeadlineTransient, Result
from driver.client.completion import Completion
from driver.deadlines import LAST_WORD
from driver.devices import device_class
from driver.runtime.local import LocalDevice
from fmq import clock

ROW = frame(0, 7)


def _burst(model):
    @contextlib.contextmanager
    def opened():
        with model.burst(depth=4) as burst:
            yield lambda: burst.submit(ROW)

    return opened()


def _request(method):
    @contextlib.contextmanager
    def opened(model, kit):
        yield lambda: getattr(model, method)(kit.request([ROW], ROW.nbytes)[0])

    return opened


@contextlib.contextmanager
def _served(model, _):
    with driver.compile(model.model, [model.device]) as compiled, compiled.serve(replicas=1) as server:
        yield lambda: server.submit(ROW)


@contextlib.contextmanager
def _compiled(model, _, devices):
    with driver.compile(model.model, devices(model)) as compiled, compiled.burst(depth=4) as burst:
        yield lambda: burst.submit(ROW)


@contextlib.contextmanager
def _compiled_async(model, kit):
    with driver.compile(model.model, [model.device]) as compiled:
        yield lambda: compiled.execute_async(kit.request([ROW], ROW.nbytes)[0])


WAYS = {
    "burst": lambda model, _: _burst(model),
    "execute_async": _request("execute_async"),
    "execute_fenced": _request("execute_fenced"),
    "burst in this process": partial(_compiled, devices=lambda _: ["cpu"]),
    "compiled": partial(_compiled, devices=lambda model: [model.device]),
    "compiled, execute_async": _compiled_async,
    "served": _served,
}


@pytest.fixture(params=WAYS)
def submit(request, fast, kit):
    """Begins an execution of ROW: its future."""
    with WAYS[request.param](fast, kit) as begin:
        yield begin


def checked(value):
    outputs = value.outputs if isinstance(value, Result) else value
    assert outputs[0].tolist() == (ROW + 1).tolist()
    return value


def test_a_future_is_one_of_concurrent_futures(submit, kit):
    """By class, for `wait`, `as_completed` and `asyncio.wrap_future`; nobody else waits for it."""
    assert isinstance(submit(), concurrent.futures.Future)
    for when in (concurrent.futures.ALL_COMPLETED, concurrent.futures.FIRST_COMPLETED):
        futures = [submit(), submit()]
        done, rest = concurrent.futures.wait(futures, kit.patience, when)
        assert done | rest == set(futures)
        assert not rest or when is concurrent.futures.FIRST_COMPLETED
        for future in done:
            checked(future.result(0))
            assert future.exception(0) is None
            assert future.done()
            assert not future.running()
            assert not future.cancelled()
    futures = [submit() for _ in range(4)]
    assert set(concurrent.futures.as_completed([*futures, futures[0]], kit.patience)) == set(futures)

    async def wrapped():
        return await asyncio.wait_for(asyncio.wrap_future(submit()), kit.patience)

    checked(asyncio.run(wrapped()))


def test_a_loop_that_looks_sees_it_done(submit, kit):
    """done() takes what has arrived; no thread waits."""
    future = submit()
    kit.until(future.done)
    checked(future.result(0))


def test_a_callback_comes_without_a_caller_that_waits(submit, kit, caplog):
    """With the future; those that are added later are called at once; one that raises is logged, and hurts no other."""
    called, heard = [], threading.Event()
    future = submit()
    future.add_done_callback(lambda _: 1 / 0)
    future.add_done_callback(called.append)
    future.add_done_callback(lambda _: heard.set())
    assert heard.wait(kit.patience)
    kit.until(lambda: called == [future])  # two threads may call back
    future.add_done_callback(called.append)
    assert called == [future, future]
    checked(called[0].result(0))
    kit.until(lambda: "ZeroDivisionError" in caplog.text)


def test_a_callback_that_ends_its_thread_ends_no_other(submit, kit):
    """SystemExit out of a callback is logged, and callbacks of later executions come as ever."""
    for _ in range(2):
        heard = threading.Event()
        if not isinstance(future := submit(), Completion):
            return
        with suppress(SystemExit):  # of one that is done already, the callback is called here
            future.add_done_callback(lambda _: sys.exit("not this thread"))
        future.add_done_callback(lambda _, heard=heard: heard.set())
        kit.until(heard.is_set)


def test_a_result_that_is_asked_for_after_its_deadline():
    """Is a missed deadline once the device has had its last word, also for a caller that does not wait."""
    with pytest.raises(MissedDeadlineTransient):
        Completion(deadline=clock.now() - LAST_WORD - 1).result(0)


def test_it_can_be_awaited(submit, kit):
    """Pending or done, several times, in one loop after the other."""

    async def awaited(future):
        return await asyncio.wait_for(asyncio.ensure_future(once(future)), kit.patience)

    async def once(future):
        return await future

    future = submit()
    if isinstance(future, Completion):
        for _ in range(2):
            checked(asyncio.run(awaited(future)))


def test_it_says_that_it_cannot_be_pickled(submit):
    """By the name of its class; what it is the future of can be."""
    future = submit()
    if isinstance(future, Completion):
        for way in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=type(future).__name__):
                way(future)
    checked(pickle.loads(pickle.dumps(future.result())))


class TestOneThatGoesOn:
    """On the slow device, which holds an execution until the test releases it."""

    def test_waits_end_in_time(self, slow, kit):
        """`wait` and `as_completed` with a timeout return while it goes on, and hear of its end later."""
        with slow.burst(depth=2) as burst:
            first, release = held(burst, 1)
            second = burst.submit(frame(0, 2))
            assert not first.done()
            assert first.running()
            assert concurrent.futures.wait([first, second], 0.01).not_done == {first, second}
            with pytest.raises(TimeoutError):
                next(concurrent.futures.as_completed([first], 0.01))
            release()
            assert concurrent.futures.wait([first, second], kit.patience).not_done == set()
            assert [number_of(future.result(0)) for future in (first, second)] == [1, 2]

    def test_cancelling_it_wakes_who_waits(self, slow, kit):
        """`wait`, and a callback; then cancel() stays True, and result() and exception() raise CancelledError."""
        with slow.burst(depth=2) as burst:
            (future, release), called = held(burst, 1), []
            future.add_done_callback(called.append)
            waiting = threading.Thread(target=concurrent.futures.wait, args=([future], kit.patience))
            waiting.start()
            kit.until(lambda: future._waiters)
            assert future.cancel()
            waiting.join()
            assert called == [future]
            assert future.cancel()
            for ask in (future.result, future.exception):
                with pytest.raises(concurrent.futures.CancelledError):
                    ask(0)
            assert concurrent.futures.wait([future], kit.patience).done == {future}
            release()

    def test_a_failure_ends_the_wait_for_the_first_one(self, slow, kit):
        """FIRST_EXCEPTION: at its deadline a request has failed, whoever waits; the other one goes on."""
        with slow.burst(depth=2) as burst:
            first, release = held(burst, 1)
            second = burst.submit(frame(0, 2), deadline=time.monotonic() + 0.05)
            done, rest = concurrent.futures.wait([first, second], kit.patience, concurrent.futures.FIRST_EXCEPTION)
            assert (done, rest) == ({second}, {first})
            assert isinstance(second.exception(0), driver.MissedDeadlineTransient)
            third = burst.submit(frame(0, 3), deadline=time.monotonic() + 0.05) if burst.source.has_room else second
            kit.until(third.done)
            release()

    def test_a_compiled_execution_that_is_cancelled(self, slow, kit):
        """`wait` hears of it, too."""
        with driver.compile(slow.model, [slow.device]) as compiled:
            future = compiled.execute_async(kit.request([frame(0.2, 1)], 16)[0])
            assert future.cancel()
            assert concurrent.futures.wait([future], kit.patience).done == {future}

    @pytest.mark.parametrize("where", ["device", "compiled", "this process"])
    def test_an_asynchronous_execution_is_given_up(self, slow, kit, where):
        """At the deadline of its wait, or with the task that awaits it: it has failed from then on, whatever comes."""

        async def awaited(future):
            await asyncio.wait_for(future, 0.01)

        here = LocalDevice(device_class(kit.odd("Slow"))())
        with (
            driver.compile(slow.model, [slow.device]) as compiled,
            here.prepare(slow.model) as local,
        ):
            model = {"device": slow, "compiled": compiled, "this process": local}[where]
            first, second = (model.execute_async(kit.request([frame(0.2, 1)], 16)[0]) for _ in range(2))
            for ask in (partial(first.result, deadline=time.monotonic() + 0.01), first.result):
                with pytest.raises(driver.MissedDeadlineTransient):
                    ask()
            assert not first.cancel()
            with pytest.raises(TimeoutError):
                asyncio.run(awaited(second))
            assert second.cancelled()
            assert model.execute_async(kit.request([frame(0, 1)], 16)[0]).result(kit.patience).status == 0

    def test_the_end_of_the_burst_is_heard(self, slow, kit):
        """A burst that is closed ends the wait for its futures, with an error."""
        with slow.burst(depth=2) as burst:
            future, release = held(burst, 1)
            threading.Thread(target=lambda: (kit.until(lambda: future._waiters), burst.close())).start()
            assert concurrent.futures.wait([future], kit.patience).done == {future}
            assert isinstance(future.exception(0), driver.GeneralFailure)
            release()


def by_result(futures, kit):
    return [future.result(kit.patience) for future in futures]


def by_wait(futures, kit):
    assert not concurrent.futures.wait(futures, kit.patience).not_done
    return by_result(futures, kit)


def by_completion(futures, kit):
    assert len(list(concurrent.futures.as_completed(futures, kit.patience))) == len(futures)
    return by_result(futures, kit)


def by_looking(futures, kit):
    for future in futures:
        kit.until(future.done)
    return by_result(futures, kit)


def by_callback(futures, kit):
    counted = threading.Semaphore(0)
    for future in futures:
        future.add_done_callback(lambda _: counted.release())
    assert [counted.acquire(timeout=kit.patience) for _ in futures] == [True] * len(futures)
    return by_result(futures, kit)


def test_threads_wait_in_all_ways_at_once(fast, kit):
    """By result, wait, as_completed, done and callbacks, on one burst: each thread gets its own results."""
    right = []

    def work(burst, way, k):
        for n in range(k, k + 80, 2):
            assert [number_of(r) for r in way([burst.submit(frame(0, m)) for m in (n, n + 1)], kit)] == [n, n + 1]
        right.append(way)

    ways = [by_result, by_wait, by_completion, by_looking, by_callback]
    with fast.burst(depth=4) as burst:
        threads = [threading.Thread(target=work, args=(burst, way, 1000 * k)) for k, way in enumerate(ways)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(kit.patience)
    assert set(right) == set(ways)


@pytest.mark.integration
def test_a_process_without_callbacks_has_no_thread_for_them(fast):
    """Submitting, waiting and looking start none: what a run costs stays as it was."""
    program = (
        "import threading, numpy as np, driver\n"
        "m = driver.ModelBuilder(); x = m.input('float32', (4,)); m.output(m.operation('ADD', x, x, 0))\n"
        "with driver.connect('reference') as d, d.prepare(m.build()) as p, p.burst(depth=2) as b:\n"
        "    b.submit(np.ones(4, np.float32)).result(); f = b.submit(np.ones(4, np.float32))\n"
        "    while not f.done(): pass\n"
        "    names = [t.name for t in threading.enumerate()]; assert 'burst-results' not in names, names\n"
        "    heard = threading.Event(); f = b.submit(); f.add_done_callback(lambda _: heard.set()); heard.wait()\n"
        "    assert 'burst-results' in [t.name for t in threading.enumerate()]\n"
    )
    assert (
        subprocess.run([sys.executable, "-X", "dev", "-W", "error", "-c", program], check=True, timeout=60).returncode
        == 0
    )
