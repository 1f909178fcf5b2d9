"""The driver in C on XNNPACK: examples/device-c."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from xnnpack_driver import EXAMPLE, built

import driver
from burst import Request, RequestArgument
from driver.devices import device_class

pytestmark = pytest.mark.integration
SOURCES = [EXAMPLE / name for name in ("device.c", "operations.c", "plan.h")]
CLAIMED = set(re.findall(r'^    [A-Z]+\("([A-Z0-9_]+)"', (EXAMPLE / "operations.c").read_text(), re.MULTILINE))
LONG = 500.0  # seconds after which what never comes is an error


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The driver, as cmake builds it."""
    return built(tmp_path_factory.mktemp("device-c"))


@pytest.fixture
def device(library):
    """The driver in this process."""
    return device_class(str(library))()


def run(*arguments, **options):
    return subprocess.run([*map(str, arguments)], capture_output=True, text=True, timeout=LONG, check=False, **options)


# ---- the library


def test_it_is_short():
    """Less than 800 lines in all, comments among them, and 20 operations and more."""
    assert sum(len(source.read_text().splitlines()) for source in SOURCES) < 800
    assert len(CLAIMED) > 20


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_it_compiles_without_a_warning(tmp_path, compiler):
    """With either compiler and the warnings of its CMakeLists.txt."""
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed (Debian: apt install {compiler})")
    built(tmp_path, "-DCMAKE_C_FLAGS=-Werror", compiler=compiler)


def test_it_exports_one_function(library):
    """And nothing else that another library could trip over."""
    words = run("nm", "--dynamic", "--defined-only", library).stdout.split()
    assert words[1:] == ["T", "burst_device_get"]


def test_another_abi_is_refused(library):
    """By the library itself, which does not know what it would be asked."""
    program = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).burst_device_get(2))"
    assert run(sys.executable, "-c", program, library).stdout == "0\n"


@pytest.mark.parametrize("scope", [None, pytest.param("--all", marks=pytest.mark.stress)])
def test_it_passes_the_conformance_tests(library, scope, runtime_dir):
    """`burst vts` finds no failure, and each operation that the driver claims has passed a case."""
    environment = os.environ | {"BURST_RUNTIME_DIR": str(runtime_dir)}
    command = [sys.executable, "-m", "driver.cli", "vts", library, "--json", *([scope] if scope else [])]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment, check=False)
    report = json.loads(done.stdout)
    failed = [test for test in report["tests"] if test["outcome"] == "failed"]
    assert (failed, done.returncode) == ([], 0), done.stderr
    passed = {test["name"] for test in report["tests"] if test["outcome"] == "passed"}
    for name in CLAIMED:
        assert any(re.match(rf"operations/.*\b{name.lower()}\b", test) for test in passed), name


# ---- what it refuses


def refusals():
    """(what the reason says, the operation, its arguments): an "x 2,3" is an input, an array a constant."""
    ones = np.ones
    filters, bias = ones((3, 2, 2, 2), np.float32), ones(3, np.float32)
    return {
        "type": ("operand 0) is of type 4; this driver computes TENSOR_FLOAT32", "ABS", ("int32 2,3",)),
        "shape": ("dimensions [0, 3]; all have to be known when the model is prepared", "RELU", ("x 0,3",)),
        "layout": ("input 7 (layout) is NCHW", "CONV_2D", ("x 1,2,4,4", filters, bias, 1, 1, 1, 0, True)),
        "filter": ("input 1 (filter) is no constant", "CONV_2D", ("x 1,4,4,2", "x 3,2,2,2", bias, 1, 1, 1, 0)),
        "weights": ("input 1 (weights) is no constant", "FULLY_CONNECTED", ("x 1,4", "x 3,4", bias, 0)),
        "window": ("the window is 1 x 1", "MAX_POOL_2D", ("x 1,4,4,2", 1, 1, 1, 1, 1, 0)),
        "beta": ("input 1 (beta) is not the constant 1", "SOFTMAX", ("x 1,4", 2.0)),
        "axis": ("input 2 (axis) is 0; XNNPACK takes the last", "SOFTMAX", ("x 3,4", 1.0, 0)),
        "operation": ("TANH: this driver does not have it", "TANH", ("x 1,4",)),
    }


def model_of(name, arguments):
    builder = driver.ModelBuilder()

    def operand(argument):
        if not isinstance(argument, str):
            return argument
        kind, dimensions = argument.split()
        return builder.input("float32" if kind == "x" else kind, tuple(map(int, dimensions.split(","))))

    builder.output(builder.operation(name, *map(operand, arguments)))
    return builder.build()


@pytest.mark.parametrize("case", refusals())
def test_it_says_what_it_refuses_and_why(device, case):
    """The input, what is wrong with it, and what would be right."""
    says, name, arguments = refusals()[case]
    (reason,) = device.explain(model_of(name, arguments))
    assert says in (reason or "")


def test_shapes_that_a_model_leaves_open_follow_from_those_before(device):
    """A result without declared dimensions is no obstacle."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (2, 3))
    y = builder.operation("RESHAPE", x, [3, -1], dimensions=(0, 0))
    builder.output(builder.operation("RELU", y, dimensions=()))
    assert device.explain(builder.build()) == [None, None]


# ---- memory

AT_THE_END = """
import ctypes, mmap, sys
import numpy as np
import driver
from driver.devices import device_class
from driver.interface import BindOptions, Preparation
from driver.nn import Interpreter

libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

def at_the_end(nbytes):
    '''Bytes that end with a page, behind which is none that may be read.'''
    area = np.frombuffer(mmap.mmap(-1, 3 * 4096), np.uint8)
    assert libc.mprotect(area.ctypes.data + 8192, 4096, 0) == 0
    return area[8192 - nbytes : 8192]

builder, random = driver.ModelBuilder(), np.random.default_rng(1)
x = builder.input("float32", (1, 5, 5, 3))
filters = random.random((1, 3, 3, 3), np.float32)
taps = builder.operation("DEPTHWISE_CONV_2D", x, filters, np.ones(3, np.float32), 1, 1, 1, 1, 0)
y = builder.operation("MAX_POOL_2D", builder.operation("ADD", taps, x, 0), 1, 1, 1, 3, 3, 0)
builder.output(y, builder.operation("LOGISTIC", y))
model = builder.build()
feed = at_the_end(300)
feed[:] = random.random(75, np.float32).view(np.uint8)
results = [at_the_end(300), at_the_end(300)]
image = feed.view(np.float32).reshape(1, 5, 5, 3)
bound = device_class(sys.argv[1])().prepare(model, Preparation()).bind([image], results, BindOptions(1.0))
bound.run()
expected = Interpreter(model).bind((image,))
expected.run()
for result, tensor in zip(results, expected.results):
    np.testing.assert_allclose(result.view(np.float32), tensor.data.ravel(), rtol=1e-5)
print("right")
"""


def test_it_reads_nothing_behind_a_clients_memory(library):
    """Inputs and outputs that end with the last page that may be touched, one of them read by another operation."""
    done = run(sys.executable, "-c", AT_THE_END, library)
    assert (done.stdout, done.returncode) == ("right\n", 0), done.stderr


def test_executions_of_one_model_run_at_the_same_time(library, runtime_dir, monkeypatch):
    """Two bursts with requests in flight at once: each has its own operators, so each result is right."""
    monkeypatch.setenv("BURST_RUNTIME_DIR", str(runtime_dir))
    filters = np.random.default_rng(2).random((8, 3, 3, 4), np.float32)
    builder = driver.ModelBuilder()
    x = builder.input("float32", (1, 16, 16, 4))
    builder.output(builder.operation("CONV_2D", x, filters, np.zeros(8, np.float32), 1, 1, 1, 0))
    with (
        driver.connect(str(library)) as device,
        device.prepare(builder.build()) as prepared,
        prepared.burst(depth=4) as one,
        prepared.burst(depth=4) as other,
    ):
        image = np.random.default_rng(3).random((1, 16, 16, 4), np.float32)
        (single,) = prepared.run(image)
        for _ in range(20):
            asked = [(n, burst.submit(image * n)) for n in range(1, 5) for burst in (one, other)]
            for n, future in asked:
                np.testing.assert_allclose(future.result(LONG).outputs[0], single * n, rtol=1e-4)
        os.kill(device.service_pid, 15)


def test_a_fenced_chain_stays_in_the_drivers_own_buffers(library, runtime_dir, monkeypatch):
    """Ten executions go back and forth between two buffers that the driver allocated, launched with fences and in a
    burst: each adds 1, and no bulk byte is copied."""
    monkeypatch.setenv("BURST_RUNTIME_DIR", str(runtime_dir))
    builder = driver.ModelBuilder()
    x = builder.input("float32", (1, 4))
    builder.output(builder.operation("ADD", x, np.ones((1, 4), np.float32), 0))
    role = [driver.BufferRole(0, 0, 1.0)]
    with driver.connect(str(library)) as device, device.prepare(builder.build()) as prepared, prepared.burst() as burst:
        one, other = (device.allocate(driver.BufferDesc((1, 4)), [prepared], role, role) for _ in range(2))
        one.copy_from(np.zeros((1, 4), np.float32))
        there, back = (
            Request((RequestArgument(),), (RequestArgument(pool=1),), buffers)
            for buffers in ((one, other), (other, one))
        )
        fenced = []
        for request in (there, back) * 5:
            fenced.append(prepared.execute_fenced(request, fenced[-1:]))
        fenced[-1].wait(LONG)
        np.testing.assert_array_equal(result_of(one), np.full(4, 10))
        for request in (there, back) * 5:
            burst.execute(request)
        np.testing.assert_array_equal(result_of(one), np.full(4, 20))
        assert burst.stats()["copied_bytes"]["bulk"] == 0
        os.kill(device.service_pid, 15)


def result_of(buffer):
    found = np.zeros((1, 4), np.float32)
    buffer.copy_to(found)
    return found.ravel()


def test_the_readme_names_what_is_there():
    """Its files, its commands and its number of operations."""
    text = (EXAMPLE / "README.md").read_text()
    assert f"{len(CLAIMED)} operations" in text
    assert set(re.findall(r"^\| `(.+?)` \|", text, re.MULTILINE)) == {
        path.name for path in Path(EXAMPLE).iterdir() if path.is_file() and path.name != "README.md"
    }
