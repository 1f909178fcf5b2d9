"""libburst without a burst: the plain path, its bytes, deadlines, deaths and memory; and how models are prepared."""

import contextlib
import ctypes
import errno
import signal
import socket
import threading
from ctypes import byref, c_float, c_uint32, c_uint64, c_void_p
from pathlib import Path

import msgpack
import numpy as np
import pytest
from libburst_by_ctypes import (
    FOREVER,
    Adder,
    Execution,
    Options,
    Outcome,
    Tensor,
    adder,
    checked,
    handle_of,
    mapped_pools,
    shape,
    why,
)
from lying_device import LyingDevice
from protocol_page import messages
from waiting import PATIENCE, until

import driver
from driver.protocol.lane_codec import IN_TURN, answer_to, in_turn, split_in_turn
from driver.protocol.model_codec import encode

pytestmark = pytest.mark.integration


class Plain(Adder):
    """Adds without a burst."""

    def execute(self, deadline=FOREVER, **how):
        """The result of burst_execute, and its outcome."""
        tensors = [Tensor(self.pool, 4 * self.n * i, 4 * self.n, 0, None) for i in range(3)]
        return execute(self.library, self.compiled, tensors[:2], tensors[2:], deadline, **how)

    def adds(self, **how):
        self.values[:] = [*range(self.n), *[10.0] * self.n, *[0.0] * self.n]
        result, _ = self.execute(**how)
        return result == 0 and self.values[2 * self.n :] == [i + 10.0 for i in range(self.n)]


def execute(library, compiled, inputs, outputs, deadline=FOREVER, **how):
    outcome = Outcome()
    given = Execution(size=ctypes.sizeof(Execution), **how)
    sides = [(len(side), (Tensor * len(side))(*side)) for side in (inputs, outputs)]
    result = library.burst_execute(compiled, *sides[0], *sides[1], byref(given), c_uint64(deadline), byref(outcome))
    return result, outcome


@pytest.fixture
def plain(library, device):
    made = Plain(library)
    yield made
    made.close()


def soon(library, milliseconds):
    return library.burst_now() + milliseconds * 1_000_000


def test_it_executes_and_tells_shapes_and_times(plain):
    """With times only when they are asked for; as many words of shapes as there is room for."""
    assert all(plain.adds() for _ in range(50))
    words = (c_uint32 * 4)()
    result, outcome = plain.execute(measure=1, room=4, shapes=words)
    assert (result, outcome.status, outcome.n_shapes, list(words)) == (0, 0, 1, [1, 2, 1, 4])
    assert outcome.on_device <= outcome.in_driver < 10**7
    result, outcome = plain.execute(room=3, shapes=words)
    assert (result, outcome.n_shapes, outcome.on_device) == (0, 0, 2**64 - 1)


def test_a_refusal_is_a_status_and_bad_arguments_are_told(plain, library):
    """And the next execution adds."""
    one, beyond = Tensor(plain.pool, 0, 16, 0, None), Tensor(plain.pool, 40, 16, 0, None)
    assert execute(library, plain.compiled, [one], [one])[0] == 4
    assert "status 4" in why(library)
    assert execute(library, plain.compiled, [one, beyond], [one])[0] == -errno.EINVAL
    assert "bytes 40 to 56 of a pool of 48" in why(library)
    assert execute(library, plain.client, [one], [one])[0] == -errno.EINVAL
    assert execute(library, plain.compiled, [one], [one], loop_timeout=2**63)[0] == -errno.EINVAL
    assert execute(library, plain.compiled, [one], [one], room=5)[0] == -errno.EINVAL
    assert library.burst_execute(plain.compiled, 1, None, 0, None, None, c_uint64(FOREVER), None) == -errno.EINVAL
    assert plain.adds()


def test_small_room_is_told_with_the_shape(plain, library):
    """OUTPUT_INSUFFICIENT_SIZE, and how large the output is."""
    x, y, short = [Tensor(plain.pool, 16 * i, 8 if i == 2 else 16, 0, None) for i in range(3)]
    words = (c_uint32 * 4)()
    result, outcome = execute(library, plain.compiled, [x, y], [short], room=4, shapes=words)
    assert (result, outcome.n_shapes, list(words)) == (3, 1, [0, 2, 1, 4])


def test_a_deadline_ends_the_wait_and_late_answers_are_dropped(plain, device, library):
    """While the engine stands still; then each execution has its own answer."""
    assert plain.adds()
    device["engine"].signal(signal.SIGSTOP)
    assert [plain.execute(soon(library, 20))[0] for _ in range(3)] == [-errno.ETIMEDOUT] * 3
    device["engine"].signal(signal.SIGCONT)
    assert plain.adds()
    assert plain.execute(1)[0] in {-errno.ETIMEDOUT, 6}  # a deadline in the past
    assert plain.adds()


def test_threads_wait_for_each_other(plain, library):
    """Four threads on one model, with memory of their own: all sums are right."""
    wrong = []

    def add(number):
        pool, values = plain.new_pool()
        x, y, total = [Tensor(pool, 16 * i, 16, 0, None) for i in range(3)]
        for k in range(200):
            values[:] = [*range(4), *[float(number * k)] * 4, *[0.0] * 4]
            result, _ = execute(library, plain.compiled, [x, y], [total])
            if result or values[8:] != [i + float(number * k) for i in range(4)]:
                wrong.append((number, k, result))
        library.burst_pool_free(pool)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert wrong == []


@pytest.mark.parametrize("victim", ["engine", "service"])
def test_a_death_is_told_or_recovered_from(plain, device, victim):
    """-EPIPE without `recover`; with it the device's next life adds."""
    assert plain.adds()
    device[victim].signal(signal.SIGKILL)
    until(lambda: plain.execute()[0] == -errno.EPIPE)
    assert plain.adds(recover=1)
    assert plain.adds()


def test_a_death_while_an_answer_is_awaited(plain, device):
    """The engine, stopped and killed: the execution is repeated by the next life."""
    assert plain.adds()
    device["engine"].signal(signal.SIGSTOP)
    found = []
    waiting = threading.Thread(target=lambda: found.append(plain.adds(recover=1)))
    waiting.start()
    until(lambda: Path(f"/proc/{device['engine'].pid}/stat").exists())
    device["engine"].signal(signal.SIGKILL)
    waiting.join(PATIENCE)
    assert found == [True]


def test_memory_that_was_freed_is_let_go(plain, device, library):
    """Fifty pools, each of one execution: the engine maps no more than before."""
    assert plain.adds()
    before = mapped_pools(device["engine"])
    for _ in range(50):
        pool, values = plain.new_pool()
        tensors = [Tensor(pool, 16 * i, 16, 0, None) for i in range(3)]
        assert execute(library, plain.compiled, tensors[:2], tensors[2:])[0] == 0
        checked(library, library.burst_pool_free(pool))
        del values
    assert plain.adds()
    until(lambda: mapped_pools(device["engine"]) <= before)


# ---- bytes -----------------------------------------------------------------------------------------------------------


class Recorder(LyingDevice):
    """Answers on the plain path as docs/protocol.md prints it, and keeps what it was sent."""

    def __init__(self, path, **answers):
        self.near, self.prepared = None, []
        super().__init__(path, lane=self.lane, prepare=self.prepare, **answers)

    def prepare(self, arguments, _):
        self.prepared.append(arguments)
        return [0, 1], []

    def lane(self, *_):
        self.near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.near.settimeout(PATIENCE)
        return [0], [far.detach(), self.life.fd]


@pytest.fixture
def recorder(place):
    made = Recorder(f"{place}/recorder")
    yield made
    if made.near:
        made.near.close()
    made.close()


def plain_on(library, path, pool_bytes=192):
    """A model that is prepared there, and a pool."""
    client = handle_of(library, "burst_connect_path", path.encode())
    compiled = handle_of(library, "burst_prepare", client, adder(library), c_uint64(FOREVER))
    pool, base = c_void_p(), c_void_p()
    checked(library, library.burst_pool_new(ctypes.c_size_t(pool_bytes), byref(pool), byref(base)))
    return client, compiled, pool


def answered(library, recorder, compiled, pool, answers, deadline=FOREVER):
    """One execution against answers to it: its result, and what was sent."""
    tensors = [Tensor(pool, 64 * i, 16, 0, None) for i in range(3)]
    found = []
    run = threading.Thread(
        target=lambda: found.append(execute(library, compiled, tensors[:2], tensors[2:], deadline)[0])
    )
    run.start()
    sent = []
    until(lambda: recorder.near is not None)
    while not sent or sent[-1][:2] != IN_TURN:
        raw, fds, *_ = socket.recv_fds(recorder.near, 65536, 72)
        sent.append(raw)
        recorder.fds += fds
    for outcome in answers:
        recorder.near.send(answer_to(sent[-1], outcome) if outcome else b"")
    run.join(PATIENCE)
    return found[0], sent


GOOD = b"\x94\x00\x91\x92\x92\x01\x04\xc3\x92\xc0\xc0\xa0"


def test_the_bytes_are_the_pages(library, recorder):
    """Of memory, of an execution without a deadline and of one with the last one that there is. They are counted."""
    memory, message, answer, *_ = messages("plain")
    _, packed = split_in_turn(message)
    assert answer == answer_to(message, GOOD)
    client, compiled, pool = plain_on(library, recorder.path)
    assert answered(library, recorder, compiled, pool, [GOOD]) == (0, [memory, in_turn(1, None, packed)])
    assert answered(library, recorder, compiled, pool, [GOOD], 2**64 - 2) == (0, [in_turn(2, 2**64 - 2, packed)])
    checked(library, library.burst_disconnect(client))


LIES = [
    b"", b"\xc1", b"\x90", b"\x94", GOOD[:-1], GOOD + b"\x00", b"\x94\x09" + GOOD[2:], b"\x94\xff" + GOOD[2:],
    GOOD.replace(b"\x92\xc0\xc0", b"\x93\xc0\xc0\xc0"), GOOD.replace(b"\x91\x92\x92\x01\x04", b"\x91\x92\x92\x01\xff"),
    b"\x94\x00\xdd\xff\xff\xff\xff", msgpack.packb([0, [[[1], True]] * 2, [None, None], ""]),
    msgpack.packb([0, [[[2**32], True]], [None, None], ""]), msgpack.packb([0, [[1, True]], [None, None], ""]),
    msgpack.packb([0, [], ["now", None], ""]), msgpack.packb([0, [], [None, None], 7]),
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES, ids=range(len(LIES)))
def test_an_answer_that_is_none(library, recorder, lie):
    """-EBADMSG, or -EPIPE for an empty one, which ends a socket; the path is opened again and serves the next one."""
    client, compiled, pool = plain_on(library, recorder.path)
    result, _ = answered(library, recorder, compiled, pool, [lie])
    assert result == (-errno.EBADMSG if lie else -errno.EPIPE)
    recorder.near.close()
    recorder.near = None
    assert answered(library, recorder, compiled, pool, [GOOD])[0] == 0
    checked(library, library.burst_disconnect(client))


def test_an_answer_to_something_else(library, recorder):
    """-EBADMSG."""
    client, compiled, pool = plain_on(library, recorder.path)
    tensors = [Tensor(pool, 64 * i, 16, 0, None) for i in range(3)]
    found = []
    run = threading.Thread(target=lambda: found.append(execute(library, compiled, tensors[:2], tensors[2:])[0]))
    run.start()
    until(lambda: recorder.near is not None)
    recorder.near.send(answer_to(in_turn(2, None, b""), GOOD))
    run.join(PATIENCE)
    assert found == [-errno.EBADMSG]
    checked(library, library.burst_disconnect(client))


SOCKETS = {"refused": [4, "no"], "without descriptors": [0]}


@pytest.mark.parametrize("name", SOCKETS)
def test_a_socket_that_is_none(library, place, name):
    """A status, or -EBADMSG."""
    device = LyingDevice(f"{place}/liar", lane=SOCKETS[name])
    with contextlib.closing(device):
        client, compiled, pool = plain_on(library, device.path)
        tensors = [Tensor(pool, 64 * i, 16, 0, None) for i in range(3)]
        expected = 4 if name == "refused" else -errno.EBADMSG
        assert execute(library, compiled, tensors[:2], tensors[2:])[0] == expected
        checked(library, library.burst_disconnect(client))


# ---- preparing, and loops --------------------------------------------------------------------------------------------


def test_priority_and_preference_are_told_when_a_model_is_prepared(library, recorder):
    """Medium and a fast single answer at first; then what burst_prefer was given, which refuses anything else."""
    client, *_ = plain_on(library, recorder.path)
    for priority, preference in [(110, 2), (90, 1), (100, 0)]:
        checked(library, library.burst_prefer(client, priority, preference))
        handle_of(library, "burst_prepare", client, adder(library), c_uint64(FOREVER))
    for wrong in [(0, 0), (95, 0), (120, 0), (100, 3), (100, -1)]:
        assert library.burst_prefer(client, *wrong) == -errno.EINVAL
    told = [(arguments[3], arguments[5]) for arguments in recorder.prepared]
    usual = ("fast_single_answer", 1)
    assert told == [usual, ("sustained_speed", 2), ("low_power", 0), usual]
    checked(library, library.burst_disconnect(client))


def counting():
    """Adds 1 to the first input until it has reached the second."""

    def graph(operation):
        builder = driver.ModelBuilder()
        n, most = builder.input("float32", (1,)), builder.input("float32", (1,))
        one = np.ones(1, np.float32)
        found = builder.operation(operation, *((n, most) if operation == "LESS" else (n, one, 0)))
        builder.output(found)
        return builder.build()

    builder = driver.ModelBuilder()
    n, most = builder.input("float32", (1,)), builder.input("float32", (1,))
    builder.output(builder.operation("WHILE", graph("LESS"), graph("ADD"), n, most))
    return builder.build()


def test_a_loop_ends_at_its_timeout(library, device):
    """A WHILE that would take minutes: without a burst and in one, by the model that Python's driver serialised."""
    encoded = encode(counting())
    client = handle_of(library, "burst_connect", b"reference")
    where = [c_uint64(part) for part in encoded.where]
    compiled = handle_of(library, "burst_prepare_encoded", client, encoded.fd, *where, c_uint64(FOREVER))
    pool, base = c_void_p(), c_void_p()
    checked(library, library.burst_pool_new(ctypes.c_size_t(12), byref(pool), byref(base)))
    values = (c_float * 3).from_address(base.value)
    tensors = [Tensor(pool, 4 * i, 4, 1, shape(1)) for i in range(3)]
    values[:] = [0, 3, 0]
    assert execute(library, compiled, tensors[:2], tensors[2:], loop_timeout=10**12)[0] == 0
    assert list(values) == [0, 3, 3]
    values[1] = 1e9
    assert execute(library, compiled, tensors[:2], tensors[2:], loop_timeout=10**6)[0] == 5
    assert "loop timeout" in why(library)
    options, controller = Options(size=ctypes.sizeof(Options), loop_timeout=10**6), c_void_p()
    checked(library, library.burst_open(compiled, byref(options), byref(controller)))
    sides = [2, (Tensor * 2)(*tensors[:2]), 1, (Tensor * 1)(tensors[2])]
    request = handle_of(library, "burst_request_new", controller, *sides)
    assert library.burst_run(controller, request, c_uint64(FOREVER), None) == 5
    for close, handle in [("close", controller), ("compiled_free", compiled), ("disconnect", client)]:
        checked(library, getattr(library, f"burst_{close}")(handle))
