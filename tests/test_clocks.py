"""No test of `make test` and `make integration` compares what a clock says with anything.

On a busy machine it says something else. What needs real time stands under `stress`, or in `bench/`.
"""

import ast
from pathlib import Path

import pytest
from clock_readings import Readings, comparisons

pytestmark = pytest.mark.sources

TESTS = Path(__file__).parent
ALLOWED = {
    "waiting.py:until": "the one limit: what has not come by then never comes",
    "hung_tests.py:HungTests._watch": "the limit of a whole test, as faulthandler has it",
    "stress.py:go_on": "ends `make stress-long` after as many minutes as its caller wants",
    "burst/fuzz_parsers.py:Run._look": "ends a campaign after its time; finding nothing is no matter of it",
    "driver/importers/fuzz_onnx.py:main": "what takes the fuzzer's own processor time without end is what it looks for",
    "driver/importers/fuzz_tflite.py:main": "the same",
    "driver/client/test_recovery_kills.py:kills_of": "ends a series of kills after its time, whatever came of it",
    "burst/test_execution.py:test_shapes_and_times_follow_each_run": "the time is a number that the test has set",
    "burst/test_hostile.py:attempts": "tries for so long, and prints how often that was",
    "hostile/test_soak.py:Soak.run": "attacks for so long",
    "hostile/tenant.py:Tenant.bursts": "works for so long beside an attack",
    "hostile/tenant.py:Tenant.busy": "works for so long beside an attack",
    "examples/ray_nodes.py:rows_beside_kills": "spaces kills: a device that dies ten times in ten seconds is given up",
    "examples/ray_nodes.py:main": "the limit, in a program that runs in Ray's processes",
}
"""Where clocks are compared all the same, and why no busy machine can make a test fail there."""


def found():
    """file:function of each comparison; devices are programs, which take their time, and bench's tests run benches."""
    paths = [
        path for path in sorted(TESTS.rglob("*.py")) if path.relative_to(TESTS).parts[0] not in {"devices", "stored"}
    ]
    return [(f"{path.relative_to(TESTS)}:{name}", line) for path, name, line in comparisons(paths)]


def test_no_test_compares_a_clock():
    """Every comparison of a reading, or of what was computed from one, is listed with a reason; and no other is."""
    compared = found()
    assert [f"{place}, line {line}" for place, line in compared if place not in ALLOWED] == []
    assert ALLOWED.keys() == {place for place, _ in compared}


HIDDEN = {
    "a difference": "begin = time.monotonic()\n    work()\n    assert time.monotonic() - begin < 1",
    "a name": "took = time.perf_counter() - begin()\n    assert took < 1",
    "a loop": "end = time.time() + 1\n    while time.time() < end: work()",
    "a list": "times = []\n    times.append(time.monotonic_ns())\n    assert max(times) < 5",
    "a pair": "(a, b) = (1, time.thread_time())\n    assert b < 1",
    "a function": "assert took() < 1",
    "one of its results": "seconds, found = both()\n    assert seconds < 1",
    "an attribute": "kept.at = time.monotonic()\n    assert kept.at - 1 < 2",
    "a figure of a result": "assert result.timing.time_in_driver < 20",
    "an event loop": "assert asyncio.get_running_loop().time() - begin < 1",
    "a median": "assert statistics.median(took() for _ in range(5)) < 1",
}
HELPERS = """
def took():
    begin = time.monotonic()
    return time.monotonic() - begin

def both():
    return took(), 1
"""


@pytest.mark.parametrize("how", HIDDEN)
def test_a_comparison_is_found(how, tmp_path):
    """However the reading has come there; and not under the mark of stress."""
    (path := tmp_path / "test_it.py").write_text(f"import time\n{HELPERS}\ndef test_it():\n    {HIDDEN[how]}\n")
    assert [name for _, name, _ in comparisons([path])] == ["test_it"]
    path.write_text(path.read_text().replace("def test_it", "@pytest.mark.stress\ndef test_it"))
    assert list(comparisons([path])) == []


def test_what_is_no_comparison(tmp_path):
    """A deadline that is handed on, what a call returns that got one, and one of two results that is no reading."""
    (path := tmp_path / "test_it.py").write_text(
        f"{HELPERS}\ndef test_it():\n    result = run(deadline=time.monotonic() + 1)\n"
        "    assert result.status == 0\n    _, found = both()\n    assert found == 1\n"
    )
    assert list(comparisons([path])) == []
    assert isinstance(Readings(path).tree, ast.Module)
