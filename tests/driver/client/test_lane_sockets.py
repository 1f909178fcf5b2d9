"""Sockets of a lane, in the client: which are kept, and what goes on them besides requests."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from frames import HELD
from waiting import PATIENCE

from burst import ErrorStatus, PeerDied, Timeout
from burst.channel import Channel
from burst.dropped import DropList
from burst.executor import Outcome
from burst.slots import SlotTable
from driver.client.answer_thread import AnswerThread
from driver.client.job import Job
from driver.client.lane_socket import LaneSocket
from driver.client.socket_lane import SocketLane
from driver.client.stream_feed import StreamFeed
from driver.deadlines import Wait
from driver.protocol.lane_codec import encode_outcome
from driver.protocol.stream_terms import GOES_ON, answer_to_steps

ROW = 16  # bytes
MANY = 20_000
"""Numbers that do not fit into one message."""
FIRST = 2**16  # three bytes and more each, as msgpack has them


class NoDevice:
    """Stands in for a connection whose device ends each socket; keeps how long each call would have waited."""

    def __init__(self):
        self.waits = []

    def to_engine(self, timeout=None):
        self.waits.append(timeout)
        near, far = Channel.pair()
        far.close()
        return near


class HungDevice(NoDevice):
    """Opens no socket in time."""

    def to_engine(self, timeout=None):
        self.waits.append(timeout)
        raise Timeout("no message")


class TestLostSockets:
    """The socket of asynchronous executions ends, while the device lives."""

    def test_they_are_closed(self, device, kit):
        """Each is closed and forgotten, and the next execution opens another one."""
        lane = device.connection.lane
        request, _ = kit.request([np.zeros((1, 4), np.float32)], ROW)
        with device.prepare(kit.add_model()) as prepared:
            for _ in range(3):
                assert prepared.execute_async(request).result(kit.patience).status == 0
                (socket,) = lane.sockets
                socket.channel.shutdown()
                kit.until(lambda: not lane.sockets)
                assert socket.channel.fileno() < 0

    def test_the_error_does_not_say_that_the_device_is_gone(self, connect, kit):
        """It has ended the socket alone, after a message that made no sense."""
        device = connect("Slow")
        request, _ = kit.request([np.full((1, 4), HELD, np.float32)], ROW)
        with device.prepare(kit.add_model()) as prepared:
            future = prepared.execute_async(request)
            device.connection.lane.sockets[0].channel.send(["nothing"])
            with pytest.raises(PeerDied, match=r"^the connection to the device has ended; nothing is known"):
                future.result(kit.patience)


class TestManyNumbers:
    """More than a message of 64 KiB holds go in several."""

    def test_freed_memory(self):
        """Each slot is named once."""
        near, far = Channel.pair()
        with near, far:
            socket = LaneSocket(near, None)
            slots = range(FIRST, FIRST + MANY)
            socket.sent.update(slots)
            socket.free(slots)
            told = []
            while len(told) < MANY:
                word, *some = far.receive(0).body
                assert word == "free_memory"
                told += some
        assert sorted(told) == list(slots)

    def test_forgotten_outcomes(self, device, kit):
        """The device is told of all with the next call."""
        lane = device.connection.lane
        request, _ = kit.request([np.zeros((1, 4), np.float32)], ROW)
        with device.prepare(kit.add_model()) as prepared:
            for number in range(MANY):
                lane.forget(2**40 + number)
            assert prepared.execute_fenced(request).result(kit.patience).status == 0
        assert len(lane.forgotten) < MANY // 100

    def test_forgotten_outcomes_that_cannot_be_sent(self):
        """Wait for another socket."""
        connection = NoDevice()
        lane = SocketLane(connection)
        for number in range(MANY):
            lane.forget(number)
        with pytest.raises(PeerDied):
            lane.ending(1)
        assert sorted(lane.forgotten) == list(range(MANY))


class TestOpening:
    """A first execution opens its socket by its own end."""

    @pytest.mark.parametrize("way", ["begin", "launch"])
    def test_a_device_that_opens_none(self, kit, way):
        """The wait for the socket ends with the caller's."""
        connection = HungDevice()
        lane = SocketLane(connection)
        request, _ = kit.request([np.zeros((1, 4), np.float32)], ROW)
        with pytest.raises(Timeout):
            getattr(lane, way)(1, Job(request, Wait.of(kit.patience, None)), None, None)
        (waited,) = connection.waits
        assert 0 < waited <= kit.patience

    def test_another_caller_that_waits_for_one(self, kit):
        """Asynchronous executions share a socket: one that comes while another thread opens it waits no longer."""
        opens, may_end = threading.Event(), threading.Event()

        class SlowDevice(NoDevice):
            def to_engine(self, timeout=None):
                opens.set()
                may_end.wait(kit.patience)
                raise PeerDied("the device is gone")

        connection = SlowDevice()
        lane = SocketLane(connection)
        request, _ = kit.request([np.zeros((1, 4), np.float32)], ROW)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(lane.begin, 1, Job(request, Wait.of(None, None)), None, None)
            assert opens.wait(kit.patience)
            with pytest.raises(Timeout, match="no socket"):
                lane.begin(1, Job(request, Wait.of(0.01, None)), None, None)
            assert not first.done()
            may_end.set()
            with pytest.raises(PeerDied):
                first.result(kit.patience)


class TestCallbacks:
    """The thread of asynchronous executions calls the program back."""

    def tell(self, slots):
        """Tell nobody of freed memory."""

    def test_they_come_after_all_answers_that_are_there(self, kit):
        """A callback that takes its time holds up no execution that has been answered."""
        near, far = Channel.pair()
        with far:
            answers = AnswerThread(LaneSocket(near, SlotTable(DropList(self.tell))), lambda: None)
            request, _ = kit.request([np.zeros((1, 4), np.float32)], ROW)
            job = Job(request, Wait.of(None, None))
            first, second, third = (answers.launch(n, (1, job, object()), lambda result: result) for n in range(3))
            begun, may_end, seen = threading.Event(), threading.Event(), []

            def hold(_):
                begun.set()
                may_end.wait(kit.patience)

            first.add_done_callback(hold)
            second.add_done_callback(lambda _: seen.append(third.done()))
            third.add_done_callback(lambda _: seen.append(True))
            success = encode_outcome(Outcome(ErrorStatus.NONE))
            far.send_raw(b"\x92\x00" + success)
            assert begun.wait(kit.patience)
            far.send_raw(b"\x92\x01" + success)
            far.send_raw(b"\x92\x02" + success)
            may_end.set()
            kit.until(lambda: len(seen) == 2)
        assert seen == [True, True]

    def test_a_stream_holds_them_up_for_some_steps_only(self, kit):
        """However many results a stream has there, an execution that was answered is called back between them."""
        near, far = Channel.pair()
        may_go_on, seen = threading.Event(), []
        feed = StreamFeed(64, None, is_latest=False)

        def take(result, goes_on, count):
            may_go_on.wait(kit.patience)
            seen.append("step")

        feed.take = take
        with far:
            answers = AnswerThread(LaneSocket(near, SlotTable(DropList(self.tell))), lambda: None)
            answers.open_stream(7, lambda _: b"\x90", feed)
            request, _ = kit.request([np.zeros((1, 4), np.float32)], ROW)
            launched = answers.launch(1, (1, Job(request, Wait.of(None, None)), object()), lambda result: result)
            launched.add_done_callback(lambda _: seen.append("called back"))
            success = encode_outcome(Outcome(ErrorStatus.NONE))
            step = answer_to_steps(7, success, GOES_ON)
            for answer in (step, b"\x92\x01" + success, *[step] * 150):
                far.send_raw(answer)
            may_go_on.set()
            kit.until(lambda: len(seen) == 152)
        assert seen.index("called back") <= 64


def test_a_library_may_make_all_sockets_non_blocking():
    """As gevent does: a request waits for its answer all the same."""
    near, far = Channel.pair()
    os.set_blocking(near.socket.fileno(), False)
    socket = LaneSocket(near, SlotTable(DropList(NoDevice().to_engine)))
    with ThreadPoolExecutor(1) as pool:
        for number in range(1, 100):
            asked = pool.submit(socket.ask, number, None, b"request", None)
            message = far.receive_bytes(PATIENCE)
            far.send_raw(message[:10] + b"%d" % number)
            assert asked.result() == b"%d" % number
    near.close()
    far.close()
