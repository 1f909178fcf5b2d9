"""What clients may send to `burst serve --frigate` that no detector sends, byte by byte: the others are answered."""

import asyncio
import json
import random
import select
import socket
import struct
import threading
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import zmq
from frigate_models import Asker, frame_of, rows_for, serving, write_detector
from waiting import PATIENCE

from driver.gateways.frigate.door import DoorBounds
from driver.gateways.frigate.process import DetectorServer, frigate_address
from driver.gateways.frigate.zmtp import ZmtpConnection

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
FRAME = frame_of(0.5)
HEADER = json.dumps({"shape": list(FRAME.shape), "dtype": "float32"}).encode()
MORE, LONG, COMMAND = 1, 2, 4


def framed(flags, body):
    return struct.pack(">BQ", flags | LONG, len(body)) + body


def ready(kind=b"REQ"):
    return framed(COMMAND, b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind)


def message(*parts):
    return b"".join(framed(MORE if n < len(parts) - 1 else 0, part) for n, part in enumerate(parts))


HELLO = GREETING + ready()
ASK = message(b"", HEADER, FRAME.tobytes())


class Raw:
    """A connection that sends bytes."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(30)
        self.socket.connect(path)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, data):
        """Whether it was taken."""
        try:
            self.socket.sendall(data)
        except ConnectionError:
            return False
        return True

    def exactly(self, count):
        data = b""
        while len(data) < count:
            more = self.socket.recv(count - len(data))
            assert more, "the server has ended the connection"
            data += more
        return data

    def hear(self):
        """(flags, body) of a part."""
        (flags,) = self.exactly(1)
        size = int.from_bytes(self.exactly(8 if flags & LONG else 1), "big")
        return flags, self.exactly(size)

    def greeted(self):
        self.send(HELLO)
        assert self.exactly(64)[:1] == b"\xff"
        assert self.hear()[1].startswith(b"\x05READY")
        return self

    def ended(self):
        """Waits until the server ends it."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionError:
            pass
        return True


def assert_seen(asker, pixel=0.5):
    np.testing.assert_allclose(asker.look(frame_of(pixel)), rows_for(pixel), atol=1e-6)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_detector(tmp_path_factory.mktemp("model") / "yolo.onnx", "yolo-generic")


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    with serving("onnxruntime", f"ipc://{folder}/s", model, "yolo-generic") as (process, _):
        yield SimpleNamespace(path=f"{folder}/s", pid=process.pid)


@pytest.fixture
def asker(server):
    with Asker(f"ipc://{server.path}") as its:
        assert_seen(its)
        yield its


@contextmanager
def bounded(model, folder, **bounds):
    """A server in this process whose bounds are soon reached."""
    begun, found = threading.Event(), SimpleNamespace(path=f"{folder}/s")

    async def main():
        address = f"ipc://{found.path}"
        async with DetectorServer("onnxruntime", model, "yolo-generic", address, bounds=DoorBounds(**bounds)) as its:
            found.server, found.loop, found.end = its, asyncio.get_running_loop(), asyncio.Event()
            begun.set()
            await found.end.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        assert begun.wait(60)
        yield found
    finally:
        found.loop.call_soon_threadsafe(found.end.set)
        thread.join(30)
    assert not thread.is_alive()


PING, PONG = framed(COMMAND, b"\x04PING\0\0"), struct.pack(">BB", COMMAND, 5) + b"\x04PONG"


def ping(raw, over):
    """PINGs without end and without a pause, whose answers are read and forgotten."""
    with suppress(OSError):
        while not over.is_set():
            raw.socket.sendall(PING * 500)
            while select.select([raw.socket], [], [], 0)[0] and raw.socket.recv(1 << 20):
                pass


class TestMemory:
    @pytest.mark.integration
    def test_messages_without_end(self, server, asker):
        """600 MB in parts that are too long, and in parts that are too many, cost the server less than 20 MB."""
        process = psutil.Process(server.pid)
        before = process.memory_info().rss
        with Raw(server.path) as one, Raw(server.path) as other:
            one.greeted().send(framed(MORE, b"") + framed(MORE, HEADER) + struct.pack(">BQ", LONG, 1 << 40))
            other.greeted().send(framed(MORE, b""))
            piece = bytes(1 << 20)
            for _ in range(300):
                assert one.send(piece)
                other.send(framed(MORE, piece))
            assert_seen(asker)
            assert process.memory_info().rss - before < 20 << 20
            assert other.ended()

    def test_as_many_connections_as_there_may_be(self, model, tmp_path):
        """One more is ended at once, and counted; when one goes, there is room."""
        with bounded(model, tmp_path, connections=3, idle=1e6) as its, Raw(its.path) as first, Raw(its.path) as second:
            first.greeted()
            second.greeted()
            with Asker(f"ipc://{its.path}") as asker:
                assert_seen(asker)
                with Raw(its.path) as fourth:
                    assert fourth.ended()
                assert its.server.counts.refused >= 1
                second.socket.close()
                with Asker(f"ipc://{its.path}") as other:  # it connects until there is room
                    assert_seen(other)
                assert_seen(asker)

    @pytest.mark.integration
    def test_commands_are_no_messages(self, model, tmp_path):
        """Connections that send PINGs and no frames are silent: a detector that comes gets the place of one."""
        over = threading.Event()
        with bounded(model, tmp_path, connections=2, idle=0.05) as its, ExitStack() as stack:
            stack.callback(over.set)
            for _ in range(2):
                raw = stack.enter_context(Raw(its.path)).greeted()
                pinging = threading.Thread(target=ping, args=(raw, over))
                pinging.start()
                stack.callback(pinging.join)
                stack.callback(over.set)
            with Asker(f"ipc://{its.path}") as asker:  # it connects until there is room
                assert_seen(asker)

    def test_silent_ones_make_room(self, model, tmp_path):
        """A detector whose connection was ended since it was silent connects again, and is answered."""
        address = f"ipc://{tmp_path}/s"
        with bounded(model, tmp_path, connections=1, idle=0.3) as its, Asker(address) as one, Asker(address) as other:
            for n in range(4):
                assert_seen((one, other)[n % 2], n / 4)
            assert its.server.counts.connected <= 1


class TestTime:
    def test_others_have_their_turn_after_each_command(self):
        """However many commands one read has, the loop runs others between two of them."""

        async def main():
            near, far = socket.socketpair()
            with near, far:
                far.setblocking(False)
                connection, turns = ZmtpConnection(far), 0
                near.sendall(PING * 400)
                waiting = asyncio.create_task(connection.begin_message(PATIENCE))
                answers = 0
                near.setblocking(False)
                while answers < 400 * len(PONG):
                    await asyncio.sleep(0)
                    turns += 1
                    with suppress(BlockingIOError):
                        answers += len(near.recv(65536))
                waiting.cancel()
                return turns

        assert asyncio.run(main()) >= 400

    @pytest.mark.integration
    @pytest.mark.parametrize(
        "begun", [b"", GREETING[:20], GREETING, HELLO + ASK[:5], HELLO + ASK[:40], HELLO + ASK[:-1]]
    )
    def test_it_stands_still(self, model, tmp_path, begun):
        """In the middle of a greeting or of a message: its connection ends, and the others are answered."""
        with bounded(model, tmp_path, complete=0.2) as its, Raw(its.path) as raw:
            raw.send(begun)
            assert raw.ended()
            with Asker(f"ipc://{its.path}") as asker:
                assert_seen(asker)

    def test_it_takes_no_answers(self, model, tmp_path):
        """It asks, and never reads: its connection ends when its socket is full."""
        with bounded(model, tmp_path, complete=0.5) as its, Raw(its.path) as raw:
            raw.greeted()
            while raw.send(message(b"", b"{}")):
                pass
            with Asker(f"ipc://{its.path}") as asker:
                assert_seen(asker)

    def test_it_sends_as_fast_as_it_can(self, server, asker):
        """Parts that are skipped as they come do not keep the others waiting."""
        end = threading.Event()

        def flood():
            piece = message(b"", b"{}", bytes(1 << 20))
            with Raw(server.path) as raw:
                raw.greeted()
                raw.socket.settimeout(0.2)
                while not end.is_set():
                    try:
                        raw.send(piece)
                        raw.socket.recv(1 << 16)
                    except TimeoutError:
                        pass

        threads = [threading.Thread(target=flood) for _ in range(2)]
        for thread in threads:
            thread.start()
        for n in range(20):
            assert_seen(asker, n / 20)
        end.set()
        for thread in threads:
            thread.join(30)


class TestBytes:
    @pytest.mark.parametrize(
        "data",
        [
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(64),
            bytes(64),
            GREETING[:10] + b"\x01\x00" + GREETING[12:],
            GREETING[:12] + b"CURVE".ljust(20, b"\0") + bytes(32),
            GREETING + message(b"", HEADER),
            GREETING + ready(b"PUB"),
            GREETING + framed(COMMAND, b"\x05READY\xff"),
            GREETING + framed(COMMAND, b"\x05READY\x0bSocket-Type\xff\xff\xff\xffREQ"),
            GREETING + struct.pack(">BQ", COMMAND | LONG, 1 << 60),
            HELLO + struct.pack(">BQ", COMMAND | LONG, 1 << 20),
            HELLO + framed(COMMAND | MORE, b"\x04PING"),
            HELLO + b"\x80\x00",
            HELLO + framed(COMMAND, b"\x05ERROR\x03why"),
            HELLO + framed(MORE, b"") * 100,
        ],
    )
    def test_what_is_no_protocol(self, server, asker, data):
        """Ends its connection."""
        with Raw(server.path) as raw:
            raw.send(data)
            assert raw.ended()
        assert_seen(asker)

    def test_byte_by_byte(self, server):
        """A message that comes in pieces of any size is the same."""
        with Raw(server.path) as raw:
            for byte in HELLO + ASK[:100]:
                raw.send(bytes([byte]))
            raw.send(ASK[100:30000])
            raw.send(ASK[30000:] + ASK)
            raw.exactly(64)
            raw.hear()
            for _ in range(2):
                parts = [raw.hear() for _ in range(3)]
                assert [flags & MORE for flags, _ in parts] == [1, 1, 0]
                rows = np.frombuffer(parts[2][1], np.float32).reshape(20, 6)
                np.testing.assert_allclose(rows, rows_for(0.5), atol=1e-6)

    def test_pings(self, server):
        """Are answered, also between a message's parts: ZeroMQ's heartbeats keep the connection."""
        ping = framed(COMMAND, b"\x04PING\x00\x0aabc")
        with Raw(server.path) as raw:
            raw.greeted().send(ping + framed(MORE, b"") + ping + framed(MORE, HEADER) + framed(0, FRAME.tobytes()))
            assert [raw.hear() for _ in range(2)] == [(COMMAND, b"\x04PONGabc")] * 2
            assert raw.hear() == (MORE, b"")
            assert json.loads(raw.hear()[1])["shape"] == [20, 6]

    def test_mutants(self, server, asker):
        """A conversation in which bytes are changed, left out or doubled is no harm, four hundred times."""
        generator, talk = random.Random(7), HELLO + message(b"", HEADER, FRAME.tobytes()[:200]) * 2
        for _ in range(400):
            data = bytearray(talk)
            for _ in range(generator.randint(1, 4)):
                at = generator.randrange(len(data))
                kind = generator.randrange(3)
                data[at : at + 1] = (bytes([generator.randrange(256)]), b"", data[at : at + 1] * 2)[kind]
            with Raw(server.path) as raw:
                raw.send(bytes(data))
                raw.socket.shutdown(socket.SHUT_WR)
                raw.ended()
        assert_seen(asker)


class TestSockets:
    def test_with_options(self, server):
        """REQ sockets with heartbeats, and such that number their requests, are answered."""
        with Asker(f"ipc://{server.path}") as asker:
            asker.socket.disconnect(f"ipc://{server.path}")
            for option, value in {
                "REQ_CORRELATE": 1,
                "REQ_RELAXED": 1,
                "HEARTBEAT_IVL": 20,
                "HEARTBEAT_TIMEOUT": 60_000,
            }.items():
                asker.socket.setsockopt(getattr(zmq, option), value)
            asker.socket.connect(f"ipc://{server.path}")
            for n in range(20):
                assert_seen(asker, n / 20)

    def test_many_questions_at_once(self, server):
        """A DEALER that does not wait for answers gets them in the order of its questions."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVTIMEO, 30_000)
            dealer.connect(f"ipc://{server.path}")
            for n in range(30):
                dealer.send_multipart([b"", HEADER, frame_of(n / 30).tobytes()])
            for n in range(30):
                rows = np.frombuffer(dealer.recv_multipart()[2], np.float32).reshape(20, 6)
                np.testing.assert_allclose(rows, rows_for(n / 30), atol=1e-6)


def test_addresses():
    """ZeroMQ's star is every machine; no host is this machine."""
    assert frigate_address("tcp://*:5555").is_open
    assert frigate_address("tcp://0.0.0.0:5555").is_open
    assert frigate_address("tcp://*:*").port == 0
    assert not frigate_address("tcp://:5555").is_open
    assert frigate_address("tcp://[::1]:5").place == "[::1]:5"
    assert frigate_address("ipc:///a/b").path == "/a/b"
