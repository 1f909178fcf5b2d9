"""The lane of one client, without a process of its own: sockets whose client does not read, and memory by slot."""

import contextlib
import weakref
from dataclasses import replace

import pytest
from lane_owners import lane_owner
from waiting import PATIENCE

from burst import GeneralFailure, InvalidArgument, Malformed, Memory, PeerDied, ResourceExhaustedTransient
from burst.channel import Channel, Message, pack
from burst.plan_cache import MAX_PLANS
from driver.engine import lane_memory
from driver.engine.lane import ClientLane
from driver.engine.lane_memory import LaneMemory
from driver.engine.lane_reader import LaneReader
from driver.engine.ledger import Claim
from driver.protocol.lane_codec import launch
from driver.protocol.stream_terms import StreamTerms
from fmq.clock import FOREVER

MANY = 2000
"""Answers: a few hundred fill a socket."""


def no_model(number):
    raise InvalidArgument(f"there is no model {number}")


def launch_many(reader):
    """More than a client may have refused without reading it."""
    for number in range(10 * MANY):
        reader.handle(Message(launch(number, None, None, b"\x90"), []))


def ask_often(reader, raw):
    for _ in range(5 * MANY):
        reader.handle(Message(raw, []))


@pytest.fixture
def lane():
    """A lane whose client has no model, with room for as many asynchronous executions as there are answers."""
    found = ClientLane(lane_owner(no_model, no_model, client_async=MANY))
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


class EmptyPlan:
    """Uses no memory, and runs nothing."""

    slots = frozenset()

    def cancel(self):
        pass


def test_plans_that_go_are_freed_without_the_lock(lane, monkeypatch):
    """What a plan holds may take long to free, or bind anew."""
    seen = []

    def bound(key):
        plan = EmptyPlan()
        weakref.finalize(plan, lambda: seen.append(lane._lock.locked()))
        return plan

    monkeypatch.setattr(lane._executor, "plan", bound)
    for number in range(MAX_PLANS + 1):
        lane.plan(str(number).encode())
    assert seen == [False]


def test_the_lane_ends_while_a_socket_leaves(lane, opened, monkeypatch):
    """The socket frees its own slots first: the end of the lane frees what is left then."""
    reader, _ = opened()
    lane.memory.note_failure(5, GeneralFailure("it could not be mapped"))
    release = lane.memory.release

    def release_late(slots):
        lane.stop()
        return release(slots)

    monkeypatch.setattr(lane.memory, "release", release_late)
    lane.leave(reader, [5])
    with pytest.raises(InvalidArgument, match="no memory is registered as 5"):
        lane.memory.resolve([5])


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

    @pytest.mark.parametrize("is_first", [True, False])
    def test_streams_count_too(self, lane, opened, is_first):
        """Streams that are refused, and room for results that the client does not read, end its connection."""
        opening = StreamTerms(1, FOREVER, 9, 1, None, (b"\x90",) * 2).pack()
        lane.limits = replace(lane.limits, client_async=10)
        busy, end = opened()
        for number in range(0 if is_first else 5 * MANY):
            busy.say(number, lane.failure(GeneralFailure("it has failed")))
        lane.flush()
        with pytest.raises(PeerDied, match="does not read the answers"):
            ask_often(busy, opening if is_first else pack(["go_on", 1, 1]))
        assert end.receive(0)


class Room:
    """A client's account: how many things it may still have."""

    def __init__(self, left):
        self.left = left

    def take(self, remedy, **_):
        if not self.left:
            raise ResourceExhaustedTransient(f"no bytes are left; {remedy}")
        self.left -= 1
        return Claim(self._give_back)

    def _give_back(self):
        self.left += 1


class TestMemory:
    """A slot that several sockets register and free."""

    @pytest.fixture
    def descriptors(self, monkeypatch):
        """Numbers of descriptors that a client hands over, and those that were closed: each once, in the end."""
        given, closed = [], []
        monkeypatch.setattr(lane_memory, "close_all", closed.extend)
        yield given, closed
        assert sorted(closed) == given

    @pytest.fixture
    def room(self):
        return Room(100)

    @pytest.fixture
    def table(self, room, descriptors):
        """What a client has registered, with room for a hundred slots. It hands over memory, or what is none."""

        def mapped(plain, fd):
            descriptors[1].append(fd)
            if plain:
                raise Malformed("no memory is said like this")
            return Memory.create(8)

        return LaneMemory(mapped, room.take)

    @pytest.fixture
    def register(self, table, descriptors):
        """Register a slot, for one more socket."""
        given, _ = descriptors

        def register(slot, plain=()):
            given.append(len(given))
            return table.register(slot, list(plain), given[-1])

        return register

    def test_one_is_freed_while_another_one_registers_it(self, table, register, monkeypatch):
        """The second socket has found that the memory is there, and does not map it again: it stays for that one."""
        register(5)
        close, gone = lane_memory.close_all, []

        def other_frees_meanwhile(fds):
            close(fds)
            gone.append(table.release([5]))

        with monkeypatch.context() as patch:
            patch.setattr(lane_memory, "close_all", other_frees_meanwhile)
            register(5)
        assert gone == [[]]
        assert table.resolve([5])
        assert table.release([5]) == [5]
        with pytest.raises(InvalidArgument, match="no memory is registered as 5"):
            table.resolve([5])

    def test_registrations_cost_their_client(self, table, register, room):
        """One that registers without end is refused, and told so by the requests that name such a slot."""
        assert all(register(slot) for slot in range(90))
        assert all(register(slot) for slot in range(10))  # on another socket
        assert not any(register(slot) for slot in range(100, 300))
        assert not table.note_failure(300, ResourceExhaustedTransient("its descriptor is lost"))
        with pytest.raises(ResourceExhaustedTransient, match=r"^no bytes are left; free memory"):
            table.resolve([300])
        with pytest.raises(ResourceExhaustedTransient):  # the first of two hundred
            table.resolve([100])
        assert table.release([20]) == [20]
        assert register(300)
        assert table.resolve([300])
        table.clear()
        assert room.left == 100

    def test_what_ends_the_socket_is_paid_back(self, table, register, room):
        """So is what is freed."""
        with pytest.raises(Malformed, match="no memory is said like this"):
            register(5, plain=["odd"])
        assert room.left == 100
        register(5)
        assert table.release([5]) == [5]
        assert room.left == 100
