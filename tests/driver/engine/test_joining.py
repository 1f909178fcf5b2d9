"""Requests of several clients become one run: who rides with whom, and that nobody pays for what another one does."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import stress
from onnx.helper import make_node
from sent_models import call_with_model
from waiting import PATIENCE, until

import driver
from burst import GeneralFailure, InvalidArgument, MissedDeadlinePersistent, MissedDeadlineTransient, Timeout
from driver import Batch
from driver.engine.totals import SUMMED

sys.path[:0] = [str(Path(__file__).parents[1] / "devices")]
import onnx_files  # noqa: E402  # for what writes models

NAME = "burst_test_devices.joining:Together"
ROWS = Batch(rows=8)
PADDED = Batch(rows=8, mask="mask")
POISON, CRUMB = -7.0, -8.0


def rows(first, count=1, length=4):
    """An input: each row has a number of its own at its begin, by which the device's notes name it."""
    return np.repeat(np.arange(first, first + count, dtype=np.float32)[:, None], length, axis=1)


class Runs:
    """What the device notes, and what holds it."""

    def __init__(self, folder):
        self._notes, self._holds = folder / "runs", [folder / f"hold{row}" for row in (-2, -3)]
        self._notes.unlink(missing_ok=True)

    def all(self):
        """The rows of each run. Of zeros are those by which the service tries a new file."""
        lines = self._notes.read_text().splitlines() if self._notes.exists() else []
        return [sorted(map(float, line.split())) for line in lines if set(line) - {"0", " "}]

    def hold(self):
        for each in self._holds:
            each.touch()

    def release(self, count=1):
        """Let one of the two that are held go on, whose lead is then the only one."""
        for each in self._holds[:count]:
            each.unlink(missing_ok=True)


@pytest.fixture
def runs(home):
    found = Runs(home.path)
    yield found
    found.release(2)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Models of one input, of an input with a mask, and of one whose rows have a fixed length."""
    folder = tmp_path_factory.mktemp("files")
    for name, shape, inputs in (
        ("plain", ("n", "m"), ["x"]),
        ("masked", ("n", "m"), ["x", "mask"]),
        ("fixed", ("n", 4), ["x"]),
        ("closed", (1, 4), ["x"]),
    ):
        last = make_node("Add", ["x", inputs[-1]], ["y"])
        sides = [(port, "float32", shape) for port in inputs], [("y", "float32", shape)]
        (folder / f"{name}.onnx").write_bytes(onnx_files.written([last], *sides))
    return lambda name: driver.load(folder / f"{name}.onnx")


@pytest.fixture
def device(home):
    with driver.connect(NAME) as found:
        yield found


@pytest.fixture
def threads():
    with ThreadPoolExecutor(16) as found:
        yield found


class Crowd:
    """Clients of one device, each with a burst of its own."""

    def __init__(self, device, stack, threads, runs):
        self.device, self._stack, self._threads, self.runs = device, stack, threads, runs

    def client(self, model, batch=ROWS, shape=(1, 4), priority="medium", **options):
        prepared = self._stack.enter_context(self.device.prepare(model, batch=batch, priority=priority))
        shapes = [shape] * len(model.inputs)
        return self._stack.enter_context(prepared.burst(input_shapes=shapes, **options))

    def start(self, burst, *inputs, **more):
        """The future of a request that has come to the device: it runs, or it waits."""
        before = self.stage()
        future = self._threads.submit(burst.run, *inputs, timeout=PATIENCE, **more)
        until(lambda: self.stage() > before or future.done())
        return future

    def stage(self):
        (_, _, flows, *_), _ = self.device.call("figures")
        return int(sum(flow[SUMMED.index("waiting")] for flow in flows)) + len(self.runs.all())

    def occupy(self, model, batch=ROWS):
        """The futures of two requests that run, and so occupy both leads until they are released."""
        self.runs.hold()
        return [self.start(self.client(model, batch), *[rows(-2 - n)] * len(model.inputs)) for n in range(2)]


@pytest.fixture
def crowd(device, threads, runs):
    with contextlib.ExitStack() as stack:
        yield Crowd(device, stack, threads, runs)
        runs.release(2)


def values(future):
    found = future.result(PATIENCE)
    (y,) = getattr(found, "outputs", found)  # of a burst, or of a prepared model
    return y.tolist()


class TestWhoRides:
    """Requests that wait become one run; what does not fit runs by itself."""

    def test_those_that_wait(self, crowd, files):
        """Of several clients, with several rows: one run for all, and each gets its own rows."""
        model = files("plain")
        busy = crowd.occupy(model)
        waiting = [crowd.start(crowd.client(model, shape=(n, 4)), rows(10 * n, n)) for n in (1, 2, 3)]
        crowd.runs.release()
        assert [values(future) for future in waiting] == [(rows(10 * n, n) + 1).tolist() for n in (1, 2, 3)]
        crowd.runs.release(2)
        assert [values(future) for future in busy] == [(rows(-2 - n) + 1).tolist() for n in range(2)]
        assert crowd.runs.all() == [[-2], [-3], [10, 20, 21, 30, 31, 32]]

    def test_on_the_plain_path(self, crowd, device, files, threads):
        """What is executed without a burst rides with what comes through one, and so does what is launched."""
        model = files("plain")
        crowd.occupy(model)
        waiting = [crowd.start(crowd.client(model), rows(10))]
        with device.prepare(model, batch=ROWS) as prepared:
            waiting.append(crowd.start(prepared, rows(20)))
            before = crowd.stage()
            launched = threads.submit(asyncio.run, prepared.run_async(rows(30)))
            until(lambda: crowd.stage() > before)
            crowd.runs.release()
            assert [values(future) for future in waiting] == [(rows(n) + 1).tolist() for n in (10, 20)]
            assert values(launched) == (rows(30) + 1).tolist()
        assert crowd.runs.all()[2:] == [[10, 20, 30]]

    def test_an_idle_device_waits_for_nobody(self, crowd, files):
        """One after the other, requests run alone."""
        burst = crowd.client(files("plain"))
        for n in range(1, 6):
            assert burst.run(rows(n)).outputs[0].tolist() == (rows(n) + 1).tolist()
        assert crowd.runs.all() == [[n] for n in range(1, 6)]

    def test_no_more_rows_than_asked_for(self, crowd, files):
        """What comes later rides in the next run; a request that has so many itself runs alone."""
        model = files("plain")
        crowd.occupy(model)
        waiting = [crowd.start(crowd.client(model, shape=(3, 4)), rows(10 * n, 3)) for n in (1, 2, 3)]
        alone = crowd.start(crowd.client(model, shape=(8, 4)), rows(40, 8))
        crowd.runs.release()
        for n, future in enumerate(waiting, 1):
            assert values(future) == (rows(10 * n, 3) + 1).tolist()
        assert values(alone) == (rows(40, 8) + 1).tolist()
        assert sorted(map(len, crowd.runs.all())) == [1, 1, 3, 6, 8]

    def test_a_row_of_absurd_length(self, crowd, files):
        """It runs alone, and those that wait with it ride together as if it was not there."""
        model = files("masked")
        crowd.occupy(model, PADDED)
        given = [rows(10 + n, 1, length) for n, length in enumerate((4, 3 << 20, 4))]
        waiting = [crowd.start(crowd.client(model, PADDED, x.shape), x, x) for x in given]
        crowd.runs.release()
        for future, x in zip(waiting, given, strict=True):
            assert np.array_equal(future.result(PATIENCE).outputs[0], x + 1)
        assert sorted(crowd.runs.all()[2:]) == [[10, 12], [11], [11]]  # once with too little memory

    def test_other_terms(self, crowd, files):
        """Clients that do not ask ride with nobody, and those with other terms with each other alone."""
        model = files("plain")
        crowd.occupy(model)
        terms = (ROWS, Batch(rows=4), Batch(rows=4), None, None)
        waiting = [crowd.start(crowd.client(model, batch), rows(10 + n)) for n, batch in enumerate(terms)]
        crowd.runs.release()
        assert [values(future) for future in waiting] == [(rows(10 + n) + 1).tolist() for n in range(5)]
        assert sorted(crowd.runs.all()[2:]) == [[10], [11], [12], [13], [14]]

    def test_many_terms(self, crowd, files):
        """Seventeen sets of terms for one model: clients with terms that were among the first still ride together."""
        model = files("plain")
        for most in range(2, 19):
            crowd.client(model, Batch(rows=most))
        crowd.occupy(model)
        waiting = [crowd.start(crowd.client(model), rows(10 + n)) for n in range(2)]
        crowd.runs.release()
        assert [values(future) for future in waiting] == [(rows(10 + n) + 1).tolist() for n in range(2)]
        assert crowd.runs.all()[2:] == [[10, 11]]

    def test_other_priorities(self, crowd, files):
        """The more urgent wait for nobody who is less so, and are not slowed by rows of theirs."""
        model = files("plain")
        crowd.occupy(model)
        waiting = [crowd.start(crowd.client(model), rows(10 + n)) for n in range(2)]
        urgent = crowd.client(model, priority="high")
        assert urgent.run(rows(66)).outputs[0].tolist() == (rows(66) + 1).tolist()
        assert crowd.runs.all()[2:] == [[66]]
        crowd.runs.release()
        assert [values(future) for future in waiting] == [(rows(10 + n) + 1).tolist() for n in range(2)]
        assert crowd.runs.all()[3:] == [[10, 11]]


class TestSequences:
    """Sequences of different lengths ride together where the model has a mask."""

    def test_are_padded(self, crowd, files):
        """The shorter ones get zeros, which take no part in their results."""
        model = files("masked")
        crowd.occupy(model, PADDED)
        lengths = (16, 15, 16)
        waiting = [
            crowd.start(crowd.client(model, PADDED, (1, length)), *[rows(10 + n, 1, length)] * 2)
            for n, length in enumerate(lengths)
        ]
        crowd.runs.release()
        for n, (future, length) in enumerate(zip(waiting, lengths, strict=True)):
            assert values(future) == (rows(10 + n, 1, length) + 1).tolist()
        assert crowd.runs.all()[2:] == [[10, 11, 12]]

    @pytest.mark.parametrize(("name", "batch"), [("plain", ROWS), ("masked", PADDED)])
    def test_are_not_padded(self, crowd, files, name, batch):
        """Without a mask, and where most would be padding."""
        model = files(name)
        crowd.occupy(model, batch)
        waiting = [
            crowd.start(crowd.client(model, batch, (1, length)), *[rows(length, 1, length)] * len(model.inputs))
            for length in (16, 2)
        ]
        crowd.runs.release()
        assert [values(future) for future in waiting] == [(rows(length, 1, length) + 1).tolist() for length in (16, 2)]
        assert sorted(crowd.runs.all()[2:]) == [[2], [16]]


STRANGER = f"""
import sys, driver, numpy as np
model, x = driver.load(sys.argv[1]), np.full((1, 4), 66, np.float32)
with driver.connect({NAME!r}) as d, d.prepare(model, batch=driver.Batch(rows=8)) as p:
    with p.burst(input_shapes=[(1, 4)]) as b: print(b.run(x).outputs[0][0, 0], end="")
"""


@contextlib.contextmanager
def stranger_of(model, folder, crowd):
    """A client in a process of its own, whose request waits."""
    before = crowd.stage()
    (folder / "net.onnx").write_bytes(bytes(model.main.operands[0].value))
    command = [sys.executable, "-c", STRANGER, folder / "net.onnx"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as stranger:
        try:
            until(lambda: crowd.stage() > before)
            yield stranger
        finally:
            stranger.kill()


class TestFaults:
    """Nobody pays for another one's request."""

    def test_a_row_that_fails(self, crowd, files):
        """Each request of the run is executed alone, once; only the one at fault fails."""
        model = files("plain")
        crowd.occupy(model)
        waiting = [crowd.start(crowd.client(model), rows(first)) for first in (10, POISON, 20)]
        crowd.runs.release()
        assert values(waiting[0]) == (rows(10) + 1).tolist()
        assert values(waiting[2]) == (rows(20) + 1).tolist()
        with pytest.raises(GeneralFailure, match="poison"):
            waiting[1].result(PATIENCE)
        together, *alone = crowd.runs.all()[2:]
        assert together == [POISON, 10, 20]
        assert sorted(alone) == [[POISON], [10], [20]]

    def test_rows_that_cannot_be_told_apart(self, crowd, files):
        """A run with fewer rows of results than of inputs: each runs alone, then and from now on."""
        model = files("plain")
        for _ in range(2):
            crowd.occupy(model)
            waiting = [crowd.start(crowd.client(model), rows(first)) for first in (10, CRUMB, 20)]
            crowd.runs.release()
            assert values(waiting[0]) == (rows(10) + 1).tolist()
            assert values(waiting[2]) == (rows(20) + 1).tolist()
            assert values(waiting[1]) == []
            crowd.runs.release(2)
            until(lambda: crowd.stage() == len(crowd.runs.all()))
        assert sorted(len(run) for run in crowd.runs.all()) == [1] * 10 + [3]

    def test_a_client_that_is_killed(self, crowd, files, tmp_path):
        """Its request does not run, and the others do."""
        model = files("plain")
        crowd.occupy(model)
        waiting = [crowd.start(crowd.client(model), rows(10))]
        before = crowd.stage()
        with stranger_of(model, tmp_path, crowd) as stranger:
            stranger.send_signal(signal.SIGKILL)
        until(lambda: crowd.stage() == before)
        waiting.append(crowd.start(crowd.client(model), rows(20)))
        crowd.runs.release()
        assert [values(future) for future in waiting] == [(rows(n) + 1).tolist() for n in (10, 20)]
        assert crowd.runs.all()[2:] == [[10, 20]]

    def test_a_client_that_is_stopped(self, crowd, files, tmp_path):
        """The others have their rows while it stands still, and it finds its own once it goes on."""
        model = files("plain")
        crowd.occupy(model)
        waiting = [crowd.start(crowd.client(model), rows(10))]
        with stranger_of(model, tmp_path, crowd) as stranger:
            stranger.send_signal(signal.SIGSTOP)
            crowd.runs.release()
            assert values(waiting[0]) == (rows(10) + 1).tolist()
            later = crowd.start(crowd.client(model), rows(20))
            crowd.runs.release(2)
            assert values(later) == (rows(20) + 1).tolist()
            stranger.send_signal(signal.SIGCONT)
            assert stranger.communicate(timeout=PATIENCE)[0] == b"67.0"
        assert [10, 66] in crowd.runs.all()

    def test_a_deadline(self, crowd, files):
        """It ends the wait of its request, and no other's."""
        model = files("plain")
        crowd.occupy(model)
        burst = crowd.client(model)
        waiting = crowd.start(crowd.client(model), rows(10))
        with pytest.raises(MissedDeadlineTransient):
            burst.run(rows(66), deadline=time.monotonic() + 0.05)
        until(lambda: crowd.stage() == 3)
        crowd.runs.release()
        assert values(waiting) == (rows(10) + 1).tolist()
        assert crowd.runs.all()[2:] == [[10]]

    def test_the_end_of_a_burst(self, crowd, files):
        """A burst that is closed while its request waits, or rides in a run, leaves the others what they asked for."""
        model = files("plain")
        crowd.occupy(model)
        closed = crowd.client(model)
        waiting = crowd.start(crowd.client(model), rows(10))
        leaving = closed.submit(rows(66))
        until(lambda: crowd.stage() == 4)
        closed.close()
        until(lambda: crowd.stage() == 3)
        crowd.runs.release()
        assert values(waiting) == (rows(10) + 1).tolist()
        assert crowd.runs.all()[2:] == [[10]]
        del leaving

    def test_memory_that_is_too_small(self, crowd, files):
        """Its request is repeated with more, as everywhere; the others have their results."""
        model = files("plain")
        crowd.occupy(model)
        waiting = [crowd.start(crowd.client(model), rows(10)), crowd.start(crowd.client(model), rows(20, 2))]
        crowd.runs.release()
        assert [values(future) for future in waiting] == [(rows(10) + 1).tolist(), (rows(20, 2) + 1).tolist()]


class TestWhatIsRefused:
    """Bad terms are named, by the client and by the device."""

    @pytest.mark.parametrize(
        ("name", "batch", "words"),
        [
            ("plain", Batch(rows=1), r"batch\.rows=1: an integer from 2"),
            ("plain", Batch(rows=True), r"batch\.rows=True"),
            ("plain", Batch(window=-1), r"batch\.window=-1: seconds from 0"),
            ("plain", Batch(window=float("nan")), r"batch\.window=nan"),
            ("plain", Batch(mask="mask"), r"batch\.mask='mask': no input has that name; one of x"),
            ("fixed", Batch(mask="x"), r"batch\.mask='x': the second dimension of"),
            ("closed", Batch(), "has no open first dimension"),
        ],
    )
    def test_by_the_client(self, device, files, name, batch, words):
        """Before anything is sent, with `prepare` and with `compile`."""
        with pytest.raises(ValueError, match=words):
            device.prepare(files(name), batch=batch)
        with pytest.raises(ValueError, match=words):
            driver.compile(files(name), device=NAME, batch=batch)

    @pytest.mark.parametrize(
        "plain", [1, [], [1, 0, False], [2, -1, False], [2, 0, 1], [2, 0, False, 0], [2**20, 0, True]]
    )
    def test_by_the_device(self, device, files, plain):
        """Whatever a client sends."""
        terms = None, None, "fast_single_answer", None, 1
        with pytest.raises(InvalidArgument, match="batch"):
            call_with_model(device.connection, "prepare", files("plain"), *terms, plain)


def test_compiled_models(crowd, files, home):
    """`compile` passes the terms on, also for a model that is kept and read from the cache."""
    model = files("plain")
    crowd.occupy(model)
    with driver.compile(model, device=NAME, batch=ROWS) as compiled:
        future = crowd.start(compiled, rows(20))
        other = crowd.start(crowd.client(model), rows(10))
        crowd.runs.release()
        assert [values(future), values(other)] == [(rows(n) + 1).tolist() for n in (20, 10)]
    assert crowd.runs.all()[2:] == [[10, 20]]


def test_the_open_inference_protocol(crowd, files):
    """Where a model's configuration has its requests joined, they also ride with those of other programs."""
    pytest.importorskip("grpc", reason="needs the extra 'oip'")
    from driver.gateways.oip.inference import ModelPorts
    from driver.gateways.oip.served_model import PriorityLane

    model, config = files("plain"), SimpleNamespace(batch=ROWS.rows, window=0.0, instances=1)
    lane = PriorityLane(model, NAME, config, ModelPorts(model), name="net", priority="medium")
    with contextlib.closing(lane):
        crowd.occupy(model)
        waiting = [crowd.start(lane.joins, rows(10)), crowd.start(crowd.client(model), rows(20))]
        crowd.runs.release()
        assert [values(future) for future in waiting] == [(rows(n) + 1).tolist() for n in (10, 20)]
    assert crowd.runs.all()[2:] == [[10, 20]]


def test_what_the_device_says(crowd, files):
    """Executions that were part of another one's run are counted, and each burst's that shared one. A result that was
    measured says how many were one run.
    """
    model = files("plain")
    crowd.occupy(model)
    waiting = [crowd.start(crowd.client(model, measure=True), rows(10 + n)) for n in range(3)]
    crowd.runs.release()
    assert [future.result(PATIENCE).timing.joined for future in waiting] == [3, 3, 3]
    alone = crowd.client(model, measure=True)
    assert [alone.run(rows(n)).timing.joined for n in range(2)] == [1, 1]
    found = crowd.device.stats()["priorities"]["medium"]
    assert (found["executions"], found["joined"], found["waiting"]) == (7, 2, 0)
    assert sorted(int(trace.page.device.joined) for trace in crowd.device.traces()) == [0, 0, 0, 1, 1, 1]


@pytest.mark.stress
def test_a_crowd_that_comes_and_goes(crowd, device, files, threads):
    """Rows of any number, deadlines, poison, bursts that are closed while they wait: each result is its request's own,
    each error has its cause, and nothing waits in the end."""
    model, rounds = files("plain"), stress.times(20_000)

    def client(seed):
        random, counts = np.random.default_rng(seed), Counter()
        left = rounds
        while left > 0:
            priority = ("medium", "high")[random.integers(2)]
            with device.prepare(model, batch=ROWS, priority=priority) as prepared, prepared.burst(depth=2) as burst:
                for _ in range(random.integers(1, 60)):
                    left -= 1
                    first, count = int(random.integers(1, 1000)), int(random.integers(1, 7))
                    first = POISON if random.integers(40) == 0 else first
                    soon = time.monotonic() + random.choice([1e-4, 1e-3, PATIENCE], p=[0.1, 0.1, 0.8])
                    x = rows(first, count)
                    try:
                        found = burst.run(x, deadline=soon).outputs[0]
                    except (MissedDeadlineTransient, MissedDeadlinePersistent, Timeout):
                        counts["late"] += 1
                    except GeneralFailure:
                        assert POISON in x
                        counts["poison"] += 1
                    else:
                        assert found.tolist() == (x + 1).tolist()
                        counts["right"] += 1
                if random.integers(2):
                    burst.submit(rows(1))  # nobody waits for it
        return counts

    total = sum((future.result() for future in [threads.submit(client, seed) for seed in range(8)]), Counter())
    until(lambda: crowd.stage() == len(crowd.runs.all()))
    joined = device.stats()["priorities"]
    assert all(total[kind] for kind in ("right", "late", "poison"))
    assert joined["medium"]["joined"]
    assert joined["high"]["joined"]
    assert not joined["medium"]["waiting"] + joined["high"]["waiting"]
