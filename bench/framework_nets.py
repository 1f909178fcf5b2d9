"""The files that frameworks.py and gpu.py run: a convolutional net of PyTorch's, and a perceptron of JAX's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from measure import NotMeasured

from driver.cli.own_runtime import own_runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

WIDTHS, CLASSES = (32, 64, 128, 256), 1000
LAYERS, HIDDEN, ROWS = 6, 512, 16


def module_of(name: str) -> Any:
    """A framework. Raises NotMeasured where it is not installed."""
    import importlib

    try:
        importlib.import_module(f"{name}.export")
        return importlib.import_module(name)
    except ImportError as error:
        raise NotMeasured(f"{name} is not installed: {error}") from error


def torch_net(path: Path, pixels: int) -> list[NDArray[Any]]:
    """Write a residual net as torchvision has them, made here: torchvision is not needed. Return an input."""
    torch = module_of("torch")
    torch.manual_seed(3)
    nn = torch.nn

    class Block(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, before: int, after: int) -> None:
            super().__init__()
            self.first = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
            self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
            self.shortcut = nn.Conv2d(before, after, 1, stride=2, bias=False)
            self.norms = nn.ModuleList(nn.BatchNorm2d(after) for _ in range(3))

        def forward(self, x: Any) -> Any:
            found = torch.relu(self.norms[0](self.first(x)))
            return torch.relu(self.norms[1](self.second(found)) + self.norms[2](self.shortcut(x)))

    blocks = [Block(before, after) for before, after in zip((3, *WIDTHS), WIDTHS, strict=False)]
    pool = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTHS[-1], CLASSES)
    net = nn.Sequential(*blocks, *pool).eval()
    image = torch.rand(1, 3, pixels, pixels)
    torch.export.save(torch.export.export(net, (image,)), path)
    return [image.numpy()]


def jax_net(path: Path, hidden: int, platforms: Sequence[str] = ("cpu",)) -> list[NDArray[Any]]:
    """Write a perceptron of six layers. Return an input."""
    jax, random = module_of("jax"), np.random.default_rng(3)
    scale = np.float32(1 / np.sqrt(hidden))
    weights = [random.standard_normal((hidden, hidden)).astype(np.float32) * scale for _ in range(LAYERS)]

    def function(x: Any) -> Any:
        for each in weights:
            x = jax.nn.relu(x @ each)
        return x

    x = random.random((ROWS, hidden)).astype(np.float32)
    exported = jax.export.export(jax.jit(function), platforms=platforms)(jax.ShapeDtypeStruct(x.shape, x.dtype))
    path.write_bytes(exported.serialize())
    return [x]


def own_runtime_of(path: Path, feeds: Sequence[NDArray[Any]]) -> Callable[[], list[NDArray[Any]]]:
    """The file in this process, in the framework that it was made for."""
    found = own_runtime(path, feeds)
    assert found is not None
    return lambda: [np.asarray(each) for each in found.call()]
