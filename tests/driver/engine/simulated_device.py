"""A device on simulated time under the policy of its run queue (csrc/burst/policy.c), and what has to hold at
each event.

Clients have threads that ask, wait for their answer, rest, and ask again. Every start, checkpoint and end is checked as
it happens. Who is woken takes a while until it runs, as threads do.
"""

import heapq
import itertools
from typing import NamedTuple

from burst._core import ffi, lib

US, MS = 10**3, 10**6
QUANTUM = MS
BRIEF = 10 * QUANTUM  # what is estimated to last longer is long
WAKING = 20 * US
EXPECTED = 10_000 * MS  # for which a slot is kept after an execution of a higher priority has come


class Job(NamedTuple):
    """One execution: asked for `rest` ns after the last one; waits `patience` ns at most for its first slot.

    usual: what executions like it have taken so far; 0: not known, None: its length.
    """

    rest: int
    length: int
    checkpoints: int  # ns between two of them; `length` for none
    patience: int | None = None
    usual: int | None = None

    @property
    def estimate(self):
        return ffi.new("burst_estimate *", {"usual_ns": self.length if self.usual is None else self.usual})


class Client(NamedTuple):
    """A flow: the uid that it belongs to, its priority, the jobs of each of its threads, and its application."""

    uid: int
    priority: int
    threads: list
    application: int = 0


class World(NamedTuple):
    slots: int
    weights: list
    clients: list

    @property
    def longest(self):
        """For how long a job runs on although it should not: to its end, or to a checkpoint after a quantum."""
        jobs = itertools.chain.from_iterable(jobs for client in self.clients for jobs in client.threads)
        return max(min(job.length, QUANTUM + job.checkpoints) for job in jobs)


class Thread:
    """Of a client: its ticket, and the job that it is at."""

    def __init__(self, flow, number, jobs):
        self.flow, self.number, self.jobs = flow, number, iter(jobs)
        self.ticket = ffi.gc(lib.burst_ticket_new(flow.handle), lib.burst_ticket_free)
        self.job, self.done, self.begun, self.asked, self.finished = None, 0, False, 0, 0
        self.is_long = self.is_lower = False


class Flow:
    def __init__(self, application, client):
        self.application, self.share, self.priority = application, application.share, client.priority
        self.handle = ffi.gc(lib.burst_flow_new(application.handle, client.priority), lib.burst_flow_free)
        self.used, self.line = 0, []  # line: threads whose job has not begun yet, in the order in which they asked


class Application:
    def __init__(self, share):
        self.share, self.used, self.expected = share, 0, [0, 0, 0]
        self.handle = ffi.gc(lib.burst_application_new(share.handle), lib.burst_application_free)


class Share:
    def __init__(self, queue, weight):
        self.weight, self.used = weight, 0
        self.handle = ffi.gc(lib.burst_share_new(queue, weight), lib.burst_share_free)


class Pair:
    """Two that share something: how far apart they came while both had somebody waiting, in time divided by weight.

    `worst` and `bound` are that, times both weights.
    """

    def __init__(self, one, other, bound, weights=(1, 1)):
        self.one, self.other, self.bound, self.weights = one, other, bound, weights
        self.since, self.worst = None, 0

    def look(self, used_by, waiting):
        if self.one not in waiting or self.other not in waiting:
            self.since = None
            return
        weight, its = self.weights
        apart = used_by[self.one] * its - used_by[self.other] * weight
        if self.since is None:
            self.since = apart
        self.worst = max(self.worst, abs(apart - self.since))
        assert self.worst <= self.bound


class Device:
    """Runs a world from its beginning to its end, and asserts what has to hold at each event."""

    def __init__(self, world):
        self.world, self.now, self.events, self.order = world, 0, [], itertools.count()
        self.queue = ffi.gc(lib.burst_run_queue_new(world.slots, QUANTUM), lib.burst_run_queue_free)
        self.shares = [Share(self.queue, weight) for weight in world.weights]
        names = dict.fromkeys((client.uid, client.application) for client in world.clients)
        self.applications = {(uid, name): Application(self.shares[uid]) for uid, name in names}
        self.flows = [Flow(self.applications[client.uid, client.application], client) for client in world.clients]
        numbers = itertools.count()
        self.threads = [
            Thread(flow, next(numbers), jobs)
            for flow, client in zip(self.flows, world.clients, strict=True)
            for jobs in client.threads
        ]
        self.by_ticket = {thread.ticket: thread for thread in self.threads}
        self.running, self.waiting, self.called, self.abandoned, self.yields = {}, set(), None, 0, 0
        self.pairs = [*self._pairs_of_flows(), *self._pairs_of_applications(), *self._pairs_of_shares()]
        for thread in self.threads:
            self.rest(thread)

    def _pairs_of_flows(self):
        """DRR gives each flow one quantum a round, so flows in line differ by one grant. What they have left of it, or
        owe, is within [-slots x longest, quantum], and may change from one end of that to the other, for both.
        """
        bound = 3 * QUANTUM + 2 * self.world.slots * self.world.longest
        for one, other in itertools.combinations(self.flows, 2):
            if (one.application, one.priority) == (other.application, other.priority):
                yield Pair(one, other, bound)

    def _pairs_of_applications(self):
        """As between shares, and an application keeps its turn until it is ahead by half a quantum."""
        bound = QUANTUM + 4 * self.world.slots * self.world.longest
        for one, other in itertools.combinations(self.applications.values(), 2):
            if one.share is other.share:
                yield Pair(one, other, bound)

    def _pairs_of_shares(self):
        """A share is given a slot when no other in line has used less; what it uses until it is charged is at most
        slots x longest. So far two can be apart, at the beginning and at the end of the time that is looked at.
        """
        for one, other in itertools.combinations(self.shares, 2):
            bound = 2 * self.world.slots * self.world.longest * (one.weight + other.weight)
            yield Pair(one, other, bound, (one.weight, other.weight))

    def at(self, delay, what, *about):
        heapq.heappush(self.events, (self.now + delay, next(self.order), what, about))

    def rest(self, thread):
        thread.job = next(thread.jobs, None)
        if thread.job:
            self.at(thread.job.rest, self.ask, thread)

    def ask(self, thread):
        thread.done, thread.begun = 0, False
        thread.flow.line.append(thread)
        thread.asked += 1
        lib.burst_policy_expect(thread.ticket, thread.job.estimate, self.now)
        self.expect(thread.flow)
        usual = thread.job.estimate.usual_ns
        thread.is_long = not 0 < usual <= BRIEF
        if len(self.running) < self.world.slots and not self.waiting:
            if lib.burst_policy_begin(thread.ticket, self.now):
                self.start(thread)
                return
            assert self.leaves_slot(thread) or (thread.is_long and self.is_kept_from(thread.flow.share))
        lib.burst_policy_arrive(thread.ticket, self.now)
        self.waiting.add(thread)
        if thread.job.patience is not None:
            self.at(thread.job.patience, self.lose_patience, thread, thread.asked)
        self.hand_on()

    def lose_patience(self, thread, asked):
        if thread not in self.waiting or thread.begun or thread.asked != asked:
            return
        lib.burst_policy_abandon(thread.ticket, self.now)
        self.waiting.remove(thread)
        thread.flow.line.remove(thread)
        self.abandoned += 1
        if thread is self.called:
            self.called = None
            self.hand_on()
        self.rest(thread)

    def expect(self, flow):
        """An execution of that priority has come, and others will. Noted if the last note is old."""
        expected, until = flow.application.expected, self.now + EXPECTED
        if flow.priority and until > expected[flow.priority] + EXPECTED // 16:
            expected[flow.priority] = until

    def is_below_another(self, flow):
        """Whether a higher priority of its application has been used, on a device with several slots."""
        return self.world.slots > 1 and any(flow.application.expected[flow.priority + 1 :])

    def leaves_slot(self, thread):
        """Whether a free slot is kept from a thread: for a higher priority of its application that is expected, as
        those below that one have all others.
        """
        flow = thread.flow
        lower = [o.flow.priority for o in self.running if o.is_lower and o.flow.application is flow.application]
        return self.world.slots > 1 and any(
            self.now < until and priority > flow.priority and sum(p < priority for p in lower) + 1 >= self.world.slots
            for priority, until in enumerate(flow.application.expected)
        )

    def is_kept_from(self, share, leaves=None):
        """Whether a free slot is not for long executions of that account: it has one, and with another one of them long
        executions would have all slots, while another account has none. `leaves`: as if that thread had left its slot.
        """
        shares = [thread.flow.share for thread in self.running if thread.is_long and thread is not leaves]
        without = {application.share for application in self.applications.values()} - {*shares}
        return bool(without) and share in shares and len(shares) + 1 >= self.world.slots

    def hand_on(self):
        """Free slots go to who comes next: all of them, or one while somebody was called for the others."""
        while self.waiting and len(self.running) < self.world.slots:
            ticket = lib.burst_policy_next(self.queue, self.now)
            if not ticket:
                break
            thread = self.by_ticket[ticket]
            self.waiting.remove(thread)  # nobody is given a slot without having asked for it, or twice
            if thread is self.called:
                self.called = None
            self.start(thread)
            if self.called:
                break
        assert self.called or len(self.running) == self.world.slots or not self.could_run()

    def finds_the_last_slot_kept(self, share):
        """Whether that account gets no slot for a long execution, now or once another account leaves one."""
        others = [thread for thread in self.running if thread.flow.share is not share]
        return any(self.is_kept_from(share, leaves) for leaves in (None, *others))

    def could_run(self):
        """Those that wait and would have a free slot: none of their account waits that may not."""
        held_back = {w.flow.share for w in self.waiting if w.is_long and self.is_kept_from(w.flow.share)}
        return [w for w in self.waiting if w.flow.share not in held_back and not self.leaves_slot(w)]

    def call(self, thread):
        if self.called is None:
            self.called = thread
            self.at(WAKING, self.answer_call, thread, thread.asked)

    def answer_call(self, thread, asked):
        if thread is self.called and thread.asked == asked:
            self.called = None
            self.hand_on()

    def start(self, thread):
        assert not self.more_urgent_than(thread)
        assert not thread.is_long or not self.is_kept_from(thread.flow.share)
        assert not self.leaves_slot(thread)
        thread.is_lower = self.is_below_another(thread.flow)
        if not thread.begun:
            assert thread.flow.line.pop(0) is thread  # first come, first served,
            assert not any(w.begun for w in self.waiting if w.flow is thread.flow)  # also those who have yielded
            thread.begun = True
        self.running[thread] = self.now
        self.at(min(thread.job.checkpoints, thread.job.length - thread.done), self.checkpoint, thread)

    def more_urgent_than(self, thread):
        """Those of the same application that wait and come before it."""
        flow = thread.flow
        return [w for w in self.waiting if w.flow.application is flow.application and w.flow.priority > flow.priority]

    def checkpoint(self, thread):
        self.account(thread)
        if thread.done == thread.job.length:
            self.finish(thread)
        elif lib.burst_policy_yields(thread.ticket, self.now):
            assert self.waiting
            lib.burst_policy_yield(thread.ticket, self.now)
            self.yields += 1
            del self.running[thread]
            self.waiting.add(thread)
            self.hand_on()
        else:
            assert not self.more_urgent_than(thread)
            self.at(min(thread.job.checkpoints, thread.job.length - thread.done), self.checkpoint, thread)

    def finish(self, thread):
        del self.running[thread]
        thread.finished += 1
        if self.waiting or lib.burst_policy_owes(thread.ticket):
            lib.burst_policy_finish(thread.ticket, self.now)
        else:
            lib.burst_policy_release(thread.ticket)
        standby = lib.burst_policy_standby(thread.ticket, self.now) if self.waiting else ffi.NULL
        if standby:
            self.call(self.by_ticket[standby])
        else:
            self.hand_on()
        self.rest(thread)

    def account(self, thread):
        ran, self.running[thread] = self.now - self.running[thread], self.now
        thread.done += ran
        for one in (thread.flow, thread.flow.application, thread.flow.share):
            one.used += ran

    def look_at_pairs(self):
        """What all have used up to now, also those that still run."""
        used = {one: one.used for one in (*self.flows, *self.applications.values(), *self.shares)}
        for thread, since in self.running.items():
            for one in (thread.flow, thread.flow.application, thread.flow.share):
                used[one] += self.now - since
        served = [w for w in self.waiting if not self.leaves_slot(w)]
        have_waiting = {one for w in served for one in (w.flow, w.flow.application)}
        have_waiting |= {w.flow.share for w in served if not self.finds_the_last_slot_kept(w.flow.share)}
        for pair in self.pairs:
            pair.look(used, have_waiting)

    def run(self, until=None):
        while self.events and (until is None or self.events[0][0] <= until):
            self.now, _, what, about = heapq.heappop(self.events)
            self.look_at_pairs()
            what(*about)
            self.look_at_pairs()
        return self
