"""Streams of results: an execution that is repeated on what it leaves, by the engine of its device, or here."""

import asyncio
import contextlib
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from counters import DONE, FEED, LIMIT, STEP, VALUE, begin, counter, doubling, numbers
from kills import SIDES, kill

import driver
from burst import (
    ErrorStatus,
    GeneralFailure,
    Memory,
    MissedDeadlinePersistent,
    MissedDeadlineTransient,
    PeerDied,
    Request,
    RequestArgument,
    Result,
    ResultsHeld,
)
from driver import BufferDesc, BufferRole
from driver.client.stream_feed import StreamFeed
from driver.client.stream_plan import StreamPlan
from driver.protocol.stream_terms import StreamTerms
from fmq.clock import FOREVER

TERMS = StreamTerms(number=0, end=FOREVER, most=1, room=1, stop=None, requests=())


class TestEnds:
    @pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 23])
    def test_a_count(self, counting, most):
        """So many results, each from the one before it; then the state is that of the last one."""
        with counting.stream_results(begin(), feedback=FEED, most=most, also=[VALUE]) as stream:
            assert numbers(stream) == list(range(1, most + 1))
            assert stream.ended_by == "most"
            assert stream.state[STEP].tolist() == [most] * 4

    @pytest.mark.parametrize("limit", [1, 2, 9])
    def test_an_output_that_is_true(self, counting, limit):
        """The step that makes it true is the last one, and no step follows it on the device."""
        with counting.stream_results(begin(limit), feedback=FEED, until=DONE) as stream:
            results = [result.outputs[DONE].all() for result in stream]
            assert results == [False] * (limit - 1) + [True]
            assert stream.ended_by == "until"
            state = np.zeros(4, np.float32)
            stream.state[STEP].copy_to(state)
            assert state.tolist() == [limit] * 4

    @pytest.mark.parametrize("values", [6, [9, 6]])
    def test_a_value(self, counting, values):
        """An output that has one of some values in all of its elements."""
        with counting.stream_results(begin(), feedback=FEED, until={VALUE: values}) as stream:
            assert numbers(stream) == [1, 2, 3, 4, 5, 6]

    def test_one_element_is_not_all(self, counting):
        """An output with one true element of four does not end it."""
        limits = begin() | {LIMIT: np.array([1, 5, 5, 5], np.float32)}
        assert len([0 for _ in counting.stream_results(limits, feedback=FEED, until=DONE)]) == 5

    def test_it_goes_on_from_its_state(self, counting):
        """A second stream from the first one's buffers is what one long stream would have been."""
        first = counting.stream_results(begin(), feedback=FEED, most=4)
        assert [result.outputs[VALUE].size for result in first] == [0] * 4  # it has stayed on the device
        second = counting.stream_results(begin() | first.state, feedback=FEED, most=3, also=[VALUE])
        assert numbers(second) == [5, 6, 7]

    def test_a_state_before_the_end(self, counting):
        """The device is ahead of what the caller has seen: there is no state to go on from."""
        stream = counting.stream_results(begin(), feedback=FEED)
        next(stream)
        with pytest.raises(ValueError, match="has not ended by itself"):
            _ = stream.state
        stream.close()
        assert list(stream) == []

    def test_the_deadline(self, connect, kit):
        """A step that is not done by then is the end, with the error of any other execution."""
        with connect("Slow").prepare(kit.add_model()) as prepared, prepared.burst() as burst:
            inputs, deadline = [np.zeros((1, 4), np.float32)], time.monotonic() + 0.5  # the second one takes a second
            with pytest.raises((MissedDeadlineTransient, MissedDeadlinePersistent)):
                list(burst.stream_results(inputs, feedback=FEED, deadline=deadline))


def test_asyncio(counting):
    """Two streams in one loop: each is what it is alone, and another task gets its turns."""

    async def taken(most):
        stream = counting.stream_results(begin(), feedback=FEED, most=most, also=[VALUE])
        return [int(result.outputs[VALUE][0]) async for result in stream]

    async def both():
        return await asyncio.gather(taken(30), taken(20))

    assert asyncio.run(both()) == [list(range(1, 31)), list(range(1, 21))]


def test_a_task_that_is_cancelled(counting):
    """It stops waiting; the stream gives its next result to whoever asks then."""

    async def run():
        stream = counting.stream_results(begin(), feedback=FEED, most=5, also=[VALUE])
        waiting = asyncio.ensure_future(anext(stream))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return [int(result.outputs[VALUE][0]) async for result in stream]

    assert asyncio.run(run())[-1] == 5


@pytest.mark.parametrize("asked", [{}, {"policy": "latest"}])
def test_a_result_that_the_caller_changes(device, asked):
    """The next step never reads it: it is read-only where that step reads its memory, and else the caller's own."""
    found = []
    with device.prepare(counter()) as prepared, prepared.burst(**asked) as burst:
        for result in burst.stream_results(begin(), feedback=FEED, most=20, also=[VALUE, DONE]):
            found.append(int(result.outputs[VALUE][0]))
            with contextlib.suppress(ValueError):
                result.outputs[VALUE][...] = -5
            result.outputs[DONE][...] = True
    assert found == (sorted(set(found)) if asked else list(range(1, 21)))
    assert found[-1] == 20


def test_one_that_is_closed_while_a_task_waits(connect, kit):
    """The task, which waits for the next result, finds the stream at its end."""

    async def run(burst):
        stream = burst.stream_results([np.zeros((1, 4), np.float32)], feedback=FEED)
        assert await anext(stream)
        waiting = asyncio.ensure_future(anext(stream, "the end"))
        await asyncio.sleep(0)
        stream.close()
        return await asyncio.wait_for(waiting, kit.patience)

    with connect("Slow").prepare(kit.add_model()) as prepared, prepared.burst() as burst:
        assert asyncio.run(run(burst)) == "the end"


class TestRoom:
    def test_results_that_are_held(self, counting):
        """They stay what they are; when all memory is in them, that is said, and goes on once some are dropped."""
        stream = counting.stream_results(begin(), feedback=FEED, also=[VALUE], most=50)
        held = [next(stream) for _ in range(5)]
        with pytest.raises(ResultsHeld, match="all 4 results"):
            next(stream)
        assert [int(result.outputs[VALUE][0]) for result in held] == [1, 2, 3, 4, 5]
        del held[1:]
        assert numbers(stream) == list(range(6, 51))
        assert held[0].outputs[VALUE].tolist() == [1] * 4

    def test_the_newest(self, device, kit):
        """By policy "latest" the device does not wait for the caller, who gets the newest result, to keep."""
        with device.prepare(counter()) as prepared, prepared.burst(policy="latest") as burst:
            stream = burst.stream_results(begin(), feedback=FEED, most=1000, also=[VALUE])
            first = next(stream)
            kit.until(lambda: stream.skipped >= 100)
            second = next(stream)
            rest = numbers(stream)
        assert int(second.outputs[VALUE][0]) > 100
        assert int(first.outputs[VALUE][0]) == 1
        assert not rest or (rest == sorted(set(rest)) and rest[-1] == 1000)

    def test_two_clients(self, connect, kit):
        """On a device that runs one execution at a time, a stream without end leaves another client its turns."""

        def take():
            while not stop.is_set():
                next(endless)
                taken.append(1)

        with contextlib.ExitStack() as stack:
            models = [stack.enter_context(connect("Single").prepare(counter(0.0))) for _ in range(2)]
            ours, theirs = (stack.enter_context(model.burst(depth=8)) for model in models)
            endless = ours.stream_results(begin(), feedback=FEED, most=2**20)
            taken, stop, thread = [], threading.Event(), threading.Thread(target=take)
            stack.callback(endless.close)
            stack.callback(thread.join)
            stack.callback(stop.set)
            thread.start()
            kit.until(lambda: len(taken) > 20)
            before = len(taken)
            assert len([0 for _ in theirs.stream_results(begin(), feedback=FEED, most=200)]) == 200
            kit.until(lambda: len(taken) > before)


class TestBadInput:
    @pytest.mark.parametrize(
        ("asked", "error", "said"),
        [
            ({"feedback": {"valeu": STEP}}, ValueError, "there is no output 'valeu'"),
            ({"feedback": {VALUE: "stap"}}, ValueError, "there is no input 'stap'"),
            ({"feedback": {VALUE: STEP, "output_1": STEP}}, ValueError, "'output_0' already; feed each input once"),
            ({"feedback": {DONE: STEP}}, ValueError, "the output is TENSOR_BOOL8, and the input TENSOR_FLOAT32"),
            ({"feedback": [VALUE]}, TypeError, "give a dict of outputs"),
            ({"until": "dnoe"}, ValueError, "there is no output 'dnoe'"),
            ({"until": {VALUE: []}}, ValueError, "0 values; give 1 to 64"),
            ({"until": {VALUE: 1, DONE: 1}}, TypeError, "a dict of one output"),
            ({"until": {VALUE: 2**70}}, ValueError, "from -9223372036854775808 to 9223372036854775807"),
            ({"until": {VALUE: 1.5}}, TypeError, "until={'output_0': 1.5}: give an integer, or a list of some"),
            ({"until": {VALUE: ["2"]}}, TypeError, "give an integer, or a list of some"),
            ({"most": 0}, ValueError, "from 1 to 1048576"),
            ({"most": 2**20 + 1}, ValueError, "from 1 to 1048576"),
            ({"most": 1.5}, TypeError, "most=1.5: give a number of steps"),
            ({"checkpoint": 0}, ValueError, "checkpoint=0: give a number of steps, from 1"),
            ({"also": VALUE}, TypeError, "give a list of names"),
            ({"also": None}, TypeError, "give a list of names"),
            ({"also": ["x"]}, ValueError, "there is no output 'x'"),
        ],
    )
    def test_words(self, counting, asked, error, said):
        """What does not fit is refused by its name, before anything is sent."""
        with pytest.raises(error, match=said):
            counting.stream_results(begin(), **({"feedback": FEED} | asked))

    def test_shapes(self, device):
        """An output that can never be that input."""
        builder = driver.ModelBuilder()
        x = builder.input("float32", (2, 4))
        builder.output(builder.operation("RESHAPE", x, np.array([8], np.int32)))
        said = pytest.raises(ValueError, match=r"the output has shape \[8\], and the input takes \[2, 4\]")
        with device.prepare(builder.build()) as prepared, prepared.burst() as burst, said:
            burst.stream_results([np.zeros((2, 4), np.float32)], feedback={VALUE: STEP})

    def test_what_ends_no_stream(self):
        """An output whose values numpy does not know, and one of more elements than are looked at."""
        bits = driver.load(Path(__file__).parents[1] / "importers/pt2_files/trees.pt2")
        with pytest.raises(ValueError, match="that output is TENSOR_BFLOAT16; convert it"):
            StreamPlan.of(bits, {}, until="more.1.0", most=1, also=())
        builder = driver.ModelBuilder()
        x = builder.input("float32", (64, 65))
        builder.output(builder.operation("ADD", x, x, 0))
        with pytest.raises(ValueError, match="that output has 4160 elements; at most 4096 end a stream"):
            StreamPlan.of(builder.build(), {}, until=VALUE, most=1, also=())

    @pytest.mark.parametrize("values", [np.array([9, 6]), {9, 6}, np.int32(6)])
    def test_values_of_any_kind(self, counting, values):
        """Arrays and sets of integers, and numbers of numpy, are values of an output too."""
        assert len([0 for _ in counting.stream_results(begin(), feedback=FEED, until={VALUE: values})]) == 6

    def test_a_shape_that_does_not_stay(self, device):
        """A state that results have is read where they lie, and cannot grow there: the error says what to leave out."""
        said = pytest.raises(GeneralFailure, match=r"gives dimensions .*: leave it out of these")
        with device.prepare(doubling()) as prepared, prepared.burst() as burst, said:
            list(burst.stream_results([np.ones(1, np.float32)], feedback=FEED, also=[VALUE]))

    def test_inputs(self, counting):
        """Arrays of another shape are refused as `run` refuses them."""
        with pytest.raises(ValueError, match=r"has shape \(5,\); the model takes \(4,\)"):
            counting.stream_results(begin() | {LIMIT: np.zeros(5, np.float32)}, feedback=FEED)

    def test_a_burst_that_is_closed(self, device, feeds, kit):
        """Its streams end with it: whoever takes a result is told, and the device does nothing more for them."""
        with device.prepare(counter()) as prepared:
            burst = prepared.burst()
            stream, done = (burst.stream_results(begin(), feedback=FEED, most=most) for most in (2**20, 1))
            assert [len(list(done)), done.ended_by] == [1, "most"]
            next(stream)
            assert len(feeds) == 1
            burst.close()
            burst.close()
            for _ in range(2):
                with pytest.raises(GeneralFailure, match="this burst was closed before the result came"):
                    next(stream)
            assert list(done) == []
            del stream
            kit.until(lambda: not feeds)

    def test_a_closed_burst(self, device):
        """It opens no stream."""
        with device.prepare(counter()) as prepared:
            burst = prepared.burst()
            burst.close()
            with pytest.raises(ValueError, match="closed"):
                burst.stream_results(begin(), feedback=FEED)


class ByHand:
    """Requests of `counter` on two buffers that take turns, opened as a client of another kind might."""

    def __init__(self, prepared):
        self.prepared, role = prepared, [BufferRole(0, 0)]
        self.buffers = [prepared.device.allocate(BufferDesc(), [prepared], role, role) for _ in range(2)]
        self.buffers[0].copy_from(np.zeros(4, np.float32))
        self.memory = Memory.create(64)

    def open(self, room=2, most=2**20):
        """The feed of a stream; its lane."""
        inputs = RequestArgument(pool=0), RequestArgument(pool=2, length=16)
        outputs = RequestArgument(pool=1), RequestArgument(pool=2, offset=16, length=4)
        turns = self.buffers, self.buffers[::-1]
        requests = [Request(inputs, outputs, (*turn, self.memory)) for turn in (turns[0], turns[1], turns[0])]
        home, feed = self.prepared.executor.present_home(), StreamFeed(room, None, is_latest=False)
        home.connection.lane.open_stream(home.number, requests, TERMS._replace(most=most, room=room), feed)
        return feed


def taken(feed, kit):
    feed.news().result(kit.patience)
    return feed.pop(lambda _, result: result)


class TestOnBuffers:
    def test_two_streams_on_one_buffer(self, kit, device):
        """The second one is refused while the first has not ended, and runs when that was closed."""
        with device.prepare(counter()) as prepared:
            by_hand = ByHand(prepared)
            first = by_hand.open(room=1)  # then it rests, and is over as soon as it is closed
            assert taken(first, kit)[0].status == ErrorStatus.NONE
            refused, goes_on = taken(by_hand.open(), kit)
            assert (refused.status, goes_on) == (ErrorStatus.INVALID_ARGUMENT, 3)
            assert "which has not ended: close that, or use another" in refused.message
            first.close()
            assert taken(by_hand.open(), kit)[0].status == ErrorStatus.NONE

    def test_room(self, kit, device):
        """Without room a stream rests; it goes on with as much as it is given."""
        with device.prepare(counter()) as prepared:
            by_hand = ByHand(prepared)
            feed = by_hand.open(room=2)
            assert [taken(feed, kit)[0].status for _ in range(2)] == [0, 0]
            assert prepared.run(*begin().values())[0].tolist() == [1] * 4  # the device has nothing else to do
            assert not feed.news().is_done
            feed.give_room(3)
            assert taken(feed, kit)[0].status == ErrorStatus.NONE
            feed.close()

    def test_more_room_than_there_may_be(self, kit, device):
        """That is no client that follows the protocol: its connection ends, and with it what is pending."""
        with device.prepare(counter()) as prepared:
            by_hand = ByHand(prepared)
            feed = by_hand.open(room=1)
            taken(feed, kit)
            feed.give_room(10_000)
            with pytest.raises(PeerDied):
                taken(feed, kit)

    def test_a_buffer_that_is_released(self, kit, device):
        """The step that needs it fails, and is the last one."""
        with device.prepare(counter()) as prepared:
            by_hand = ByHand(prepared)
            feed = by_hand.open(room=1)
            taken(feed, kit)
            for buffer in by_hand.buffers:
                buffer.close()
            feed.give_room(2)
            result, goes_on = taken(feed, kit)
            assert (result.status, goes_on) == (ErrorStatus.INVALID_ARGUMENT, 3)


def test_news_are_told_at_once():
    """The event loop of a task that waits is told while more answers arrive, which another thread takes first."""
    feed, told = StreamFeed(2, None, is_latest=False), []
    feed.news().when_done(told.append)
    feed.take(Result(ErrorStatus.NONE), 0, 1)
    assert len(told) == 1


@contextlib.contextmanager
def recovering(depth=2):
    """A device, and a burst there that recovers."""
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(driver.connect("reference"))
        prepared = stack.enter_context(device.prepare(counter()))
        yield device, stack.enter_context(prepared.burst(recover=True, depth=depth))


class TestDeath:
    def test_of_the_engine(self, place, kit):
        """Killed in mid-stream: who waits for a result is told within the time of any other death."""
        with driver.connect("reference") as device, device.prepare(counter()) as prepared, prepared.burst() as burst:
            stream = burst.stream_results(begin(), feedback=FEED, also=[VALUE])
            assert [next(stream).outputs[VALUE].tolist()[0] for _ in range(2)] == [1, 2]
            for process in place.held():
                with process:
                    process.kill(signal.SIGKILL)
                    assert process.has_ended()
            with pytest.raises(PeerDied):
                numbers(stream)

    @pytest.mark.parametrize("side", SIDES)
    @pytest.mark.parametrize("taken", [0, 1, 5, 6, 7, 20])
    def test_with_recovery(self, place, taken, side):
        """Killed in mid-stream, at its first step or at a checkpoint: the caller gets each result once, and is told how
        many steps were repeated.
        """
        with recovering() as (device, burst):
            stream = burst.stream_results(begin(), feedback=FEED, also=[VALUE], most=30, checkpoint=6)
            found = [int(next(stream).outputs[VALUE][0]) for _ in range(taken)]
            kill(device, side)
            found += numbers(stream)
        assert found == list(range(1, 31))
        assert (stream.ended_by, stream.state[STEP].tolist()) == ("most", [30] * 4)
        is_before_checkpoint = side == "engine" and taken in {1, 7}  # whatever was on its way
        assert is_before_checkpoint <= stream.repeated <= 6

    @pytest.mark.integration
    def test_many_kills(self, place):
        """At random steps of one stream: all results, in order, none twice."""
        kills, chance = 5, random.Random(42)
        most, moments = 40 * kills, {chance.randrange(40 * n + 1, 40 * n + 40) for n in range(kills)}
        with recovering(depth=8) as (device, burst):
            stream = burst.stream_results(begin(), feedback=FEED, also=[VALUE], most=most, checkpoint=16)
            for n, result in enumerate(stream, 1):
                assert result.outputs[VALUE].tolist() == [n] * 4
                if n in moments:
                    kill(device, "engine")
        assert (n, stream.ended_by) == (most, "most")
        assert stream.repeated <= 16 * kills

    def test_asyncio_with_recovery(self, place):
        """A state that stays on the device goes on from the checkpoint, until an output ends it."""

        async def run(device, burst):
            stream, count = burst.stream_results(begin(25), feedback=FEED, until=DONE, checkpoint=10), 0
            async for _ in stream:
                count += 1
                if count == 13:
                    kill(device, "engine")
            state = np.zeros(4, np.float32)
            stream.state[STEP].copy_to(state)
            return count, stream.ended_by, state.tolist(), stream.repeated > 0

        with recovering() as (device, burst):
            assert asyncio.run(run(device, burst)) == (25, "until", [25] * 4, True)

    def test_buffers_with_recovery(self, place):
        """A stream that begins with the state of another one keeps what that was."""
        with recovering() as (device, burst):
            first = burst.stream_results(begin(), feedback=FEED, most=4)
            assert len(list(first)) == 4
            stream = burst.stream_results(begin() | first.state, feedback=FEED, also=[VALUE], most=9)
            found = [int(next(stream).outputs[VALUE][0])]
            kill(device, "both")
            assert found + numbers(stream) == list(range(5, 14))

    @pytest.mark.parametrize("most", [1, 5, 6, 7, 12, 30])
    def test_checkpoints_without_a_death(self, device, most):
        """Results, ends and state are those of one piece; nothing was repeated."""
        with device.prepare(counter()) as prepared, prepared.burst(recover=True) as burst:
            stream = burst.stream_results(begin(), feedback=FEED, also=[VALUE], most=most, checkpoint=6)
            assert numbers(stream) == list(range(1, most + 1))
            assert (stream.ended_by, stream.repeated, stream.state[STEP].tolist()) == ("most", 0, [most] * 4)
            burst.close()
            assert list(stream) == []

    def test_of_the_client(self, shared, kit, connect):
        """A device that runs one execution at a time is free again when the client of an endless stream was killed."""
        code = """
import sys
sys.path[:0] = sys.argv[1:]
import driver, numpy as np
from test_result_streams import FEED, begin, counter
with driver.connect("burst_test_devices.odd:Single").prepare(counter(0.0)) as prepared:
    with prepared.burst(depth=8, policy="latest") as burst:
        for result in burst.stream_results(begin(), feedback=FEED, most=2**20):
            print("another", flush=True)
"""
        here = Path(__file__).parent
        with connect("Single").prepare(counter(0.0)) as prepared:
            client = kit.python(code, here, here.parent, here.parents[1], stdout=subprocess.PIPE)
            with client, client.stdout:
                assert client.stdout.readline() == b"another\n"
                client.kill()
            assert prepared.run(*begin().values())[0].tolist() == [0] * 4

    def test_a_stream_that_is_dropped(self, device, feeds, kit):
        """It ends without `close`: nothing of it is kept, once the thread that takes results lets go of it."""
        with device.prepare(counter()) as prepared, prepared.burst() as burst:
            stream = burst.stream_results(begin(), feedback=FEED)
            next(stream)
            assert len(feeds) == 1
            del stream
            kit.until(lambda: not feeds)


class TestElsewhere:
    """Where no engine can repeat the steps, the burst is run again for each result."""

    def test_in_this_process(self):
        """The same results, ends and state, from the CPU of this process."""
        with driver.compile(counter(), devices=["cpu"]) as compiled, compiled.burst() as burst:
            stream = burst.stream_results(begin(4), feedback=FEED, until=DONE)
            assert numbers(stream) == [1, 2, 3, 4]
            assert stream.ended_by == "until"
            assert stream.state[STEP].tolist() == [4] * 4
            again = burst.stream_results(begin() | stream.state, feedback=FEED, most=2)
            assert numbers(again) == [5, 6]

            async def taken():
                stream = burst.stream_results(begin(), feedback=FEED, most=3)
                return [int(result.outputs[VALUE][0]) async for result in stream]

            assert asyncio.run(taken()) == [1, 2, 3]
