"""The ledger of long tests adds up what was run, and tests/README.md says that and no more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import stress

ROOT = Path(__file__).parents[1]
RUNS = [
    {"commit": "aaaa", "passed": True, "tally": {"kills with recovery": 500, "other": 1}},
    {"commit": "bbbb", "passed": False, "tally": {"kills with recovery": 100}},
    {"commit": "cccc", "passed": True, "tally": {"mutants of .onnx": 1000}},
]


def test_readme_says_what_the_ledger_says():
    """No figure of long tests is there that no run has come to."""
    text = (ROOT / "tests/README.md").read_text()
    assert stress.quote(text, stress.ledger()) == text
    assert stress.sentence(stress.ledger()) in text


def test_runs_that_failed_count_for_nothing():
    """Only what passed is added up; the commits are those that it ran on."""
    assert stress.done(RUNS) == {"kills with recovery": 500, "other": 1, "mutants of .onnx": 1000}
    said = stress.sentence(RUNS)
    assert "500 kills with recovery (of 5,000), 1,000 mutants of .onnx (of 1,000,000)" in said.replace("\n", " ")
    assert "commits aaaa to cccc" in said.replace("\n", " ")


@pytest.mark.parametrize("name", stress.GOALS)
def test_each_goal_has_its_test(name):
    """The test that adds to a figure counts something."""
    assert "tally(" in (ROOT / stress.GOALS[name].test.partition("::")[0]).read_text()


def test_each_goal_names_tests_that_pytest_finds():
    """By the words with which `make stress-long` runs it: all of them are stress tests."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "stress"]
    words += {goal.test for goal in stress.GOALS.values()}
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for goal in stress.GOALS.values():
        assert goal.test in done.stdout


def test_a_budget_shortens(monkeypatch):
    """A tenth of the budget is a tenth of the counts and of the seconds; no count is nought."""
    monkeypatch.setattr(stress, "BUDGET", 0.1)
    assert (stress.times(5000), stress.times(3), stress.seconds(60)) == (500, 1, 6)
    monkeypatch.setattr(stress, "BUDGET", 2)
    assert (stress.times(5000), stress.seconds(60)) == (10_000, 60)


COUNTING = """
import pytest

@pytest.mark.parametrize("times", [1, 2, 3])
def test_it(tally, table_row, times):
    tally("things", times)
    table_row("a head", f"row {times}")
"""


def test_workers_hand_their_figures_over(tmp_path):
    """What tests have done side by side stands in one table at the end."""
    (tmp_path / "test_it.py").write_text(COUNTING)
    words = [sys.executable, "-m", "pytest", "-n", "2", "-p", "conftest", "test_it.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests"), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 things" in done.stdout
    assert {"a head", "row 1", "row 2", "row 3"} <= set(done.stdout.splitlines())


def test_make_has_both_targets():
    """`make stress` takes a twentieth, and a tenth of what runs alone; `make stress-long` goes on where it stopped."""
    for target, words in {
        "stress": ("BURST_STRESS:-0.05}", "BURST_STRESS:-0.1}"),
        "stress-long": ("tests/stress.py",),
    }.items():
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
        assert all(word in done.stdout for word in words)
