"""Where the time went: stages, percentiles, the trace file, and another process that looks on."""

import itertools
import json
import threading
import time

import numpy as np
import pytest
import stress
from inside import controller_of
from waiting import nested

import driver
from burst.trace import STAGES


def frame(seconds, number=0):
    return np.array([[seconds, number, number, number]], np.float32)


def large_model():
    """x * x, of 16 MB."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (2000, 2000))
    builder.output(builder.operation("MUL", x, x, 0))
    return builder.build()


def trace_of(burst):
    return controller_of(burst).trace


class TestStages:
    @pytest.mark.parametrize("depth", [1, 5])
    def test_sum(self, slow, depth):
        """The stages of each request are what there is between its beginning and its result: nothing twice, no gap."""
        with slow.burst(depth=depth) as burst:
            for future in [burst.submit(frame(0, n)) for n in range(15)]:
                future.result()
            stages = trace_of(burst).stages()
            records = trace_of(burst).records()
        assert len(records) == 15
        assert all((stages[name] >= 0).all() for name in STAGES)
        assert np.array_equal(sum(stages[name] for name in STAGES), stages["total"])
        assert records["id"].tolist() == list(range(1, 16))

    def test_slow_device(self, slow):
        """What the device computes is in execute, and in nothing else."""
        with slow.burst() as burst:
            burst.run(frame(0))
            for _ in range(5):
                burst.run(frame(0.02))
            stages = burst.stats()["stages"]
        assert 20e3 <= stages["execute"]["p50"] <= stages["total"]["p50"]
        assert stages["total"]["p50"] - stages["execute"]["p50"] < 10e3
        assert stages["queue"]["p50"] == 0

    def test_full_queue(self, slow):
        """What waits for others to be executed is in queue: three of them when four are in flight."""
        with slow.burst(depth=4) as burst:
            for future in [burst.submit(frame(0.01)) for _ in range(16)]:
                future.result()
            stages = burst.stats()["stages"]
        assert stages["queue"]["p50"] >= 28e3
        assert stages["execute"]["p50"] < stages["queue"]["p50"] / 2

    def test_copying(self, device):
        """Copying a large array into the inputs is in encode; who writes in place pays nothing there."""
        x = np.ones((2000, 2000), np.float32)
        with (
            device.prepare(large_model()) as prepared,
            prepared.burst() as copying,
            prepared.burst(depth=2) as ahead,
            prepared.burst() as in_place,
        ):
            for _ in range(4):
                copying.run(x)
                ahead.submit(x).result()
                in_place.run()
            spent = [burst.stats()["stages"]["encode"]["p50"] for burst in (copying, ahead, in_place)]
        assert min(spent[:2]) > 500
        assert spent[2] < min(spent[:2]) / 10

    def test_frame_that_waited(self, slow):
        """The time that the newest frame waits for room is not taken for encoding."""
        with slow.burst(policy="latest") as burst:
            first, second = burst.submit(frame(0.05)), burst.submit(frame(0))
            first.result(), second.result()
            stages = trace_of(burst).stages()
        assert stages["encode"].max() < 20e6

    def test_binding(self, device, kit):
        """The first request is checked and bound; the next ones are recognised."""
        with device.prepare(kit.conv_model()) as prepared, prepared.burst() as burst:
            for _ in range(30):
                burst.run()
            stages = trace_of(burst).stages()
        bound = stages["bind"] + stages["execute"]
        assert bound[0] > 2 * np.median(bound[1:])

    def test_report(self, slow):
        """Medians and 99th percentiles in microseconds, None where nothing was; totals since the beginning."""
        begin = time.monotonic()
        with slow.burst(measure=True) as burst:
            assert set(burst.stats()["stages"]) == {*STAGES, "total"}
            assert set(burst.stats()["stages"].values()) == {None}
            for n in range(20):
                burst.run(frame(0.03 if n == 7 else 0))
            stats = burst.stats()
        took = time.monotonic() - begin
        for spread in stats["stages"].values():
            assert 0 <= spread["p50"] <= spread["p99"]
        execute = stats["stages"]["execute"]
        assert execute["p99"] > 20e3
        nested(0, 10 * execute["p50"] * 1e-6, took)  # ten at least took as long as the median
        nested(0.03, stats["seconds"]["on_device"], stats["seconds"]["total"], took)
        nested(0, stats["cpu_seconds"]["client"], took)
        nested(0, stats["cpu_seconds"]["device"], took)

    def test_more_than_there_are_records(self, slow):
        """Of many requests the last 256 are there, each once."""
        with slow.burst() as burst:
            for _ in range(700):
                burst.run()
            assert trace_of(burst).records()["id"].tolist() == list(range(445, 701))


class TestFile:
    @pytest.mark.parametrize("depth", [1, 4])
    def test_format(self, slow, tmp_path, depth):
        """A JSON object of complete events and names of tracks, which nest in every track."""
        path = tmp_path / "trace.json"
        with slow.burst(depth=depth) as burst:
            for future in [burst.submit(frame(1e-3)) for _ in range(16)]:
                future.result()
            assert burst.trace(str(path)) == 16
            pid = slow.device.engine_pid
        found = json.loads(path.read_text())
        assert set(found) == {"traceEvents", "displayTimeUnit"}
        labels = [e for e in found["traceEvents"] if e["ph"] == "M"]
        events = [e for e in found["traceEvents"] if e["ph"] == "X"]
        assert len(labels) + len(events) == len(found["traceEvents"])
        assert {label["name"] for label in labels} == {"process_name", "thread_name"}
        assert sum(label["name"] == "thread_name" for label in labels) <= depth
        assert {e["name"] for e in events} == {*STAGES, "request"}
        assert len(events) == 7 * 16
        for e in events:
            assert all(type(e[key]) is int for key in ("pid", "tid"))
            assert e["dur"] >= 0
            assert (e["pid"] == pid) == (e["name"] in {"wake", "bind", "execute"})
        for number in range(1, 17):
            self.check_request({e["name"]: e for e in events if e["args"]["request"] == number})
        for track in {(e["pid"], e["tid"]) for e in events}:
            self.check_track([e for e in events if (e["pid"], e["tid"]) == track])

    @staticmethod
    def check_request(parts):
        """Its stages follow each other without a gap, from its beginning to its end."""
        ends = [(parts[s]["ts"], parts[s]["ts"] + parts[s]["dur"]) for s in STAGES]
        whole = parts["request"]["ts"], parts["request"]["ts"] + parts["request"]["dur"]
        joints = [whole[0], *(at for pair in ends for at in pair), whole[1]]
        assert all(abs(a - b) < 0.01 for a, b in zip(joints[::2], joints[1::2], strict=True))

    @staticmethod
    def check_track(events):
        """Any two lie one after the other, or one in the other."""
        spans = sorted((round(e["ts"], 2), -round(e["ts"] + e["dur"], 2)) for e in events)
        open_ = []
        for begin, end in spans:
            while open_ and open_[-1] <= begin + 0.02:
                open_.pop()
            assert not open_ or -end <= open_[-1] + 0.02
            open_.append(-end)


WATCHER = """
import sys
from burst import Memory
from burst.trace import Trace
fd, nbytes = map(int, sys.argv[1:])
trace = Trace(Memory.from_wire(["ashmem", nbytes, True], fd))
last = 0
print("ready", flush=True)
for line in sys.stdin:
    page = trace.page
    assert bytes(trace.memory.asarray())[:8] == b"BRSTRACE" and page.version == 2
    found = int(page.client.results)
    assert last <= found <= page.client.requests and page.device.answered >= found
    last = found
    print(found, len(trace.records()), page.device.pid, flush=True)
"""


def test_other_process(slow, kit):
    """Who has the trace's memory reads counts and records while the burst runs, and the burst does not notice."""
    with slow.burst() as burst:
        memory = trace_of(burst).memory
        with kit.python(
            WATCHER, memory.fd, memory.nbytes, pass_fds=[memory.fd], stdin=-1, stdout=-1, text=True
        ) as other:
            assert other.stdout.readline() == "ready\n"
            stop, ran = threading.Event(), []

            def work():
                while not stop.is_set():
                    assert burst.run(frame(0, len(ran) % 100)).outputs[0][0, 3] == len(ran) % 100 + 1
                    ran.append(1)

            thread = threading.Thread(target=work)
            thread.start()
            seen = []

            def look():
                print(file=other.stdin, flush=True)
                seen.append([int(word) for word in other.stdout.readline().split()])
                return seen[-1][0] > 500

            try:
                kit.until(look)
            finally:
                stop.set()
                thread.join()
                other.stdin.close()
            assert other.wait(kit.patience) == 0
        assert max(found for _, found, _ in seen) >= 250  # but for those that are being written
        assert seen[-1][2] == slow.device.engine_pid
        assert burst.stats()["runs"]["burst"] == len(ran) >= seen[-1][0]


@pytest.mark.parametrize("looks", [40, pytest.param(stress.times(20_000), marks=pytest.mark.stress)])
def test_read_while_written(device, kit, looks):
    """Records that are being written are left out: what is told is whole, in order, and of the last requests."""
    stop = threading.Event()
    with device.prepare(kit.add_model()) as prepared, prepared.burst(depth=4) as burst:

        def work():
            while not stop.is_set():
                for future in [burst.submit() for _ in range(4)]:
                    future.result()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            trace, last = trace_of(burst), 0
            kit.until(lambda: trace.page.client.results > 300)
            for _ in range(looks):
                begin = int(trace.page.client.results)
                records = trace.records()
                end = int(trace.page.client.requests)
                ids = records["id"].astype(np.int64)
                assert (np.diff(ids) > 0).all()
                assert ids.size > 100 or end - begin > 100
                if ids.size:
                    assert max(last, begin - 256) - 256 <= ids[0] <= ids[-1] <= end
                    last = max(last, int(ids[-1]) - 256)
                    times = [records[name].astype(np.int64) for name in records.dtype.names[1:]]
                    assert all((a <= b).all() for a, b in itertools.pairwise(times))
                    assert (times[-1] - times[0]).max() < 5e9
                    assert (np.diff(times[1]) >= 0).all()
                    assert (np.diff(times[4]) >= 0).all()
                burst.stats()
                trace.chrome_events("hammered")
        finally:
            stop.set()
            thread.join()


def test_traces_of_a_device(place, kit):
    """Any client of a device gets the notes of all its bursts, read-only, and sees them grow; closed ones are gone."""
    with driver.connect() as device, driver.connect() as other, device.prepare(kit.add_model()) as prepared:
        bursts = [prepared.burst() for _ in range(40)]  # more than fit into one answer
        for n, burst in enumerate(bursts):
            for _ in range(n):
                burst.run(np.ones((1, 4), np.float32))
        traces = other.traces()
        assert sorted(int(trace.page.client.results) for trace in traces) == list(range(40))
        bursts[0].run(np.ones((1, 4), np.float32))
        assert sorted(int(trace.page.client.results) for trace in traces)[:3] == [1, 1, 2]
        assert all(not trace.memory.writable for trace in traces)
        for burst in bursts:
            burst.close()
        kit.until(lambda: not other.traces())
