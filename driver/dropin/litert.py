"""LiteRT's interpreter with the model in a device: `from driver.dropin.litert import Interpreter`.

All names are those of `ai_edge_litert.interpreter`; under `burst exec` the same is done to `tflite_runtime.interpreter`
and to TensorFlow's. `Interpreter` is a subclass of the real one, which makes itself in this process as it always does,
and applies no delegate: so no weight is packed, or read. It allocates tensors, checks what is set, and tells details;
inputs and outputs are in its memory. `invoke` takes the inputs to a device, where the very same interpreter runs them,
with the same resolver and as many threads, and brings the outputs back.

The device keeps nothing between runs. Variables are here: tensors of the interpreter that is in this process, and, of
named variables, arrays. They go to the device with the inputs, and come back with the outputs (`EntryFile`), so they
belong to the interpreter, and a run that a device's death interrupts is repeated from the values before it.
"""

from __future__ import annotations

import importlib
import inspect
import os
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from driver.devices.litert.interpreted import PACKAGE, PACKAGES, RESOLVER, SWITCHES, THREADS
from driver.dropin.lite_runs import BETWEEN, LiteRuns, name_of
from driver.dropin.not_on_device import NotOnDevice
from driver.dropin.report import tally

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from numpy.typing import NDArray

_IN_PROCESS = {
    "experimental_delegates": ("it has delegates", "leave them out where the device is as fast"),
    "experimental_preserve_all_tensors": (BETWEEN, "leave the option out"),
    "experimental_force_delegate_node_profiling": ("the program profiles it", "leave the option out"),
}
"""Arguments with which an interpreter stays in the process, why, and the remedy."""
_RESOLVER = "experimental_op_resolver_type"
_BARE = "BUILTIN_WITHOUT_DEFAULT_DELEGATES"
"""The resolver with which an interpreter packs no weight."""


class InterpreterProxy:
    """Takes the place of the wrapper in C++ that an interpreter works with: its `Invoke` runs in a device.

    It has the wrapper's methods, by the wrapper's names; all that it does not change are the wrapper's own.
    """

    def __init__(self, real: Any, runs: LiteRuns) -> None:
        self._real, self._runs = real, runs
        self._own: Any = None  # a real interpreter, from when on it runs in this process
        self._allocated: set[int] = set()
        self._grown: dict[tuple[int, int], NDArray[Any]] = {}  # outputs whose sizes only a run knows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def _leave_for(self, index: int, number: int) -> None:
        """Run in this process from now on, if a program reads what a device does not bring back."""
        if self._own is not None or number not in self._allocated or not self._runs.is_between(index, number):
            return
        with suppress(NotOnDevice, RuntimeError, ValueError):  # then it is undefined, as the real one says
            self._own = self._runs.ran_here(self._real)
            self._real = self._own._interpreter
            self._grown.clear()

    def asked(self) -> Any:
        """Return a real interpreter as the program asked for it."""
        return self._runs.asked()

    @property
    def is_in_device(self) -> bool:
        """True if the first subgraph has its memory, and runs in a device."""
        return self._own is None and 0 in self._allocated

    def AllocateTensors(self, subgraph_index: int = -1) -> Any:  # noqa: N802
        """Do as the real one: inputs and outputs get their memory, in this process."""
        self._runs.forget_memory()
        found = self._real.AllocateTensors(subgraph_index)
        self._allocated.add(max(subgraph_index, 0))
        return found

    def ResizeInputTensor(self, index: int, size: Any, strict: bool, subgraph_index: int = 0) -> Any:  # noqa: N802
        """Do as the real one, after which an input of another size has no memory."""
        self._runs.forget_memory()
        before = self._real.TensorSize(index, subgraph_index)
        found = self._real.ResizeInputTensor(index, size, strict, subgraph_index)
        after = self._real.TensorSize(index, subgraph_index)
        if before.tolist() != after.tolist():
            self._allocated.discard(subgraph_index)
        return found

    def Invoke(self, subgraph_index: int = 0) -> Any:  # noqa: N802
        """Run a subgraph. Raise RuntimeError."""
        if self._own is not None:
            tally.count(self._runs.name, "process_runs")
        if self._own is not None or subgraph_index not in self._allocated:
            return self._real.Invoke(subgraph_index)  # which may say that it is not ready
        real, runs, grown = self._real, self._runs, self._grown
        del self  # an error keeps its frames for a while, and an interpreter counts references to this
        made = runs.run(real, subgraph_index)
        for key in [key for key in grown if key[0] == subgraph_index]:
            del grown[key]
        grown |= made
        return None

    def GetTensor(self, index: int, subgraph_index: int = 0) -> Any:  # noqa: N802
        """Return a copy of a tensor."""
        self._leave_for(index, subgraph_index)
        grown = self._grown.get((subgraph_index, index)) if self._grown else None
        return self._real.GetTensor(index, subgraph_index) if grown is None else grown.copy()

    def TensorSize(self, index: int, subgraph_index: int = 0) -> Any:  # noqa: N802
        """Return the sizes of a tensor, an array."""
        grown = self._grown.get((subgraph_index, index)) if self._grown else None
        return self._real.TensorSize(index, subgraph_index) if grown is None else np.array(grown.shape, np.int32)

    def TensorSizeSignature(self, index: int, subgraph_index: int = 0) -> Any:  # noqa: N802
        """Return the sizes of a tensor with -1 where the file leaves them open; its sizes where it says nothing."""
        told = self._real.TensorSizeSignature(index, subgraph_index)
        is_said = told.tolist() != self._real.TensorSize(index, subgraph_index).tolist()
        return told if is_said else self.TensorSize(index, subgraph_index)

    def tensor(self, base: Any, index: int, subgraph_index: int = 0) -> Any:
        """Return a view of a tensor's memory."""
        self._leave_for(index, subgraph_index)
        grown = self._grown.get((subgraph_index, index)) if self._grown else None
        return self._real.tensor(base, index, subgraph_index) if grown is None else grown


_made = set[type[Any]]()


@cache
def in_device(package: ModuleType, real: Any) -> type[Any]:
    """Return the interpreter of a package with its models in a device: a subclass of `real`, or that, if it is one."""
    if real in _made:
        return real  # type: ignore[no-any-return]
    parameters = inspect.signature(real.__init__)

    class DeviceInterpreter(real):  # type: ignore[misc]
        """An interpreter that makes itself as the real one does, and runs its model in a device."""

        _interpreter: Any
        _burst_exec: str  #: the name under which it is counted; a program's subclass has attributes of all other names

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given = partial(real, *args, **kwargs)
            try:
                arguments = parameters.bind(self, *args, **kwargs).arguments
            except TypeError:  # the real one says so
                self._burst_exec = "?"
                super().__init__(*args, **kwargs)
                return
            self._burst_exec = name_of(arguments.get("model_path") or arguments.get("model_content"))
            tally.count(self._burst_exec, "sessions")
            try:
                runs = _runs(package, given, arguments, is_changed=bool(getattr(self, "_custom_op_registerers", ())))
                super().__init__(**_bare(package, arguments))
                runs.check(self._interpreter)
                self._interpreter = InterpreterProxy(self._interpreter, runs)
            except NotOnDevice as error:
                tally.refuse(self._burst_exec, str(error), error.remedy)
                super().__init__(*given.args, **given.keywords)

        def invoke(self) -> None:
            """Run the model, in the device or in this process."""
            if not isinstance(self._interpreter, InterpreterProxy):
                tally.count(self._burst_exec, "process_runs")
            super().invoke()

        def get_tensor_details(self, *args: Any, **kwargs: Any) -> Any:
            """Return what the real one tells."""
            own = _witness(self)
            if own is None:
                return super().get_tensor_details(*args, **kwargs)
            made = {told["index"]: told for told in self.get_output_details()}
            return [made.get(told["index"], told) for told in own.get_tensor_details(*args, **kwargs)]

        def _get_ops_details(self) -> Any:
            own = _witness(self)
            return super()._get_ops_details() if own is None else own._get_ops_details()

    DeviceInterpreter.__name__ = DeviceInterpreter.__qualname__ = "Interpreter"
    DeviceInterpreter.__module__, DeviceInterpreter.__doc__ = real.__module__, real.__doc__
    _made.add(DeviceInterpreter)
    return DeviceInterpreter


def _runs(package: ModuleType, given: partial[Any], arguments: Mapping[str, Any], *, is_changed: bool) -> LiteRuns:
    """Return the runs of an interpreter. `given`: makes the real one; `arguments`: by name. Raise NotOnDevice."""
    for name, (reason, remedy) in _IN_PROCESS.items():
        if arguments.get(name):
            raise NotOnDevice(reason, remedy)
    if is_changed:
        raise NotOnDevice("it has custom operators of the program's own")
    path, content = arguments.get("model_path"), arguments.get("model_content")
    source = content if content else path
    if (path and content) or not isinstance(source, bytes | str | os.PathLike):
        raise NotOnDevice("it has no model, or one that is neither a path nor bytes")
    resolver, threads = arguments.get(_RESOLVER), arguments.get(THREADS)
    options: dict[str, Any] = {PACKAGE: package.__name__}
    if isinstance(resolver, package.OpResolverType):
        options[RESOLVER] = resolver.name
    if threads is not None:
        options[THREADS] = threads
    options |= {name: bool(arguments[name]) for name in SWITCHES if name in arguments}
    chosen = {name: value for name, value in arguments.items() if name.startswith("experimental") or name == THREADS}

    def make(data: bytes) -> Any:
        return given.func(model_content=data, **chosen)

    return LiteRuns(source if isinstance(source, bytes) else os.fspath(source), options, make)


def _bare(package: ModuleType, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an interpreter that applies no delegate. One of the reference kernels has none."""
    given = {name: value for name, value in arguments.items() if name != "self"}
    kinds = package.OpResolverType
    if given.get(_RESOLVER, kinds.AUTO) in {kinds.AUTO, kinds.BUILTIN}:
        given[_RESOLVER] = kinds[_BARE]
    return given


def _witness(interpreter: Any) -> Any:
    """Return a real interpreter of the same file, with tensors of the same sizes: delegates add some of their own.
    None: this one is as the real one would be.
    """
    proxy = interpreter._interpreter
    if not isinstance(proxy, InterpreterProxy) or not proxy.is_in_device:
        return None
    own = proxy.asked()
    for told in interpreter.get_input_details():
        own.resize_tensor_input(told["index"], told["shape"])
    own.allocate_tensors()
    return own


@cache
def with_custom_operators(package: ModuleType, base: Any) -> type[Any]:
    """Return the interpreter of a package that takes custom operators, which run in this process: a subclass of `base`,
    that of `in_device`.
    """
    real: Any = package.InterpreterWithCustomOps
    if issubclass(real, base):
        return real  # type: ignore[no-any-return]

    class InterpreterWithCustomOps(base):  # type: ignore[misc]
        def __init__(self, custom_op_registerers: Any = None, **kwargs: Any) -> None:
            self._custom_op_registerers = custom_op_registerers or []
            super().__init__(**kwargs)

    InterpreterWithCustomOps.__module__, InterpreterWithCustomOps.__doc__ = real.__module__, real.__doc__
    return InterpreterWithCustomOps


def _ours(package: ModuleType) -> dict[str, Any]:
    """Return the classes of a package that are replaced, by name."""
    found: dict[str, Any] = {"Interpreter": in_device(package, package.Interpreter)}
    if hasattr(package, "InterpreterWithCustomOps"):  # old releases have none
        found["InterpreterWithCustomOps"] = with_custom_operators(package, found["Interpreter"])
    return found


def replace(package: ModuleType) -> None:
    """Have a package's interpreters live in a device."""
    for name, its in _ours(package).items():
        setattr(package, name, its)


def __getattr__(name: str) -> Any:
    package = importlib.import_module(PACKAGES[0])
    return getattr(package, name) if name.startswith("__") else _ours(package).get(name) or getattr(package, name)


def __dir__() -> list[str]:
    return dir(importlib.import_module(PACKAGES[0]))
