"""Requests in flight: each result belongs to its own inputs, in order, and nothing that is held is overwritten."""

import gc
import itertools
import random
import threading
from collections import deque

import numpy as np
import pytest
import stress
from frames import frame, number_of
from inside import controller_of

import driver
from burst import InvalidArgument, OutputInsufficientSize, ResultsHeld, StatusError


def hold_all(burst, held):
    """Until no memory is left."""
    while True:
        held.append(burst.run(frame(0, len(held))))


class TestOrder:
    @pytest.mark.parametrize("depth", [1, 2, 3, 4, 8, 64])
    def test_each_its_own(self, fast, depth):
        """At any depth the results are those of their requests, in whatever order they are asked for."""
        with fast.burst(depth=depth) as burst:
            for order in (1, -1):
                futures = [burst.submit(frame(0, n)) for n in range(depth)]
                assert burst.stats()["in_flight"] <= depth
                assert [number_of(f.result()) for f in futures[::order]] == list(range(depth))[::order]
                futures.clear()  # they hold their results
            assert burst.stats()["in_flight"] == 0

    def test_completed_in_order(self, slow):
        """Futures are done in the order of their requests, and not when their device happens to be quick."""
        done = []
        with slow.burst(depth=4) as burst:
            for n, seconds in enumerate((0.02, 0, 0.01, 0)):
                burst.submit(frame(seconds, n)).add_done_callback(lambda f: done.append(number_of(f.result())))
            burst.submit(frame(0, 4)).result()
        assert done == [0, 1, 2, 3]

    def test_client_and_device_overlap(self, slow):
        """Before the device is done with request k the client begins and sends request k + 1: the records say so."""
        with slow.burst(depth=2) as burst:
            burst.run(frame(0, 0))
            futures = [burst.submit(frame(0.005, n)) for n in range(12)]
            for future in futures:
                future.result()
            records = controller_of(burst).trace.records()[1:]
        pairs = list(itertools.pairwise(records))
        assert sum(a["sent"] < b["begin"] <= b["sent"] < a["done"] for a, b in pairs) >= 6, records
        assert all(records["taken"][1:] >= records["done"][:-1])  # and the device never two at once

    def test_inputs_in_place(self, slow):
        """burst.inputs are those of the next request: what is written to them does not reach one that is in flight."""
        with slow.burst(depth=3) as burst:
            futures = []
            for n in range(9):
                burst.inputs[0][...] = frame(0.003, n)
                futures.append(burst.submit())
                burst.inputs[0][...] = -1
            assert [number_of(f.result()) for f in futures] == list(range(9))

    @pytest.mark.parametrize("requests", [1500, pytest.param(stress.times(40_000), marks=pytest.mark.stress)])
    def test_nothing_is_overwritten(self, slow, requests):
        """Inputs of requests in flight and outputs of held results stay as they are, whatever the device's pace is."""
        chance, held, waiting = random.Random(3), [], []
        with slow.burst(depth=5) as burst:
            for n in range(requests):
                waiting.append((n, burst.submit(frame(chance.choice((0, 0, 0, 0, 0, 0, 0, 1e-4)), n))))
                while waiting and (len(waiting) > 5 or chance.random() < 0.3):
                    k, future = waiting.pop(chance.randrange(len(waiting)))
                    held.append((k, future.result()))
                    del future
                while len(held) > 9:
                    k, result = held.pop(chance.randrange(len(held)))
                    assert number_of(result) == k
                    del result
            assert [number_of(f.result()) for _, f in waiting] == [n for n, _ in waiting]

    def test_growing_outputs(self, device, kit):
        """Outputs that turn out larger than reserved get their room while others are in flight."""
        shapes = [(3, 2000), (6000, 1), (1, 6000), (2, 3000)] * 4
        x = np.arange(6000, dtype=np.float32).reshape(2, 3000)
        with device.prepare(kit.reshape_model()) as prepared, prepared.burst(depth=4) as burst:
            futures = [burst.submit(x + n, np.array(shape, np.int32)) for n, shape in enumerate(shapes)]
            for n, (future, shape) in enumerate(zip(futures, shapes, strict=True)):
                assert np.array_equal(future.result().outputs[0], (x + n).reshape(shape))

    def test_long_packets(self, device):
        """When fewer than `depth` packets fit into the channel, fewer are in flight; none goes the long way."""
        builder = driver.ModelBuilder()
        inputs = [builder.input("float32", (1,)) for _ in range(40)]
        builder.output(builder.operation("CONCATENATION", *inputs, 0))
        x = [np.full(1, n, np.float32) for n in range(40)]
        with device.prepare(builder.build()) as prepared, prepared.burst(depth=64) as burst:
            futures = [burst.submit(*(a + n for a in x)) for n in range(64)]
            assert [f.result().outputs[0].tolist() for f in futures] == [[k + n for k in range(40)] for n in range(64)]
            assert burst.stats()["runs"] == {"burst": 64, "plain": 0}

    def test_errors_of_one(self, device, kit):
        """A request that fails has the error to itself: those before and after it have their results."""
        x = np.zeros((2, 3000), np.float32)
        with device.prepare(kit.reshape_model()) as prepared, prepared.burst(depth=4) as burst:
            good, bad = np.array((3, 2000), np.int32), np.array((7, 7), np.int32)
            futures = [burst.submit(x + n, bad if n % 3 == 1 else good) for n in range(12)]
            for n, future in enumerate(futures):
                if n % 3 == 1:
                    with pytest.raises(StatusError) as error:
                        future.result()
                    assert not isinstance(error.value, OutputInsufficientSize)
                    assert isinstance(future.exception(), InvalidArgument | StatusError)
                else:
                    assert future.result().outputs[0][0, 0] == n
                    assert future.exception() is None


class TestRun:
    def test_inputs_stay_the_same(self, slow):
        """Who only calls run keeps the same inputs, also after a timeout."""
        with slow.burst() as burst:
            (x,) = burst.inputs
            x[...] = frame(0.1, 1)
            with pytest.raises(TimeoutError):
                burst.run(timeout=0.01)
            for n in range(3):
                x[...] = frame(0, n)
                assert number_of(burst.run()) == n
                assert burst.inputs[0] is x

    def test_submit_after_a_timeout(self, slow):
        """Inputs of a run that was given up are never shared by two later requests."""
        with slow.burst(depth=4) as burst:
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    burst.run(frame(0.05, -5), timeout=0.001)
                for _ in range(3):
                    futures = [burst.submit(frame(0.002, n)) for n in range(10)]
                    assert [number_of(f.result()) for f in futures] == list(range(10))

    def test_threads_that_run(self, fast, kit):
        """run in one thread and submit in others do not meet in the same inputs."""
        wrong = []
        with fast.burst(depth=4) as burst:

            def work(k):
                for n in range(k, k + 300):
                    result = burst.run(frame(0, n)) if k == 0 else burst.submit(frame(0, n)).result()
                    if number_of(result) != n:
                        wrong.append(n)

            threads = [threading.Thread(target=work, args=(k,)) for k in (0, 1000, 2000)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(kit.patience)
        assert not wrong


class TestHeld:
    @pytest.mark.parametrize(
        "part",
        [
            lambda r: r,
            lambda r: r.outputs,
            lambda r: r.outputs[0],
            lambda r: r.outputs[0][0][1:][1:],
            lambda r: memoryview(r.outputs[0]),
            lambda r: memoryview(r.outputs[0])[0:1],
            lambda r: r.outputs[0].__dlpack__(),
            lambda r: np.from_dlpack(r.outputs[0]),
            lambda r: np.from_dlpack(r.outputs[0])[:, 1:],
            lambda r: r.outputs[0].view(np.uint8),
            lambda r: r.outputs[0].T,
        ],
        ids=["result", "outputs", "array", "view of view", "memoryview", "part of one", "capsule", "DLPack",
             "of DLPack", "other dtype", "transposed"],
    )  # fmt: skip
    def test_not_overwritten(self, fast, part):
        """Whatever is held of a result keeps its memory, and nothing else does: let go, the next request has it."""
        with fast.burst() as burst:
            first = burst.run(frame(0, 1)).outputs[0].ctypes.data
            assert burst.run(frame(0, 2)).outputs[0].ctypes.data == first
            result = burst.run(frame(0, 3))
            held, before = part(result), result.outputs[0].copy()
            memory = memoryview(result.outputs[0]).cast("B").tobytes
            del result
            others = {burst.run(frame(0, n)).outputs[0].ctypes.data for n in range(40)}
            assert first not in others
            assert memory() == before.tobytes()
            del held, memory
            gc.collect()
            assert first in {burst.run(frame(0, n)).outputs[0].ctypes.data for n in range(3)}

    @pytest.mark.parametrize("depth", [1, 4])
    def test_exhaustion(self, fast, depth):
        """When all are held, the error names the requests that hold them; when one is let go the burst goes on."""
        with fast.burst(depth=depth) as burst:
            held = []
            with pytest.raises(ResultsHeld, match=r"requests 1, 2, 3.*copy") as error:
                hold_all(burst, held)
            assert isinstance(error.value, BufferError)
            with pytest.raises(ResultsHeld):
                burst.submit(frame(0, 5))
            assert [number_of(r) for r in held] == list(range(len(held)))
            assert len(held) >= depth
            del held[3]
            assert number_of(burst.run(frame(0, 50))) == 50
            assert number_of(burst.submit(frame(0, 51)).result()) == 51
            keep = burst.run(frame(0, 52))
            with pytest.raises(ResultsHeld, match="requests 1, 2, 3, 5"):
                burst.run()
            assert [number_of(r) for r in [*held, keep]] == [0, 1, 2, *range(4, len(held) + 1), 52]

    @pytest.mark.parametrize("held", [0, 1, 3])
    def test_a_rotation_sends_as_many_requests_as_it_has_pairs(self, fast, held):
        """Whatever is held of earlier results: with 16 in flight the device is sent 20 different requests, not 300."""
        with fast.burst(depth=16) as burst:
            waiting, kept, pairs = deque(), deque(maxlen=held), set()
            for n in range(600):
                if len(waiting) == 16:
                    inputs, future = waiting.popleft()
                    result = future.result()
                    kept.append(result)
                    pairs.add((inputs, result.outputs[0].ctypes.data))
                burst.inputs[0][:] = frame(0, n)
                waiting.append((burst.inputs[0].ctypes.data, burst.submit()))
            assert len(pairs) <= 16 + held + 3

    @pytest.mark.parametrize("held", [0, 15])
    def test_a_rotation_binds_each_pair_once(self, connect, kit, heard, held):
        """With 64 in flight the device binds some 66 requests, or one more for each result held, and then no more."""
        device = connect("burst_test_devices.listening:Listening")
        with device.prepare(kit.add_model()) as prepared, prepared.burst(depth=64) as burst:
            waiting, kept = deque(), deque(maxlen=held)
            for _ in range(64 * 20):
                if len(waiting) == 64:
                    kept.append(waiting.popleft().result())
                waiting.append(burst.submit(frame(0, 0)))
            assert 64 <= len(heard("bind")) <= 64 + held + 3

    def test_exhaustion_of_what_waits(self, slow):
        """The newest frame, of policy latest, that finds no memory has the error, and not who waits for another."""
        with slow.burst(depth=1, policy="latest") as burst:
            held = []
            with pytest.raises(ResultsHeld):
                hold_all(burst, held)
            del held[0]
            first, second = burst.submit(frame(0.02, 7)), burst.submit(frame(0, 8))
            held.append(first.result())
            assert number_of(held[-1]) == 7
            with pytest.raises(ResultsHeld):
                second.result()
            held.clear()
            del first
            assert number_of(burst.run(frame(0, 9))) == 9


@pytest.mark.parametrize("requests", [400, pytest.param(stress.times(10_000), marks=pytest.mark.stress)])
@pytest.mark.parametrize("depth", [1, 4])
def test_hammer(fast, kit, depth, requests):
    """Threads that submit and wait at once, for their own futures and for each other's, get what is theirs."""
    everything, wrong, lock = [], [], threading.Lock()
    with fast.burst(depth=depth) as burst:

        def work(k):
            chance = random.Random(k)
            try:
                for n in range(k * requests, (k + 1) * requests):
                    future = burst.submit(frame(0, n))
                    with lock:
                        everything.append((n, future))
                        some = [everything.pop(chance.randrange(len(everything))) for _ in range(len(everything) > 6)]
                    mine = [] if chance.random() < 0.5 else [(n, future)]
                    wrong.extend(m for m, f in [*some, *mine] if number_of(f.result(kit.patience)) != m)
                    del some, mine, future
            except BaseException as error:
                wrong.append(error)
                raise

        threads = [threading.Thread(target=work, args=(k,)) for k in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10 * kit.patience)
        assert not wrong
        assert all(number_of(f.result(kit.patience)) == n for n, f in everything)
        assert burst.stats()["runs"] == {"burst": 5 * requests, "plain": 0}
