"""`burst bench`: the comparison on this machine, its picture, and the scripts of a clone."""

import json
import os
import re
from importlib.metadata import version

import pytest

from driver.cli import bench

OWN = f"ONNX Runtime {version('onnxruntime')}"
WAYS = ["in this process", "burst, polling", "burst, sleeping", "plain path"]
QUICK = ("--seconds", "0.1", "--device", "reference")


def test_compares_the_ways(command):
    """An addition, each way in each round, with medians, intervals, ratios and the machine's conditions."""
    found = command("bench", *QUICK, "--json").json()
    assert {"processor", "kernel", "governor", "load", "numpy", "python", "at"} <= set(found["conditions"])
    for one in found["comparisons"]:
        assert (one["device"], one["model"], one["form"], one["reason"]) == ("reference", "ADD of 4 floats", "", "")
        assert [way["name"] for way in one["us"]] == WAYS
        assert one["rounds"] >= 6
        for way in one["us"]:
            assert way["p50"]["low"] <= way["p50"]["value"] <= way["p50"]["high"]
            assert way["p50"]["confidence"] >= 0.95
            assert (way["ratio"] is None) == (way["name"] == WAYS[0])
            assert way["processor"] > 0


def test_no_figure_is_lost_in_80_columns(command, unfolded):
    """Each way has its median and its ratio, with their intervals: what has no room is folded."""
    shown = command("bench", *QUICK, columns=80).out
    assert "…" not in shown
    ways, p50, p99, processor, ratios = unfolded(shown)
    assert ways == "".join(WAYS).replace(" ", "")
    figure, interval = r"[\d.]+(us|ms|s)", r"\[[\d.]+\.\.[\d.]+\]"
    for column, cell, number in ((p50, figure + interval, 4), (p99, figure, 4), (processor, figure, 4)):
        assert re.fullmatch(f"({cell}){{{number}}}", column), column
    assert re.fullmatch(rf"([\d.]+{interval}){{3}}", ratios), ratios


@pytest.mark.integration
def test_draws(command, tmp_path):
    """--plot writes the picture, and the table says the same."""
    picture = tmp_path / "bench.svg"
    shown = command("bench", *QUICK, "--plot", picture).out
    assert "ADD of 4 floats on reference" in shown
    assert all(way in shown for way in WAYS)
    assert "CPU time" in shown
    assert picture.read_text().startswith("<?xml")


def test_leaves_the_machine_as_it_was(command, shared):
    """The device that is measured is one of its own, and ends; this process may use the processors that it might."""
    running, usable = shared.pids(), os.sched_getaffinity(0)
    pinned = command("bench", *QUICK, "--json").json()["comparisons"][0]["pinned"]
    assert pinned == (len(usable) > 1)
    assert "not pinned" in command("bench", *QUICK, "--no-pin").out
    assert set(shared.pids()) <= set(running)  # devices of tests before this one may end meanwhile
    assert os.environ["BURST_RUNTIME_DIR"] == str(shared.path)
    assert os.sched_getaffinity(0) == usable


@pytest.mark.integration
def test_a_file_beside_its_own_runtime(command, files):
    """The original file in ONNX Runtime, and both of its forms through a burst, on the device that is named."""
    found = command("bench", files.first, "--seconds", "0.1", "--device", "onnxruntime", "--json").json()
    titles = [(one["form"], one["device"], one["reason"]) for one in found["comparisons"]]
    assert titles == [("file", "onnxruntime", ""), ("operations", "onnxruntime", "")]
    for one in found["comparisons"]:
        assert [way["name"] for way in one["us"]] == [OWN, *WAYS[1:]]
        assert all(way["ratio"]["value"] > 0 for way in one["us"][1:])


@pytest.mark.integration
def test_one_form_with_its_sizes(command, counter):
    """--form measures one; --shape and --input reach the file before it is loaded, and its own runtime, too."""
    words = ("bench", counter, "--seconds", "0.1", "--device", "onnxruntime", "--form", "file")
    shown = command(*words, "--shape", "x=1x30", "--input", "h=0").out
    assert "counter.onnx as it is on onnxruntime: " in shown
    assert OWN in shown
    assert "as operations" not in shown
    assert "give its open sizes, as in --shape x=1x512" in command(*words, ends=2).err


def test_a_file_that_its_runtime_refuses(command, tmp_path, counter):
    """The runtime's own words."""
    path = tmp_path / "broken.onnx"
    path.write_bytes(counter.read_bytes().replace(b"ReduceSum", b"ReduceSam"))
    told = command("bench", path, "--shape", "1x4", "--seconds", "0.1", ends=1).err
    assert "broken.onnx: the runtime that it was made for refuses it: " in told
    assert "ReduceSam" in told


def test_what_cannot_be_measured_says_why(command, files, kit):
    """A device that does not take a model; when there is nothing at all, it ends with 1."""
    words = (files.products, "--seconds", "0.1", "--device", kit.odd("Picky"), "--form", "operations", "--json")
    (one,) = command("bench", *words, ends=1).json()["comparisons"]
    assert re.match(r"operation \d+ \([A-Z_0-9]+\): .", one["reason"])
    broken = command("bench", "--seconds", "0.1", "--device", kit.odd("Broken"), ends=1)
    assert "did not start: RuntimeError: this device is broken on purpose" in broken.out


def test_a_device_that_does_not_take_it_is_a_line_beside_others(command, kit):
    """It is no failure that a device runs other models alone."""
    words = "--seconds", "0.1", "--device", "reference", "--device", kit.odd("Special")
    *_, last = command("bench", *words).out.splitlines()
    assert re.match(r"not measured: ADD of 4 floats on \S+: operation 0 \(ADD\): .", last)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["burst_roundtri"], r"did you mean 'burst_roundtrip'?"),
        (["mobile.net"], "neither a model file (.tflite, .onnx) nor a script of bench/ (see --list)"),
        (["a.onnx", "b.onnx"], "pass either one MODEL or any number of SCRIPTs"),
        (["nowhere.onnx"], "pass the path of a model file"),
        (["--plot", "picture.txt"], "use .png, .svg, .pdf, for example picture.png"),
        (["--seconds", "0"], "Invalid value for '--seconds'"),
        (["run_queue", "fenced", "--plot", "p.png"], "works with one script only"),
    ],
)
def test_a_wrong_call_is_told(command, words, told):
    """With the remedy, and the exit code 2."""
    assert told in command("bench", *words, ends=2).err


@pytest.mark.integration
def test_lists_the_scripts_of_a_clone(command):
    """Every program of bench/ with its question; modules that they share are none."""
    found = {script["name"]: script["question"] for script in command("bench", "--list", "--json").json()}
    assert {"burst_roundtrip", "queue_idle", "mobilenet"} <= set(found)
    assert not {"measure", "verdict", "first_result"} & set(found)
    assert all(question.endswith("?") for question in found.values())


def test_runs_scripts(command, monkeypatch, tmp_path):
    """One after the other, telling which; what each prints is printed, and with --json its figures are collected."""
    folder = tmp_path / "bench"
    folder.mkdir()
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(bench, "FOLDER", folder)
    program = (
        '"""Does it work?"""\nimport json, pathlib, sys\nif __name__ == "__main__":\n    print("yes")\n'
        '    pathlib.Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps(sys.argv[3:]))\n'
    )
    for name in ("one", "two"):
        (folder / f"{name}.py").write_text(program)
    (folder / "three.py").write_text(program.replace("print", "sys.exit"))
    found = command("bench", "one", "two.py", "--quick", "--json")
    assert json.loads(found.out) == {"one": ["--quick"], "two": ["--quick"]}
    assert "1 of 2: one: Does it work?" in found.err
    assert command("bench", "one").out.strip() == "yes"
    assert "three exited with 1" in command("bench", "three", ends=1).err


def test_a_wheel_has_no_scripts(command, monkeypatch, tmp_path):
    """It says where they are, and what works without them."""
    (tmp_path / "bench").mkdir()  # somebody else's, beside an installed package
    (tmp_path / "bench/measure.py").write_text('"""Whose?"""\n"__main__"')
    monkeypatch.setattr(bench, "FOLDER", tmp_path / "bench")
    for words in (["--list"], ["burst_roundtrip"]):
        told = command("bench", *words, ends=2).err
        assert "run this in a clone of the project" in told
        assert "`burst bench MODEL` need no clone" in told
