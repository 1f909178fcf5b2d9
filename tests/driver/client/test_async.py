"""A burst in asyncio: awaits, streams, and loops that have nothing to do with each other."""

import asyncio
import concurrent.futures
import contextlib
import gc
import os
import threading
import time

import numpy as np
import pytest
from frames import HELD, frame, held, number_of
from inside import controller_of, in_flight_of, pipeline_of, reader_of
from waiting import at_least

import driver
import fmq
from burst import MissedDeadlineTransient, PeerDied
from burst.dropped import later


@pytest.fixture(autouse=True)
def descriptors(request):
    """Whatever a test does, in the end this process has the descriptors that it had."""
    request.getfixturevalue("shared")
    before = set(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 2  # the directory itself, and the callbacks' selector


def watched(burst):
    """Loops that watch the burst."""
    return len(pipeline_of(burst).arrivals._watched)


class TestAwait:
    @pytest.mark.parametrize("depth", [1, 4])
    def test_one_after_the_other(self, fast, depth):
        """run_async gives each its result; so does awaiting what submit returns; and afterwards nothing is watched."""

        async def main():
            for n in range(50):
                assert number_of(await burst.run_async(frame(0, n))) == n
                assert number_of(await burst.submit(frame(0, n + 100))) == n + 100
            assert watched(burst) <= 1

        with fast.burst(depth=depth) as burst:
            asyncio.run(main())
            asyncio.run(main())  # another loop

    @pytest.mark.parametrize("policy", ["block", "latest"])
    def test_many_tasks(self, fast, policy):
        """Any number of tasks may await at once; each gets its own."""

        async def one(n):
            try:
                return number_of(await burst.run_async(frame(0, n)))
            except concurrent.futures.CancelledError as error:
                assert "newer" in str(error)  # noqa: PT017 (only one in some tasks)
                return None

        async def main():
            return await asyncio.gather(*(one(n) for n in range(300)))

        with fast.burst(depth=4, policy=policy) as burst:
            found = asyncio.run(main())
        assert [n if f is not None else None for n, f in enumerate(found)] == found
        assert found[-1] == 299
        assert policy == "latest" or None not in found

    def test_an_await_ends_at_the_deadline(self, slow):
        """Whatever the device does: the await raises when the time is up, and the late result goes to nobody."""

        async def main(burst):
            with at_least(0.05):
                future, release = held(burst, 1, deadline=time.monotonic() + 0.05)
                with pytest.raises(MissedDeadlineTransient) as error:
                    await future
            release()
            return error.value.phase, number_of(await burst.submit(frame(0, 2)))

        with slow.burst(depth=2) as burst:
            burst.run(frame(0, 0))
            phase, number = asyncio.run(main(burst))
        assert phase == "waiting for the answer"
        assert number == 2

    def test_several_await_one(self, slow):
        """Several tasks may await the same future."""

        async def wait(future):
            return await future

        async def main():
            future = burst.submit(frame(0.01, 3))
            return await asyncio.gather(wait(future), wait(future), wait(future))

        with slow.burst(depth=2) as burst:
            assert [number_of(r) for r in asyncio.run(main())] == [3, 3, 3]

    def test_cancelled_task(self, slow):
        """Cancelling a task drops its result; those before and after it are right, and no memory stays in use."""

        async def main():
            tasks = [asyncio.ensure_future(burst.run_async(frame(0 if n else 0.3, n))) for n in range(6)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            tasks[1].cancel()  # in flight
            tasks[4].cancel()  # waits for room
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert [isinstance(f, asyncio.CancelledError) or number_of(f) for f in found] == [0, True, 2, 3, True, 5]
            assert number_of(await burst.run_async(frame(0, 7))) == 7
            assert watched(burst) <= 1

        with slow.burst(depth=3) as burst:
            asyncio.run(main())
            assert burst.stats()["runs"]["burst"] == 6
            assert burst.stats()["in_flight"] == 0

    def test_a_task_that_gives_up_lets_the_newest_go_first(self, slow):
        """By then the oldest have no time left for the device. Once no task waits, turns go in order again."""

        async def main():
            order = []

            async def ask(n, **limits):
                try:
                    order.append(number_of(await burst.run_async(frame(0, n), **limits)))
                except TimeoutError:
                    order.append(-n)

            async def behind_a_long_one(*asks):
                long = asyncio.ensure_future(burst.run_async(frame(0.2, 9)))
                while not burst.stats()["in_flight"]:
                    await asyncio.sleep(0)
                await asyncio.gather(*asks, long)

            await behind_a_long_one(ask(1, timeout=0.01), ask(2), ask(3), ask(4))
            assert order == [-1, 4, 3, 2]
            await behind_a_long_one(ask(5), ask(6))
            assert order[4:] == [5, 6]

        with slow.burst() as burst:
            asyncio.run(main())

    def test_two_loops(self, fast, kit):
        """Loops in several threads, and a thread without one, share a burst."""
        wrong = []

        async def work(k):
            for n in range(k, k + 200):
                found = number_of(await burst.run_async(frame(0, n)))
                wrong.extend([(found, n)] if found != n else [])

        async def main(k):
            await asyncio.gather(*(work(k + 1000 * i) for i in range(3)))

        with fast.burst(depth=3) as burst:
            threads = [threading.Thread(target=lambda k=k: asyncio.run(main(k)), daemon=True) for k in (0, 10_000)]
            for thread in threads:
                thread.start()
            for n in range(200):
                assert number_of(burst.submit(frame(0, n)).result(kit.patience)) == n
                assert number_of(burst.run(frame(0, n), timeout=kit.patience)) == n
            for thread in threads:
                thread.join(kit.patience)
                assert not thread.is_alive()
        assert not wrong

    def test_run_while_a_loop_looks(self, slow, kit):
        """A request that meets a loop's look at the results waits for its end, and nobody writes to its inputs."""

        def look():
            with pytest.raises(fmq.Timeout), reader_of(controller_of(burst)).peek(1, 0.2):
                pass

        def is_looked_at():
            try:
                reader_of(controller_of(burst)).try_read(1)
            except fmq.Busy:
                return True

        with slow.burst(depth=2) as burst, concurrent.futures.ThreadPoolExecutor(3) as pool:
            looking = pool.submit(in_flight_of(burst).as_receiver, -1, look)
            kit.until(is_looked_at)
            running = pool.submit(lambda: number_of(burst.run(frame(0.1, 1), timeout=kit.patience)))
            kit.until(lambda: in_flight_of(burst).is_running)
            assert pipeline_of(burst).arrivals.watch_fd() == -1
            other = pool.submit(lambda: number_of(burst.submit(frame(0, 2)).result(kit.patience)))
            assert (running.result(), other.result(), looking.result()) == (1, 2, True)

    def test_thread_that_receives(self, slow, kit):
        """While a thread waits for results a loop cannot watch them; afterwards it does, and misses none."""

        async def main():
            return number_of(await asyncio.wait_for(burst.run_async(frame(0.05, 2)), kit.patience))

        with slow.burst(depth=2) as burst:
            first = burst.submit(frame(0.1, 1))
            thread = threading.Thread(target=first.result)
            thread.start()
            kit.until(in_flight_of(burst).receiving.locked)
            assert asyncio.run(main()) == 2
            thread.join()

    def test_loop_that_ended(self, slow):
        """A loop that was closed while a request was in flight disturbs nobody, and leaves no descriptor."""

        async def leave():
            burst.submit(frame(0.05, 1))
            asyncio.ensure_future(burst.run_async(frame(0, 2)))  # noqa: RUF006 (abandoned on purpose)
            await asyncio.sleep(0)

        async def once():
            return number_of(await burst.run_async(frame(0, 3)))

        with slow.burst(depth=4) as burst:
            for _ in range(3):
                asyncio.run(leave())
                assert number_of(burst.run(frame(0, 4))) == 4
                assert asyncio.run(once()) == 3
            assert watched(burst) <= 1

    def test_loop_that_is_closed_before_it_is_told(self, slow, kit):
        """A loop that is closed after a dropped burst has sent for it, and before it comes, leaves no descriptor."""
        for _ in range(5):
            loop, burst, told = asyncio.new_event_loop(), slow.burst(), threading.Event()
            loop.run_until_complete(burst.run_async(frame(0.05, 1)))
            assert watched(burst) == 1
            del burst
            later(told.set)
            assert told.wait(kit.patience)
            loop.close()

    def test_idle_loop(self, slow):
        """While a request executes the loop sleeps, and it does not wake up for a burst that is idle."""
        turns = []

        async def main():
            loop = asyncio.get_running_loop()
            once = loop._run_once

            def counted():
                turns.append(1)
                once()

            loop._run_once = counted
            await burst.run_async(frame(0.3, 1))
            assert len(turns) < 30
            turns.clear()
            await asyncio.sleep(0.1)
            assert len(turns) <= 3

        with slow.burst() as burst:
            asyncio.run(main())

    def test_close_while_awaited(self, slow):
        """Who awaits a burst that is closed is told; a later burst may have the same descriptors."""

        async def main():
            burst = slow.burst(depth=1)
            tasks = [asyncio.ensure_future(burst.run_async(frame(9, n))) for n in range(3)]
            while not burst.stats()["in_flight"]:
                await asyncio.sleep(0)
            burst.close()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(f).__name__ for f in found] == ["GeneralFailure", "ValueError", "ValueError"]
            for _ in range(4):
                with slow.burst() as other:
                    assert number_of(await other.run_async(frame(0, 3))) == 3

        asyncio.run(main())

    def test_death(self, place, kit, process, monkeypatch):
        """A device that is killed while it is awaited: PeerDied in every task."""
        monkeypatch.setenv("BURST_RUNTIME_DIR", str(place.path))

        async def one(burst):
            with pytest.raises(PeerDied):
                await burst.run_async(frame(9, 1))

        async def main(burst, victim):
            tasks = [asyncio.ensure_future(one(burst)) for _ in range(3)]
            while burst.stats()["in_flight"] < 2:
                await asyncio.sleep(0.01)
            victim.kill()
            await asyncio.wait_for(asyncio.gather(*tasks), kit.patience)

        with (
            driver.connect(kit.odd("Slow")) as device,
            device.prepare(kit.add_model()) as prepared,
            prepared.burst(depth=2) as burst,
        ):
            asyncio.run(main(burst, process(device.engine_pid)))


class TestStream:
    @pytest.mark.parametrize("depth", [1, 4])
    @pytest.mark.parametrize("is_async", [False, True])
    def test_all_in_order(self, fast, depth, is_async):
        """Results of any iterable, sync or async, in its order."""

        async def source():
            for n in range(60):
                if n % 10 == 0:
                    await asyncio.sleep(1e-3)
                yield (frame(0, n),)

        async def main():
            frames = source() if is_async else (frame(0, n) for n in range(60))
            return [number_of(r) async for r in burst.stream(frames)]

        with fast.burst(depth=depth) as burst:
            assert asyncio.run(main()) == list(range(60))
            assert watched(burst) <= 1

    def test_nothing(self, fast):
        """A stream of nothing ends."""

        async def main():
            return [r async for r in burst.stream([])]

        with fast.burst() as burst:
            assert asyncio.run(main()) == []

    @pytest.mark.parametrize("policy", ["latest", "reject"])
    def test_source_that_is_faster(self, slow, policy):
        """A source that does not wait loses the frames that come while one is executed, which are counted; "latest"
        keeps the newest.
        """

        async def source():
            (array,) = burst.inputs
            yield frame(HELD, 0)
            for n in range(1, 60):
                yield frame(0, n)
            array[0, 0] = 0  # ends the first

        async def main():
            return [number_of(r) async for r in burst.stream(source())]

        with slow.burst(depth=1, policy=policy) as burst:
            found = asyncio.run(main())
            assert found == ([0, 59] if policy == "latest" else [0])
            assert burst.stats()["drops"] == 60 - len(found)

    def test_source_that_fails(self, fast):
        """What the source raises, the stream raises, after the results of what came before."""
        found = []

        async def main():
            async for result in burst.stream(frame(0, n) if n < 3 else 1 // 0 for n in range(9)):
                found.append(number_of(result))  # noqa: PERF401 (as far as it goes)

        with fast.burst() as burst, pytest.raises(ZeroDivisionError):
            asyncio.run(main())
        assert found == [0, 1, 2]

    def test_wrong_frame(self, fast):
        """A frame that the model does not take is an error of the stream, and the burst goes on."""

        async def main():
            async for _ in burst.stream([frame(0, 1), np.zeros(3)]):
                pass

        with fast.burst(depth=2) as burst:
            with pytest.raises(ValueError, match="input 0"):
                asyncio.run(main())
            assert number_of(burst.run(frame(0, 2))) == 2

    def test_left_early(self, slow, recwarn):
        """Leaving a stream leaves nothing behind: no task, no result, no held memory, no warning."""

        async def main():
            stream = burst.stream(frame(0.002, n) for n in range(1000))
            async for result in stream:
                if number_of(result) == 3:
                    break
            del result
            await stream.aclose()
            assert number_of(await burst.run_async(frame(0, 5))) == 5
            assert len(asyncio.all_tasks()) == 1
            assert watched(burst) <= 1

        with slow.burst(depth=4) as burst:
            asyncio.run(main(), debug=True)
            assert burst.stats()["in_flight"] == 0
            assert not any(outputs.is_busy or outputs.is_held() for outputs in burst._buffers._outputs)
        gc.collect()
        assert [str(w.message) for w in recwarn] == []

    def test_beside_others(self, slow):
        """A stream finds room although others fill the burst."""

        async def others():
            while True:
                await burst.run_async(frame(1e-3, 7))

        async def main():
            tasks = [asyncio.ensure_future(others()) for _ in range(4)]
            await asyncio.sleep(0.005)
            found = [number_of(r) async for r in burst.stream(frame(0, n) for n in range(20))]
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            return found

        with slow.burst(depth=2) as burst:
            assert asyncio.run(main()) == list(range(20))
