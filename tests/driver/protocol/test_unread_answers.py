"""Descriptors that a client does not receive: the kernel counts them for the account that sent them."""

import contextlib
import os
import subprocess
import threading

import accounts
import pytest
from slow_to_close import SlowToClose
from waiting import PATIENCE

from burst import ErrorStatus, PeerDied, ResourceExhaustedTransient
from burst.channel import Channel, ChannelLoop
from driver.protocol import rpc

FULL = """
import os, resource, threading
from burst import ResourceExhaustedTransient
from burst.channel import Channel
from driver.protocol import rpc

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
near, far = Channel.pair()
with open("/dev/null") as file:
    while True:
        try:
            near.send([], [file.fileno()] * 60)
        except ResourceExhaustedTransient as error:
            print(error)
            break
    client, service = Channel.pair()
    handlers = {"give": lambda _: rpc.Reply([], [os.dup(file.fileno())]), "say": lambda _: rpc.Reply(["well"])}
    threading.Thread(target=rpc.serve, args=(service, handlers), daemon=True).start()
    try:
        rpc.call(client, "give")
    except ResourceExhaustedTransient as error:
        print("refused")
    print(*rpc.call(client, "say")[0])
    far.close()
    print(len(rpc.call(client, "give")[1]))
"""


@pytest.fixture
def asked():
    """Both ends of a connection whose other end answers "give" with a descriptor."""
    client, service = Channel.pair()
    handlers = {"give": lambda _: rpc.Reply([], [os.dup(service.fileno())]), "say": lambda _: rpc.Reply(["well"])}
    thread = threading.Thread(target=rpc.serve, args=(service, handlers), daemon=True)
    thread.start()
    with client, service:
        yield client, thread


def test_one_answer_with_a_descriptor_waits_at_most(asked, monkeypatch):
    """A client that asks on and reads nothing gets no second one, and is let go."""
    client, thread = asked
    monkeypatch.setattr(rpc, "READ_WITHIN", 0.2)
    for number in range(50):
        client.send([number, "give"])
    thread.join(20)
    assert not thread.is_alive()
    message = client.receive(PATIENCE)
    assert (message.body, len(message.fds)) == ([0, 0], 1)
    message.close()


def test_a_client_that_reads_late_gets_all(asked):
    """In the order of its calls."""
    client, thread = asked
    for number in range(20):
        client.send([number, "give" if number % 3 else "say"])
    for number in range(20):
        message = client.receive(PATIENCE)
        assert message.body[:2] == [number, 0]
        assert len(message.fds) == bool(number % 3)
        message.close()
    assert thread.is_alive()


@pytest.mark.integration
def test_where_no_descriptor_can_be_sent_the_call_fails_and_the_connection_lives():
    """The kernel refuses at RLIMIT_NOFILE: that is no end of a peer."""
    if why := accounts.missing():
        pytest.skip(why)
    words = accounts.python_as(65533, (), FULL)
    done = subprocess.run(words, cwd="/", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert "on their way to processes that do not receive them" in first
    assert rest == ["refused", "well", "1"]


def test_a_descriptor_that_takes_long_to_close_holds_no_other_channel(kit):
    """Sent where none belongs, it ends its own channel; the thread that serves all goes on."""
    loop, heard, ended = ChannelLoop("test"), [], threading.Event()
    pairs = [Channel.pair(), Channel.pair()]
    for near, _ in pairs:
        loop.add(near, lambda message: heard.append(message.body), ended.set)
    with contextlib.closing(SlowToClose()) as descriptor:
        pairs[0][1].send(["x"], [descriptor.fileno()])
        descriptor.leave()
        pairs[1][1].send(["y"])
        assert ended.wait(20)
        pairs[1][1].send(["z"])
        kit.until(lambda: ["z"] in heard)


@pytest.mark.parametrize("is_sent_before", [True, False])
def test_a_refusal_is_read_from_a_connection_that_has_ended(is_sent_before):
    """A client that comes late, or that has said what nobody read, is told why it was refused."""
    client, service = Channel.pair()
    with client:
        if is_sent_before:
            client.send([7, "nobody reads this"])
        service.send([None, int(ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT), "the limit is reached"])
        service.close()
        with pytest.raises(ResourceExhaustedTransient, match="the limit is reached"):
            rpc.call(client, "hello")


def test_a_connection_that_has_ended_without_a_word():
    """That is an end, and no endless search for words."""
    client, service = Channel.pair()
    client.send([7, "nobody reads this"])
    service.close()
    with client, pytest.raises(PeerDied):
        client.receive()
