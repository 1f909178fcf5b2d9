"""How a burst ends: in good order, by either side's death, and by a side that breaks the protocol."""

import contextlib
import gc
import os
import threading
from functools import partial

import pytest
from burst_clients import Lender
from waiting import PATIENCE

import fmq
from burst import BurstOffer, Controller, ExecutionBurstServer, GeneralFailure, NotSent, OutputShape, PeerDied, Request
from burst.channel import Channel
from burst.datum import DATUM_DTYPE
from burst.wire import VERSIONS, RequestPacket, encode_request
from fmq.end import DEFAULT_SPIN

CLOSED_WITHOUT_A_WORD = "the device ended this burst"


@pytest.fixture(params=VERSIONS)
def wire(request):
    """Everything here holds in each wire version."""
    return request.param


def nothing(wire, number=1):
    """A request without arguments."""
    return encode_request(RequestPacket((), (), (), False, id=number if wire > 1 else 0), wire)


def fds():
    gc.collect()  # of the tests before
    return len(os.listdir("/proc/self/fd"))


def test_closing_a_controller_ends_the_listener(host, burst, memory, mappings):
    """After close the device's listener is gone, with its thread, its descriptors and its mappings, and it says so
    once. Closing twice is harmless.
    """
    device, pool = host(), memory()
    burst(device).close()
    device.wait_ended()
    before = fds()
    client = burst(device)
    client.run(pool)
    assert fds() > before
    client.close()
    client.close()
    device.wait_ended()
    assert not device.server._thread.is_alive()
    assert fds() <= before  # those of other tests may end meanwhile
    assert mappings(pool) == 1
    assert not device.ended.acquire(blocking=False)
    assert len(client.trace.records()) == 1, "what it noted can still be read"


def test_what_comes_after_the_end(host, burst, memory):
    """Memory that a client frees when its burst has just ended on the device is no error there."""
    device, pool = host(), memory()
    client = burst(device)
    client.run(pool)
    device.server.stop()
    device.wait_ended()
    device.server.free_memory([0])


def test_bursts_end_one_by_one(host, burst, memory):
    """The end of one burst is no concern of another's."""
    device, pool = host(), memory()
    first, second, third = (burst(device) for _ in range(3))
    for client in (first, second, third):
        client.run(pool)
    second.close()
    device.ended.acquire(timeout=PATIENCE)
    for client in (first, third):
        assert client.run(pool).output_shapes == (OutputShape((4,)),)
    for pool_, client in ((memory(), first), (memory(), third)):
        assert client.run(pool_, 5).output_shapes == (OutputShape((5,)),)


@pytest.mark.parametrize("what", ["context", "writer"])
def test_a_client_that_closes_only_a_part(host, raw, what):
    """A burst ends when its client closes the context, or its end of the request queue, and keeps the rest open."""
    device = host()
    for _ in range(50):
        getattr(raw(device), what).close()
        assert device.ended.acquire(timeout=PATIENCE)


def test_stop(host, burst, memory, mappings):
    """stop ends an idle burst at once, may be repeated, and the client is told: an error first, then NotSent."""
    device, pool = host(), memory()
    client = burst(device)
    client.run(pool)
    device.server.stop()
    device.server.stop()
    device.wait_ended()
    device.server.stop()
    assert mappings(pool) == 1
    with pytest.raises(GeneralFailure, match=CLOSED_WITHOUT_A_WORD):
        client.run(pool)
    for _ in range(2):
        with pytest.raises(NotSent, match=CLOSED_WITHOUT_A_WORD):
            client.run(pool)


def test_stop_during_an_execution(host, burst, memory, mappings, gate, gated):
    """stop returns at once; a running execution finishes on its memory, its result is dropped, and all is freed."""

    device, pool, errors = host(gated), memory(), []
    client = burst(device)

    def run():
        with pytest.raises(GeneralFailure, match=CLOSED_WITHOUT_A_WORD) as caught:
            client.run(pool)
        errors.append(caught.value)

    runner = threading.Thread(target=run)
    runner.start()
    assert gate.entered.acquire(timeout=PATIENCE)
    device.server.stop()
    assert mappings(pool) == 2
    gate.open.release()
    device.wait_ended()
    runner.join()
    assert len(errors) == 1
    assert list(pool.asarray(shape=8)) == [0, 1, 2, 3, 1, 2, 3, 4]
    assert mappings(pool) == 1


@pytest.fixture
def prepared(closing, increment):
    """A server that was not started, with what a client has of it."""
    queues = [closing(fmq.MessageQueue.create(DATUM_DTYPE, 64)) for _ in range(2)]
    near, far = Channel.pair()
    closing(near)
    ends = []
    offer = BurstOffer(*(q.descriptor for q in queues), far, increment, on_end=lambda: ends.append(1))
    return ExecutionBurstServer.create(offer), queues, near, ends


def test_a_server_that_is_never_started(prepared):
    """A server that is stopped before it was started frees the queues' roles and its callback just the same, and
    does not start any more.
    """
    server, queues, near, ends = prepared
    server.stop()
    server.stop()
    server.start()
    server.join()
    with pytest.raises(PeerDied):
        near.receive(20)
    with queues[0].reader(), queues[1].writer():
        pass
    assert ends == [1]


def test_queues_that_somebody_else_serves(prepared, increment):
    """A second server on the same queues is refused, keeps nothing, and leaves the first alone."""
    server, queues, _, _ = prepared
    near, far = Channel.pair()
    before = fds()
    with near, far, pytest.raises(fmq.RoleTaken):
        ExecutionBurstServer.create(BurstOffer(*(q.descriptor for q in queues), far, increment))
    assert fds() == before - 2
    requests = fmq.MessageQueue.create(DATUM_DTYPE, 64)
    with requests, pytest.raises(fmq.RoleTaken):
        ExecutionBurstServer.create(BurstOffer(requests.descriptor, queues[1].descriptor, far, increment))
    assert fds() == before - 2
    server.stop()


def test_a_client_is_killed(host, child, remote, memory, mappings, increment, wire):
    """kill -9 of a client ends its listener and frees its memory here."""
    offer, accept = remote
    device, pool = host(), memory()

    def client(channel):
        with Controller(partial(offer, channel), spin=0, versions=[wire]) as controller:
            controller.send(controller.encode(increment.request(pool)))
            channel.send(["ready"])
            channel.receive()

    for _ in range(2):
        process = child(client, pool)
        accept(process.channel, device)
        assert process.wait_told() == ["ready"]
        assert mappings(pool) == 2
        process.kill()
        device.wait_ended()
        assert mappings(pool) == 1


def sockets_but(one):
    """The descriptors of all sockets of this process but one."""
    fds = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
    return [fd for fd in fds if fd != one and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")]


def test_a_client_is_killed_whose_sockets_live_on(host, child, remote, wire):
    """An idle listener hears of its client's death itself, also when another process keeps the client's sockets."""
    offer, accept = remote
    device = host()

    def client(channel):
        with Controller(partial(offer, channel), spin=0, versions=[wire]) as controller:
            controller.send(controller.encode(Request((), (), ())))
            channel.send(["ready"], sockets_but(channel.fileno()))
            channel.receive()

    process = child(client)
    accept(process.channel, device)
    with contextlib.closing(process.channel.receive(PATIENCE)):
        process.kill()
        device.wait_ended()


def test_a_client_is_killed_before_it_hands_over_its_memory(host, child, remote, increment, memory, wire):
    """The wait for a client's memory ends with the client too."""
    offer, accept = remote
    device, pool = host(), memory()

    def client(channel):
        with Lender(partial(offer, channel), wire) as lender:
            lender.answer = lambda _, slots: channel.call(["asked", slots]).close()
            lender.exchange(lender.encode(increment.request(pool)))

    process = child(client, pool)
    accept(process.channel, device)
    assert process.wait_told() == ["asked", [0]]
    process.kill()
    device.wait_ended()


def test_a_client_is_killed_during_its_execution(host, child, remote, increment, memory, mappings, gate, wire, gated):
    """An execution whose client dies finishes on memory that stays mapped until then."""
    offer, accept = remote

    device, pool = host(gated), memory()

    def client(channel):
        with Controller(partial(offer, channel), spin=0, versions=[wire]) as controller:
            controller.send(controller.encode(increment.request(pool)))

    process = child(client, pool)
    accept(process.channel, device)
    assert gate.entered.acquire(timeout=PATIENCE)
    process.kill()
    process.close()
    assert mappings(pool) == 2
    gate.open.release()
    device.wait_ended()
    assert list(pool.asarray(shape=8)) == [0, 1, 2, 3, 1, 2, 3, 4]
    assert mappings(pool) == 1


@pytest.mark.parametrize("spin", [0.0, DEFAULT_SPIN])
def test_a_device_is_killed_during_an_execution(service, burst, memory, increment, spin):
    """kill -9 of the device's process while a client waits is PeerDied, and NotSent from then on."""

    class Endless(increment):
        def run(self):
            threading.Event().wait()

    process, configure = service(Endless)
    client, pool = burst(configure, spin=spin), memory()

    def kill():
        assert client.answered.acquire(timeout=PATIENCE)
        process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(PeerDied, match="process is gone"):
        client.run(pool)
    killer.join()
    with pytest.raises(NotSent):
        client.run(pool)


def test_a_device_is_killed_while_idle(service, burst, memory):
    """A device that died between two requests is PeerDied at the next one."""
    process, configure = service()
    client, pool = burst(configure), memory()
    client.run(pool)
    process.kill()
    with pytest.raises(PeerDied):
        client.run(pool)
    with pytest.raises(NotSent, match="died"):
        client.run(pool)


def test_a_burst_does_not_cross_a_fork(service, burst, memory, child):
    """In a forked child the parent's burst refuses to run; the parent's goes on, also after the child's end."""
    _, configure = service()
    client, pool = burst(configure), memory()
    client.run(pool)

    def forked(channel):
        try:
            client.run(pool)
        except GeneralFailure as error:
            channel.send([str(error)])

    process = child(forked, pool)
    assert "closed" in process.wait_told()[0]
    process.close()
    for n in (4, 5):
        assert client.run(pool, n).output_shapes == (OutputShape((n,)),)
    assert client.run(memory()).output_shapes == (OutputShape((4,)),)


def test_a_forked_child_opens_its_own(host, burst, child, memory, increment, wire):
    """A child forked off a process that has bursts, as a client and as a device, can have its own."""
    client, pool = burst(host()), memory()
    client.run(pool)

    def forked(channel):
        device = host()
        with Controller(device, spin=0, versions=[wire]) as own:
            status, shapes, *_ = own.send(own.encode(increment.request(pool, 5)))
        device.wait_ended()
        channel.send([int(status), shapes])

    assert child(forked, pool).wait_told() == [0, [[[5], True]]]
    assert list(pool.asarray(shape=10)) == [0, 1, 2, 3, 1, 1, 2, 3, 4, 2]


@pytest.mark.stress  # five seconds each
def test_a_client_that_never_reads_its_results(host, raw, increment, wire):
    """When not even a refusal fits into the result queue any more, the burst ends."""
    taken = threading.Semaphore(0)

    class Noting(increment):
        def __init__(self, request):
            taken.release()
            raise GeneralFailure("no")

    device = host(Noting)
    client = raw(device, lengths=(64, 5))
    for _ in range(4 - wire):  # all but the last fit: two elements each, three in version 2
        client.send(nothing(wire))
        assert taken.acquire(timeout=PATIENCE)
    device.wait_ended()


def test_a_client_whose_result_queue_holds_no_result(host, raw, wire):
    """Not even a refusal fits into one element, ever: the burst ends, and its thread says nothing."""
    device = host()
    raw(device, lengths=(64, 1)).send(nothing(wire))
    device.wait_ended()
