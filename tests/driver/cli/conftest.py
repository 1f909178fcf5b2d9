"""The command in this process, small model files for it, and clients in processes of their own."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

from driver.cli.command import burst

IMPORTED = Path(__file__).parents[1] / "importers"
FLOAT = TensorProto.FLOAT
sys.path.insert(0, str(IMPORTED))


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    """`burst top` gives way to all others, from which there is no way back for the tests' process."""
    monkeypatch.setattr("driver.cli.top.give_way", lambda: None)


@pytest.fixture
def command(shared, monkeypatch):
    """Runs `burst …` with devices that other tests use, too; asserts how it ends, and that nobody sees a traceback."""
    shared.enter(monkeypatch)

    def call(*words, ends=0, columns=200):
        result = CliRunner(env={"COLUMNS": str(columns)}).invoke(burst, [str(word) for word in words])
        assert isinstance(result.exception, SystemExit | None), result.exception
        assert result.exit_code == ends, result.output
        return SimpleNamespace(out=result.stdout, err=result.stderr, json=lambda: json.loads(result.stdout))

    return call


@pytest.fixture
def unfolded():
    """Of a printed table: the text of each column without its spaces, however it was folded."""

    def columns(text):
        rows = [line[1:-1].split("│") for line in text.splitlines() if line.startswith("│")]
        assert len({len(row) for row in rows}) == 1, text
        return ["".join("".join(cells).split()) for cells in zip(*rows, strict=True)]

    return columns


@pytest.fixture(scope="session")
def files():
    """Paths of model files: images in bytes and in floats (channels last and first), batches, two
    inputs, what litert does not take, states, MUL.
    """
    return SimpleNamespace(
        bytes=IMPORTED / "vendor/mobilenet_uint8.tflite",
        floats=IMPORTED / "vendor/mobilenet_float32.tflite",
        first=IMPORTED / "onnx_models/mobilenet.onnx",
        open=IMPORTED / "vendor/batches_float32.tflite",
        two=IMPORTED / "vendor/condition_float32.tflite",
        unplaced=IMPORTED / "vendor/detector_float32.tflite",
        states=IMPORTED / "vendor/lstm_float32.tflite",
        products=IMPORTED / "vendor/attention_float32.tflite",
    )


@pytest.fixture
def counter(tmp_path):
    """A network that adds up its blocks in a state: y = hn = h + the sum of x; x of any length."""
    from header_files import onnx_file

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=1),
        helper.make_node("Add", ["h", "s"], ["hn"]),
        helper.make_node("Mul", ["hn", "one"], ["y"]),
    ]
    sides = {"x": (FLOAT, ["batch", "n"]), "h": (FLOAT, ["batch", 1])}, {"y": (FLOAT, None), "hn": (FLOAT, None)}
    model = onnx.load_from_string(onnx_file(*sides, nodes))
    for output in model.graph.output:
        output.type.tensor_type.shape.CopyFrom(model.graph.input[1].type.tensor_type.shape)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(1, np.float32), "one"))
    path = tmp_path / "counter.onnx"
    path.write_bytes(model.SerializeToString())
    return path


PROGRAM = """
import json, os, sys, time
import numpy as np
import driver
name, options = sys.argv[1], json.loads(sys.argv[2])
builder = driver.ModelBuilder()
x = builder.input("float32", (1, 4))
builder.output(builder.operation("ADD", x, np.ones(4, np.float32), 0))
with driver.connect(name) as device, device.prepare(builder.build()) as prepared, prepared.burst(**options) as burst:
    print(json.dumps(os.getpid()), flush=True)
    for line in sys.stdin:
        took = []
        for seconds in json.loads(line):
            frame = np.full((1, 4), seconds, np.float32)
            begin = time.perf_counter()
            burst.run(frame)
            took.append(1e6 * (time.perf_counter() - begin))
        print(json.dumps(took), flush=True)
"""


class Client:
    """One burst of a process of its own."""

    def __init__(self, process):
        self.process = process
        self.pid = json.loads(process.stdout.readline())

    def run(self, frames):
        """Microseconds of each execution; on a slow device each takes as many seconds as its frame says."""
        self.begin(frames)
        return self.end()

    def begin(self, frames):
        self.process.stdin.write(json.dumps(frames) + "\n")
        self.process.stdin.flush()

    def end(self):
        return json.loads(self.process.stdout.readline())


@pytest.fixture
def client(kit):
    """Client(device, **options of its burst); all are killed in the end."""
    with contextlib.ExitStack() as stack:

        def client(name="reference", **options):
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            process = stack.enter_context(kit.python(PROGRAM, name, json.dumps(options), **pipes))
            stack.callback(process.kill)
            return Client(process)

        yield client
