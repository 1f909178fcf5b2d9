"""The lane of one client, without a process of its own: sockets whose client does not read, and memory by slot."""

import contextlib

import pytest
from waiting import PATIENCE

from burst import GeneralFailure, InvalidArgument, PeerDied, ResourceExhaustedTransient
from burst.channel import Channel, Message
from burst.run_queue import Application, Flow, RunQueue, Share
from driver.engine.lane import ClientLane, LaneOwner
from driver.engine.lane_reader import LaneReader
from driver.engine.ledger import Claim
from driver.engine.limits import Limits
from driver.protocol.lane_codec import launch

MANY = 2000
"""Answers: a few hundred fill a socket."""


def no_model(number):
    raise InvalidArgument(f"there is no model {number}")


def launch_many(reader):
    """More than a client may have refused without reading it."""
    for number in range(10 * MANY):
        reader.handle(Message(launch(number, None, None, b"\x90"), []))


@pytest.fixture
def lane():
    """A lane whose client has no model, with room for as many asynchronous executions as there are answers."""
    flow = Flow(Application(Share(RunQueue(1, 1e-3), 1), "test"), 1)
    found = ClientLane(
        LaneOwner(
            bind=no_model,
            model=no_model,
            flow=lambda _: flow,
            memory_from=None,
            take=lambda *_, **__: Claim(lambda: None),
            enter=lambda: None,
            slots=1,
            limits=Limits(client_bytes=1 << 20, device_bytes=1 << 20, client_async=MANY),
        )
    )
    yield found
    found.stop()


@pytest.fixture
def opened(lane):
    """Opens sockets of the lane: what serves each here, and the client's end."""
    with contextlib.ExitStack() as stack:

        def opened():
            near, far = Channel.pair()
            stack.callback(near.close)
            reader = LaneReader(near, lane, lambda: None)
            lane.sockets.add(reader)
            stack.callback(lane.sockets.discard, reader)
            return reader, stack.enter_context(far)

        yield opened


class TestUnread:
    """A client launches executions, and does not read how they ended."""

    def test_nobody_waits_for_it(self, lane, opened):
        """What sends answers goes on, other sockets get theirs, and all are there once the client reads."""
        (busy, busy_end), (other, other_end) = opened(), opened()
        outcome = lane.failure(GeneralFailure("it has failed"))
        for number in range(MANY):
            busy.say(number, outcome)
        other.say(7, outcome)
        lane.flush()
        assert other_end.receive(0).body[0] == 7
        assert busy.unread
        assert [busy_end.receive(PATIENCE).body[0] for _ in range(MANY)] == list(range(MANY))

    def test_they_count(self, lane, opened):
        """As if those executions were pending; so a client that never reads can launch no more."""
        busy, end = opened()
        outcome = lane.failure(GeneralFailure("it has failed"))
        for number in range(MANY):
            busy.say(number, outcome)
        lane.flush()
        lane.check_async(MANY - busy.unread - 1)
        with pytest.raises(ResourceExhaustedTransient, match=f"client_async = {MANY} is reached"):
            lane.check_async(MANY - busy.unread)
        with pytest.raises(PeerDied, match="does not read the answers"):
            launch_many(busy)
        assert end.receive(0).body[0] == 0
