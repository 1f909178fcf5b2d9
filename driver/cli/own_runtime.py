"""A model file in the runtime that it was made for, in this process, on one thread: as a program has it by itself."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

from driver.importers.files import kind_of, runs_files

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Arrays = Sequence[NDArray[Any]]

_FATAL = 4  # the least that ONNX Runtime logs


class OwnRuntime(NamedTuple):
    """`name`: of the runtime, with its version. `call` writes the inputs, runs, and returns the outputs."""

    name: str
    call: Callable[[], Sequence[Any]]


def own_runtime(path: Path, arrays: Arrays) -> OwnRuntime | None:
    """Return the file at `path`, with these inputs in the file's order; None where its runtime is not installed.

    Raises what the runtime raises, which may be any exception.
    """
    kind = kind_of(path)
    if not runs_files(kind):
        return None
    found = {"onnx": _onnxruntime, "tflite": _litert}[kind](path, arrays)
    found.call()
    return found


def _onnxruntime(path: Path, arrays: Arrays) -> OwnRuntime:
    onnxruntime = import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, _FATAL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    fed = {
        its.name: array.astype(bool) if its.type == "tensor(bool)" else array
        for its, array in zip(session.get_inputs(), arrays, strict=True)
    }
    return OwnRuntime(f"ONNX Runtime {onnxruntime.__version__}", lambda: session.run(None, fed))


def _litert(path: Path, arrays: Arrays) -> OwnRuntime:
    interpreter = import_module("ai_edge_litert.interpreter").Interpreter(str(path), num_threads=1)
    declared = interpreter.get_input_details()
    for detail, array in zip(declared, arrays, strict=True):
        if tuple(detail["shape"]) != array.shape:
            interpreter.resize_tensor_input(detail["index"], array.shape)
    interpreter.allocate_tensors()
    fed = [(its["index"], array.astype(its["dtype"])) for its, array in zip(declared, arrays, strict=True)]
    outputs = [detail["index"] for detail in interpreter.get_output_details()]

    def call() -> Sequence[Any]:
        for index, array in fed:
            interpreter.set_tensor(index, array)
        interpreter.invoke()
        return [interpreter.get_tensor(index) for index in outputs]

    return OwnRuntime(f"LiteRT {version('ai-edge-litert')}", call)
