"""Bursts with recover=True: their device dies in every way, and they go on; and those that must not."""

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from inside import controller_of, model_number_of
from kills import SIDES, kill

import driver
from burst import BuffersLost, DeviceBuffer, Memory, PeerDied, Quarantined, Request, RequestArgument
from driver.client import recovery
from driver.client.recovery import Crash, digest_of, quarantine
from fmq import Closed

NAN, ONCE, SUICIDE = np.nan, np.inf, -np.inf  # what the fragile device does over an input that begins so


def frame(first):
    """An input that says by its first element what the device does, and how long it takes (-n: n milliseconds)."""
    return np.array([[first, 1, 2, 3]], np.float32)


def is_right(result, first):
    return np.array_equal(result.outputs[0], frame(first) + 1)


@pytest.fixture(autouse=True)
def _clean():
    """Every test begins without a quarantine."""
    quarantine.clear()


@pytest.fixture
def fragile(home, kit):
    """A connection to a fragile device that nobody else uses."""
    with kit.living(kit.odd("Fragile")) as device:
        yield device


@pytest.fixture
def prepared(fragile, kit):
    """x + 1, on the fragile device."""
    with fragile.prepare(kit.add_model()) as prepared:
        yield prepared


@pytest.fixture
def burst(prepared):
    """One that recovers."""
    with prepared.burst(recover=True) as burst:
        assert is_right(burst.run(frame(0)), 0)
        yield burst


def device_counts(burst):
    """What the device has noted about the burst."""
    return controller_of(burst).trace.page.device


class Background:
    """A call in another thread; `result` waits for it."""

    def __init__(self, function, patience):
        self._found, self._patience = [], patience

        def call():
            try:
                found = function()
            except BaseException as error:  # noqa: BLE001 (raised again by `result`)
                found = error
            self._found.append(found)

        self._thread = threading.Thread(target=call, daemon=True)
        self._thread.start()

    def result(self):
        self._thread.join(self._patience)
        (found,) = self._found
        if isinstance(found, BaseException):
            raise found
        return found


@pytest.mark.parametrize("side", SIDES)
class TestOneSlowFrame:
    """The caller sees one slow result, the right one, and no exception."""

    def test_while_a_request_runs(self, kit, fragile, burst, side):
        """The device dies in the middle of an execution."""
        before = fragile.engine_pid
        call = Background(lambda: burst.run(frame(-300)), kit.patience)
        kit.until(lambda: device_counts(burst).running == 2)
        kill(fragile, side)
        assert is_right(call.result(), -300)
        assert fragile.engine_pid != before
        assert burst.stats()["recoveries"] == 1
        assert all(is_right(burst.run(frame(n)), n) for n in range(5))

    @pytest.mark.parametrize("waits", [False, True], ids=["at_once", "later"])
    def test_between_requests(self, fragile, burst, process, side, waits):
        """The device dies while nothing is asked of it."""
        victims = [process(fragile.engine_pid), process(fragile.service_pid)]
        kill(fragile, side)
        if waits:
            assert all(victim.has_ended() for victim in victims)
        assert is_right(burst.run(frame(7)), 7)
        assert is_right(burst.run(frame(8)), 8)
        assert burst.stats()["recoveries"] <= 1

    def test_four_in_flight(self, kit, fragile, prepared, side):
        """All four results come, in order, each once, and so does one that was submitted afterwards."""
        told = []
        with prepared.burst(recover=True, depth=4) as burst:
            assert is_right(burst.run(frame(0)), 0)
            futures = [burst.submit(frame(-50 - n)) for n in range(4)]
            for n, future in enumerate(futures):
                future.add_done_callback(lambda _, n=n: told.append(n))
            kit.until(lambda: device_counts(burst).running >= 3)
            kill(fragile, side)
            futures.append(burst.submit(frame(-54)))
            for n, future in enumerate(futures):
                assert is_right(future.result(kit.patience), -50 - n)
            assert told == [0, 1, 2, 3]
            assert burst.stats()["recoveries"] == 1


def test_what_has_arrived_is_not_sent_again(kit, fragile, prepared):
    """Results that were in the queue when the device died are delivered from there; only the rest is executed again."""
    with prepared.burst(recover=True, depth=4) as burst:
        burst.run(frame(0))
        futures = [burst.submit(frame(n)) for n in (1, 2, 3, -300)]
        kit.until(lambda: device_counts(burst).answered == 4)
        kill(fragile)
        assert [is_right(f.result(kit.patience), n) for f, n in zip(futures, (1, 2, 3, -300), strict=True)] == [
            True
        ] * 4
        assert controller_of(burst).trace.page.client.requests == 1


def test_an_explicit_request(kit, fragile, burst):
    """`execute` on pools of the caller's own recovers, too."""
    request, _ = kit.request([frame(-300)], 16)
    call = Background(lambda: burst.execute(request), kit.patience)
    kit.until(lambda: device_counts(burst).running == 2)
    kill(fragile)
    assert is_right(call.result(), -300)
    kill(fragile)
    assert is_right(burst.execute(request), -300)
    assert burst.stats()["recoveries"] == 2


def test_too_long_for_the_channel(kit, home):
    """A request that a burst sends on the plain path is sent again there."""
    builder = driver.ModelBuilder()
    inputs = [builder.input("float32", (1,)) for _ in range(1100)]
    builder.output(builder.operation("CONCATENATION", *inputs, 0))
    arrays = [np.full(1, n, np.float32) for n in range(1100)]
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(driver.connect())
        prepared = stack.enter_context(device.prepare(builder.build()))
        burst = stack.enter_context(prepared.burst(recover=True, depth=2))
        for use in (burst.run, lambda *arrays: burst.submit(*arrays).result(kit.patience)):
            assert use(*arrays).outputs[0].tolist() == np.concatenate(arrays).tolist()
            kill(device)
            assert use(*arrays).outputs[0].tolist() == np.concatenate(arrays).tolist()
        assert burst.stats()["runs"]["plain"] >= 4


def test_newest_frame_wins_across_a_death(kit, fragile, prepared):
    """With policy "latest" the frame that was kept back is sent on the device's next life."""
    with prepared.burst(recover=True, policy="latest") as burst:
        burst.run(frame(0))
        first = burst.submit(frame(-300))
        dropped, newest = burst.submit(frame(1)), burst.submit(frame(2))
        kill(fragile)
        assert is_right(first.result(kit.patience), -300)
        assert is_right(newest.result(kit.patience), 2)
        assert dropped.cancelled()


def test_killed_while_it_is_started_again(kit, fragile, burst, home):
    """The processes of the next life are killed as soon as they are seen, twice: the third is used."""
    old = set(home.pids())
    call = Background(lambda: burst.run(frame(-300)), kit.patience)
    kit.until(lambda: device_counts(burst).running == 2)
    kill(fragile)
    for _ in range(2):
        victims = kit.until(lambda known=old: set(home.pids()) - known)
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        old = old | victims
    assert is_right(call.result(), -300)


def test_killed_while_the_model_is_prepared_again(kit, fragile, home):
    """The next life dies over somebody's kill in the middle of the preparation: the one after that is used."""
    with fragile.prepare(kit.add_model(relaxed=True)) as prepared, prepared.burst(recover=True) as burst:
        burst.run(frame(0))
        (home.path / "hold").touch()
        kill(fragile)
        call = Background(lambda: burst.run(frame(1)), kit.patience)
        kit.until((home.path / "held").exists)
        (home.path / "hold").unlink()
        kill(fragile)
        assert is_right(call.result(), 1)


def test_bursts_of_one_process_recover_together(kit, fragile, prepared):
    """Four bursts in four threads make one new connection, and the model is prepared once for all of them."""
    with contextlib.ExitStack() as stack:
        bursts = [stack.enter_context(prepared.burst(recover=True)) for _ in range(4)]
        for burst in bursts:
            burst.run(frame(0))
        calls = [Background(lambda burst=burst: burst.run(frame(-200)), kit.patience) for burst in bursts]
        for burst in bursts:
            kit.until(lambda burst=burst: device_counts(burst).running == 2)
        kill(fragile)
        assert all(is_right(call.result(), -200) for call in calls)
        assert fragile._attempts == 1
        with fragile.prepare(kit.add_model()) as another:
            assert (model_number_of(prepared), model_number_of(another)) == (1, 2)


def test_everything_else_of_the_connection_works_again(kit, fragile, prepared, burst):
    """After a revival the plain path of every model works, also of one that has no burst; and supported_operations."""
    with fragile.prepare(kit.mul_model()) as other:
        x = np.full(4, 3, np.float32)
        other.run(x), prepared.run(frame(1))
        kill(fragile)
        with pytest.raises(PeerDied):
            kit.until(lambda: other.run(x) and False)  # nobody has recovered yet, and this has not asked for it
        assert is_right(burst.run(frame(2)), 2)
        assert other.run(x)[0].tolist() == [9, 9, 9, 9]
        assert prepared.run(frame(1))[0].tolist() == (frame(1) + 1).tolist()
        assert fragile.supported_operations(kit.mul_model()) == [True]
        with other.burst() as fresh:
            assert fresh.run(x).outputs[0].tolist() == [9, 9, 9, 9]


def test_without_recover(kit, fragile, prepared):
    """A burst that was not asked to recover gets PeerDied, as before, and nothing is started."""
    with prepared.burst() as burst:
        burst.run(frame(0))
        kill(fragile)
        for _ in range(3):
            with pytest.raises(PeerDied):
                burst.run(frame(1))
        assert fragile._attempts == 0


def test_a_forked_child_is_refused(fragile, burst):
    """A child may not recover its parent's burst: it gets a clear error."""
    kill(fragile)
    if not (pid := os.fork()):
        try:
            fragile.revive(fragile.connection)
        except driver.DriverError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_closed_is_closed(fragile, burst):
    """A burst whose device was closed is not brought back."""
    kill(fragile)
    fragile.close()
    with pytest.raises(PeerDied, match="closed"):
        burst.run(frame(1))


class TestAsyncio:
    """Coroutines see one slow result, too."""

    def test_run_async(self, kit, fragile, prepared):
        """Three awaits at depth 4, and the device dies under them."""

        async def use(burst):
            tasks = [asyncio.ensure_future(burst.run_async(frame(-50 - n))) for n in range(3)]
            while device_counts(burst).running < 2:
                await asyncio.sleep(0)
            kill(fragile)
            return await asyncio.wait_for(asyncio.gather(*tasks), kit.patience)

        with prepared.burst(recover=True, depth=4) as burst:
            burst.run(frame(0))
            results = asyncio.run(use(burst))
        assert all(is_right(result, -50 - n) for n, result in enumerate(results))

    def test_stream(self, kit, fragile, prepared):
        """A stream of 60 frames over three deaths: every result comes, in order."""

        async def use(burst):
            seen = 0
            async for result in burst.stream(frame(n) for n in range(60)):
                assert is_right(result, seen)
                if seen in {10, 11, 40}:
                    kill(fragile)
                seen += 1
            return seen

        with prepared.burst(recover=True, depth=4) as burst:
            assert asyncio.run(asyncio.wait_for(use(burst), kit.patience)) == 60
            assert 1 <= burst.stats()["recoveries"] <= 3

    def test_the_loop_goes_on(self, kit, fragile, home):
        """While the device is started and the model prepared again, the event loop serves others: one of them has to
        remove the file that the preparation waits for.
        """

        async def use(burst):
            mine = asyncio.ensure_future(burst.run_async(frame(-300)))
            while device_counts(burst).running != 2:
                await asyncio.sleep(0)
            (home.path / "hold").touch()
            kill(fragile)
            while not (home.path / "held").exists():
                await asyncio.sleep(1e-3)
            assert not mine.done()
            (home.path / "hold").unlink()
            return await asyncio.wait_for(mine, kit.patience)

        with fragile.prepare(kit.add_model(relaxed=True)) as prepared, prepared.burst(recover=True) as burst:
            burst.run(frame(0))
            assert is_right(asyncio.run(use(burst)), -300)

    def test_another_thread_recovers(self, kit, fragile, prepared):
        """A thread that waits for an earlier request recovers; the loop goes on by itself with what it waits for."""

        async def use(burst):
            theirs = burst.submit(frame(-300))
            mine = asyncio.ensure_future(burst.run_async(frame(-200)))
            await asyncio.sleep(0)
            kit.until(lambda: device_counts(burst).running == 2)
            waiter = Background(lambda: theirs.result(kit.patience), kit.patience)
            kill(fragile)
            result = waiter.result()  # the loop stands still meanwhile
            return await asyncio.wait_for(mine, kit.patience), result

        with prepared.burst(recover=True, depth=4) as burst:
            burst.run(frame(0))
            mine, theirs = asyncio.run(use(burst))
        assert is_right(mine, -200)
        assert is_right(theirs, -300)


class TestCannotBeStarted:
    """When there is no next life, everybody who waits is told why, and it is tried again when somebody asks again."""

    def test_everybody_is_told(self, kit, fragile, prepared, home):
        """Four in flight get DeviceFailed; once the reason is gone, the burst works."""
        with prepared.burst(recover=True, depth=4) as burst:
            burst.run(frame(0))
            futures = [burst.submit(frame(-100)) for _ in range(4)]
            os.chmod(home.path, 0o755)  # a directory that others could reach into
            kill(fragile)
            for future in futures:
                with pytest.raises(driver.DeviceFailed, match="0700"):
                    future.result(kit.patience)
            with pytest.raises(driver.DeviceFailed):
                burst.run(frame(1))
            os.chmod(home.path, 0o700)
            assert is_right(burst.run(frame(1)), 1)
            assert is_right(burst.submit(frame(2)).result(kit.patience), 2)

    def test_a_request_that_kills_again_and_again(self, burst, monkeypatch):
        """Deaths by SIGKILL are never blamed on the model, and are bounded: PeerDied that says how often."""
        monkeypatch.setattr(recovery, "_MOST_IN_A_ROW", 3)
        with pytest.raises(PeerDied, match="3 times over the same requests") as caught:
            burst.run(frame(SUICIDE))
        assert not isinstance(caught.value, Quarantined)
        assert is_right(burst.run(frame(1)), 1)

    def test_ten_times_in_ten_seconds(self, fragile, burst, monkeypatch):
        """A device that dies eleven times within ten seconds is left alone for a while."""
        now = [100.0]
        monkeypatch.setattr(recovery.time, "monotonic", lambda: now[0])
        revivals = recovery.Revivals()
        for _ in range(10):
            now[0] += 0.9
            revivals.count("it")
        with pytest.raises(PeerDied, match="'it' died 10 times within"):
            revivals.count("it")
        now[0] += 2
        revivals.count("it")


def test_device_buffers_are_lost(fragile, prepared):
    """A burst that was bound to buffers of the device ends with BuffersLost, which names them; others recover."""
    with prepared.burst(recover=True) as burst, prepared.burst(recover=True) as other:
        assert is_right(burst.run(frame(1)), 1)
        assert is_right(other.run(frame(1)), 1)
        argument = RequestArgument(pool=0, length=16), RequestArgument(pool=1, length=16)
        pools = DeviceBuffer(4711), DeviceBuffer(42)
        assert burst.execute(Request(argument[:1], argument[1:], (*pools, Memory.create(16)))).status != 0
        kill(fragile)
        for use in (burst.run, lambda x: burst.submit(x).result()):
            with pytest.raises(BuffersLost, match="42, 4711"):
                use(frame(1))
        assert is_right(other.run(frame(2)), 2)


class TestQuarantine:
    """A model that crashes its device is given a second chance, and no more."""

    @pytest.fixture
    def crashes(self, home):
        """A function: so many times the device crashes over what may."""

        def crashes(n):
            for i in range(n):
                (home.path / f"crash-{i}").touch()

        return crashes

    def test_the_first_crash_is_got_over(self, fragile, burst, crashes):
        """A request that crashes the device once succeeds when it is sent again."""
        crashes(1)
        assert np.isposinf(burst.run(frame(ONCE)).outputs[0][0, 0])
        assert is_right(burst.run(frame(1)), 1)

    def test_the_same_request_twice(self, kit, fragile, prepared, burst, home):
        """Quarantined says the signal, the model and the request; then nothing of this model is run, at once."""
        digest = digest_of(prepared.model)
        with fragile.prepare(kit.mul_model()) as other, other.burst(recover=True) as bystander:
            with pytest.raises(Quarantined) as caught:
                burst.run(frame(NAN))
            words = str(caught.value)
            for word in ("SIGSEGV", digest[:12], "ADD", "Fragile", "request 1", "inputs [1, 4]", "outputs [1, 4]"):
                assert word in words
            assert quarantine._crashes == {(kit.odd("Fragile"), digest): 2}
            with driver.connect(kit.odd("Fragile")) as again:
                for use in (
                    lambda: burst.run(frame(1)),
                    lambda: burst.submit(frame(1)).result(kit.patience),
                    prepared.burst,
                    lambda: fragile.prepare(kit.add_model()),
                    lambda: again.prepare(kit.add_model()),
                ):
                    with pytest.raises(Quarantined, match=digest[:12]):
                        use()
            assert bystander.run(np.full(4, 3, np.float32)).outputs[0].tolist() == [9, 9, 9, 9]
            with fragile.prepare(kit.add_model(2.0)) as similar:
                assert similar.run(frame(1))[0].tolist() == (frame(1) + 2).tolist()

    def test_everything_in_flight(self, kit, prepared):
        """What was answered before the crash is delivered; what came after it gets the error, too."""
        with prepared.burst(recover=True, depth=4) as burst:
            futures = [burst.submit(frame(first)) for first in (1, 2, NAN, 3)]
            assert is_right(futures[0].result(kit.patience), 1)
            assert is_right(futures[1].result(kit.patience), 2)
            for future in futures[2:]:
                with pytest.raises(Quarantined):
                    future.result(kit.patience)

    def test_three_different_requests(self, fragile, burst, crashes):
        """The third crash of a model is one too many, whatever the requests."""
        for _ in range(2):
            crashes(1)
            burst.run(frame(ONCE))
        crashes(1)
        with pytest.raises(Quarantined, match="3 times"):
            burst.run(frame(ONCE))

    def test_other_bursts_of_the_model_end(self, kit, prepared, burst):
        """Another burst of the same model that runs in this process gets the error as well, in its next run."""
        with prepared.burst(recover=True) as other:
            other.run(frame(1))
            with pytest.raises(Quarantined):
                burst.run(frame(NAN))
            for use in (other.run, lambda x: other.submit(x).result(kit.patience)):
                with pytest.raises(Quarantined):
                    use(frame(1))

    def test_a_live_burst_is_ended(self, kit, prepared, burst):
        """One that waits for its result on a device that lives is told at once."""
        waiting = Background(lambda: burst.run(frame(-60_000)), kit.patience)
        kit.until(lambda: device_counts(burst).running == 2)
        crash = Crash(signal.SIGBUS, "request 9", None)
        with pytest.raises(Quarantined, match="SIGBUS"):
            quarantine.note(prepared.remote.key, prepared.model, crash, again=True)
        with pytest.raises(Quarantined, match="SIGBUS"):
            waiting.result()
        assert device_counts(burst).running == 2
        with pytest.raises(Quarantined):
            burst.run(frame(1))

    def test_its_preparation(self, kit, fragile, crashes):
        """Crashes over preparing the model again count: one is got over, a second one is one too many."""
        with fragile.prepare(kit.add_model(relaxed=True)) as prepared, prepared.burst(recover=True) as burst:
            burst.run(frame(0))
            crashes(1)
            kill(fragile)
            assert is_right(burst.run(frame(1)), 1)
            crashes(1)
            kill(fragile)
            with pytest.raises(Quarantined, match=r"SIGSEGV during its preparation"):
                burst.run(frame(2))

    @pytest.mark.integration
    def test_kills_do_not_count(self, kit, fragile, burst):
        """A model whose device is killed from outside, five times while it runs, is not to blame."""
        for n in range(5):
            call = Background(lambda: burst.run(frame(-200)), kit.patience)
            kit.until(lambda: device_counts(burst).running)
            kill(fragile)
            assert is_right(call.result(), -200), n
        assert quarantine._crashes == {}

    def test_python_exceptions_do_not_count(self, kit, fragile):
        """An execution that raises is an answer, not a death."""
        with fragile.prepare(kit.reshape_model()) as prepared, prepared.burst(recover=True) as burst:
            for _ in range(4):
                with pytest.raises(driver.StatusError):
                    burst.run(np.ones((2, 3000), np.float32), np.array([7, 7], np.int32))
            assert burst.stats()["recoveries"] == 0
        assert quarantine._crashes == {}


NEIGHBOUR = """
import select, sys, numpy as np, driver
sys.path.insert(0, sys.argv[1])
from small_models import add_model
x = np.zeros((1, 4), np.float32)
with driver.connect("burst_test_devices.odd:Fragile") as device, device.prepare(add_model()) as prepared:
    with prepared.burst(recover=True, depth=2) as burst:
        n, more = 0, 10
        while more:
            x[0, 1] = n = n + 1
            assert burst.run(x).outputs[0].tolist() == [[1, n + 1, 1, 1]]
            if n == 10:
                print("ready", flush=True)
            more -= bool(select.select([sys.stdin], [], [], 0)[0])
        assert 1 <= burst.stats()["recoveries"] <= 2
"""


@pytest.mark.integration
def test_neighbours_recover_at_once(kit, burst):
    """Two processes go on without an exception while a third one's request crashes the device twice, and its model is
    quarantined there; to them that model, which they run as well, is as good as ever.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    neighbours = [kit.python(NEIGHBOUR, Path(__file__).parents[1], **pipes) for _ in range(2)]
    try:
        for neighbour in neighbours:
            assert neighbour.stdout.readline() == b"ready\n"
        with pytest.raises(Quarantined):
            burst.run(frame(NAN))
        for neighbour in neighbours:
            neighbour.stdin.close()
        assert [neighbour.wait(kit.patience) for neighbour in neighbours] == [0, 0]
    finally:
        for neighbour in neighbours:
            with neighbour:
                neighbour.kill()


def test_closed_while_it_recovers(kit, fragile, prepared):
    """Whoever waits is told, and a burst that another thread closes meanwhile is closed, on the next life, too."""
    burst = prepared.burst(recover=True, depth=2)
    burst.run(frame(0))
    call = Background(lambda: burst.submit(frame(-300)).result(kit.patience), kit.patience)
    kit.until(lambda: device_counts(burst).running == 2)
    kill(fragile)
    kit.until(fragile._reviving.locked)
    burst.close()
    with pytest.raises((PeerDied, ValueError, driver.GeneralFailure)):
        call.result()
    with pytest.raises(ValueError, match="closed"):
        burst.run(frame(1))
    with pytest.raises(Closed):
        controller_of(burst).arrival_fd()
