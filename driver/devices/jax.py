"""Runs .jax files, which `jax.export` makes, with JAX on the CPU. It has no operation of the HAL."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from driver.devices.file_device import FileDevice, FileExecution, FileModel, FilePort, check_ports
from driver.devices.lowering.errors import LibraryFailed, in_words
from driver.devices.stoppable import Attempt
from driver.errors import DriverError
from driver.interface import Needs
from driver.nn import InvalidModel
from driver.plugins import version_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from driver.devices.file_device import Inputs, Outputs, Shape
    from driver.interface import Preparation
    from driver.nn import Model
    from driver.nn.file_form import ModelFile


@cache
def jax_module(platform: str = "cpu") -> Any:
    """JAX's module. It takes 64-bit types as they are, and looks for no accelerator but that of `platform`."""
    jax = import_module("jax")
    import_module("jax.export")
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_platforms", platform)
    return jax


class JaxDevice(FileDevice):
    """Runs functions that JAX has exported."""

    name, version, type = "jax", f"1 (JAX {version_of('jax')})", "CPU"
    library, file_kinds, platform = "jax", ("jax",), "cpu"
    needs = Needs(read_paths=("/sys/devices", "/sys/fs/cgroup", "/sys/kernel/mm", "/proc/cpuinfo", "/proc/meminfo"))

    def __init__(self) -> None:
        """Load JAX, and start none of its threads: each trial of a file is a fork of this process. It is configured for
        the whole process: 64-bit types are on, and the CPU is the only platform.
        """
        jax_module(self.platform)

    def file_model(self, model: Model, file: ModelFile, preparation: Preparation) -> JaxModel:
        """Compile a file for inputs of the sizes that `model` says. Raise InvalidModel, LibraryFailed."""
        try:
            return self.model_of(model, _exported(file, self.platform))
        except DriverError:
            raise
        except Exception as error:  # of any kind: JAX believes a file, in Python
            raise LibraryFailed(f"JAX rejected the file: {type(error).__name__}: {in_words(error)}") from error

    def model_of(self, model: Model, exported: Any) -> JaxModel:
        """Return a function that was loaded, ready to run. Raise InvalidModel, and what JAX raises."""
        return JaxModel(model, exported)


def _exported(file: ModelFile, platform: str) -> Any:
    """Return the function. Raise InvalidModel for one that was exported for other processors or several devices, or
    that calls into Python; what JAX raises.
    """
    exported = jax_module(platform).export.deserialize(bytearray(file.data))
    if platform not in exported.platforms:
        raise InvalidModel(
            f"the function was exported for {', '.join(exported.platforms)}; export it with platforms=['{platform}']"
        )
    if exported.nr_devices != 1:
        raise InvalidModel(f"the function was exported for {exported.nr_devices} devices; export it for one")
    _refuse_callbacks(exported.mlir_module_serialized)
    return exported


def _refuse_callbacks(module: bytes) -> None:
    """Raise InvalidModel for calls of XLA into Python. They take a number of the file for an object in memory.

    JAX exports none of them. XLA has no name for other functions of the process, except for those of LAPACK.
    """
    dialect, ir = import_module("jaxlib.mlir.dialects.stablehlo"), import_module("jaxlib.mlir.ir")
    context, found = import_module("jax.interpreters.mlir").make_ir_context(), list[str]()

    def look(operation: Any) -> Any:
        if "call_target_name" in operation.attributes:
            found.append(operation.attributes["call_target_name"].value)
        return ir.WalkResult.ADVANCE

    dialect.deserialize_portable_artifact(context, module).operation.walk(look)
    if calls := [name for name in found if "callback" in name]:
        raise InvalidModel(f"the function calls into Python, by {calls[0]!r:.80}; export it without callbacks")


def _ports(word: str, types: Sequence[Any]) -> list[FilePort]:
    known = [tuple(size if isinstance(size, int) else None for size in each.shape) for each in types]
    return [FilePort(f"{word}{n}", each.dtype.name, known[n]) for n, each in enumerate(types)]


class JaxModel(FileModel):
    """A function, compiled if the sizes of its inputs are known; else each run with new sizes compiles it for them."""

    serves_all = True
    platform = "cpu"
    bools: np.dtype[Any] = np.dtype(np.bool_)  #: the type in which inputs of bools are given

    def __init__(self, model: Model, exported: Any) -> None:
        """Check the types, and compile. Raise InvalidModel, and what JAX raises."""
        jax, avals = jax_module(self.platform), exported.in_avals

        def leaves(*given: Any) -> list[Any]:
            typed = [x if x.dtype == its.dtype else x.astype(its.dtype) for x, its in zip(given, avals, strict=True)]
            positional, named = jax.tree.unflatten(exported.in_tree, typed)
            found: list[Any] = jax.tree.leaves(exported.call(*positional, **named))
            return found

        inputs, types = _ports("input ", avals), exported.out_avals
        check_ports(model, inputs, _ports("output ", types))
        self.run: Any = jax.jit(leaves)
        self.dtypes = [self.bools if its.dtype == np.bool_ else its.dtype for its in avals]
        shapes = [port.shape_in(model.main.operands[i]) for port, i in zip(inputs, model.main.inputs, strict=True)]
        if None not in shapes:
            pairs = zip(shapes, self.dtypes, strict=True)
            lowered = self.run.lower(*(jax.ShapeDtypeStruct(*pair) for pair in pairs))
            self.run, types = lowered.compile(), lowered.out_info
        super().__init__(model, inputs, _ports("output ", types))
        self.is_written = [False] * len(self.outputs)  # JAX allocates what it returns

    def execution(self, inputs: Inputs, outputs: Outputs) -> JaxExecution:
        return JaxExecution(self, inputs, outputs)


class JaxExecution(FileExecution):
    """A call of a function. It reads aligned inputs where they lie."""

    def __init__(self, model: JaxModel, inputs: Inputs, outputs: Outputs) -> None:
        super().__init__(model, inputs, outputs)
        pairs = zip(self.sources, model.dtypes, strict=True)
        self._arguments = [memory.view(dtype).reshape(shape) for (shape, memory), dtype in pairs]
        self._call = model.run
        self._results: list[NDArray[Any]] = []

    def begin(self) -> Attempt:
        return Attempt(self._run_once, bool)  # XLA cannot be stopped

    def _run_once(self) -> str | None:
        try:
            self._results = [np.asarray(result) for result in self._call(*self._arguments)]
        except Exception as error:  # noqa: BLE001 (as above)
            return in_words(error)
        return None

    def result(self, number: int) -> tuple[Shape, NDArray[np.uint8]]:
        found = self._results[number]
        return found.shape, found.reshape(-1).view(np.uint8)
