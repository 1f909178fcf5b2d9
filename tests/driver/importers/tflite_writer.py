"""Writes .tflite files, table by table, with the functions that their schema generates.

    w = Writer()
    x = w.input((1, 4))
    y = w.operator("ADD", [x, w.constant(np.ones(4, "f4"))], (1, 4), FusedActivationFunction=1)
    data = w.file([y])

A method returns the number of a tensor. `w.graph()` begins a further subgraph; `w.feeds` are arrays for the inputs.
"""

import flatbuffers
import numpy as np
import tflite

DTYPES = {
    "float32": "FLOAT32",
    "float16": "FLOAT16",
    "int64": "INT64",
    "int32": "INT32",
    "int16": "INT16",
    "int8": "INT8",
    "uint8": "UINT8",
    "bool": "BOOL",
}
OPTIONS = {
    **dict.fromkeys(("AVERAGE_POOL_2D", "L2_POOL_2D", "MAX_POOL_2D"), "Pool2DOptions"),
    **dict.fromkeys(("MEAN", "SUM"), "ReducerOptions"),
    **dict.fromkeys((f"REDUCE_{name}" for name in ("PROD", "MAX", "MIN", "ANY", "ALL")), "ReducerOptions"),
    "BATCH_MATMUL": "BatchMatMulOptions",
    "BATCH_TO_SPACE_ND": "BatchToSpaceNDOptions",
    "BIDIRECTIONAL_SEQUENCE_LSTM": "BidirectionalSequenceLSTMOptions",
    "BIDIRECTIONAL_SEQUENCE_RNN": "BidirectionalSequenceRNNOptions",
    "CONV_2D": "Conv2DOptions",
    "DEPTHWISE_CONV_2D": "DepthwiseConv2DOptions",
    "L2_NORMALIZATION": "L2NormOptions",
    "LSH_PROJECTION": "LSHProjectionOptions",
    "LSTM": "LSTMOptions",
    "MIRROR_PAD": "MirrorPadOptions",
    "PADV2": "PadV2Options",
    "RNN": "RNNOptions",
    "SPACE_TO_BATCH_ND": "SpaceToBatchNDOptions",
    "SVDF": "SVDFOptions",
    "TOPK_V2": "TopKV2Options",
    "UNIDIRECTIONAL_SEQUENCE_LSTM": "UnidirectionalSequenceLSTMOptions",
    "UNIDIRECTIONAL_SEQUENCE_RNN": "SequenceRNNOptions",
}
"""Classes of options that are not called as their operator is."""

VERSIONS = {"BROADCAST_TO": 2}
"""Operators whose first version no kernel has."""


def options_class(operator):
    """The class of an operator's options: FULLY_CONNECTED -> FullyConnectedOptions."""
    return OPTIONS.get(operator, "".join(word.capitalize() for word in operator.split("_")) + "Options")


class Graph:
    """One subgraph."""

    def __init__(self, writer, seed):
        self._writer, self._random = writer, np.random.default_rng(seed)
        self.tensors, self.operators, self.inputs, self.feeds = [], [], [], []

    def tensor(self, shape, dtype="float32", buffer=0, name=None, **more):
        """A tensor; more: scale=, zero_point= (numbers or lists), channel=, variable=, signature=, and raw fields."""
        name = f"t{len(self.tensors)}" if name is None else name
        self.tensors.append({"shape": shape, "dtype": str(np.dtype(dtype)), "buffer": buffer, "name": name, **more})
        return len(self.tensors) - 1

    def input(self, shape, dtype="float32", low=None, high=None, **more):
        """An input, and random values for it."""
        limits = np.iinfo(dtype) if np.dtype(dtype).kind in "iu" else np.finfo("f2")
        low, high = (default if given is None else given for default, given in ((limits.min, low), (limits.max, high)))
        if np.dtype(dtype) == bool:
            feed = self._random.integers(0, 2, shape).astype(bool)
        elif np.dtype(dtype).kind == "f":
            feed = self._random.uniform(max(low, -2), min(high, 4), shape).astype(dtype)
        else:
            feed = self._random.integers(low, high, shape, dtype, endpoint=True)
        self.feeds.append(np.asarray(feed))
        self.inputs.append(self.tensor(shape, dtype, **more))
        return self.inputs[-1]

    def constant(self, array, **more):
        """A constant."""
        array = np.asarray(array)
        return self.tensor(array.shape, array.dtype, self._writer.buffer(array.tobytes()), **more)

    def random(self, shape, dtype="float32", scale=0.5, **more):
        """A random constant; `scale` spreads floats, and is that of quantised ones."""
        if np.dtype(dtype).kind == "f":
            return self.constant(self._random.normal(0, scale, shape).astype(dtype), **more)
        limits = np.iinfo(dtype) if np.dtype(dtype).itemsize == 1 else np.iinfo("i1")
        return self.constant(self._random.integers(limits.min + 1, limits.max, shape, dtype), scale=scale, **more)

    def sparse(self, array, block=None):
        """A sparse constant: rows of `array`, or of its blocks, and the places in them that are not zero."""
        array = np.asarray(array)
        high, wide = block or (1, 1)
        blocks = array.reshape(array.shape[0] // high, high, array.shape[1] // wide, wide).swapaxes(1, 2)
        held = [np.flatnonzero(row.any((1, 2))) for row in blocks]
        values = np.concatenate([row[found].reshape(-1) for row, found in zip(blocks, held, strict=True)])
        levels = [len(blocks), (np.cumsum([0, *map(len, held)]), np.concatenate(held))]
        sparsity = ([0, 1], [], levels) if block is None else ([0, 1, 2, 3], [0, 1], [*levels, high, wide])
        return self.tensor(array.shape, array.dtype, self._writer.buffer(values.tobytes()), sparsity=sparsity)

    def operator(self, name, inputs, shape, dtype="float32", count=1, **fields):
        """An operator with `count` outputs of a kind; scale=, zero_point= are theirs, other fields are its options."""
        kind = {key: fields.pop(key) for key in ("scale", "zero_point", "signature") if key in fields}
        shapes = shape if isinstance(shape, list) else [shape] * count
        dtypes = dtype if isinstance(dtype, list) else [dtype] * len(shapes)
        outputs = [self.tensor(s, d, **kind) for s, d in zip(shapes, dtypes, strict=True)]
        self.operators.append((name, inputs, outputs, fields))
        return outputs[0] if len(outputs) == 1 else outputs

    def variable(self, shape):
        """A tensor that keeps its value."""
        return self.tensor(shape, variable=True)


class Writer(Graph):
    """A file, and its main subgraph."""

    def __init__(self, seed=1):
        self._seed, self._buffers, self._others = seed, [b""], []
        super().__init__(self, seed)

    def graph(self):
        """A further subgraph, number 1 and so on; set its `outputs`."""
        self._others.append(Graph(self, self._seed + len(self._others) + 1))
        return self._others[-1]

    def buffer(self, data):
        """The number of a new buffer."""
        self._buffers.append(data)
        return len(self._buffers) - 1

    def file(self, outputs, names=None, signatures=()):
        """The bytes of the file. names: ({name: input}, {name: output}) of a signature; signatures: key, subgraph and
        names of further ones.
        """
        self.outputs = outputs
        self._builder, self._codes = flatbuffers.Builder(1024), []
        graphs = [self._graph(graph) for graph in (self, *self._others)]
        buffers = [self._table("Buffer", **({"Data": self._bytes(data)} if data else {})) for data in self._buffers]
        codes = [self._code(name) for name in self._codes]
        named = [("serving_default", 0, *names)] if names else []
        signatures = [self._signature(*each) for each in (*named, *signatures)]
        fields = {"OperatorCodes": codes, "Subgraphs": graphs, "Buffers": buffers, "SignatureDefs": signatures}
        vectors = {key: self._vector(offsets) for key, offsets in fields.items()}
        self._builder.Finish(self._table("Model", Version=3, **vectors), b"TFL3")
        return bytes(self._builder.Output())

    def _table(self, kind, **fields):
        getattr(tflite, f"{kind}Start")(self._builder)
        for field, value in fields.items():
            getattr(tflite, f"{kind}Add{field}")(self._builder, value)
        return getattr(tflite, f"{kind}End")(self._builder)

    def _vector(self, offsets):
        self._builder.StartVector(4, len(offsets), 4)
        for offset in reversed(offsets):
            self._builder.PrependUOffsetTRelative(offset)
        return self._builder.EndVector()

    def _numbers(self, values, dtype):
        return self._builder.CreateNumpyVector(np.atleast_1d(np.asarray(values, dtype)))

    def _bytes(self, data):
        self._builder.StartVector(1, len(data), 16)
        self._builder.head -= len(data)
        self._builder.Bytes[self._builder.head : self._builder.head + len(data)] = data
        return self._builder.EndVector()

    def _code(self, name):
        number = getattr(tflite.BuiltinOperator, name.split(":")[0])
        fields = {"CustomCode": self._builder.CreateString(name.split(":")[1])} if ":" in name else {}
        fields |= {"DeprecatedBuiltinCode": min(number, 127), "BuiltinCode": number, "Version": VERSIONS.get(name, 1)}
        return self._table("OperatorCode", **fields)

    def _graph(self, graph):
        tensors = self._vector([self._tensor(**tensor) for tensor in graph.tensors])
        operators = self._vector(self._listed(graph))
        ends = {"Inputs": self._numbers(graph.inputs, "i4"), "Outputs": self._numbers(graph.outputs, "i4")}
        return self._table("SubGraph", Tensors=tensors, Operators=operators, **ends)

    def _listed(self, graph):
        return [self._operator(*operator) for operator in graph.operators]

    def _text(self, text):
        return self._builder.CreateString(text)

    def _sparsity(self, order, blocks, levels):
        """levels: the size of a dense one, or the segments and indices of a sparse one."""
        made = []
        for level in levels:
            if isinstance(level, int):
                made.append(self._table("DimensionMetadata", Format=0, DenseSize=level))
                continue
            lists = [self._table("Int32Vector", Values=self._numbers(values, "i4")) for values in level]
            fields = {
                "ArraySegmentsType": 1,
                "ArraySegments": lists[0],
                "ArrayIndicesType": 1,
                "ArrayIndices": lists[1],
            }
            made.append(self._table("DimensionMetadata", Format=1, **fields))
        fields = {"TraversalOrder": self._numbers(order, "i4"), "DimMetadata": self._vector(made)}
        fields |= {"BlockMap": self._numbers(blocks, "i4")} if blocks else {}
        return self._table("SparsityParameters", **fields)

    def _tensor(
        self,
        shape,
        dtype,
        buffer,
        name,
        scale=None,
        zero_point=0,
        channel=0,
        variable=False,
        signature=None,
        sparsity=None,
        **raw,
    ):
        fields = {"Shape": self._numbers(shape, "i4"), "Name": self._text(name)}
        if signature is not None:
            fields["ShapeSignature"] = self._numbers(signature, "i4")
        if scale is not None:
            scales = self._numbers(scale, "f4")
            zero_points = self._numbers(np.broadcast_to(zero_point, np.shape(scale)), "i8")
            quantisation = {"Scale": scales, "ZeroPoint": zero_points, "QuantizedDimension": channel}
            fields["Quantization"] = self._table("QuantizationParameters", **quantisation)
        if sparsity is not None:
            fields["Sparsity"] = self._sparsity(*sparsity)
        fields |= {"Type": getattr(tflite.TensorType, DTYPES[dtype]), "Buffer": buffer, "HasRank": True}
        return self._table("Tensor", IsVariable=variable, **(fields | raw))

    def _operator(self, name, inputs, outputs, options):
        if name not in self._codes:
            self._codes.append(name)
        ends = {"Inputs": self._numbers(inputs, "i4"), "Outputs": self._numbers(outputs, "i4")}
        if "custom" in options:  # the bytes of a custom operator's options
            ends["CustomOptions"] = self._bytes(options.pop("custom"))
        kind = options.pop("options", options_class(name))
        if hasattr(tflite, f"{kind}Start"):
            vectors = {k: self._numbers(v, "i4") for k, v in options.items() if isinstance(v, list)}
            vectors |= {k: self._text(v) for k, v in options.items() if isinstance(v, str)}
            ends["BuiltinOptions"] = self._table(kind, **(options | vectors))
            ends["BuiltinOptionsType"] = getattr(tflite.BuiltinOptions, kind)
        return self._table("Operator", OpcodeIndex=self._codes.index(name), **ends)

    def _signature(self, key, subgraph, inputs, outputs):
        entries = []
        for names in (inputs, outputs):
            texts = [(self._builder.CreateString(name), tensor) for name, tensor in names.items()]
            entries.append(self._vector([self._table("TensorMap", Name=text, TensorIndex=t) for text, t in texts]))
        key = self._builder.CreateString(key)
        more = {"SubgraphIndex": subgraph} if subgraph else {}
        return self._table("SignatureDef", Inputs=entries[0], Outputs=entries[1], SignatureKey=key, **more)
