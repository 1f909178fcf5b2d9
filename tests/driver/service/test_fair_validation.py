"""Validation by account: what one account's models cost, another account does not wait for."""

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from sent_models import sent
from waiting import PATIENCE, nested, until

import driver
from burst import (
    GeneralFailure,
    MissedDeadlinePersistent,
    MissedDeadlineTransient,
    PeerDied,
    ResourceExhaustedPersistent,
)
from burst.channel import Channel
from driver.devices.reference import ReferenceDevice
from driver.engine.limits import limits
from driver.nn.known import explained
from driver.service.preparation_times import PreparationTimes
from driver.service.validation import ValidationBudget, Validator
from fmq import clock

E, V = 1001, 1002
MANY = 100


class Slow(ReferenceDevice):
    """Does not answer about the models of one account, until it is let go."""

    def __init__(self):
        self.begun, self.may_end = threading.Event(), threading.Event()

    def explain(self, model):
        if len(model.main.operations) > 1:
            self.begun.set()
            assert self.may_end.wait(PATIENCE)
        return super().explain(model)


class Keeper(ReferenceDevice):
    """Keeps a MiB for each operation that it was asked about, and says in which process; of many it says nothing."""

    asked_apart = True

    def __init__(self):
        self.kept = []

    def explain(self, model):
        count = len(model.main.operations)
        self.kept.append(np.ones(count << 20, np.uint8))
        if count > MANY:
            threading.Event().wait()
        return [str(os.getpid())] * count


def open_memory():
    """Descriptors of memory; those of other tests may end meanwhile."""
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += "memfd:" in os.readlink(fd)
    return found


@cache
def chain(length):
    """So many additions."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (1, 4))
    for _ in range(length):
        x = builder.operation("ADD", x, x, 0)
    builder.output(x)
    return builder.build()


def validator(device, **more):
    return Validator(device, replace(limits(), **more), PreparationTimes(device, "test"), lambda _: ())


def budget(deadline=None, has_left=lambda: False, **more):
    return ValidationBudget(replace(limits(), **more), deadline, has_left)


@pytest.fixture
def clients():
    """Threads that call the service."""
    with ThreadPoolExecutor(8) as threads:
        yield threads


def test_no_account_waits_for_anothers_models(clients):
    """A device that does not answer about one account's models answers about another's; the first account waits."""
    device = Slow()
    service = validator(device)
    stuck = [clients.submit(service.explained, E, *sent(chain(2)), budget()) for _ in range(5)]
    assert device.begun.wait(PATIENCE)
    assert service.explained(V, *sent(chain(1)), budget()).reasons == [None]
    assert not any(future.done() for future in stuck)
    device.may_end.set()
    assert [future.result(PATIENCE).reasons for future in stuck] == [[None, None]] * 5


def test_a_model_has_so_many_seconds():
    """A valid model that takes longer is refused with the figure, and others after it are validated."""
    service, spent = validator(ReferenceDevice()), budget(validate_seconds=0.05)
    before = open_memory()
    with pytest.raises(ResourceExhaustedPersistent, match=r"more than validate_seconds = 0.05 s .* raise validate_sec"):
        service.explained(E, *sent(chain(3000)), spent)
    nested(0.05, spent.seconds)
    until(lambda: open_memory() <= before)  # the account's thread closes it, in its own time
    used = budget()
    assert service.explained(E, *sent(chain(100)), used).reasons == [None] * 100
    assert used.seconds > 0


class Counting(ReferenceDevice):
    """Knows how often it was asked."""

    asked = 0

    def explain(self, model):
        self.asked += 1
        return super().explain(model)


def test_what_a_client_leaves_behind_is_not_validated(clients):
    """Neither what runs when it leaves, nor what is queued then, holds up the account's next model, or a descriptor."""
    device = Counting()
    service, before = validator(device), open_memory()
    near, far = Channel.pair()
    looks, begun, may_look = [], threading.Event(), threading.Event()

    def has_left():
        looks.append(near.has_hung_up)
        if len(looks) == 2:  # in the midst of the first one
            begun.set()
            assert may_look.wait(PATIENCE)
        return near.has_hung_up

    with near:
        left = [clients.submit(service.explained, E, *sent(chain(10_000)), budget(has_left=has_left)) for _ in range(5)]
        assert begun.wait(PATIENCE)
        far.close()
        may_look.set()
        assert service.explained(E, *sent(chain(1)), budget()).reasons == [None]
        for future in left:
            with pytest.raises(PeerDied, match="the client has left"):
                future.result(PATIENCE)
    assert device.asked == 1
    until(lambda: open_memory() <= before)


def test_a_validation_ends_at_its_deadline():
    """It is given up at the next operation, and does not occupy its account's thread any longer."""
    services = []

    def is_given_up():  # on a busy machine it may not even begin in that time
        service = validator(ReferenceDevice())
        services.append(service)
        model = sent(chain(3000))
        late = budget(deadline=clock.now() + 20_000_000)
        with pytest.raises((MissedDeadlineTransient, MissedDeadlinePersistent)) as caught:
            service.explained(E, *model, late)
        return caught.value.phase == "preparing"

    until(is_given_up)
    assert services[-1].explained(E, *sent(chain(1)), budget()).reasons == [None]


@pytest.mark.integration
def test_each_account_asks_a_process_of_its_own(clients):
    """A driver's code that hangs over one account's model answers about another's, and what it says is its own."""
    device = Slow()
    device.asked_apart = True
    service = validator(device, driver_seconds=2.0)
    stuck = clients.submit(service.explained, E, *sent(chain(2)), budget())
    assert service.explained(V, *sent(chain(1)), budget()).reasons == [None]
    assert not stuck.done()
    with pytest.raises(GeneralFailure, match="did not return within 2 s; its process was ended"):
        stuck.result(PATIENCE)
    assert service.explained(E, *sent(chain(1)), budget()).reasons == [None]


class TestMemoryOfOnesThatAreAsked:
    """Processes that are asked what a device supports, of which one is ended for the memory that it took."""

    @pytest.fixture
    def ask(self):
        """Asks about so many operations, and returns the process that answered."""
        service = validator(Keeper(), client_bytes=MANY << 19, engine_bytes=MANY << 19, account_bytes=MANY << 20)
        return lambda account, count: service.explained(account, *sent(chain(count)), budget()).reasons[0]

    def test_the_next_question_gets_a_fresh_one(self, ask):
        """The model that took it is told so; the account's next one is answered."""
        for _ in range(2):
            with pytest.raises(ResourceExhaustedPersistent, match=r"it took \d+ bytes"):
                ask(E, 2 * MANY)
            assert ask(E, 1)

    def test_one_that_was_idle(self, ask):
        """What is ended while nobody asks it tells no later model so."""
        first = ask(E, 90)
        other = ask(V, 80)  # far too much together: this process, which they share, may have grown since
        until(lambda: not Path(f"/proc/{first}").exists())
        assert ask(E, 1) not in {first, other}
        assert ask(V, 1) == other


def mapped():
    """Models whose memory this process has."""
    return Path("/proc/self/maps").read_text().count("memfd:burst-model")


def test_nothing_of_a_model_is_kept_once_it_is_validated():
    """While it is prepared, or waits for that, and once it is refused, the service has neither the model nor its
    memory, without a collection of garbage.
    """
    service, before = validator(ReferenceDevice()), mapped()
    gc.disable()
    try:
        found = service.explained(V, *sent(chain(1)), budget())
        assert (found.reasons, found.first, found.file) == ([None], None, None)
        for _ in range(3):
            with pytest.raises(ResourceExhaustedPersistent):
                service.explained(E, *sent(chain(3000)), budget(validate_seconds=0.001))
            assert service.explained(E, *sent(chain(1)), budget()).reasons == [None]  # in the same thread
        until(lambda: mapped() <= before)  # the account's thread drops it, in its own time
    finally:
        gc.enable()


def test_extensions_inside_of_subgraphs_are_looked_for_once():
    """A thousand operations that refer to one large subgraph: it is read once, and not for each of them."""

    class Counted(list):
        reads = 0

        def __iter__(self):
            Counted.reads += 1
            return super().__iter__()

    model = branching(1000, Counted)
    assert explained(model, (), lambda part: [None] * len(part.main.operations)) == [None] * 1000
    assert Counted.reads <= 2


def branching(count, kind):
    """`count` IFs on the same branch, whose list of operations is of that kind."""
    operand, operation = driver.Operand, driver.Operation
    branch = driver.Subgraph(
        [operand("TENSOR_FLOAT32", (2,), lifetime="INPUT"), operand("TENSOR_FLOAT32", (2,), lifetime="OUTPUT")],
        [operation("RELU", (0,), (1,))],
        (0,),
        (1,),
    )
    object.__setattr__(branch, "operations", kind(branch.operations))
    operands = [
        operand("TENSOR_BOOL8", (1,), lifetime="INPUT"),
        operand("SUBGRAPH", (), lifetime="SUBGRAPH", value=0),
        operand("TENSOR_FLOAT32", (2,), lifetime="INPUT"),
        *(operand("TENSOR_FLOAT32", (2,), lifetime="OUTPUT") for _ in range(count)),
    ]
    operations = [operation("IF", (0, 1, 1, 2), (3 + n,)) for n in range(count)]
    model = driver.Model(driver.Subgraph(operands, operations, (0, 2), range(3, 3 + count)), (branch,))
    kind.reads = 0
    return model
