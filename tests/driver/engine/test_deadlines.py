"""Deadlines: waits end on time, devices do not do what nobody waits for, errors say where it was and how late."""

import asyncio
import contextlib
import itertools
import math
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from frames import HELD, held
from inside import controller_of, session_of
from sent_models import call_with_model
from waiting import PATIENCE, at_least, nested

import driver
from burst import ErrorStatus, MissedDeadlinePersistent, MissedDeadlineTransient, Timeout
from burst._core import ffi, lib
from driver import deadlines
from driver.engine.preparations import PreparationEstimates, PreparationTime
from driver.vts.qos import plain_path
from fmq import clock

TRANSIENT, PERSISTENT = ErrorStatus.MISSED_DEADLINE_TRANSIENT, ErrorStatus.MISSED_DEADLINE_PERSISTENT
WAITING = "waiting for the answer"
PREFERENCE = "fast_single_answer"
SOON, LONG = 0.1, 5.0  # seconds: a deadline, and how long the device would take
EARLY = 5e-3  # what clocks and sleeps may differ by


def x(seconds=0.0, mark=0.0):
    return np.array([[seconds, mark, 0, 0]], np.float32)


def after(seconds):
    return time.monotonic() + seconds


def turns(device):
    return device.stats()["priorities"]["medium"]


def outcome(function):
    """What it raised or returned."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001 (what it is, the test looks at)
        return error


def seconds_of(function):
    """For a deadline that comes amid it."""
    begin = time.monotonic()
    function()
    return time.monotonic() - begin


@contextlib.contextmanager
def plain_answers(prepared, request):
    """A function of a deadline: the device's own answer on the plain path, however late, to a request that is bound."""
    with plain_path(prepared, request) as execute:
        assert execute(None, 20).status is ErrorStatus.NONE
        yield lambda deadline: execute(deadlines.nanoseconds(deadline), 20)


def asked_of_burst(burst, request, deadline):
    """The same through a burst."""
    controller = controller_of(burst)
    by = deadlines.nanoseconds(deadline)
    controller.start(controller.packet(request), by)
    reply = controller.receive(20)
    return reply.status, session_of(burst).failure_of(reply, by)[1]


def prepared_by(device, model, deadline):
    """The device's own answer to a preparation, however late."""
    return call_with_model(device.connection, "prepare", model, None, None, PREFERENCE, deadlines.nanoseconds(deadline))


@pytest.fixture
def stuck(slow, kit):
    """A request that takes LONG, until the test is over."""
    request, (array,) = kit.request([x(LONG)], 16)
    yield request
    array[...] = 0


@pytest.fixture
def noting(connect, kit, shared):
    """x + 1 on a device that notes the second element of what it runs; and those notes."""
    file = shared.path / "ran"
    file.unlink(missing_ok=True)
    with connect("Noting").prepare(kit.add_model()) as prepared:
        yield prepared, lambda: [float(line) for line in file.read_text().split()] if file.exists() else []


def at_rest(process):
    """All its threads sleep: so does a listener that has seen that nothing waits for it."""

    def is_asleep():
        stats = [path.read_text() for path in Path(f"/proc/{process}/task").glob("*/stat")]
        return all(stat.rpartition(")")[2].split()[0] == "S" for stat in stats)

    return is_asleep


class TestTheWait:
    """It ends at the deadline whatever the device does."""

    def test_run_on_the_plain_path(self, slow):
        """Timeout, on time, saying where and by how much; the next one gets its own result."""
        with at_least(SOON - EARLY):
            error = outcome(lambda: slow.run(x(0.5), timeout=SOON))
        assert isinstance(error, Timeout)
        assert error.phase == WAITING
        assert f"within {SOON} s" in str(error)
        nested(0, error.late_by)
        assert slow.run(x(0, 7), timeout=PATIENCE)[0].tolist() == [[1, 8, 1, 1]]

    def test_execute_on_the_plain_path(self, slow, stuck):
        """With a deadline it is a result, of an error; with a timeout as well, whichever comes first."""
        with at_least(SOON - EARLY):
            result = slow.execute(stuck, deadline=after(SOON), timeout=PATIENCE)
        assert result.status is TRANSIENT
        assert result.cause.phase == WAITING
        nested(0, result.cause.late_by)
        error = outcome(lambda: slow.execute(stuck, deadline=after(PATIENCE), timeout=SOON))
        assert isinstance(error, Timeout)

    def test_a_burst_of_many(self, slow):
        """A future is done at its deadline, behind one that takes longer; later results go to whom they belong."""
        with slow.burst(depth=4) as burst:
            first, release = held(burst, 1)
            with at_least(SOON - EARLY):
                error = outcome(burst.submit(x(0, 3), deadline=after(SOON)).result)
            assert isinstance(error, MissedDeadlineTransient)
            assert error.phase == WAITING
            error = outcome(lambda: burst.run(x(0, 5), timeout=SOON))
            assert isinstance(error, Timeout)
            assert not first.done()
            release()
            assert burst.run(x(0, 7), timeout=PATIENCE).outputs[0].tolist() == [[1, 8, 1, 1]]
            assert first.result().outputs[0][0, 1] == 2

    def test_a_burst(self, slow):
        """Timeout, on time, and the next result belongs to the next request."""
        with slow.burst() as burst:
            (array,) = burst.inputs
            array[...] = x(LONG)
            with at_least(SOON - EARLY):
                error = outcome(lambda: burst.run(timeout=SOON))
            assert isinstance(error, Timeout)
            assert error.phase == WAITING
            assert f"within {SOON} s; it is dropped when it comes" in str(error)
            array[...] = 0
            assert burst.run(x(0, 7), timeout=PATIENCE).outputs[0].tolist() == [[1, 8, 1, 1]]
            assert burst.stats()["timeouts"] == 1

    def test_a_burst_with_an_explicit_request(self, slow, stuck, kit):
        """A deadline gives a result, a timeout raises."""
        quick, (_, *_) = kit.request([x(0, 5)], 16)
        with slow.burst() as burst:
            with at_least(SOON - EARLY):
                result = burst.execute(stuck, deadline=after(SOON))
            assert (result.status, result.cause.phase) == (TRANSIENT, WAITING)
            stuck.pools[0].asarray(np.float32, 4)[...] = 0
            assert burst.execute(quick, timeout=PATIENCE).outputs[0].tolist() == [[1, 6, 1, 1]]

    def test_a_preparation(self, connect, kit):
        """The wait ends although the device does not look at the clock; it can be used afterwards."""
        device = connect("Thorough")
        with at_least(SOON - EARLY):
            error = outcome(lambda: device.prepare(kit.add_model(2.0), deadline=after(SOON)))
        assert isinstance(error, MissedDeadlineTransient | MissedDeadlinePersistent)
        with device.prepare(kit.add_model(3.0), deadline=after(PATIENCE)) as prepared:
            assert prepared.run(x())[0].tolist() == [[3, 3, 3, 3]]


SHORT = 0.0, -1.0, 5e-3  # seconds from now
UNLIMITED = math.inf, 1e30, 3600.0


class TestTheHal:
    """NOW, passed and SHORT give NONE or a missed deadline, UNLIMITED NONE; a model comes exactly with NONE."""

    def test_a_preparation(self, device, kit):
        """It raises, or there is a model."""
        for seconds in SHORT:
            found = outcome(lambda s=seconds: device.prepare(kit.long_model(40), deadline=after(s)))
            assert isinstance(found, driver.RemotePreparedModel | MissedDeadlineTransient | MissedDeadlinePersistent)
        with pytest.raises(MissedDeadlinePersistent, match=r"before start.*late by 1e\+03 ms.*more time"):
            device.prepare(kit.add_model(), deadline=after(-1))
        for seconds in UNLIMITED:
            with device.prepare(kit.add_model(), deadline=after(seconds)) as prepared:
                assert prepared.run(x())[0].tolist() == [[1, 1, 1, 1]]

    def test_what_is_no_deadline(self, fast, kit):
        """NaN is refused by us, and what is no time by the device."""
        request, _ = kit.request([x()], 16)
        with pytest.raises(ValueError, match="deadline=nan"):
            fast.execute(request, deadline=math.nan)
        for wrong in (-1, 2.5, "soon", True):
            with pytest.raises(driver.InvalidArgument, match="deadline"):
                call_with_model(fast.device.connection, "prepare", kit.add_model(), None, None, PREFERENCE, wrong)


BAD = -1.0, -math.inf, math.nan, "soon"


def ways(prepared, burst, request):
    """Every way to execute, as a function of its limits."""

    def awaited(**limits):
        return asyncio.run(burst.run_async(x(), **limits))

    def fenced(**limits):
        return prepared.execute_fenced(request, **limits).result()

    return {
        "run": lambda **limits: prepared.run(x(), **limits),
        "execute": lambda **limits: prepared.execute(request, **limits),
        "execute_async": lambda **limits: prepared.execute_async(request, **limits).result(),
        "execute_fenced": fenced,
        "burst.run": lambda **limits: burst.run(x(), **limits),
        "burst.submit": lambda **limits: burst.submit(x(), **limits).result(),
        "burst.execute": lambda **limits: burst.execute(request, **limits),
        "burst.run_async": awaited,
        "future.result": lambda **limits: burst.submit(x()).result(**limits),
    }


TAKES = {  # beside what tests/driver/request_rows.py has in its rows of times
    "timeout": ("burst.submit", "future.result"),
    "deadline": ("future.result",),
    "duration": ("execute_fenced",),
}
CASES = [(name, way) for name, takers in TAKES.items() for way in takers]


class TestWhatIsNoTime:
    """The same rule and the same words on every path: one function checks them all."""

    @pytest.mark.parametrize(("name", "way"), CASES)
    def test_it_is_refused(self, fast, kit, name, way):
        """Negative, NaN, no number: ValueError with the argument, the value and the remedy."""
        request, _ = kit.request([x()], 16)
        kind = "a time.monotonic()" if name == "deadline" else "seconds"
        with fast.burst(depth=2) as burst:
            for bad in BAD:
                with pytest.raises(ValueError, match=name) as caught:
                    ways(fast, burst, request)[way](**{name: bad})
                assert str(caught.value) == (
                    f"{name}={bad!r}: {kind}, 0 or more; leave it out, or give None, for no limit"
                )

    @pytest.mark.parametrize(("name", "way"), CASES)
    def test_infinity_is_no_limit(self, fast, kit, name, way):
        """Nor is what no clock reaches, nor what is longer than a system call takes."""
        request, _ = kit.request([x()], 16)
        with fast.burst(depth=2) as burst:
            for far in (math.inf, 1e300, 1e10, 1e8):
                ways(fast, burst, request)[way](**{name: far})

    def test_in_this_process(self, kit):
        """The same of a model that runs here."""
        request, _ = kit.request([x()], 16)
        with driver.compile(kit.add_model(), ["cpu"]) as compiled, compiled.burst(depth=2) as burst:
            executes = ways(compiled, burst, request)
            for name, way in CASES:
                with pytest.raises(ValueError, match=f"^{name}=nan: "):
                    executes[way](**{name: math.nan})
            for way in ("run", "execute", "burst.run", "burst.run_async", "burst.execute"):
                with pytest.raises(Timeout) as caught:
                    executes[way](timeout=0)
                nested(0, caught.value.late_by)

    def test_submitting_and_asking_do_not_wait(self, slow):
        """timeout=0 of `submit` asks for room, of `result` for a result that is there."""
        with slow.burst() as burst:
            future = burst.submit(x(0.1), timeout=0)
            with pytest.raises(Timeout):
                burst.submit(x(), timeout=0)
            with pytest.raises(Timeout):
                future.result(timeout=0)
            assert future.result(timeout=PATIENCE).outputs[0].tolist() == [[pytest.approx(1.1), 1, 1, 1]]

    def test_a_deadline_for_the_result(self, noting):
        """It ends the request: the device does not begin it, and to ask again does not help."""
        prepared, ran = noting
        with prepared.burst(depth=3) as burst:
            first, second, third = burst.submit(x(0.2, 1)), burst.submit(x(0, 2)), burst.submit(x(0, 3))
            for _ in range(2):
                with pytest.raises(MissedDeadlineTransient):
                    second.result(deadline=after(SOON))
            assert third.result(deadline=after(PATIENCE)).outputs[0][0, 1] == 4
            first.result()
        assert ran() == [1, 3]


class TestOnTheDevice:
    """What it does about it, whether or not somebody still waits."""

    def test_an_abandoned_request_is_not_executed(self, noting):
        """Behind one that takes long, a request in a burst whose deadline passes meanwhile is skipped."""
        prepared, ran = noting
        with prepared.burst(depth=4) as burst:
            first = burst.submit(x(0.3, 1))
            late = [burst.submit(x(0, mark), deadline=after(SOON)) for mark in (2, 3)]
            last = burst.submit(x(0, 4), deadline=after(PATIENCE))
            for future in late:
                with pytest.raises(MissedDeadlineTransient):
                    future.result()
            assert last.result().outputs[0].tolist() == [[1, 5, 1, 1]]
            assert first.result().outputs[0].tolist()[0][1] == 2
        assert ran() == [1, 4]

    def test_a_cancelled_request_is_not_executed(self, noting):
        """Neither of a future nor of a task, if the device has not begun it; those around it are, and later ones."""
        prepared, ran = noting

        async def cancelled_in_flight():
            first, release = held(burst, 4)
            task = asyncio.ensure_future(burst.run_async(x(0, 5)))
            while burst.stats()["in_flight"] < 2:
                await asyncio.sleep(0)
            task.cancel()
            last = burst.submit(x(0, 6))
            with pytest.raises(asyncio.CancelledError):
                await task
            release()
            await first
            await last

        with prepared.burst(depth=3) as burst:
            first, release = held(burst, 1)
            cancelled, last = burst.submit(x(0, 2)), burst.submit(x(0, 3))
            assert cancelled.cancel()
            release()
            assert last.result().outputs[0].tolist() == [[1, 4, 1, 1]]
            assert first.result().outputs[0][0, 1] == 2
            asyncio.run(cancelled_in_flight())
            for mark in range(7, 77):  # each bit of the word that tells the device is in use again
                burst.run(x(0, mark))
        assert ran() == [1, 3, 4, 6, *range(7, 77)]

    def test_a_cancelled_request_that_waits_for_a_slot_is_not_executed(self, connect, kit):
        """Its turn in the run queue goes to the next one."""
        device = connect("Single")
        with device.prepare(kit.add_model()) as prepared, prepared.burst() as busy, prepared.burst() as burst:
            for _ in range(3):
                burst.run(x())  # with this input and output, it is recognised
            before = turns(device)["executions"]
            long = busy.submit(x(0.3))
            kit.until(lambda: turns(device)["executions"] > before)  # it has the slot, not only been taken up
            waiting = burst.submit(x(HELD))
            kit.until(lambda: turns(device)["waiting"])
            assert waiting.cancel()
            long.result()
            burst.run(x(), timeout=HELD - 1)

    def test_what_cannot_be_bound_in_time_is_bound_for_the_next_time(self, connect, kit):
        """The first one is late, transiently, as it would be done if it were bound; the second one is done."""
        request, _ = kit.request([x(0, 1)], 16)
        with connect("Pondering").prepare(kit.add_model()) as prepared, prepared.burst() as burst:
            status, cause = asked_of_burst(burst, request, after(0.1))
            assert (status, cause.phase) == (TRANSIENT, "executing")
            assert burst.execute(request, deadline=after(0.1)).status is ErrorStatus.NONE

    def test_queued_and_before_start_are_told_apart(self, slow, kit):
        """A deadline that passed while others were executed is transient; one that had passed before, persistent."""
        (long, (array,)), (short, _) = kit.request([x(LONG)], 16), kit.request([x()], 16)
        with slow.burst(depth=4) as burst:
            status, cause = asked_of_burst(burst, short, after(-5))
            assert (status, cause.phase) == (PERSISTENT, "before start")
            nested(5, cause.late_by)
            controller = controller_of(burst)
            controller.start(controller.packet(long))
            kit.until(lambda: controller.trace.page.device.running)
            by = clock.now() + int(SOON * 1e9)
            controller.start(controller.packet(short), by)
            kit.until(lambda: clock.now() > by)
            array[...] = 0
            assert controller.receive(20).status is ErrorStatus.NONE
            reply = controller.receive(20)
            _, cause = session_of(burst).failure_of(reply, by)
            assert (reply.status, cause.phase) == (TRANSIENT, "queued")
            nested(0, cause.late_by)

    def test_a_request_that_waits_for_others_in_its_burst(self, slow, kit):
        """Its caller's wait ends at its deadline, however long the one before it takes."""
        request, _ = kit.request([x()], 16)
        with slow.burst() as burst:
            long = burst.submit(x(LONG))
            result = burst.execute(request, deadline=after(SOON))
            assert result.status is TRANSIENT
            assert not long.done()

    def test_back_to_back_on_an_idle_device(self, connect, kit):
        """A request that is sent at once after a result has waited for no other: too little time is persistent."""
        with connect("Noting").prepare(kit.add_model()) as prepared, prepared.burst() as burst:
            burst.run(x())
            for _ in range(10):
                burst.run(x(0.1))
                error = burst.submit(x(0.1), deadline=after(0.05)).exception()
                assert isinstance(error, MissedDeadlinePersistent)
                assert (error.phase, error.retry_after) == ("before start", None)

    def test_behind_an_earlier_request(self, connect, kit):
        """Transient if it would have been done without that, with a hint; persistent if it could not have been."""
        request, _ = kit.request([x(0.2)], 16)
        with connect("Noting").prepare(kit.add_model()) as prepared, prepared.burst(depth=4) as burst:
            controller = controller_of(burst)
            packet = controller.packet(request)
            for _ in range(3):
                controller.start(packet)
                assert controller.receive(20).status is ErrorStatus.NONE
            controller.start(packet)
            kit.until(lambda: controller.trace.page.device.begun == controller.sent)
            found = []
            bys = [clock.now() + int(seconds * 1e9) for seconds in (0.1, 0.3)]
            for by in bys:
                controller.start(packet, by)
            assert controller.receive(20).status is ErrorStatus.NONE
            for by in bys:
                status = controller.receive(20)
                found.append((status.status, session_of(burst).failure_of(status, by)[1]))
            (first, never), (second, later) = found
        assert (first, never.phase, never.retry_after) == (PERSISTENT, "before start", None)
        assert (second, later.phase) == (TRANSIENT, "queued")
        assert later.retry_after >= 0.2

    @pytest.mark.integration
    @pytest.mark.parametrize("way", ["plain", "burst"])
    def test_what_has_never_been_done_in_that_time_is_not_begun(self, noting, way, kit, connect):
        """By what executions took: refused at once, persistent; after several refusals in a row one is tried. Nobody
        else takes the time, so that it comes too late is persistent, too.
        """
        prepared, ran = noting
        request, _ = kit.request([x(0.3, 1)], 16)
        is_at_rest = at_rest(connect("Noting").engine_pid)  # a request before that counts as one that has waited
        with prepared.burst() as burst:
            path = prepared if way == "plain" else burst

            def execute_soon():
                kit.until(is_at_rest)
                return path.execute(request, deadline=after(0.15))

            for _ in range(3):
                assert path.execute(request).status is ErrorStatus.NONE
            before = len(ran())
            result = execute_soon()
            assert result.status is PERSISTENT
            assert result.cause.phase == "before start"
            assert len(ran()) == before
            run = prepared.run if way == "plain" else burst.run
            kit.until(is_at_rest)
            with pytest.raises(MissedDeadlinePersistent) as caught:
                run(x(0.3, 1), timeout=0.15)
            assert (caught.value.phase, caught.value.retry_after) == ("before start", None)
            assert "give it more time" in str(caught.value)
            found = [execute_soon().status for _ in range(8)]
            assert PERSISTENT in found
            assert len(ran()) > before

    def test_a_success_that_comes_too_late_is_none(self, slow, kit):
        """A device that cannot look meanwhile says when it is done that it needs more, on both paths."""
        request, _ = kit.request([x(2 * SOON)], 16)

        def on_plain_path():
            with plain_path(slow, request) as execute:
                result = execute(deadlines.nanoseconds(after(SOON)), PATIENCE)
            assert result.outputs == ()
            return result.status, result.cause

        def in_burst():
            with slow.burst() as burst:
                return asked_of_burst(burst, request, after(SOON))

        for way in (on_plain_path, in_burst):
            status, cause = kit.until(lambda way=way: begun_in_time(*way()))
            assert (status, cause.phase) == (PERSISTENT, "executing")
            nested(0, cause.late_by)


def begun_in_time(status, cause):
    """Both, unless the deadline passed before the device began, as on a busy machine it may."""
    assert status in (TRANSIENT, PERSISTENT)
    return None if cause.phase in ("queued", "before start") else (status, cause)


NUMBERS = itertools.count(1)  # a device may still have an equal model of another test, and know how long it takes


def additions(n, elements):
    builder = driver.ModelBuilder()
    found = builder.input("float32", (1, elements))
    one = builder.constant(np.full(elements, next(NUMBERS), np.float32))
    for _ in range(n):
        found = builder.operation("ADD", found, one, 0)
    builder.output(found)
    return builder.build()


def convolutions(n, channels=64, side=56):
    builder = driver.ModelBuilder()
    found = builder.input("float32", (1, side, side, channels))
    filters = builder.constant(np.full((channels, 3, 3, channels), 1e-3 / next(NUMBERS), np.float32))
    bias = builder.constant(np.zeros(channels, np.float32))
    for _ in range(n):
        found = builder.operation("CONV_2D", found, filters, bias, 1, 1, 1, 0)
    builder.output(found)
    return builder.build()


LARGE = {
    "reference": lambda: additions(300, 500_000),
    "litert": lambda: convolutions(16),
    "onnxruntime": lambda: convolutions(16),
}


class TestInTheMidst:
    """Real devices give up between operations, or pieces of the model."""

    @pytest.mark.parametrize("way", ["plain", "burst"])
    @pytest.mark.parametrize("name", LARGE)
    def test_an_execution_ends_at_a_checkpoint(self, connect, kit, name, way):
        """Executing, and not once it is done; the next one without a deadline is right."""
        model = LARGE[name]()
        operand = model.main.operands[model.main.inputs[0]]
        data = np.zeros(operand.dimensions, np.float32)
        request, _ = kit.request([data], data.nbytes)
        with connect(name).prepare(LARGE[name]()) as another:
            usual = min(seconds_of(lambda: another.execute(request)) for _ in range(3))
        with (
            connect(name).prepare(model) as prepared,
            prepared.burst() as burst,
            plain_answers(prepared, request) as answer,
        ):
            path = prepared if way == "plain" else burst
            result = path.execute(request)  # once: after that the device knows how long it takes, and refuses
            assert result.status is ErrorStatus.NONE
            wanted = result.outputs[0].copy()

            def ends_in_the_midst():  # on a busy machine it may not begin in that time; none was ever done in it
                if way == "plain":
                    result = answer(after(usual / 4))
                    status, cause = result.status, result.cause
                else:
                    status, cause = asked_of_burst(burst, request, after(usual / 4))
                assert status is PERSISTENT
                return cause.phase == "executing"

            kit.until(ends_in_the_midst)
            result = path.execute(request)
            assert result.status is ErrorStatus.NONE
            assert np.array_equal(result.outputs[0], wanted)

    def test_in_this_process(self):
        """The CPU here gives up too: Timeout for `run`, a result for `execute`."""
        model = additions(300, 500_000)
        data = np.zeros((1, 500_000), np.float32)
        with driver.compile(model, ["cpu"]) as compiled:
            (wanted,) = compiled.run(data)
            usual = seconds_of(lambda: compiled.run(data))
            with driver.compile(model, ["cpu"]) as unknown:  # how long it takes
                error = outcome(lambda: unknown.run(data, timeout=usual / 4))
            assert isinstance(error, Timeout)
            assert error.phase == "executing"
            error = outcome(lambda: compiled.run(data, timeout=usual / 4))
            assert isinstance(error, Timeout | MissedDeadlinePersistent)
            with compiled.burst() as burst:
                error = burst.submit(data, deadline=after(usual / 4)).exception()
                assert isinstance(error, MissedDeadlinePersistent | MissedDeadlineTransient)
                assert np.array_equal(burst.run(data).outputs[0], wanted)

    def test_turns_of_one_program(self, connect, kit):
        """Behind another execution of the same LiteRT program a deadline passes: queued, and not begun."""
        model = convolutions(64)  # long enough for the second request to come while the first one runs
        data = np.zeros((1, 56, 56, 64), np.float32)
        requests = [kit.request([data], data.nbytes)[0] for _ in range(2)]

        def answered_behind_another():
            with connect("litert").prepare(model) as prepared:
                usual = seconds_of(lambda: prepared.execute(requests[0]))
                with prepared.burst() as burst, plain_answers(prepared, requests[1]) as answer:
                    controller = controller_of(burst)
                    burst.execute(requests[0])
                    counts = controller.trace.page.device
                    answered = int(counts.answered)
                    controller.start(controller.packet(requests[0]))
                    kit.until(lambda: counts.running or counts.answered > answered)
                    result = answer(after(usual / 4))
                    assert controller.receive(20).status is ErrorStatus.NONE
                    return result.status, result.cause.phase

        # On a busy machine it may come too late. The device does not know yet how long the model takes: no refusal.
        assert (TRANSIENT, "queued") in (answered_behind_another() for _ in range(5))


class TestPreparation:
    """Given up between operations, and while it waits for others."""

    def test_it_is_given_up(self, connect, kit):
        """The device's own answer says so, and it is free for others."""
        device = connect("Slow")
        for seconds in (0.1, 1.0, 2.5):  # on a busy machine it may be over before it has begun
            with pytest.raises(TimeoutError, match=r"late by.*more time") as caught:
                prepared_by(device, kit.add_model(relaxed=True), after(seconds))
            if isinstance(caught.value, MissedDeadlineTransient):
                break
        assert caught.value.phase == "preparing"
        nested(0, caught.value.late_by)
        device.prepare(kit.add_model()).close()

    @pytest.mark.integration
    def test_behind_another_one(self, connect, kit):
        """Queued, and transient."""
        busy, other = connect("Slow"), connect("Slow")
        model = kit.add_model(relaxed=True)
        thread = threading.Thread(target=lambda: outcome(lambda: prepared_by(busy, model, after(2))))
        thread.start()

        def waits():
            error = outcome(lambda: prepared_by(other, kit.add_model(), after(0.1)))
            return isinstance(error, MissedDeadlineTransient) and error

        error = kit.until(waits)
        thread.join()
        assert error.phase == "queued"
        assert error.retry_after > 0

    def test_compile_hands_on_what_is_left(self, shared, monkeypatch, kit):
        """`compile(timeout=)` ends a preparation, instead of waiting for its end."""
        shared.enter(monkeypatch)
        error = outcome(lambda: driver.compile(kit.add_model(relaxed=True), [kit.odd("Slow")], timeout=0.3))
        assert isinstance(error, MissedDeadlineTransient | MissedDeadlinePersistent)

    def test_what_was_never_prepared_in_that_time_is_not_begun(self):
        """Persistent, before the start; after some refusals one is tried. What is known from before counts, too."""
        known, second = PreparationTime(b"a model", 10**9), 10**9
        for estimates in (PreparationEstimates(), PreparationEstimates()):
            for _refusal in range(9):
                with deadlines.due(clock.now() + second // 2):
                    error = outcome(lambda estimates=estimates: prepare_nothing(estimates, known))
                if error is None:
                    break
                assert (type(error), error.phase) == (MissedDeadlinePersistent, "before start")
            assert 0 < _refusal <= 8
            assert 0 < known.found < second // 2  # what it took when it was tried, and so needs from now on
            with deadlines.due(clock.now() + second // 2):
                prepare_nothing(estimates, known)

    def test_what_is_given_up_counts_for_those_that_took_the_time(self):
        """Persistent by itself; transient if it waited for others, or has been done in that time before."""

        def given_up(known, wait):
            deadline = clock.now()
            while clock.now() == deadline:
                pass
            with deadlines.due(deadline):
                deadlines.begin_work(deadline - 1000, wait)
                with PreparationEstimates().preparing(PreparationTime(b"a model", known)):
                    deadlines.check("preparing")

        assert isinstance(outcome(lambda: given_up(0, 0)), MissedDeadlinePersistent)
        assert isinstance(outcome(lambda: given_up(0, 10**9)), MissedDeadlineTransient)
        assert isinstance(outcome(lambda: given_up(10**8, 10**9)), MissedDeadlineTransient)


def prepare_nothing(estimates, known):
    with estimates.preparing(known):
        pass


class TestEstimates:
    """csrc/burst/deadline.c, by itself."""

    def test_it_admits_what_has_been_done_in_that_time(self, estimate):
        """0, or a status by how long it waited; a single quick one is remembered."""
        for took in (1000, 800, 1200):
            lib.burst_took(estimate, took, 1)
        assert estimate.least_ns == 800
        assert 900 < estimate.usual_ns < 1100
        assert lib.burst_admit(estimate, 0, 100, 900) == 0
        assert lib.burst_admit(estimate, 100, 100, 800) == PERSISTENT  # it came too late to be done
        assert lib.burst_admit(estimate, 0, 500, 900) == TRANSIENT  # it had been time enough
        assert lib.burst_admit(estimate, 0, 901, 900) == TRANSIENT
        assert lib.burst_admit(estimate, 901, 901, 900) == PERSISTENT
        assert lib.burst_admit(estimate, 0, 10**9, 2**64 - 1) == 0

    def test_refusals_wear_off(self, estimate):
        """A model that was slow once is tried again, and what that takes counts from then on."""
        lib.burst_took(estimate, 10**6, 1)
        refusals = next(n for n in range(99) if lib.burst_admit(estimate, 0, 0, 1000) == 0)
        assert refusals == 8
        lib.burst_took(estimate, 900, 1)
        assert estimate.least_ns == 900
        assert lib.burst_admit(estimate, 0, 0, 1000) == 0

    def test_an_attempt_that_was_given_up_confirms_it(self, estimate):
        """Then it is refused as before."""
        lib.burst_took(estimate, 10**6, 1)
        while lib.burst_admit(estimate, 0, 0, 1000):
            pass
        lib.burst_took(estimate, 1000, 0)
        assert lib.burst_admit(estimate, 0, 0, 1000) == PERSISTENT
        assert estimate.least_ns == 10**6

    def test_what_was_given_up_counts_until_one_is_done(self, estimate):
        """So long it takes at least: a task that never fits is refused, and one with more time is tried."""
        lib.burst_took(estimate, 600, 0)
        assert lib.burst_admit(estimate, 0, 0, 500) == PERSISTENT
        assert lib.burst_admit(estimate, 0, 200, 650) == TRANSIENT
        assert lib.burst_admit(estimate, 0, 0, 700) == 0
        lib.burst_took(estimate, 300, 1)
        assert lib.burst_admit(estimate, 0, 0, 500) == 0

    @pytest.mark.parametrize(
        ("status", "times", "least", "said"),
        [
            (TRANSIENT, {"done": 1100}, 0, PERSISTENT),  # alone on the device, given up
            (0, {"done": 1100}, 0, PERSISTENT),  # or done too late
            (0, {"done": 1100, "waited": 50}, 0, PERSISTENT),  # others did not take what it lacks
            (0, {"done": 1100, "waited": 100}, 0, TRANSIENT),  # others did
            (TRANSIENT, {"done": 1100, "waited": 110}, 0, PERSISTENT),  # nobody knows what it lacks, and it is little
            (TRANSIENT, {"done": 1100, "waited": 300}, 0, TRANSIENT),
            (TRANSIENT, {"known": 400, "begun": 400, "done": 1100}, 0, TRANSIENT),  # it waited for fences
            (TRANSIENT, {"done": 1100}, 700, TRANSIENT),  # it has been done in that time
            (TRANSIENT, {"done": 1100, "waited": 900}, 1200, PERSISTENT),  # it never has
            (0, {"done": 1100, "bound": 200, "is_first": 1}, 0, TRANSIENT),  # it would be done, now that it is bound
            (TRANSIENT, {"done": 1300, "bound": 200, "is_first": 1}, 0, PERSISTENT),
            (0, {"done": 900}, 0, 0),
        ],
    )
    def test_who_took_the_time(self, estimate, status, times, least, said):
        """Of an execution that could begin at 1 and has to be done by 1001: transient if others did."""
        estimate.least_ns = least
        times = {"deadline": 1001, "since": 1, "known": 1, "begun": 1, "estimate": estimate} | times
        assert lib.burst_judge_end(ffi.new("burst_attempt *", times), status) == said

    @pytest.fixture
    def estimate(self):
        return ffi.new("burst_estimate *")
