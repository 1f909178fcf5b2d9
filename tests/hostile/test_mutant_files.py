"""Mutants of real model files in file form: what a runtime crashes over ends a trial, or its own account's engine."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import accounts
import pytest
import stress
from mutant_files import FAULT, REFUSED, RUNS, table
from neighbourhood import GROUP, HOSTILE, Talker, neighbourhood

from driver.devices import device_class
from driver.devices.files import RUNTIMES

pytestmark = pytest.mark.integration

HERE = Path(__file__).parent
TOTAL = {"onnx": 500_000, "tflite": 500_000, "jax": 5000, "pt2": 5000}
"""Of each kind. Those of JAX and PyTorch are compiled, each for itself."""
BROUGHT = 2000
"""Of those, the most that are brought to a device: all that ended their process come first."""


@pytest.fixture(params=RUNTIMES)
def kind(request):
    if lacks := device_class(RUNTIMES[request.param]).missing():
        pytest.skip(lacks)
    return request.param


def brought(kind, seed, numbers):
    """The outcomes of mutants that an account brings to a served device, and what another account saw meanwhile."""
    words = [sys.executable, str(HERE / "bringer.py")]
    with neighbourhood(RUNTIMES[kind]) as hood, hood.tenant() as tenant:
        before = tenant.ask("identity")
        words += [hood.address, kind, str(seed)]
        with Talker(accounts.words_as(HOSTILE, (GROUP,), words)) as bringer:
            assert json.loads(bringer.line()) == "ready"
            assert tenant.ask("begin") == "begun"
            found = [tuple(bringer.ask(number)) for number in numbers]
            seen = tenant.ask("end")
        after = tenant.ask("identity")
    seen["same processes"] = all(before[key] == after[key] for key in ("service", "engine"))
    return found, seen


def check_brought(kind, seed, numbers):
    """Bring them; the neighbour notices nothing. The outcomes, counted."""
    found, seen = brought(kind, seed, numbers)
    counts = Counter(outcome for outcome, _ in found)
    print(f"brought to a device, .{kind}: {dict(counts)}; its neighbour: {seen}")
    assert [text for outcome, text in found if outcome == FAULT] == []
    assert seen["faults"] == []
    assert seen["same processes"]
    assert seen["runs"] > 0
    return counts


def loaded(kind, seed, times):
    """What a process of its own makes of so many: where a runtime has threads already, no process can be forked."""
    words = [sys.executable, str(HERE / "mutant_files.py"), kind, "--seed", str(seed), "--count", str(times), "--json"]
    return json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)


def check(kind, times, most, tally):
    """Load so many mutants, and bring those to a device that ended their process, and some of those that run."""
    seed = int(os.environ.get("BURST_SEED", random.randrange(2**31)))
    found = loaded(kind, seed, times)
    outcomes = found["outcomes"]
    print(f"\nmutants of .{kind} files, seed {seed}:\n{table(outcomes)}")
    assert found["faults"] == []
    assert outcomes.get(REFUSED, 0) > 0 < outcomes.get(RUNS, 0)
    for outcome, count in outcomes.items():
        tally(f"mutants in file form, {kind}: {outcome}", count)
    if why := accounts.missing():
        pytest.skip(why)
    numbers = [*found["deadly"][:most], *found["accepted"][: most // 2], *range(most // 2)]
    for outcome, count in check_brought(kind, seed, numbers).items():
        tally(f"brought to a device, {kind}: {outcome}", count)


def test_mutants_reach_no_neighbour(kind, tally):
    """Two hundred, or fifty where each is compiled, and the crashes of the runtime's own that are among them."""
    check(kind, 50 if kind == "jax" else 200, 8, tally)


@pytest.mark.stress
def test_a_million_mutants_reach_no_neighbour(kind, tally):
    """As many as `TOTAL` says, or as the budget allows, from another seed each time."""
    times = stress.times(TOTAL[kind])
    check(kind, times, stress.times(BROUGHT), tally)
    tally(f"mutants in file form, {kind}", times)
