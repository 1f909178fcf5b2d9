"""examples/scale.py: a model of many nodes that adds up, from parts that say where they come from."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = json.loads((ROOT / "examples/scale.json").read_text())
OIP, RAY = "burst serve --oip", "Ray Serve"


def ran(*words):
    """What the program prints."""
    command = [sys.executable, str(ROOT / "examples/scale.py"), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def found():
    """By way and number of nodes."""
    rows = json.loads(ran("--json", "--requests", 8000, "--nodes", 1, 10, 100))
    return {(row["way"], row["nodes"]): row for row in rows}


def test_the_parts_say_where_they_come_from():
    """The command, the machine, and quantiles in order."""
    assert PARTS["command"].startswith("python bench/scale_parts.py")
    assert PARTS["processor"]
    for part in (PARTS["execution"], *PARTS["ways"].values()):
        assert len(part["ms"]) == 101
        assert part["ms"] == sorted(part["ms"])


def test_nodes_add_capacity_memory_and_nothing_else(found):
    """Ten times as many nodes do ten times as much, for the same price each; more than one share the load better."""
    for way in (OIP, RAY):
        one, ten, hundred = (found[way, nodes] for nodes in (1, 10, 100))
        for field in ("capacity", "memory"):
            assert hundred[field] == pytest.approx(10 * ten[field], rel=0.05)
        assert hundred["per_million"] == pytest.approx(one["per_million"], rel=0.1)
        assert hundred["p99"] < one["p99"]


def test_a_way_costs_what_was_measured(found):
    """With nothing to wait for, the median is the execution's and what the way adds; capacity is by CPU time."""
    quiet = json.loads(ran("--json", "--requests", 8000, "--nodes", 10, "--load", 0.01, "--network", 0))
    for row in quiet:
        part = PARTS["ways"][row["way"]]
        assert row["p50"] == pytest.approx(PARTS["execution"]["ms"][50] + part["ms"][50], rel=0.15)
    busy = {way: 1e3 * PARTS["processors"] / found[way, 1]["capacity"] for way in (OIP, RAY)}
    more = PARTS["ways"][RAY]["cpu_ms"] - PARTS["ways"][OIP]["cpu_ms"]
    assert busy[RAY] - busy[OIP] == pytest.approx(more, rel=0.01)


@pytest.mark.integration
def test_a_picture(tmp_path):
    """With the extra `demo`."""
    pytest.importorskip("matplotlib", reason="no matplotlib: pip install -e '.[demo]'")
    assert "a million" in ran("--requests", 2000, "--nodes", 1, 3, "--out", tmp_path / "scale.png")
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


def test_a_load_that_no_service_has_is_refused():
    """It is named, with what it may be."""
    command = [sys.executable, str(ROOT / "examples/scale.py"), "--load", "1.2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--load 1.2: more than 0 and less than 1" in done.stderr
