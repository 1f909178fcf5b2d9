"""examples/ray_data.py and ray_serve.py on the real Ray, on four nodes of this machine with a device each."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import stress
from needed_tools import give_up

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests/driver/importers/vendor/mobilenet_int8.tflite"
PROGRAM = Path(__file__).parent / "ray_nodes.py"
NODES, SHARES = 4, 4
ROWS = 2000
KILLS, MANY = 100, 8000  # in full; rows of a data set beside them


def ray_needed():
    if importlib.util.find_spec("ray") is None:
        give_up("no ray: pip install -e '.[ray]', or `make integration`")


def environment(folder):
    """Ray's own files, and devices that are no node's, lie in a folder of the test."""
    for name in ("home", "run"):
        (folder / name).mkdir(mode=0o700)
    mine = {"HOME": str(folder / "home"), "PYTHONPATH": str(ROOT / "examples"), "BURST_TEST_CLUSTER": str(folder)}
    mine |= {"BURST_RUNTIME_DIR": str(folder / "run"), "RAY_USAGE_STATS_ENABLED": "0"}
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | mine


class SlowStart(Exception):
    """Ray has given up the start of a node."""


def told(folder, *words, limit):
    """What the program says in its last line. Its whole session is ended if it takes longer."""
    command = [sys.executable, str(PROGRAM), str(MODEL), *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment(folder), cwd=folder, start_new_session=True, **pipes) as program:
        try:
            said, _ = program.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            raise
    if program.returncode and "timed out during startup" in said:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        raise SlowStart(said[-8000:])
    assert program.returncode == 0, said[-8000:]
    return json.loads(said.splitlines()[-1])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What became of one cluster. Ray gives a node 30 s to start, and says so where a busy machine takes longer."""
    ray_needed()
    for _ in range(3):
        with contextlib.suppress(SlowStart):
            return told(tmp_path_factory.mktemp("ray"), ROWS, limit=400)
    return told(tmp_path_factory.mktemp("ray"), ROWS, limit=400)


@pytest.mark.integration
def test_actors_of_a_node_share_its_device(found):
    """Sixteen actors that are made at the same moment meet at four devices, one for each node, in its own directory."""
    assert [len(where) for where in found["meetings"].values()] == [SHARES] * NODES
    met = {node: {tuple(one) for one in where} for node, where in found["meetings"].items()}
    assert {len(one) for one in met.values()} == {1}
    for column in zip(*(place for (place,) in met.values()), strict=True):
        assert len(set(column)) == NODES


@pytest.mark.integration
def test_errors_and_results_come_out_of_actors_as_they_were(found):
    """An error is caught by its own class, with all that it says; a burst's result has its arrays and their names."""
    assert found["errors"] == []
    assert found["result"] == ["NONE", ["probabilities"], found["right"]]


@pytest.mark.integration
def test_rows_survive_a_device_an_actor_and_a_node(found):
    """kill -9 of each while rows pass: all rows come, once, with their own answers."""
    nothing = {"rows": ROWS, "lost": 0, "doubled": 0, "wrong": 0}
    assert found["survived"] == {**nothing, "deaths": ["device", "actor", "node"]}


@pytest.mark.integration
def test_a_deployment_answers(found):
    """By its handle, by HTTP, after its device was killed; to what is no image with an error that says why."""
    served, right = found["served"], found["right"]
    assert served["by handle"] == served["by http"] == right
    assert served["after a death"] == [right] * 4
    assert "the model takes (1, 64, 64, 3)" in served["no image"]


@pytest.mark.integration
def test_nothing_is_left_of_a_cluster(found):
    """Devices end after the last actor of their node, though Ray's own ways to end what actors start miss them."""
    assert found["left"] == []


@pytest.mark.stress
def test_no_row_is_lost_or_doubled_beside_many_kills(tmp_path, tally):
    """Actors and devices die of kill -9, one after the other, while rows pass: all rows come, once, as they should."""
    ray_needed()
    kills = stress.times(KILLS)
    result = told(tmp_path, MANY, kills, limit=400 + 30 * kills)
    beside = Counter(result["beside kills"].pop("kills"))
    assert beside.total() >= kills
    assert {name: value for name, value in result["beside kills"].items() if name != "rows"} == dict.fromkeys(
        ("lost", "doubled", "wrong"), 0
    )
    assert result["left"] == []
    for what, times in beside.items():
        tally(f"kills under Ray Data ({what})", times)
    tally("rows of Ray Data beside kills", result["beside kills"]["rows"])
