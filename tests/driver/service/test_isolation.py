"""Clients of one device do not get into each other's way, whatever they do."""

import os
import random
import socket
import threading

import msgpack
import numpy as np
import pytest

import driver
from burst.channel import MAX_BYTES, MAX_FDS, Channel, pack
from driver.protocol.lane_codec import in_turn

X = np.ones((1, 4), np.float32)


@pytest.fixture
def witness(connect, kit):
    """A burst of a client that has done nothing wrong: call it to see that it goes on."""
    with connect().prepare(kit.add_model()) as prepared, prepared.burst() as burst:

        def run():
            assert burst.run(X).outputs[0].tolist() == prepared.run(X)[0].tolist() == [[2, 2, 2, 2]]

        run()
        yield run
        run()


@pytest.fixture
def stranger(witness, shared):
    """A raw connection to the reference device, which says what it likes."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(str(shared.path / "reference.sock"))
    with Channel(sock) as channel:
        yield channel


def is_over(channel, patience):
    """Whether the device ended the connection."""
    try:
        channel.receive(patience).close()
    except ConnectionError:
        return True
    return False


def test_prepare_does_not_stop_a_burst(connect, witness, kit):
    """While a client prepares a model of a thousand operations, another's burst goes on."""
    done, runs = threading.Event(), 0
    other = connect()

    def prepare():
        with other.prepare(kit.long_model(1000)) as prepared:
            assert prepared.run(np.zeros(4, np.float32))[0].tolist() == [1000] * 4
        done.set()

    thread = threading.Thread(target=prepare)
    thread.start()
    while not done.is_set() and thread.is_alive():
        witness()
        runs += 1
    thread.join()
    assert done.is_set()
    assert runs > 10


def test_slow_client_does_not_stop_others(connect, kit):
    """While one client's executions take long, another's are not kept waiting, on both paths."""
    with connect("Slow").prepare(kit.add_model()) as slow, connect("Slow").prepare(kit.add_model()) as quick:
        request, (x,) = kit.request([np.full((1, 4), 9, np.float32)], 16)
        future = slow.execute_async(request)
        with slow.burst() as busy, quick.burst() as burst:
            busy.inputs[0][...] = 9
            thread = threading.Thread(target=busy.run)
            thread.start()
            for _ in range(20):
                assert burst.run(0 * X).outputs[0].tolist() == quick.run(0 * X)[0].tolist() == [[1, 1, 1, 1]]
            assert not future.done()
            assert thread.is_alive()
            x[...] = busy.inputs[0][...] = 0
            thread.join(kit.patience)
            assert future.result(kit.patience).status == 0


@pytest.mark.parametrize(
    "raw",
    [b"\xc1", b"\x00", b"\x91" * 5000, b"\xdd\xff\xff\xff\xff", msgpack.packb({}), msgpack.packb([]), os.urandom(999)],
    ids=["reserved", "a number", "deep", "a list of 2^32", "a map", "nothing", "noise"],
)
def test_malformed_message(stranger, witness, kit, raw):
    """What is no call is refused or ends the connection; others do not notice."""
    stranger.send_raw(raw)
    try:
        answer = stranger.receive(kit.patience)
    except ConnectionError:
        pass
    else:
        assert answer.body[1] == driver.InvalidArgument.status
    witness()


def test_oversize_message(stranger, witness, kit):
    """A message that is longer than allowed ends its connection, and nothing of it is looked at."""
    stranger.send_raw(msgpack.packb([1, "hello", b"x" * MAX_BYTES]))
    assert is_over(stranger, kit.patience)
    witness()


def test_too_many_descriptors(stranger, witness, kit):
    """A message with more descriptors than allowed ends its connection, and leaves no descriptor behind."""
    with open(os.devnull, "rb") as null:
        stranger.call([1, "hello", 1], timeout=20).close()  # from now on it may send descriptors
        stranger.send_raw(msgpack.packb([2, "hello", 1]), [null.fileno()] * (MAX_FDS + 1))
    assert is_over(stranger, kit.patience)
    witness()


def test_silence(stranger, witness, kit):
    """A client that connects and says nothing, or asks and never reads, keeps nobody waiting."""
    for number in range(50):
        stranger.send([number, "hello", 1])
    witness()


def test_many_connections(shared, witness):
    """Hundreds of idle connections keep nobody from being served."""
    sockets = []
    try:
        for _ in range(300):
            sockets.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sockets[-1].connect(str(shared.path / "reference.sock"))
        witness()
    finally:
        for sock in sockets:
            sock.close()


def test_descriptors_that_come_with_a_request_are_closed(connect, stranger, witness):
    """A request on the plain path needs no descriptors; those that a client sends with it do not stay in the device."""
    engine = f"/proc/{connect().engine_pid}/fd"
    request = in_turn(1, None, pack([0, [], [], [], False, None]))
    with open(os.devnull, "rb") as null, plain_path(stranger) as plain:
        before = len(os.listdir(engine))
        for _ in range(20):
            plain.send_raw(request, [null.fileno()] * MAX_FDS)
            plain.receive(20).close()
        plain.send_raw(request)
        plain.receive(20).close()  # by now the one before has been dealt with
        assert len(os.listdir(engine)) <= before
    witness()


def test_noise(shared, witness):
    """A thousand random messages with random descriptors, on the service's socket and on plain paths (seed 4)."""
    source = random.Random(4)
    with open(os.devnull, "rb") as null:
        for _ in range(50):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.connect(str(shared.path / "reference.sock"))
            with Channel(sock) as channel:
                send_noise(source, plain_path(channel) if source.random() < 0.5 else channel, null.fileno())
    witness()


def plain_path(channel):
    """A plain path of the stranger's own, in place of its connection."""
    channel.send([1, "lane"])
    answer = channel.receive(20)
    fds = answer.take_fds()
    os.close(fds[1])
    return Channel.from_fd(fds[0])


def send_noise(source, channel, fd):
    words = ["hello", "prepare", "supported", "free", "lane", "burst", "execute", "memory", "free_memory", "load"]
    values = [0, 1, -1, 2**63, 1.5, None, True, "x", b"y", [], {}, [0, 16], [[0, 0, 16, []]], [[0, 0, 2**40, [1, 4]]]]
    with channel:
        for _ in range(20):
            body = [source.choice(words), *source.choices(values, k=source.randrange(6))]
            body = [source.choice(values), *body] if source.random() < 0.5 else body
            try:
                channel.send(body, [fd] * source.choice([0, 0, 1, 1, 2, 4]))
                channel.receive(0 if source.random() < 0.7 else 0.01).close()
            except TimeoutError:
                pass
            except ConnectionError:
                return


def test_hostile_burst(connect, witness, kit):
    """A burst whose descriptors are no queues and no sockets is refused, and its descriptors are closed."""
    other = connect()
    descriptor = [1, "'|V24'", 16, 1, True, None]
    (read, write), (near, far) = os.pipe(), Channel.pair()
    with open(read, "rb"), open(write, "wb"), near, far, other.prepare(kit.add_model()):
        pipes, mixed = [read] * 4, [read, write, near.fileno(), near.fileno()]
        for fds in ([], [read], pipes, mixed):
            with pytest.raises(driver.StatusError):
                other.call("burst", 1, descriptor, descriptor, 0.0, fds=fds)
    witness()
