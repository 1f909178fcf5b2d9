"""LiteRT as a peer of single operations and whole models: writes a model as a .tflite, and runs it in one thread.

Knows the operations that the benchmarks use, with padding schemes instead of paddings and in the NHWC layout.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from measure import NotMeasured

from driver.devices.litert import LiteRtDevice, cuts
from driver.devices.litert.library import Compiled, TensorBuffers, library
from driver.devices.litert.program import LiteRtProgram, lowered
from driver.devices.litert.weights import aligned
from driver.devices.lowering.placing import constants, prepared
from driver.nn.operation import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from driver import Model, Operand, Operation
    from driver.devices.litert.program import LiteRtPort

try:
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema
    from ai_edge_litert.interpreter import Interpreter
except ImportError:
    schema = None

TYPES = {
    "TENSOR_FLOAT32": "FLOAT32",
    "TENSOR_INT32": "INT32",
    "TENSOR_QUANT8_ASYMM": "UINT8",
    "TENSOR_QUANT8_ASYMM_SIGNED": "INT8",
    "TENSOR_QUANT8_SYMM_PER_CHANNEL": "INT8",
}
WINDOW = ("padding", "strideW", "strideH")
POOL = (*WINDOW, "filterWidth", "filterHeight", "fusedActivationFunction")
Fields = tuple[str, ...]

RULES: dict[str, tuple[str, Sequence[int], str, Fields]] = {
    "ADD": ("ADD", (0, 1), "Add", ("fusedActivationFunction",)),
    "SUB": ("SUB", (0, 1), "Sub", ("fusedActivationFunction",)),
    "MUL": ("MUL", (0, 1), "Mul", ("fusedActivationFunction",)),
    "DIV": ("DIV", (0, 1), "Div", ("fusedActivationFunction",)),
    "AVERAGE_POOL_2D": ("AVERAGE_POOL_2D", (0,), "Pool2D", POOL),
    "L2_POOL_2D": ("L2_POOL_2D", (0,), "Pool2D", POOL),
    "MAX_POOL_2D": ("MAX_POOL_2D", (0,), "Pool2D", POOL),
    "CONV_2D": ("CONV_2D", (0, 1, 2), "Conv2D", (*WINDOW, "fusedActivationFunction")),
    "DEPTHWISE_CONV_2D": (
        "DEPTHWISE_CONV_2D",
        (0, 1, 2),
        "DepthwiseConv2D",
        (*WINDOW, "depthMultiplier", "fusedActivationFunction"),
    ),
    "TRANSPOSE_CONV_2D": (
        "TRANSPOSE_CONV",
        (3, 1, 0, 2),
        "TransposeConv",
        (*WINDOW, "fusedActivationFunction", "layout"),
    ),
    "FULLY_CONNECTED": ("FULLY_CONNECTED", (0, 1, 2), "FullyConnected", ("fusedActivationFunction",)),
    "L2_NORMALIZATION": ("L2_NORMALIZATION", (0,), "L2Norm", ()),
    "LOCAL_RESPONSE_NORMALIZATION": (
        "LOCAL_RESPONSE_NORMALIZATION",
        (0,),
        "LocalResponseNormalization",
        ("radius", "bias", "alpha", "beta"),
    ),
    "LOGISTIC": ("LOGISTIC", (0,), "", ()),
    "LOG_SOFTMAX": ("LOG_SOFTMAX", (0,), "LogSoftmax", ("beta", "axis")),
    "MEAN": ("MEAN", (0, 1), "Reducer", ("keepDims",)),
    "PAD": ("PAD", (0, 1), "Pad", ()),
    "RELU": ("RELU", (0,), "", ()),
    "RELU6": ("RELU6", (0,), "", ()),
    "RESHAPE": ("RESHAPE", (0, 1), "Reshape", ()),
    "RESIZE_BILINEAR": ("RESIZE_BILINEAR", (0, -1), "ResizeBilinear", ("width", "height")),
    "RESIZE_NEAREST_NEIGHBOR": (
        "RESIZE_NEAREST_NEIGHBOR",
        (0, -1),
        "ResizeNearestNeighbor",
        ("width", "height", "layout"),
    ),
    "SOFTMAX": ("SOFTMAX", (0,), "Softmax", ("beta",)),
    "TANH": ("TANH", (0,), "", ()),
    "TRANSPOSE": ("TRANSPOSE", (0, 1), "Transpose", ()),
}
"""By operation: the builtin, which inputs it takes (-1: the size, as a tensor), the table of its options, and what the
inputs that it does not take are called there, in order. Names that the table lacks have no counterpart."""


class Steps(NamedTuple):
    """How a tensor is quantised: a scale for all of it, or for each index along `axis`; none when it is not."""

    scales: Sequence[float] = ()
    zero_point: int = 0
    axis: int = 0


class _Writer:
    """One subgraph as it grows."""

    def __init__(self, operands: Sequence[Operand]) -> None:
        self.operands = operands
        self.graph, self.model = schema.SubGraphT(), schema.ModelT()
        self.graph.tensors, self.graph.operators = [], []
        self.model.version, self.model.operatorCodes = 3, []
        self.model.subgraphs, self.model.buffers = [self.graph], [schema.BufferT()]
        self._tensors: dict[int, int] = {}

    def tensor(self, index: int) -> int:
        """The number of the tensor of an operand."""
        if index not in self._tensors:
            o = self.operands[index]
            if o.type.name not in TYPES:
                raise NotMeasured(f"no {o.type.name} here")
            value = o.value if o.lifetime.is_constant else None
            scales, axis = o.channel_quant or ((o.scale,) if o.scale else (), 0)
            self._tensors[index] = self.add(TYPES[o.type.name], o.dimensions, value, Steps(scales, o.zero_point, axis))
        return self._tensors[index]

    def add(self, kind: str, shape: Sequence[int], value: Any = None, steps: Steps | None = None) -> int:
        """A new tensor; its number."""
        tensor = schema.TensorT()
        tensor.shape, tensor.type, tensor.name = list(shape), getattr(schema.TensorType, kind), b"t"
        if steps is not None and steps.scales:
            found = tensor.quantization = schema.QuantizationParametersT()
            found.scale, found.zeroPoint = list(steps.scales), [steps.zero_point] * len(steps.scales)
            found.quantizedDimension = steps.axis
        if value is not None:
            buffer = schema.BufferT()
            buffer.data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            tensor.buffer = len(self.model.buffers)
            self.model.buffers.append(buffer)
        self.graph.tensors.append(tensor)
        return len(self.graph.tensors) - 1

    def operator(self, operation: Operation) -> None:
        """One operation."""
        if operation.type not in RULES:
            raise NotMeasured(f"no {operation.type} here")
        builtin, taken, table, names = RULES[operation.type]
        left = [i for k, i in enumerate(operation.inputs) if k not in taken]
        if len(left) > len(names):
            raise NotMeasured(f"no such form of {operation.type} here")
        values = {name: self.operands[i].value.item() for name, i in zip(names, left, strict=False)}
        op = schema.OperatorT()
        if operation.type in {"CONV_2D", "DEPTHWISE_CONV_2D"}:
            self._scale_bias(operation)
        size = [self.add("INT32", (2,), np.array([values["height"], values["width"]], np.int32))] if -1 in taken else []
        op.inputs = [self.tensor(operation.inputs[k]) for k in taken if k >= 0] + size
        op.outputs = [self.tensor(i) for i in operation.outputs]
        if table:
            op.builtinOptionsType = getattr(schema.BuiltinOptions, f"{table}Options")
            op.builtinOptions = _options(table, values)
        code = schema.OperatorCodeT()
        code.builtinCode = getattr(schema.BuiltinOperator, builtin)
        code.deprecatedBuiltinCode, code.version = min(code.builtinCode, 127), 1
        op.opcodeIndex = len(self.model.operatorCodes)
        self.model.operatorCodes.append(code)
        self.graph.operators.append(op)

    def _scale_bias(self, operation: Operation) -> None:
        """A bias has a scale for each channel where the weights have: here it is written, there they imply it."""
        source, weights, bias = (self.operands[i] for i in operation.inputs[:3])
        if weights.channel_quant is not None:
            scales = [source.scale * scale for scale in weights.channel_quant[0]]
            self._tensors[operation.inputs[2]] = self.add("INT32", bias.dimensions, bias.value, Steps(scales))


def _options(table: str, values: dict[str, Any]) -> Any:
    options = getattr(schema, f"{table}OptionsT")()
    for name, value in values.items():
        if hasattr(options, name):
            setattr(options, name, value - 1 if name == "padding" else value)  # SAME and VALID count from 0 there
    return options


def written(model: Model) -> bytes:
    """`model` as the contents of a .tflite file."""
    graph = model.main
    writer = _Writer(graph.operands)
    for operation in graph.operations:
        writer.operator(operation)
    writer.graph.inputs = [writer.tensor(i) for i in graph.inputs]
    writer.graph.outputs = [writer.tensor(i) for i in graph.outputs]
    builder = flatbuffers.Builder(1 << 20)
    builder.Finish(writer.model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def runnable(model: Model, feeds: Sequence[np.ndarray]) -> tuple[Callable[[], None], Callable[[], np.ndarray]]:
    """What runs `model` once in one thread, its inputs being in place already, and what then copies output 0."""
    if schema is None:
        raise NotMeasured("not installed")
    try:
        interpreter = Interpreter(model_content=written(model), num_threads=1)
        interpreter.allocate_tensors()
    except (ValueError, RuntimeError) as error:
        raise NotMeasured(str(error).splitlines()[0]) from error
    for detail, feed in zip(interpreter.get_input_details(), feeds, strict=True):
        interpreter.set_tensor(detail["index"], feed)
    result = interpreter.get_output_details()[0]["index"]
    return interpreter.invoke, lambda: interpreter.get_tensor(result)


# ---- process


class _Alone(Compiled):
    """Nothing ends its runs early, so it does not look for a request to end."""

    def ask(self, *_: Any) -> None:
        pass


class InProcess:
    """A compiled model with memory of its own."""

    def __init__(self, model: Model, threads: Callable[[int], int]) -> None:
        """`threads`: as `LiteRtDevice.threads_for`, how many for so much work. Raises LibraryMissing, LibraryFailed."""
        cuts.SEGMENT = 1 << 60  # in one piece, as a program calls LiteRT; the device is another process
        graph = model.main
        tensors = {**constants(graph), **{i: Tensor.of(graph.operands[i]) for i in graph.inputs}}
        program = LiteRtProgram(*lowered(model, prepared(graph), tensors, lambda: None), threads, _Alone)
        self.inputs = [_memory(port, graph.operands[graph.inputs[port.number]].type.dtype) for port in program.inputs]
        self.outputs = [
            _memory(port, graph.operands[graph.outputs[port.number]].type.dtype) for port in program.outputs
        ]
        self._program, self.threads = program, program.threads
        self._sources, self._targets = _buffers(program.inputs, self.inputs), _buffers(program.outputs, self.outputs)
        call: Any = library().LiteRtRunCompiledModel
        self._call: Callable[[], int] = partial(
            call,
            program.compiled.handle,
            0,
            len(self._sources),
            self._sources.handles,
            len(self._targets),
            self._targets.handles,
        )

    def run(self) -> int:
        """Executes once; 0 when it went well. A method, as what holds it holds the model and its memory, too."""
        return self._call()


def _memory(port: LiteRtPort, dtype: np.dtype[Any]) -> NDArray[Any]:
    return aligned(port.nbytes).view(dtype).reshape(port.shape)


def _buffers(ports: list[LiteRtPort], arrays: list[NDArray[Any]]) -> TensorBuffers:
    """What the library calls the memory of `arrays`."""
    raw = [array.reshape(-1).view(np.uint8) for array in arrays]
    return TensorBuffers([(port.type, port.shape, memory) for port, memory in zip(ports, raw, strict=True)])


# ---- threads


class One(LiteRtDevice):
    """Every execution on the listener's thread alone."""

    def __init__(self) -> None:
        super().__init__(threads=1)


class Two(LiteRtDevice):
    """Every execution on two threads."""

    def __init__(self) -> None:
        super().__init__(threads=2)


class Four(LiteRtDevice):
    """Every execution on four threads."""

    def __init__(self) -> None:
        super().__init__(threads=4)


class Chosen(LiteRtDevice):
    """As many as the device chooses without a configuration."""

    def __init__(self) -> None:
        super().__init__()
        self._threads = None


NAMES = {1: f"{__name__}:One", 2: f"{__name__}:Two", 4: f"{__name__}:Four", None: f"{__name__}:Chosen"}
"""By the number of threads, None for the device's own choice."""
