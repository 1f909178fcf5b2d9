"""A burst whose executor keeps the client's memory by slot: when it is asked for what, and what its results may be."""

import threading

import numpy as np
import pytest
from waiting import PATIENCE, last, nested

from burst import (
    BurstOffer,
    ErrorStatus,
    ExecutionBurstServer,
    GeneralFailure,
    InvalidArgument,
    OutputShape,
    Request,
    RequestArgument,
    Result,
    Timing,
)
from burst.burst_executor import ExecutorCache, checked_result
from burst.channel import Channel
from burst.errors import MissedDeadlineTransient
from burst.messages import Cause
from burst.wire import VERSIONS
from fmq import clock

NONE, GENERAL_FAILURE, INVALID_ARGUMENT = ErrorStatus.NONE, ErrorStatus.GENERAL_FAILURE, ErrorStatus.INVALID_ARGUMENT


@pytest.fixture(params=VERSIONS)
def wire(request):
    """Everything here holds in each wire version."""
    return request.param


@pytest.fixture
def kept(host):
    """kept(executor): a server with that executor."""
    return lambda executor: host(executor=lambda: executor)


def in_two(first, second):
    """From one pool into another."""
    return Request((RequestArgument(length=4),), (RequestArgument(pool=1, length=4),), (first, second))


def test_memory_is_asked_for_once(kept, burst, memory, keeper):
    """The client is asked only for slots that are not present, for all of them at once; the executor gets each once."""
    executor = keeper()
    client, pools = burst(kept(executor)), [memory() for _ in range(3)]
    for a, b in ((0, 1), (1, 0), (0, 1), (2, 0)):
        request = in_two(pools[a], pools[b])
        before = pools[a].asarray(np.uint8, 4).copy()
        assert client.send(client.encode(request)).status is NONE
        assert list(pools[b].asarray(np.uint8, 4)) == list(before + 1)
    assert client.asked == [[0, 1], [2]]
    assert executor.called("add") == [[0], [1], [2]]
    assert executor.called("execute") == [[0, 1], [1, 0], [0, 1], [2, 0]]


def test_an_entry_that_the_executor_dropped_is_asked_for_again(kept, burst, memory, keeper):
    """An executor with room for two pools gets the others again when a request names them."""
    executor = keeper(room=2)
    client, pools = burst(kept(executor)), [memory() for _ in range(4)]
    for a, b in ((0, 1), (2, 3), (0, 1), (0, 1)):
        assert client.send(client.encode(in_two(pools[a], pools[b]))).status is NONE
    assert client.asked == [[0, 1], [2, 3], [0, 1]]


def test_all_or_nothing(kept, burst, memory, keeper):
    """When the client has no memory for one of the slots, or the executor takes one of them not, it keeps none."""

    class Full(keeper):
        def add_cache_entry(self, slot, memory):
            super().add_cache_entry(slot, memory)
            if slot == 1:
                raise RuntimeError("there is no room for slot 1")

    executor = Full()
    client, pools = burst(kept(executor)), [memory() for _ in range(3)]
    packet = client.encode(in_two(pools[0], pools[1]))
    assert client.send(packet).status is GENERAL_FAILURE
    assert executor.entries == {}
    assert client.send(client.encode(in_two(pools[0], pools[2]))).status is NONE
    unknown = client.encode(in_two(memory(), pools[2]))
    client._slots.forget([3])
    assert client.send(unknown).status is INVALID_ARGUMENT
    assert sorted(executor.entries) == [0, 2]


def test_freed_memory_leaves_the_executor(kept, burst, memory, keeper, mappings):
    """free_memory removes the entry, and the memory is unmapped; the same memory can be used again, in a new slot."""
    executor = keeper()
    device = kept(executor)
    client, pool = burst(device), memory()
    for slot in range(3):
        assert client.run(pool).status is NONE
        assert executor.called("execute")[-1] == [slot]
        client.free_memory(pool)
        device.wait_freed()
        assert executor.called("remove") == [[n] for n in range(slot + 1)]
        assert mappings(pool) == 1


def test_memory_that_is_freed_while_other_is_removed(keeper):
    """A slot that another thread frees while the executor removes one is removed, too: no call of `free` is lost."""

    class Freed(int):  # compared while the slots to remove are gathered
        def __eq__(self, other):
            if frees:
                cache.free(frees.pop())
            return int(self) == other

        __hash__ = int.__hash__

    frees: list[list[int]] = []
    executor = keeper()
    cache = ExecutorCache(executor)
    cache.resolve([0, 1], lambda slots: slots)
    frees.append([1])
    cache.free([Freed(0)])
    assert sorted(executor.called("remove")) == [[0], [1]]


@pytest.mark.parametrize("dimensions", [(2,), (2, 3, 1), (3, 3)])
def test_shapes_of_another_rank_than_the_request_gives(dimensions):
    """They contradict it, as other dimensions do."""
    request = Request((), (RequestArgument(length=4, dimensions=(2, 0)),), ())
    with pytest.raises(GeneralFailure, match=r"gives dimensions \[2, 0\]"):
        checked_result(Result(NONE, output_shapes=(OutputShape(dimensions),)), request)


def test_memory_is_not_removed_while_an_execution_uses_it(kept, burst, memory, keeper, gate):
    """free_memory during an execution returns at once; the entry is removed when the execution has ended. An entry that
    it does not use waits, too: the executor's methods are called one at a time.
    """

    class Slow(keeper):
        def work(self):
            gate()

    executor = Slow()
    device = kept(executor)
    client, pool, other = burst(device), memory(), memory()
    for used in (other, pool):
        gate.open.release()
        assert client.run(used).status is NONE
        assert gate.entered.acquire(timeout=PATIENCE)
    runner = threading.Thread(target=client.run, args=(pool,))
    runner.start()
    assert gate.entered.acquire(timeout=PATIENCE)
    device.server.free_memory([1, 0])
    assert executor.called("remove") == []
    gate.open.release()
    runner.join(PATIENCE)
    gate.open.release()
    assert client.run(memory()).status is NONE  # the listener has come past the removals
    assert sorted(executor.called("remove")) == [[0], [1]]


def test_an_execution_can_be_told_its_terms(kept, burst, memory, keeper, wire):
    """The executor hears of the measurement, and in wire version 2 of the deadline and the loop timeout."""
    executor = keeper()
    client, pool = burst(kept(executor)), memory()
    client.send(client.encode(client_request(pool)))
    assert executor.asked == (False, None, None)
    client.send(client.encode(client_request(pool), measure=True))
    assert executor.asked == (True, None, None)
    if wire > 1:
        deadline = clock.now() + 10**11
        client.send(client.encode(client_request(pool)._replace(loop_timeout=5)), deadline=deadline)
        assert executor.asked == (False, deadline, 5)


def client_request(memory):
    """As an Increment."""
    return Request((RequestArgument(length=4),), (RequestArgument(offset=4, length=4),), (memory,))


def test_times_are_reported_only_when_they_are_asked_for(kept, burst, memory, keeper):
    """Without measure there are none, whatever the executor says. With it the time on the device is the executor's, if
    that can be true; the time in the driver is measured by the server.
    """

    class Measuring(keeper):
        said = None

        def execute(self, *arguments):
            result = super().execute(*arguments)
            last(2e-3)
            return result._replace(timing=Timing(self.said, 10**6))

    executor = Measuring()
    client, pool = burst(kept(executor)), memory()
    for executor.said in (None, 3, 10**9):
        for _ in range(2):
            assert client.send(client.encode(client_request(pool))).timing == (None, None)
            on_device, in_driver = client.send(client.encode(client_request(pool), measure=True)).timing
            nested(2000, in_driver)
            if executor.said == 3:
                assert on_device == 3
            else:
                nested(2000, on_device, in_driver)


NONSENSE = [
    (None, "returned None, not a burst.Result"),
    ((0, ()), "not a burst.Result"),
    (Result(99), "status 99, which does not exist"),
    (Result(NONE, output_shapes=((4,),)), "which are none"),
    (Result(NONE, output_shapes=(OutputShape((4,)),) * 2), "returned 2 shapes for 1 outputs"),
    (Result(NONE, output_shapes=(OutputShape((4,), False),)), "which say otherwise"),
    (Result(NONE, output_shapes=(OutputShape((-1,)),)), "returned [-1]"),
    (Result(NONE, output_shapes=(OutputShape((2**40,)),)), "returned [1099511627776]"),
    (Result(NONE, output_shapes=(OutputShape((1.5,)),)), "which are none"),
    (Result(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE), "returned 0 shapes for 1 outputs"),
    (Result(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, output_shapes=(OutputShape((4,)),)), "which say otherwise"),
    (Result(NONE, timing=Timing(-1)), "Malformed"),
    (Result(NONE, timing=Timing("soon")), "Malformed"),
    (RuntimeError("out of order"), "RuntimeError: out of order"),
    (KeyError(1), "KeyError: 1"),
]


@pytest.mark.parametrize(("nonsense", "text"), NONSENSE)
def test_an_executor_that_lies(kept, burst, memory, keeper, nonsense, text):
    """What an executor returns or raises that makes no sense is a GENERAL_FAILURE, with a text in the trace that says
    what it was, and the burst goes on.
    """

    class Lying(keeper):
        answer = nonsense

        def execute(self, *arguments):
            found = super().execute(*arguments)
            if isinstance(self.answer, Exception):
                raise self.answer
            return found if self.answer is True else self.answer

    executor = Lying()
    client, pool = burst(kept(executor)), memory()
    packet = client.encode(client_request(pool), measure=True)
    for _ in range(2):
        assert client.send(packet) == (GENERAL_FAILURE, (), (None, None), 0)
        said, _ = client.trace.failure(client.sent, GENERAL_FAILURE)
        assert text in said
    executor.answer = True
    assert client.send(packet).output_shapes == (OutputShape((4,)),)


def test_an_executor_may_refuse(kept, burst, memory, keeper):
    """Error statuses travel as they are, whether they are returned or raised; shapes only with too small outputs."""

    class Refusing(keeper):
        def execute(self, *arguments):
            super().execute(*arguments)
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    executor = Refusing()
    client, pool = burst(kept(executor)), memory()
    for executor.answer in (
        Result(INVALID_ARGUMENT, output_shapes=(OutputShape((4,)),), message="a word"),
        InvalidArgument("a word"),
    ):
        assert client.run(pool) == (INVALID_ARGUMENT, (), (None, None), 0)
        assert client.trace.failure(client.sent, INVALID_ARGUMENT)[0].startswith("a word")
    short = OutputShape((9,), False)
    executor.answer = Result(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, output_shapes=(short,))
    assert client.run(pool) == (ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, (short,), (None, None), 0)
    executor.answer = Result(NONE)
    assert client.run(pool) == (NONE, (), (None, None), 0)


@pytest.mark.parametrize("wire", [2], indirect=True)
def test_deadlines_are_judged_as_everywhere(kept, burst, memory, keeper):
    """A request whose deadline has passed is not executed; one that is done too late is missed; one that the executor
    gives up is missed; and the next one is served.
    """

    class Late(keeper):
        def execute(self, *arguments):
            found = super().execute(*arguments)
            deadline = arguments[3]
            while deadline is not None and clock.now() <= deadline and self.waits:
                pass
            if self.gives_up and deadline is not None:
                raise MissedDeadlineTransient(cause=Cause("executing"))
            return found

    executor = Late()
    executor.waits = executor.gives_up = False
    client, pool = burst(kept(executor)), memory()
    packet = client.encode(client_request(pool))

    def status(deadline):
        client.start(packet, deadline)
        return client.receive(PATIENCE).status

    assert status(None) is NONE
    executions = len(executor.called("execute"))
    assert status(clock.now() - 10**9) is ErrorStatus.MISSED_DEADLINE_PERSISTENT
    assert len(executor.called("execute")) == executions
    executor.waits = True
    for executor.gives_up, given in ((True, 10**8), (False, 4 * 10**8)):  # less is known to be too short then
        assert status(clock.now() + given) in {
            ErrorStatus.MISSED_DEADLINE_TRANSIENT,
            ErrorStatus.MISSED_DEADLINE_PERSISTENT,
        }
    assert len(executor.called("execute")) == executions + 2
    assert status(None) is NONE


def test_the_end_frees_all_entries(kept, burst, memory, keeper, mappings):
    """When the burst ends, the executor is told to let go of all memory; one that has `cancel` hears of the end."""

    class Cancelled(keeper):
        ends = 0

        def cancel(self):
            self.ends += 1

    executor = Cancelled()
    device = kept(executor)
    client, pool = burst(device), memory()
    client.run(pool)
    device.server.stop()
    device.wait_ended()
    assert executor.ends
    assert executor.called("remove") == [[0]]
    assert mappings(pool) == 1


def test_an_executor_that_cannot_remove(kept, burst, memory, keeper):
    """An error of remove_cache_entry is logged, and the burst goes on."""

    class Stubborn(keeper):
        def remove_cache_entry(self, slot):
            super().remove_cache_entry(slot)
            raise RuntimeError("no")

    device = kept(Stubborn())
    client, pool = burst(device), memory()
    client.run(pool)
    client.free_memory(pool)
    device.wait_freed()
    assert client.run(pool).status is NONE


def test_an_offer_that_binds_nothing():
    """Outside of a device there is nothing to bind requests to unless the caller says so."""
    near, far = Channel.pair()
    with near, far, pytest.raises(ValueError, match="prepared=None: this offer has no `bind`"):
        ExecutionBurstServer.create(BurstOffer(None, None, far))


def test_a_client_that_does_not_hand_over_its_memory(kept, burst, memory, keeper):
    """The client's refusal to hand over memory is its error, and the executor never sees the request."""
    executor = keeper()
    client, pool = burst(kept(executor)), memory()
    client.answer = lambda self, slots: self._callback.send([0, []])
    with pytest.raises(GeneralFailure):
        Result(client.run(pool).status).raise_for_status()
    assert not executor.called("execute")
