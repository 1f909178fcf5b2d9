"""Why a frame came late: one name for each, from what the kernel says of the threads meanwhile."""

import mmap
import os
import threading

import pytest
from click.testing import CliRunner
from frames import frame
from inside import controller_of
from waiting import until

from burst import Trace
from burst.trace import STAGES
from driver.cli.command import burst as command
from driver.monitor import Watcher
from driver.monitor.lateness import (
    FAULTED,
    NOT_OURS,
    OTHERS,
    OWN,
    READ,
    SOURCES,
    STOLEN,
    WAITED,
    WAKE,
    WORK,
    Moment,
    ThreadCounts,
    counted,
    late_frames,
    told,
)

MS = 1_000_000
USUAL = {"encode": 10_000, "queue": 0, "wake": 20_000, "bind": 5_000, "execute": 100_000, "return": 30_000}  # ns
NOTHING = ThreadCounts(0, 0, 0, 0)
LATE = 20  # the number of the frame that is
ENOUGH = 400_000  # ns


def stream(slow=None, pause=10 * MS):
    """The trace of 30 frames, of which one took longer in that stage."""
    trace, at = Trace.create(), MS
    for number in range(1, 31):
        took = {name: ns + (ENOUGH if (number, name) == (LATE, slow) else 0) for name, ns in USUAL.items()}
        sent = at + took["encode"]
        taken = sent + took["queue"] + took["wake"]
        started = taken + took["bind"]
        done = started + took["execute"]
        trace.note(number, (at, sent, taken, started, done, done + took["return"]))
        at = done + took["return"] + pause
    return trace


def moments(trace, stolen=0, client=NOTHING, device=NOTHING):
    """Looks between the frames, the accounts grown by so much in those around the late one."""
    found = [Moment(0, 0, NOTHING, NOTHING)]
    for record in trace.records():
        grown = int(record["id"]) >= LATE
        both = (client, device) if grown else (NOTHING, NOTHING)
        found.append(Moment(int(record["received"]) + MS, stolen * grown, *both))
    return found


@pytest.mark.parametrize(
    ("stage", "met", "source"),
    [
        ("wake", {"device": ThreadCounts(ENOUGH, 0, 0, 0)}, WAITED),
        ("wake", {"client": ThreadCounts(ENOUGH, 0, 0, 0)}, WAKE),  # of the other side
        ("wake", {"device": ThreadCounts(ENOUGH // 8, 0, 0, 0)}, WAKE),  # too little
        ("wake", {"stolen": 10 * MS, "device": ThreadCounts(ENOUGH, 0, 0, 0)}, STOLEN),
        ("return", {"client": ThreadCounts(0, ENOUGH, 0, 0)}, OTHERS),
        ("return", {}, WAKE),
        ("encode", {"client": ThreadCounts(0, 0, 400, 0)}, FAULTED),
        ("encode", {"client": ThreadCounts(0, 0, 0, 4)}, READ),
        ("encode", {}, OWN),
        ("execute", {"device": ThreadCounts(0, 0, 400, 0)}, FAULTED),
        ("execute", {"device": ThreadCounts(0, ENOUGH, 0, 0)}, WORK),  # threads of the runtime
        ("execute", {"device": None, "client": None}, WORK),  # in another container
    ],
)
def test_each_source_has_its_name(stage, met, source):
    """Its stage, how late it was, and the first source that accounts for half of that."""
    trace = stream(stage)
    (found,) = late_frames(trace, trace.records(), moments(trace, **met))
    assert (found.number, found.stage, found.ns, found.source) == (LATE, stage, ENOUGH, source)
    assert found.stage in STAGES


def test_what_is_no_stream_has_no_late_frames():
    """Requests back to back, and too few frames, have no pace that one could be late for; neither do regular ones."""
    hurried, few = stream("wake", pause=1000), stream("wake")
    for trace, records in ((hurried, hurried.records()), (few, few.records()[LATE - 2 : LATE + 2])):
        assert late_frames(trace, records, moments(trace)) == []
    regular = stream()
    assert late_frames(regular, regular.records(), moments(regular)) == []
    assert late_frames(regular, regular.records()[:0], []) == []


def test_the_kernel_says_what_a_thread_has_met():
    """Pages that it touched first, and what others of its process ran; nothing of a thread that there is not."""
    pid, tid = os.getpid(), threading.get_native_id()
    before = ThreadCounts.of(pid, tid)
    with mmap.mmap(-1, 200 * mmap.PAGESIZE) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(200):
            memory[page * mmap.PAGESIZE] = 1
    other = threading.Thread(target=lambda: sum(range(10**6)))
    other.start()
    other.join()
    met = ThreadCounts(*(b - a for a, b in zip(before, ThreadCounts.of(pid, tid), strict=True)))
    assert met.faults >= 200
    assert met.others > 0
    assert met.waited >= met.reads == 0
    assert ThreadCounts.of(pid, 1 << 22) is None


def test_a_client_says_which_thread_waits(slow):
    """For whom the kernel is asked: the thread that got the last answer that took more than 0.1 ms."""
    with slow.burst() as burst:
        burst.run(frame(0.002, 1))
        assert controller_of(burst).trace.page.client.tid == threading.get_native_id()


def test_words():
    """Each source is said with what is not Burst's own, the most frequent one first."""
    trace = stream("wake")
    frames = late_frames(trace, trace.records(), moments(trace, device=ThreadCounts(0, 0, 400, 0)))
    assert counted([*frames, *frames]) == {FAULTED: 2}
    assert told({WAKE: 3, FAULTED: 1}) == f"3 {WAKE} (not ours), 1 {FAULTED}"
    assert set(SOURCES) > NOT_OURS


def test_both_commands_tell_it(slow, tmp_path):
    """A stream with one slow frame: `burst trace` counts and draws it, and `burst top` has a line for its device."""
    path = tmp_path / "trace.json"
    with slow.burst() as burst:
        watcher, stop = Watcher(["burst_test_devices.odd:Slow"]), threading.Event()
        watcher.sample()

        def run():
            number = 0
            while not stop.is_set():
                number += 1
                burst.run(frame(0.02 if number % 10 == 0 else 0.001, number))
                stop.wait(0.005)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            (burst_figures,) = until(lambda: [each for each in watcher.sample_after(0.5).bursts if each.late])
            done = CliRunner().invoke(command, ["trace", "--seconds", "1", "-o", str(path), "--pid", str(os.getpid())])
        finally:
            stop.set()
            thread.join()
    assert burst_figures.late.keys() <= set(SOURCES)
    assert "late" in done.output, done.output
    assert '"late: ' in path.read_text()
