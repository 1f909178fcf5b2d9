"""`burst trace`: the file that it writes, read back."""

import gzip
import itertools
import json
import os
import re
from collections import defaultdict

import numpy as np
import pytest
from click.testing import CliRunner
from inside import controller_of

import driver
from burst.timeline import ON_DEVICE
from burst.trace import STAGES
from driver.cli.command import burst as command
from driver.monitor import Watcher, events, follow
from driver.monitor.follow import Followed

X = np.ones((1, 4), np.float32)
SLOW = "burst_test_devices.odd:Slow"
ROUNDING = 2e-3  # microseconds: times are nanoseconds there, and microseconds in the file


def trace(*arguments):
    """Its words, and its exit code."""
    found = CliRunner().invoke(command, ["trace", *map(str, arguments)])
    return found.output, found.exit_code


@pytest.fixture(scope="module")
def bursts(_home, kit):
    """Two on a slow device: one request at a time, and four."""
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        driver.connect(folder(monkeypatch, _home)) as device,
        device.prepare(kit.add_model()) as prepared,
        prepared.burst() as one,
        prepared.burst(depth=4) as four,
    ):
        yield one, four


def folder(monkeypatch, place):
    """The device is one of that runtime directory."""
    monkeypatch.setenv("BURST_RUNTIME_DIR", str(place.path))
    return SLOW


@pytest.fixture(scope="module")
def drawn(bursts):
    """What is drawn of thirty requests of the one and eighty of the other; by kind of event."""
    followed = follow(Watcher(), 1e-9, lambda _: True)
    for burst, count in zip(bursts, (30, 80), strict=True):
        ran(burst, count)
    for one in followed:
        one.look(0.0)
    assert [(len(one.records), one.missed) for one in followed] == [(30, 0), (80, 0)]
    found = defaultdict(list)
    for event in json.loads(json.dumps(list(events(followed)))):
        found[event["ph"]].append(event)
    return found


def ran(burst, count):
    """As many in flight as may be; nobody wants the results."""
    for _ in range(count):
        last = burst.submit(0.001 * X)
    last.result()


def test_stages_fill_their_request(drawn):
    """Each request has all six stages; one begins where the one before it ends, the first and the last with it."""
    requests, stages = {}, defaultdict(dict)
    for event in drawn["X"]:
        key = event["cat"], event["args"]["request"]
        if event["name"] == "request":
            requests[key] = event
        else:
            stages[key][event["name"]] = event
    assert len(requests) == 110
    assert stages.keys() == requests.keys()
    for key, request in requests.items():
        assert list(stages[key]) == list(STAGES)
        at = request["ts"]
        for stage in stages[key].values():
            assert stage["ts"] == pytest.approx(at, abs=ROUNDING)
            at += stage["dur"]
        assert at == pytest.approx(request["ts"] + request["dur"], abs=6 * ROUNDING)
        assert 1e3 <= stages[key]["execute"]["dur"] <= request["dur"]


def test_what_shares_a_lane_nests(drawn):
    """Two events in one lane are one inside the other, or one after the other; the device's are in its process."""
    lanes = defaultdict(list)
    for event in drawn["X"]:
        lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
        assert (event["pid"] == os.getpid()) == (event["name"] not in ON_DEVICE)
    assert len([lane for lane in lanes if lane[0] == os.getpid()]) == 1 + 4
    for found in lanes.values():
        open_until = []
        for begin, end, name in sorted(found, key=lambda event: (event[0], -event[1])):
            while open_until and open_until[-1] <= begin + ROUNDING:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 6 * ROUNDING, name
            open_until.append(end)


def test_counters_begin_and_end_at_nothing(drawn):
    """What is in flight and what is queued is never negative, never more than the depth, and 0 in the end."""
    by_name = defaultdict(list)
    for event in sorted(drawn["C"], key=lambda event: event["ts"]):
        by_name[event["name"]].append(event["args"])
    most = []
    for counts in by_name.values():
        assert counts[-1] == {"in flight": 0, "queued": 0}
        assert all(0 <= count["queued"] <= count["in flight"] for count in counts)
        most.append(max(count["in flight"] for count in counts))
    assert sorted(most) == [1, 4]


def test_everything_has_a_name(drawn):
    """Each process and each lane that something is drawn in is named, once."""
    named = {"process_name": [], "thread_name": []}
    for event in drawn["M"]:
        named[event["name"]].append((event["pid"], event["tid"]) if event["name"] == "thread_name" else event["pid"])
    lanes = {(event["pid"], event["tid"]) for event in drawn["X"]}
    assert sorted(named["thread_name"]) == sorted(lanes)
    assert sorted(named["process_name"]) == sorted({pid for pid, _ in lanes})


def test_what_was_overwritten_is_told(fast):
    """Who comes too late for all that a trace has kept says how many requests that cost, and loses no others."""
    with fast.burst() as burst:
        followed = Followed(Watched(controller_of(burst).trace), 0)
        for count in (100, 1000, 3):
            for _ in range(count):
                burst.run(X)
            followed.look(0.0)
        ids = followed.records["id"].astype(int)
        assert followed.missed == 1000 - 256
        assert len(ids) == 1103 - followed.missed
        assert ids[:100].tolist() == list(range(1, 101))
        assert ids[-1] == 1103
        assert (np.diff(ids) > 0).all()


class Watched:
    """A burst of which there is no more than a trace."""

    def __init__(self, trace):
        self.trace = trace


@pytest.mark.integration
def test_bursts_of_running_clients(place, client, tmp_path):
    """Two clients run while they are followed: one file has both, and the command says how many requests it has."""
    peers = [client(SLOW), client(SLOW)]
    for peer in peers:
        peer.begin([0.002] * 400)
    path = tmp_path / "trace.json.gz"
    words, code = trace(SLOW, "--seconds", 0.6, "-o", path, "--json")
    assert code == 0, words
    told = json.loads(words)
    assert told["file"] == str(path)
    assert {burst["pid"] for burst in told["bursts"]} == {peer.pid for peer in peers}
    with gzip.open(path) as file:
        found = json.load(file)["traceEvents"]
    requests = [event for event in found if event["name"] == "request"]
    for burst in told["bursts"]:
        ids = [event["args"]["request"] for event in requests if event["pid"] == burst["pid"]]
        assert len(ids) == burst["requests"] >= 2
        assert burst["missed"] == 0
        assert all(b - a == 1 for a, b in itertools.pairwise(ids))


@pytest.mark.integration
def test_one_of_them(place, client, tmp_path):
    """By its number, or by its client's pid, one burst is followed and no other."""
    peers = [client(), client()]
    for burst in Watcher().sample().bursts:
        for option in (["--burst", burst.number], ["--pid", burst.pid]):
            words, code = trace("--seconds", 0.01, "-o", tmp_path / "trace.json", "--json", *option)
            assert code == 0, words
            assert [found["pid"] for found in json.loads(words)["bursts"]] == [burst.pid]
            assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(peers) == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "no burst is running here; see `burst top`"),
        (["--pid", 1], "no burst of process 1 is running"),
        (["--burst", 7, "litert"], "no burst 7 is running here.* not running"),
    ],
)
def test_nothing_to_follow(place, tmp_path, options, told):
    """The command says what it did not find, exits with 1, and writes and starts nothing."""
    words, code = trace("--seconds", 0.01, "-o", tmp_path / "trace.json", *options)
    assert code == 1
    assert re.search(told, words), words
    assert list(tmp_path.iterdir()) == place.pids() == []


def test_a_file_that_cannot_be_written(place, tmp_path):
    """Is told before anything is followed."""
    words, code = trace("-o", tmp_path)
    assert code == 2
    assert "is a directory" in words
