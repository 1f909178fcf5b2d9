"""Executions: by every path the same results, and errors that leave the path usable."""

import asyncio
import gc
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from inside import controller_of, writer_of
from waiting import PATIENCE, nested

import driver
from burst import ErrorStatus, Memory, Request, RequestArgument
from driver.runtime.local import LocalDevice

X = np.array([[1, 2, 3, 4]], np.float32)
Y = X + 1


def interrupt_when(condition, until):
    """Ctrl-C from another thread, once that holds."""

    def run():
        until(condition)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def slow(seconds):
    return np.full((1, 4), seconds, np.float32)


@pytest.fixture
def add(device, kit):
    with device.prepare(kit.add_model()) as prepared:
        yield prepared


@pytest.fixture
def slow_add(connect, kit):
    """A model whose executions take as many seconds as their first input says."""
    with connect("Slow").prepare(kit.add_model()) as prepared:
        yield prepared


class TestBurst:
    """What a burst takes."""

    def test_posix(self, add):
        """A burst whose queues are in POSIX shared memory gives what one in a memfd gives."""
        with add.burst(memory="posix") as burst:
            assert burst.run(X).outputs[0].tolist() == Y.tolist()

    def test_unknown_input_shape(self, device, kit):
        """An input whose shape the model leaves open gets it from the array, or when a burst is opened."""
        with device.prepare(kit.open_model()) as prepared:
            for rows in (1, 3, 2000):
                x = np.ones((rows, 4), np.float32)
                np.testing.assert_array_equal(prepared.run(x)[0], x + 1)
                with prepared.burst(input_shapes=[(rows, 4)]) as burst:
                    np.testing.assert_array_equal(burst.run(x).outputs[0], x + 1)
            with prepared.burst() as burst:
                with pytest.raises(AttributeError, match=r"float32 \? x 4: give .*input_shapes=\[\(1, 4\)\]\)"):
                    burst.inputs[0].shape  # noqa: B018
                for use in (np.asarray, list, len, lambda x: x[0], lambda x: x.__setitem__(..., 1)):
                    with pytest.raises(ValueError, match=r"input_shapes="):
                        use(burst.inputs[0])
                np.testing.assert_array_equal(burst.run(x).outputs[0], x + 1)
                assert burst.inputs[0].shape == x.shape


class TestRefusedBeforeSending:
    """What does not fit is told with its number, and nothing is sent."""

    def test_all_or_none(self, device, kit):
        """When the second of two inputs is refused, the first has not been written."""
        with device.prepare(kit.reshape_model()) as prepared, prepared.burst() as burst:
            burst.inputs[0][...], runs = 7, burst.stats()["runs"]
            with pytest.raises(ValueError, match="input 1"):
                burst.run(np.zeros((2, 3000), np.float32), np.zeros(3, np.int32))
            assert (burst.inputs[0] == 7).all()
            assert burst.stats()["runs"] == runs


class TestExplicitRequests:
    """Requests on pools of the caller's own."""

    def test_free_memory(self, add, kit):
        """A freed pool is unmapped on the other side, can be used again, and unknown memory is no error."""
        with add.burst() as burst:
            request, _ = kit.request([X], 16)
            for _ in range(3):
                assert burst.execute(request).outputs[0].tolist() == Y.tolist()
                for pool in request.pools:
                    burst.free_memory(pool)
            burst.free_memory(Memory.create(1))
            assert burst.stats()["memories_sent"] == 6

    def test_truncated_pool(self, add, kit, process):
        """A client that truncates memory which is not sealed harms nobody but itself."""
        fd = os.memfd_create("truncated", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 2**20)
        pool = Memory.adopt(fd, 2**20, sealed=False)
        request = Request(
            (RequestArgument(offset=2**19, length=16),), (RequestArgument(offset=2**18, length=16),), (pool,)
        )
        engine = process(add.device.engine_pid)
        with add.burst() as burst:
            assert burst.execute(request).status == 0
            os.ftruncate(fd, 4096)
            burst.execute(request)
            assert add.execute(request).status == ErrorStatus.GENERAL_FAILURE
            assert burst.run(X).outputs[0].tolist() == Y.tolist()
        assert not engine.has_ended(0)


class TestConcurrency:
    """Several executions of one model at the same time."""

    def test_overlap(self, slow_add, kit):
        """Eight asynchronous executions of one model run at the same time, each with its callback."""
        requests = [kit.request([slow(9)], 16) for _ in range(8)]
        calls = []
        running = [slow_add.execute_async(r, callback=calls.append) for r, _ in requests]
        # All are under way, since none is done before its own input says so; then the last ends first.
        for (_, (x,)), future in reversed(list(zip(requests, running, strict=True))):
            assert not future.done()
            x[...] = 0
            assert future.result(kit.patience).outputs[0].tolist() == [[1, 1, 1, 1]]
        kit.until(lambda: len(calls) == 8)
        assert calls == running[::-1]

    def test_run_from_many_threads(self, device, kit):
        """run may be called from any number of threads at once."""
        results = {}
        with device.prepare(kit.add_model()) as prepared:

            def run(n):
                results[n] = {float(prepared.run(X * n)[0][0, 3]) for _ in range(20)}

            threads = [threading.Thread(target=run, args=(n,)) for n in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert results == {n: {4.0 * n + 1} for n in range(6)}

    def test_bursts_side_by_side(self, add):
        """Several bursts on one model do not share their inputs."""
        bursts = [add.burst() for _ in range(5)]
        for n, burst in enumerate(bursts):
            burst.inputs[0][...] = n
        for n, burst in enumerate(bursts):
            with burst:
                assert burst.run().outputs[0].tolist() == [[n + 1.0] * 4]


class TestGivingUp:
    """Timeouts, signals, forks, and what is used after its end."""

    def test_ctrl_c_in_run(self, slow_add, kit):
        """Ctrl-C ends run at once; the model stays usable, and later runs get memory that nobody writes to."""
        engine = slow_add.device.engine_pid
        with slow_add.device.prepare(slow_add.model) as prepared:  # which has no memory of earlier runs
            before = mapped(engine, "fmq")  # of other tests, too, and some may be about to go
            thread = interrupt_when(lambda: mapped(engine, "fmq") - before, kit.until)
            with pytest.raises(KeyboardInterrupt):
                prepared.run(slow(3))
            thread.join()
            assert prepared.run(slow(0))[0].tolist() == [[1, 1, 1, 1]]

    def test_ctrl_c_in_a_burst(self, slow_add, kit):
        """Ctrl-C ends a burst's run at once; the burst stays usable, and the late result is dropped."""
        with slow_add.burst() as burst:
            burst.run(slow(0))
            position = writer_of(controller_of(burst)).position
            thread = interrupt_when(lambda: writer_of(controller_of(burst)).position > position, kit.until)
            (array,) = burst.inputs
            array[...] = slow(9)
            with pytest.raises(KeyboardInterrupt):
                burst.run()
            array[...] = slow(0)  # it runs still
            thread.join()
            assert burst.run(slow(0.05)).outputs[0].tolist() == slow(1.05).tolist()
            assert burst.run(slow(0.03)).outputs[0].tolist() == slow(1.03).tolist()

    @pytest.mark.integration
    def test_ctrl_c_in_prepare(self, connect, kit, place, monkeypatch):
        """Ctrl-C in prepare leaves the connection usable: the late answer is not taken for that of the next call."""
        monkeypatch.setenv("BURST_RUNTIME_DIR", str(place.path))
        with driver.connect(kit.odd("Slow")) as device:
            # The engine holds the model when it has begun to prepare it.
            thread = interrupt_when(lambda: mapped(device.engine_pid, "burst-model"), kit.until)
            with pytest.raises(KeyboardInterrupt):
                device.prepare(kit.add_model(relaxed=True))
            thread.join()
            assert device.supported_operations(kit.add_model()) == [True]

    def test_after_fork(self, place, kit):
        """In a forked child everything that its parent opened says so, and closing it there does the parent no harm."""
        code = f"""
import os, sys, numpy as np, driver
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from small_models import add_model
x = np.zeros((1, 4), np.float32)
with driver.connect() as device, device.prepare(add_model()) as prepared, prepared.burst() as burst:
    prepared.run(x), burst.run(x)
    if not (child := os.fork()):
        said = []
        for use in (lambda: prepared.run(x), lambda: burst.run(x), lambda: burst.run(x), prepared.burst,
                    lambda: device.prepare(add_model())):
            try:
                use()
            except driver.DriverError as error:
                said.append("before a fork" in str(error))
        burst.close(), device.close()
        with driver.connect() as own, own.prepare(add_model()) as mine:
            said.append(mine.run(x)[0].sum() == 4)
        os._exit(0 if said == [True] * 6 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert prepared.run(x)[0].sum() == burst.run(x).outputs[0].sum() == 4
"""
        with kit.python(code) as client:
            assert client.wait(kit.patience) == 0

    def test_closed_device(self, device, kit):
        """What was made through a closed device says that it is gone."""
        prepared = device.prepare(kit.add_model())
        prepared.run(X)
        device.close()
        with pytest.raises(ConnectionError):
            prepared.run(X)

    def test_arrays_outlive_all(self, connect, kit):
        """Inputs and outputs stay readable after their burst, their model and their device are gone."""
        device = connect()
        prepared = device.prepare(kit.add_model())
        burst = prepared.burst()
        (output,) = burst.run(X).outputs
        source = burst.inputs[0]
        burst.close()
        prepared.close()
        device.close()
        del burst, prepared, device
        gc.collect()
        assert (source.tolist(), output.tolist()) == (X.tolist(), Y.tolist())


def mapped(pid, name):
    """The inodes of anonymous shared memory of that name that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if f"/memfd:{name} " in line}


class TestMeasuring:
    """Timing and statistics."""

    def test_timing(self, slow_add, kit):
        """Times are measured where they are asked for, in the device and around it, and nowhere else."""
        request, _ = kit.request([slow(0.02)], 16)
        with slow_add.burst(measure=True) as measuring, slow_add.burst() as silent:
            for result in (slow_add.execute(request, measure=True), measuring.run(slow(0.02))):
                device, around = result.timing
                assert 20_000 <= device <= around < 2_000_000
            for result in (slow_add.execute(request), silent.run(slow(0))):
                assert result.timing == (None, None)
            seconds = measuring.stats()["seconds"]
            assert 0.02 <= seconds["on_device"] <= seconds["in_driver"] <= seconds["total"]
            assert silent.stats()["seconds"] is None

    def test_stats(self, add):
        """A burst counts its runs by path; in place not a byte of bulk data is copied, and `run(array)` copies that."""
        with add.burst(measure=True) as burst:
            assert burst.stats()["runs"] == {"burst": 0, "plain": 0}
            burst.inputs[0][...] = X
            for _ in range(3):
                burst.run()
            stats = burst.stats()
            burst.run(X)
            assert burst.stats()["copied_bytes"]["bulk"] == X.nbytes
        assert stats["runs"] == {"burst": 3, "plain": 0}
        assert stats["memories_sent"] == 2
        assert stats["timeouts"] == 0
        assert stats["copied_bytes"]["bulk"] == 0
        assert stats["copied_bytes"]["control"] > 0
        assert stats["seconds"]["total"] > 0

    def test_outputs_in_place(self, add):
        """A burst's inputs and outputs are shared memory; an output that nobody holds any more is used again."""
        with add.burst() as burst:
            first = burst.run(X).outputs[0]
            assert not first.flags.owndata
            second = burst.run(2 * X).outputs[0]
            assert (first.tolist(), second.tolist()) == (Y.tolist(), (2 * X + 1).tolist())
            address = first.ctypes.data
            del first
            assert burst.run(X).outputs[0].ctypes.data == address

    def test_run_gives_its_arrays_away(self, add):
        """Arrays from run are the caller's: the next run leaves them alone."""
        (first,) = add.run(X)
        add.run(2 * X)
        assert first.tolist() == Y.tolist()
        assert first.flags.owndata
        first[...] = 0

    def test_too_long_for_the_channel(self, device):
        """A request that does not fit into a burst's channel takes the plain path, and the statistics say so."""
        builder = driver.ModelBuilder()
        inputs = [builder.input("float32", (1,)) for _ in range(1100)]
        builder.output(builder.operation("CONCATENATION", *inputs, 0))
        x = [np.full(1, n, np.float32) for n in range(1100)]
        with device.prepare(builder.build()) as prepared, prepared.burst(measure=True) as burst:
            for _ in range(2):
                result = burst.run(*x)
                assert result.outputs[0].tolist() == list(range(1100))
                nested(result.timing.time_on_device, result.timing.time_in_driver)
            assert burst.submit(*x).result().outputs[0].tolist() == list(range(1100))
            assert burst.stats()["runs"] == {"burst": 0, "plain": 3}

    def test_many_requests(self, add, kit):
        """More different requests than a device remembers are executed all the same."""
        requests = [kit.request([X * n], 16)[0] for n in range(80)]
        with add.burst() as burst:
            for _ in range(2):
                for n, request in enumerate(requests):
                    assert burst.execute(request).outputs[0].tolist() == (X * n + 1).tolist()
                    assert add.execute(request).outputs[0].tolist() == (X * n + 1).tolist()

    def test_a_model_without_inputs(self, device):
        """It is executed on both ways, as any other."""
        builder = driver.ModelBuilder()
        builder.output(builder.operation("FILL", [2, 3], 1.5))
        with device.prepare(builder.build()) as prepared, prepared.burst() as burst:
            for outputs in (prepared.run(), burst.run().outputs):
                assert outputs[0].tolist() == [[1.5] * 3] * 2


@pytest.mark.parametrize("way", ["run", "run_async"])
@pytest.mark.parametrize("where", ["a device", "this process", "compiled", "compiled, with the CPU behind it"])
def test_a_timeout_counts_from_the_call(device, kit, monkeypatch, where, way):
    """Where an output is larger than its first guess, the second try has what the first one left."""
    x, jobs, model = np.zeros((100_000, 4), np.float32), [], kit.open_model()
    if where.startswith("compiled"):
        prepared = driver.compile(model, [device, *["cpu"] * where.endswith("it")])
    else:
        prepared = (LocalDevice() if where == "this process" else device).prepare(model)
    with prepared:
        name = "start" if way == "run_async" else "perform"
        execute = getattr(prepared.executor, name)
        monkeypatch.setattr(prepared.executor, name, lambda job: (jobs.append(job), execute(job))[1])
        if way == "run_async":
            (found,) = asyncio.run(prepared.run_async(x, timeout=PATIENCE))
        else:
            (found,) = prepared.run(x, timeout=PATIENCE)
    assert (found == 1).all()
    assert len(jobs) == 2
    assert jobs[0].wait == jobs[1].wait


def test_a_timeout_that_never_comes(device, kit):
    """timeout=inf is no timeout, also for the second try of a burst whose output was larger than its first guess."""
    x = np.zeros((100_000, 4), np.float32)
    with device.prepare(kit.open_model()) as prepared, prepared.burst(input_shapes=[x.shape]) as burst:
        assert (burst.run(x, timeout=float("inf")).outputs[0] == 1).all()
