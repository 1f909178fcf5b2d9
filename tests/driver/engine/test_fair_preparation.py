"""Preparation by account in the engine: what one account prepares, saves or improves, another does not wait for."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from sent_models import sent
from waiting import PATIENCE, until

import driver
from burst import MissedDeadlinePersistent, MissedDeadlineTransient
from burst.channel import Channel
from driver.deadlines import due
from driver.devices.reference import ReferenceDevice, ReferenceModel
from driver.engine import models, preparations
from driver.engine.cache.compilations import Declined
from driver.engine.models import ModelImprover, ModelStore
from driver.engine.preparations import Pacer, Preparations
from driver.engine.process import Engine
from driver.engine.running_files import RunningFiles
from driver.interface import BindOptions
from driver.protocol.prepare_arguments import JoinTerms, PrepareArguments
from fmq import clock

E, V = 1001, 1002


def chain(length, value=1.0):
    """So many additions of a constant."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (1, 4))
    for _ in range(length):
        x = builder.operation("ADD", x, np.full(4, value, np.float32), 0)
    builder.output(x)
    return builder.build()


class Stuck(ReferenceDevice):
    """Does not return from preparing a model of two operations, until it is let go."""

    def __init__(self):
        self.begun, self.may_end, self.rests = threading.Event(), threading.Event(), 0

    def prepare(self, model, preparation):
        if len(model.main.operations) == 2:
            self.begun.set()
            assert self.may_end.wait(PATIENCE)
        return super().prepare(model, preparation)

    def rest(self):
        self.rests += 1


@pytest.fixture
def threads():
    """As many as the test needs."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def engine():
    """One in this process, whose device gets stuck."""
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(end) for end in Channel.pair()]
        found = Engine("reference", ReferenceDevice(), ends[0], RunningFiles())
        found.device = Stuck()
        yield found
        found.device.may_end.set()


def prepare(engine, uid, model, **arguments):
    fds, where = sent(model)
    holder = engine.ledger.account(uid).application()
    return engine.prepare(holder, fds, where, PrepareArguments(**arguments), lambda _: None)


def test_no_account_waits_for_anothers_preparation(engine, threads):
    """A device that does not return from one account's model prepares another's; the first account waits for itself."""
    stuck = threads.submit(prepare, engine, E, chain(2))
    assert engine.device.begun.wait(PATIENCE)
    waiting = threads.submit(prepare, engine, E, chain(1))
    assert len(prepare(engine, V, chain(1)).model.main.operations) == 1
    with pytest.raises(MissedDeadlineTransient, match="queued"):
        prepare(engine, E, chain(3), deadline=clock.now() + 20_000_000)
    assert not stuck.done()
    assert not waiting.done()
    engine.device.may_end.set()
    assert waiting.result(PATIENCE) is not stuck.result(PATIENCE)


def test_what_it_took_is_in_the_ledger(engine, threads):
    """Of the account and application that asked, whether it succeeds or not."""
    kept = engine.ledger.account(E).application(), engine.ledger.account(V).application()
    stuck = threads.submit(prepare, engine, E, chain(2))
    assert engine.device.begun.wait(PATIENCE)
    prepare(engine, V, chain(1))
    engine.device.may_end.set()
    stuck.result(PATIENCE)
    with pytest.raises(MissedDeadlinePersistent):  # alone, as no account waits for another
        prepare(engine, V, chain(2000), deadline=clock.now() + 5_000_000)
    spent = {row.uid: row.spent["preparing_seconds"] for row in engine.ledger.rows()}
    assert all(seconds > 0 for seconds in spent.values())
    del kept


def test_a_rest_delays_no_preparation(engine, threads):
    """The device rests only while nothing is prepared, and one account's preparation makes no other wait for a rest."""
    engine.rests = True
    stuck = threads.submit(prepare, engine, E, chain(2))
    assert engine.device.begun.wait(PATIENCE)
    assert not engine.rest()
    prepare(engine, V, chain(1))
    assert engine.device.rests == 0
    engine.device.may_end.set()
    stuck.result(PATIENCE)
    assert engine.rest()
    assert engine.device.rests == 1


def test_a_preparation_waits_for_a_rest(threads):
    """While the driver gives memory back, nothing is prepared; at its deadline a preparation gives up."""
    some, resting, may_end = Preparations(), threading.Event(), threading.Event()

    def give_back():
        resting.set()
        assert may_end.wait(PATIENCE)

    def begin(deadline=None):
        with due(deadline), some.one():
            return may_end.is_set()

    rest = threads.submit(some.rest, give_back)
    assert resting.wait(PATIENCE)
    with pytest.raises(MissedDeadlineTransient):
        threads.submit(begin, clock.now() + 10_000_000).result(PATIENCE)
    later = threads.submit(begin)
    may_end.set()
    assert later.result(PATIENCE)
    assert rest.result(PATIENCE)


def test_models_are_compared_outside_of_the_lock(monkeypatch, threads):
    """Comparing takes long: another model of the same account is prepared meanwhile."""
    store, comparing, may_end = ModelStore(ReferenceDevice()), threading.Event(), threading.Event()
    same = models.same_memory

    def slow(one, other):
        comparing.set()
        assert may_end.wait(PATIENCE)
        return same(one, other)

    monkeypatch.setattr(models, "same_memory", slow)
    first = store.prepare(*sent(chain(1)), lambda: None)
    again = threads.submit(store.prepare, *sent(chain(1)), lambda: None)
    assert comparing.wait(PATIENCE)
    store.prepare(*sent(chain(3)), lambda: None)
    may_end.set()
    assert again.result(PATIENCE) is first
    assert store.prepare(*sent(chain(1, 2.0)), lambda: None) is not first


def test_equal_models_that_come_at_once_are_one(threads):
    """However many threads prepare one at a time: what another thread has just made is shared."""
    store, models_of = ModelStore(ReferenceDevice()), sent
    futures = [threads.submit(store.prepare, *models_of(chain(40)), lambda: None) for _ in range(24)]
    assert len({id(future.result(PATIENCE)) for future in futures}) == 1
    assert len(store) <= 1


def test_bursts_that_come_and_go_do_not_collect_all_the_time(engine, monkeypatch):
    """Beside many models a collection takes long: what one client's bursts leave is collected later, when all rest."""
    collections = []

    def collect():
        collections.append(None)
        threading.Event().wait(0.05)

    monkeypatch.setattr("driver.engine.process.gc.collect", collect)
    for _ in range(1000):
        engine.burst_began("low_power")
        engine.burst_ended("low_power")
    assert len(collections) == 1
    until(lambda: engine.rest() and len(collections) == 2)


def test_cache_files_are_read_one_set_at_a_time(engine, threads):
    """What is read is not charged yet: an account that restores from many connections has one model of it in memory."""
    reading, most, may_end, begun = [], [], threading.Event(), threading.Event()

    def read():
        reading.append(None)
        most.append(len(reading))
        begun.set()
        assert may_end.wait(PATIENCE)
        reading.pop()
        raise Declined

    def restore(uid):
        with contextlib.suppress(Declined):
            engine.restore(engine.ledger.account(uid).application(), read, PrepareArguments(), lambda _: None)

    futures = [threads.submit(restore, E) for _ in range(4)]
    assert begun.wait(PATIENCE)
    prepare(engine, V, chain(1))
    may_end.set()
    for future in futures:
        future.result(PATIENCE)
    assert most == [1] * 4


def test_accounts_share_no_models(engine):
    """Clients of one account share equal models; clients of two cannot tell that there is one."""
    mine, again, others = prepare(engine, E, chain(1)), prepare(engine, E, chain(1)), prepare(engine, V, chain(1))
    assert mine is again
    assert others is not mine
    assert others.region is not mine.region


def test_accounts_are_never_joined(engine):
    """Requests of two accounts never run together, also on equal terms for equal models; of one account they may."""
    models = [prepare(engine, uid, chain(1)) for uid in (E, E, V)]
    mine, again, others = (model.joiner(JoinTerms(8, 0, pads=False)) for model in models)
    assert mine is again
    assert others is not mine


def test_an_account_that_saves_for_long_delays_no_other(engine, threads):
    """Its cache files do not answer, or its model takes long to serialise: others prepare and save the same model."""
    begun, may_end = threading.Event(), threading.Event()

    class Slow(ReferenceModel):
        def saved(self, root):
            begun.set()
            assert may_end.wait(PATIENCE)

    engine.device.prepare = lambda model, preparation: Slow(model, preparation.pace)
    mine = prepare(engine, E, chain(1))

    def save():
        with contextlib.suppress(Declined):
            mine.save(None)

    saving = threads.submit(save)
    assert begun.wait(PATIENCE)
    del engine.device.prepare
    others = prepare(engine, V, chain(1))
    with pytest.raises(AttributeError):  # there is nothing to write to
        others.save(None)
    assert not saving.done()
    may_end.set()
    saving.result(PATIENCE)


class Improving(ReferenceModel):
    """A quick model that gets better, if it is let."""

    improves_after = 1

    def __init__(self, model, begun, may_end):
        super().__init__(model, lambda: None)
        self.begun, self.may_end = begun, may_end

    def improved(self, preparation):
        self.begun.set()
        assert self.may_end.wait(PATIENCE)
        return ReferenceModel(chain(1), preparation.pace)


def test_no_account_waits_for_anothers_improvement():
    """One account's model takes for ever to improve; another's is improved."""
    switched, pairs = threading.Event(), {}
    improver = ModelImprover(switched.set)
    for uid in (E, V):
        begun, may_end = threading.Event(), threading.Event()
        shared = ModelStore(Quick(begun, may_end)).prepare(*sent(chain(1)), lambda: None)
        improver.watch(shared, uid, lambda: None)
        bound = shared.prepared.bind([np.ones((1, 4), np.float32)], [np.empty(16, np.uint8)], BindOptions())
        shared.execution(bound).run()
        assert begun.wait(PATIENCE)
        pairs[uid] = shared, may_end
    pairs[V][1].set()
    assert switched.wait(PATIENCE)
    assert (pairs[E][0].stage, pairs[V][0].stage) == (0, 1)
    pairs[E][1].set()


class Quick(ReferenceDevice):
    """Makes models that get better."""

    def __init__(self, *events):
        self.events = events

    def prepare(self, model, preparation):
        return Improving(model, *self.events)


def test_preparations_take_turns_in_pausing(monkeypatch, threads):
    """While a burst is open, four threads that prepare wake up no more often than one: only one is in a pause."""
    pace, inside, most = Pacer(), [], []
    pace.bursts = 1

    def sleep(seconds):
        inside.append(seconds)
        most.append(len(inside))
        threading.Event().wait(seconds)
        inside.pop()

    monkeypatch.setattr(preparations.time, "sleep", sleep)

    def work():
        while len(most) < 100:
            pace()

    for future in [threads.submit(work) for _ in range(4)]:
        future.result(PATIENCE)
    assert max(most) == 1
