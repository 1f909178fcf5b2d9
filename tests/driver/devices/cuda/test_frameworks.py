"""The devices `torch-cuda` and `jax-cuda`, whose frameworks are played (burst_test_devices.frameworks); so is CUDA."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_cuda import Call, Word

import driver
from burst import Request, RequestArgument, ResourceExhaustedTransient
from driver import BufferDesc, BufferRole
from driver.devices import jax, jax_cuda, nvidia, torch, torch_cuda
from driver.devices.jax_cuda import JaxCudaDevice
from driver.devices.torch_cuda import TorchCudaDevice
from driver.monitor import Watcher

pytestmark = pytest.mark.integration
PT2 = Path(__file__).parents[2] / "importers/pt2_files/increment.pt2"
DEVICES = {name: f"burst_test_devices.frameworks:Played{name}Cuda" for name in ("Torch", "Jax")}
X = np.arange(4, dtype=np.float32)
ROLES = [BufferRole(0, 0)], [BufferRole(0, 0)]


def incrementing(name):
    """x + 1 of four floats, as a file for that framework."""
    if name == "Torch":
        return driver.load(PT2)
    its = pytest.importorskip("jax", reason="needs the extra 'jax'")
    from jax import export

    function = its.jit(lambda x: x + 1)
    return driver.load(export.export(function, platforms=["cuda"])(its.ShapeDtypeStruct((4,), np.float32)))


@pytest.fixture(params=DEVICES)
def prepared(gpu, request):
    model = incrementing(request.param)
    with driver.connect(DEVICES[request.param]) as device, device.prepare(model) as found:
        yield found


def copies(gpu):
    return gpu[Word.COPIES_IN], gpu[Word.COPIES_OUT]


def test_a_request_is_one_copy_in_and_one_out(prepared, gpu):
    """The framework computes on the GPU between them, and no thread copies on the CPU."""
    with prepared.burst() as burst:
        assert burst.run(X).outputs[0].tolist() == (X + 1).tolist()
        before, kernels = copies(gpu), gpu[Word.KERNELS]
        for n in range(3):
            assert burst.run(X + n).outputs[0].tolist() == (X + n + 1).tolist()
        assert copies(gpu) == (before[0] + 3, before[1] + 3)
        assert gpu[Word.KERNELS] == kernels + 2 * 3  # the stand-in counts the copy of the result, too
    assert gpu[Word.PAGEABLE] == 0


def test_requests_in_flight_keep_their_values(prepared):
    """Four at a time, each with an input of its own, by streams that wait for one another."""
    with prepared.burst(depth=4) as burst:
        futures = [burst.submit(X + n) for n in range(4)]
        for n in range(4, 40):
            assert futures.pop(0).result(30).outputs[0].tolist() == (X + n - 3).tolist()
            futures.append(burst.submit(X + n))


def test_a_state_stays_on_the_gpu_and_in_the_ledger(prepared, gpu):
    """Buffers of the device are read and written where they lie, and count as gpu_bytes of their account."""
    a, b = (prepared.device.allocate(BufferDesc(), [prepared], *ROLES) for _ in range(2))
    a.copy_from(X)
    with prepared.burst() as burst:
        before = copies(gpu)
        for source, target in ((a, b), (b, a)) * 5:
            request = Request((RequestArgument(),), (RequestArgument(pool=1),), (source, target))
            assert burst.execute(request).status == 0
        assert copies(gpu) == before
    a.copy_to(found := np.empty(4, np.float32))
    assert found.tolist() == (X + 10).tolist()
    (figures,) = Watcher(list(DEVICES.values()), with_accounts=True).sample().devices
    rows = [row for row in figures.accounts if row.process == "engine" and row.application is None]
    assert max(row.holdings["gpu_bytes"].held for row in rows) >= 2 * X.nbytes


def test_a_full_gpu_fails_the_request_alone(prepared, gpu):
    """In words of ours, and the next request is served."""
    with prepared.burst() as burst:
        burst.run(X)
        gpu.fail(Call.ALLOC, 2)
        with pytest.raises(ResourceExhaustedTransient, match="no memory left"):
            burst.run(X)
        assert burst.run(X).outputs[0].tolist() == (X + 1).tolist()


def test_a_lost_gpu_ends_the_engine(prepared, gpu):
    """A burst that recovers goes on with the next engine."""
    with prepared.burst(recover=True) as burst:
        burst.run(X)
        before = prepared.device.engine_pid
        gpu[Word.LOST] = 700
        with pytest.raises(Exception, match=r"."):
            burst.run(X, timeout=20)
        gpu[Word.LOST] = 0
        assert burst.run(X, timeout=60).outputs[0].tolist() == (X + 1).tolist()
        assert prepared.device.engine_pid != before


# ---- what the frameworks are told


def test_switches_of_pytorch(monkeypatch):
    """Deterministic kernels, no TF32 and no choice of kernels by their speed, as the options say."""
    from burst_test_devices.frameworks import PlayedTorch

    played = PlayedTorch()
    monkeypatch.setattr(torch_cuda, "torch_module", lambda: played)
    monkeypatch.setattr(torch, "torch_module", lambda: played)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    TorchCudaDevice()
    assert (played.said["deterministic"], played.backends.cuda.matmul.allow_tf32) == (False, False)
    TorchCudaDevice(deterministic=True, tf32=True)
    assert played.said["deterministic"] is True
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert played.backends.cudnn.allow_tf32 is played.backends.cuda.matmul.allow_tf32 is True
    assert played.backends.cudnn.benchmark is False
    assert [TorchCudaDevice(**given).chosen["graphs"] for given in ({}, {"graphs": False})] == [True, False]
    with pytest.raises(ValueError, match="nhwc = True is no option of torch-cuda"):
        TorchCudaDevice(nhwc=True)


def test_switches_of_jax(monkeypatch):
    """Memory is taken as it is needed, deterministic kernels are asked for, and other GPUs are left alone."""
    told = {}
    module = SimpleNamespace(config=SimpleNamespace(update=told.__setitem__))
    monkeypatch.setattr(jax_cuda, "jax_module", lambda platform: module)
    monkeypatch.setattr(jax, "jax_module", lambda platform: module)
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_FLAGS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    JaxCudaDevice(device=1, deterministic=True, memory_percent=30)
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.3"
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_deterministic_ops=true"
    assert told["jax_cuda_visible_devices"] == "1"
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=here")
    JaxCudaDevice(graphs=False)
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to=here --xla_gpu_enable_command_buffer="


@pytest.mark.parametrize("kind", [TorchCudaDevice, JaxCudaDevice])
def test_what_is_missing_is_named(kind, monkeypatch):
    """The framework, its build for CUDA, or the GPU: one after the other, each with what installs it."""
    monkeypatch.setattr(kind, "library", "no_such_module")
    assert kind.missing() == "the module no_such_module is not installed"
    monkeypatch.setattr(kind, "library", None)
    monkeypatch.setattr(nvidia, "NODES", ("/dev/no-such-gpu",))
    for module, versions in (
        (torch_cuda, {"torch": "2.13.0+cpu"}),
        (jax_cuda, {}),
    ):
        monkeypatch.setattr(module, "version_of", lambda name, known=versions: known.get(name, "none"))
    assert "its build for the CPU" in kind.missing() or "jax-cuda13-plugin" in kind.missing()
    for module in (torch_cuda, jax_cuda):
        monkeypatch.setattr(module, "version_of", lambda name: "2.13.0")
    assert kind.missing() == "there is no NVIDIA GPU: none of /dev/no-such-gpu exists"
    assert "NVIDIA's driver" in kind.remedy()
