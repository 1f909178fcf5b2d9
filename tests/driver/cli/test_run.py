"""`burst run`: model files on devices, on the CPU, on several, with every kind of input; and how it fails."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import driver

sys.path.insert(0, str(Path(__file__).parents[1] / "importers"))

from tflite_writer import Writer


@pytest.fixture
def picture(tmp_path):
    """A grey image file of 8 x 8."""
    path = tmp_path / "grey.png"
    Image.fromarray(np.full((8, 8, 3), 128, np.uint8)).save(path)
    return path


def expected(file, *arrays):
    """What the reference computes."""
    with driver.compile(driver.load(file), devices=["cpu"]) as model:
        return model.run(*arrays)


def test_an_image_through_a_burst(command, files, picture, tmp_path):
    """Placement, what was done with the image, the times of each stage, the likeliest classes with their labels."""
    labels = tmp_path / "labels.txt"
    labels.write_text("\n".join(f"kind {n}" for n in range(20)))
    model = ("run", files.bytes, "--form", "operations", "--device", "litert")
    words = (*model, "--input", picture, "--labels", labels, "--top", 3, "--runs", 5)
    found = command(*words, "--json").json()
    assert found["placement"] == [{"device": "litert", "operations": 37, "ranges": [[0, 36]]}]
    (given,) = found["inputs"]
    assert given["shape"] == [1, 64, 64, 3]
    assert given["done"] == "8 x 8 RGB, resized to 64 x 64 (bilinear); bytes used as quantised values"
    (output,) = found["outputs"]
    (scores,) = expected(files.bytes, np.full((1, 64, 64, 3), 128, np.uint8))
    best = output["top"][0]
    assert scores.reshape(-1)[best["number"]] >= scores.max() - 1  # a step, which the HAL tolerates
    assert best["label"] == f"kind {best['number']}"
    assert len(output["top"]) == 3
    assert 0 < found["us"]["least"] <= found["us"]["p50"] <= found["us"]["p99"] <= found["us"]["most"]
    assert set(found["stages"][0]["us"]) == {"encode", "queue", "wake", "bind", "execute", "return", "total"}
    shown = command(*words).out
    for line in ("on litert: operations 0 to 36", "5 runs through a burst: p50", "stages on litert, p50:", "kind "):
        assert line in shown


@pytest.mark.parametrize("way", [(), ("--plain",)])
def test_outputs_are_written(command, files, tmp_path, way):
    """By their names, as the model computes them, on either path."""
    array = np.random.default_rng(3).random((1, 3, 64, 64), np.float32)
    np.savez(tmp_path / "in.npz", x=array)
    out = tmp_path / "out.npz"
    command("run", files.first, "--device", "cpu", "--input", tmp_path / "in.npz", "--output", out, "--runs", 1, *way)
    with np.load(out) as found:
        assert np.allclose(found["y"], expected(files.first, array)[0], atol=1e-5)


@pytest.mark.integration
def test_texts_and_maps(command, tmp_path):
    """A text is a word or a line of a file; a sequence of maps is shown, and written as JSON."""
    pytest.importorskip("onnxruntime", reason="needs the extra 'onnxruntime'")
    from packed_nets import write_net

    texts, lines = write_net("nothing", tmp_path), tmp_path / "lines.txt"
    lines.write_text("one\ntwö\n")
    for word, wanted in (("hello there", ["hello there"]), (lines, ["one", "twö"]), ("random", ["text"])):
        found = command("run", texts, "--input", word, "--runs", 1, "--json").json()
        assert found["outputs"][0]["values"] == wanted
    assert "output y: string 2: one, twö" in command("run", texts, "--input", lines, "--runs", 1).out
    out, net = tmp_path / "out.npz", write_net("classifier", tmp_path)
    found = command("run", net, "--input", "0.5", "--runs", 1, "--output", out, "--json").json()["outputs"]
    assert (found[0]["values"], found[1]["values"]) == (["cat"], [{"cat": 0.5, "dog": 0.5}])
    with np.load(out) as written:
        assert written["label"].tolist() == ["cat"]
        assert json.loads(str(written["probabilities"])) == [{"cat": 0.5, "dog": 0.5}]
    net = write_net("sequence", tmp_path)
    assert "'s' is seq(tensor(float)), which run takes in Python alone" in command("run", net, ends=2).err


def test_several_devices_share_a_model(command, files):
    """What one of them does not take goes to another: each step with its device and its stages."""
    found = command("run", files.two, "--device", "litert", "--device", "reference", "--runs", 2, "--json").json()
    assert {step["device"] for step in found["placement"]} <= {"litert", "reference"}
    assert [step["device"] for step in found["stages"]] == [step["device"] for step in found["placement"]]
    assert [given["name"] for given in found["inputs"]] == ["x", "flag"]


def test_every_device_by_default(command, files):
    """Without --device it is what `driver.compile` chooses; open shapes are told, and chosen."""
    found = command("run", files.open, "--runs", 1, "--shape", "3x16x16x3", "--json").json()
    assert found["outputs"][0]["shape"] == [3, 5]
    assert command("run", files.open, "--runs", 1, "--device", "cpu").out.count("? taken as 1") == 1


def test_a_kept_compilation_is_told(command, files, tmp_path):
    """--cache-dir: saved the first time, restored the second."""
    model = ("run", files.floats, "--form", "operations", "--device", "litert")
    words = (*model, "--runs", 1, "--cache-dir", tmp_path / "kept", "--json")
    assert [command(*words).json()["compilations"][0]["outcome"] for _ in range(2)] == ["saved", "restored"]


def test_states_begin_with_zeros(command, files):
    """A recurrent network needs no array for its state."""
    found = command("run", files.states, "--device", "cpu", "--runs", 1, "--json").json()
    assert [given["source"] for given in found["inputs"]] == ["random", "zeros", "zeros"]
    assert [bool(output["top"]) for output in found["outputs"]] == [True, False, False]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere.onnx"], "MODEL 'nowhere.onnx': No such file or directory; pass the path of a model file"),
        (["{here}"], "has the suffix '.py'; supported are .tflite, .onnx"),
        (["{damaged}"], "damaged.onnx': 'damaged.onnx': "),
        (["{text}"], "'notes.onnx': it is text, not a model; fetch it again, or export it again"),
        (["{model}", "--device", "cpu", "--device", "cpu"], "a device is named twice"),
        (["{model}", "--device", "/nowhere/litert.sock"], "no device is served there"),
        (["{model}", "--input", "nowhere.png"], "--input nowhere.png: no such file"),
        (["{model}", "--labels", "nowhere.txt"], "--labels nowhere.txt: "),
        (["{model}", "--labels", "{here}", "--device", "cpu"], "but output 'probabilities' has 20 classes"),
        (["{model}", "--output", "out.txt"], "--output out.txt: outputs are written as .npz; use out.npz"),
        (["{model}", "--output", "/nowhere/o.npz", "--device", "cpu"], "there is no folder /nowhere"),
        (["{model}", "--runs", "0"], "Invalid value for '--runs'"),
        (["{model}", "--priority", "urgent"], "'urgent' is not one of 'low', 'medium', 'high'"),
        (["{model}", "--deadline", "0"], "Invalid value for '--deadline'"),
        (["{model}", "--cache-dir", "{here}", "--device", "cpu"], "cache_dir"),
    ],
)
def test_a_wrong_call_is_told(command, files, tmp_path, words, told):
    """Each with the argument, its value and the remedy, and the exit code 2."""
    damaged = tmp_path / "damaged.onnx"
    damaged.write_bytes(b"\xff" * 64)
    text = tmp_path / "notes.onnx"
    text.write_text("Not a model at all.\n")
    places = {"model": files.floats, "here": __file__, "damaged": damaged, "text": text}
    found = command("run", *(word.format(**places) for word in words), "--json", ends=2)
    assert told in found.err
    assert json.loads(found.out)["status"] == 2


def test_an_execution_that_fails_ends_with_1(command, files):
    """What goes wrong while it runs is one line on stderr: here, a deadline that nobody can meet."""
    found = command("run", files.floats, "--device", "reference", "--deadline", "1e-9", "--json", ends=1)
    assert json.loads(found.out)["status"] == 1
    assert found.err.startswith("Error: ")
    assert found.err.count("\n") == 1


def test_what_a_device_does_not_take_ends_with_1(command, files):
    """With one --device nothing falls back; the operation is named, and what would help."""
    found = command("run", files.unplaced, "--form", "operations", "--device", "litert", "--json", ends=1)
    assert "none of the devices supports operation 25 (GATHER): litert: its indices" in found.err
    assert "add 'cpu' to them" in found.err
    assert json.loads(found.out)["status"] == 1


def test_a_crash_ends_with_1(command, files, kit):
    """It says where the device's log is."""
    found = command("run", files.floats, "--device", kit.odd("Crashing"), ends=1)
    assert "device logs are in " in found.err


@pytest.mark.integration
def test_it_is_a_program(files, shared):
    """The command in a process of its own prints JSON and nothing else, whatever the libraries say."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "driver.cli", "run", files.floats, "--device", "cpu", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("{")
    assert done.stderr == ""


def test_a_signature_is_chosen(command, tmp_path):
    """--signature of a file that has several: its inputs and outputs are fed and shown; a wrong one is named."""
    w = Writer()
    x, other = w.input((4,)), w.graph()
    y, z = w.operator("NEG", [x], (4,)), other.input((2,))
    other.outputs = [other.operator("ABS", [z], (2,))]
    path = tmp_path / "two.tflite"
    signatures = [("turn", 0, {"x": x}, {"y": y}), ("size", 1, {"z": z}, {"s": other.outputs[0]})]
    path.write_bytes(w.file([y], signatures=signatures))
    found = command("run", path, "--signature", "size", "--runs", 1, "--json").json()
    assert [each["name"] for each in (*found["inputs"], *found["outputs"])] == ["z", "s"]
    assert "choose from turn, size" in command("run", path, "--signature", "sise", ends=2).err
    assert "signature turn: x" in command("check", path, "--signature", "size", "--no-run").out
