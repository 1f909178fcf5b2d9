"""A model file in the runtime that it was made for, in this process: as a program has it by itself. LiteRT and ONNX
Runtime have one thread.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

from driver.devices.litert.quiet import without_info_lines
from driver.formats.pt2_archive import Pt2Archive
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

    Raise what the runtime raises, which may be any exception.
    """
    kind = kind_of(path)
    if not runs_files(kind):
        return None
    found = {"onnx": _onnxruntime, "tflite": _litert, "jax": _jax, "pt2": _torch}[kind](path, arrays)
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
    with without_info_lines():
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


def _jax(path: Path, arrays: Arrays) -> OwnRuntime:
    jax, export = import_module("jax"), import_module("jax.export")
    jax.config.update("jax_enable_x64", True)
    exported = export.deserialize(bytearray(path.read_bytes()))
    pairs = zip(arrays, exported.in_avals, strict=True)
    fed = [array.view(its.dtype) if array.itemsize == its.dtype.itemsize else array for array, its in pairs]
    positional, named = jax.tree.unflatten(exported.in_tree, fed)
    function = jax.jit(exported.call)
    return OwnRuntime(
        f"JAX {jax.__version__}", lambda: jax.tree.leaves(jax.block_until_ready(function(*positional, **named)))
    )


def _torch(path: Path, arrays: Arrays) -> OwnRuntime:
    torch, export = import_module("torch"), import_module("torch.export")
    trees = import_module("torch.utils._pytree")
    program = export.load(Pt2Archive(memoryview(path.read_bytes())).cleaned())
    values = [node.meta["val"] for node in program.graph.nodes if node.name in program.graph_signature.user_inputs]
    fed = [torch.from_numpy(array).view(its.dtype) for array, its in zip(arrays, values, strict=True)]
    positional, named = trees.tree_unflatten(fed, program.call_spec.in_spec)
    module = program.module()

    def call() -> Sequence[Any]:
        with torch.inference_mode():
            found: Sequence[Any] = trees.tree_leaves(module(*positional, **named))
        return found

    return OwnRuntime(f"PyTorch {torch.__version__}", call)
