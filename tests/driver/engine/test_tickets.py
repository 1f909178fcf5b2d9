"""The run queue of a device, with real threads that wait in it. test_run_queue.py has its policy."""

import errno
import threading
from contextlib import contextmanager

import pytest
from simulated_device import MS, QUANTUM, US

from burst._core import ffi, lib
from burst.run_queue import Application, Flow, RunQueue, Share, Ticket
from burst.run_queue import waiters as burst_waiters
from fmq import clock

FOREVER = 2**64 - 1
LOW, MEDIUM, HIGH = lib.BURST_LOW, lib.BURST_MEDIUM, lib.BURST_HIGH


class Queue:
    """A run queue of one slot, and all that is made for it."""

    def __init__(self, slots=1):
        self.handle = ffi.gc(lib.burst_run_queue_new(slots, QUANTUM), lib.burst_run_queue_free)
        self.share = ffi.gc(lib.burst_share_new(self.handle, 100), lib.burst_share_free)
        self.application = ffi.gc(lib.burst_application_new(self.share), lib.burst_application_free)

    def flow(self, priority=MEDIUM, application=None):
        return ffi.gc(lib.burst_flow_new(application or self.application, priority), lib.burst_flow_free)

    def another_account(self):
        """An application of its own."""
        share = ffi.gc(lib.burst_share_new(self.handle, 100), lib.burst_share_free)
        return ffi.gc(lib.burst_application_new(share), lib.burst_application_free)

    def ticket(self, priority=MEDIUM, flow=None):
        flow = flow or self.flow(priority)
        return ffi.gc(lib.burst_ticket_new(flow), lib.burst_ticket_free)


def enter(ticket, timeout=None, least=0, usual=US):
    """With a deadline so many ns from now. least, usual: ns that executions like it have taken; 0: not known."""
    now, known = clock.now(), ffi.new("burst_estimate *", {"least_ns": least, "usual_ns": usual})
    return lib.burst_enter(ticket, known, FOREVER if timeout is None else now + timeout, now)


class Waiting:
    """Another thread that enters, says what came of it, and leaves when it is told to."""

    def __init__(self, ticket, usual=US):
        self.usual = usual
        self.ticket, self.code, self.has_slot, self.may_leave = ticket, None, threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        self.code = enter(self.ticket, usual=self.usual)
        self.has_slot.set()
        if not self.code:
            self.execute()
            lib.burst_leave(self.ticket)

    def execute(self):
        self.may_leave.wait(30)


@contextmanager
def waiting_for(mine, ticket):
    """Somebody who comes before `mine`, which has the slot, and is in line already."""
    other = Waiting(ticket)
    while not lib.burst_must_yield(mine):
        assert other.thread.is_alive()
    yield other
    other.may_leave.set()
    other.thread.join(30)
    assert not other.thread.is_alive()


def test_a_slot_that_stays_free_for_a_moment_depends_on_no_thread_of_the_account_that_left_it():
    """Where a client is expected back, the ticket that is called meanwhile is another account's; then another
    application's; the own last. Else threads of low priority, on a busy machine, would keep a slot from the others.
    """
    queue = Queue()
    mine, own = queue.ticket(HIGH), queue.ticket(LOW)
    application = ffi.gc(lib.burst_application_new(queue.share), lib.burst_application_free)
    beside, its = (queue.ticket(flow=queue.flow(application=a)) for a in (application, queue.another_account()))
    known = ffi.new("burst_estimate *", {"usual_ns": US})
    for ticket in (mine, own, beside, its):
        lib.burst_policy_expect(ticket, known, 0)
    lib.burst_policy_arrive(mine, 0)
    assert lib.burst_policy_next(queue.handle, 0) == mine
    for ticket in (own, beside, its):
        lib.burst_policy_arrive(ticket, 0)
    lib.burst_policy_finish(mine, 0)
    for called in (its, beside, own):
        assert lib.burst_policy_standby(mine, 0) == called
        lib.burst_policy_abandon(called, 0)
    assert lib.burst_policy_standby(mine, 0) == ffi.NULL


def test_a_slot_is_not_kept_for_who_does_not_come_back():
    """Whoever leaves in the midst of its turn is expected back, but who waits does not wait for that."""
    queue = Queue()
    first, second, third = queue.ticket(LOW), queue.ticket(HIGH), queue.ticket(HIGH)
    assert enter(first) == 0
    with waiting_for(first, second) as other, waiting_for(first, third) as last:
        other.may_leave.set()
        last.may_leave.set()
        lib.burst_leave(first)
        assert other.has_slot.wait(30)
        assert last.has_slot.wait(30)
        assert other.code == last.code == 0
    assert enter(first, timeout=0) == 0
    lib.burst_leave(first)


def test_numbers_that_are_none_are_refused():
    """No queue without slots or quantum, no share without weight, no priority beyond high."""
    queue = Queue()
    assert not lib.burst_run_queue_new(0, QUANTUM)
    assert not lib.burst_run_queue_new(1, 0)
    assert not any(lib.burst_share_new(queue.handle, weight) for weight in (0, 1001))
    assert not any(lib.burst_flow_new(queue.application, priority) for priority in (3, 2**32 - 1))


def test_a_deadline_passes_in_the_queue():
    """Not before it has, and nothing of the request is left: the slot goes to who asks next."""
    queue = Queue()
    holder, late = queue.ticket(), queue.ticket(HIGH)
    assert enter(holder) == 0
    begin = clock.now()
    assert enter(late, timeout=5 * MS) == -errno.ETIMEDOUT
    assert clock.now() - begin >= 5 * MS
    assert not lib.burst_must_yield(holder)
    lib.burst_leave(holder)
    assert enter(late, timeout=1000 * MS) == 0
    lib.burst_leave(late)


def test_what_cannot_be_in_time_does_not_begin():
    """An estimate beyond the deadline is told at once, also when a slot is free; in line it shortens the wait."""
    queue = Queue()
    holder, late = queue.ticket(), queue.ticket()
    assert enter(late, timeout=1000 * MS, least=1001 * MS) == -errno.ETIMEDOUT
    assert enter(holder) == 0
    begin = clock.now()
    assert enter(late, timeout=100_000 * MS, least=99_995 * MS) == -errno.ETIMEDOUT
    assert 5 * MS <= clock.now() - begin < 50_000 * MS
    lib.burst_leave(holder)


def test_a_ticket_is_closed_while_it_waits():
    """Who waits with it is told, and so is who enters with it later; others of its flow go on."""
    queue = Queue()
    holder, flow = queue.ticket(LOW), queue.flow(HIGH)
    closed, beside = queue.ticket(flow=flow), queue.ticket(flow=flow)
    assert enter(holder) == 0
    with waiting_for(holder, closed) as other:
        lib.burst_ticket_close(closed)
        assert other.has_slot.wait(30)
        assert other.code == -errno.ECANCELED
    assert not lib.burst_must_yield(holder)
    assert enter(closed) == -errno.ECANCELED
    lib.burst_leave(holder)
    assert enter(beside, timeout=0) == 0
    lib.burst_leave(beside)
    assert enter(holder, timeout=0) == 0
    lib.burst_leave(holder)


def test_a_yield_lets_the_other_through_and_comes_back():
    """The slot changes hands twice."""
    queue = Queue()
    mine = queue.ticket(LOW)
    assert enter(mine) == 0
    with waiting_for(mine, queue.ticket(HIGH)) as other:
        assert not other.has_slot.is_set()
        other.may_leave.set()
        assert lib.burst_yield(mine) == 0
        assert other.has_slot.is_set()
        assert other.code == 0
    lib.burst_leave(mine)
    assert enter(mine, timeout=0) == 0
    lib.burst_leave(mine)


def test_a_yield_for_nobody_keeps_the_slot():
    """Who was to be let through may be gone by then."""
    queue = Queue()
    mine, other = queue.ticket(), queue.ticket()
    assert enter(mine) == 0
    assert lib.burst_yield(mine) == 0
    assert enter(other, timeout=MS) == -errno.ETIMEDOUT
    lib.burst_leave(mine)


def test_a_deadline_passes_after_a_yield():
    """The one who yielded has no slot then, and the other keeps his."""
    queue = Queue()
    mine = queue.ticket(LOW)
    assert enter(mine, timeout=200 * MS) == 0
    with waiting_for(mine, queue.ticket(HIGH)) as other:
        assert lib.burst_yield(mine) == -errno.ETIMEDOUT
        assert other.code == 0
        assert enter(mine, timeout=MS) == -errno.ETIMEDOUT
    assert enter(mine, timeout=0) == 0
    lib.burst_leave(mine)


@pytest.mark.parametrize("checkpoint", [lib.burst_yield, lambda _: lib.burst_checkpoint()])
def test_a_yield_with_a_closed_ticket_gives_the_slot_up(checkpoint):
    """So that the execution ends at its next checkpoint; to leave is harmless then, once or twice."""
    queue = Queue()
    mine = queue.ticket()
    assert enter(mine) == 0
    lib.burst_ticket_close(mine)
    assert checkpoint(mine) == -errno.ECANCELED
    for _ in range(2):
        lib.burst_leave(mine)
    other = queue.ticket()
    assert enter(other, timeout=0) == 0
    lib.burst_leave(other)


def test_as_many_run_at_once_as_there_are_slots():
    """The third of two slots waits."""
    queue = Queue(slots=2)
    first, second, third = (queue.ticket() for _ in range(3))
    assert [enter(ticket, timeout=MS) for ticket in (first, second, third)] == [0, 0, -errno.ETIMEDOUT]
    lib.burst_leave(first)
    assert enter(third, timeout=0) == 0
    for ticket in (second, third):
        lib.burst_leave(ticket)


LONG = 1000 * MS
BRIEF = 10 * QUANTUM


@pytest.mark.parametrize("usual", [0, BRIEF + 1, LONG], ids=["never seen", "a little too long", "long"])
def test_the_last_slot_is_left_to_the_other_account(usual):
    """Where two accounts have two slots, a second long execution of one waits while the other runs what it likes, brief
    or long; it runs when the first ends, or when the other account has gone. One that looks on keeps nothing.
    """
    queue = Queue(slots=2)
    other = queue.another_account()
    flow = queue.flow(application=other)
    first, second, third = (queue.ticket() for _ in range(3))
    for ticket in (first, second):
        assert enter(ticket, timeout=0, usual=usual) == 0
    for ticket in (first, second):
        lib.burst_leave(ticket)
    assert queue.ticket(flow=flow)
    assert enter(first, usual=usual) == 0
    assert enter(second, timeout=MS, usual=usual) == -errno.ETIMEDOUT
    for its in (US, LONG):
        its_ticket = queue.ticket(flow=flow)
        assert enter(its_ticket, timeout=0, usual=its) == 0
        lib.burst_leave(its_ticket)
    assert enter(second, timeout=0, usual=BRIEF) == 0
    lib.burst_leave(second)
    waiting = Waiting(second, usual)
    while not burst_waiters():
        assert waiting.thread.is_alive()
    lib.burst_leave(first)
    assert waiting.has_slot.wait(30)
    last = Waiting(third, usual)
    while not burst_waiters():
        assert last.thread.is_alive()
    del its_ticket, flow, other
    assert last.has_slot.wait(30)
    for each in (waiting, last):
        each.may_leave.set()
        each.thread.join(30)
    assert lib.burst_run_queue_is_idle(queue.handle)


def test_an_account_whose_estimate_was_wrong_is_not_believed_for_a_while():
    """An execution that was estimated to be brief and was not costs its account the last slot for a hundred times as
    long; the other account's estimates count as before.
    """
    queue = Queue(slots=2)
    other = queue.flow(application=queue.another_account())
    first, second, its, beside = queue.ticket(), queue.ticket(), queue.ticket(flow=other), queue.ticket(flow=other)
    assert enter(first) == 0
    assert enter(second, timeout=0) == 0
    begin = clock.now()
    while clock.now() < begin + 3 * BRIEF:
        pass
    for ticket in (first, second):
        lib.burst_leave(ticket)
    assert enter(first) == 0
    assert enter(second, timeout=MS) == -errno.ETIMEDOUT
    assert enter(its, timeout=0) == 0
    lib.burst_leave(first)
    assert enter(beside, timeout=0) == 0
    lib.burst_leave(its)
    lib.burst_leave(beside)
    assert enter(first) == 0
    while enter(second, timeout=MS) == -errno.ETIMEDOUT:
        assert clock.now() < begin + 30_000 * MS
    assert clock.now() - begin > 100 * BRIEF
    for ticket in (first, second):
        lib.burst_leave(ticket)


def test_a_long_execution_that_yields_or_pauses_gives_its_slot_to_the_next():
    """What an account holds is right after a yield, a pause, a wait that was given up and a ticket that was closed."""
    queue = Queue(slots=2)
    other = queue.another_account()
    low, high, its = queue.ticket(LOW), queue.ticket(HIGH), queue.ticket(flow=queue.flow(application=other))
    for _ in range(3):
        assert enter(low, usual=LONG) == 0
        waiting = Waiting(high, LONG)
        while not lib.burst_must_yield(low):
            assert waiting.thread.is_alive()
        waiting.may_leave.set()
        assert lib.burst_yield(low) == 0
        waiting.thread.join(30)
        assert enter(high, timeout=MS, usual=LONG) == -errno.ETIMEDOUT
        assert lib.burst_pause() == low
        assert enter(high, timeout=0, usual=LONG) == 0
        lib.burst_leave(high)
        assert lib.burst_resume(low) == 0
        lib.burst_leave(low)
    closed = queue.ticket()
    assert enter(closed, usual=LONG) == 0
    lib.burst_ticket_close(closed)
    assert lib.burst_yield(closed) == -errno.ECANCELED
    assert enter(low, timeout=0, usual=LONG) == 0
    lib.burst_leave(low)
    assert its


def test_a_checkpoint_knows_the_execution_of_its_thread():
    """Without a slot, and while nobody waits, it does nothing; else it lets the other through and comes back."""
    queue = Queue()
    mine = queue.ticket(LOW)
    assert lib.burst_checkpoint() == 0
    assert enter(mine) == 0
    assert lib.burst_checkpoint() == 0
    with waiting_for(mine, queue.ticket(HIGH)) as other:
        other.may_leave.set()
        assert lib.burst_checkpoint() == 0
        assert other.has_slot.is_set()
    lib.burst_leave(mine)


def test_who_pauses_has_no_slot():
    """Whoever waits for another execution gives it the slot meanwhile, and waits for one again afterwards."""
    queue = Queue()
    mine, other = queue.ticket(), queue.ticket()
    assert lib.burst_pause() == ffi.NULL
    assert lib.burst_resume(ffi.NULL) == 0
    assert enter(mine) == 0
    assert lib.burst_pause() == mine
    assert enter(other, timeout=0) == 0
    lib.burst_leave(other)
    assert lib.burst_resume(mine) == 0
    assert enter(other, timeout=0) == -errno.ETIMEDOUT
    lib.burst_leave(mine)


def counts_of(flow):
    counts = ffi.new("burst_flow_counts *")
    lib.burst_flow_count(flow, counts)
    return counts


def test_what_a_flow_has_waited_for_is_seen():
    """Executions, waits, yields and time, while it waits and after its tickets were freed; the uid's part of all."""
    queue = Queue()
    low, high = queue.flow(LOW), queue.flow(HIGH)
    mine = queue.ticket(flow=low)
    assert enter(mine) == 0
    with waiting_for(mine, queue.ticket(flow=high)) as other:
        begin = clock.now()
        while clock.now() < begin + MS:
            pass
        assert (counts_of(high).waiting, counts_of(high).waits, counts_of(high).executions) == (1, 1, 0)
        assert counts_of(high).waited_ns >= MS
        other.may_leave.set()
        assert lib.burst_yield(mine) == 0
    lib.burst_leave(mine)
    del mine
    found = counts_of(low)
    assert (found.waiting, found.waits, found.executions, found.yields) == (0, 0, 1, 1)
    assert MS <= found.used_ns <= found.application_used_ns == found.share_used_ns == found.all_used_ns


def test_an_execution_that_can_be_broken_off_hears_of_urgent_ones():
    """The wait ends when somebody stands in line who outranks it; equals, and those of other uids, do not."""
    queue = Queue()
    mine = queue.ticket(LOW)
    assert lib.burst_set_preemptible(True) == ffi.NULL
    assert enter(mine) == 0
    assert lib.burst_set_preemptible(True) == mine
    heard = []
    watch = threading.Thread(target=lambda: heard.append(lib.burst_await_preemption(0)), daemon=True)
    watch.start()
    with waiting_for(mine, queue.ticket(HIGH)) as other:
        watch.join(30)
        assert heard
        assert lib.burst_outranking(mine) == 1
        lib.burst_set_preemptible(False)
        other.may_leave.set()
        assert lib.burst_yield(mine) == 0
    assert lib.burst_outranking(mine) == 0
    lib.burst_leave(mine)


def test_a_queue_is_idle_while_no_ticket_has_a_slot_or_waits():
    """Also not between a waiter's arrival and its slot."""
    queue = RunQueue(1, 1e-3)
    flow = Flow(Application(Share(queue, 1), ""), MEDIUM)
    first, second = Ticket(flow), Ticket(flow)
    assert queue.is_idle
    assert enter(first.handle) == 0
    assert not queue.is_idle
    waiter = threading.Thread(target=enter, args=(second.handle,))
    waiter.start()
    first.leave()
    waiter.join()
    assert not queue.is_idle
    second.leave()
    assert queue.is_idle


def test_an_account_that_comes_again_owes_what_it_used():
    """It used 300 ms while another account waited, closed all its connections, and comes again at once: the other one
    has its 300 ms first.
    """
    queue, other = Queue(), None
    tickets = [queue.ticket(), queue.ticket(flow=queue.flow(application=queue.another_account()))]
    debtor, other = tickets
    assert lib.burst_policy_begin(debtor, 0)
    lib.burst_policy_arrive(other, 0)
    lib.burst_policy_finish(debtor, 300 * MS)
    del debtor, tickets[0]
    queue.application = ffi.gc(lib.burst_application_new(queue.share), lib.burst_application_free)
    debtor = queue.ticket()
    now, turns = 300 * MS, []
    lib.burst_policy_arrive(debtor, now)
    for _ in range(400):
        served = lib.burst_policy_next(queue.handle, now)
        now += MS
        lib.burst_policy_finish(served, now)
        lib.burst_policy_arrive(served, now)
        turns.append(served == other)
    assert all(turns[:299])
    assert not all(turns[:305])


class Pausing(Waiting):
    """One that pauses before it leaves."""

    def execute(self):
        super().execute()
        assert lib.burst_pause() == self.ticket
        assert lib.burst_resume(self.ticket) == 0


def test_a_ticket_that_waited_for_a_kept_slot_loses_none_when_it_pauses():
    """A low ticket waited for the slot that was kept for a high client, which has gone since. It pauses, and gets its
    slot again although another low one has the other.
    """
    queue = Queue(slots=2)
    high, low = queue.ticket(HIGH), queue.flow(LOW)
    assert enter(high) == 0
    lib.burst_leave(high)
    first = Waiting(queue.ticket(flow=low))
    assert first.has_slot.wait(30)
    second = Pausing(queue.ticket(flow=low))
    while not counts_of(low).waiting:
        assert second.thread.is_alive()
    del high
    assert second.has_slot.wait(30)
    for other in (second, first):
        other.may_leave.set()
        other.thread.join(30)
        assert not other.thread.is_alive()
    assert lib.burst_run_queue_is_idle(queue.handle)
