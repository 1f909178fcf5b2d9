"""A burst at work: what a device is told, what a client gets back, and what is remembered in between."""

import logging
import re
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from waiting import PATIENCE, last, nested

from burst import (
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    NotSent,
    OutputInsufficientSize,
    OutputShape,
    Request,
    RequestArgument,
    Result,
    errors,
)
from burst.datum import DATUM
from burst.plan_cache import MAX_PLANS
from burst.wire import VERSIONS
from fmq.end import DEFAULT_SPIN

NONE, GENERAL_FAILURE = ErrorStatus.NONE, ErrorStatus.GENERAL_FAILURE
BINDING = 0.03  # seconds
FAILED = (GENERAL_FAILURE, (), (None, None), 0)


@pytest.fixture(params=VERSIONS)
def wire(request):
    """Everything here holds in each wire version."""
    return request.param


@pytest.fixture
def execute(increment):
    """The same device, as one function that executes a request."""

    def run(request):
        execution = increment(request)
        execution.run()
        return Result(NONE, output_shapes=execution.shapes)

    return run


@pytest.fixture
def device(request, host, increment, execute, keeper):
    """Servers of executions that are bound once, of executions that only return a result, and of an executor."""
    ways = {"bind": {"bind": increment}, "execute": {"execute": execute}, "executor": {"executor": keeper}}
    return host(**ways[request.param])


all_ways = pytest.mark.parametrize("device", ["bind", "execute", "executor"], indirect=True)


def test_the_kernel_knows_listeners_by_name(host, increment, burst):
    """ps -L, top -H and gdb show each listener, with the number of its burst."""
    device = host(bind=increment)
    clients = [burst(device) for _ in range(2)]
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # that thread has ended
            names.append(path.read_text().strip())
    listeners = [name for name in names if re.fullmatch(r"burst-li[sten-]*\d+", name)]
    assert len(set(listeners)) == len(listeners) >= len(clients)


@all_ways
@pytest.mark.parametrize(("kind", "spin"), [("memfd", DEFAULT_SPIN), ("posix", 0.0)])
def test_a_burst_executes(device, burst, memory, kind, spin):
    """Each of a thousand requests gets its own result, whichever way the server was made, whatever the queues are made
    of, whether both sides poll or sleep at once; memory is asked for once.
    """
    device._spin = spin
    client, pool = burst(device, spin=spin, memory=kind), memory()
    array = pool.asarray(shape=8)
    for n in range(1000):
        array[:4] = n % 200
        assert client.run(pool) == (NONE, (OutputShape((4,)),), (None, None), 0)
        assert list(array[4:]) == [n % 200 + 1] * 4
    assert client.asked == [[0]]
    assert client._caller.results == 1000


@all_ways
def test_different_requests_take_turns(device, burst, memory):
    """Requests that differ in shape get each their own shape back, in any order."""
    client, pool = burst(device), memory()
    for n in (1, 7, 1, 3, 7, 7, 1):
        assert client.run(pool, n).output_shapes == (OutputShape((n,)),)


@all_ways
def test_a_burst_in_another_process(service, burst, memory, device):
    """The device may be another process: results are written straight into the client's memory."""
    _, configure = service()
    client, pool = burst(configure), memory()
    for _ in range(100):
        assert client.run(pool).status is NONE
    assert list(pool.asarray(shape=8)) == [0, 1, 2, 3, 1, 2, 3, 4]
    assert client.asked == [[0]]


def test_a_packet_is_recognised_by_its_bytes(host, burst, memory, increment):
    """The same packet is bound once however often it comes; another packet is bound for itself; after its memory was
    freed, binding starts afresh.
    """
    bound = []

    class Noting(increment):
        def __init__(self, request):
            super().__init__(request)
            bound.append(len(self.source))

    device = host(Noting)
    client, pool = burst(device), memory()
    for n in (4, 4, 5, 4, 5, 5):
        client.run(pool, n)
    assert bound == [4, 5]
    client.send(client.encode(increment.request(pool, 4), measure=True))
    assert bound == [4, 5, 4]
    client.free_memory(pool)
    device.wait_freed()
    client.run(pool, 5)
    assert bound == [4, 5, 4, 5]


def test_more_requests_than_are_remembered(host, burst, memory, increment):
    """A client with more than 128 requests goes on working: some are bound again, and none is mixed up."""
    bound = []

    class Noting(increment):
        def __init__(self, request):
            super().__init__(request)
            bound.append(len(self.source))

    client, pool = burst(host(Noting)), memory()
    for _ in range(2):
        for n in range(1, MAX_PLANS + 20):
            assert client.run(pool, n).output_shapes == (OutputShape((n,)),)
    assert MAX_PLANS + 19 < len(bound) <= 2 * (MAX_PLANS + 19)
    assert len(client.asked) == 1


def test_the_request_that_came_longest_ago_goes_first(host, burst, memory, increment):
    """One request too many has one bound again, and not one that is in use."""
    bound = []

    class Noting(increment):
        def __init__(self, request):
            super().__init__(request)
            bound.append(len(self.source))

    client, pool = burst(host(Noting)), memory()
    for n in (*range(1, MAX_PLANS + 1), 1, MAX_PLANS + 1):
        client.run(pool, n)
    assert bound == list(range(1, MAX_PLANS + 2))
    client.run(pool, 1)
    assert bound[MAX_PLANS + 1 :] == []
    client.run(pool, 2)
    assert bound[MAX_PLANS + 1 :] == [2]


def test_a_request_that_could_not_be_bound_is_bound_again(host, burst, memory, increment):
    """A refusal is not remembered: the same request may succeed the next time."""
    refusals = [InvalidArgument("not yet"), GeneralFailure("nor now")]

    class Moody(increment):
        def __init__(self, request):
            super().__init__(request)
            if refusals:
                raise refusals.pop()

    client, pool = burst(host(Moody)), memory()
    statuses = [client.run(pool).status for _ in range(3)]
    assert statuses == [GENERAL_FAILURE, ErrorStatus.INVALID_ARGUMENT, NONE]
    assert len(client.asked) == 1


def test_shapes_of_a_dynamic_execution(host, burst, memory, increment):
    """An execution that is not static is asked for its shapes after every run."""

    class Growing(increment):
        is_static = False

        def run(self):
            super().run()
            (shape,) = self.shapes
            self.shapes = (OutputShape((shape.dimensions[0] + 1,)),)

    client, pool = burst(host(Growing)), memory()
    assert [client.run(pool).output_shapes[0].dimensions for _ in range(3)] == [(5,), (6,), (7,)]


@all_ways
def test_timing(device, burst, memory, increment):
    """Times come when asked for and only then, and the device's part is not the larger one."""
    client, pool = burst(device), memory()
    for _ in range(50):
        timing = client.send(client.encode(increment.request(pool), measure=True)).timing
        nested(0, timing.time_on_device, timing.time_in_driver)
    assert client.run(pool).timing == (None, None)


def test_timing_leaves_out_the_wait_for_the_client(host, burst, memory, increment):
    """timeInDriver begins when a request has arrived, not when the listener began to wait for one, and timeOnDevice
    is the run alone, without the binding.
    """

    class Slow(increment):
        def __init__(self, request):
            super().__init__(request)
            last(BINDING)

    client, pool = burst(host(Slow)), memory()
    first = client.send(client.encode(increment.request(pool), measure=True)).timing
    nested(BINDING * 1e6, first.time_in_driver - first.time_on_device)
    last(BINDING)
    packet, begin = client.encode(increment.request(pool), measure=True), time.monotonic()
    again = client.send(packet).timing
    nested(again.time_in_driver, 1e6 * (time.monotonic() - begin))


@pytest.mark.parametrize("where", ["bind", "run"])
def test_an_unforeseen_exception(host, burst, memory, increment, caplog, where):
    """An exception that a device did not foresee is a GENERAL_FAILURE of that request and a line in the log with its
    traceback; the listener goes on.
    """
    broken = [True]

    class Broken(increment):
        def __init__(self, request):
            super().__init__(request)
            self.fail("bind")

        def run(self):
            self.fail("run")
            super().run()

        def fail(self, here):
            if here == where and broken:
                raise ZeroDivisionError("unforeseen")

    client, pool = burst(host(Broken)), memory()
    with caplog.at_level(logging.ERROR):
        assert client.run(pool) == FAILED
    assert [record.exc_info[0] for record in caplog.records] == [ZeroDivisionError]
    broken.clear()
    assert client.run(pool).status is NONE


@pytest.mark.parametrize("status", [status for status in ErrorStatus if status is not NONE])
@all_ways
def test_statuses_arrive(device, host, burst, memory, increment, status, wire):
    """A status that a device raises arrives. Version 1, as HAL 1.2, has those up to 4; others arrive as
    GENERAL_FAILURE there.
    """

    class Refusing(increment):
        def run(self):
            raise errors.status_error(status)

    client, pool = burst(host(Refusing)), memory()
    expected = GENERAL_FAILURE if wire == 1 and status > ErrorStatus.INVALID_ARGUMENT else status
    assert client.run(pool) == (expected, (), (None, None), 0)
    assert client.send(client.encode(increment.request(pool), measure=True)) == (expected, (), (None, None), 0)


def test_an_insufficient_output_says_how_much_it_needs(host, burst, memory):
    """OUTPUT_INSUFFICIENT_SIZE carries its shapes, by exception and by result."""
    shapes = (OutputShape((9, 2), is_sufficient=False), OutputShape())
    insufficient = Result(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, output_shapes=shapes)

    class TooSmall:
        is_static = False
        shapes = ()

        def __init__(self, request):
            pass

        def run(self):
            raise OutputInsufficientSize("9 x 2", insufficient)

    pool = memory()
    for device in (host(TooSmall), host(execute=lambda _: insufficient)):
        assert burst(device).run(pool) == (ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, shapes, (None, None), 0)


@pytest.mark.parametrize(
    "status", [GENERAL_FAILURE, ErrorStatus.INVALID_ARGUMENT, ErrorStatus.MISSED_DEADLINE_TRANSIENT]
)
def test_shapes_that_a_status_has_not(host, burst, memory, status, wire):
    """A device that adds shapes to a status which has none is a sloppy device; its burst goes on without them."""
    client, pool = burst(host(execute=lambda _: Result(status, output_shapes=(OutputShape((1,)),)))), memory()
    expected = GENERAL_FAILURE if wire == 1 and status > ErrorStatus.INVALID_ARGUMENT else status
    for _ in range(2):
        assert client.run(pool) == (expected, (), (None, None), 0)


@pytest.mark.parametrize("shapes", [(OutputShape((-1,)),), (OutputShape((2**32,)),), (OutputShape(("one",)),), None])
@pytest.mark.parametrize("status", [NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE])
def test_shapes_that_cannot_be_said(host, burst, memory, status, shapes):
    """Shapes that no packet can hold are a GENERAL_FAILURE, and the burst goes on."""
    client, pool = burst(host(execute=lambda _: Result(status, output_shapes=shapes))), memory()
    for _ in range(2):
        assert client.run(pool) == FAILED


def test_a_result_that_does_not_fit(host, burst, memory, increment, wire):
    """With room for 8 elements, a result of more arrives as GENERAL_FAILURE, without waiting, and one of 8 as it is."""
    rank = [8]

    class Deep(increment):
        is_static = False

        def run(self):
            super().run()
            self.shapes = (OutputShape((1,) * rank[0]),)

    client, pool = burst(host(Deep), length=8), memory()
    most = 8 - 2 - wire  # packetInformation, operandInformation, executionTiming; in version 2 the id
    fits = (NONE, (OutputShape((1,) * most),), (None, None), 0)
    for rank[0], result in ((most + 2, FAILED), (most, fits), (most + 1, FAILED)):
        assert client.run(pool) == result
        assert client.trace.page.client.timeouts == 0


def test_a_request_that_does_not_fit(host, burst, memory, wire):
    """A request longer than the channel is NotSent: nothing was executed, and shorter ones work."""
    client, pool = burst(host(), length=8), memory()
    request = Request((RequestArgument(length=4),), (RequestArgument(offset=4, length=4),), (pool,) * 5)
    packet = client.encode(request)
    nbytes = (9 if wire == 1 else 11) * DATUM
    assert packet.nbytes == nbytes > client._writer.capacity * DATUM
    for _ in range(2):
        with pytest.raises(NotSent, match=f"{nbytes} bytes"):
            client.send(packet)
    assert client.asked == []
    assert client.run(pool).status is NONE


def test_a_malformed_request(host, burst, memory, wire):
    """A packet that no encoder emits is a GENERAL_FAILURE, and the burst goes on. In version 2 a client of ours patches
    the id in, so what is sent is as long as it says, and wrong elsewhere; `test_vts_mutations` has the rest.
    """
    client, pool = burst(host()), memory()
    good = bytes(client.encode(Request((), (), ())))
    wrong = [good[:DATUM] + b"\x07" + good[DATUM + 1 :], good[:8] + b"\x01" + good[9:]]
    for packet in [bytes(24), b"\xff" * 48, good * 2] if wire == 1 else wrong:
        assert client.send_raw(packet) == FAILED
    assert client.run(pool).status is NONE


def test_a_device_that_refuses(burst):
    """What a device raises when it is asked for a burst reaches the caller, and nothing is left open."""

    def refuse(offer):
        raise errors.DeviceUnavailable("not today")

    with pytest.raises(errors.DeviceUnavailable, match="not today"):
        burst(refuse)


@pytest.fixture
def cancellable(increment, gate):
    """An execution that runs until it is cancelled, and then fails."""

    found = []

    class Cancellable(increment):
        def __init__(self, request):
            super().__init__(request)
            self.cancelled = threading.Event()
            self.cancel = self.cancelled.set
            if len(self.source) == 5:
                gate()

        def run(self):
            gate.entered.release()
            found.append(self.cancelled.wait(PATIENCE))
            raise GeneralFailure("it was cancelled")

    Cancellable.found = found
    return Cancellable


def test_what_runs_is_cancelled(host, burst, memory, cancellable, gate):
    """The end of a burst cancels what it runs: its client is gone, and nobody wants the result."""
    device, pool = host(cancellable), memory()
    client = burst(device)
    client.start(client.encode(cancellable.request(pool)))
    assert gate.entered.acquire(timeout=PATIENCE)
    device.server.stop()
    device.wait_ended()
    assert cancellable.found == [True]


def test_what_is_bound_meanwhile_is_cancelled(host, burst, memory, cancellable, gate):
    """An execution that is being bound when its burst ends runs no longer than others."""
    device, pool = host(cancellable), memory(16)
    client = burst(device)
    client.start(client.encode(cancellable.request(pool, 5)))
    assert gate.entered.acquire(timeout=PATIENCE)
    device.server.stop()
    gate.open.release()
    device.wait_ended()
    assert cancellable.found == [True]
