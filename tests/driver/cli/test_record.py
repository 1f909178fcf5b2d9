"""`burst record` and `burst replay`: programs are recorded, and their requests played again."""

import json
import os
import signal
import stat
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from waiting import at_least

import driver
from driver.cli.command import burst as command
from driver.recording import Recording, Tape, record, replay
from driver.recording.replay import difference

X = np.arange(4, dtype=np.float32).reshape(1, 4)
PROGRAM = """
import sys
import numpy as np
import driver
builder = driver.ModelBuilder()
builder.output(builder.operation("ADD", builder.input("float32", (1, 4)), np.ones((1, 4), np.float32), 0))
with driver.connect("reference") as device, device.prepare(builder.build()) as prepared, prepared.burst() as burst:
    for n in range(30):
        burst.run(np.full((1, 4), n, np.float32))
"""


def call(*words):
    """`burst` in this process."""
    return CliRunner().invoke(command, [str(word) for word in words])


def burst(*words, **how):
    """`burst` as a program."""
    return subprocess.run(
        [sys.executable, "-m", "driver.cli", *map(str, words)], capture_output=True, text=True, check=False, **how
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """What `burst record` makes of the program above."""
    path = tmp_path_factory.mktemp("recorded") / "a.burst"
    done = burst("record", "--out", path, "--json", "--", sys.executable, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    (said,) = json.loads(done.stderr)
    assert (said["requests"], said["models"], said["streams"], said["trouble"]) == (30, 1, 1, "")
    return path


@pytest.mark.integration
def test_a_program_recorded_and_played(recorded):
    """A program that knows nothing of it is recorded, into a file of mode 0600, and gets the same answers again."""
    assert stat.S_IMODE(recorded.stat().st_mode) == 0o600
    for device in ("reference", *(["litert"] if find_spec("ai_edge_litert") else [])):
        done = call("replay", recorded, "--device", device, "--compare", "--json", "--pace", "max")
        assert done.exit_code == 0, done.output
        said = json.loads(done.stdout)
        assert (said["compared"], said["different"], said["worst"]) == (30, 0, None)
        assert said["requests"] == {"recorded": {"NONE": 30}, "now": {"NONE": 30}}
        for times in said["latency"].values():
            assert 0 < times["p50"] <= times["p99"] <= times["max"]


@pytest.mark.integration
def test_words_for_people(recorded):
    """Without --json there is a table, and how it went."""
    done = call("replay", recorded, "--compare")
    assert done.exit_code == 0
    for words in ("latency", "p99", "recorded", "now", "30 NONE", "30 requests compared, 0 different"):
        assert words in done.output


@pytest.mark.integration
def test_killed_while_recording(tmp_path):
    """After kill -9 what was written until then can be played; the exit status is the command's."""
    path = tmp_path / "killed.burst"
    endless = PROGRAM.replace("range(30)", "range(10**9)") + "\n"
    kill = f"        if n % 100 == 0 and os.stat({str(path)!r}).st_size > 5000: os.kill(os.getpid(), 9)\n"
    done = burst("record", "--out", path, "--", sys.executable, "-c", "import os" + endless + kill)
    assert done.returncode == 128 + signal.SIGKILL
    assert "it was cut off at byte" in done.stderr
    done = call("replay", path, "--compare", "--json", "--pace", "max")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["compared"] > 10


@pytest.mark.integration
def test_processes_of_a_program(tmp_path):
    """Each process has a file of its own; only one of them has the name that was asked for."""
    path = tmp_path / "many.burst"
    two = "import subprocess, sys\nfor _ in range(2): subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    done = burst("record", "--out", path, "--json", "--", sys.executable, "-c", two, PROGRAM)
    assert [one["requests"] for one in json.loads(done.stderr)] == [30, 30]
    assert {Path(one["file"]).name.partition("burst")[0] for one in json.loads(done.stderr)} == {"many."}


def test_called_wrongly(recorded, tmp_path):
    """What is there is not replaced, what cannot be run is told, and a program that asks nothing is no success."""
    before = recorded.read_bytes()
    done = call("record", "--out", recorded, "--", "true")
    assert (done.exit_code, recorded.read_bytes()) == (2, before)
    assert "add --force to replace it" in done.stderr
    assert "cannot be run: No such file" in call("record", "--out", tmp_path / "x", "--", "/no/such/program").stderr
    assert "the folder does not exist" in call("record", "--out", tmp_path / "no" / "x", "--", "true").stderr
    done = call("record", "--out", tmp_path / "x", "--", "true")
    assert (done.exit_code, done.stderr) == (1, "nothing was recorded: the command sent no request to a device\n")
    assert call("record", "--out", tmp_path / "x", "--", "sh", "-c", "exit 7").exit_code == 7
    (tmp_path / "x").write_text("no recording")
    done = call("replay", tmp_path / "x")
    assert done.exit_code == 2
    assert "not a recording" in done.stderr


@pytest.mark.integration
def test_a_bad_environment(tmp_path):
    """A variable that cannot be is told by the program that it was set for."""
    environment = os.environ | {"BURST_RECORD": str(tmp_path / "x"), "BURST_RECORD_MB": "many"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "BURST_RECORD_MB=many: expected a whole number of megabytes" in done.stderr


@pytest.fixture
def made(tmp_path, kit):
    """Makes a recording of requests that never were: (begin in ns, input, output)."""

    def make(*requests, address=None, depth=1):
        tape = Tape(tmp_path / "made.burst", 10**9)
        with driver.connect("reference") as device, device.prepare(kit.add_model()) as prepared:
            if address:
                device.address = address
            number = tape.stream(prepared.remote, "burst", depth, 0.0)
            for begin, x, y in requests:
                shape = (1, 4), 16
                tape.run([number, begin, 1000, None, 0, [shape], [shape]], [x.tobytes(), y.tobytes()])
        tape.close()
        return tmp_path / "made.burst"

    return make


def test_differences_are_found(made):
    """An output that differs is told with its request, its place, what it was and by how much; the exit status is 1."""
    wrong = X + 1
    wrong[0, 2] += 0.5
    path = made((1, X, X + 1), (2, X, wrong), (3, X, X + 1.1))
    done = call("replay", path, "--compare")
    assert done.exit_code == 1
    assert "3 requests compared, 2 different" in done.output
    assert "largest difference 0.5: request 1, output 0[0][2], recorded as 3.5" in done.output
    assert call("replay", path, "--compare", "--tolerance", "0.2").exit_code == 0
    assert call("replay", path).exit_code == 0


def test_the_recorded_pace(made):
    """Requests come at their times, also when several are in flight; at "max" they do not wait."""
    path = made(*((n * 200_000_000, X, X + 1) for n in range(4)), depth=3)
    with Recording(path) as recording:
        assert recording.seconds == pytest.approx(0.6)
        with at_least(0.6):
            assert replay(recording, tolerance=0.0).different == 0
        report = replay(recording, pace="max", tolerance=0.0)
        assert (report.compared, report.different, report.failed) == (4, 0, 0)


@pytest.mark.integration
def test_many_streams_one_after_the_other(tmp_path, kit):
    """A program that opens a burst for each request is played with as many bursts as it had at once."""
    path = tmp_path / "streams.burst"
    with record(path), driver.connect("reference") as device, device.prepare(kit.add_model()) as prepared:
        for n in range(300):
            with prepared.burst() as opened:
                opened.run(X + n)
    with Recording(path) as recording:
        assert len(recording.streams) == 300
        report = replay(recording, pace="max", tolerance=0.0)
    assert (report.compared, report.different) == (300, 0)


def test_devices_are_not_taken_from_a_file(made):
    """A file that names a device which is not installed, or a path, does not start or reach it: say which."""
    for address in ("os:system", "/tmp/evil.sock"):
        path = made((1, X, X + 1), address=address)
        done = call("replay", path)
        assert done.exit_code == 2
        assert "not installed here; pass a device" in done.stderr
        assert call("replay", path, "--device", "reference", "--compare").exit_code == 0
        path.unlink()


def test_requests_that_do_not_fit(made, kit):
    """A request whose inputs are not those of its model ends the replay with the reason."""
    path = made((1, X[:, :3], X + 1))
    done = call("replay", path)
    assert done.exit_code == 2
    assert "request 0: the arguments need 32 bytes, but the frame has 28" in done.stderr


def test_differences_of_all_kinds():
    """Integers by steps, floats by a part, NaN equals NaN alone, and another shape is a difference."""
    i, f, nan = np.array([[1, 5]], np.int8), np.array([100.0, 0.0], np.float32), np.array([np.nan, np.inf])
    assert difference(
        0,
        0,
        i,
        i + np.int8(1),
        1e-4,
    ).at == (0, 0)
    assert difference(0, 0, i, i + np.int8(1), 1) is None
    assert difference(0, 0, f, f + np.float32(0.005), 1e-4).at == (1,)
    assert difference(0, 0, f, f * np.float32(1.00001), 1e-4) is None
    assert difference(0, 0, nan, nan.copy(), 0.0) is None
    assert difference(0, 0, nan, np.array([1.0, np.inf]), 1.0).by == np.inf
    assert difference(0, 0, nan, np.array([np.nan, 1.0]), 1.0).by == np.inf
    assert difference(0, 0, f, f.reshape(1, 2), 1e-4).by == np.inf
    assert difference(0, 0, f[:0], f[:0], 0.0) is None


def test_models_of_all_kinds(tmp_path, kit):
    """Convolutions, quantised ones, open shapes, omitted inputs and outputs that grow play as they were recorded."""
    random = np.random.default_rng(2)
    inputs = {
        "conv_model": [random.standard_normal((1, 8, 8, 3), np.float32)],
        "quantised_model": [random.integers(0, 255, (1, 6, 6, 2), np.uint8)],
        "open_model": [random.standard_normal((3, 4), np.float32)],
        "optional_model": [random.standard_normal((2, 3), np.float32), None],
        "reshape_model": [random.standard_normal((2, 3000), np.float32), np.array([6000, 1], np.int32)],
    }
    path = tmp_path / "models.burst"
    with record(path), driver.connect("reference") as device:
        for name, arrays in inputs.items():
            with device.prepare(getattr(kit, name)()) as prepared:
                prepared.run(*arrays)
                shapes = [None if array is None else array.shape for array in arrays]
                with prepared.burst(input_shapes=shapes) as opened:
                    opened.run(*arrays)
    with Recording(path) as recording:
        report = replay(recording, tolerance=0.0)
    assert (report.compared, report.different, report.failed) == (10, 0, 0)
