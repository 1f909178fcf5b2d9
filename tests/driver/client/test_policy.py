"""What submit does while `depth` requests are in flight."""

import concurrent.futures
import threading

import pytest
from frames import frame, held, number_of
from inside import controller_of, in_flight_of
from waiting import PATIENCE

from burst import Busy, Timeout


def executed(burst):
    """How many requests the device has answered, as it says itself."""
    return controller_of(burst).trace.page.device.answered


def test_unknown(slow):
    """What is no policy, and no depth, is refused with the choice."""
    with pytest.raises(ValueError, match="policy='newest': one of 'block', 'reject', 'latest'"):
        slow.burst(policy="newest")
    for depth in (0, 65, -1):
        with pytest.raises(ValueError, match=f"depth={depth}: from 1 to 64"):
            slow.burst(depth=depth)


class TestBlock:
    def test_waits(self, slow, kit):
        """submit returns when the oldest of `depth` requests is done, and no earlier."""
        third = []
        with slow.burst(depth=2) as burst:
            (first, release_first), (second, release_second) = held(burst, 1), held(burst, 2)
            thread = threading.Thread(target=lambda: third.append(burst.submit(frame(0, 3))))
            thread.start()
            kit.until(in_flight_of(burst).receiving.locked)
            assert not third
            release_first()
            thread.join(kit.patience)
            assert first.done()
            assert not second.done()
            release_second()
            assert [number_of(f.result()) for f in (*third, second, first)] == [3, 2, 1]
            assert burst.stats()["drops"] == 0

    def test_timeout(self, slow):
        """With a timeout it gives up in time, and nothing is sent or overwritten."""
        with slow.burst(depth=2) as burst:
            first, release = held(burst, 1)
            futures = [first, burst.submit(frame(0, 2))]
            with pytest.raises(Timeout, match=r"depth=2 requests were in flight for 0\.02 s; nothing was sent"):
                burst.submit(frame(0, 3), timeout=0.02)
            assert not first.done()
            release()
            assert [number_of(f.result()) for f in futures] == [1, 2]
            assert executed(burst) == 2
            assert number_of(burst.submit(frame(0, 4), timeout=0).result()) == 4


class TestReject:
    def test_busy(self, slow):
        """submit raises Busy at once, which is counted; what is in flight goes on, and then there is room again."""
        with slow.burst(depth=2, policy="reject") as burst:
            (first, release_first), (second, release_second) = held(burst, 1), held(burst, 2)
            for _ in range(5):
                with pytest.raises(Busy, match="depth=2 requests are in flight, and policy is 'reject'"):
                    burst.submit(frame(0, 3))
            assert not first.done()
            release_first()
            release_second()
            assert [number_of(f.result()) for f in (first, second)] == [1, 2]
            assert number_of(burst.submit(frame(0, 4)).result()) == 4
            assert burst.stats()["drops"] == 5
            assert executed(burst) == 3

    def test_arrived_results_make_room(self, slow, kit):
        """A result that has arrived does not count as in flight, although nobody has asked for it."""
        with slow.burst(depth=1, policy="reject") as burst:
            first = burst.submit(frame(0, 1))
            kit.until(lambda: executed(burst) == 1 and controller_of(burst).has_result)
            assert number_of(burst.submit(frame(0, 2)).result()) == 2
            assert number_of(first.result()) == 1
            assert burst.stats()["drops"] == 0


class TestLatest:
    @pytest.mark.parametrize("depth", [1, 3])
    def test_newest_wins(self, slow, depth):
        """Of what is submitted while the device is busy exactly the newest frame is executed."""
        with slow.burst(depth=depth, policy="latest") as burst:
            for rounds in range(1, 5):
                begun, releases = zip(*(held(burst, n) for n in range(depth)), strict=True)
                waiting = [burst.submit(frame(0, n)) for n in range(10, 20)]
                assert all(f.cancelled() for f in waiting[:-1])
                assert not waiting[-1].done()
                for release in releases:
                    release()
                assert number_of(waiting[-1].result()) == 19
                assert [number_of(f.result()) for f in begun] == list(range(depth))
                for dropped in waiting[:-1]:
                    with pytest.raises(concurrent.futures.CancelledError, match="newer frame"):
                        dropped.result()
                assert burst.stats()["drops"] == 9 * rounds
                assert executed(burst) == (depth + 1) * rounds
                assert burst.stats()["runs"]["burst"] == (depth + 1) * rounds

    def test_sent_when_there_is_room(self, slow, kit):
        """What waits is sent as soon as a result is taken, and needs nobody to ask for it."""
        with slow.burst(depth=1, policy="latest") as burst:
            first, second = burst.submit(frame(0.01, 1)), burst.submit(frame(0, 2))
            assert number_of(first.result()) == 1
            kit.until(lambda: executed(burst) == 2)
            assert number_of(second.result(PATIENCE)) == 2

    def test_dropped_callbacks(self, slow):
        """A dropped request calls back, and may be seen to have been dropped."""
        seen = []
        with slow.burst(depth=1, policy="latest") as burst:
            _, release = held(burst, 1)
            dropped = burst.submit(frame(0, 2))
            dropped.add_done_callback(lambda f: seen.append(f.cancelled()))
            newest = burst.submit(frame(0, 3))
            assert seen == [True]
            release()
            newest.result()

    def test_run(self, slow, kit):
        """run is the newest frame, until it is executed."""
        with slow.burst(depth=1, policy="latest") as burst, concurrent.futures.ThreadPoolExecutor(1) as threads:
            _, release = held(burst, 1)
            dropped = burst.submit(frame(0, 2))
            newest = threads.submit(burst.run, frame(0, 3))
            kit.until(dropped.cancelled)
            release()
            assert number_of(newest.result(PATIENCE)) == 3

    def test_inputs_are_not_lost(self, slow):
        """However many frames are dropped, their inputs are used again: the memory of a burst does not grow."""
        with slow.burst(depth=2, policy="latest") as burst:
            sets = set()
            for n in range(200):
                sets.add(burst.inputs[0].ctypes.data)
                newest = burst.submit(frame(1e-3 if n % 50 == 0 else 0, n))
                if n % 7 == 0:
                    newest.cancel()
            burst.submit(frame(0, 200)).result()
            assert len(sets) <= 5
