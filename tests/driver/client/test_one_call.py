"""`run()` of a known request is one call into C, and gives what the long way gives, whatever happened before."""

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import weakref
from functools import partial

import numpy as np
import pytest
from inside import controller_of

import driver
from burst import Busy, PeerDied, Timeout
from driver.client.workspace import InputSet, shapes_of

X, Y = np.float32([[1, 2, 3, 4]]), np.float32([[10, 20, 30, 40]])


@pytest.fixture
def sums():
    """x + y, of four floats."""
    m = driver.ModelBuilder()
    m.output(m.operation("ADD", m.input("float32", (1, 4)), m.input("float32", (1, 4)), 0))
    return m.build()


@pytest.fixture
def burst(device, sums):
    with device.prepare(sums) as prepared, prepared.burst() as burst:
        ready(burst)
        yield burst


def ready(burst):
    """After a few runs everything is known."""
    for _ in range(4):
        burst.run(X, Y)


def python_calls(call):
    """Names of the functions of Python that `call` enters."""
    names = []
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


@pytest.mark.parametrize(
    "call",
    [
        lambda b: b.run,
        lambda b: lambda: b.run(X, Y),
        lambda b: lambda: b.run(input_0=X, input_1=Y),
        lambda b: lambda: b.run({"input_1": Y, "input_0": X}, timeout=1.0),
        lambda b: lambda: b.run(timeout=1.0),
    ],
    ids=["in place", "arrays", "names", "dict", "timeout"],
)
def test_it_enters_no_function_of_python(burst, call):
    """With its inputs in place, with arrays by position and by name, and with a timeout; unless the answer comes late,
    on a busy machine.
    """
    run = call(burst)
    assert any(not {*python_calls(run)} - {"<lambda>", "__del__"} for _ in range(200))


def test_arrays_by_name_are_in_their_places(device):
    """Whatever their order, beside a timeout too; and what is no name of an input is refused with nothing copied."""
    m = driver.ModelBuilder()
    m.output(m.operation("SUB", m.input("float32", (1, 4), name="one"), m.input("float32", (1, 4), name="other"), 0))
    with device.prepare(m.build()) as prepared, prepared.burst() as burst:
        ready(burst)
        for call in (
            lambda: burst.run(other=X, one=Y),
            lambda: burst.run(other=X, one=Y, timeout=60.0),
            lambda: burst.run({"other": X, "one": Y}),
            lambda: burst.run({"other": X, "one": Y}, timeout=60.0),
        ):
            assert call().outputs[0].tolist() == (Y - X).tolist()
        for wrong in ({"one": X}, {"one": X, "others": Y}, {"one": X, "other": Y[0]}, {"one": X, 1: Y}):
            with pytest.raises(ValueError, match="input"):
                burst.run(wrong)
        with pytest.raises(TypeError, match="by position and other by name"):
            burst.run(X, other=Y)
        assert burst.run().outputs[0].tolist() == (Y - X).tolist()


def many_sums(count):
    """The sum of so many inputs."""
    m = driver.ModelBuilder()
    found, *others = [m.input("float32", (1, 4)) for _ in range(count)]
    for other in others:
        found = m.operation("ADD", found, other, 0)
    m.output(found)
    return m.build()


def test_many_inputs_are_one_call_too(device):
    """Twenty arrays enter no function of Python; more than a call sorts out are taken all the same."""
    for count in (20, 40):
        with device.prepare(many_sums(count)) as prepared, prepared.burst() as burst:
            arrays = [X * n for n in range(count)]
            for _ in range(4):
                assert burst.run(*arrays).outputs[0].tolist() == (X * sum(range(count))).tolist()
            by_name = {f"input_{n}": array for n, array in enumerate(arrays)}
            assert burst.run(by_name).outputs[0].tolist() == (X * sum(range(count))).tolist()
            calls = [python_calls(partial(burst.run, by_name)) for _ in range(200)]
            assert count == 40 or any(not {*each} - {"__del__"} for each in calls)


def test_inputs_outside_bursts_are_filled_at_once():
    """`run` of a model copies arrays that fit without a call for each; what has to be converted is."""
    model = many_sums(20)
    inputs = InputSet(model, shapes_of(model, None))
    arrays = [X * n for n in range(20)]
    assert len(python_calls(lambda: inputs.fill(arrays))) < 10
    assert [place.tolist() for place in inputs.arrays] == [array.tolist() for array in arrays]
    assert inputs.fill([[[1, 2, 3, 4]], *arrays[1:]]) == 20 * X.nbytes
    assert inputs.arrays[0].tolist() == X.tolist()
    with pytest.raises(ValueError, match="input 19"):
        inputs.fill([*arrays[:19], X[0]])
    assert inputs.arrays[0].tolist() == X.tolist()


def test_a_result_that_is_held_is_another_one(burst):
    """Two results that live at the same time are two."""
    first, second = burst.run(X, Y), burst.run(X, X)
    assert first is not second
    assert (first.outputs[0].tolist(), second.outputs[0].tolist()) == ((X + Y).tolist(), (X + X).tolist())


def test_results_of_other_shapes_are_not_written(device, kit):
    """After results were ready for one shape, those of other shapes are not written while the program holds them, on
    whichever way their requests went.
    """
    with device.prepare(kit.open_model()) as prepared, prepared.burst(depth=2, input_shapes=((1, 4),)) as burst:
        for rows in (1, 3):
            for _ in range(4):
                burst.run(np.zeros((rows, 4), np.float32))
        for ask in (lambda x: burst.submit(x).result(), burst.run):
            held = [ask(np.full((1 + n % 3, 4), n, np.float32)) for n in range(8)]
            assert [result.outputs[0][0, 0] for result in held] == list(range(1, 9))


@pytest.mark.parametrize(
    "arrays",
    [
        (X.tolist(), Y),
        (np.asfortranarray(np.repeat(X, 2, 0))[::2], Y),
        (np.repeat(X, 2, 1)[:, ::2], Y),
        (memoryview(X), Y),
        (X.astype(">f4").astype("<f4"), Y),
        ({"x": 0},),
    ],
    ids=["list", "rows", "columns", "memoryview", "bytes", "names"],
)
def test_arrays_of_any_kind(burst, arrays):
    """They are taken, converted or refused as on the long way."""
    burst.run(X, X)
    if isinstance(arrays[0], dict):
        with pytest.raises(ValueError, match="x"):
            burst.run(*arrays)
    else:
        assert burst.run(*arrays).outputs[0].tolist() == (X + Y).tolist()
    assert burst.run(Y, Y).outputs[0].tolist() == (Y + Y).tolist()


@pytest.mark.parametrize(
    "arrays", [(X,), (X, Y, X), (X[0], Y), (X.astype(np.float64), Y)], ids=["few", "many", "shape", "type"]
)
def test_what_does_not_fit_is_refused_and_nothing_is_copied(burst, arrays):
    """The inputs stay as they were."""
    burst.run(X, Y)
    with pytest.raises(ValueError, match=r"inputs? "):
        burst.run(*arrays)
    assert burst.run().outputs[0].tolist() == (X + Y).tolist()


def test_copies_are_counted(burst):
    """Arrays that `run` copied in C are in `stats()`, as those that it copied in Python."""
    before = burst.stats()["copied_bytes"]["bulk"]
    for _ in range(10):
        burst.run(X, Y)
    assert burst.stats()["copied_bytes"]["bulk"] - before == 10 * (X.nbytes + Y.nbytes)


def test_between_other_ways(burst, kit):
    """Futures, asyncio, explicit requests and `run` in turns: each gets its own answer."""

    async def awaited(n):
        return (await burst.run_async(X * n, Y)).outputs[0].tolist()

    for n in range(1, 6):
        future = burst.submit(X * n, Y)
        assert burst.run(X * n, X).outputs[0].tolist() == (X * n + X).tolist()
        assert future.result(kit.patience).outputs[0].tolist() == (X * n + Y).tolist()
        assert burst.run(X * n, Y).outputs[0].tolist() == (X * n + Y).tolist()
    assert asyncio.run(awaited(3)) == (X * 3 + Y).tolist()
    assert burst.run(X, Y).outputs[0].tolist() == (X + Y).tolist()


def test_shapes_that_change(device, kit):
    """A model with an open axis, whose outputs have another shape from run to run."""
    m = driver.ModelBuilder()
    m.output(m.operation("RELU", m.input("float32", (0, 4))))
    with device.prepare(m.build()) as prepared, prepared.burst() as burst:
        for n in (1, 1, 1, 2, 2, 1, 3, 3, 3, 1, 1, 1):
            given = np.arange(4 * n, dtype=np.float32).reshape(n, 4)
            assert burst.run(given).outputs[0].tolist() == given.tolist()


class TestLate:
    """An answer that takes longer than the call holds Python's lock."""

    @pytest.fixture
    def slow(self, connect, kit):
        with connect("Slow").prepare(kit.add_model()) as prepared, prepared.burst() as burst:
            for _ in range(3):
                burst.run(np.zeros((1, 4), np.float32))
            yield burst

    def test_other_threads_run_meanwhile(self, slow, kit):
        """A second run is refused, another thread counts on, and the first one gets its result."""
        found, begun, nine = [], threading.Event(), np.full((1, 4), 9, np.float32)

        def wait():
            begun.set()
            while not found:
                with contextlib.suppress(Busy):
                    found.append(slow.run(nine))

        def is_busy():
            try:
                slow.run(timeout=1e-9)  # of the other thread's inputs
            except (Timeout, driver.MissedDeadlinePersistent, driver.MissedDeadlineTransient):
                pass
            except Busy:
                return True
            return False

        thread = threading.Thread(target=wait)
        thread.start()
        begun.wait()
        kit.until(is_busy)
        slow.inputs[0][...] = 0
        thread.join(kit.patience)
        assert found[0].status == 0

    def test_it_enters_no_function_of_python(self, slow):
        """The call waits, gives Python's lock up and takes the result in C; also when a limit is set that is kept."""
        brief = np.full((1, 4), 5e-3, np.float32)
        for call in (lambda: slow.run(brief), lambda: slow.run(brief, timeout=60.0)):
            assert any(not {*python_calls(call)} - {"<lambda>", "__del__"} for _ in range(20))

    def test_the_next_call_is_as_any(self, slow):
        """Nothing of a late answer stays: other ways in and limits find the burst as it was."""
        brief = np.full((1, 4), 5e-3, np.float32)
        for _ in range(5):
            slow.run(brief, timeout=60.0)
            assert slow.submit(brief).result(60).status == 0
            slow.run(brief)
            with pytest.raises((Timeout, driver.MissedDeadlinePersistent, driver.MissedDeadlineTransient)):
                slow.run(np.full((1, 4), 0.2, np.float32), timeout=0.01)
            assert slow.run(brief).outputs[0][0, 0] == 1 + brief[0, 0]

    def test_a_thread_that_submits_waits(self, slow, kit):
        """Until the call has its result, and then gets its own; nothing is mixed up."""
        found, long, brief = [], np.full((1, 4), 0.3, np.float32), np.full((1, 4), 1e-3, np.float32)
        slow.run(brief)
        thread = threading.Thread(target=lambda: found.append(slow.run(long).outputs[0][0, 0]))
        thread.start()
        kit.until(lambda: controller_of(slow).is_calling)
        assert slow.submit(brief).result(kit.patience).outputs[0][0, 0] == 1 + brief[0, 0]
        thread.join(kit.patience)
        assert found == [1 + long[0, 0]]

    def test_close_ends_it(self, slow, kit):
        """Another thread closes the burst: the call ends with an error."""
        found = []

        def wait():
            with contextlib.suppress(Exception):
                slow.run(np.full((1, 4), 60, np.float32))
            found.append(True)

        thread = threading.Thread(target=wait)
        thread.start()
        kit.until(lambda: controller_of(slow).is_calling)
        slow.close()
        thread.join(kit.patience)
        assert found

    def test_a_timeout(self, slow):
        """It is told in time; the late answer is dropped, and the next run gets its own."""
        with pytest.raises(Timeout, match=r"0\.02 s"):
            slow.run(np.full((1, 4), 9, np.float32), timeout=0.02)
        slow.inputs[0][...] = 0
        assert slow.run(np.zeros((1, 4), np.float32)).outputs[0].tolist() == [[1] * 4]

    def test_ctrl_c(self, slow):
        """It is raised while the call waits, and the burst stays usable."""
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            slow.run(np.full((1, 4), 9, np.float32), timeout=60.0)
        timer.join()
        slow.inputs[0][...] = 0
        assert slow.run(np.zeros((1, 4), np.float32)).outputs[0].tolist() == [[1] * 4]


def test_the_device_dies(kit, sums):
    """`run` tells it, and with `recover=True` goes on with the next one, whose answers it has in one call again."""
    with (
        kit.living("reference") as device,
        device.prepare(sums) as prepared,
        prepared.burst() as mortal,
        prepared.burst(recover=True) as burst,
    ):
        ready(mortal)
        ready(burst)
        os.kill(device.engine_pid, signal.SIGKILL)
        with pytest.raises(PeerDied):
            mortal.run(X, Y)
        for _ in range(5):
            assert burst.run(X, Y).outputs[0].tolist() == (X + Y).tolist()
        assert "_run" not in python_calls(burst.run)


def test_a_child_process_cannot_use_it(burst):
    """After a fork the burst is its parent's alone."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        try:
            burst.run()
            os.write(writing, b"ran")
        except driver.DriverError:
            os.write(writing, b"refused")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reading, 10) == b"refused"
    os.close(reading)
    os.close(writing)
    assert burst.run(X, Y).outputs[0].tolist() == (X + Y).tolist()


def test_nothing_is_kept(device, sums):
    """A burst that is dropped ends with its last reference, and runs leave no objects behind."""
    with device.prepare(sums) as prepared:
        burst = prepared.burst()
        ended = weakref.ref(burst)
        ready(burst)
        gc.collect()
        before = len(gc.get_objects())
        for _ in range(1000):
            burst.run(X, Y)
        assert len(gc.get_objects()) <= before + 5
        kept = burst.run(X, Y)
        gc.disable()
        try:
            del burst
            assert ended() is None
        finally:
            gc.enable()
        assert kept.outputs[0].tolist() == (X + Y).tolist()
