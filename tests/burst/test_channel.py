"""Channels: messages with descriptors between processes that need not trust each other, and the thread that serves
many channels.
"""

import array
import contextlib
import gc
import logging
import os
import random
import resource
import socket
import struct
import threading

import msgpack
import pytest
from waiting import PATIENCE, at_least, until

from burst import Malformed, PeerDied, Timeout
from burst import channel as channel_module
from burst.channel import MAX_BYTES, MAX_FDS, Channel, ChannelLoop, Message, pack
from fmq import LifePage


def fds():
    gc.collect()  # of the tests before
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def pair(closing):
    near, far = Channel.pair()
    return closing(near), closing(far)


@pytest.fixture
def plain_fd():
    """A descriptor to send."""
    read, write = os.pipe()
    os.close(write)
    yield read
    os.close(read)


class TestMessages:
    """What arrives is bounded before it is decoded, and what is refused leaves nothing behind."""

    @pytest.mark.parametrize(
        "body", [[], ["x", 1, -1, 2**63, 1.5, None, True, b"\xff", "é", [1, [2]], {"a": 1}], list(range(10_000))]
    )
    def test_round_trip(self, pair, body):
        """What msgpack can say arrives as it was."""
        near, far = pair
        near.send(body)
        assert far.receive(20).body == body

    @pytest.mark.parametrize("count", [1, MAX_FDS])
    def test_descriptors(self, pair, plain_fd, count):
        """Descriptors arrive beside their message as many as were sent, closed on exec, and are the receiver's."""
        near, far = pair
        near.send([], [plain_fd] * count)
        before = fds()
        message = far.receive(20)
        assert len(message.fds) == count
        assert not any(os.get_inheritable(fd) for fd in message.fds)
        taken = message.take_fds()
        message.close()
        assert fds() == before + count
        assert all(os.path.sameopenfile(plain_fd, fd) for fd in taken)
        Message(b"", taken).close()
        assert fds() <= before

    def test_the_longest_message(self, pair):
        """A message of exactly the limit arrives."""
        near, far = pair
        body = [b"x" * (MAX_BYTES - 4)]
        assert len(pack(body)) == MAX_BYTES
        near.send(body)
        assert far.receive(20).body == body

    def test_a_message_that_is_too_long_to_send(self, pair):
        """One byte more is refused by the sender, and nothing goes out."""
        near, far = pair
        with pytest.raises(Malformed, match=f"{MAX_BYTES + 1} bytes; at most {MAX_BYTES}"):
            near.send([b"x" * (MAX_BYTES - 3)])
        with pytest.raises(Timeout):
            far.receive(0)

    @pytest.mark.parametrize("excess", ["bytes", "descriptors"])
    def test_a_message_that_is_too_long_to_receive(self, pair, plain_fd, excess):
        """A sender without limits is refused by the receiver, who closes what came with it and can go on."""
        near, far = pair
        before = fds()
        raw, count = (b"\x90" * (MAX_BYTES + 1), 3) if excess == "bytes" else (b"\x90", MAX_FDS + 1)
        near.send_raw(raw, [plain_fd] * count)
        with pytest.raises(Malformed, match="exceeds 64 KiB or 72 descriptors"):
            far.receive(20)
        until(lambda: fds() <= before)  # a thread of their own closes them
        near.send(["next"])
        assert far.receive(20).body == ["next"]

    def test_descriptors_that_have_no_room(self, pair, plain_fd):
        """Descriptors that the kernel dropped because this process has too many open are a Malformed message, not one
        with fewer descriptors.
        """
        near, far = pair
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        near.send([], [plain_fd] * 20)
        before = fds()
        used = {int(name) for name in os.listdir("/proc/self/fd")}
        fifth = [n for n in range(1000) if n not in used][4]
        resource.setrlimit(resource.RLIMIT_NOFILE, (fifth, limits[1]))
        try:
            with pytest.raises(Malformed):
                far.receive(20)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        until(lambda: fds() <= before)  # a thread of their own closes them

    @pytest.mark.parametrize(
        "raw",
        [
            b"\xc1",  # never used
            b"\x91",  # a list of one, without it
            b"\xdd\xff\xff\xff\xff",  # a list of four billion
            b"\xdb\xff\xff\xff\xff",  # a string of four billion
            b"\x90\x90",  # two messages in one
            b"\x91\xa1\xff",  # not UTF-8
            b"\x81\x90\x90",  # a map with a list for a key
            b"\x91\xd4\x05x",  # ext types
            b"\x91\xd6\xff\0\0\0\0",
            b"\x91\xc7\x00\x05",
            b"\x91\xc7\xff\x05",
            msgpack.packb([msgpack.Timestamp(1, 1)]),
            b"\x91" * MAX_BYTES,  # 65 536 levels deep
            b"\x81\x01" * (MAX_BYTES // 2),
            b"\x80",  # anything but a list
            b"\xc0",
            b"\x01",
            b"\xa1x",
        ],
        ids=lambda raw: raw[:6].hex(),
    )
    def test_what_is_no_message(self, raw):
        """Whatever is not msgpack of a list, without ext types and not too deep, is Malformed."""
        with pytest.raises(Malformed):
            _ = Message(raw, []).body

    def test_garbage(self, pair):
        """Random bytes, and good messages with random damage, are Malformed or a list: nothing else ever comes out."""
        near, far = pair
        rng = random.Random(3)
        good = pack(["burst", 1, [1, "'|V24'", 1024, 1, True, None], {"a": [None, 1.5]}, b"bytes"])
        refused = 0
        for _ in range(3000):
            raw = bytearray(rng.randbytes(rng.randrange(1, 40)) if rng.random() < 0.5 else good)
            for _ in range(rng.randrange(4)):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
            near.send_raw(bytes(raw))
            try:
                assert isinstance(far.receive(20).body, list)
            except Malformed:
                refused += 1
        assert 1000 < refused < 2999


class TestEnds:
    """Waits end: with a message, with the timeout, or with the peer."""

    def test_timeout(self, pair):
        """Without a message Timeout comes when it is due, and later messages arrive."""
        near, far = pair
        with at_least(0.02), pytest.raises(Timeout, match=r"0\.02"):
            far.receive(0.02)
        with pytest.raises(TimeoutError):
            far.call(["?"], timeout=0)
        near.send([1])
        assert far.receive(0).body == [1]

    @pytest.mark.parametrize("timeout", [None, 20])
    def test_a_peer_that_closes(self, pair, timeout):
        """What was sent before the end arrives; then every receive and send is PeerDied."""
        near, far = pair
        near.send(["last"])
        near.close()
        near.close()
        assert far.receive(timeout).body == ["last"]
        for _ in range(2):
            with pytest.raises(PeerDied):
                far.receive(timeout)
            with pytest.raises(PeerDied):
                far.send([])

    @pytest.mark.parametrize("end", ["near", "far"])
    def test_shutdown_ends_a_wait_in_another_thread(self, pair, end):
        """shutdown on either end ends a receive in progress, and is harmless on a closed channel."""
        near, far = pair
        ended = []

        def wait():
            with pytest.raises(PeerDied) as caught:
                far.receive()
            ended.append(caught)

        waiter = threading.Thread(target=wait)
        waiter.start()
        (near if end == "near" else far).shutdown()
        waiter.join(20)
        assert ended
        far.close()
        far.shutdown()

    def test_another_reader_is_faster(self, pair):
        """Of two readers with a timeout that see the same message one gets it, and the other's wait still ends."""
        near, far = pair
        got = []

        def receive():
            with contextlib.suppress(Timeout):
                got.append(far.receive(0.1).body)

        for n in range(10):
            readers = [threading.Thread(target=receive, daemon=True) for _ in range(2)]
            for reader in readers:
                reader.start()
            near.send([n])
            for reader in readers:
                reader.join(20)
                assert not reader.is_alive()
        assert got == [[n] for n in range(10)]

    @pytest.mark.parametrize("timeout", [None, 0, 1])
    def test_this_end_is_closed(self, pair, timeout):
        """Using a channel after its close is PeerDied, however it is used."""
        _, far = pair
        far.close()
        with pytest.raises(PeerDied):
            far.receive(timeout)
        with pytest.raises(PeerDied):
            far.send([])

    def test_an_empty_message_is_the_end(self, pair):
        """No sender of ours sends zero bytes; from another it cannot be told from the end, and is taken for it."""
        near, far = pair
        near.socket.send(b"")
        with pytest.raises(PeerDied):
            far.receive(20)

    def test_a_peer_that_never_reads(self, monkeypatch, closing):
        """Sending to a peer that does not read its messages is PeerDied after a while, and does not hold us."""
        monkeypatch.setattr(channel_module, "_SEND_TIMEOUT", struct.pack("ll", 0, 50_000))
        near, far = map(closing, Channel.pair())

        def send_all():
            while True:
                near.send([b"x" * 1000])

        with pytest.raises(PeerDied, match="has not read"):
            send_all()
        assert far.receive(0).body == [b"x" * 1000]

    def test_a_killed_peer(self, child):
        """kill -9 of a peer ends a wait."""
        process = child(lambda channel: channel.call(["ready"]))
        assert process.wait_told() == ["ready"]
        process.kill()
        with pytest.raises(PeerDied):
            process.channel.receive(PATIENCE)

    def test_a_watched_peer(self, child):
        """With its life page a peer's death ends a wait also when another process keeps its socket open."""

        def live(channel):
            life = LifePage()
            channel.send(["alive"], [life.fd, channel.fileno()])
            channel.receive()

        process = child(live)
        with contextlib.closing(process.channel.receive(PATIENCE)) as message:
            process.channel.watch(message.fds.pop(0))
            process.kill()
            with pytest.raises(PeerDied):
                process.channel.receive(PATIENCE)

    def test_the_peer_is_told_by_the_kernel(self, pair):
        """peer_uid is the user who made the other end."""
        assert pair[0].peer_uid == os.getuid()


def not_a_socket():
    return os.memfd_create("x")


def stream():
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ends[1].close()
    return ends[0].detach()


def datagram():
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).detach()


def tcp():
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM).detach()


@pytest.mark.parametrize("make", [not_a_socket, stream, datagram, tcp])
def test_descriptors_that_are_no_channel(make):
    """A descriptor that is not a packet socket is Malformed, and closed all the same."""
    before = fds()
    with pytest.raises(Malformed, match="socket"):
        Channel.from_fd(make())
    assert fds() <= before


def test_a_channel_from_a_descriptor_that_does_not_block(pair):
    """A sender cannot make our waits return early by handing over a socket that does not block."""
    near, far = pair
    far.socket.setblocking(False)
    with Channel.from_fd(os.dup(far.fileno())) as channel:
        far.close()
        near.close()
        with pytest.raises(PeerDied, match="closed"):
            channel.receive()


def test_ancillary_data_of_a_strange_length():
    """Half a descriptor at the end of the ancillary data is not read as one."""
    data = array.array("i", [5, 6]).tobytes() + b"\1\2"
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, data)
    other = (socket.SOL_SOCKET, 2, b"\0" * 12)  # SCM_CREDENTIALS
    assert list(channel_module._descriptors([rights, other])) == [5, 6]


class TestLoop:
    """One thread for many channels: what one of them does is no concern of the others."""

    @pytest.fixture
    def serve(self, closing):
        """serve(on_message): a new channel on the loop, whose `log` gets what happens and `ended` its end."""
        loop = ChannelLoop("test-loop")
        served = []

        def make(on_message=lambda message: None, on_end=lambda: None):
            near, far = map(closing, Channel.pair())
            near.got, near.ends, near.event = [], [], threading.Semaphore(0)

            def message(message):
                on_message(message)
                near.got.append(message.body)
                near.event.release()

            def end():
                near.ends.append(1)
                near.event.release()
                on_end()

            loop.add(far, message, end)
            served.append(far)
            near.far = far
            return near

        make.loop = loop
        yield make
        for far in served:
            loop.discard(far)

    @staticmethod
    def wait(channel):
        assert channel.event.acquire(timeout=20)

    def test_messages_arrive(self, serve):
        """Each channel's messages go to its own handler, in order, all in one thread."""
        threads = set()
        channels = [serve(lambda _: threads.add(threading.get_ident())) for _ in range(5)]
        for n in range(10):
            for channel in channels:
                channel.send([n])
        for channel in channels:
            for _ in range(10):
                self.wait(channel)
            assert channel.got == [[n] for n in range(10)]
        assert len(threads) == 1
        assert threading.get_ident() not in threads

    def test_a_failing_handler_ends_its_channel_alone(self, serve, caplog):
        """An exception in a handler is logged and ends that channel, once; the others go on."""

        def fail(message):
            raise ZeroDivisionError("unforeseen")

        bad, good = serve(fail), serve()
        with caplog.at_level(logging.ERROR):
            bad.send([1])
            self.wait(bad)
        assert (bad.got, bad.ends) == ([], [1])
        assert [record.exc_info[0] for record in caplog.records] == [ZeroDivisionError]
        bad.send([2])
        good.send([3])
        self.wait(good)
        assert (bad.got, bad.ends, good.got) == ([], [1], [[3]])

    @pytest.mark.parametrize("raw", [b"\xc1", b"\x80", b"x" * (MAX_BYTES + 1)])
    def test_a_malformed_message_ends_its_channel_alone(self, serve, caplog, raw):
        """A peer that breaks the protocol is let go without a word in the log."""
        bad, good = serve(lambda message: message.body), serve()
        bad.send_raw(raw)
        self.wait(bad)
        good.send([1])
        self.wait(good)
        assert (bad.ends, good.got, good.ends, caplog.records) == ([1], [[1]], [], [])

    def test_a_failing_on_end(self, serve, caplog):
        """An exception in on_end does not end the thread that serves the others."""

        def fail():
            raise ZeroDivisionError("unforeseen")

        bad, good = serve(on_end=fail), serve()
        bad.close()
        self.wait(bad)
        good.send([1])
        self.wait(good)
        assert good.got == [[1]]
        assert [record.exc_info[0] for record in caplog.records] == [ZeroDivisionError]

    def test_the_end_comes_once(self, serve):
        """on_end is called once when the peer closes, after its last message."""
        channel, other = serve(), serve()
        channel.send([1])
        channel.close()
        self.wait(channel)
        self.wait(channel)
        other.send([2])
        self.wait(other)
        assert (channel.got, channel.ends) == ([[1]], [1])

    def test_a_discarded_channel_is_left_alone(self, serve):
        """After discard neither handler is called; discarding again is harmless, on a closed channel too."""
        channel, other = serve(), serve()
        serve.loop.discard(channel.far)
        channel.send([1])
        channel.close()
        other.send([2])
        self.wait(other)
        serve.loop.discard(channel.far)
        channel.far.close()
        serve.loop.discard(channel.far)
        assert (channel.got, channel.ends) == ([], [])

    def test_a_handler_may_close_another_channel(self, serve, caplog):
        """A channel that is discarded and closed while its message waits to be handled ends without a word."""
        entered, go_on = threading.Semaphore(0), threading.Semaphore(0)

        def hold(message):
            entered.release()
            assert go_on.acquire(timeout=20)

        holder = serve(hold)
        holder.send([0])
        assert entered.acquire(timeout=20)
        victims = []

        def close_all(message):
            for victim in victims:
                serve.loop.discard(victim.far)
                victim.far.close()

        killers = [serve(close_all) for _ in range(2)]
        victims += [serve() for _ in range(5)]
        for channel in (killers[0], *victims, killers[1]):
            channel.send([1])  # all of them are ready when the loop looks again
        go_on.release()
        for killer in killers:
            self.wait(killer)
        assert [victim.ends for victim in victims] == [[]] * 5
        assert caplog.records == []

    def test_descriptors_that_nobody_took(self, serve, plain_fd):
        """Descriptors that a handler leaves in its message end the channel, and are closed."""
        channels = [serve() for _ in range(10)]
        before = fds()
        for channel in channels:
            channel.send([], [plain_fd] * MAX_FDS)
            self.wait(channel)
            self.wait(channel)
            assert (channel.got, channel.ends) == ([[]], [1])
        until(lambda: fds() <= before)  # a thread of their own closes them

    def test_a_message_that_somebody_else_took(self, serve):
        """A channel whose message was taken by another reader before the loop came to it goes on."""
        channel = serve()
        stop = threading.Event()

        def steal():
            while not stop.is_set():
                with contextlib.suppress(Timeout):
                    channel.far.receive(0)

        thief = threading.Thread(target=steal)
        thief.start()
        for n in range(500):
            channel.send([n])
        stop.set()
        thief.join()
        channel.send(["last"])
        while channel.got[-1:] != [["last"]]:
            self.wait(channel)
        assert channel.ends == []

    def test_fork(self, serve, child):
        """A loop works in a forked child after forget, and the parent's goes on."""
        channel = serve()
        channel.send([1])
        self.wait(channel)

        def forked(told):
            serve.loop.forget()
            near, far = Channel.pair()
            serve.loop.add(far, lambda message: told.send(message.body), lambda: told.send(["end"]))
            near.send(["in the child"])
            near.close()
            told.receive()

        process = child(forked)
        assert process.wait_told() == ["in the child"]
        assert process.wait_told() == ["end"]
        channel.send([2])
        self.wait(channel)
        assert channel.got == [[1], [2]]


def test_a_message_is_awaited():
    """Silence ends after its time; a message, and the end of the connection, end the wait at once."""
    near, far = Channel.pair()
    with near, far:
        with at_least(0.05):
            assert not far.await_message(0.05)
        near.send([1])
        assert far.await_message(PATIENCE)
        assert far.receive().body == [1]
        near.close()
        assert far.await_message(PATIENCE)
