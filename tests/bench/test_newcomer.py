"""A newcomer's first ten minutes, in an empty environment and a real browser: the lines of docs/install.md work as they
stand, and the first error names a remedy that works. bench/newcomer.py times the same lines."""

import re
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from chromium import chromium
from onnx import TensorProto, helper

pytestmark = pytest.mark.integration
sys.path.append(str(Path(__file__).parents[2] / "bench"))

import newcomer as bench  # noqa: E402


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory):
    """With the wheel installed by the line of the page."""
    wheel = bench.build(tmp_path_factory.mktemp("wheel"))
    found = bench.Newcomer(tmp_path_factory.mktemp("newcomer"), wheel)
    found.wait_for(found.environment)
    found.wait_for(found.install)
    return found


def said(newcomer, line, status):
    """What a line prints that ends with this status."""
    with newcomer.type(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        text = bench.end_of(process)
    assert process.returncode == status, text
    return " ".join(text.split())


def test_the_demo_shows_a_picture(newcomer):
    """The page of `burst demo camera --web` draws a frame in a real browser, and Ctrl-C ends it."""
    with chromium() as browser:
        printed, seen = newcomer.look(browser)
    assert printed < seen


def test_an_onnx_file_gives_a_result(newcomer):
    """`burst run` prints the output and the times."""
    text = said(newcomer, newcomer.model, 0)
    assert "on onnxruntime" in text
    assert re.search(r"output \S+: float32 1 x .* runs through a burst: p50 ", text)


def test_the_remedy_for_an_open_size_works(newcomer):
    """A model that leaves sizes open is the usual first error: the option that the message names mends it."""
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3, "high", "wide"]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "open", ends[:1], ends[1:])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(made, newcomer.folder / "open.onnx")
    text = said(newcomer, "burst run open.onnx", 2)
    remedy = re.search(r"as in (--shape \S+?),", text)[1]
    assert "output y: float32" in said(newcomer, f"burst run open.onnx {remedy}", 0)


def test_a_missing_extra_names_the_line_that_installs_it(newcomer):
    """Without click, the command says which extra brings it; the same for the live page's aiohttp."""
    python = (
        'python -c "import sys; sys.modules[{!r}] = None; from driver.cli.entry import main; sys.argv[1:] = {}; main()"'
    )
    for module, words, extra in (("click", [], "cli"), ("aiohttp", ["demo", "camera", "--web"], "web")):
        text = said(newcomer, python.format(module, words), 2)
        assert re.search(rf"{module} is not installed.*pip install 'burst-engine\[(\w+,)?{extra}\]'", text), text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("burst run missing.onnx", ["missing.onnx", "No such file", "pass the path"]),
        ("burst run model.onnxx", ["'.onnxx'", "supported are .tflite, .onnx"]),
        ("burst run model.onnx --device gpu", ["gpu", "the devices are", "onnxruntime"]),
        ("burst run model.onnx --input photo.jpg", ["photo.jpg", "no such file", "pass a path"]),
        ("burst demo camera --web --source /dev/video77", ["/dev/video77"]),
        ("burst rum model.onnx", ["rum", "run"]),
    ],
)
def test_a_first_mistake_is_understood(newcomer, line, words):
    """The message names the argument, its value and what would be right; no traceback."""
    text = said(newcomer, line, 2)
    assert "Traceback" not in text
    assert [word for word in words if word not in text] == [], text
