"""When a stream's results are sent: those of short steps together, none late."""

from types import SimpleNamespace

import numpy as np
import pytest

from burst import ErrorStatus, Memory, OutputShape, Request, RequestArgument
from burst.channel import Message
from burst.executor import Outcome
from driver.engine import result_stream
from driver.engine.result_stream import RepeatedExecution
from driver.protocol.lane_codec import encode_outcome, encode_request
from driver.protocol.stream_terms import GOES_ON, MOST, StreamTerms
from fmq.clock import FOREVER

LATEST = 1_000_000
MODEL = 1


class Stream:
    """A stream of `most` steps whose client has room for `room` results; a clock that is set by hand."""

    def __init__(self, monkeypatch, most=100, room=64):
        self.now, self.sent, self.waiters = 0, [], 0
        monkeypatch.setattr(result_stream, "time", SimpleNamespace(monotonic_ns=lambda: self.now))
        monkeypatch.setattr(result_stream, "waiters", lambda: self.waiters)
        argument = RequestArgument(length=16)
        memory = Memory.create(16)
        request = encode_request(MODEL, Request((argument,), (argument,), (memory,)), [0], measure=False)
        terms = StreamTerms(number=7, end=FOREVER, most=most, room=room, stop=None, requests=(request, request))
        lane = SimpleNamespace(plan=lambda _: None, answer=encode_outcome, model=None)
        self.stream = RepeatedExecution(terms, lane, SimpleNamespace(post=self._take))
        self.stream.begin = 0

    def _take(self, raw):
        number, outcome, goes_on, count = Message(raw, []).body
        assert number == 7
        self.sent.append((self.now, outcome[1], goes_on, count))

    def step(self, took, length=4):
        self.now += took
        outcome = Outcome(ErrorStatus.NONE, (OutputShape((length,)),))
        if not self.stream.goes_on(outcome):
            self.stream.conclude(outcome)

    @property
    def counts(self):
        return [count for *_, count in self.sent]


def test_short_steps(monkeypatch):
    """Results of steps that take less than a millisecond come together, none more than a millisecond late."""
    stream, ended = Stream(monkeypatch), []
    for took in np.random.default_rng(0).integers(10_000, 300_000, 99).tolist():
        stream.step(took)
        ended.append(stream.now)
    stream.step(1)
    assert sum(stream.counts) == 100
    assert max(stream.counts) > 3
    assert [goes_on for _, _, goes_on, _ in stream.sent] == [GOES_ON] * (len(stream.sent) - 1) + [MOST]
    firsts = np.cumsum([0, *stream.counts[:-1]])
    late = [at - ended[n] for (at, *_), n in zip(stream.sent, firsts, strict=True) if n < 99]
    assert max(late) <= LATEST


def test_long_steps(monkeypatch):
    """Results of steps that take longer come at once. After several short ones the next are expected to be short."""
    stream = Stream(monkeypatch)
    for took in (LATEST + 1, LATEST + 1, 5 * LATEST, *[10] * 40):
        stream.step(took)
    assert stream.counts[:8] == [1] * 8
    assert max(stream.counts) > 3


def test_one_that_waits(monkeypatch):
    """While an execution waits for a slot, no result waits for a step that comes after that."""
    stream = Stream(monkeypatch)
    stream.waiters = 1
    for _ in range(3):
        stream.step(10)
    assert stream.counts == [1] * 3


@pytest.mark.parametrize(("room", "counts"), [(1, [1]), (2, [1, 1]), (3, [2, 1]), (8, [4, 2, 1, 1])])
def test_room(monkeypatch, room, counts):
    """A client has half of its room to go on with while the results are on their way, and at the end all of them."""
    stream = Stream(monkeypatch, room=room)
    for _ in range(room):
        stream.step(10)
    assert stream.counts == counts
    assert stream.stream.is_parked


def test_shapes(monkeypatch):
    """Only results of the same shapes come together."""
    stream = Stream(monkeypatch, most=7)
    for length in (4, 4, 5, 5, 5, 4, 4):
        stream.step(10, length)
    assert [(outcome[0][0], count) for _, outcome, _, count in stream.sent] == [([4], 2), ([5], 3), ([4], 2)]


def test_a_failure(monkeypatch):
    """What fails is told alone, after the results before it."""
    stream = Stream(monkeypatch)
    stream.step(10)
    stream.stream.conclude(Outcome(ErrorStatus.GENERAL_FAILURE, text="broken"))
    assert [(outcome, count) for _, outcome, _, count in stream.sent] == [([[[4], True]], 1), ([], 1)]
