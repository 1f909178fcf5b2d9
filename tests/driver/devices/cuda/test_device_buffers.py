"""Buffers of a device in memory of a GPU: the device is burst_test_devices.gpu, on the tests' libcuda.so.1."""

import os
import subprocess

import numpy as np
import pytest
from fake_cuda import Call, Word

import driver
from burst import GeneralFailure, Request, RequestArgument, ResourceExhaustedTransient
from driver import BufferDesc, BufferRole
from driver.devices.cuda.device_buffers import uuid_fields
from driver.monitor import Watcher

GPU = "burst_test_devices.gpu:CudaAdd"
X = np.arange(1, 5, dtype=np.float32).reshape(1, 4)
STATE = [BufferRole(0, 0)], [BufferRole(0, 0)]


def adding(value=1.0, shape=(1, 4)):
    """x + value."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", shape)
    builder.output(builder.operation("ADD", x, np.full(1, value, np.float32), 0))
    return builder.build()


@pytest.fixture
def prepared(gpu):
    with driver.connect(GPU) as device, device.prepare(adding()) as found:
        yield found


def state_of(prepared, value=X):
    found = prepared.device.allocate(BufferDesc(), [prepared], *STATE)
    if value is not None:
        found.copy_from(value)
    return found


def value_of(buffer, shape=(1, 4)):
    buffer.copy_to(found := np.empty(shape, np.float32))
    return found.tolist()


def step(source, target):
    return Request((RequestArgument(),), (RequestArgument(pool=1),), (source, target))


class TestState:
    """Values that stay on the GPU."""

    @pytest.mark.parametrize("way", ["plain", "burst"])
    def test_a_state_never_leaves_the_gpu(self, prepared, gpu, way):
        """Fifty steps from one buffer to the other and back: fifty kernels, and no copy in or out; the CPU cannot have
        touched the values, which lie where it ends by a signal.
        """
        a, b = state_of(prepared), state_of(prepared, None)
        with prepared.burst() as burst:
            execute = burst.execute if way == "burst" else prepared.execute
            before = gpu[Word.COPIES_IN], gpu[Word.COPIES_OUT], gpu[Word.KERNELS]
            for _ in range(25):
                assert execute(step(a, b)).status == 0
                assert execute(step(b, a)).status == 0
            after = gpu[Word.COPIES_IN], gpu[Word.COPIES_OUT], gpu[Word.KERNELS]
            assert burst.stats()["copied_bytes"]["bulk"] == 0
        assert (after[0] - before[0], after[1] - before[1], after[2] - before[2]) == (0, 0, 50)
        assert value_of(a) == (X + 50).tolist()

    def test_a_frame_and_a_state(self, prepared, gpu):
        """The input in the client's memory, the output in a buffer: one copy in, none out."""
        state = state_of(prepared, None)
        pool = driver.Memory.create(64)
        pool.asarray(np.float32, 4)[:] = X
        before = gpu[Word.COPIES_IN], gpu[Word.COPIES_OUT]
        request = Request((RequestArgument(length=16),), (RequestArgument(pool=1),), (pool, state))
        assert prepared.execute(request).status == 0
        assert (gpu[Word.COPIES_IN] - before[0], gpu[Word.COPIES_OUT] - before[1]) == (1, 0)
        assert value_of(state) == (X + 1).tolist()

    def test_a_value_goes_from_one_buffer_to_another_on_the_gpu(self, prepared, gpu):
        """`copy_from` of another buffer is a copy within the GPU."""
        a, b = state_of(prepared), state_of(prepared, None)
        before = gpu[Word.COPIES_IN], gpu[Word.COPIES_OUT]
        b.copy_from(a)
        assert (gpu[Word.COPIES_IN], gpu[Word.COPIES_OUT]) == before
        assert value_of(b) == X.tolist()

    def test_a_new_buffer_has_no_value(self, prepared):
        """Neither a request nor a client reads what another client has left there."""
        a, b = state_of(prepared, None), state_of(prepared, None)
        assert prepared.execute(step(a, b)).status == GeneralFailure.status
        with pytest.raises(GeneralFailure, match="has no value"):
            value_of(a)

    def test_a_failed_copy_leaves_no_value(self, prepared, gpu):
        """An error of CUDA's is the client's answer, with CUDA's words; the buffer can be written again."""
        a = state_of(prepared)
        gpu.fail(Call.COPY_IN, 1)
        with pytest.raises(GeneralFailure, match="CUDA_ERROR_INVALID_VALUE"):
            a.copy_from(X)
        with pytest.raises(GeneralFailure, match="has no value"):
            value_of(a)
        a.copy_from(X)
        assert value_of(a) == X.tolist()


class TestQuota:
    """What accounts may hold of a GPU's memory."""

    def test_the_ledger_counts_it(self, prepared, kit):
        """As gpu_bytes of the account, until the buffer is released."""
        state = state_of(prepared)

        def held():
            return accounts().get("gpu_bytes", 0)

        assert held() == 16
        state.close()
        kit.until(lambda: held() == 0)

    def test_an_account_has_a_limit(self, gpu, place, monkeypatch, tmp_path):
        """Beyond it a client is refused, with the figure and the file to raise it in."""
        monkeypatch.setenv("HOME", str(tmp_path))
        gpu.configure()
        options = tmp_path / ".config/burst/limits.toml"
        options.parent.mkdir(parents=True, exist_ok=True)
        options.write_text("account_gpu_bytes = 100\napplication_percent = 100\n")
        with driver.connect(GPU) as device, device.prepare(adding(shape=(1, 20))) as prepared:
            first = state_of(prepared, None)
            with pytest.raises(
                ResourceExhaustedTransient, match=r"gpu_nbytes=80: .*account_gpu_bytes = 100 .*80 bytes"
            ):
                state_of(prepared, None)
            first.close()
            state_of(prepared, None)
        assert gpu.used <= 160

    def test_bound_requests_count_too(self, gpu, place, monkeypatch, tmp_path, kit):
        """What requests have on the GPU counts as their account's: at the limit the bound ones make room for a new one,
        and one that is too large is refused, with the remedy. It is given back with the burst.
        """
        monkeypatch.setenv("HOME", str(tmp_path))
        gpu.configure()
        options = tmp_path / ".config/burst/limits.toml"
        options.parent.mkdir(parents=True, exist_ok=True)
        options.write_text("account_gpu_bytes = 100\napplication_percent = 100\n")
        pool = driver.Memory.create(4096)
        parts = [RequestArgument(offset=64 * n, length=16) for n in range(32)]
        requests = [Request((a,), (b,), (pool,)) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        with driver.connect(GPU) as device, device.prepare(adding()) as prepared:
            with prepared.burst() as burst:
                for request in requests[:3]:
                    assert burst.execute(request).status == 0
                assert accounts()["gpu_bytes"] == 96
                for request in requests:
                    assert burst.execute(request).status == 0
                    assert gpu.used <= 100
                with (
                    device.prepare(adding(shape=(1, 20))) as large,
                    pytest.raises(ResourceExhaustedTransient, match=r"account_gpu_bytes = 100 .*different requests"),
                ):
                    large.run(np.zeros((1, 20), np.float32))
            kit.until(lambda: not accounts().get("gpu_bytes", 0))
        assert not gpu.used

    def test_a_full_gpu_refuses(self, prepared, gpu):
        """With what is free, what is asked for, and what to do; what was there before stays."""
        state = state_of(prepared)
        gpu[Word.TOTAL] = gpu.used
        with pytest.raises(ResourceExhaustedTransient, match=r"the GPU has 0 of \d+ bytes free, and 16 are asked for"):
            state_of(prepared)
        assert value_of(state) == X.tolist()


class TestDeaths:
    """Memory of the GPU is free again, whoever ends, and however."""

    def test_a_killed_client(self, gpu, place, kit):
        """kill -9 of a client with buffers: the engine frees them."""
        program = (
            "import sys, numpy as np, driver\n"
            "m = driver.ModelBuilder(); x = m.input('float32', (1, 4))\n"
            "m.output(m.operation('ADD', x, np.ones(1, np.float32), 0))\n"
            "device = driver.connect(sys.argv[1]); prepared = device.prepare(m.build())\n"
            "roles = [driver.BufferRole(0, 0)]\n"
            "kept = [device.allocate(driver.BufferDesc(), [prepared], roles, roles) for _ in range(8)]\n"
            "print('ready', flush=True); sys.stdin.read()\n"
        )
        with driver.connect(GPU) as device, device.prepare(adding()) as prepared:
            state = state_of(prepared)
            used = gpu.used
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            with kit.python(program, GPU, **pipes) as process:
                assert process.stdout.readline() == "ready\n"
                assert gpu.used == used + 8 * 16
                process.kill()
            kit.until(lambda: gpu.used == used)
            assert value_of(state) == X.tolist()

    def test_a_killed_engine(self, prepared, gpu, kit):
        """kill -9 of the engine: the memory of its process is free, and the next one serves."""
        state = state_of(prepared)
        device = prepared.device
        os.kill(device.engine_pid, 9)
        kit.until(lambda: not gpu.used)
        with driver.connect(GPU) as again, again.prepare(adding(3)) as model:
            assert model.run(X)[0].tolist() == (X + 3).tolist()
        del state


def accounts():
    """What the engine's ledger has of this account, as `burst top --accounts` shows it."""
    (figures,) = Watcher([GPU], with_accounts=True).sample().devices
    rows = [row for row in figures.accounts if row.process == "engine" and row.application is None]
    return {name: holding.held for row in rows for name, holding in row.holdings.items()}


def test_the_uuid_is_two_numbers():
    """As a pool's fields carry it: 64 bits each, with a sign."""
    assert uuid_fields("GPU-f0000000-0000-0000-0000-000000000001") == (-(1 << 60), 1)
