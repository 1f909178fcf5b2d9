"""The camera demo as people start it."""

import subprocess
import sys
from pathlib import Path

import av
import camera
import pytest

CAMERA = Path(__file__).parents[2] / "examples" / "camera.py"


def run(*arguments):
    """Run the demo; return its exit status and what it printed."""
    command = [sys.executable, str(CAMERA), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def test_demo_runs_and_leaves_its_results(tmp_path):
    """A short run ends well, tabulates both paths, finds the objects, and leaves a video and two pictures."""
    status, text = run("--frames", 25, "--fps", 0, "--out", tmp_path)
    assert status == 0, text
    assert "0 fell back" in text
    assert "0 frame bytes copied" in text
    for word in (
        "burst",
        "plain RPC",
        "in the device",
        "around it",
        "p99.9",
        "precision",
        "recall",
        "25 seen, 0 dropped",
    ):
        assert word in text
    with av.open(str(tmp_path / "camera.mp4")) as film:
        assert sum(1 for _ in film.decode(video=0)) == 25
    assert {path.name for path in tmp_path.iterdir()} == {"camera.mp4", "latency.png", "frame.png"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--source", "/nowhere.mp4"), "--source /nowhere.mp4: there is no such file or camera; pass 'scene'"),
        (("--device", "nonesuch"), "camera.py: "),
        (("--frames", "0"), "--frames 0: must be at least 1"),
        (("--fps", "-1"), "--fps -1.0: must be at least 0"),
        (("--out", "/dev/null/out"), "--out /dev/null/out: cannot be made (Not a directory); pass a folder"),
        (("--source", "{out}/camera.mp4"), "this run would overwrite it; pass another --out or --no-video"),
    ],
)
def test_bad_argument_is_named_with_its_remedy(monkeypatch, capsys, tmp_path, arguments, complaint):
    """A bad argument ends the program at once, with the argument, its value and what to do."""
    words = "--out", tmp_path, *(word.format(out=tmp_path) for word in arguments)
    monkeypatch.setattr(sys, "argv", ["camera.py", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        camera.main()
    assert end.value.code
    assert complaint in f"{end.value.code} {capsys.readouterr().err}"


def test_a_bad_argument_ends_the_process_without_a_traceback(tmp_path):
    """As a program it fails, and says no more than that."""
    status, text = run("--out", tmp_path, "--device", "nonesuch")
    assert status != 0
    assert "camera.py: " in text
    assert "Traceback" not in text
