"""Functions that a framework has exported in this process, as the file that the framework would write of them."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from burst.memory import Memory
from driver.errors import ImportFailed

if TYPE_CHECKING:
    from driver.formats.file_bytes import Array


class ExportedFile(NamedTuple):
    """The file of an exported function, in memory that no process can write."""

    name: str
    kind: str
    data: Array


def exported_file(program: object) -> ExportedFile | None:
    """Return the file of a `jax.export.Exported` or a `torch.export.ExportedProgram`; None for anything else, such as a
    path.

    Raise ImportFailed for one that its framework cannot write, and for a module of PyTorch that is not exported;
    ResourceExhaustedPersistent.
    """
    jax: Any = sys.modules.get("jax.export")
    if jax is not None and isinstance(program, jax.Exported):
        return _of_jax(program)
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(program, torch.nn.Module):
        remedy = "load torch.export.export(module, (example,)), which knows its inputs"
        raise ImportFailed(f"a module of PyTorch, {type(program).__name__}, is not exported", remedy=remedy)
    if torch is not None and "torch.export" in sys.modules and isinstance(program, torch.export.ExportedProgram):
        return _of_torch(torch, program)
    return None


def _of_jax(exported: Any) -> ExportedFile:
    try:
        data = bytes(exported.serialize())
    except (ValueError, NotImplementedError) as error:
        raise ImportFailed(f"JAX cannot serialise {exported.fun_name!r:.80}: {error}") from error
    return ExportedFile(exported.fun_name, "jax", _frozen(data))


def _of_torch(torch: Any, program: Any) -> ExportedFile:
    made = io.BytesIO()
    torch.export.save(program, made)
    return ExportedFile("program", "pt2", _frozen(made.getvalue()))


def _frozen(data: bytes) -> Array:
    def fill(room: Array) -> None:
        room.data[:] = data

    return Memory.frozen_by(len(data), fill).asarray()
