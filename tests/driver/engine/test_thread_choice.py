"""In how many threads a model runs: the rule, and the steps by which an engine finds the number, on simulated time."""

import gc
import os
import signal
import threading
import weakref
from itertools import groupby
from types import SimpleNamespace

import numpy as np
import pytest

import driver
from driver.engine.models import SharedModel
from driver.engine.thread_choice import (
    LOOKED_AT,
    MOST_BYTES,
    REST,
    TRIED,
    BoundForm,
    Meter,
    RunClock,
    RunFigures,
    ThreadChooser,
    better,
)
from driver.engine.thread_choice import number_to_try as tried
from driver.interface import BindOptions, BoundExecution, PreparedModel
from driver.protocol.prepare_arguments import ThreadsFound
from driver.vts.cache_files import CacheFileSet

UID, MS = 1001, 1e-3
CHOOSING = "burst_test_devices.listening:ChoosingThreads"
IN_A_ROW, STREAM = 0.0, 33 * MS
FASTER_IN_ONE = {1: (3.7 * MS, 3.8 * MS), 2: (4.8 * MS, 5.2 * MS)}
FASTER_IN_TWO = {1: (22.4 * MS, 22.6 * MS), 2: (14.8 * MS, 25.5 * MS)}
X = np.zeros((1, 4), np.float32)


class SimulatedTime:
    """Time that passes when it is told to."""

    def __init__(self):
        self.now, self.used = 100.0, 1.0

    @property
    def clock(self):
        return RunClock(lambda: self.now, lambda: self.used)

    def pass_(self, seconds, used=0.0):
        self.now, self.used = self.now + seconds, self.used + used


class Run(BoundExecution):
    """Takes as long as a run in so many threads."""

    def __init__(self, owner, outputs):
        self._owner, self._outputs, self.shapes = owner, outputs, [((1, 4), True)]
        self.native = owner.device.native

    def run(self):
        device = self._owner.device
        device.clock.pass_(*device.costs[self._owner.threads])
        device.ran.append(self._owner.threads)
        self._outputs[0][:] = device.bits[self._owner.threads]


class Prepared(PreparedModel):
    def __init__(self, device, threads):
        self.device, self.threads = device, threads

    def bind(self, inputs, outputs, options):
        return Run(self, outputs)


class Runtime:
    """A device whose runs cost what a table says."""

    hal_version, native = "1.3", None

    def __init__(self, costs, bits=(0, 7, 7)):
        self.clock, self.costs, self.bits, self.ran, self.made = SimulatedTime(), costs, bits, [], []

    def prepare(self, model, preparation):
        self.made.append(preparation.threads)
        return Prepared(self, preparation.threads)


class Served:
    """One model of a device on which bursts begin, and requests come."""

    def __init__(self, costs, threads=2, processors=2, nbytes=100, like=None, **more):
        builder = driver.ModelBuilder()
        x = builder.input("float32", (1, 4))
        builder.output(builder.operation("RELU", x))
        self.device, self.kept, self.forgotten = like.device if like else Runtime(costs, **more), [], 0
        region, prepared = SimpleNamespace(nbytes=nbytes), Prepared(self.device, threads)
        self.shared = SharedModel(region, (0, 0), builder.build(), prepared, file=b"a digest")
        made = ThreadChooser(self.device, self.forget, self.kept.append, self.device.clock.clock)
        made.processors, made.submit = processors, lambda _uid, step: step()
        self.chooser = like.chooser if like else made

    def forget(self):
        self.forgotten += 1

    def begin(self):
        self.chooser.watch(self.shared, UID, lambda: None)

    def request(self, rest, count=1):
        """So many, with a rest before each."""
        for _ in range(count):
            self.device.clock.pass_(rest)
            outputs = [np.zeros(16, np.uint8)]
            if self.shared.meter:
                self.shared.form = BoundForm.of([X], outputs)
            self.shared.execution(self.shared.prepared.bind([X], outputs, BindOptions())).run()

    def choose(self, rest):
        """A burst that is long enough for a choice. Return the number of threads after it."""
        self.begin()
        self.request(rest, LOOKED_AT + 2 * TRIED)
        assert not isinstance(self.shared.meter, Meter)
        return self.shared.prepared.threads


@pytest.mark.parametrize(
    ("took", "used", "is_better"),
    [
        (0.77, 0.74, True),  # face_detection_full_range on litert, one thread beside two
        (0.66, 1.13, True),  # nudenet on onnxruntime, two beside one
        (1.16, 1.82, False),  # PP-OCRv4 det, two beside one
        (1.0, 0.5, True),
        (1.05, 0.5, True),
        (1.06, 0.5, False),
        (0.96, 1.0, False),
        (0.94, 3.0, True),
        (1.0, 1.0, False),
        (1.0, 0.96, False),
    ],
)
def test_the_rule(took, used, is_better):
    """What takes clearly less time is better, and what takes about as long and clearly less processor time."""
    assert better(RunFigures(3 * MS, 4 * MS, 0), RunFigures(3 * MS * took, 4 * MS * used, 0)) == is_better


def test_what_is_tried():
    """Half of the threads; with one, two, where there are as many processors."""
    assert [tried(4, 8), tried(2, 2), tried(1, 2), tried(1, 1)] == [2, 1, 2, 0]


@pytest.mark.parametrize(("costs", "threads"), [(FASTER_IN_ONE, 1), (FASTER_IN_TWO, 2)])
@pytest.mark.parametrize("at_first", [1, 2])
@pytest.mark.parametrize("rest", [IN_A_ROW, STREAM])
def test_a_model_runs_in_the_threads_that_suit_it(costs, threads, at_first, rest):
    """Whatever the device thought, after the first requests of a burst it has the number that is better."""
    served = Served(costs, threads=at_first)
    assert served.choose(rest) == threads
    assert served.device.made == [3 - at_first]
    assert served.kept == [served.shared]
    assert served.shared.found.at(is_stream=rest == STREAM) == threads


def test_each_request_runs_once_and_gets_its_result():
    """Trials are requests' own runs, but for one of each number, on values of the engine's."""
    served = Served(FASTER_IN_ONE)
    served.choose(STREAM)
    assert len(served.device.ran) == LOOKED_AT + 2 * TRIED + 2
    assert served.device.ran.count(1) == TRIED + 1


def test_a_stream_has_a_number_of_its_own():
    """What is known for calls in a row is looked up, and measured anew for a stream; both are kept."""
    served = Served(FASTER_IN_TWO, threads=1)
    assert served.choose(IN_A_ROW) == 2
    served.device.costs = FASTER_IN_ONE
    assert served.choose(STREAM) == 1
    assert served.shared.found == ThreadsFound(in_a_row=2, in_a_stream=1)
    made = len(served.device.made)
    assert served.choose(IN_A_ROW) == 2  # made again, and not tried
    assert served.device.made[made:] == [2]
    assert served.choose(IN_A_ROW) == 2
    assert served.device.made[made:] == [2]


def test_other_bits_are_refused():
    """A model whose results depend on the number of threads keeps it, and is asked once."""
    served = Served(FASTER_IN_ONE, bits=(0, 7, 8))
    assert served.choose(STREAM) == 2
    assert served.choose(STREAM) == 2
    assert served.device.made == [1]
    assert set(served.device.ran[: LOOKED_AT + 1]) == {2}


@pytest.mark.parametrize("seconds", [20e-6, 0.9])
def test_too_short_and_too_long_ones_are_left_alone(seconds):
    """No second one is made of a model that would gain nothing, or for whose trials nobody waits."""
    served = Served({2: (seconds, seconds)})
    assert served.choose(STREAM) == 2
    assert not served.device.made


@pytest.mark.parametrize("more", [{"threads": 0}, {"processors": 1}, {"nbytes": MOST_BYTES + 1}])
def test_where_there_is_no_choice_nothing_is_measured(more):
    """Where somebody has said how many threads there are, on one processor, and for a model that is too large."""
    served = Served({0: (MS, MS), **FASTER_IN_ONE}, **more)
    served.begin()
    assert served.shared.meter is None


def test_a_pace_that_changes_ends_the_trial():
    """Then the model stays as it was, and the next burst tries again."""
    served = Served(FASTER_IN_ONE)
    served.begin()
    served.request(STREAM, LOOKED_AT + TRIED)
    served.request(IN_A_ROW, TRIED)
    assert (served.shared.prepared.threads, served.shared.found) == (2, ThreadsFound())
    assert served.choose(STREAM) == 1


def test_what_fails_changes_nothing():
    """A model that cannot be made for another number of threads goes on."""
    served = Served(FASTER_IN_ONE)

    def refuse(model, preparation):
        raise MemoryError

    served.device.prepare = refuse
    assert served.choose(STREAM) == 2


def test_a_measured_model_gets_its_native_runs_back():
    """While runs are measured they take place in Python; afterwards all is bound anew."""
    served = Served({2: (20e-6, 20e-6)})
    served.device.native = (1, 2)
    served.begin()
    bound = served.shared.prepared.bind([X], [np.zeros(16, np.uint8)], BindOptions())
    assert served.shared.execution(bound).native is None
    served.request(STREAM, LOOKED_AT)
    assert served.forgotten == 1
    assert served.shared.execution(bound).native == (1, 2)


def test_an_equal_file_is_prepared_as_was_found():
    """By its digest, and for the same account alone."""
    served = Served(FASTER_IN_ONE)
    served.choose(STREAM)
    assert served.chooser.known(UID, b"a digest").usual == 1
    assert served.chooser.known(UID + 1, b"a digest").usual == 0


def test_the_other_model_is_freed():
    """Of two numbers of threads one stays in memory, without a collection of garbage."""
    served = Served(FASTER_IN_ONE)
    gc.disable()
    try:
        first = weakref.ref(served.shared.prepared)
        served.choose(STREAM)
        assert first() is None
    finally:
        gc.enable()


def test_two_models_of_an_account_at_most_are_in_memory_twice():
    """A third one has its turn at a later burst."""
    first = Served(FASTER_IN_ONE)
    others = [Served(FASTER_IN_ONE, like=first) for _ in range(2)]
    for served in (first, *others):
        served.begin()
        served.request(STREAM, LOOKED_AT)
    assert first.device.made == [1, 1]
    first.request(STREAM, 2 * TRIED)
    assert others[1].choose(STREAM) == 1


@pytest.mark.integration
@pytest.mark.usefixtures("two_cpus")
def test_a_served_model_is_measured_by_its_requests(place, heard, kit):
    """In a stream its bursts go on with what is better, every result is right, and a restored one begins with that."""
    model, pause = kit.add_model(), threading.Event()

    def bound_in():
        return [threads for threads, _ in groupby(line["threads"] for line in heard("bind"))]

    with driver.connect(CHOOSING) as device, CacheFileSet(device.number_of_cache_files_needed()) as files:
        with device.prepare(model, cache=files.cache()) as prepared, prepared.burst() as burst:
            for n in range(400):
                pause.wait(3e-3)
                assert burst.run(X + n).outputs[0].tolist() == (X + n + 1).tolist()
                if bound_in() == [2, 1, 2, 1]:
                    break
            assert bound_in() == [2, 1, 2, 1]
        for pid in (device.service_pid, device.engine_pid):
            os.kill(pid, signal.SIGKILL)
        with kit.living(CHOOSING) as living, living.prepare_from_cache(model, files.cache()) as restored:
            assert restored.run(X)[0].tolist() == (X + 1).tolist()
    assert heard("prepare")[-1]["threads"] == 1


def test_a_stream_that_begins_in_a_burst_is_recognised():
    """After calls in a row, frames with pauses: each pace gets its number, but not soon after another one."""
    served = Served(FASTER_IN_TWO, threads=1)
    assert served.choose(IN_A_ROW) == 2
    served.device.costs = FASTER_IN_ONE
    served.request(STREAM, LOOKED_AT)
    assert served.device.made == [2]  # it is too soon
    served.device.clock.pass_(REST)
    served.request(STREAM, LOOKED_AT + 2 * TRIED)
    assert served.shared.prepared.threads == 1
    assert served.shared.found == ThreadsFound(in_a_row=2, in_a_stream=1)
    served.device.clock.pass_(REST)
    served.request(IN_A_ROW, LOOKED_AT + 1)
    assert served.shared.prepared.threads == 2
    served.request(STREAM, LOOKED_AT - 1)
    served.request(IN_A_ROW, 1)
    served.device.clock.pass_(REST)
    served.request(STREAM, LOOKED_AT - 2)
    assert served.shared.prepared.threads == 2
