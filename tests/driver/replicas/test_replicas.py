"""One model for many callers: replicas, a bounded queue, deadlines, batches, draining, and the death of the device."""

import asyncio
import contextlib
import importlib
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from frames import frame

import driver
from burst import Busy, DeviceUnavailable, MissedDeadlineTransient, ResourceExhaustedTransient, StatusError, Timeout
from driver import replicas
from driver.replicas import QueueFull, batching, model_server
from driver.replicas.waiting import ExecutionEstimate, RequestQueue

ENDLESS = 60.0  # seconds that an execution takes at most in these tests: until its input changes, or its device dies


def numbers(outputs):
    """Of a frame (frames.py) that was served."""
    return int(outputs[0][0, 1]) - 1


def test_the_old_name_of_the_module_warns(monkeypatch):
    """`driver.serving` still gives what `driver.replicas` has, and says that it is deprecated."""
    monkeypatch.delitem(sys.modules, "driver.serving", raising=False)
    with pytest.warns(DeprecationWarning, match=r"driver\.replicas"):
        old = importlib.import_module("driver.serving")
    assert old.ModelServer is replicas.ModelServer


@pytest.fixture
def compiled(connect, kit):
    """x + 1 on the shared reference device."""
    with driver.compile(kit.add_model(), devices=[connect()]) as model:
        yield model


@pytest.fixture
def open_compiled(connect, kit):
    """The same, for any number of rows."""
    with driver.compile(kit.open_model(), devices=[connect()]) as model:
        yield model


@pytest.fixture
def slow_compiled(connect, kit):
    """As `slow`, compiled."""
    with driver.compile(kit.add_model(), devices=[connect("Slow")]) as model:
        yield model


class TestTasks:
    def test_each_gets_its_own(self, compiled):
        """Any number of tasks; each gets the outputs of its own inputs, by position and by name."""

        async def main():
            async with compiled.serve(queue=200) as server:
                found = await asyncio.gather(*(server.run(frame(0, n)) for n in range(150)))
                assert [numbers(outputs) for outputs in found] == list(range(150))
                assert numbers(await server.run({"input_0": frame(0, 7)})) == 7
                assert server.stats()["answered"] == 151

        asyncio.run(main())

    def test_outputs_are_the_callers(self, compiled):
        """Outputs are copies: more of them can be held than a burst has memory for, and none changes."""

        async def main():
            async with compiled.serve(queue=100) as server:
                held = [await server.run(frame(0, n)) for n in range(100)]
            assert [numbers(outputs) for outputs in held] == list(range(100))

        asyncio.run(main())

    def test_replicas_work_at_once(self, slow_compiled):
        """As many executions run at once as there are replicas: each waits until all of them have begun."""

        async def main():
            async with slow_compiled.serve(replicas=3, depth=1) as server:
                tasks = [asyncio.ensure_future(server.run(frame(0.3, n))) for n in range(3)]
                while server.stats()["executing"] < 3:
                    await asyncio.sleep(0)
                assert [each["in_flight"] for each in server.stats()["replicas"]] == [1, 1, 1]
                assert [numbers(outputs) for outputs in await asyncio.gather(*tasks)] == [0, 1, 2]

        asyncio.run(main())

    def test_a_full_queue_refuses_at_once(self, slow_compiled):
        """One more than the queue takes gets QueueFull, which says how many wait, and when to come back."""

        async def main():
            async with slow_compiled.serve(replicas=1, depth=1, queue=2, warm_up=False) as server:
                tasks = [asyncio.ensure_future(server.run(frame(0.2, n))) for n in range(3)]
                await asyncio.sleep(0)
                with pytest.raises(QueueFull, match=r"2 requests wait.*queue=2") as caught:
                    await server.run(frame(0, 9))
                assert isinstance(caught.value, Busy)
                assert caught.value.retry_after > 0
                assert [numbers(outputs) for outputs in await asyncio.gather(*tasks)] == [0, 1, 2]
                assert server.stats()["refused"] == 1

        asyncio.run(main())

    def test_bad_inputs_are_told_to_their_caller(self, open_compiled):
        """An input that does not fit is a ValueError of its caller, and no other request of a batch notices."""

        async def main():
            async with open_compiled.serve(batch=4) as server:
                right = [server.run(np.full((1, 4), n, np.float32)) for n in range(6)]
                wrong = [server.run(np.zeros((1, 3), np.float32)), server.run(np.zeros((1, 4), np.float64))]
                found = await asyncio.gather(*right, *wrong, return_exceptions=True)
            assert [outputs[0][0, 0] for outputs in found[:6]] == [1, 2, 3, 4, 5, 6]
            assert all(isinstance(error, ValueError) for error in found[6:])
            assert "(1, 3)" in str(found[6])
            assert "float64" in str(found[7])

        asyncio.run(main())

    def test_a_cancelled_task_leaves_the_queue(self, slow_compiled):
        """A task that is cancelled, waiting or executing, makes room for others; its result comes to nobody."""

        async def main():
            async with slow_compiled.serve(replicas=1, depth=1, queue=1, warm_up=False) as server:
                executing = asyncio.ensure_future(server.run(frame(0.2, 1)))
                waiting = asyncio.ensure_future(server.run(frame(0, 2)))
                await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.wait([waiting])
                third = asyncio.ensure_future(server.run(frame(0, 3)))
                await asyncio.sleep(0)
                executing.cancel()
                assert numbers(await third) == 3
                counts = server.stats()
                assert (counts["cancelled"], counts["answered"], counts["waiting"]) == (2, 1, 0)

        asyncio.run(main())

    def test_all_are_cancelled_at_once(self, slow_compiled):
        """Tasks that are cancelled in one turn, executing or waiting, leave no place taken: the server drains."""

        async def main():
            async with slow_compiled.serve(warm_up=False) as server:
                tasks = [asyncio.create_task(server.run(frame(0.1, 1))) for _ in range(8)]
                while not server.stats()["executing"]:
                    await asyncio.sleep(0)
                for task in tasks:
                    task.cancel()
                found = await asyncio.gather(*tasks, return_exceptions=True)
                assert all(isinstance(each, asyncio.CancelledError) for each in found)
                assert await server.drain(20)
                counts = server.stats()
                assert (counts["cancelled"], counts["executing"], counts["waiting"]) == (8, 0, 0)

        asyncio.run(asyncio.wait_for(main(), 60))

    def test_cancelled_before_it_began(self, compiled):
        """A task that is cancelled at once leaves no place taken: all places are free for others afterwards."""

        async def main():
            async with compiled.serve(replicas=2, depth=2) as server:
                for _ in range(50):
                    task = asyncio.ensure_future(server.run(frame(0, 1)))
                    await asyncio.sleep(0)
                    task.cancel()
                await asyncio.gather(*(server.run(frame(0, n)) for n in range(8)))
                assert [each["in_flight"] for each in server.stats()["replicas"]] == [0, 0]

        asyncio.run(main())

    def test_another_loop_is_told(self, compiled):
        """A server belongs to the loop that opened it; another one is told what to do instead."""

        async def main():
            async with compiled.serve() as server:
                with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="another event loop"):
                    await asyncio.wrap_future(pool.submit(asyncio.run, server.run(frame(0, 1))))

        asyncio.run(main())


class TestTimes:
    def test_a_timeout_in_the_queue(self, slow_compiled):
        """A request whose time passes while it waits gets Timeout for `timeout` and MissedDeadline for `deadline`, was
        not executed, and says that it was queued.
        """

        async def main():
            async with slow_compiled.serve(replicas=1, depth=1, warm_up=False) as server:
                busy = asyncio.ensure_future(server.run(frame(0.3, 1)))
                await asyncio.sleep(0)
                with pytest.raises(Timeout, match=r"within 0\.02 s") as timeout:
                    await server.run(frame(0, 2), timeout=0.02)
                with pytest.raises(MissedDeadlineTransient) as missed:
                    await server.run(frame(0, 3), deadline=time.monotonic() + 0.02)
                assert timeout.value.phase == missed.value.phase == "queued"
                assert numbers(await busy) == 1
                found = server.stats()
                assert (found["missed"], found["replicas"][0]["executions"]) == (2, 1)

        asyncio.run(main())

    def test_a_replica_that_is_stuck_gets_nothing(self, slow_compiled):
        """A replica whose device still executes what its caller has given up gets no requests while another is free."""

        async def main():
            async with slow_compiled.serve(replicas=2, depth=1, warm_up=False) as server:
                with pytest.raises(TimeoutError):
                    await server.run(frame(ENDLESS, 1), timeout=0.05)
                for n in range(10):
                    assert numbers(await server.run(frame(0, n), timeout=20)) == n
                assert sorted(each["executions"] for each in server.stats()["replicas"]) == [0, 10]

        asyncio.run(main())

    def test_the_first_comes_first(self):
        """Without deadlines, requests are taken in the order in which they came."""
        assert order_of([None, None, None], usual=10) == ([0, 1, 2], [])

    def test_hopeless_ones_make_way(self):
        """Requests that can no longer be done in time are told at once, and the oldest that can be done is taken."""
        assert order_of([1, 5, 1000, 2000], usual=10) == ([2, 3], [0, 1])

    def test_not_all_are_hopeless(self):
        """When none can be done in time, the one with the most time left is tried: otherwise one execution that took
        long would end all others, and nothing would correct the estimate.
        """
        assert order_of([3, 8, 5], usual=1000) == ([1, 2, 0], [])

    def test_an_estimate_follows(self):
        """The estimate follows executions that become shorter."""
        estimate = ExecutionEstimate()
        for ns in [10**9] + [10**6] * 100:
            estimate.took(ns)
        assert estimate.most < 2 * 10**7


def order_of(milliseconds, usual):
    """In which order requests with so much time left are taken, and which are told that they cannot be done."""

    async def main():
        from driver.client.tasks import TaskTimes
        from driver.replicas.waiting import WaitingRequest

        queue, estimate, loop = RequestQueue(10, 1, 0), ExecutionEstimate(), asyncio.get_running_loop()
        for _ in range(100):
            estimate.took(usual * 10**6)
        waiting = [
            WaitingRequest((), TaskTimes.of(None if ms is None else ms / 1e3, None), loop.create_future())
            for ms in milliseconds
        ]
        for request in waiting:
            queue.append(request)
        taken = []
        while requests := queue.take(estimate, at_once=False).requests:
            taken.append(waiting.index(requests[0]))
        told = [n for n, request in enumerate(waiting) if request.done.done()]
        for n in told:
            assert isinstance(waiting[n].done.exception(), TimeoutError)
        return taken, told

    return asyncio.run(main())


class TestBatches:
    def test_what_waits_runs_together(self, open_compiled):
        """Requests that wait together run together, at most as many rows as a batch takes; each gets its own rows."""

        async def main():
            async with open_compiled.serve(
                replicas=1, depth=1, batch=8, batch_window=0.5, queue=100, warm_up=False
            ) as server:
                sizes = [1, 2, 3, 1, 1, 8, 2, 5, 4, 9]
                given = [np.full((rows, 4), n, np.float32) for n, rows in enumerate(sizes)]
                found = await asyncio.gather(*(server.run(array) for array in given))
                for array, outputs in zip(given, found, strict=True):
                    assert np.array_equal(outputs[0], array + 1)
                assert sum(n * count for n, count in server.stats()["batches"].items()) == len(sizes)
                assert max(server.stats()["batches"]) > 1

        asyncio.run(main())

    def test_one_caller_does_not_wait_for_company(self, open_compiled):
        """A caller that is alone never waits for the window, however long that is."""

        async def main():
            async with open_compiled.serve(batch=8, batch_window=60) as server:
                for n in range(20):
                    assert (await server.run(np.full((1, 4), n, np.float32)))[0][0, 0] == n + 1

        asyncio.run(main())

    def test_a_drain_does_not_wait_for_company(self, open_compiled):
        """Requests that wait for others run at once when the server drains."""

        async def main():
            async with open_compiled.serve(replicas=1, batch=64, batch_window=60) as server:
                tasks = [asyncio.ensure_future(server.run(np.full((1, 4), n, np.float32))) for n in range(12)]
                await asyncio.sleep(0)
                assert await server.drain(20)
                assert [task.result()[0][0, 0] for task in tasks] == list(range(1, 13))

        asyncio.run(main())

    def test_one_bad_request_fails_alone(self, connect):
        """When a batch fails, each of its requests runs once more by itself: a bad one fails alone."""
        builder = driver.ModelBuilder()
        table = builder.constant(np.arange(12, dtype=np.float32).reshape(4, 3))
        builder.output(builder.operation("EMBEDDING_LOOKUP", builder.input("int32", (0,)), table))

        async def main():
            with driver.compile(builder.build(), devices=[connect()]) as model:
                async with model.serve(replicas=1, depth=1, batch=4, batch_window=0.2, warm_up=False) as server:
                    rows = [server.run(np.array([n], np.int32)) for n in (0, 3, 99, 1, 2)]
                    found = await asyncio.gather(*rows, return_exceptions=True)
                    assert server.stats()["batches"].keys() & {3, 4}
                    return found

        found = asyncio.run(main())
        assert isinstance(found.pop(2), StatusError)
        assert [outputs[0][0, 0] for outputs in found] == [0, 9, 3, 6]

    @pytest.mark.parametrize(("fixed", "per_row", "gain"), [(1e6, 0, 8), (0, 1e6, 1), (1e6, 1e6, 16 / 9)])
    def test_what_joining_gains(self, kit, monkeypatch, fixed, per_row, gain):
        """It is rows a second of all replicas, of joined requests over those that run one by one."""
        now = [0]

        class Timed:
            """A burst whose device takes so many nanoseconds, one request after the other."""

            model = kit.open_model()

            def submit(self, array):
                now[0] += int(fixed + per_row * len(array))
                return SimpleNamespace(result=lambda: SimpleNamespace(raise_for_status=lambda: None))

        monkeypatch.setattr(batching, "clock", SimpleNamespace(now=lambda: now[0]))
        found = batching.batch_gain([Timed(), Timed()], ((1, 4),), ((8, 4),), 2)
        assert found == pytest.approx(gain)

    @pytest.mark.parametrize(("gain", "batch"), [(0.98, 1), (1.5, 8)])
    def test_requests_are_joined_where_that_pays(self, open_compiled, monkeypatch, caplog, gain, batch):
        """What was measured at warm-up decides; `stats` has it, and a warning says that requests are not joined."""
        monkeypatch.setattr(model_server, "batch_gain", lambda *_: gain)

        async def main():
            async with open_compiled.serve(replicas=1, depth=1, batch=8, batch_window=60, queue=100) as server:
                tasks = [server.run(np.full((1, 4), n, np.float32)) for n in range(17)]
                found = await asyncio.gather(*tasks)
                assert [outputs[0][0, 0] for outputs in found] == list(range(1, 18))
                return server.stats()

        stats = asyncio.run(main())
        assert (stats["batch_gain"], stats["batch"], max(stats["batches"])) == (gain, batch, batch)
        assert ("joins no requests: 8 rows together give 0.98 times" in caplog.text) == (batch == 1)

    def test_what_cannot_be_measured_is_joined(self, open_compiled, monkeypatch, caplog):
        """Where the device refuses as many joined requests at once as the measurement sends, the server opens all the
        same, joins as it was told, and says so.
        """

        def refused(*_):
            raise ResourceExhaustedTransient("no memory")

        monkeypatch.setattr(model_server, "batch_gain", refused)

        async def main():
            async with open_compiled.serve(replicas=1, batch=8) as server:
                return server.stats()

        stats = asyncio.run(main())
        assert (stats["batch_gain"], stats["batch"]) == (None, 8)
        assert "no memory" in caplog.text

    def test_what_is_not_warmed_up_is_not_measured(self, open_compiled):
        """Then requests are joined as `batch` says."""

        async def stats(**options):
            async with open_compiled.serve(replicas=1, **options) as server:
                found = server.stats()
                return found["batch"], found["batch_gain"]

        assert asyncio.run(stats(batch=8, warm_up=False)) == (8, None)
        assert asyncio.run(stats()) == (1, None)
        assert asyncio.run(stats(batch=8))[1] > 0

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"batch": 4}, "no open first dimension"),
            ({"replicas": 0}, "replicas=0"),
            ({"queue": True}, "queue=True"),
            ({"batch": 1.5}, "batch=1.5"),
            ({"batch_window": -1}, "batch_window=-1"),
            ({"depth": 10**6}, "depth=1000000"),
        ],
    )
    def test_wrong_options(self, compiled, options, words):
        """A wrong option is told when the server is made, by its name and with what it may be."""
        with pytest.raises(ValueError, match=words):
            compiled.serve(**options)

    def test_terms_of_the_compiled_model(self, connect, kit):
        """A model that was compiled with `batch` has its requests joined without being asked again, unless it is told
        otherwise.
        """

        async def most(model, **options):
            async with model.serve(replicas=1, depth=1, queue=100, warm_up=False, **options) as server:
                await asyncio.gather(*(server.run(np.full((1, 4), n, np.float32)) for n in range(12)))
                return max(server.stats()["batches"])

        with driver.compile(kit.open_model(), devices=[connect()], batch=driver.Batch(4)) as model:
            assert asyncio.run(most(model)) == 4
            assert asyncio.run(most(model, batch=3)) == 3
            assert asyncio.run(most(model, batch=1)) == 1


class TestEnd:
    def test_a_drain_finishes_what_it_has(self, slow_compiled):
        """The end of the block refuses new requests and finishes those that it has."""

        async def main():
            async with slow_compiled.serve(replicas=1, depth=1, warm_up=False) as server:
                tasks = [asyncio.ensure_future(server.run(frame(0.05, n))) for n in range(4)]
                await asyncio.sleep(0)
            assert [numbers(task.result()) for task in tasks] == [0, 1, 2, 3]
            with pytest.raises(DeviceUnavailable, match="closed"):
                await server.run(frame(0, 1))

        asyncio.run(main())

    def test_a_drain_with_a_limit(self, slow_compiled):
        """`drain(timeout)` says whether it has finished, and the server takes nothing any more."""

        async def main():
            with contextlib.suppress(KeyError):
                async with slow_compiled.serve(replicas=1, depth=1, warm_up=False) as server:
                    task = asyncio.ensure_future(server.run(frame(ENDLESS, 1)))
                    await asyncio.sleep(0)
                    assert not await server.drain(0.05)
                    with pytest.raises(DeviceUnavailable, match="drains"):
                        await server.run(frame(0, 2))
                    raise KeyError  # a block that fails does not wait
            with pytest.raises(Exception, match="closed"):
                await task

        asyncio.run(main())

    def test_an_exception_ends_what_waits(self, slow_compiled):
        """After an exception in the block, requests that wait get DeviceUnavailable, and nothing is waited for."""

        async def main():
            with contextlib.suppress(KeyError):
                async with slow_compiled.serve(replicas=1, depth=1, warm_up=False) as server:
                    tasks = [asyncio.ensure_future(server.run(frame(ENDLESS, n))) for n in range(3)]
                    await asyncio.sleep(0)
                    raise KeyError
            for task in tasks[1:]:
                with pytest.raises(DeviceUnavailable, match="closed before"):
                    await task
            with pytest.raises(Exception, match="closed"):
                await tasks[0]

        asyncio.run(main())

    def test_the_death_of_the_device(self, place, kit, process):
        """kill -9 of the device among many requests: it is started again, and every request gets its answer."""
        with driver.connect("reference") as device, driver.compile(kit.add_model(), devices=[device]) as model:

            async def main():
                async with model.serve(queue=400) as server:
                    tasks = [asyncio.ensure_future(server.run(frame(0, n))) for n in range(300)]
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    process(device.engine_pid).kill(signal.SIGKILL)
                    found = await asyncio.gather(*tasks)
                    assert [numbers(outputs) for outputs in found] == list(range(300))

            asyncio.run(main())


class TestThreads:
    def test_many_threads(self, open_compiled):
        """Any number of threads call `run`, and get their own outputs; the loop's thread ends with the block."""
        before = set(threading.enumerate())
        with open_compiled.serve(batch=8, queue=100) as server, ThreadPoolExecutor(16) as pool:
            found = list(pool.map(lambda n: server.run(np.full((1, 4), n, np.float32))[0][0, 0], range(200)))
            assert found == list(range(1, 201))
            assert server.stats()["answered"] == 200
        assert "burst-serve" not in {thread.name for thread in set(threading.enumerate()) - before}
        with pytest.raises(DeviceUnavailable, match="closed"):
            server.run(np.zeros((1, 4), np.float32))

    @pytest.mark.parametrize("name", ["stats", "run", "submit", "drain"])
    def test_before_the_block_there_is_no_server(self, compiled, name):
        """What only a server has is asked of `serve()` itself: the error says where the server comes from."""
        serving = compiled.serve()
        words = rf"no attribute '{name}': .* `with` gives \(with compiled\.serve\(\) as server: server\.{name}\)"
        with pytest.raises(AttributeError, match=words):
            getattr(serving, name)
        with serving as server:
            assert callable(getattr(server, name))
        with pytest.raises(AttributeError, match=r"no attribute 'statistics'$"):
            serving.statistics()

    def test_submit(self, compiled):
        """`submit` returns at once; its future has the outputs or the error."""
        with compiled.serve(queue=50) as server:
            futures = [server.submit(frame(0, n)) for n in range(40)]
            assert [numbers(future.result()) for future in futures] == list(range(40))
            assert isinstance(server.submit(np.zeros(3)).exception(), ValueError)

    def test_two_servers_of_one_model(self, compiled):
        """One model can be served several times at once, and again."""
        with compiled.serve(name="a") as first, compiled.serve(name="b") as second:
            assert numbers(first.run(frame(0, 1))) == numbers(second.run(frame(0, 1))) == 1
        with compiled.serve() as third:
            assert numbers(third.run(frame(0, 2))) == 2


def test_nearly_all_executions_take_less_than_the_estimate_says():
    """With times that vary as those of a busy machine do, fewer than one in a hundred is begun that ends too late."""
    estimate, random, late = ExecutionEstimate(), np.random.default_rng(3), 0
    for number, took in enumerate(random.normal(20e6, 3e6, 3000)):
        late += number > 20 and took > estimate.most
        estimate.took(int(took))
    assert late < 30
    assert estimate.most < 1.9 * estimate.usual
