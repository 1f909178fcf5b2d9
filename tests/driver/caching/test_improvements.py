"""A quick plan serves until a better one is made: the switch loses nothing, and the better one is what is kept."""

import os
import random
import threading
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import stress
from kills import kill
from waiting import last

import driver
from driver.options import Cache
from driver.vts.cache_files import CacheFileSet

DEPTH = 4


class Staged:
    """Connections to the device with two plans, and the files that say what it does, and did."""

    def __init__(self, place, kit):
        self._folder, self._kit, self.name = place.path, kit, kit.odd("Staged")

    def log(self):
        """What it has written so far."""
        return "".join(path.read_text() for path in self._folder.glob("*.log"))

    def connect(self):
        return driver.connect(self.name)

    def hold(self):
        (self._folder / "held").unlink(missing_ok=True)
        (self._folder / "hold").touch()

    def wait_until_held(self):
        self._kit.until((self._folder / "held").exists)

    def release(self):
        (self._folder / "hold").unlink()

    def spoil(self):
        (self._folder / "spoil").touch()

    def told(self, what):
        """Which plans it has said that of, since the last time that it was asked."""
        found = {path.name.partition("-")[2]: path for path in self._folder.glob(f"{what}-*")}
        for path in found.values():
            path.unlink()
        return set(found)

    def restored(self, device, model, files):
        """The plan that it restores out of these files, which has to compute what the model does."""
        self.told("restored")
        with device.prepare_from_cache(model, files.cache()) as prepared:
            check_runs(prepared)
            return self.told("restored")


@pytest.fixture
def staged(place, kit):
    """One of this test's own, whose improvements wait."""
    found = Staged(place, kit)
    found.hold()
    return found


@pytest.fixture
def files(staged):
    with staged.connect() as device, CacheFileSet(device.number_of_cache_files_needed()) as found:
        yield found


def frame(n):
    return np.full((1, 4), n, np.float32)


RUNS = 3
"""After which the device makes the better plan."""


def check_runs(prepared, n=3):
    assert prepared.run(frame(n))[0].tolist() == [[n + 1.0] * 4]


def use(prepared):
    """Runs it often enough."""
    for n in range(RUNS):
        prepared.run(frame(n))


class Stream:
    """Numbered frames through a burst, with some in flight, and as many on the plain path."""

    def __init__(self, prepared, burst):
        self._prepared, self._burst, self._pending, self.results = prepared, burst, deque(), 0

    def step(self):
        """One frame on each way; the oldest result of the burst is the one of the oldest frame."""
        number = self.results + len(self._pending)
        self._pending.append(self._burst.submit(frame(number)))
        check_runs(self._prepared, number)
        if len(self._pending) == DEPTH:
            self._take()

    def _take(self):
        found = self._pending.popleft().result(20).outputs[0].tolist()
        assert found == [[self.results + 1.0] * 4]
        self.results += 1

    def finish(self):
        while self._pending:
            self._take()


def test_the_switch_loses_nothing(staged, kit):
    """Bursts with four requests in flight and plain calls, by three clients, run through it: every result comes once,
    in its order, and is right; the stage goes from 0 to 1, and requests are bound to the better plan from then on.
    """
    with staged.connect() as device, device.prepare(kit.add_model()) as prepared:
        use(prepared)
        staged.wait_until_held()
        assert prepared.stage == 0
        switched, failures = threading.Event(), []
        clients = [threading.Thread(target=_stream, args=(staged, kit, switched, failures)) for _ in range(2)]
        for client in clients:
            client.start()
        with prepared.burst(depth=DEPTH) as burst:
            stream = Stream(prepared, burst)
            for _ in range(50):
                stream.step()
            assert staged.told("bound") == {"quick"}
            staged.release()
            while not prepared.stage:
                stream.step()
            staged.told("bound")
            for _ in range(50):
                stream.step()
            stream.finish()
        switched.set()
        for client in clients:
            client.join(kit.patience)
        assert prepared.stage == 1
        assert failures == []
        assert stream.results >= 100


def _stream(staged, kit, switched, failures):
    try:
        with (
            staged.connect() as device,
            device.prepare(kit.add_model()) as prepared,
            prepared.burst(depth=DEPTH) as burst,
        ):
            stream = Stream(prepared, burst)
            while not switched.is_set() or stream.results < 10:
                stream.step()
            stream.finish()
    except BaseException as error:  # noqa: BLE001 (of a thread, for the test to see)
        failures.append(error)


def test_later_requests_run_on_the_better_plan(staged, kit):
    """What was bound to the quick one is bound anew, in a burst and on the plain path; what comes later, at once."""
    with (
        staged.connect() as device,
        device.prepare(kit.add_model()) as prepared,
        prepared.burst() as burst,
    ):
        for run in (prepared.run, lambda x: burst.run(x).outputs):
            assert run(frame(1))[0].tolist() == [[2.0] * 4]
        assert staged.told("bound") == {"quick"}
        use(prepared)
        staged.release()
        kit.until(lambda: prepared.stage)
        for run in (prepared.run, lambda x: burst.run(x).outputs):
            kit.until(lambda run=run: run(frame(1))[0].tolist() == [[2.0] * 4] and "better" in staged.told("bound"))


def test_a_model_that_is_little_used(staged, kit):
    """The better plan is made once the quick one has run often enough, on whatever path, and not before."""
    staged.release()
    with (
        staged.connect() as device,
        device.prepare(kit.add_model()) as prepared,
        device.prepare(kit.mul_model()) as other,
        prepared.burst() as burst,
    ):
        for _ in range(RUNS - 1):
            check_runs(prepared)
        for _ in range(RUNS):
            other.run(np.full(4, 3, np.float32))
        kit.until(lambda: other.stage)
        assert prepared.stage == 0
        burst.run(frame(1))
        kit.until(lambda: prepared.stage)


def test_the_better_plan_is_kept(staged, kit, files):
    """Before the switch the files hold the quick plan, after it the better one, in the place of that."""
    with staged.connect() as device, CacheFileSet(files.counts, files.token) as copies:
        prepared = device.prepare(kit.add_model(), cache=files.cache())
        assert prepared.home.declined == ""
        quick = files.read()
        copies.write(quick)
        use(prepared)
        staged.wait_until_held()
        staged.release()
        kit.until(lambda: prepared.stage)
        prepared.close()  # now restoring makes a model, and does not find one
        kit.until(lambda: staged.restored(device, kit.add_model(), files) == {"better"})
        assert [len(new) > len(old) for new, old in zip(files.read(), quick, strict=True)] == [True, True]
        with pytest.raises(driver.GeneralFailure):  # the device remembers the newest
            device.prepare_from_cache(kit.add_model(), copies.cache())


def test_the_quick_plan_is_restored_before_that(staged, kit, files):
    """While the better one is being made, another client already restores what there is."""
    with staged.connect() as device, device.prepare(kit.add_model(), cache=files.cache()) as prepared:
        use(prepared)
        staged.wait_until_held()
        with staged.connect() as other, other.prepare_from_cache(kit.add_model(), files.cache()) as restored:
            check_runs(restored)
            staged.release()
            kit.until(lambda: prepared.stage)
            check_runs(restored)


def test_files_that_somebody_changed_are_left_alone(staged, kit, files):
    """Then the better plan is not kept, and serves all the same."""
    with staged.connect() as device, device.prepare(kit.add_model(), cache=files.cache()) as prepared:
        use(prepared)
        staged.wait_until_held()
        files.write([b"mine"] * 2)
        staged.release()
        kit.until(lambda: prepared.stage and "an improved compilation was not cached" in staged.log())
        check_runs(prepared)
        assert files.read() == [b"mine"] * 2


def test_a_newer_entry_is_not_forgotten_for_an_older_one(staged, kit, files):
    """Two sets of files under one token: those written last are the device's; the others do not grow any more."""
    with staged.connect() as device, CacheFileSet(files.counts, files.token) as newer:
        prepared = device.prepare(kit.add_model(), cache=files.cache())
        use(prepared)
        staged.wait_until_held()
        again = device.prepare(kit.add_model(), cache=newer.cache())
        older = files.read()
        staged.release()
        kit.until(lambda: prepared.stage)
        prepared.close(), again.close()
        kit.until(lambda: staged.restored(device, kit.add_model(), newer) == {"better"})
        assert files.read() == older


def test_descriptors_of_many_savings(staged, kit, files):
    """A client that keeps one model 200 times costs the device some tens of descriptors, and none in the end."""
    with staged.connect() as device:
        kept = device.prepare(kit.add_model())
        use(kept)
        staged.wait_until_held()
        folder = Path(f"/proc/{device.engine_pid}/fd")
        before = len(list(folder.iterdir()))
        for n in range(200):
            cache = Cache(n.to_bytes(32, "big"), *files.cache()[1:])
            with device.prepare(kit.add_model(), cache=cache) as prepared:
                assert prepared.home.declined == ""
        assert len(list(folder.iterdir())) - before <= 2 * 16 + 8
        staged.release()
        kit.until(lambda: kept.stage and len(list(folder.iterdir())) <= before + 8)
        kept.close()


def test_closed_before_it_is_done(staged, kit, files):
    """The model's last client closes it while the better plan is made: others are served, and the entry is whole."""
    with staged.connect() as device:
        prepared = device.prepare(kit.add_model(), cache=files.cache())
        use(prepared)
        staged.wait_until_held()
        prepared.close()
        with device.prepare(kit.mul_model()) as other:
            for _ in range(RUNS):
                assert other.run(np.full(4, 3, np.float32))[0].tolist() == [9.0] * 4
            staged.release()
            kit.until(lambda: other.stage)
        assert staged.restored(device, kit.add_model(), files) <= {"quick", "better"}


def test_an_improvement_that_fails(staged, kit, files):
    """The quick plan goes on serving and stays kept, the log says why, and the next model is improved."""
    staged.spoil()
    with staged.connect() as device, device.prepare(kit.add_model(), cache=files.cache()) as prepared:
        use(prepared)
        staged.wait_until_held()
        staged.release()
        kit.until(lambda: "this improvement fails on purpose" in staged.log())
        check_runs(prepared)
        assert prepared.stage == 0
        prepared.close()  # and the thread that has failed lets go of the model, too: soon it has to be restored
        kit.until(lambda: staged.restored(device, kit.add_model(), files) == {"quick"})


def large_model():
    """x + 1, of a megabyte, so that keeping it takes a moment."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (1, 4))
    ballast = builder.operation("ADD", np.zeros(2**18, np.float32), np.float32([0]), 0)
    builder.output(builder.operation("ADD", x, np.ones(4, np.float32), 0), ballast)
    return builder.build()


def _one_kill(staged, kit, files, source):
    """Keeps a quick plan, kills the device while it may be writing the better one, and restores on the next."""
    staged.hold()
    device = kit.living(staged.name)
    prepared = device.prepare(large_model(), cache=files.cache())
    assert prepared.home.declined == ""
    use(prepared)
    staged.wait_until_held()
    staged.release()
    last(source.random() * 0.02)
    kill(device, "both")
    device.close()
    staged.told("restored")
    with kit.living(staged.name) as successor:
        with successor.prepare_from_cache(large_model(), files.cache()) as restored:
            assert restored.run(frame(3))[0].tolist() == [[4.0] * 4]
        (plan,) = staged.told("restored")
    return plan


@pytest.mark.integration
@pytest.mark.parametrize("kills", [8, pytest.param(stress.times(300), marks=pytest.mark.stress)])
def test_killed_while_it_keeps_the_better_plan(staged, kit, kills):
    """At random moments: the next device restores the quick plan or the better one, and always one of them."""
    source = random.Random(kills)
    with staged.connect() as device:
        counts = device.number_of_cache_files_needed()
    plans = []
    for _ in range(kills):
        with CacheFileSet(counts) as files:
            plans.append(_one_kill(staged, kit, files, source))
    assert set(plans) <= {"quick", "better"}
    assert kills < 100 or set(plans) == {"quick", "better"}


def test_onnxruntime(place, kit):
    """With `staged = true` in its options a model is made in two stages, of which the second one is kept."""
    folder = Path(os.environ["HOME"], ".config/burst")
    folder.mkdir(parents=True)
    (folder / "onnxruntime.toml").write_text("staged = true\n")
    x = np.random.default_rng(5).standard_normal((1, 8, 8, 3), np.float32)
    with driver.connect("onnxruntime") as device, CacheFileSet(device.number_of_cache_files_needed()) as files:
        with device.prepare(kit.conv_model(), cache=files.cache()) as prepared, prepared.burst(depth=DEPTH) as burst:
            expected = prepared.run(x)[0]
            found = []
            while not prepared.stage:
                found.append(burst.submit(x).result(kit.patience).outputs[0].copy())
            found += [burst.run(x).outputs[0].copy() for _ in range(5)]
            for result in found:
                np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
        with device.prepare_from_cache(kit.conv_model(), files.cache()) as restored:
            np.testing.assert_allclose(restored.run(x)[0], expected, rtol=1e-4, atol=1e-5)
