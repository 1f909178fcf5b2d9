"""Each script of bench/ runs to its end with tiny blocks and says what it promises to say; the arithmetic is right."""

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
        ("queue_roundtrip.py", [], QUEUE_ROWS, 4),
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
def test_every_busy_block_contains_whole_prepares(tmp_path):
    """The count that the second process answers is of prepares that ended within the block."""
    found, _ = run("prepare_interference.py", tmp_path)
    prepares = [block["done"] for block in found["subjects"][2]["rounds"]]
    assert min(prepares) >= 1
    assert [block["done"] for block in found["subjects"][0]["rounds"]] == [0, 0]


@needs_two_cpus
def test_a_picture_is_drawn(tmp_path):
    """--plot writes what its file's name says."""
    pytest.importorskip("matplotlib")
    target = tmp_path / "picture.png"
    run("burst_roundtrip.py", tmp_path, "--peers", "none", "--plot", str(target))
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
