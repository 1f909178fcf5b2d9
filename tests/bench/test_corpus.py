"""The script that judges real model files tells right from wrong, and writes the table of the page."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.integration

BENCH = Path(__file__).parents[2] / "bench"
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


@pytest.fixture
def corpus(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import corpus

    return corpus


@pytest.fixture
def folder(tmp_path):
    """Two files: a network with an open size, and no network at all."""
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Relu", ["x"], ["y"])],
        "g",
        [value("x", onnx.TensorProto.FLOAT, ["n", 8])],
        [value("y", onnx.TensorProto.FLOAT, ["n", 8])],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(model, tmp_path / "relu.onnx")
    (tmp_path / "text.onnx").write_text("not a network")
    return tmp_path


def test_the_page(folder):
    """A file that is right has figures, one that cannot be loaded has the reason, and the rest of the page stays."""
    page = folder / "page.md"
    page.write_text("above\n<!-- corpus -->\nold\n<!-- end -->\nbelow\n")
    command = [sys.executable, BENCH / "corpus.py", folder, "--only", ".onnx", "--rounds", "1", "--page", page]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert text.startswith("above\n")
    assert text.endswith("below\n")
    assert "old" not in text
    assert "| `relu.onnx` | 0.0 | same bits |" in text
    assert "| `text.onnx` | 0.0 | **no**: ImportFailed: " in text
    assert "1 of 2 files are right; 1 bit for bit." in text


def test_the_bits(folder):
    """A file with other bits than its own runtime's, or that does not load, has a line, and the exit status says so."""
    command = [sys.executable, BENCH / "corpus.py", "bits", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 1, done.stderr
    first, last = done.stdout.splitlines()
    assert first.startswith(f"{folder.name}/text.onnx: ImportFailed: ")
    assert last == "1 of 2 files: the bits of their own runtime"


def test_what_counts_as_right(corpus):
    """Floats may differ by 1e-4 of the range of the output, quantised values by two steps, all else by nothing."""
    floats = np.linspace(-10, 10, 5, dtype=np.float32)
    assert corpus.error_of(floats.copy(), floats, 0.0) == 0
    assert corpus.error_of(floats + np.float32(1e-3), floats, 0.0) == pytest.approx(0.5, rel=1e-2)
    assert corpus.error_of(floats.astype(np.float64), floats, 0.0) == np.inf
    steps = np.arange(5, dtype=np.int8)
    assert corpus.error_of(steps + np.int8(2), steps, 0.1) == 1
    assert corpus.error_of(steps + np.int8(1), steps, 0.0) == 2


def test_no_number_is_wrong(corpus):
    """Outputs that are not numbers on one side only are not right, and equal ones are."""
    wanted = np.array([np.nan, 1], np.float32)
    assert corpus.error_of(wanted.copy(), wanted, 0.0) == 0
    assert not corpus.error_of(np.array([0, 1], np.float32), wanted, 0.0) <= 1
