"""`burst check` and `driver.check`: every obstacle of a file at once, of each form and each device."""

import re
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import driver
from burst_engine.names import install_command
from driver.devices import device_class, missing
from driver.runtime import model_check

sys.path.insert(0, str(Path(__file__).parents[1] / "importers"))

from header_files import onnx_file, strings_tflite

FLOAT = TensorProto.FLOAT


@pytest.fixture
def written(tmp_path):
    """written(data, kind="onnx") -> the path of a model file."""

    def write(data, kind="onnx"):
        path = tmp_path / f"net.{kind}"
        path.write_bytes(data)
        return path

    return write


def chain(*kinds):
    """A file of operators one after the other."""
    names = ["x", *(f"v{n}" for n in range(1, len(kinds))), "y"]
    nodes = [helper.make_node(kind, [a], [b]) for kind, a, b in zip(kinds, names, names[1:], strict=False)]
    return onnx_file({"x": (FLOAT, [2, 3])}, {"y": (FLOAT, None)}, nodes)


@pytest.mark.integration
def test_a_model_that_runs(command, files):
    """In both forms where its runtime is there, and on the CPU of this process."""
    found = command("check", files.first, "--json").json()
    assert found["ok"]
    assert ["file", "onnxruntime"] in found["works"]
    assert ["operations", "cpu"] in found["works"]
    assert set(found["asked"]) >= {"litert", "onnxruntime", "reference"}
    assert "runs as it is on onnxruntime" in command("check", files.first).out


@pytest.mark.integration
def test_what_a_frame_costs(command, files):
    """Time, and processor time of all processes, of each device that has run the file as it is; none without a run."""
    costs = command("check", files.first, "--json").json()["costs"]
    (cost,) = [cost for cost in costs if cost["device"] == "onnxruntime"]
    assert (cost["form"], cost["frames"] >= 1) == ("file", True)
    assert min(cost["milliseconds"], cost["processor_milliseconds"]) > 0
    assert re.search(
        r"^a frame on onnxruntime: \S+ ms, \S+ ms of processor time", command("check", files.first).out, re.M
    )
    assert command("check", files.first, "--no-run", "--json").json()["costs"] == []


@pytest.mark.integration
def test_all_obstacles_of_the_operations(command, written):
    """Every operator that is in the way is listed, not only the first; the file runs as it is."""
    path = written(chain("Asin", "Abs", "Acos", "Atanh"))
    found = command("check", path, "--json").json()
    refused = [o for o in found["obstacles"] if o["form"] == "operations"]
    assert [o["operator"] for o in refused] == ["Asin 0", "Acos 2", "Atanh 3"]
    assert refused[1]["tensors"] == ["v2", "v3"]
    assert all("no operation for it" in o["reason"] for o in refused)
    assert ["file", "onnxruntime"] in found["works"]
    assert "operations" not in dict(found["works"])
    told = command("check", path).out
    assert all(word in told for word in ("Asin 0", "Acos 2", "Atanh 3", "v2, v3"))
    assert "as operations of the HAL, on any device:" in told
    assert not re.search("…", told)


def test_no_form(command, written):
    """Exits with 1; what each form lacks is told, and the report is a table for Python, too."""
    path = written(onnx_file({"words": (TensorProto.COMPLEX64, [2])}, {"y": (TensorProto.COMPLEX64, [2])}))
    found = command("check", path, "--json", ends=1).json()
    assert not found["ok"]
    assert [(o["form"], o["tensors"]) for o in found["obstacles"]][:2] == [("file", ["words"]), ("file", ["y"])]
    assert any(o["form"] == "operations" for o in found["obstacles"])
    report = driver.check(path)
    assert not report.ok
    lines = str(report).splitlines()
    assert lines[0] == "net.onnx runs in no form"
    assert lines[2].split() == ["form", "device", "where", "obstacle", "and", "remedy"]
    assert "input 'words' has elements of COMPLEX64" in str(report)
    assert "export the model without it" in " ".join(str(report).split())


def test_what_the_runtime_itself_refuses(command, written):
    """An operator that does not exist is found by loading the file, and told in the runtime's words."""
    found = command("check", written(chain("Abs", "NoSuchOperator")), "--json", ends=1).json()
    (told,) = [o for o in found["obstacles"] if o["form"] == "file" and o["device"] == "onnxruntime"]
    assert "NoSuchOperator" in told["reason"]


@pytest.mark.integration
def test_shapes_make_a_form_work(command, written):
    """An open size that keeps the file from becoming operations; the remedy is the option that helps."""
    proto = onnx.load_from_string(onnx_file({"x": (FLOAT, ["n", "m"])}, {"y": (FLOAT, None)}, []))
    proto.graph.node.append(helper.make_node("Reshape", ["x", "s"], ["y"]))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0, 0, 1, -1]), "s"))
    path = written(proto.SerializeToString())
    (told,) = [o for o in command("check", path, "--json").json()["obstacles"] if o["device"] is None]
    assert "shapes={'x':" in told["remedy"]
    found = command("check", path, "--shape", "x=2x3", "--json").json()
    assert ["operations", "cpu"] in found["works"]
    assert command("check", path, "--shape", "x=2x?", "--json").json()["ok"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--shape", "y=2x3"], "no input is named 'y'; inputs: x"),
        (["--shape", "2x3", "--shape", "2x3"], "the model has 1 input: x"),
        (["--shape", "x=2xthree"], "expected positive numbers, or [?]"),
        (["--shape", "x=2x3", "--shape", "x=2x3"], "given twice"),
        (["--shape", "x=3x3"], "the input is float32 2 x 3; only a [?] can be set"),
    ],
)
def test_wrong_shapes(command, written, words, told):
    """Are usage errors that have the right ones."""
    assert re.search(told, " ".join(command("check", written(chain("Abs")), *words, ends=2).err.split()))


def test_files_that_are_none(command, written, tmp_path):
    """A file that cannot be opened is a usage error; a damaged one is a report."""
    assert "No such file" in command("check", tmp_path / "none.onnx", ends=2).err
    assert "supported are" in command("check", tmp_path / "net.pb", ends=2).err
    found = command("check", written(b"\xff" * 40), "--json", ends=1).json()
    assert [o["form"] for o in found["obstacles"]] == ["file", "operations"]
    assert found["asked"] == []


def test_strings_of_a_tflite_file(written, monkeypatch):
    """A file of which nothing can run asks no device."""
    monkeypatch.setattr(model_check, "connect", None)
    report = driver.check(written(strings_tflite(), "tflite"))
    assert {o.form for o in report.obstacles} == {"file", "operations"}
    assert report.asked == ()


def test_a_device_that_is_not_installed(written, monkeypatch, shared):
    """Where nothing runs the file as it is, the remedy installs what does."""
    shared.enter(monkeypatch)
    monkeypatch.setattr(model_check, "names", lambda: ["reference"])
    monkeypatch.setattr(device_class("onnxruntime"), "missing", lambda: "the device needs onnxruntime 1.20")
    report = driver.check(written(chain("Asin")))
    (told,) = [o for o in report.obstacles if o.form == "file"]
    assert told.device == "onnxruntime"
    assert "needs onnxruntime 1.20" in told.reason
    assert told.remedy == install_command("onnxruntime")
    assert not report.ok


def reshaped(shape, to):
    """A file that runs only with inputs of as many elements; what it gives keeps it from becoming operations."""
    proto = onnx.load_from_string(onnx_file({"x": (FLOAT, shape)}, {"y": (FLOAT, None)}, []))
    nodes = [helper.make_node("Reshape", ["x", "s"], ["r"]), helper.make_node("Asin", ["r"], ["y"])]
    proto.graph.node.extend(nodes)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(to), "s"))
    return proto.SerializeToString()


@pytest.mark.integration
def test_a_file_that_loads_and_does_not_run(command, written):
    """Is not said to run: the run on zeros is told, with its sizes and what failed; no size is made up. With --no-run,
    nothing runs.
    """
    path = written(reshaped(["n", 4], [7, 11]))
    found = command("check", path, "--json", ends=1).json()
    told = {o["device"]: o for o in found["obstacles"] if o["form"] == "file"}["onnxruntime"]
    assert re.search(r"a run on zeros of x=\d+x4 failed: .*[Rr]eshape", told["reason"])
    assert "--no-run" in told["remedy"]
    (remedy,) = {o["remedy"] for o in found["obstacles"] if (o["operator"] or "").startswith("Reshape")}
    assert remedy == "fix its sizes with shapes={'x': ('?', 4)}"
    assert "x=?x4" in command("check", path, ends=1).out
    assert ["file", "onnxruntime"] in command("check", path, "--no-run", "--json").json()["works"]


@pytest.mark.integration
def test_sizes_that_ran(command, written):
    """Open sizes are tried, and the ones that ran are the example of the remedy."""
    found = command("check", written(reshaped([2, "n", 1], [2, 64])), "--json").json()
    assert ["file", "onnxruntime"] in found["works"]
    (remedy,) = {o["remedy"] for o in found["obstacles"] if (o["operator"] or "").startswith("Reshape")}
    assert remedy == "fix its sizes with, for example, shapes={'x': (2, 64, 1)}"


@pytest.mark.integration
@pytest.mark.skipif(missing("openvino") is not None, reason="needs the extra 'openvino'")
def test_a_device_that_runs_files_alone(command, written):
    """Is one line, not a table with a row for each operation."""
    lines = command("check", written(chain("Abs", "Neg", "Relu"))).out.splitlines()
    (line,) = [line for line in lines if "no operations" in line and "on openvino" in line]
    assert line == "as operations of the HAL, on openvino: the device openvino runs model files, and no operations"
