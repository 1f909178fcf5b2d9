"""Fenced executions: they run after their fences, in chains without us; what cannot run is told, too."""

import asyncio
import concurrent.futures
import contextlib
import fcntl
import os
import select
import signal
import socket
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from inside import lane_of
from waiting import PATIENCE, at_least, nested

from burst import (
    BurstError,
    ErrorStatus,
    InvalidArgument,
    Memory,
    MissedDeadlineTransient,
    PeerDied,
    Request,
    RequestArgument,
    ResourceExhaustedTransient,
    Timeout,
)
from burst.channel import pack
from driver import BufferDesc, BufferRole, DriverError, FenceState
from driver.engine.limits import Limits
from driver.nn import Model, Operand, Operation, Subgraph
from driver.protocol import fences
from driver.protocol.fences import ERROR_COUNT, kind_of, look
from driver.protocol.lane_codec import launch_behind, question
from driver.vts.qos import endless

SIGNALED, ERROR, ACTIVE, UNKNOWN = FenceState.SIGNALED, FenceState.ERROR, FenceState.ACTIVE, FenceState.UNKNOWN
NONE, GENERAL_FAILURE = ErrorStatus.NONE, ErrorStatus.GENERAL_FAILURE
MISSED, NEVER_FITS = ErrorStatus.MISSED_DEADLINE_TRANSIENT, ErrorStatus.MISSED_DEADLINE_PERSISTENT
ROW = 16  # bytes


async def awaited(execution):
    return await execution


class Rows:
    """Rows of four floats in one memory, and requests from one row to another."""

    def __init__(self, count):
        self.memory = Memory.create(ROW * count)
        self.array = self.memory.asarray(np.float32, (count, 4))

    def request(self, source, target, nbytes=ROW, dimensions=()):
        return Request(
            (RequestArgument(offset=ROW * source, length=ROW, dimensions=dimensions),),
            (RequestArgument(offset=ROW * target, length=nbytes, dimensions=dimensions),),
            (self.memory,),
        )


@pytest.fixture
def rows():
    return Rows(64)


@pytest.fixture
def gate():
    """An eventfd that is not signalled yet."""
    fd = os.eventfd(0, os.EFD_CLOEXEC)
    yield fd
    os.close(fd)


@pytest.fixture
def fd_of():
    """Descriptors that are closed after the test."""
    with contextlib.ExitStack() as stack:

        def fd_of(fd):
            stack.callback(os.close, fd)
            return fd

        yield fd_of


def sync_wait(fd, timeout):
    """The HAL's syncWait: the state of a fence, or UNKNOWN for what is none."""
    return look(fd, timeout) if kind_of(fd) else UNKNOWN


def ended(execution, status):
    """That it did so in time, with its fence in error and without a time."""
    assert execution.wait(PATIENCE) == ERROR
    result = execution.result(0)
    assert (result.status, result.outputs) == (status, ())
    assert execution.info() == (status, (None, None), (None, None))
    return result


class TestOne:
    """One execution."""

    def test_without_fences(self, fast, rows):
        """It runs at once, and its fence is signalled once its output is there."""
        rows.array[0] = 1, 2, 3, 4
        execution = fast.execute_fenced(rows.request(0, 1))
        assert execution.wait(PATIENCE) == SIGNALED == sync_wait(execution.fence, 0)
        assert execution.result().outputs[0].tolist() == [[2, 3, 4, 5]]
        assert rows.array[1].tolist() == [2, 3, 4, 5]
        assert execution.info() == (NONE, (None, None), (None, None))

    def test_waits_for_its_fence(self, fast, rows, gate):
        """Until then it is active, nothing is written, and there is no information."""
        execution = fast.execute_fenced(rows.request(0, 1), [gate])
        assert execution.wait(0) == execution.wait(0.01) == sync_wait(execution.fence, 0) == ACTIVE
        assert not execution.done()
        assert execution.info() == (GENERAL_FAILURE, (None, None), (None, None))
        with pytest.raises(Timeout, match=r"0\.01 s"):
            execution.result(0.01)
        assert not rows.array.any()
        os.eventfd_write(gate, 1)
        assert execution.result(PATIENCE).status == NONE
        assert rows.array[1].tolist() == [1, 1, 1, 1]

    def test_a_fence_is_for_all(self, fast, rows, gate):
        """Several wait for one eventfd, whose count nobody has taken afterwards."""
        executions = [fast.execute_fenced(rows.request(0, n), [gate]) for n in range(1, 6)]
        os.eventfd_write(gate, 3)
        assert {e.wait(PATIENCE) for e in executions} == {SIGNALED}
        assert os.eventfd_read(gate) == 3

    def test_measured(self, fast, rows, gate):
        """Times since the fences are within those since the launch, and the device's within both."""
        execution = fast.execute_fenced(rows.request(0, 1), [gate], measure=True)
        begin = time.monotonic()
        assert execution.wait(0.02) == ACTIVE
        os.eventfd_write(gate, 1)
        assert execution.wait(PATIENCE) == SIGNALED
        ours = (time.monotonic() - begin) * 1e6
        _, launched, fenced = execution.info()
        assert launched == fenced._replace(time_in_driver=launched.time_in_driver)
        nested(fenced.time_on_device, fenced.time_in_driver, ours)
        nested(0.02 * 1e6, launched.time_in_driver - fenced.time_in_driver)
        assert execution.result().timing == launched

    def test_awaited(self, fast, rows, gate):
        """By tasks, several of them for one execution, while the loop goes on."""
        execution = fast.execute_fenced(rows.request(0, 1), [gate])

        async def wait():
            return (await execution).status

        async def main():
            tasks = [asyncio.ensure_future(wait()) for _ in range(3)]
            await asyncio.sleep(0)
            os.eventfd_write(gate, 1)
            return await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)

        assert asyncio.run(main()) == [NONE] * 3

    def test_closed_model_and_closed_fence(self, fast, device, kit, rows, gate):
        """What was launched is executed, whatever its client closes."""
        with device.prepare(kit.add_model(5)) as prepared:
            first = prepared.execute_fenced(rows.request(0, 1), [gate])
            with prepared.execute_fenced(rows.request(1, 2), [first]) as second:
                third = fast.execute_fenced(rows.request(2, 3), [second])
        assert second.wait(0) == UNKNOWN
        os.eventfd_write(gate, 1)
        assert third.result(PATIENCE).outputs[0].tolist() == [[11, 11, 11, 11]]

    def test_in_a_forked_child(self, fast, rows, gate):
        """A child may wait for its parent's fences, and nothing else; the parent's device does not notice."""
        execution = fast.execute_fenced(rows.request(0, 1), [gate])
        if not (child := os.fork()):
            said = [execution.wait(PATIENCE) == SIGNALED]
            for ask in (execution.info, lambda: fast.execute_fenced(rows.request(0, 1))):
                try:
                    ask()
                except DriverError as error:
                    said.append("fork" in str(error))
            os._exit(0 if said == [True] * 3 else 1)
        os.eventfd_write(gate, 1)
        assert os.waitpid(child, 0)[1] == 0
        assert execution.result(PATIENCE).status == NONE
        assert fast.execute_fenced(rows.request(0, 1)).result(PATIENCE).status == NONE


class TestChains:
    """Executions that wait for each other."""

    def test_of_fifty(self, fast, rows, gate):
        """All are sent at once, and each runs on what the one before it wrote."""
        chain = [gate]
        for n in range(50):
            chain.append(fast.execute_fenced(rows.request(n, n + 1), chain[-1:]))
        assert chain[1].wait(0) == chain[-1].wait(0) == ACTIVE
        os.eventfd_write(gate, 1)
        assert chain[-1].result(PATIENCE).outputs[0].tolist() == [[50] * 4]
        assert rows.array[:51, 0].tolist() == list(range(51))
        assert {e.wait(0) for e in chain[1:]} == {SIGNALED}

    def test_fan_in(self, fast, rows, fd_of):
        """One waits for eight executions, and each of those for a fence of its own, in any order."""
        gates = [fd_of(os.eventfd(0)) for _ in range(8)]
        leaders = [fast.execute_fenced(rows.request(0, n + 1), [gate]) for n, gate in enumerate(gates)]
        last = fast.execute_fenced(rows.request(8, 9), leaders)
        for gate in gates[:0:-1]:
            os.eventfd_write(gate, 1)
        assert {e.wait(PATIENCE) for e in leaders[1:]} == {SIGNALED}
        assert last.wait(0) == leaders[0].wait(0) == ACTIVE
        os.eventfd_write(gates[0], 1)
        assert last.result(PATIENCE).outputs[0].tolist() == [[2] * 4]

    def test_one_fence_given_twice(self, fast, rows, gate):
        """Counts as often as it was given, and is one signal all the same."""
        first = fast.execute_fenced(rows.request(0, 1), [gate, gate])
        second = fast.execute_fenced(rows.request(1, 2), [first, first.fence, gate])
        os.eventfd_write(gate, 1)
        assert second.result(PATIENCE).outputs[0].tolist() == [[2] * 4]

    def test_over_a_done_one(self, fast, rows):
        """A fence that is signalled already holds nobody up."""
        first = fast.execute_fenced(rows.request(0, 1))
        assert first.wait(PATIENCE) == SIGNALED
        assert fast.execute_fenced(rows.request(1, 2), [first]).result(PATIENCE).outputs[0].tolist() == [[2] * 4]

    def test_across_devices(self, fast, slow, rows, gate):
        """Another device's fence is one like any other."""
        first = slow.execute_fenced(rows.request(0, 1), [gate])
        second = fast.execute_fenced(rows.request(1, 2), [first])
        os.eventfd_write(gate, 1)
        assert second.result(PATIENCE).outputs[0].tolist() == [[2] * 4]

    def test_while_the_client_is_stopped(self, shared, kit, rows, fd_of):
        """A client that was stopped has no part in it: its chain runs, on a fence that somebody else signals."""
        gate, (near, far) = fd_of(os.eventfd(0)), socket.socketpair()
        fds = [gate, far.fileno(), rows.memory.fd]
        program = kit.python(CLIENT, *fds, pass_fds=fds, env=os.environ | {"BURST_RUNTIME_DIR": str(shared.path)})
        try:
            near.settimeout(PATIENCE)
            _, (fence,), *_ = socket.recv_fds(near, 1, 1)
            program.send_signal(signal.SIGSTOP)
            os.waitpid(program.pid, os.WUNTRACED)
            assert sync_wait(fd_of(fence), 0) == ACTIVE
            os.eventfd_write(gate, 1)
            assert sync_wait(fence, PATIENCE) == SIGNALED
            assert rows.array[:3, 0].tolist() == [0, 1, 2]
            assert Path(f"/proc/{program.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
        finally:
            program.kill()
            program.wait()
            near.close()
            far.close()

    def test_over_buffers_of_the_device(self, device, kit, rows, gate):
        """A buffer that an execution still to come will write is an input of the next one."""
        with device.prepare(kit.add_model()) as prepared:
            state = device.allocate(BufferDesc(), [prepared], [BufferRole(0, 0)], [BufferRole(0, 0)])
            source, target = RequestArgument(length=ROW), RequestArgument(offset=ROW, length=ROW)
            held = RequestArgument(pool=1)
            write = Request((source,), (held,), (rows.memory, state))
            read = Request((held,), (target,), (rows.memory, state))
            first = prepared.execute_fenced(write, [gate])
            second = prepared.execute_fenced(read, [first])
            os.eventfd_write(gate, 1)
            assert second.result(PATIENCE).outputs[0].tolist() == [[2] * 4]
            assert first.result(0).outputs == (None,)
            fresh = device.allocate(BufferDesc(), [prepared], [BufferRole(0, 0)])
            ended(prepared.execute_fenced(read._replace(pools=(rows.memory, fresh))), GENERAL_FAILURE)

    def test_over_a_buffer_of_open_dimensions(self, device, kit, rows, gate):
        """Its value and its size are demanded when the execution begins, so a chain is launched as a whole."""
        with device.prepare(kit.open_model()) as prepared:
            state = device.allocate(BufferDesc((0, 4)), [prepared], [BufferRole(0, 0)], [BufferRole(0, 0)])
            source, target = (RequestArgument(offset=at, length=2 * ROW, dimensions=(2, 4)) for at in (0, 2 * ROW))
            held = RequestArgument(pool=1, dimensions=(2, 4))
            write = Request((source,), (held,), (rows.memory, state))
            read = Request((RequestArgument(pool=1),), (target,), (rows.memory, state))
            assert prepared.execute(read).status == GENERAL_FAILURE  # it has no value
            first = prepared.execute_fenced(write, [gate])
            second = prepared.execute_fenced(read, [first])
            rows.array[0], rows.array[1] = 1, 5
            os.eventfd_write(gate, 1)
            assert second.result(PATIENCE).outputs[0].tolist() == [[3] * 4, [7] * 4]
            assert prepared.execute(read).outputs[0].tolist() == [[3] * 4, [7] * 4]


CLIENT = """
import os, signal, socket, sys
import numpy as np
import driver
from burst import Memory, Request, RequestArgument
gate, line, memory = map(int, sys.argv[1:])
builder = driver.ModelBuilder()
x = builder.input("float32", (1, 4))
builder.output(builder.operation("ADD", x, np.ones(4, np.float32), 0))
pool = Memory.adopt(memory)
row = [RequestArgument(offset=16 * n, length=16) for n in range(3)]
with driver.connect() as device, device.prepare(builder.build()) as prepared:
    a = prepared.execute_fenced(Request((row[0],), (row[1],), (pool,)), [gate])
    b = prepared.execute_fenced(Request((row[1],), (row[2],), (pool,)), [a])
    socket.send_fds(socket.socket(fileno=line), [b"b"], [b.fence])
    signal.pause()
"""


def test_nothing_is_left(fast, rows, kit):
    """When executions are done and closed, neither side holds a descriptor of theirs, nor an answer."""
    assert fast.execute_fenced(rows.request(0, 1)).wait(PATIENCE) == SIGNALED
    sides = [f"/proc/{fast.device.engine_pid}/fd", "/proc/self/fd"]
    before = [len(os.listdir(side)) for side in sides]
    for _ in range(3):  # 20 fences and what they wait for: some of before may have gone meanwhile
        gate, chain = os.eventfd(0), []
        for n in range(20):
            chain.append(fast.execute_fenced(rows.request(n, n + 1), [*chain[-3:], gate]))
        assert len(os.listdir(sides[0])) >= before[0] + 30
        os.eventfd_write(gate, 1)
        assert chain[-1].result(PATIENCE).status == NONE
        os.close(gate)
        for execution in chain:
            execution.close()
    kit.until(lambda: all(len(os.listdir(side)) <= count for side, count in zip(sides, before, strict=True)))
    for _ in range(65):  # the device is told of many at once
        fast.execute_fenced(rows.request(0, 1)).close()
    with lane_of(fast.device) as channel:
        for number in range(1, 62):  # a lane counts what it sends from 1
            channel.send_raw(question(number, number))
            assert "or was dropped" in channel.receive(PATIENCE).body[1][3]


class TestErrors:
    """What becomes of a fence when nothing becomes of an execution."""

    def test_a_fence_that_fails_later(self, fast, rows, gate):
        """Nothing that waited for it is run, however indirectly, and all their fences are in error."""
        chain = [gate]
        for n in range(3):
            chain.append(fast.execute_fenced(rows.request(n, n + 1), [chain[-1]]))
        os.eventfd_write(gate, ERROR_COUNT)
        assert "was set to error" in ended(chain[1], GENERAL_FAILURE).message
        assert "GENERAL_FAILURE" in ended(chain[3], GENERAL_FAILURE).message
        assert not rows.array.any()

    def test_a_fence_that_has_failed(self, fast, rows, gate):
        """An eventfd, or an execution, in error is refused at once; a signalled one beside it does not help."""
        failed = fast.execute_fenced(rows.request(0, 1), [gate])
        os.eventfd_write(gate, ERROR_COUNT)
        ended(failed, GENERAL_FAILURE)
        done = fast.execute_fenced(rows.request(0, 1))
        assert done.wait(PATIENCE) == SIGNALED
        for fence in (gate, failed):
            with pytest.raises(InvalidArgument, match=r"fence 1, \w+, is already in error"):
                fast.execute_fenced(rows.request(0, 1), [done, fence])

    def test_an_execution_that_fails(self, connect, kit, rows, gate):
        """Its fence is in error, with its status, and so are those of its followers."""
        with connect("Failing").prepare(kit.add_model()) as prepared:
            first = prepared.execute_fenced(rows.request(0, 1), [gate])
            second = prepared.execute_fenced(rows.request(1, 2), [first])
            rows.array[0] = -1
            os.eventfd_write(gate, 1)
            assert "it begins below 0" in ended(first, GENERAL_FAILURE).message
            ended(second, GENERAL_FAILURE)
            assert not rows.array[1:].any()

    @pytest.mark.parametrize("what", ["file", "memfd", "socket", "writer", "epoll"])
    def test_other_descriptors(self, fast, rows, gate, fd_of, tmp_path, what):
        """What is no fence is refused at once, and named: much of it is always readable, or never."""
        make = {
            "file": lambda: os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT),
            "memfd": lambda: os.memfd_create("no fence"),
            "socket": lambda: socket.socket(socket.AF_UNIX).detach(),
            "writer": lambda: os.open(pipe, os.O_WRONLY),
            "epoll": lambda: os.dup(epoll.fileno()),
        }
        reader, _ = map(fd_of, os.pipe())
        pipe, epoll = f"/proc/self/fd/{reader}", select.epoll()
        fence = fd_of(make[what]())
        with pytest.raises(InvalidArgument, match="fence 1 is not a fence"):
            fast.execute_fenced(rows.request(0, 1), [gate, fence])
        assert sync_wait(fence, 0) == UNKNOWN

    @pytest.mark.parametrize("null", [None, -1])
    def test_null(self, fast, rows, gate, null):
        """A null handle is refused at once, by the device."""
        with pytest.raises(InvalidArgument, match="1 of 2 fences are null"):
            fast.execute_fenced(rows.request(0, 1), [gate, null])

    def test_closed(self, fast, rows, gate):
        """A closed descriptor is refused at once, and the connection does not suffer."""
        closed = fcntl.fcntl(gate, fcntl.F_DUPFD_CLOEXEC, 900)
        os.close(closed)
        with pytest.raises(InvalidArgument, match=f"fence 1, descriptor {closed}"):
            fast.execute_fenced(rows.request(0, 1), [gate, closed])
        assert sync_wait(closed, 0) == UNKNOWN
        assert fast.execute_fenced(rows.request(0, 1)).result(PATIENCE).status == NONE

    def test_others_that_look_often(self, fast, rows, gate):
        """Functions that wait for futures of any kind cost one descriptor for an execution, however often they look."""
        execution = fast.execute_fenced(rows.request(0, 1), [gate])
        concurrent.futures.wait([execution], 0)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(50):
            concurrent.futures.wait([execution], 0)
        assert len(os.listdir("/proc/self/fd")) <= before + 1
        with pytest.raises(MissedDeadlineTransient):
            execution.result(deadline=time.monotonic())
        with pytest.raises(MissedDeadlineTransient):
            asyncio.run(awaited(execution))
        os.eventfd_write(gate, 1)

    def test_too_many(self, fast, rows, gate):
        """More fences than one execution waits for, or executions than a client has, are refused with the limit."""
        with pytest.raises(InvalidArgument, match="65 fences"):
            fast.execute_fenced(rows.request(0, 1), [gate] * 65)
        pending = [fast.execute_fenced(rows.request(0, 1), [gate])]
        tasks = Path(f"/proc/{fast.device.engine_pid}/task")
        threads = len(list(tasks.iterdir()))
        pending += [fast.execute_fenced(rows.request(0, 1), pending[:1]) for _ in range(Limits.client_launched - 1)]
        assert len(list(tasks.iterdir())) <= threads  # (of other clients, some may have ended)
        with pytest.raises(ResourceExhaustedTransient, match=r"client_launched = 256 is reached.*wait for one of them"):
            fast.execute_fenced(rows.request(0, 1))
        os.eventfd_write(gate, 1)
        assert [e.details() for e in pending if e.wait(PATIENCE) != SIGNALED] == []
        assert fast.execute_fenced(rows.request(0, 1)).result(PATIENCE).status == NONE

    def test_messages_that_make_no_sense(self, fast, rows):
        """Are refused, one after the other, on a socket that goes on."""
        good = [1, [], [], [], False, None]
        with lane_of(fast.device) as channel:
            for fences, request in ((0, []), (0, ["x", *good[1:]]), (127, good), (65, good), (1, good), (0, good)):
                channel.send_raw(launch_behind(fences, 7, None, None, pack(request)))
                assert channel.receive(PATIENCE).body[1][0] > 0
            for execution in (0, 7, 2**64 - 1):
                channel.send_raw(question(8, execution))
                assert channel.receive(PATIENCE).body[1][0] == GENERAL_FAILURE
        assert fast.execute_fenced(rows.request(0, 1)).result(PATIENCE).status == NONE

    def test_more_descriptors_than_fences(self, fast, gate):
        """A launch that brings more descriptors than it has fences is refused for that, and its socket goes on."""
        with lane_of(fast.device) as channel:
            for _ in range(2):
                channel.send_raw(launch_behind(1, 7, None, None, pack([1, [], [], [], False, None])), [gate, gate])
                assert "2 descriptors came for 1 fences" in channel.receive(PATIENCE).body[1][3]

    def test_a_socket_that_ends(self, fast, rows, gate):
        """What waits for fences is the lane's: it goes on, however many of its sockets end."""
        waiting = fast.execute_fenced(rows.request(0, 1), [gate])
        lane = fast.home.connection.lane
        lane._end(lane._take())
        os.eventfd_write(gate, 1)
        assert waiting.result(PATIENCE).status == NONE


class TestDeadlines:
    """What is not done in time."""

    def test_while_it_waits(self, fast, rows, gate):
        """Its fence is in error then, and not before; a later signal changes nothing."""
        with at_least(0.2):
            execution = fast.execute_fenced(rows.request(0, 1), [gate], deadline=time.monotonic() + 0.2)
            follower = fast.execute_fenced(rows.request(1, 2), [execution])
            assert "waited for fences" in ended(execution, MISSED).message
        ended(follower, GENERAL_FAILURE)
        os.eventfd_write(gate, 1)
        assert fast.execute_fenced(rows.request(0, 3), [gate]).result(PATIENCE).status == NONE
        assert not rows.array[1:3].any()

    def test_far(self, fast, rows, gate):
        """A duration begins when the fences are signalled, and one that suffices changes nothing."""
        execution = fast.execute_fenced(rows.request(0, 1), [gate], deadline=time.monotonic() + 60, duration=10)
        os.eventfd_write(gate, 1)
        assert execution.result(PATIENCE).status == NONE

    @pytest.mark.parametrize("bound", ["deadline", "duration"])
    def test_while_it_runs_or_is_queued(self, connect, kit, rows, bound):
        """The fence is in error at that time, whatever the device still does; nobody sees what comes late."""
        slow = connect("Single").prepare(kit.add_model())
        rows.array[0] = 9
        with at_least(0.3):
            times = {"deadline": time.monotonic() + 0.3} if bound == "deadline" else {"duration": 0.3}
            running = slow.execute_fenced(rows.request(0, 1), **times)
            queued = slow.execute_fenced(rows.request(2, 3), **times)
            assert running.result(PATIENCE).status in (MISSED, NEVER_FITS)  # others count where it began late
            assert ended(queued, MISSED).cause.phase == "queued"
        rows.array[0] = 0
        again = slow.execute_fenced(rows.request(0, 1))
        assert again.result(PATIENCE).outputs[0].tolist() == [[1] * 4]
        assert not rows.array[3].any()

    def test_of_a_device_that_can_stop(self, connect, gate):
        """It does so, and the same request, launched before and after that, is run."""
        memory = Memory.create(8)
        values = memory.asarray(np.int32, 2)
        asked = Request((RequestArgument(length=4),), (RequestArgument(offset=4, length=4),), (memory,))
        with connect("onnxruntime").prepare(counting()) as prepared:
            waiting = prepared.execute_fenced(asked, [gate], loop_timeout=15)
            ended(prepared.execute_fenced(asked, duration=0.05, loop_timeout=15), NEVER_FITS)
            values[0] = LIMIT - 1
            os.eventfd_write(gate, 1)
            assert waiting.result(PATIENCE).outputs[0].tolist() == [LIMIT]
            assert prepared.execute_fenced(asked).result(PATIENCE).outputs[0].tolist() == [LIMIT]


class TestDeaths:
    """Of those who owe a fence, and of those who asked for it."""

    @pytest.mark.parametrize("side", ["engine_pid", "service_pid"])
    def test_the_device(self, home, kit, rows, gate, side):
        """Whoever polls the bare fence sees an error, and who asks us learns that the device died."""
        with kit.living(kit.odd("Slow")) as device, device.prepare(kit.add_model()) as prepared:
            execution = prepared.execute_fenced(rows.request(0, 1), [gate])
            threads = [threading.Thread(target=execution.wait, args=(PATIENCE,)) for _ in range(2)]
            for thread in threads:
                thread.start()
            os.kill(getattr(device, side), signal.SIGKILL)
            assert sync_wait(execution.fence, PATIENCE) == ERROR
            for thread in threads:
                thread.join(PATIENCE)
                assert not thread.is_alive()
            assert execution.wait(PATIENCE) == ERROR
            for ask in (execution.result, execution.info, lambda: prepared.execute_fenced(rows.request(0, 1))):
                with pytest.raises(PeerDied):
                    ask()

    def test_what_the_poll_says(self, home, kit, rows, gate):
        """Of a signalled fence POLLIN, of one in error POLLHUP without it, of an active one nothing."""
        with kit.living(kit.odd("Slow")) as device, device.prepare(kit.add_model()) as prepared:
            done, owed = (prepared.execute_fenced(rows.request(0, n), wait) for n, wait in ((1, []), (2, [gate])))
            assert done.wait(PATIENCE) == SIGNALED
            poll = select.poll()
            poll.register(owed.fence, select.POLLIN)
            assert poll.poll(0) == []
            os.kill(device.engine_pid, signal.SIGKILL)
            assert poll.poll(PATIENCE * 1e3) == [(owed.fence, select.POLLHUP)]
            assert done.wait(0) == SIGNALED

    def test_the_client(self, shared, kit, rows, fd_of):
        """What it had pending is not run, and whoever holds its fences sees the error."""
        gate, (near, far) = fd_of(os.eventfd(0)), socket.socketpair()
        fds = [gate, far.fileno(), rows.memory.fd]
        with (
            kit.python(CLIENT, *fds, pass_fds=fds, env=os.environ | {"BURST_RUNTIME_DIR": str(shared.path)}) as program,
            near,
            far,
        ):
            near.settimeout(PATIENCE)
            _, (fence,), *_ = socket.recv_fds(near, 1, 1)
            assert sync_wait(fd_of(fence), 0) == ACTIVE
            program.kill()
            assert sync_wait(fence, PATIENCE) == ERROR
            os.eventfd_write(gate, 1)
        assert not rows.array.any()

    def test_a_connection_that_is_closed(self, connect, kit, rows, gate):
        """Ends what is pending on it; another one does not notice."""
        with connect() as device, device.prepare(kit.add_model()) as prepared:
            execution = prepared.execute_fenced(rows.request(0, 1), [gate])
            device.close()
            assert execution.wait(PATIENCE) == ERROR
            with pytest.raises(BurstError):
                execution.result(0)


LIMIT = 2**31 - 1


def counting():
    """While x is below the limit, it grows."""
    model = endless().model
    (x, is_true), bound = model.referenced[0].operands, np.full(1, LIMIT, np.int32)
    limit = Operand("TENSOR_INT32", (1,), lifetime="CONSTANT_COPY", value=bound)
    condition = Subgraph([x, limit, is_true], [Operation("LESS", (0, 1), (2,))], (0,), (2,))
    return Model(model.main, (condition, model.referenced[1]))


SW_SYNC = Path("/sys/kernel/debug/sync/sw_sync")


@pytest.mark.skipif(not os.access(SW_SYNC, os.W_OK), reason="needs sw_sync in debugfs, for want of a GPU")
def test_a_sync_file(fast, rows, fd_of):
    """A fence of the kernel's software timeline is waited for like any other."""
    timeline = fd_of(os.open(SW_SYNC, os.O_RDWR))
    created = bytearray(struct.pack("I32si", 1, b"burst", 0))
    fcntl.ioctl(timeline, 3 << 30 | 40 << 16 | ord("W") << 8, created)
    fence = fd_of(struct.unpack("I32si", created)[2])
    execution = fast.execute_fenced(rows.request(0, 1), [fence])
    assert execution.wait(0) == sync_wait(fence, 0) == ACTIVE
    fcntl.ioctl(timeline, 1 << 30 | 4 << 16 | ord("W") << 8 | 1, struct.pack("I", 1))
    assert execution.result(PATIENCE).status == NONE
    assert sync_wait(fence, 0) == SIGNALED


@pytest.mark.parametrize(("status", "state"), [(1, SIGNALED), (-5, ERROR)])
def test_what_the_kernel_says_of_a_sync_file(monkeypatch, gate, status, state):
    """Poll says the same of a signalled one and one in error; SYNC_IOC_FILE_INFO tells them apart."""

    def ioctl(fd, number, info):
        assert (fd, number, len(info)) == (gate, 0xC0383E04, 56)
        struct.pack_into("32si", info, 0, b"fake", status)

    monkeypatch.setattr(fences, "kind_of", lambda _: "sync file")
    monkeypatch.setattr(fences.fcntl, "ioctl", ioctl)
    assert sync_wait(gate, 0) == ACTIVE
    os.eventfd_write(gate, 1)
    assert sync_wait(gate, 0) == state
