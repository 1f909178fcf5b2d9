"""Runs .pt2 files, which `torch.export.save` writes, with PyTorch on the CPU. It has no operation of the HAL."""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from driver.devices.file_device import FileDevice, FileExecution, FileModel, FilePort, check_ports
from driver.devices.lowering.errors import LibraryFailed, in_words
from driver.devices.stoppable import Attempt
from driver.errors import DriverError
from driver.formats.pt2_archive import Pt2Archive
from driver.interface import Needs
from driver.nn import InvalidModel
from driver.plugins import version_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from driver.devices.file_device import Inputs, Outputs, Shape
    from driver.formats.pt2_archive import Pt2Tensor
    from driver.interface import Preparation
    from driver.nn import Model
    from driver.nn.file_form import ModelFile


_RETURN_ARGUMENTS = {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "atleast_1d", "atleast_2d"}
_RETURN_ARGUMENTS |= {"atleast_3d", "type_as", "einsum", "pad", "broadcast_tensors", "meshgrid", "sum_to_size"}
_RETURN_ARGUMENTS |= {"unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes", "_unsafe_view", "cartesian_prod"}
_RETURN_ARGUMENTS |= {"chain_matmul", "flatten_dense_tensors", "unflatten_dense_tensors"}
_RETURN_ARGUMENTS |= {"lift", "conj_physical", "to_dense", "_to_cpu", "_cast_Byte", "_cast_Char", "_cast_Short"}
_RETURN_ARGUMENTS |= {"_cast_Int", "_cast_Long", "_cast_Half", "_cast_Float", "_cast_Double"}
"""Operators that may return what they were given, or a view of it, and do not say so."""


@cache
def torch_module() -> Any:
    """PyTorch's module, on half of the processors: clients need some, too."""
    torch = import_module("torch")
    import_module("torch.export")
    import_module("torch.export.passes")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # inputs are only read
    return torch


class TorchDevice(FileDevice):
    """Runs programs that PyTorch has exported."""

    name, version, type = "torch", f"1 (PyTorch {version_of('torch')})", "CPU"
    library, file_kinds = "torch", ("pt2",)
    needs = Needs(
        read_paths=("/sys/devices", "/sys/kernel/mm", "/proc/cpuinfo", "/proc/meminfo"),
        write_paths=("/tmp",),
    )

    def __init__(self) -> None:
        """Load PyTorch, before a trial of a file is forked. It is configured for the whole process: its threads."""
        torch_module()

    def file_model(self, model: Model, file: ModelFile, preparation: Preparation) -> TorchModel:
        """Load a file. Raise InvalidModel for one that would run code of its own, LibraryFailed."""
        archive = Pt2Archive(file.data.data)
        inputs, outputs = ([*map(_port, side)] for side in (archive.inputs, archive.outputs))
        check_ports(model, inputs, outputs)
        try:
            program = torch_module().export.load(archive.cleaned())
            _refuse_writes(program)
            return self.model_of(model, program, inputs, outputs)
        except DriverError:
            raise
        except Exception as error:  # of any kind: PyTorch believes a file, in Python
            raise LibraryFailed(f"PyTorch rejected the file: {type(error).__name__}: {in_words(error)}") from error

    def model_of(
        self, model: Model, program: Any, inputs: Sequence[FilePort], outputs: Sequence[FilePort]
    ) -> TorchModel:
        """Return a program that was loaded, ready to run. Raise InvalidModel, and what PyTorch raises."""
        return TorchModel(model, program, inputs, outputs)


def _refuse_writes(program: Any) -> None:
    """Raise InvalidModel if an operator may write to an input, a weight or a buffer, which others read, too."""
    torch = torch_module()
    for module in program.graph_module.modules():
        kept = set[Any]()  # values that may lie in such memory
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            operator = node.target
            if not isinstance(operator, torch._ops.OpOverload):
                if node.op != "output" and (not node.all_input_nodes or kept.intersection(node.all_input_nodes)):
                    kept.add(node)  # a placeholder, an element of a list, a branch
                continue
            if written := kept.intersection(_lent(node, is_written=True)):
                names = ", ".join(sorted(each.name for each in written))
                raise InvalidModel(f"{operator} would write to {names:.80}; export a function that changes no argument")
            if kept.intersection(_lent(node, is_written=False)):
                kept.add(node)


def _lent(node: Any, *, is_written: bool) -> list[Any]:
    """Return the values that an operator writes to; or those of which it may return views."""
    operator, found = node.target, list[Any]()
    schema = operator._schema
    if not is_written:
        if operator.name().removeprefix("aten::").partition(".")[0] in _RETURN_ARGUMENTS:
            return list(node.all_input_nodes)
        if not any(returned.alias_info for returned in schema.returns):
            return []
    given = [*zip(schema.arguments, node.args, strict=False)]
    given += [(argument, node.kwargs.get(argument.name)) for argument in schema.arguments]
    for argument, value in given:
        if argument.alias_info and argument.alias_info.is_write >= is_written:
            torch_module().fx.node.map_arg(value, found.append)
    return found


def _port(tensor: Pt2Tensor) -> FilePort:
    pairs = zip(tensor.shape, tensor.symbols, strict=True)
    return FilePort(tensor.name, tensor.dtype, tuple(None if symbol else size for size, symbol in pairs))


class TorchModel(FileModel):
    """A program. Any number of executions run in parallel."""

    serves_all = True

    def __init__(self, model: Model, program: Any, inputs: Sequence[FilePort], outputs: Sequence[FilePort]) -> None:
        super().__init__(model, inputs, outputs)
        self.is_written = [False] * len(outputs)  # PyTorch allocates what it returns
        self._module, self._spec = program.module(), program.call_spec.in_spec
        self._trees = torch_module().utils._pytree

    def __call__(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the outputs. Raise what PyTorch raises."""
        positional, named = self._trees.tree_unflatten(tensors, self._spec)
        with torch_module().inference_mode():
            found: list[Any] = self._trees.tree_leaves(self._module(*positional, **named))
        return found

    def execution(self, inputs: Inputs, outputs: Outputs) -> TorchExecution:
        return TorchExecution(self, inputs, outputs)


class TorchExecution(FileExecution):
    """A call of a program. It reads inputs where they lie."""

    def __init__(self, model: TorchModel, inputs: Inputs, outputs: Outputs) -> None:
        super().__init__(model, inputs, outputs)
        rows = zip(model.inputs, self.sources, strict=True)
        self._tensors = [_tensor(port, shape, memory) for port, (shape, memory) in rows]
        self._call, self._results = model, list[Any]()

    def begin(self) -> Attempt:
        return Attempt(self._run_once, bool)  # PyTorch cannot be stopped

    def _run_once(self) -> str | None:
        try:
            self._results = self._call(self._tensors)
        except Exception as error:  # noqa: BLE001 (as above)
            return in_words(error)
        return None

    def result(self, number: int) -> tuple[Shape, NDArray[np.uint8]]:
        torch, tensor = torch_module(), self._results[number].contiguous()
        raw: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
        return tuple(tensor.shape), raw


def _tensor(port: FilePort, shape: Shape, memory: NDArray[np.uint8]) -> Any:
    """Return the memory as a tensor of PyTorch."""
    torch = torch_module()
    return torch.from_numpy(memory.view(port.stored)).view(getattr(torch, port.dtype)).reshape(shape)
