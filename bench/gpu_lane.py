"""Checks of gpu.py that need no runtime: a device whose kernel is in PTX, buffers, pools, and the driver in C."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from gpu_rows import MOST_SECONDS, TESTS, Row, attempted, connected
from measure import HERE, NotMeasured, seconds_in_flight

import driver
from burst import Request, RequestArgument

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gpu import Bench

    from driver import Model

LANE, ENDLESS, ADDING = "burst_test_devices.gpu:CudaAdd", "burst_test_devices.gpu:CudaEndless", "an addition"
WHOLE = 2 << 20  # bytes: what CUDA exports is a multiple of it
M, K, N = 64, 256, 128  # of matrices


def adding(n: int = 1024) -> Model:
    """x + 1."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (1, n))
    builder.output(builder.operation("ADD", x, np.ones(1, np.float32), 0))
    return builder.build()


def lane(bench: Bench) -> Iterator[Row]:
    """The lane of CUDA by itself: latency, requests in flight, a state, pools of the client, a dead engine."""
    n = WHOLE // 4
    with connected(LANE) as device, device.prepare(adding(n)) as model:
        attempts = {
            "2 MB through a burst": partial(_latency, bench, model, n),
            "4 requests in flight beside 1": partial(_in_flight, bench, model, n),
            "a state in buffers of the device": partial(_state, device, model, n),
            "pools of the client, in place": partial(_in_place, model, n),
            "pools of the client, by PyTorch": partial(_by_others, model, n, "torch"),
            "pools of the client, by CuPy": partial(_by_others, model, n, "cupy"),
            "more memory than there is": _full,
            "engine killed": partial(_killed, device, model, n),
        }
        for subject, attempt in attempts.items():
            yield attempted("lane", subject, attempt)
    yield attempted("lane", "a kernel that never ends", partial(_endless, bench))


def _latency(bench: Bench, model: Any, n: int) -> tuple[Any, ...]:
    with model.burst() as burst:
        x = np.arange(n, dtype=np.float32).reshape(1, n)
        _require((burst.run(x).outputs[0] == x + 1).all())
        us = 1e6 * bench.median(burst.run)
    return f"{us:.1f} us", None, {"us": us}


def _in_flight(bench: Bench, model: Any, n: int) -> tuple[Any, ...]:
    """Copies in and out of some requests beside those of others."""
    seconds = {}
    for depth in (1, 4):
        with model.burst(depth=depth) as burst:
            burst.run(np.zeros((1, n), np.float32))
            seconds[depth] = seconds_in_flight(burst, 8 if bench.is_quick else 400, depth)
    gain = seconds[1] / seconds[4]
    return f"{gain:.2f} x the rate", None, {"gain": gain, "alone_us": 1e6 * seconds[1]}


def _state(device: Any, model: Any, n: int) -> tuple[Any, ...]:
    roles = [driver.BufferRole(0, 0)], [driver.BufferRole(0, 0)]
    a, b = (device.allocate(driver.BufferDesc(), [model], *roles) for _ in range(2))
    a.copy_from(np.zeros((1, n), np.float32))
    begin = time.perf_counter()
    for source, target in ((a, b), (b, a)) * 10:
        request = Request((RequestArgument(),), (RequestArgument(pool=1),), (source, target))
        model.execute(request).raise_for_status()
    us = 1e6 * (time.perf_counter() - begin) / 20
    a.copy_to(found := np.empty((1, n), np.float32))
    _require((found == 20).all())
    return f"20 steps that never left the GPU, {us:.1f} us each", True, {"us": us}


def _pools() -> tuple[Any, Any]:
    from driver.devices.cuda.gpu_pool import GpuPool

    return GpuPool.allocate(WHOLE), GpuPool.allocate(WHOLE)


def _executed(model: Any, given: Any, found: Any, n: int) -> None:
    request = Request((RequestArgument(length=4 * n),), (RequestArgument(pool=1, length=4 * n),), (given, found))
    with model.burst() as burst:
        burst.execute(request).raise_for_status()
        _require(burst.stats()["copied_bytes"]["bulk"] == 0)


def _in_place(model: Any, n: int) -> tuple[Any, ...]:
    given, found = _pools()
    given.copy_from(x := np.arange(n, dtype=np.float32))
    _executed(model, given, found, n)
    found.copy_to(values := np.empty(n, np.float32))
    _require((values == x + 1).all())
    return "no byte was copied by the CPU", True


def _by_others(model: Any, n: int, name: str) -> tuple[Any, ...]:
    """A tensor of that library's is the pool: it writes the input and reads the output."""
    try:
        library = __import__(name)
    except ImportError as error:
        raise NotMeasured(str(error)) from error
    _require_cuda(library, name)
    given, found = _pools()
    x, y = (library.from_dlpack(pool.tensor("float32", (n,))) for pool in (given, found))
    x[...] = 3
    (library.cuda.synchronize if name == "torch" else library.cuda.Device().synchronize)()
    _executed(model, given, found, n)
    _require(bool((y == 4).all()))
    return f"{library.__version__} wrote the input and read the output", True


def _require_cuda(library: Any, name: str) -> None:
    try:
        has_gpu = library.cuda.is_available()
    except Exception as error:
        raise NotMeasured(f"{name}: {error}") from error
    if not has_gpu:
        raise NotMeasured(f"{name} {library.__version__} finds no GPU")


def _full() -> tuple[Any, ...]:
    from burst import ResourceExhaustedPersistent
    from driver.devices.cuda.gpu_pool import GpuPool

    try:
        GpuPool.allocate(1 << 46)
    except ResourceExhaustedPersistent as error:
        return str(error), True
    return "64 TB were given", False


def _killed(device: Any, model: Any, n: int) -> tuple[Any, ...]:
    found = np.zeros(1)
    with model.burst(recover=True) as burst:
        x = np.zeros((1, n), np.float32)
        burst.run(x)
        os.kill(device.engine_pid, signal.SIGKILL)
        begin = time.perf_counter()
        while time.perf_counter() < begin + 30:
            try:
                found = burst.run(x).outputs[0]
                break
            except Exception:  # noqa: BLE001 (what was in flight; it runs again)
                time.sleep(0.01)
        seconds = time.perf_counter() - begin
        _require((found == 1).all())
    return f"served again after {seconds:.2f} s", seconds <= MOST_SECONDS, {"seconds": seconds}


def _endless(bench: Bench) -> tuple[Any, ...]:
    if bench.has_stand_ins:
        raise NotMeasured("kernels of the stand-in end; tests hold them")
    with connected(ENDLESS) as device, device.prepare(adding(4)) as model, model.burst() as burst:
        begin = time.monotonic()
        try:
            burst.run(np.zeros((1, 4), np.float32), deadline=begin + 0.5, timeout=60)
        except Exception as error:  # noqa: BLE001 (of the deadline, or of the engine that has ended)
            seconds = time.monotonic() - begin
            return f"{type(error).__name__} after {seconds:.2f} s", seconds <= 5, {"seconds": seconds}
    return "it ended", False


def _require(condition: object) -> None:
    if not condition:
        raise RuntimeError("it computes something else")


# ---- the driver in C


def library(bench: Bench) -> Iterator[Row]:
    """examples/device-cuda: a product of matrices and an addition, from C; built by nvcc, or for a stand-in of CUDA."""
    path, how = _built(bench)
    with connected(str(path)) as device:
        yield attempted("library", f"a product of matrices, {how}", partial(_product, bench, device))
        yield attempted("library", f"pools of the client, in place, {how}", partial(_sum_in_place, device))


def _product(bench: Bench, device: Any) -> tuple[Any, ...]:
    random, builder = np.random.default_rng(3), driver.ModelBuilder()
    x, weights, bias = (random.random(shape).astype(np.float32) for shape in ((M, K), (N, K), (N,)))
    found = builder.operation("FULLY_CONNECTED", builder.input("float32", (M, K)), weights, bias, 0)
    builder.output(builder.operation("ADD", found, found, 0))
    with device.prepare(builder.build()) as model, model.burst() as burst:
        _require(np.allclose(burst.run(x).outputs[0], 2 * (x @ weights.T + bias), rtol=1e-4))
        us = 1e6 * bench.median(burst.run)
    return f"{us:.1f} us", None, {"us": us}


def _sum_in_place(device: Any) -> tuple[Any, ...]:
    n, builder = WHOLE // 4, driver.ModelBuilder()
    x = builder.input("float32", (n,))
    builder.output(builder.operation("ADD", x, x, 0))
    with device.prepare(builder.build()) as model:
        given, found = _pools()
        given.copy_from(values := np.arange(n, dtype=np.float32))
        _executed(model, given, found, n)
        found.copy_to(there := np.empty(n, np.float32))
        _require((there == 2 * values).all())
    return "no byte was copied by the CPU", True


def _built(bench: Bench) -> tuple[Path, str]:
    """The library, and how it was built. Raises NotMeasured."""
    example, contract = HERE.parent / "examples/device-cuda", HERE.parent / "driver/devices/library"
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None or bench.has_stand_ins:
        sys.path.append(str(TESTS))
        from cuda_example import built

        return built(bench.folder), "its host part on a stand-in"
    path = bench.folder / "libburst_cuda_example.so"
    sources = [example / "device.c", example / "kernels.cu", contract / "burst_device.c"]
    for driver_library in ("-lcuda", "-l:libcuda.so.1"):  # of the toolkit, or of the driver
        command = [nvcc, "-O2", "-shared", "-Xcompiler", "-fPIC", "-I", contract, *sources, driver_library, "-o", path]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not done.returncode:
            return path, "by nvcc"
    raise NotMeasured(f"nvcc does not compile it: {done.stderr[-300:]}")
