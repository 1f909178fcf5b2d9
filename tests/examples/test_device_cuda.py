"""The driver in C on CUDA, examples/device-cuda: its host part, on a stand-in of the runtime that is no GPU."""

import shutil
import subprocess
import sys

import numpy as np
import pytest
from cuda_example import CONTRACT, EXAMPLE, built
from fake_cuda import FakeCuda

import driver
from burst import Request, RequestArgument
from driver import BufferDesc, BufferRole

pytestmark = pytest.mark.integration
M, K, N = 5, 40, 33  # of matrices: no multiple of a tile


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The driver, without a warning."""
    return built(tmp_path_factory.mktemp("device-cuda"))


@pytest.fixture
def device(library):
    with driver.connect(str(library)) as found:
        yield found


def product(weights, bias):
    """(x * weights, transposed, + bias) + itself."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (M, K))
    found = builder.operation("FULLY_CONNECTED", x, weights, bias, 0)
    builder.output(builder.operation("ADD", found, found, 0))
    return builder.build()


def addition(n):
    builder = driver.ModelBuilder()
    a, b = builder.input("float32", (n,)), builder.input("float32", (n,))
    builder.output(builder.operation("ADD", a, b, 0))
    return builder.build()


def test_a_product_of_matrices(device):
    """Weights lie on the GPU from the beginning; a request is copied in, computed and copied out."""
    random = np.random.default_rng(3)
    x, weights, bias = (random.random(shape).astype(np.float32) for shape in ((M, K), (N, K), (N,)))
    with device.prepare(product(weights, bias)) as model, model.burst(depth=2) as burst:
        for scale in (1, 2):
            found = burst.run(x * np.float32(scale)).outputs[0]
            assert np.allclose(found, 2 * (scale * x @ weights.T + bias), rtol=1e-5)


def test_a_buffer_of_the_device(device):
    """A state stays in the driver's memory."""
    with device.prepare(addition(4)) as model:
        roles = [BufferRole(0, 0), BufferRole(0, 1)], [BufferRole(0, 0)]
        a, b = (device.allocate(BufferDesc(), [model], *roles) for _ in range(2))
        a.copy_from(np.arange(4, dtype=np.float32))
        inputs = RequestArgument(), RequestArgument()
        assert model.execute(Request(inputs, (RequestArgument(pool=1),), (a, b))).status == 0
        b.copy_to(found := np.empty(4, np.float32))
        assert found.tolist() == [0, 2, 4, 6]


def test_a_pool_of_another_process_is_used_in_place(library, tmp_path, monkeypatch):
    """A `GpuPool` of this process, which the driver maps: inputs are read and the output is written where they lie."""
    monkeypatch.setenv("HOME", str(tmp_path))
    FakeCuda(tmp_path).configure()
    script = tmp_path / "client.py"
    script.write_text(CLIENT)
    subprocess.run([sys.executable, script, library], check=True, timeout=60)


CLIENT = """
import sys
import numpy as np
import driver
from burst import Request, RequestArgument
from driver.devices.cuda.gpu_pool import GpuPool

given, found = GpuPool.allocate(2 << 20), GpuPool.allocate(2 << 20)
n = given.nbytes // 4
given.copy_from(np.arange(n, dtype=np.float32))
builder = driver.ModelBuilder()
x = builder.input("float32", (n,))
builder.output(builder.operation("ADD", x, x, 0))
with driver.connect(sys.argv[1]) as device, device.prepare(builder.build()) as model, model.burst() as burst:
    request = Request((RequestArgument(length=4 * n),), (RequestArgument(pool=1, length=4 * n),), (given, found))
    burst.execute(request).raise_for_status()
    assert burst.stats()["copied_bytes"]["bulk"] == 0
values = np.empty(n, np.float32)
found.copy_to(values)
assert (values == 2 * np.arange(n, dtype=np.float32)).all()
"""


def test_what_it_refuses_is_said(device):
    """Each operation and type that it has not, with what it has."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (2, 2))
    builder.output(builder.operation("MUL", x, x, 0))
    (reason,) = device.explain(builder.build())
    assert reason == "this driver has ADD and FULLY_CONNECTED"


def test_the_conformance_kit(library):
    """Its smoke run finds no fault."""
    command = [sys.executable, "-m", "driver.cli", "vts", str(library), "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_files_are_listed():
    """By its README."""
    listed = {line.split("`")[1] for line in (EXAMPLE / "README.md").read_text().splitlines() if line.startswith("| `")}
    assert listed == {path.name for path in EXAMPLE.iterdir()} - {"README.md", "CMakeLists.txt"}


def test_nvcc_compiles_it(tmp_path):
    """Kernels and host part, against CUDA itself; nothing is run."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    sources = EXAMPLE / "device.c", EXAMPLE / "kernels.cu", CONTRACT / "burst_device.c"
    options = "-shared", "-arch=sm_90", "-Werror", "all-warnings", "-Xcompiler", "-fPIC,-Wall,-Wextra,-Werror"
    target = tmp_path / "libdevice.so"
    done = subprocess.run(
        [nvcc, *options, "-I", CONTRACT, *sources, "-o", target], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    words = subprocess.run(["nm", "--dynamic", target], check=True, capture_output=True, text=True).stdout
    assert " T burst_device_get" in words
    assert " U cuMemImportFromShareableHandle" in words
