"""Asynchronous executions: many in flight, completed by one thread, and given up when nothing waits for them."""

import gc
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from frames import HELD
from inside import model_number_of
from waiting import nested

import driver
from burst import ErrorStatus, Memory, PeerDied, Request, RequestArgument, Timeout
from burst.channel import Channel, pack
from driver.protocol.lane_codec import in_turn, launch, launch_behind

ROW = 16  # bytes


def row(n, source, target, memory):
    """From row to row of a memory."""
    places = (RequestArgument(offset=ROW * at, length=ROW) for at in (source + n, target + n))
    return Request(*((place,) for place in places), (memory,))


def threads():
    return {thread.name for thread in threading.enumerate()}


def test_hundreds_in_flight(kit, device):
    """They are executed side by side with one thread here, each once, and each calls back."""
    memory, count = Memory.create(ROW * 1200), 600
    rows = memory.asarray(np.float32, (2 * count, 4))
    rows[:count] = np.arange(count)[:, None]
    called = []
    with device.prepare(kit.add_model()) as prepared:
        before = threading.active_count()
        futures = [prepared.execute_async(row(n, 0, count, memory), callback=called.append) for n in range(count)]
        assert threading.active_count() <= before + 2  # one completes them, one tells the device what was dropped
        for n, future in enumerate(futures):
            assert future.result(kit.patience).outputs[0].tolist() == [[n + 1] * 4]
        kit.until(lambda: len(called) == count)
    assert set(called) == set(futures)


def test_one_request_many_times_at_once(kit, device):
    """A request that is bound once is executed by several threads of the device, each on memory of its own."""
    with device.prepare(kit.conv_model()) as prepared:
        inputs = [np.random.default_rng(3).random(prepared.model.main.operands[i].dimensions, np.float32) for i in (0,)]
        (wanted,) = prepared.run(*inputs)
        request, _ = kit.request(inputs, wanted.nbytes)
        for _ in range(10):
            launched = [prepared.execute_async(request, measure=True) for _ in range(5)]
            results = [future.result(kit.patience) for future in launched]
            assert np.array_equal(results[-1].outputs[0], wanted)  # all write it: looked at once all are done
            for result in results:
                nested(0, result.timing.time_on_device, result.timing.time_in_driver)
            results[-1].outputs[0][...] = 0


def test_too_many(kit, place):
    """The one beyond the limit says so with the figure, and nothing else suffers."""
    path = Path(f"{place.path}-home/.config/burst/limits.toml")
    path.parent.mkdir(parents=True)
    path.write_text("client_async = 3")
    with driver.connect(kit.odd("Slow")) as device, device.prepare(kit.add_model()) as prepared:
        requests = [kit.request([np.full((1, 4), 9, np.float32)], ROW) for _ in range(4)]
        futures = [prepared.execute_async(request) for request, _ in requests]
        refused = futures.pop().result(kit.patience)
        assert refused.status == ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
        assert "client_async = 3 is reached, with 3 in use" in refused.message
        for _, (x,) in requests:
            x[...] = 0
        assert {future.result(kit.patience).status for future in futures} == {ErrorStatus.NONE}
        assert prepared.execute_async(requests[0][0]).result(kit.patience).status == ErrorStatus.NONE


class TestWaiting:
    """For as long as the caller says."""

    def test_a_timeout(self, connect, kit):
        """The future raises it, and later ones are completed as ever."""
        with connect("Slow").prepare(kit.add_model()) as prepared:
            request, (x,) = kit.request([np.full((1, 4), 9, np.float32)], ROW)
            with pytest.raises(Timeout, match=r"no result within 0\.05 s") as caught:
                prepared.execute_async(request, timeout=0.05).result(kit.patience)
            assert caught.value.phase == "waiting for the answer"
            x[...] = 0
            assert prepared.execute_async(request, timeout=kit.patience).result(kit.patience).status == 0

    def test_a_device_that_does_not_answer(self, kit, home):
        """At its deadline a future has a result whatever the device does."""
        with kit.living("reference") as device, device.prepare(kit.add_model()) as prepared:
            request, _ = kit.request([np.zeros((1, 4), np.float32)], ROW)
            assert prepared.execute_async(request).result(kit.patience).status == 0
            os.kill(device.engine_pid, signal.SIGSTOP)
            states = [path / "stat" for path in Path(f"/proc/{device.engine_pid}/task").iterdir()]
            kit.until(lambda: {path.read_text().rpartition(") ")[2][0] for path in states} == {"T"})
            try:
                result = prepared.execute_async(request, deadline=time.monotonic() + 0.3).result(kit.patience)
            finally:
                os.kill(device.engine_pid, signal.SIGCONT)
            assert result.status == ErrorStatus.MISSED_DEADLINE_TRANSIENT
            assert result.cause.phase == "waiting for the answer"
            assert prepared.execute_async(request).result(kit.patience).status == 0

    def test_a_deadline_in_the_past(self, device, kit):
        """Nothing is sent."""
        with device.prepare(kit.add_model()) as prepared:
            request, _ = kit.request([np.zeros((1, 4), np.float32)], ROW)
            result = prepared.execute_async(request, deadline=time.monotonic() - 1).result(0)
            assert (result.status, result.cause.phase) == (ErrorStatus.MISSED_DEADLINE_PERSISTENT, "before start")


class TestEnds:
    """Of the connection, and of the thread."""

    def test_a_device_that_is_closed(self, connect, kit):
        """What is pending raises PeerDied, and what comes later does, too."""
        device = connect("Slow")
        prepared = device.prepare(kit.add_model())
        request, _ = kit.request([np.full((1, 4), 9, np.float32)], ROW)
        futures = [prepared.execute_async(request) for _ in range(3)]
        device.close()
        for future in [*futures, prepared.execute_async(request)]:
            with pytest.raises(PeerDied):
                future.result(kit.patience)
        kit.until(lambda: "burst-async" not in threads())

    def test_a_device_that_is_dropped(self, connect, kit):
        """Its thread ends, too."""
        device = driver.connect("reference")
        prepared = device.prepare(kit.add_model())
        request, _ = kit.request([np.zeros((1, 4), np.float32)], ROW)
        kit.until(lambda: "burst-async" not in threads())
        assert prepared.execute_async(request).result(kit.patience).status == 0
        assert "burst-async" in threads()
        del device, prepared
        gc.collect()
        kit.until(lambda: "burst-async" not in threads())

    @pytest.mark.parametrize(
        "junk",
        [
            pack(["execute", 0, [], None]),
            pack([1, 2, 3, []]),
            launch(1, None, None, b"")[:20],
            launch(1, None, None, b"").replace(b"\xcf", b"\xd3"),
            pack(["cancel", "x"]),
            pack(["forget", "x"]),
            pack(["free_memory", "x"]),
            pack(["nothing"]),
            pack([]),
        ],
    )
    def test_messages_that_make_no_sense(self, connect, kit, junk):
        """End the connection, and nothing else; another one can be opened."""
        device = connect()
        for _ in range(2):
            with opened(device) as channel:
                channel.send_raw(junk)
                with pytest.raises(PeerDied):
                    channel.receive(kit.patience)

    def test_a_request_that_makes_no_sense(self, connect, kit):
        """Is answered under its number, in whatever way it is to be executed."""
        with opened(connect()) as channel:
            for ask in (in_turn, launch_now, launch_now_with_a_fence):
                for request in (["x"], [1, [], [], [], False, None], [], "x", {}):
                    channel.send_raw(ask(7, None, pack([request])[1:]))
                    number, (status, *_) = channel.receive(kit.patience).body
                    assert (number, status > 0) == (7, True)

    def test_a_number_that_is_pending(self, connect, kit):
        """Ends the socket: which of the two an answer is for, nobody could tell."""
        device = connect("Slow")
        with device.prepare(kit.add_model()) as prepared, opened(device) as channel:
            memory = Memory.create(2 * ROW)
            memory.asarray(np.float32, 4)[:] = HELD
            channel.send(["memory", 0, memory.to_wire()], [memory.fd])
            arguments = [[0, 0, ROW, []]], [[0, ROW, ROW, []]]
            packed = pack([model_number_of(prepared), *arguments, [0], False, None])
            for _ in range(2):
                channel.send_raw(launch(7, None, None, packed))
            with pytest.raises(PeerDied):
                channel.receive(kit.patience)


def launch_now(number, end, request):
    return launch(number, end, None, request)


def launch_now_with_a_fence(number, end, request):
    return launch_behind(0, number, end, None, request)


def opened(device):
    """A socket of the client's lane."""
    _, (fd, life) = device.call("lane")
    os.close(life)
    return Channel.from_fd(fd)
