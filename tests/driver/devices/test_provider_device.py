"""Devices of ONNX Runtime's execution providers, on a GPU in software: what they claim, compute, refuse and survive."""

import itertools
import json
import os
import re
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx_files
import pytest
import swiftshader
from onnx.helper import make_node

import driver
from burst import BurstError, GeneralFailure
from driver.vts import CATEGORIES

pytestmark = pytest.mark.integration

NAME = "onnxruntime-webgpu"
SIDE = 1024
ROOT = Path(__file__).parents[3]


@pytest.fixture
def home(place):
    swiftshader.configure(f"{place.path}-home")
    return place


@pytest.fixture
def gpu(home):
    """A connection to a device that runs on SwiftShader."""
    with closing(driver.connect(NAME)) as device:
        yield device


def add_model(kind="float32", **quantisation):
    builder = driver.ModelBuilder()
    x = builder.input(kind, (4,), **quantisation)
    builder.output(builder.operation("ADD", x, x, 0, **quantisation))
    return builder.build()


def file_of(*nodes, shape=(4,), to=(4,), **weights):
    return onnx_files.file_model(onnx_files.written(nodes, [("x", "float32", shape)], [("y", "float32", to)], weights))


def chain_file(length=40):
    """Products of matrices, one after the other: seconds on SwiftShader."""
    names = ["x", *(f"t{n}" for n in range(length - 1)), "y"]
    steps = itertools.pairwise(names)
    nodes = [make_node("MatMul", [source, "x"], [target]) for source, target in steps]
    return file_of(*nodes, shape=(SIDE, SIDE), to=(SIDE, SIDE))


def test_it_computes_and_says_on_what(gpu):
    """A confined device adds on the adapter, in a burst, and says that this is software: its type is CPU."""
    assert (gpu.type, gpu.status().state) == ("CPU", "available")
    assert "SwiftShader" in gpu.status().reason
    assert "(software)" in gpu.status().reason
    with gpu.prepare(add_model()) as prepared, prepared.burst() as burst:
        for n in range(3):  # memory that was bound before is read anew
            np.testing.assert_array_equal(burst.run(np.full(4, n, np.float32)).outputs[0], np.full(4, 2 * n))


def test_a_file_is_what_it_is_on_the_cpu(gpu, connect_cpu):
    """A network in a file computes what the CPU computes, within the rounding of its sums."""
    random = np.random.default_rng(0)
    weights = {"w": random.standard_normal((8, 3, 3, 3), np.float32), "b": random.standard_normal(8, np.float32)}
    nodes = [
        make_node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1]),
        make_node("Relu", ["c"], ["r"]),
        make_node("GlobalAveragePool", ["r"], ["y"]),
    ]
    model = file_of(*nodes, shape=(1, 3, 16, 16), to=(1, 8, 1, 1), **weights)
    x = random.standard_normal((1, 3, 16, 16), np.float32)
    with gpu.prepare(model) as found, connect_cpu.prepare(model) as wanted:
        np.testing.assert_allclose(found.run(x)[0], wanted.run(x)[0], rtol=1e-5, atol=1e-6)


@pytest.fixture
def connect_cpu(home):
    with closing(driver.connect("onnxruntime")) as device:
        yield device


def test_what_would_run_on_the_cpu_is_not_claimed(gpu):
    """Operations and files of which the adapter does not run all are refused, with the operator and the remedy."""
    quantised = add_model("quant8_asymm", scale=0.5, zero_point=3)
    (reason,) = gpu.explain(quantised)
    assert "WebGPU has no kernel for" in reason
    assert "cpu_nodes = true" in reason
    assert gpu.supported_operations(add_model()) == [True]
    with pytest.raises(GeneralFailure, match=r"no kernel for Det .* 1 nodes would run on the CPU; cpu_nodes = true in"):
        gpu.prepare(file_of(make_node("Relu", ["x"], ["r"]), make_node("Det", ["r"], ["y"]), shape=(4, 3, 3)))
    (reason,) = gpu.explain(add_model("float16"))
    assert "no float16" in reason


def test_the_cpu_may_help(home):
    """With cpu_nodes = true such a file runs, part of it on the CPU."""
    swiftshader.configure(f"{home.path}-home", "cpu_nodes = true")
    model = file_of(make_node("Relu", ["x"], ["r"]), make_node("Det", ["r"], ["y"]), shape=(4, 3, 3))
    with closing(driver.connect(NAME)) as device, device.prepare(model) as prepared:
        np.testing.assert_allclose(prepared.run(np.stack([np.eye(3, dtype=np.float32)] * 4))[0], np.ones(4))


def test_an_engine_that_is_killed_in_a_run_comes_back(home, process, kit):
    """kill -9 in the middle of a kernel: that run fails, and a burst that recovers goes on with a new engine."""
    x, fine = np.full((4,), 3, np.float32), np.full((4,), 6, np.float32)
    with driver.compile(add_model(), devices=[NAME]) as compiled, compiled.burst(recover=True) as burst:
        np.testing.assert_array_equal(burst.run(x).outputs[0], fine)
        with closing(driver.connect(NAME)) as device, device.prepare(chain_file()) as chain:
            engine, pid, ends = process(device.connection.engine_pid), device.connection.engine_pid, []
            idle = processor_seconds(pid)

            def run():
                with pytest.raises(BurstError):
                    chain.run(np.ones((SIDE, SIDE), np.float32))
                ends.append("told")

            thread = threading.Thread(target=run)
            thread.start()
            kit.until(lambda: processor_seconds(pid) > idle + 0.5)
            assert ends == []
            engine.kill()
            thread.join()
            assert ends == ["told"]
            assert engine.has_ended()
        np.testing.assert_array_equal(burst.run(x).outputs[0], fine)


def test_the_page_is_right(home, tmp_path):
    """The first program on the page about GPUs runs, on whatever adapter there is."""
    page = Path(ROOT, "docs/howto/gpu.md").read_text()
    block, *_ = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)  # the others need CUDA
    nodes = [make_node("Relu", ["x"], ["y"])]
    data = onnx_files.written(nodes, [("x", "float32", (4,))], [("y", "float32", (4,))])
    (tmp_path / "net.onnx").write_bytes(data)
    words = [sys.executable, "-W", "error", "-c", "import driver, numpy as np\n" + block]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "CPU available: by SwiftShader" in done.stdout


def processor_seconds(pid):
    """That a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# Runs of seconds that end early: on a busy machine a GPU in software goes on with them longer than the engine waits.
BY_THE_CLOCK = {
    "extension/file/onnx/client_gone",
    "extension/file/onnx/deadline",
    "operations/generated_conv_2d_float32_1/deadlines",
}


@pytest.fixture(params=CATEGORIES)
def category(request):
    """One of the kit's categories, so that each is a test of its own: all together took longer than a test may."""
    return request.param


def test_the_conformance_kit(home, category):
    """The kit's smoke run passes: all that the device claims is within the HAL's tolerances, which are the kit's."""
    words = [sys.executable, "-m", "driver.cli", "vts", NAME, "--smoke", "--filter", f"{category}/*", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500, check=False)
    found = json.loads(done.stdout)
    failed = {test["name"]: test["message"] for test in found["tests"] if test["outcome"] == "failed"}
    assert found["tests"]
    assert {name: message for name, message in failed.items() if name not in BY_THE_CLOCK} == {}
    assert done.returncode == bool(failed), done.stderr
