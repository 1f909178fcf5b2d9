"""Each script of bench/ runs to its end with tiny blocks and says what it promises to say; the arithmetic is right."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCH = Path(__file__).parents[2] / "bench"

needs_two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each side needs a CPU of its own")

BURST_ROWS = [
    "floor: limit spin",
    "floor: limit futex",
    "in process: numpy.add",
    "in process: interpreter",
    "burst, spinning (memfd)",
    "burst, spinning (posix)",
    "burst, sleeping (spin=0)",
    "plain path",
]
QUEUE_ROWS = [
    "floor: limit spin",
    "floor: limit futex",
    "queue in C, polling",
    "queue from Python, polling",
    "queue in C, sleeping",
    "queue from Python, sleeping",
]
FLOORS = [*QUEUE_ROWS[:2], "floor: limit spin, 8 B", "floor: spsc, 64 KiB"]
SIZED_ROWS = [f"queue {way}, polling, {size}" for size in ("8 B", "64 KiB") for way in ("in C", "from Python")]
STREAMS = ["floor: spsc", "floor: spsc in place", "write/read in C", "in place in C", "overwriting in C"]
INTERFERENCE_ROWS = ["idle", "another computes", "another prepares"]


@pytest.fixture
def measure(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import measure

    return measure


@pytest.fixture
def verdict(measure):
    import verdict

    return verdict


def run(script, tmp_path, *options):
    target = tmp_path / "out.json"
    command = [sys.executable, str(BENCH / script), "--quick", "--markdown", "--json", str(target), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(target.read_text()), done.stdout


@needs_two_cpus
@pytest.mark.parametrize(
    ("script", "options", "rows", "budgets"),
    [
        ("burst_roundtrip.py", ["--peers", "none"], BURST_ROWS, 5),
        ("queue_roundtrip.py", ["--peers", "none"], QUEUE_ROWS, 6),
        (
            "queue_roundtrip.py",
            ["--peers", "none", "--sizes", "8", "65536"],
            [*FLOORS, *QUEUE_ROWS[2:], *SIZED_ROWS],
            6,
        ),
        ("prepare_interference.py", [], INTERFERENCE_ROWS, 2),
    ],
)
def test_a_script_measures_every_row_it_promises(tmp_path, script, options, rows, budgets):
    """Quick runs print every row twice (for people and for README.md) and write all blocks of all rounds."""
    found, text = run(script, tmp_path, *options)
    assert [row["name"] for row in found["subjects"]] == rows
    for row in found["subjects"]:
        assert len(row["rounds"]) == found["pairs"] == 2
        assert all(0 < block["p50_us"] <= block["p99_us"] <= block["max_us"] for block in row["rounds"])
        assert text.count(row["name"]) >= 2
    assert len(found["budgets"]) == budgets
    assert {"cpu", "cores", "kernel", "governor", "load", "python", "numpy"} <= found["conditions"].keys()


@needs_two_cpus
def test_the_stream_script_measures_every_cell(tmp_path):
    """Every size and batch in C beside both floors; from Python ours and the peers that were asked for."""
    found, text = run("queue_throughput.py", tmp_path, "--peers", "pipe")
    rows = {row["name"]: row for row in found["subjects"]}
    in_c = {f"{what}, {cell}" for what in STREAMS for cell in ("64 B x 1", "64 B x 16", "64 KiB x 1", "64 KiB x 16")}
    python = {
        f"{what}, {cell}"
        for what in ("write/read", "reserve/peek", "pipe")
        for cell in ("64 B x 1", "64 B x 16", "64 KiB x 1")
    }
    assert rows.keys() == in_c | python
    for row in rows.values():
        assert len(row["rounds"]) == found["pairs"] == 2
        assert row["mb_per_s"] == pytest.approx(row["bytes"] * row["elements_per_s"] / 1e6)
    assert (len(found["budgets"]), text.count("64 KiB x 16")) == (5, 2)


def test_the_idle_script_sees_every_way_to_wait(tmp_path):
    """Waiters are woken at the end, or it fails; what is told is what /proc counted."""
    found, _ = run("queue_idle.py", tmp_path)
    ours = [row for row in found["subjects"] if row["ours"] and "error" not in row]
    assert {("reader.read", "main thread"), ("EventFlag.wait", "other thread")} <= {
        (row["what"], row["where"]) for row in ours
    }
    for row in ours:
        assert len(row["rounds"]) == 2
        assert 0 <= row["wakeups_per_s"]["median"] < (1 if row["where"] == "other thread" else 100)
    assert len(found["budgets"]) == 2


@needs_two_cpus
def test_the_cost_script_counts_what_queues_hold(tmp_path):
    """Each side of each queue has at least its memory, and both sides were up when they looked."""
    found, _ = run("queue_cost.py", tmp_path, "--counts", "2", "20")
    rows = [row for row in found["subjects"] if "error" not in row]
    assert {(row["count"], row["side"]) for row in rows} == {(n, s) for n in (2, 20) for s in ("maker", "attacher")}
    for row in rows:
        assert len(row["rounds"]) == 2
        assert row["us"] > 0
        assert row["way"] != "a memory each" or (row["fds"] >= 1 and row["mappings"] >= 1 and row["resident_kib"] >= 4)
    assert len(found["budgets"]) == 5


@pytest.fixture
def streams(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH / "peers"))
    import streams

    return streams


@pytest.mark.parametrize("lost", [0, 1, 7])
def test_a_stream_that_loses_messages_is_not_measured(streams, lost):
    """The consumer knows whose turn it is; a way that drops some is an error and not a fast row."""
    kinds = streams.EVERY - 1
    numbers = (n + lost * (n > 100) for n in itertools.count())
    take, look = streams.looking(lambda: bytes([next(numbers) % kinds + 1]) * 8)
    if lost:
        with pytest.raises(ValueError, match="message"):
            streams.consume(take, look, 0.05, kinds)
    else:
        assert streams.consume(take, look, 0.01, kinds)["p50_us"] > 0


@needs_two_cpus
def test_every_busy_block_contains_whole_prepares(tmp_path):
    """The count that the second process answers is of prepares that ended within the block."""
    found, _ = run("prepare_interference.py", tmp_path)
    prepares = [block["done"] for block in found["subjects"][2]["rounds"]]
    assert min(prepares) >= 1
    assert [block["done"] for block in found["subjects"][0]["rounds"]] == [0, 0]


@needs_two_cpus
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("burst_roundtrip.py", ["--peers", "none"]),
        ("queue_roundtrip.py", ["--peers", "none", "--sizes", "65536"]),
        ("queue_throughput.py", ["--peers", "none"]),
        ("queue_idle.py", []),
        ("queue_cost.py", ["--counts", "1", "5"]),
    ],
)
def test_a_picture_is_drawn(tmp_path, script, options):
    """--plot writes what its file's name says."""
    pytest.importorskip("matplotlib")
    target = tmp_path / "picture.png"
    run(script, tmp_path, *options, "--plot", str(target))
    assert target.read_bytes().startswith(b"\x89PNG")


@needs_two_cpus
def test_a_peer_that_is_missing_is_a_row(tmp_path, monkeypatch):
    """A peer that cannot be imported costs its figures, and nothing else."""
    (tmp_path / "zmq.py").write_text("raise ModuleNotFoundError(\"No module named 'zmq'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found, text = run("burst_roundtrip.py", tmp_path, "--peers", "zmq", "pipe")
    rows = {row["name"]: row for row in found["subjects"]}
    assert rows["zmq"]["error"] == "not installed"
    assert "not installed" in text
    assert len(rows["pipe"]["rounds"]) == 2


def test_percentiles_of_known_data(measure):
    """0 to 1000 us in equal steps, given in nanoseconds and out of order."""
    samples = np.arange(0, 1_000_001, 1000, dtype=float)[::-1]
    block = measure.percentiles(samples)
    assert (block["p50_us"], block["p99_us"], block["p999_us"], block["max_us"]) == pytest.approx((500, 990, 999, 1000))
    assert block["cdf_us"] == pytest.approx(np.linspace(0, 1000, 201))


@pytest.mark.parametrize(
    ("n", "skipped", "confidence"),
    [(1, 0, 0.0), (2, 0, 0.5), (5, 0, 0.9375), (6, 0, 0.96875), (9, 1, 1 - 20 / 512), (20, 5, 1 - 2 * 21700 / 2**20)],
)
def test_the_interval_of_a_median(measure, n, skipped, confidence):
    """The sign test's: as many values cut from each end as leave 95 %."""
    found = measure.estimate(np.random.default_rng(1).permutation(n))
    assert (found.low, found.high) == (skipped, n - 1 - skipped)
    assert found.median == pytest.approx((n - 1) / 2)
    assert found.confidence == pytest.approx(confidence)


def test_pairs_belong_to_one_round(measure):
    """A floor that doubles takes its subject along: the paired ratio does not move, the ratio of medians would."""
    speed = iter([1.0, 4.0, 2.0])
    now = {}

    def floor():
        now["floor"] = next(speed)
        return block(now["floor"])

    def block(us):
        return {"p50_us": us, "p99_us": us, "p999_us": us, "max_us": us}

    subject = measure.Subject("s", lambda: block(3 * now["floor"]), "f")
    runs = measure.interleave([subject], {"f": floor}, 3, lambda *_: None)
    assert measure.times_floor(runs, "s")[:3] == (3, 3, 3)
    assert measure.over_floor(runs, "s")[:3] == (4, 2, 8)
    assert measure.ratio(runs, "s", "f")[:3] == (3, 3, 3)


def test_a_subject_that_fails_once_has_no_row(measure):
    """Its reason is kept, it is not tried again, and the others go on."""
    calls = []

    def broken():
        calls.append(1)
        raise measure.NotMeasured("not installed")

    good = dict.fromkeys(("p50_us", "p99_us", "p999_us", "max_us"), 1.0)
    subjects = [measure.Subject("bad", broken, "f"), measure.Subject("good", lambda: good, "f")]
    runs = measure.interleave(subjects, {"f": lambda: good}, 3, lambda *_: None)
    assert runs.errors == {"bad": "not installed"}
    assert len(calls) == 1
    assert (len(runs.values("good")), runs.has("good", "bad")) == (3, False)


def test_the_verdict_on_a_budget(measure, verdict):
    """The median decides, an interval that contains the limit is told, and what was not measured is not met."""
    met, close = measure.Estimate(1.0, 0.9, 1.1, 0.96), measure.Estimate(2.0, 1.5, 3.0, 0.96)
    assert verdict.Budget("", met, 1.5).verdict == "met"
    assert verdict.Budget("", close, 1.5).verdict == "missed, the interval contains the limit"
    assert verdict.Budget("", met, 0.5).verdict == "missed"
    assert verdict.Budget("", None, 1.5).verdict == "not measured"
