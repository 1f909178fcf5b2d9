"""When the GPU works on requests, as `burst trace` draws it; the events of tests' libcuda.so.1 have true times."""

import json
import threading
import time
from collections import defaultdict
from itertools import count

import numpy as np
import pytest
from click.testing import CliRunner
from fake_cuda import Call, FakeCuda, Word
from inside import controller_of
from waiting import last, nested, until

import driver
from burst import InvalidArgument, Malformed, Memory, Request, RequestArgument, Trace
from burst._core import ffi
from burst.work_notes import WorkNote
from driver.cli.command import burst as command
from driver.client import discovery
from driver.client.connection import Connection
from driver.devices.cuda.work_clock import IN, KERNELS, OUT, WorkClock, WorkTimes
from driver.monitor import Watcher, events
from driver.monitor.follow import Followed

DEVICE = "burst_test_devices.gpu:CudaAdd"
N = 1024
SLACK = 1000.0  # us: where the CPU's clock stands to the GPU's, on a busy machine
LANES = ["GPU copy in", "GPU kernels", "GPU copy out"]


@pytest.fixture
def gpu(tmp_path):
    """A GPU for the engine of this test alone."""
    return FakeCuda(tmp_path)


@pytest.fixture
def prepared(place, gpu):
    gpu.configure()
    builder = driver.ModelBuilder()
    x = builder.input("float32", (N,))
    builder.output(builder.operation("ADD", x, np.ones(1, np.float32), 0))
    with driver.connect(DEVICE) as device, device.prepare(builder.build()) as found:
        yield found


def asked(seconds=30.0):
    """The one burst that is open, which is followed from now on, while its device notes when the GPU works."""
    (device,) = Watcher([DEVICE]).devices
    device.time_work(seconds)
    ((_, burst),) = device.bursts.items()
    return Followed(burst, int(burst.trace.page.client.results))


def lanes_of(followed):
    """(begin, end, request) of what is drawn, in microseconds, by the name of the lane."""
    drawn = list(events([followed]))
    names = {
        (event["pid"], event["tid"]): event["args"]["name"].partition(", ")[2]
        for event in drawn
        if event["name"] == "thread_name"
    }
    found = defaultdict(list)
    for event in drawn:
        if event["ph"] == "X" and event["name"] in LANES:
            assert names[event["pid"], event["tid"]] == event["name"]
            found[event["name"]].append((event["ts"], event["ts"] + event["dur"], event["args"]["request"]))
    return found


def until_told(kit, followed, count):
    """Until so many requests have works: the last ones come when the engine looks at its lanes."""

    def look():
        followed.look(0.0)
        return len(followed.works) >= count

    kit.until(look)


def test_each_request_is_copied_in_computed_and_copied_out(prepared, kit):
    """Every request has a span in each lane, in this order, between when the listener took it and answered it."""
    with prepared.burst() as b:
        for n in range(4):
            b.run(np.full(N, n, np.float32))

        def lie_in_their_requests():
            followed = asked()
            for n in range(20):
                b.run(np.full(N, n, np.float32))
            until_told(kit, followed, 20)
            lanes, records = lanes_of(followed), {int(r["id"]): r for r in followed.records}
            assert list(lanes) == LANES
            return all(lies_in(records[spans[0][2]], spans) for spans in zip(*lanes.values(), strict=True))

        kit.until(lie_in_their_requests)  # between two looks at its clock, a busy machine may do something else


def lies_in(record, spans):
    """Whether the spans of one request, which follow each other, lie between its start and its end."""
    assert len({number for *_, number in spans}) == 1
    times = [end for begin, until, _ in spans for end in (begin, until)]
    assert times == sorted(times)
    return is_between(record["started"] / 1e3 - SLACK, times, record["done"] / 1e3 + SLACK)


def is_between(begin, times, end):
    """Whether the clocks of the CPU and the GPU agree so far."""
    try:
        nested(begin, times[0])
        nested(times[-1], end)
    except AssertionError:
        return False
    return True


def test_successive_requests_overlap_in_the_lanes(prepared, gpu, kit):
    """At depth 2 the copy in of a request has ended before the kernels of the one before it have."""
    with prepared.burst(depth=2) as b:
        for n in range(4):
            b.submit(np.full(N, n, np.float32)).result()
        followed = asked()
        copies, gpu[Word.HOLD_KERNELS] = gpu[Word.COPIES_IN], 1
        futures = [b.submit(np.zeros(N, np.float32))]
        kit.until(lambda: gpu[Word.HELD] == 1)
        futures.append(b.submit(np.ones(N, np.float32)))
        kit.until(lambda: gpu[Word.COPIES_IN] == copies + 2)
        last(2e-6 * SLACK)
        gpu[Word.HOLD_KERNELS] = 0
        for future in futures:
            future.result()
        until_told(kit, followed, 2)
        lanes = lanes_of(followed)
    (_, _, first), (_, second_is_in, second) = lanes["GPU copy in"]
    (began, first_is_done, one), (next_begins, _, other) = lanes["GPU kernels"]
    assert (first, second) == (one, other)
    assert began - SLACK < second_is_in < first_is_done <= next_begins + SLACK


def test_nothing_is_noted_unless_it_is_wanted(prepared, kit):
    """Without `burst trace`, and when its time is over, requests have no works, and no events with times."""
    with prepared.burst() as b:
        for n in range(4):
            b.run(np.full(N, n, np.float32))
        followed = asked(0.0)
        for n in range(4):
            b.run(np.full(N, n, np.float32))
        followed.look(0.0)
        assert len(followed.records) == 4
        assert not len(followed.works)


@pytest.mark.integration
def test_the_command_draws_them(prepared, tmp_path):
    """`burst trace` has the device take times while it runs: its file has the three lanes, and requests in them."""
    path, is_over = tmp_path / "trace.json", threading.Event()

    def run():
        with prepared.burst(depth=2) as b:
            while not is_over.is_set():
                for future in [b.submit(np.full(N, n, np.float32)) for n in range(2)]:
                    future.result()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        words = CliRunner().invoke(command, ["trace", DEVICE, "--seconds", "2", "-o", str(path)])
    finally:
        is_over.set()
        thread.join()
    assert words.exit_code == 0, words.output
    drawn = [event["name"] for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert all(drawn.count(lane) > 10 for lane in LANES)


def test_bursts_that_nobody_asked_about_are_not_timed(prepared, kit):
    """What one client asks for costs only the bursts that it may see and that are open then."""
    with prepared.burst() as b:
        for n in range(4):
            b.run(np.full(N, n, np.float32))
        first = asked()
        with prepared.burst() as other:
            for n in range(4):
                other.run(np.full(N, n, np.float32))
                b.run(np.full(N, n, np.float32))
            until_told(kit, first, 4)
            assert not len(controller_of(other).trace.works())


def test_times_that_cannot_be_had_fail_no_request(prepared, gpu, kit):
    """CUDA refuses a stream for the reference event: the request has no times and its answer; later ones have both."""
    with prepared.burst() as b:
        for n in range(4):
            b.run(np.full(N, n, np.float32))
        followed = asked()
        gpu.fail(Call.STREAM, 1)
        assert (b.run(np.full(N, 5, np.float32)).outputs[0] == 6).all()
        assert not gpu[Word.FAIL_CALL]
        without = int(followed.burst.trace.page.client.results)

        def later_ones_are_told():  # one whose plan was dropped while the device rested has none, either
            b.run(np.full(N, 5, np.float32))
            followed.look(0.0)
            return len(followed.works)

        kit.until(later_ones_are_told)
        assert (followed.works["id"] > without).all()


def test_values_that_stay_on_the_gpu_have_no_copies(prepared, kit):
    """A request on a pool in the GPU's memory has kernels, and no spans of copies."""
    from driver.devices.cuda.gpu_pool import GpuPool

    pool = GpuPool.allocate(8 * N)
    ends = RequestArgument(length=4 * N), RequestArgument(offset=4 * N, length=4 * N)
    request = Request(ends[:1], ends[1:], (pool,))
    with prepared.burst() as b:
        b.execute(request)
        followed = asked()
        for _ in range(3):
            b.execute(request).raise_for_status()
        until_told(kit, followed, 3)
        assert list(lanes_of(followed)) == ["GPU kernels"]


def test_a_trace_without_room_for_works():
    """The trace of a client that was built before there were works: nothing is noted beyond its end."""
    old = Trace(Memory.create(ffi.offsetof("burst_trace", "worked")))
    old.note_work(3, (1, 2, 3, 4, 5, 6))
    assert not len(old.works())
    assert Trace.nbytes_in(old.memory.fd) == old.memory.nbytes
    new = Trace.create()
    new.note_work(3, (1, 2, 3, 4, 5, 6))
    assert new.works().tolist() == [(3, 1, 2, 3, 4, 5, 6, 0)]
    with pytest.raises(Malformed, match="are needed"):
        Trace(Memory.create(64))


@pytest.mark.parametrize("seconds", [-1, 61, float("nan"), "1"])
def test_a_wrong_time_is_refused(prepared, seconds):
    """The engine bounds for how long one client may have it take times."""
    with discovery.running(DEVICE) as channel, pytest.raises(InvalidArgument):
        Connection(channel).call("time_work", seconds)


class Noted:
    """A trace that keeps what is noted."""

    def __init__(self):
        self.works = []

    def note_work(self, number, times):
        self.works.append((number, *times))


def test_a_new_reference_keeps_times_exact(context, monkeypatch):
    """A reference is used for some seconds only, and times of runs stay those of the CPU's clock."""
    from driver.devices.cuda import work_clock

    clock, trace = WorkClock(context), Noted()
    clock.run_until(time.monotonic() + 60)
    first = clock.reference()
    assert clock.reference() is first
    monkeypatch.setattr(work_clock, "RENEW", 0)
    times, numbers = WorkTimes(clock, context), count(1)
    with context.stream() as stream:

        def is_exact():
            number = next(numbers)
            times.request = WorkNote(trace, number)
            before = time.monotonic_ns()
            times.begin()
            for part in (IN, KERNELS, OUT):
                with times.around(part, stream):
                    stream.synchronize()
            times.added()
            stream.synchronize()
            assert times.is_told()
            after = time.monotonic_ns()
            assert [work[0] for work in trace.works] == list(range(1, number + 1))
            ends = trace.works[-1][1:]
            assert list(ends) == sorted(ends)
            return is_between(before - 1_000_000, ends, after + 1_000_000)

        until(is_exact)
        until(is_exact)
    assert clock.reference() is not first


def test_a_run_that_was_not_added_is_not_noted(context):
    """What failed on the way has no times, and the next run is noted as ever."""
    clock, trace = WorkClock(context), Noted()
    times = WorkTimes(clock, context)
    with context.stream() as stream:
        times.request = WorkNote(trace, 1)
        times.begin()
        with pytest.raises(ValueError, match="no"), times.around(IN, stream):
            raise ValueError("no")
        assert not times.is_told()
        times.request = WorkNote(trace, 2)
        times.begin()
        with times.around(KERNELS, stream):
            pass
        times.added()
        stream.synchronize()
        assert times.is_told()
    ((number, *ends),) = trace.works
    assert number == 2
    assert [end > 0 for end in ends] == [False, False, True, True, False, False]
