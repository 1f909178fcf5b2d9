"""The bytes of docs/protocol.md, sent to a device of real processes: it answers as the page says."""

import contextlib
import fcntl
import os
import select
import signal
import socket
import tempfile

import msgpack
import numpy as np
import pytest
from protocol_page import ANSWER, EXAMPLE, SUM, X, block, first, messages, raw, said

import driver
import fmq
from burst import ErrorStatus, Memory, OutputShape, Timing
from burst.channel import MAX_BYTES, MAX_FDS, pack
from burst.datum import DATUM_DTYPE
from burst.wire import ResultPacket, decode_result, encode_request, encode_result
from driver.protocol import rpc
from fmq.region import Region


@pytest.fixture(scope="module")
def path():
    """The socket of a device of our own, which is killed afterwards."""
    with tempfile.TemporaryDirectory(prefix="burst-p-", dir="/tmp") as place, pytest.MonkeyPatch.context() as patch:
        patch.setenv("BURST_RUNTIME_DIR", place)
        with driver.connect("reference") as device:
            processes = [os.pidfd_open(pid) for pid in (device.engine_pid, device.service_pid)]
            yield f"{place}/reference.sock"
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                os.close(process)


@pytest.fixture
def connection(path):
    """A connection of our own to it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(20)
        client.connect(path)
        yield client


def ask(connection, raw_message, fds=()):
    """A message there, bytes and descriptors back."""
    socket.send_fds(connection, [raw_message], fds)
    answer, found, *_ = socket.recv_fds(connection, MAX_BYTES, MAX_FDS)
    return answer, found


def prepare(connection):
    """hello and prepare, as the page has them; its answer to the second."""
    hello, prepare, prepared, *_ = messages()
    answer, fds = ask(connection, hello)
    assert msgpack.unpackb(answer)[:4] == [1, 0, rpc.PROTOCOL, "reference"]
    assert len(fds) == 1
    fd = os.memfd_create("model", os.MFD_ALLOW_SEALING)
    os.write(fd, raw(block("hex model")))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0xF)
    assert ask(connection, prepare, [fd]) == (prepared, [])
    for each in (fd, *fds):
        os.close(each)


@pytest.fixture
def pool():
    """The pool of the example, with its inputs."""
    found = Memory.create(192)
    found.asarray(np.float32, 4)[:] = [1, 2, 3, 4]
    found.asarray(np.float32, 4, 64)[:] = 10
    return found


class Client:
    """A burst that was opened with the page's bytes: the client's ends of it."""

    def __init__(self, connection, burst):
        self.callback, callback = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.context, context = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.callback.settimeout(20)
        requests, results = (fmq.MessageQueue.create(DATUM_DTYPE, 1024) for _ in range(2))
        self.writer, self.reader = requests.writer(follows=True), results.reader(follows=True)
        with callback, context, requests, results:
            memories = [queue.descriptor.fds[0] for queue in (requests, results)]
            self.answer, self.fds = ask(connection, burst, [*memories, callback.fileno(), context.fileno()])

    def follow(self):
        """The life page that the answer brought, and nothing else. Not linked: the context is the test's to close."""
        (fd,) = self.fds
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        page = Region.from_fd(fd, fmq.LifePage.nbytes, writable=False)
        page.close()
        for end in (self.writer, self.reader):
            end.follow(page)
            assert end.peer == "alive"

    def send(self, packet):
        self.writer.write(np.frombuffer(packet, DATUM_DTYPE), timeout=20)

    def receive(self):
        """One packet, framed as the page says."""
        head = self.reader.read(1, timeout=20).tobytes()
        return head + self.reader.read(int.from_bytes(head[8:12], "little") - 1, timeout=0).tobytes()

    def hands_over(self, question, answer, fds=()):
        assert self.callback.recv(MAX_BYTES) == question
        socket.send_fds(self.callback, [answer], fds)

    def close(self):
        for end in (self.writer, self.reader, self.context, self.callback):
            end.close()


@pytest.fixture
def client(connection):
    """With a prepared model and an open burst."""
    prepare(connection)
    with contextlib.closing(Client(connection, messages()[3])) as found:
        found.follow()
        yield found


def test_a_device_understands_the_example(connection, client, pool):
    """Byte for byte from the page: hello to free, with the answers that it prints, a result and the sum in the pool."""
    _, _, _, _, opened, question, memories, free_memory, free, freed = messages()
    assert client.answer == opened
    assert msgpack.unpackb(memories) == [0, [pool.to_wire()]]
    client.send(raw(block("hex request 2")))
    client.hands_over(question, memories, [pool.fd])
    assert client.receive() == raw(block("hex result 2"))
    assert pool.asarray(np.float32, 4, 128).tolist() == [11, 12, 13, 14]
    client.context.send(free_memory)
    client.close()
    assert ask(connection, free) == (freed, [])


def test_version_1_is_the_shorter_example(connection, pool):
    """Asked for 1 alone, a device answers 1, and takes the request as the page shortens it."""
    prepare(connection)
    *first_values, _ = said(block("hex messages"))[3]
    with contextlib.closing(Client(connection, pack([*first_values, [1]]))) as client:
        client.follow()
        assert client.answer == pack([3, 0, 1])
        client.send(first(raw(block("hex request 2")), 6, at=4))
        client.hands_over(*messages()[5:7], [pool.fd])
        assert client.receive() == first(raw(block("hex result 2")), 5, at=8)


def test_versions_that_nobody_speaks_are_refused(connection):
    """And the connection goes on."""
    prepare(connection)
    *first_values, _ = said(block("hex messages"))[3]
    with contextlib.closing(Client(connection, pack([*first_values, [99]]))) as client:
        number, status, *_ = msgpack.unpackb(client.answer)
        assert number == 3
        assert status != ErrorStatus.NONE
        assert client.fds == []  # no burst, no life page
    assert ask(connection, messages()[-2])[0] == messages()[-1]


def test_several_requests_are_in_flight(client, pool):
    """Sent before the first was answered, they are answered in their order, each with its id."""
    for number in (5, 9, 7):
        client.send(encode_request(EXAMPLE._replace(id=number), 2))
    client.hands_over(*messages()[5:7], [pool.fd])
    assert [client.receive() for _ in range(3)] == [encode_result(ANSWER._replace(id=n), 2) for n in (5, 9, 7)]


def test_what_is_wrong_with_a_request_is_told_and_the_burst_goes_on(client, pool):
    """The rows of the table of errors that have a status, one after the other, and then a good request."""
    *_, question, memories, _, _, _ = messages()
    bad = bytearray(raw(block("hex request 2")))
    bad[-24:-16] = bytes([9, 0, 0, 0, 0, 0, 0, 1])  # a byte that is not named is not 0
    client.send(bytes(bad))
    assert decode_result(client.receive(), 2) == ResultPacket(ErrorStatus.GENERAL_FAILURE, (), Timing())
    client.send(encode_request(EXAMPLE, 2))
    client.hands_over(question, pack([4, "nothing stands there"]))
    assert decode_result(client.receive(), 2) == ResultPacket(ErrorStatus.INVALID_ARGUMENT, (), Timing(), 1)
    client.send(encode_request(EXAMPLE, 2))
    client.hands_over(question, memories)  # without a descriptor
    assert decode_result(client.receive(), 2) == ResultPacket(ErrorStatus.GENERAL_FAILURE, (), Timing(), 1)
    client.send(encode_request(EXAMPLE._replace(inputs=(X,)), 2))
    client.hands_over(question, memories, [pool.fd])
    assert decode_result(client.receive(), 2) == ResultPacket(ErrorStatus.INVALID_ARGUMENT, (), Timing(), 1)
    client.send(encode_request(EXAMPLE._replace(outputs=(SUM._replace(length=8),)), 2))
    small = OutputShape((1, 4), is_sufficient=False)
    assert decode_result(client.receive(), 2) == ResultPacket(
        ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, (small,), Timing(), 1
    )
    client.send(encode_request(EXAMPLE, 2))
    assert decode_result(client.receive(), 2) == ANSWER


def test_a_message_that_the_context_does_not_know_ends_the_burst(client):
    """Its owner sees that the device left in good order."""
    client.context.send(pack(["nonsense"]))
    with pytest.raises(fmq.Closed):
        client.reader.read(1, timeout=20)


@pytest.mark.parametrize("which", ["writer", "context", "connection"])
def test_each_of_them_ends_the_burst(connection, client, which):
    """The request queue's end, the context, the connection: the device leaves when one of them is closed."""
    getattr(client, which, connection).close()
    with pytest.raises(fmq.Closed):
        client.reader.read(1, timeout=20)


def lane_of(connection):
    """A socket of the lane."""
    prepare(connection)
    answer, (fd, life) = ask(connection, pack([3, "lane"]))
    assert answer == pack([3, 0])
    os.close(life)
    path = socket.socket(fileno=fd)
    path.settimeout(20)
    return path


def test_the_lane_understands_the_example(connection, pool):
    """The same on a socket from `lane`, executed in turn and launched."""
    register, execute, result, launch, told = messages("plain")
    with lane_of(connection) as path:
        socket.send_fds(path, [register], [pool.fd])
        assert ask(path, execute) == (result, [])
        assert ask(path, launch) == (told, [])
    assert pool.asarray(np.float32, 4, 128).tolist() == [11, 12, 13, 14]


def test_fenced_executions_understand_the_example(connection, pool):
    """The fence that comes with the answer is signalled, and never read."""
    register, execute, launched, question, told = messages("fenced")
    with lane_of(connection) as path:
        socket.send_fds(path, [register], [pool.fd])
        answer, (fence,) = ask(path, execute)
        assert answer == launched
        poll = select.poll()
        poll.register(fence, select.POLLIN)
        ((_, events),) = poll.poll(20_000)
        assert events & select.POLLIN
        assert ask(path, question) == (told, [])
        os.close(fence)
    assert pool.asarray(np.float32, 4, 128).tolist() == [11, 12, 13, 14]


def test_a_refused_call_leaves_the_connection_as_it_was(connection):
    """The status and a text; then the next call."""
    answer, _ = ask(connection, pack([1, "no such call"]))
    number, status, text = msgpack.unpackb(answer)
    assert (number, status, type(text)) == (1, ErrorStatus.INVALID_ARGUMENT, str)
    prepare(connection)


def test_what_is_longer_than_a_message_ends_the_connection(connection):
    """A message of just the most bytes is answered, one of a byte more is not."""
    longest = pack([1, "x", "x" * (MAX_BYTES - 7)])
    assert len(longest) == MAX_BYTES
    assert msgpack.unpackb(ask(connection, longest)[0])[:2] == [1, ErrorStatus.INVALID_ARGUMENT]
    assert ask(connection, longest + b"\0") == (b"", [])
