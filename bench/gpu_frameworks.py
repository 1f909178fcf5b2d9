"""Checks of gpu.py on files of frameworks: PyTorch's and JAX's, on the GPU, else on the CPU, else played."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from framework_nets import jax_net, module_of, own_runtime_of, torch_net
from gpu_rows import MOST_ADDED, TESTS, Added, Row, attempted, connected, usable

import driver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from gpu import Bench
    from numpy.typing import NDArray

PLAYED = "burst_test_devices.frameworks:Played{}Cuda"
INCREMENT = TESTS / "driver/importers/pt2_files/increment.pt2"


def torch(bench: Bench) -> Iterator[Row]:
    """A residual net, beside PyTorch in process."""
    yield from _beside(bench, "torch", partial(torch_net, pixels=64 if bench.is_quick else 224), _torch_on_gpu)


def jax(bench: Bench) -> Iterator[Row]:
    """A perceptron, beside JAX in process."""
    hidden = 32 if bench.is_quick else 2048
    yield from _beside(bench, "jax", partial(jax_net, hidden=hidden, platforms=("cpu", "cuda")), own_runtime_of)


def played(bench: Bench) -> Iterator[Row]:
    """The devices `torch-cuda` and `jax-cuda` with frameworks that are played, on tests' libcuda.so.1."""
    for name in ("Torch", "Jax"):
        yield attempted("played", name, partial(_played, bench, name))


def _played(bench: Bench, name: str) -> tuple[Any, ...]:
    path = INCREMENT
    if name == "Jax":
        framework, path = module_of("jax"), bench.folder / "increment.jax"
        function = framework.export.export(framework.jit(lambda x: x + 1), platforms=("cuda",))
        path.write_bytes(function(framework.ShapeDtypeStruct((4,), np.float32)).serialize())
    x = np.arange(4, dtype=np.float32)
    with connected(PLAYED.format(name)) as device, device.prepare(driver.load(path)) as model, model.burst() as burst:
        is_right = bool((burst.run(x).outputs[0] == x + 1).all())
    return "the device's part runs: streams, copies, answers", is_right


def _torch_on_gpu(path: Path, feeds: list[NDArray[Any]]) -> Callable[[], Any]:
    """The program on the GPU as a CUDA graph, its input copied there and its output back; on the CPU where there is no
    GPU.
    """
    framework = module_of("torch")
    if not framework.cuda.is_available():
        return own_runtime_of(path, feeds)
    framework.backends.cuda.matmul.allow_tf32 = framework.backends.cudnn.allow_tf32 = False
    __import__("torch.export.passes")
    moved = framework.export.passes.move_to_device_pass(framework.export.load(path), "cuda")
    module, pinned = moved.module(), framework.from_numpy(feeds[0]).pin_memory()
    with framework.inference_mode():
        given, graph = pinned.to("cuda"), framework.cuda.CUDAGraph()
        aside = framework.cuda.Stream()
        with framework.cuda.stream(aside):  # PyTorch asks for a run on another stream before it records one
            module(given)
        framework.cuda.current_stream().wait_stream(aside)
        with framework.cuda.graph(graph):
            found = module(given)

    def call() -> Any:
        with framework.inference_mode():
            given.copy_(pinned, non_blocking=True)
            graph.replay()
            return [found.cpu().numpy()]

    return call


def _beside(
    bench: Bench,
    name: str,
    write: Callable[[Path], list[NDArray[Any]]],
    own_of: Callable[[Path, list[NDArray[Any]]], Callable[[], Any]],
) -> Iterator[Row]:
    """One net, in process and through a burst, in turns."""
    device = usable(*([name] if bench.has_stand_ins else [f"{name}-cuda", name]))
    path = bench.folder / f"net.{'pt2' if name == 'torch' else 'jax'}"
    feeds = write(path)
    own = own_of(path, feeds)
    with connected(device) as there, there.prepare(driver.load(path)) as model, model.burst() as burst:
        for place, feed in zip(burst.inputs, feeds, strict=True):
            place[...] = feed
        worst = float(np.abs(burst.run().outputs[0] - own()[0]).max())
        if not worst <= 1e-3:
            raise RuntimeError(f"{device} differs from {name} in process by {worst:.1e}")
        found = Added.of(bench.in_turns(own, burst.run))
    is_kept = found.added.median <= MOST_ADDED if device.endswith("-cuda") else None
    yield Row(name, f"{path.name} on {device}", str(found), is_kept, found.figures)
