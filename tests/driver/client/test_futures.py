"""Futures: waiting, giving up, being called back, and Ctrl-C."""

import concurrent.futures
import contextlib
import os
import random
import signal
import threading

import pytest
import stress
from frames import HELD, frame, held, number_of
from inside import controller_of, in_flight_of

from burst import Timeout


class TestFuture:
    def test_timeout_while_another_waits(self, slow, kit):
        """It also ends in time when another thread is the one that receives."""
        with slow.burst(depth=2) as burst:
            (first, release), second = held(burst, 1), burst.submit(frame(0, 2))
            thread = threading.Thread(target=first.result)
            thread.start()
            kit.until(in_flight_of(burst).receiving.locked)
            with pytest.raises(Timeout):
                second.result(0.02)
            assert not first.done()
            release()
            thread.join()
            assert number_of(second.result()) == 2

    @pytest.mark.parametrize("what", ["its result", "room"])
    def test_what_another_thread_brings(self, slow, kit, what):
        """A thread that waits for its result, or for room, goes on at once, although the receiver waits on."""
        with slow.burst(depth=2) as burst:
            (first, let_first_go), (second, let_second_go) = held(burst, 1), held(burst, 2)
            receives = self.thread_that_receives(second.result, burst, kit)
            work = first.result if what == "its result" else lambda: burst.submit(frame(0, 3))
            waits = self.thread_that_waits(work, burst, kit)
            let_first_go()
            waits.join(kit.patience)
            assert not waits.is_alive()
            assert not second.is_done
            let_second_go()
            receives.join()

    def test_cancel_while_another_thread_receives(self, slow, kit):
        """A thread that waits for a request which is cancelled is told at once."""
        with slow.burst(depth=2) as burst:
            (first, release), second = held(burst, 1), burst.submit(frame(0, 2))
            receives = self.thread_that_receives(first.result, burst, kit)
            waits = self.thread_that_waits(second.exception, burst, kit)
            assert second.cancel()
            waits.join(kit.patience)
            assert not waits.is_alive()
            assert not first.is_done
            release()
            receives.join()

    def test_threads_that_give_up_again_and_again(self, fast, kit):
        """Whichever of them was to receive next, another one does: each gets all of its results."""

        def work():
            for n in range(100):
                future = burst.submit(frame(0, n))
                while not future.is_done:
                    with contextlib.suppress(Timeout):
                        future.result(random.choice((0, 1e-5, 1e-3, None)))
                assert number_of(future.result()) == n

        with fast.burst(depth=4) as burst, concurrent.futures.ThreadPoolExecutor(4) as threads:
            for ended in [threads.submit(work) for _ in range(4)]:
                ended.result(kit.patience)

    @staticmethod
    def thread_that_receives(work, burst, kit):
        thread = threading.Thread(target=work)
        thread.start()
        kit.until(in_flight_of(burst).receiving.locked)
        return thread

    @staticmethod
    def thread_that_waits(work, burst, kit):
        def quietly():
            with contextlib.suppress(concurrent.futures.CancelledError):
                work()

        thread = threading.Thread(target=quietly)
        thread.start()
        kit.until(lambda: in_flight_of(burst).waiting)
        return thread

    @pytest.mark.parametrize("which", range(4))
    def test_cancel(self, slow, which):
        """A request that was cancelled after it was sent loses its result; its neighbours do not notice."""
        with slow.burst(depth=4) as burst:
            first, release = held(burst, 0)
            futures = [first, *(burst.submit(frame(0, n)) for n in range(1, 4))]
            assert futures[which].cancel()
            assert futures[which].cancelled()
            assert futures[which].done()
            assert futures[which].cancel()
            release()
            for n, future in enumerate(futures):
                if n == which:
                    with pytest.raises(concurrent.futures.CancelledError):
                        future.result()
                else:
                    assert number_of(future.result()) == n
                    assert not future.cancel()
            assert number_of(burst.run(frame(0, 9))) == 9
            assert burst.stats()["drops"] == 1
            assert burst.stats()["in_flight"] == 0

    def test_cancel_before_it_was_sent(self, slow):
        """A request that still waited for room is never executed."""
        with slow.burst(depth=1, policy="latest") as burst:
            first, second = burst.submit(frame(0.02, 1)), burst.submit(frame(0, 2))
            assert second.cancel()
            assert number_of(first.result()) == 1
            assert number_of(burst.run(frame(0, 3))) == 3
            assert burst.stats()["runs"]["burst"] == 2
            assert burst.stats()["drops"] == 1

    def test_callbacks(self, slow):
        """Each is called once, in order, with the future, when it is done or at once, also when it is cancelled."""
        called = []
        with slow.burst(depth=3) as burst:
            futures = [burst.submit(frame(0.05, n)) for n in range(3)]
            for n, future in enumerate(futures):
                future.add_done_callback(lambda f, n=n: called.append((n, f.done())))
                future.add_done_callback(lambda f, n=n: called.append((n + 10, f.done())))
            futures[1].cancel()
            assert called == [(1, True), (11, True)]
            futures[2].result()
            futures[2].add_done_callback(lambda _: called.append("at once"))
        assert called[2:] == [(0, True), (10, True), (2, True), (12, True), "at once"]

    @pytest.mark.parametrize("depth", [1, 2, 4])
    def test_callback_that_goes_on(self, fast, kit, depth):
        """A callback may submit, run and wait itself, while others wait and submit: nothing locks up."""
        numbers, done = [], threading.Event()
        with fast.burst(depth=depth) as burst:

            def again(future):
                numbers.append(number_of(future.result()))
                if len(numbers) == 150:
                    done.set()
                elif len(numbers) < 150:
                    burst.submit(frame(0, 0)).result()
                    burst.submit(frame(0, len(numbers))).add_done_callback(again)

            def work():
                burst.submit(frame(0, 0)).add_done_callback(again)
                while not done.is_set():
                    assert number_of(burst.submit(frame(0, 7)).result(kit.patience)) == 7

            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            assert done.wait(kit.patience)
            thread.join(kit.patience)
        assert numbers[:150] == list(range(150))


class TestCtrlC:
    """A real SIGINT while the main thread waits in one of the calls."""

    @staticmethod
    def interrupt_while(burst, kit, use):
        """It is told although the device, which is held, has answered nothing."""
        main = threading.main_thread().native_id
        before, device = controller_of(burst).sent, controller_of(burst).trace.page.device
        answered = int(device.answered)

        def press():
            kit.until(lambda: controller_of(burst).sent > before or in_flight_of(burst).receiving.locked())
            kit.until(lambda: open(f"/proc/self/task/{main}/stat").read().split(")")[1].split()[0] == "S")  # noqa: SIM115
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=press)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            use()
        thread.join()
        assert device.answered == answered

    @pytest.mark.filterwarnings("ignore::ResourceWarning")
    @pytest.mark.parametrize("what", ["run", "result", "submit", "stream"])
    def test_wait(self, slow, kit, what):
        """It ends the waiting at once; the burst stays usable, and requests in flight keep their results."""
        with slow.burst(depth=2) as burst:
            (array,) = burst.inputs
            array[...] = frame(HELD, 1)
            futures = [burst.submit()] if what != "run" else []
            futures += [burst.submit(frame(0, 2))] if what in {"result", "submit"} else []
            uses = {
                "run": burst.run,
                "result": lambda: futures[1].result(None),
                "submit": lambda: burst.submit(frame(0, 3)),
                "stream": lambda: futures[0].result(kit.patience),
            }
            self.interrupt_while(burst, kit, uses[what])
            array[0, 0] = 0
            assert number_of(burst.submit(frame(0, 4)).result()) == 4
            assert [number_of(f.result()) for f in futures] == [1, 2][: len(futures)]

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it came while Python tidied up
    @pytest.mark.parametrize("presses", [150, pytest.param(stress.times(5000), marks=pytest.mark.stress)])
    def test_at_any_moment(self, fast, kit, pressing, presses):
        """Whenever it comes, in whichever call: no later result belongs to another request, and nothing locks up."""
        chance, pressed, n = random.Random(1), 0, 0
        waiting = []
        with fast.burst(depth=4) as burst:
            while pressed < presses:
                n += 1
                try:
                    pressing.append("may come")
                    self.use(burst, n % 1000, waiting, chance.random() < 0.2, kit.patience)
                    pressing.clear()
                except KeyboardInterrupt:
                    pressed += 1
            for k in range(40):
                assert number_of(burst.run(frame(0, k))) == number_of(burst.submit(frame(0, k)).result()) == k
            assert burst.stats()["in_flight"] == 0

    @staticmethod
    def use(burst, number, waiting, run, patience):
        """One request, or two, and the results of those before the last three."""
        try:
            if run:
                assert number_of(burst.run(frame(0, number))) == number
            waiting.append((number, burst.submit(frame(0, number))))
            while len(waiting) > 3:
                k, future = waiting[0]
                assert number_of(future.result(patience)) == k
                del waiting[0], future
        except concurrent.futures.CancelledError:
            del waiting[0]  # the interrupt came while it was being sent


@pytest.fixture
def pressing():
    """Presses Ctrl-C all the time; it comes while this list has an entry, and takes it."""
    allowed, stop, pauses = [], threading.Event(), random.Random(2)
    main = threading.main_thread().ident

    def press():
        while not stop.wait(pauses.random() * 2e-3):
            signal.pthread_kill(main, signal.SIGINT)

    def interrupt(*_):
        if allowed:
            allowed.clear()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    thread = threading.Thread(target=press)
    thread.start()
    yield allowed
    allowed.clear()
    stop.set()
    thread.join()
    signal.signal(signal.SIGINT, before)
