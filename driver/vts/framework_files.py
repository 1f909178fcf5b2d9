"""Small files of JAX's and PyTorch's, which these write: a test that needs one is skipped where it is missing."""

from __future__ import annotations

import io
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from burst_engine.names import install_command
from driver.vts.kit import skip

if TYPE_CHECKING:
    from driver.vts.file_models import Network

_SIZE = 5
"""An example of a size that is open."""


def _framework(name: str, kind: str) -> Any:
    try:
        import_module(f"{name}.export")
        return import_module(name)
    except ImportError as error:
        skip(f".{kind} files are written by {name}: {install_command(name)} ({error})")


@lru_cache(16)
def jax_file(network: Network) -> bytes:
    """Return the bytes of a .jax file, for the CPU and for CUDA. Skip the test where JAX is not installed."""
    jax = _framework("jax", "jax")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    scope, structs = jax.export.SymbolicScope(), list[Any]()
    for port in network.inputs:
        words = ",".join(f"size{axis}" if size is None else str(size) for axis, size in enumerate(port.shape))
        structs.append(jax.ShapeDtypeStruct(jax.export.symbolic_shape(words, scope=scope), port.dtype))
    kinds = {"NEG": jax.numpy.negative, "NOT": jax.numpy.logical_not, "SUB": jax.numpy.subtract}
    function = _steps(network, kinds | {"PRODUCT": jax.numpy.matmul})
    return bytes(jax.export.export(jax.jit(function), platforms=("cpu", "cuda"))(*structs).serialize())


@lru_cache(16)
def pt2_file(network: Network) -> bytes:
    """Return the bytes of a .pt2 file. Skip the test where PyTorch is not installed."""
    torch = _framework("torch", "pt2")
    kinds = {"NEG": torch.neg, "NOT": torch.logical_not, "SUB": torch.sub, "PRODUCT": torch.matmul}
    function = _steps(network, kinds)

    class Steps(torch.nn.Module):  # type: ignore[misc, name-defined]
        """The network."""

        def forward(self, *given: Any) -> Any:
            return function(*given)

    examples, sizes = list[Any](), list[Any]()
    for port in network.inputs:
        shape = [_SIZE if size is None else size for size in port.shape]
        examples.append(torch.zeros(shape, dtype=getattr(torch, port.dtype)))
        sizes.append({axis: torch.export.Dim(f"size{axis}") for axis, size in enumerate(port.shape) if size is None})
    made = io.BytesIO()
    torch.export.save(torch.export.export(Steps(), tuple(examples), dynamic_shapes=(tuple(sizes),)), made)
    return made.getvalue()


def _steps(network: Network, kinds: dict[str, Any]) -> Any:
    """Return the network as a function of a framework's arrays."""

    def function(*given: Any) -> Any:
        known = dict(zip((port.name for port in network.inputs), given, strict=True))
        for step in network.steps:
            known[step.output] = kinds[step.kind](*(known[name] for name in step.inputs))
        return tuple(known[port.name] for port in network.outputs)

    return function
