"""The run queue of a device: its policy, on simulated time under random and chosen clients."""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated_device import MS, QUANTUM, US, Client, Device, Job, World

from burst._core import lib

LOW, MEDIUM, HIGH = lib.BURST_LOW, lib.BURST_MEDIUM, lib.BURST_HIGH
HUNDREDS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# ---- random clients --------------------------------------------------------------------------------------------------

lengths = st.sampled_from([US, 10 * US, 137 * US, MS, 2 * MS + 1, 10 * MS, 30 * MS])
usual = st.sampled_from([None, None, 0, US, 40 * MS])
rests = st.sampled_from([0, 10 * US, MS, 30 * MS])
patient, impatient = st.none(), st.sampled_from([None, 0, 5 * US, 2 * MS])


@st.composite
def jobs(draw, patience):
    length = draw(lengths)
    checkpoints = max(draw(st.sampled_from([length, 20 * US, 300 * US, 3 * MS])), length // 100)  # so that a world ends
    return Job(draw(rests), length, checkpoints, draw(patience), draw(usual))


@st.composite
def worlds(draw, patience):
    weights = draw(st.lists(st.sampled_from([1, 100, 300, 1000]), min_size=1, max_size=3))
    threads = st.lists(st.lists(jobs(patience), min_size=1, max_size=8), min_size=1, max_size=3)
    client = st.builds(Client, st.integers(0, len(weights) - 1), st.integers(0, 2), threads, st.integers(0, 2))
    return World(draw(st.integers(1, 3)), weights, draw(st.lists(client, min_size=1, max_size=6)))


@HUNDREDS
@given(worlds(impatient))
def test_every_request_is_served_once_in_its_order(world):
    """Each request runs for exactly its length, or is given up in line; within a flow they begin in the order in which
    they came; and while somebody waits, no slot is free but for the time that a thread takes to wake up.
    """
    device = Device(world).run()
    asked = [job for client in world.clients for jobs in client.threads for job in jobs]
    assert sum(thread.finished for thread in device.threads) == len(asked) - device.abandoned
    assert not device.waiting
    assert not device.running
    if not device.abandoned:
        assert sum(flow.used for flow in device.flows) == sum(job.length for job in asked)


@pytest.mark.integration
@HUNDREDS
@given(worlds(patient))
def test_random_clients_are_served_fairly_and_urgent_ones_first(world):
    """At no start and after no checkpoint does a job run while a more urgent one of its application waits; clients of
    one priority, applications of one uid, and uids by their weights, stay within their bounds while they wait for each
    other.
    """
    Device(world).run()


# ---- chosen clients --------------------------------------------------------------------------------------------------


def saturating(uid=0, priority=MEDIUM, length=MS, checkpoints=100 * US, threads=2, rest=0, application=0):
    """A client that always has somebody waiting, unless it rests."""
    return Client(uid, priority, [[Job(rest, length, checkpoints)] * 10_000] * threads, application)


def used_after(milliseconds, *clients, weights=(100,), slots=1):
    """What each client used, in ms."""
    device = Device(World(slots, list(weights), list(clients))).run(until=milliseconds * MS)
    return [flow.used / MS for flow in device.flows], device


def test_uids_share_by_their_weights():
    """Two uids with weights 3 and 1 get three quarters and one, whatever their jobs are like and however many."""
    (heavy, light), device = used_after(
        1000, saturating(0, length=10 * MS), saturating(1, length=137 * US, threads=5), weights=(300, 100)
    )
    assert heavy / light == pytest.approx(3, rel=0.02)
    assert device.pairs[0].worst > 0


def test_clients_share_by_time_and_not_by_requests():
    """Jobs of 10 ms, whole, and of 0.1 ms: each client gets half."""
    (long, short), device = used_after(
        1000, saturating(length=10 * MS, checkpoints=10 * MS), saturating(length=100 * US)
    )
    assert long == pytest.approx(short, abs=14)
    assert device.pairs[0].worst > device.pairs[0].bound / 3  # so the bound is not one that nothing can reach


def test_clients_with_one_thread_share_by_time():
    """Who has one request at a time never has one waiting when it is done, and gets no less than a third for it."""
    (long, short), _ = used_after(
        1000,
        saturating(length=10 * MS, threads=1, rest=10 * US),
        saturating(length=MS, threads=1, rest=10 * US),
    )
    assert min(long, short) > 333


@pytest.mark.parametrize("uids", [(0, 0), (0, 1)], ids=["of one uid", "of two uids"])
def test_equal_clients_get_equal_time(uids):
    """Two processes alike, of one uid or of two, with one thread each, are within 5 % of each other after a second."""
    client = {"length": 3 * MS, "threads": 1, "rest": 10 * US}
    (one, other), _ = used_after(1000, *(saturating(uid, **client) for uid in uids), weights=(100, 100))
    assert one == pytest.approx(other, rel=0.05)


@pytest.mark.parametrize("uids", [(0, 0), (0, 1)], ids=["of one uid", "of two uids"])
def test_who_was_away_has_saved_nothing_up(uids):
    """A client that comes after half a second gets half of what is left, and not all of it."""
    late = Client(uids[1], MEDIUM, [[Job(500 * MS, US, US), *saturating().threads[0]]] * 2)
    (first, second), _ = used_after(1000, saturating(uids[0]), late, weights=(100, 100))
    assert first == pytest.approx(750, abs=5)
    assert second == pytest.approx(250, abs=5)


@pytest.mark.parametrize("uids", [(0, 0), (0, 1)], ids=["of one uid", "of two uids"])
def test_nobody_owes_for_a_device_that_nobody_else_wanted(uids):
    """A client that had the device for itself, in executions of half a second, gets as much as the other later."""
    early = Client(uids[0], MEDIUM, [[Job(0, 500 * MS, 500 * MS, usual=US), *saturating().threads[0]]] * 2)
    late = Client(uids[1], MEDIUM, [[Job(499 * MS, MS, MS), *saturating().threads[0]]] * 2)
    device = Device(World(2, [100, 100], [early, late])).run(until=600 * MS)
    before = [flow.used for flow in device.flows]
    device.run(until=1000 * MS)
    gained = [(flow.used - old) / MS for flow, old in zip(device.flows, before, strict=True)]
    assert gained == pytest.approx([400, 400], abs=30)


@pytest.mark.parametrize("other", [(0, 0), (0, 1), (1, 0)], ids=["a client", "an application", "an account"])
def test_nobody_owes_for_time_in_which_only_its_own_requests_waited(other):
    """A client that used the device for half a second, while another thread of its own waited, shares evenly with one
    that comes then.
    """
    early = Client(0, MEDIUM, [[Job(0, 500 * MS, MS), *saturating().threads[0]], *saturating().threads])
    late = Client(other[0], MEDIUM, [[Job(400 * MS, 50 * MS, MS), *saturating().threads[0]]] * 2, other[1])
    device = Device(World(1, [100, 100], [early, late])).run(until=400 * MS)
    before = [flow.used for flow in device.flows]
    device.run(until=500 * MS)
    gained = [(flow.used - old) / MS for flow, old in zip(device.flows, before, strict=True)]
    assert gained == pytest.approx([50, 50], abs=3)


def test_who_begins_on_an_idle_device_has_saved_nothing_up():
    """A uid that found the device idle, after another had used it for long, yields to that one as if it had waited."""
    early = Client(0, MEDIUM, [[Job(0, 250 * MS, MS), Job(110 * MS, 100 * MS, MS)]] * 2)
    late = Client(1, MEDIUM, [[Job(605 * MS, 400 * MS, MS)]])
    device = Device(World(1, [100, 100], [early, late])).run(until=610 * MS)
    before = [flow.used for flow in device.flows]
    device.run(until=750 * MS)
    gained = [(flow.used - old) / MS for flow, old in zip(device.flows, before, strict=True)]
    assert gained == pytest.approx([70, 70], abs=3)


def test_a_debt_is_paid_by_staying_away():
    """Who used 300 ms at a stretch while another waited, and then rested for a second, begins as anybody does."""
    debtor = Client(0, MEDIUM, [[Job(0, 300 * MS, 300 * MS), Job(1000 * MS, MS, MS), *saturating().threads[0]]])
    others = [saturating(), saturating()]
    device = Device(World(1, [100], [debtor, *others])).run(until=1310 * MS)
    before = [flow.used for flow in device.flows]
    device.run(until=1910 * MS)
    gained = [flow.used - old for flow, old in zip(device.flows, before, strict=True)]
    assert gained[0] / MS > 100


@pytest.mark.integration
@pytest.mark.parametrize("applications", [(0, 0), (0, 1)], ids=["of one application", "of two applications"])
def test_short_requests_are_not_handed_from_one_to_the_other(applications):
    """A client that comes back soon after its result goes on until its quantum is used up, so that waking the other one
    costs once a quantum, and not once a request; and both get the same.
    """
    clients = [saturating(length=5 * US, threads=1, rest=3 * US, application=n) for n in applications]
    device = Device(World(1, [100], clients))
    starts, start = [], device.start

    def note_start(thread):
        starts.append(thread.flow)
        start(thread)

    device.start = note_start
    device.run(until=100 * MS)
    changes = sum(one is not other for one, other in itertools.pairwise(starts))
    assert len(starts) > 8000
    assert changes < 240
    one, other = (flow.used for flow in device.flows)
    assert one == pytest.approx(other, rel=0.05)


@pytest.mark.parametrize("uids", [(0, 0), (0, 1)], ids=["of one uid", "of two uids"])
def test_a_debt_is_paid_on_a_device_that_nobody_used(uids):
    """Who used 300 ms at a stretch while another waited shares with it evenly after a second in which both rested."""
    more = saturating().threads[0]
    debtor = Client(uids[0], MEDIUM, [[Job(0, 300 * MS, 300 * MS, usual=US), Job(1000 * MS, MS, MS), *more]] * 2)
    other = Client(uids[1], MEDIUM, [[Job(10 * MS, MS, MS), Job(1300 * MS, MS, MS), *more]] * 2)
    device = Device(World(2, [100, 100], [debtor, other])).run(until=1650 * MS)
    before = [flow.used for flow in device.flows]
    device.run(until=1850 * MS)
    gained = [(flow.used - old) / MS for flow, old in zip(device.flows, before, strict=True)]
    assert gained == pytest.approx([200, 200], abs=10)


def test_an_urgent_request_waits_for_one_checkpoint():
    """A 30 fps stream of high priority beside four saturating clients of low priority: it never waits longer for its
    slot than the time between two checkpoints, and then runs through.
    """
    stream = Client(0, HIGH, [[Job(28 * MS, 5 * MS, 100 * US)] * 100])
    others = [saturating(priority=LOW, length=20 * MS, checkpoints=400 * US) for _ in range(4)]
    device = Device(World(2, [100], [stream, *others]))
    took, ask, rest = [], device.ask, device.rest

    def note_begin(thread):
        thread.since = device.now
        ask(thread)

    def note_end(thread):
        if thread.finished and thread.flow.priority == HIGH:
            took.append(device.now - thread.since)
        rest(thread)

    device.ask, device.rest = note_begin, note_end
    device.events = [(when, n, note_begin, about) for when, n, _, about in device.events]
    device.run(until=1000 * MS)
    assert len(took) > 25
    assert max(took) <= 5 * MS + 400 * US


def test_only_ones_own_urgent_requests_starve():
    """Low priority gets nothing beside saturating high priority of its application, half beside another application of
    its uid, and its uid's share beside another uid.
    """
    (high, low), _ = used_after(200, saturating(0, HIGH), saturating(0, LOW))
    assert high > 199
    assert low <= 0.1 + QUANTUM / MS
    (high, low), _ = used_after(200, saturating(0, HIGH, application=0), saturating(0, LOW, application=1))
    assert high == pytest.approx(low, abs=5)
    (high, low), _ = used_after(200, saturating(0, HIGH), saturating(1, LOW), weights=(100, 100))
    assert high == pytest.approx(low, abs=5)


@pytest.mark.integration
def test_the_share_of_an_account_bounds_the_sum_of_its_applications():
    """A uid with nine applications gets as much as a uid with one, and its nine get the same."""
    many = [saturating(0, HIGH, application=n) for n in range(9)]
    used, _ = used_after(1800, *many, saturating(1, LOW), weights=(100, 100))
    assert used == pytest.approx([100] * 9 + [900], abs=7)


def test_an_application_without_work_leaves_its_part_to_the_others_of_its_account():
    """One that asks for a tenth of the device gets it; the others share the rest evenly, and not with the other uid."""
    rare = Client(0, LOW, [[Job(19 * MS, MS, 100 * US)] * 10_000], 0)
    others = [saturating(0, MEDIUM, application=n) for n in (1, 2)]
    (little, one, other, far), _ = used_after(1000, rare, *others, saturating(1), weights=(100, 100))
    assert little == pytest.approx(1000 / 21, rel=0.1)
    assert one == pytest.approx(other, rel=0.03)
    assert little + one + other == pytest.approx(far, rel=0.02)


@pytest.mark.parametrize("slots", [1, 2])
def test_a_request_of_another_application_waits_for_a_quantum(slots):
    """Whatever its priority beside saturating high priority of another application of its uid, which has no other work
    for it to wait for: at most half a quantum, and up to the next checkpoint.
    """
    rare = Client(0, LOW, [[Job(37 * MS, 100 * US, 100 * US)] * 100], 0)
    busy = saturating(0, HIGH, length=20 * MS, checkpoints=200 * US, threads=3, application=1)
    device = Device(World(slots, [100], [rare, busy]))
    waited, start = [], device.start

    def note_start(thread):
        if thread.flow.priority == LOW:
            waited.append(device.now - thread.asked_at)
        start(thread)

    ask = device.ask

    def note_ask(thread):
        thread.asked_at = device.now
        ask(thread)

    device.start, device.ask = note_start, note_ask
    device.events = [(when, n, note_ask, about) for when, n, _, about in device.events]
    device.run(until=1000 * MS)
    assert len(waited) > 25
    assert max(waited) <= QUANTUM / 2 + 200 * US


# ---- the last slot ---------------------------------------------------------------------------------------------------


def waits_of(client, device):
    """From each request of that client to its first slot, in ns, as the device runs on."""
    asked, waited = {}, []
    ask, start = device.ask, device.start

    def note_ask(thread):
        asked[thread] = device.now
        ask(thread)

    def note_start(thread):
        if thread.flow is device.flows[client] and not thread.begun:
            waited.append(device.now - asked[thread])
        start(thread)

    device.ask, device.start = note_ask, note_start
    device.events = [(when, n, note_ask, about) for when, n, _, about in device.events]
    return waited


@pytest.mark.parametrize("slots", [2, 3, 8])
@pytest.mark.parametrize("usual", [None, 0], ids=["known to be long", "never seen before"])
def test_long_executions_of_one_account_leave_a_slot(slots, usual):
    """An account with more executions of a second than there are slots, which no checkpoint ends, runs as many as there
    are slots but one; requests of another account never wait for one of them.
    """
    attack = Client(0, HIGH, [[Job(0, 1000 * MS, 1000 * MS, usual=usual)] * 50] * 2 * slots)
    device = Device(World(slots, [1000, 1], [attack, Client(1, LOW, [[Job(3 * MS, MS, MS)] * 500])]))
    waited = waits_of(1, device)
    device.run(until=3000 * MS)
    assert len(waited) > 490
    assert max(waited) == 0
    assert sum(thread.flow is device.flows[0] for thread in device.running) == slots - 1


def test_an_account_without_a_slot_may_have_the_last_one_for_a_long_execution():
    """So that long executions of others do not keep out its own; the next account waits for one of the two to end."""
    attack = Client(0, MEDIUM, [[Job(0, 1000 * MS, 1000 * MS)] * 50] * 4)
    device = Device(World(2, [100, 100], [attack, Client(1, MEDIUM, [[Job(3 * MS, 100 * MS, 100 * MS)] * 10])]))
    waited = waits_of(1, device)
    device.run(until=1000 * MS)
    assert len(waited) == 10
    assert max(waited) == 0


def test_two_accounts_with_long_executions_share_evenly():
    """Whatever each has in line, they get the same, and no slot is empty: each has one."""
    many, few = (Client(uid, MEDIUM, [[Job(0, 50 * MS, 50 * MS)] * 500] * n) for uid, n in ((0, 9), (1, 5)))
    (one, other), _ = used_after(10_000, many, few, weights=(100, 100), slots=4)
    assert one == pytest.approx(other, rel=0.05)
    assert one + other > 39_000


def test_one_account_alone_uses_all_slots():
    """However long its executions are: no slot is kept for accounts that are not there."""
    (used,), _ = used_after(1000, Client(0, MEDIUM, [[Job(0, 100 * MS, 100 * MS)] * 50] * 2), slots=2)
    assert used == pytest.approx(2000)


def test_what_is_brief_uses_all_slots_beside_an_idle_account():
    """Executions of at most ten quanta lose nothing by another account's being there; longer ones leave it a slot."""
    idle = Client(1, MEDIUM, [[Job(2000 * MS, MS, MS)]])
    for length, expected in ((10 * MS, 2000), (11 * MS, 1000)):
        clients = Client(0, MEDIUM, [[Job(0, length, length)] * 500] * 2), idle
        (used, _), _ = used_after(1000, *clients, weights=(100, 100), slots=2)
        assert used == pytest.approx(expected, abs=25)


# ---- a slot for higher priorities ------------------------------------------------------------------------------------


@pytest.mark.parametrize("usual", [None, US], ids=["known to be long", "taken for brief"])
@pytest.mark.parametrize("slots", [2, 3])
def test_a_high_request_finds_a_slot_behind_low_ones(slots, usual):
    """However long low ones go on without a checkpoint, and however many wait: from the second one on, as the low ones
    of before the first one knew of no other priority.
    """
    low = Client(0, LOW, [[Job(0, 300 * MS, 300 * MS, usual=usual)] * 100] * 8)
    high = Client(0, HIGH, [[Job(700 * MS, MS, MS)] * 20])
    device = Device(World(slots, [100], [low, high]))
    waits = waits_of(1, device)
    device.run(until=10_000 * MS)
    assert len(waits) > 10
    assert set(waits[1:]) == {0}


def test_a_slot_is_kept_for_ten_seconds():
    """After the last execution of a higher priority, low ones have all slots again, as those of one priority have."""
    low = Client(0, LOW, [[Job(0, MS, MS)] * 30_000] * 4)
    high = Client(0, HIGH, [[Job(MS, MS, MS)]])
    device = Device(World(2, [100], [low, high])).run(until=1000 * MS)
    before = device.flows[0].used
    device.run(until=2000 * MS)
    assert device.flows[0].used - before == pytest.approx(1000 * MS, rel=0.01)
    device.run(until=11_000 * MS)
    before = device.flows[0].used
    device.run(until=12_000 * MS)
    assert device.flows[0].used - before == pytest.approx(2000 * MS, rel=0.01)


def test_another_application_gets_the_slot_that_is_kept():
    """A slot is kept within an application: another one has the same share of the device as without priorities."""
    low, high = saturating(priority=LOW, threads=4), Client(0, HIGH, [[Job(MS, US, US)]])
    (mine, _, other), _ = used_after(1000, low, high, saturating(application=1, threads=4), slots=2)
    assert mine == pytest.approx(1000, rel=0.02)
    assert other == pytest.approx(1000, rel=0.02)


def test_one_slot_is_kept_for_nobody():
    """On a device with one slot low executions go on as ever."""
    low, high = saturating(priority=LOW, threads=2), Client(0, HIGH, [[Job(MS, US, US)]])
    (mine, _), _ = used_after(100, low, high)
    assert mine == pytest.approx(100, rel=0.01)


def test_no_slot_is_kept_for_an_idle_priority_above_what_runs():
    """A high client was there; low ones get the second slot beside a medium one, as no other low one has a slot."""
    high = Client(0, HIGH, [[Job(0, US, US)]])
    medium = Client(0, MEDIUM, [[Job(11_000 * MS, MS, MS), *[Job(0, MS, MS)] * 2_000]])
    low = Client(0, LOW, [[Job(11_500 * MS, MS, MS), *[Job(0, MS, MS)] * 2_000]])
    (_, its, mine), _ = used_after(12_500, high, medium, low, slots=2)
    assert its == pytest.approx(1500, rel=0.01)
    assert mine == pytest.approx(1000, rel=0.01)


@pytest.mark.parametrize("others", [1, 2])
def test_a_ticket_yields_to_no_account_from_which_a_slot_is_kept(others):
    """However little that account has used. It yields to another one that may have the slot."""
    high = Client(0, HIGH, [[Job(0, US, US)]])
    low = Client(0, LOW, [[Job(MS, 300 * MS, 300 * MS, usual=US)]] * 2)
    clients = [Client(1 + n, MEDIUM, [[Job(2 * MS, 200 * MS, 100 * US, usual=US)]]) for n in range(others)]
    (_, _, *used), device = used_after(102, high, low, *clients, weights=(300, 100, 100), slots=2)
    assert used == pytest.approx([100 / others] * others, abs=2)
    assert bool(device.yields) == (others > 1)
