"""The camera demo as people start it."""

import json
import os
import stat
import subprocess
import sys

import av
import numpy as np
import pytest
from click.testing import CliRunner

from burst_engine.names import install_command
from driver.cli.command import burst
from driver.demos.camera_sources import Clock
from driver.demos.drawing import Film

pytestmark = pytest.mark.integration

CAMERA = [sys.executable, "-m", "driver.cli", "demo", "camera"]


def run(*arguments):
    """Run the demo; what came of it."""
    command = [*CAMERA, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def invoke(*arguments):
    """Run it in this process."""
    return CliRunner().invoke(burst, ["demo", "camera", *map(str, arguments)])


def private(folder):
    """The names in the folder, all of which nobody else may read."""
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    return {path.name for path in folder.iterdir()}


def test_demo_runs_and_leaves_its_results(tmp_path):
    """A short run ends well, tabulates both paths, finds the objects, and leaves a video and two pictures, private."""
    (tmp_path / "frame.png").touch(0o644)  # of a run before this one
    done = run("--frames", 25, "--fps", 0, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    for word in (
        "0 fallbacks",
        "0 frame bytes copied",
        "burst",
        "plain RPC",
        "in the device",
        "around it",
        "p99.9",
        "precision",
        "recall",
        "25 processed, 0 dropped",
        "Another process costs",
    ):
        assert word in done.stdout
    with av.open(str(tmp_path / "camera.mp4")) as film:
        assert sum(1 for _ in film.decode(video=0)) == 25
    assert private(tmp_path) == {"camera.mp4", "latency.png", "frame.png"}


def test_the_summary_comes_as_json_and_alone(tmp_path):
    """With --json, standard output is one object; what it says of files, frames and calls is so."""
    done = invoke("--frames", 5, "--fps", 0, "--no-video", "--json", "--out", tmp_path)
    assert done.exit_code == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["source"] == "generated scene, seed 0"
    assert summary["frames"] == summary["latency_ms"]["burst"]["whole call"]["calls"] == 5
    assert summary["runs"] == {"burst": 25, "plain": 0, "warm_up": 20}
    assert 0 < summary["another_process_costs_ms"] < summary["latency_ms"]["burst"]["whole call"]["p99.9"]
    assert summary["objects"]["precision"] > 0.5
    assert summary["files"] == [str(tmp_path / name) for name in ("latency.png", "frame.png")]
    assert "frames" in done.stderr  # the bar


def test_a_run_that_is_stopped_reports_on_what_it_saw(monkeypatch, tmp_path):
    """Ctrl-C before the fourth frame ends it well, with a summary of three and a film of three."""
    ticks = iter((0, 0, 0))

    def tick(_):
        if (dropped := next(ticks, None)) is None:
            raise KeyboardInterrupt
        return dropped

    monkeypatch.setattr(Clock, "tick", tick)
    done = invoke("--json", "--out", tmp_path)
    assert done.exit_code == 0, done.stderr
    assert "stopped early" in done.stderr
    assert json.loads(done.stdout)["frames"] == 3
    with av.open(str(tmp_path / "camera.mp4")) as film:
        assert sum(1 for _ in film.decode(video=0)) == 3


def test_a_video_file_goes_through(tmp_path):
    """From its beginning again when it ends; and there is no truth about it."""
    with Film(tmp_path, 320, 240, 10) as film:
        for _ in range(3):
            film.add(np.zeros((240, 320, 3), np.uint8))
    film = tmp_path / Film.NAME
    done = invoke("--source", film, "--frames", 4, "--fps", 0, "--no-video", "--json", "--out", tmp_path / "again")
    summary = json.loads(done.stdout)
    assert (summary["source"], summary["frames"], summary["objects"]) == (str(film), 4, None)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--source", "/nowhere.mp4"), "--source /nowhere.mp4: no such file or camera; pass 'scene'"),
        (("--device", "nonesuch"), "name='nonesuch': no such device"),
        (("--frames", "0"), "'--frames': 0 is not in the range 1<=x<=999999999"),
        (("--fps", "-1"), "'--fps': -1.0 is not in the range 0<=x<=999999999"),
        (("--fps", "nan"), "'--fps': nan is not a number"),
        (("--seed", "-1"), "'--seed': -1 is not in the range"),
        (("--out", "/dev/null/out"), "--out /dev/null/out: cannot create the folder (Not a directory); pass one"),
        (("--source", "{out}/camera.mp4"), "this run would overwrite it; pass another --out, or --no-video"),
    ],
)
def test_bad_argument_is_named_with_its_remedy(tmp_path, arguments, complaint):
    """A bad argument ends the program at once with 2, with the argument, its value and what to do."""
    done = invoke("--out", tmp_path, *(word.format(out=tmp_path) for word in arguments))
    assert done.exit_code == 2
    assert complaint in done.stderr


def test_without_its_libraries_it_says_what_to_install(tmp_path):
    """Without PyAV, one line on standard error names the extra, and the exit status is 2."""
    (tmp_path / "av.py").write_text("raise ModuleNotFoundError(name='av')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        CAMERA, env=environment, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"Error: av is not installed: {install_command('demo')}\n"
