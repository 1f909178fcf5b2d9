"""Sockets of clients are closed by a process that may wait."""

import errno
import os
import resource
import select
import signal
import socket
import subprocess
import threading
from pathlib import Path

import older_kernel
import psutil
import pytest
from accounts import words_as
from served_devices import CONNECT, GROUP, SERVER, SINGLE, foreign
from slow_to_close import SlowToClose
from waiting import PATIENCE, until

from burst import Malformed
from burst.channel import Channel
from driver.service import closing_process
from driver.service.closing_process import ClosingProcess
from driver.service.last_descriptor import LastDescriptor


@pytest.fixture
def closing():
    """The process."""
    found = ClosingProcess(lambda: None)
    yield found
    if found.pid:
        os.kill(found.pid, signal.SIGKILL)


def pair():
    """A client's socket, and what a server has accepted."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    far.settimeout(PATIENCE)
    return near, far


def has_ended(client):
    """True once nobody has the other end any more."""
    with client:
        return client.recv(1) == b""


@pytest.mark.integration
def test_what_lies_unread_in_a_socket_holds_nobody(closing):
    """Sockets that linger lie in hundreds of others: all of these are closed, and the last ones too."""
    clients = []
    for _ in range(300):
        slow, (server, client) = SlowToClose(), pair()
        socket.send_fds(client, [b"x"], [slow.fileno()])
        slow.leave()
        clients.append((client, slow))
        closing.close(server)
    server, last = pair()
    closing.close(server)
    assert has_ended(last)
    for client, slow in clients:
        with pytest.raises(ConnectionResetError):  # as what it had sent was not read
            has_ended(client)
        slow.close()


def test_a_socket_goes_on_for_who_has_a_copy(closing):
    """What lies in it is not touched."""
    server, client = pair()
    client.send(b"hello")
    with server.dup() as other:
        closing.close(server)
        barrier, end = pair()
        closing.close(barrier)
        assert has_ended(end)
        assert other.recv(9) == b"hello"
    assert has_ended(client)


def test_many_threads(closing):
    """Each closes its own copy before the process closes the last one."""
    pairs = [pair() for _ in range(64)]
    threads = [threading.Thread(target=closing.close, args=(server,)) for server, _ in pairs]
    for thread in threads:
        thread.start()
    assert all(has_ended(client) for _, client in pairs)
    for thread in threads:
        thread.join()


def replaced(closing, pid):
    """Looks until there is another process than this one."""

    def is_another():
        closing.look()
        return closing.pid not in {0, pid}

    until(is_another)


def test_where_it_was_ended(closing, caplog):
    """Another one begins, and says so once; what was closed meanwhile is closed there."""
    pairs, pid = [pair() for _ in range(3)], closing.pid
    os.kill(pid, signal.SIGKILL)
    assert select.select([closing], [], [], PATIENCE)[0]
    for server, _ in pairs:
        closing.close(server)
    assert ended(pairs) == 0
    replaced(closing, pid)
    assert all(has_ended(client) for _, client in pairs)
    assert [each.message.split("; ")[1] for each in caplog.records] == ["another one is started"]


def ended(pairs):
    """How many of these clients nobody serves any more."""
    poll = select.poll()
    for _, client in pairs:
        poll.register(client, 0)
    return len(poll.poll(0))


def test_where_it_takes_nothing(closing, caplog, monkeypatch):
    """Its user neither waits for it nor closes the sockets itself: more than fit on the way are kept."""
    pairs, pid = [pair() for _ in range(400)], closing.pid
    os.kill(pid, signal.SIGSTOP)
    for server, _ in pairs:
        closing.close(server)
    assert ended(pairs) == 0
    assert closing.is_waiting
    monkeypatch.setattr(closing_process, "WITHIN", 0)
    replaced(closing, pid)
    monkeypatch.undo()
    until(lambda: closing.look() or not closing.is_waiting)
    assert all(has_ended(client) for _, client in pairs)
    assert len(caplog.records) == 1


def test_while_too_many_descriptors_are_on_their_way(closing, monkeypatch):
    """A socket whose channel is forgotten stays until it can be handed over."""

    def refuse(*_):
        raise OSError(errno.ETOOMANYREFS, "too many references")

    pairs, pid = [pair() for _ in range(2)], closing.pid
    monkeypatch.setattr(socket.socket, "sendmsg", refuse)
    channel = Channel(pairs[0][0])
    closing.close(channel.socket)
    del channel
    assert ended(pairs) == 0
    closing.look()
    monkeypatch.undo()
    closing.close(pairs[1][0])
    assert all(has_ended(client) for _, client in pairs)
    assert closing.pid == pid


def test_a_close_that_never_returns_holds_its_own_account(monkeypatch):
    """However many of them there are."""
    close = os.close

    def stand_still(fd):
        with socket.socket(fileno=os.dup(fd)) as found:
            try:
                is_bad = found.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"!"
            except OSError:
                is_bad = False
        while is_bad:
            threading.Event().wait()
        close(fd)

    far = [pair() for _ in range(20)]
    monkeypatch.setattr(os, "close", stand_still)
    closing = ClosingProcess(lambda: None)
    monkeypatch.undo()
    for server, client in far:
        client.send(b"!")
        closing.close(server, 1)
    server, client = pair()
    closing.close(server, 2)
    assert has_ended(client)
    assert ended(far) == 0
    os.kill(closing.pid, signal.SIGKILL)
    for _, client in far:
        client.close()


def refused_unread(near, far):
    """True if `far` was told why it is refused, and what it had sent lies in its socket, not received."""
    (_, _, words) = far.receive(PATIENCE).body[:3]
    _, _, flags, _ = near.recvmsg(9, 0, socket.MSG_PEEK)
    return bool(words) and bool(flags & socket.MSG_CTRUNC)


def test_a_client_for_whom_no_descriptor_is_left(tmp_path):
    """It is told so without its message being received, and others close its socket."""
    closed = []
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client,
    ):
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        client.connect(listener.getsockname())
        far = Channel(client)
        far.send(["hello"], [0])
        LastDescriptor().turn_away(listener, OSError(errno.EMFILE, "no more"), lambda sock: closed.append(sock.dup()))
        (near,) = closed
        with near:
            assert refused_unread(near, far)


def test_a_peer_without_descriptors_that_sends_some():
    """Its message stays where it is: nothing of it is closed by whoever reads."""
    near, far = Channel.pair()
    readable, writable = os.pipe()
    far.send(["well"])
    assert near.receive_nothing_else().body == ["well"]
    far.send(["bad"], [writable])
    os.close(writable)
    with pytest.raises(Malformed):
        near.receive_nothing_else()
    os.set_blocking(readable, False)
    with pytest.raises(BlockingIOError):
        os.read(readable, 1)
    near.close()
    until(lambda: os.read(readable, 1) == b"")
    os.close(readable)
    far.close()


REFUSED = """
import socket
for _ in range({}):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect({!r})
        sock.recv(1)
"""


@pytest.mark.integration
@pytest.mark.parametrize("device", ["reference", SINGLE])
@pytest.mark.parametrize("sent", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.integration)])
def test_a_device_serves_without_it(accounts, device, sent):
    """While it is dead or stopped one account has more connections refused than fit on the way, and another one
    computes; then there is another process, as one line says.
    """
    with foreign("--group", GROUP, device=device, limits="uid_clients = 1\n") as (address, process):

        def found():
            children = psutil.Process(process.pid).children()
            return [each.pid for each in children if each.name() == "burst-closing"]

        hostile, other = accounts[:2]
        assert hostile.do(CONNECT.format(address)) is None
        (pid,) = found()
        os.kill(pid, sent)
        assert hostile.do(REFUSED.format(300, address)) is None
        assert other.do(CONNECT.format(address), "out = prepared.run(X)[0].tolist()") == [[2.0] * 4]
        until(lambda: found() not in [[], [pid]])
        log = Path(address).parents[1] / "log"
        until(lambda: log.read_text().count("another one is started") == 1)
        for client in (hostile, other):
            assert client.do("device.close()") is None


@pytest.mark.integration
@pytest.mark.parametrize("device", ["reference", SINGLE])
def test_sockets_that_wait_to_be_closed_leave_descriptors_to_others(accounts, device):
    """While the process is stopped one account has more connections refused than the device may have descriptors."""
    with foreign("--group", GROUP, device=device, limits="uid_clients = 1\n", descriptors=600) as (address, process):
        hostile, other = accounts[:2]
        assert hostile.do(CONNECT.format(address)) is None
        (closing,) = (each for each in psutil.Process(process.pid).children() if each.name() == "burst-closing")
        closing.suspend()
        assert hostile.do(REFUSED.format(1000, address)) is None
        assert other.do(CONNECT.format(address), "out = prepared.run(X)[0].tolist()") == [[2.0] * 4]
        assert "could not be accepted" not in (Path(address).parents[1] / "log").read_text()
        for client in (hostile, other):
            assert client.do("device.close()") is None


def limit(pid, tasks):
    """Lets the account of a process have so many, as that account may."""
    words = ["/usr/bin/prlimit", "--pid", str(pid), f"--nproc={'unlimited' if tasks < 0 else tasks}:"]
    subprocess.run(words_as(SERVER, (GROUP,), words), check=True, cwd="/")


MORE = """
import contextlib, socket
kept = []
for _ in range(100):
    kept.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK))
    with contextlib.suppress(BlockingIOError):
        kept[-1].connect({!r})
"""


@pytest.mark.integration
def test_a_device_that_waits_for_room_can_be_stopped(accounts):
    """While the process is stopped, and no other one can be started, SIGTERM ends a device that accepts no more."""
    with foreign("--group", GROUP, device=SINGLE, limits="uid_clients = 1\n", descriptors=600) as (address, process):
        hostile = accounts[0]
        assert hostile.do(CONNECT.format(address)) is None
        (closing,) = (each for each in psutil.Process(process.pid).children() if each.name() == "burst-closing")
        closing.suspend()
        limit(process.pid, 1)
        descriptors = psutil.Process(process.pid).num_fds
        most = descriptors() + 300
        until(lambda: hostile.do(MORE.format(address)) or descriptors() >= most)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert hostile.do("device.close()") is None


def test_a_client_for_whom_no_thread_can_be_started(accounts):
    """A socket that lingers came with its hello: it is told so, and the next one is served."""
    other = accounts[1]
    with foreign("--group", GROUP, device=SINGLE, under=older_kernel.UNDER) as (address, process):
        assert other.do(CONNECT.format(address), "device.close()") is None
        _, most = resource.getrlimit(resource.RLIMIT_NPROC)  # which it has inherited
        limit(process.pid, 1)
        slow, client = SlowToClose(), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.kill(process.pid, signal.SIGSTOP)  # until the hello is there, too
        client.connect(address)
        with Channel(client) as far:
            far.send([7, "hello"], [slow.fileno()])
            slow.leave()
            os.kill(process.pid, signal.SIGCONT)
            assert "no more threads can be started" in str(far.receive(PATIENCE).body)
        limit(process.pid, most)
        assert other.do(CONNECT.format(address), "out = prepared.run(X)[0].tolist()") == [[2.0] * 4]
        slow.close()
        assert other.do("device.close()") is None
