"""Small model files, made in code, for devices that know the extension "burst.file"; and what they compute, by numpy.

A network is described once, as elementwise operations of a few kinds, and written as a file of each kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from burst_engine.names import install_command
from driver.devices.litert.flatbuffer import schema
from driver.formats.onnx_schema import DTYPES
from driver.formats.protobuf import ProtoWriter
from driver.nn import Model, Operand
from driver.nn.file_form import ModelFile, model_of_file, tensor_type
from driver.vts.cases import Case
from driver.vts.framework_files import jax_file, pt2_file
from driver.vts.kit import skip

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    Array = NDArray[Any]

_ONNX = {"NEG": "Neg", "NOT": "Not", "SUB": "Sub", "PRODUCT": "MatMul"}
_TFLITE = {"NEG": "NEG", "NOT": "LOGICAL_NOT", "SUB": "SUB", "PRODUCT": "BATCH_MATMUL"}
_NUMPY: dict[str, Callable[..., Array]] = {
    "NEG": np.negative,
    "NOT": np.logical_not,
    "SUB": np.subtract,
    "PRODUCT": np.matmul,
}
_TFLITE_OPTIONS = {
    "NEG": "NegOptions",
    "NOT": "LogicalNotOptions",
    "SUB": "SubOptions",
    "PRODUCT": "BatchMatMulOptions",
}
_OPSET, _IR_VERSION = 13, 7


class NetworkPort(NamedTuple):
    """A tensor of a network. shape: None for an open size."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]


class NetworkStep(NamedTuple):
    """An operation: NEG, NOT, SUB or PRODUCT, which is of matrices, and the names of its tensors."""

    kind: str
    inputs: tuple[str, ...]
    output: str


@dataclass(frozen=True)
class Network:
    """A network that becomes a file of any kind. What a step gives has the type and shape of its first input."""

    inputs: tuple[NetworkPort, ...]
    outputs: tuple[NetworkPort, ...]
    steps: tuple[NetworkStep, ...]

    def run(self, feeds: Sequence[Array]) -> list[Array]:
        """Compute the network by numpy."""
        known = dict(zip((port.name for port in self.inputs), feeds, strict=True))
        for step in self.steps:
            known[step.output] = np.asarray(_NUMPY[step.kind](*(known[name] for name in step.inputs)))
        return [known[port.name] for port in self.outputs]

    def model(self, kind: str, data: bytes = b"", external: Mapping[str, Array] = MappingProxyType({})) -> Model:
        """Return it in file form. `data`: of another file than its own; `external`: the files beside it."""
        file = ModelFile(kind, np.frombuffer(data or WRITERS[kind](self), np.uint8), external)
        inputs, outputs = ([_operand(port) for port in side] for side in (self.inputs, self.outputs))
        return model_of_file(file, inputs, outputs)

    def case(self, kind: str, feeds: Sequence[Array]) -> Case:
        """Return a file of that kind, inputs, and the outputs that they have to give."""
        return Case(f"{kind} file", self.model(kind), tuple(feeds), tuple(a.reshape(-1) for a in self.run(feeds)))

    def tensors(self) -> list[NetworkPort]:
        """Return all tensors; each one before what is computed of it."""
        known = {port.name: port for port in (*self.inputs, *self.outputs)}
        for step in self.steps:
            known.setdefault(step.output, known[step.inputs[0]]._replace(name=step.output))
        return [*known.values()]


def _operand(port: NetworkPort) -> Operand:
    kind = tensor_type(port.dtype, len(port.shape))
    return Operand(kind, tuple(size or 0 for size in port.shape), extra={"name": port.name})


def onnx_file(network: Network, apart: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """Return the bytes of an .onnx file. `apart`: inputs that are weights, by the names of the files in which these
    lie.
    """
    graph = ProtoWriter()
    for step in network.steps:
        node = ProtoWriter().text(4, _ONNX[step.kind]).text(2, step.output)
        for name in step.inputs:
            node.text(1, name)
        graph.message(1, node)
    graph.text(2, "main")
    for port in network.inputs:
        if port.name in apart:
            graph.message(5, _onnx_weights(port, apart[port.name]))
        else:
            graph.message(11, _onnx_port(port))
    for port in network.outputs:
        graph.message(12, _onnx_port(port))
    operators = ProtoWriter().text(1, "").integer(2, _OPSET)
    return ProtoWriter().integer(1, _IR_VERSION).message(8, operators).message(7, graph).joined()


def _onnx_port(port: NetworkPort) -> ProtoWriter:
    sizes = ProtoWriter()
    for axis, size in enumerate(port.shape):
        found = ProtoWriter()
        sizes.message(1, found.text(2, f"size{axis}") if size is None else found.integer(1, size))
    tensor = ProtoWriter().integer(1, _onnx_type(port)).message(2, sizes)
    return ProtoWriter().text(1, port.name).message(2, ProtoWriter().message(1, tensor))


def _onnx_weights(port: NetworkPort, file: str) -> ProtoWriter:
    found = ProtoWriter()
    for size in port.shape:
        found.integer(1, size or 0)
    place = ProtoWriter().text(1, "location").text(2, file)
    return found.integer(2, _onnx_type(port)).text(8, port.name).message(13, place).integer(14, 1)


def _onnx_type(port: NetworkPort) -> int:
    return {word: number for number, word in DTYPES.items()}[port.dtype]


def tflite_file(network: Network) -> bytes:
    """Return the bytes of a .tflite file. Skips the test where the schema of such files is not installed."""
    try:
        import flatbuffers

        s = schema()
    except ImportError as error:
        skip(f".tflite files are written by the extra litert: {install_command('litert')} ({error})")
    tensors, codes = network.tensors(), list(dict.fromkeys(step.kind for step in network.steps))
    places, graph, model = {port.name: n for n, port in enumerate(tensors)}, s.SubGraphT(), s.ModelT()
    graph.tensors = [_tflite_tensor(s, port) for port in tensors]
    graph.inputs, graph.outputs = ([places[port.name] for port in side] for side in (network.inputs, network.outputs))
    graph.operators = []
    for step in network.steps:
        operator = s.OperatorT()
        operator.opcodeIndex = codes.index(step.kind)
        operator.inputs, operator.outputs = [places[name] for name in step.inputs], [places[step.output]]
        options = _TFLITE_OPTIONS[step.kind]
        operator.builtinOptionsType = getattr(s.BuiltinOptions, options)
        operator.builtinOptions = getattr(s, f"{options}T")()
        graph.operators.append(operator)
    model.version, model.subgraphs, model.buffers = 3, [graph], [s.BufferT()]
    model.operatorCodes = [_tflite_code(s, kind) for kind in codes]
    builder = flatbuffers.Builder(1 << 12)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def _tflite_tensor(s: Any, port: NetworkPort) -> Any:
    tensor = s.TensorT()
    tensor.name, tensor.type, tensor.hasRank = port.name, getattr(s.TensorType, port.dtype.upper()), True
    tensor.shape = [1 if size is None else size for size in port.shape]
    if None in port.shape:
        tensor.shapeSignature = [-1 if size is None else size for size in port.shape]
    return tensor


def _tflite_code(s: Any, kind: str) -> Any:
    code = s.OperatorCodeT()
    code.builtinCode, code.version = getattr(s.BuiltinOperator, _TFLITE[kind]), 1
    code.deprecatedBuiltinCode = min(code.builtinCode, 127)
    return code


WRITERS: dict[str, Callable[[Network], bytes]] = {
    "onnx": onnx_file,
    "tflite": tflite_file,
    "jax": jax_file,
    "pt2": pt2_file,
}
"""Kind of file -> what writes one."""
