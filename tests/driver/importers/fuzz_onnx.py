"""Mutants of .onnx files: each is refused with ImportFailed or is a valid model, fast and in little memory.

    python fuzz_onnx.py --inputs 100000 --seed 7 [--folder DIR] [--form file]

Half of the mutants are made byte by byte, the others field by field: numbers, names, kinds and types change, and the
result is well-formed again. Prints how many were tried, how many were accepted, and the longest time that one took; a
mutant that does anything else is written to the folder, and ends the run with its traceback. Memory is limited for the
whole process.
"""

import argparse
import os
import random
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import onnx
from google.protobuf.message import DecodeError
from header_files import apart_onnx, labelled_onnx
from onnx_cases import CASES

import driver
from driver.formats.onnx_schema import FIELDS, tensors
from driver.formats.protobuf import ProtoBytes, ProtoMessage
from driver.importers.onnx import reader as importer
from driver.importers.onnx.fold import FOLDS
from driver.importers.onnx.table import TABLE

EDGES = [0, 1, 2, 3, 4, 7, 8, 127, 128, 255, 256, 2**14, 2**16, 2**20, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1]
EDGES += [-1, -2, -3, -128, -(2**31), -(2**40), -(2**63)]
FLOATS = [0.0, -0.0, 1.0, -1.0, 1e-45, 1e38, float("inf"), float("-inf"), float("nan"), 0.5, 3e9]
WORDS = [
    "",
    "x0",
    "y0",
    "x1",
    "SAME_UPPER",
    "linear",
    "cubic",
    "reflect",
    "tanh",
    "half_pixel",
    "bidirectional",
    "x" * 200,
]
PATHS = ["weights/all.bin", "weights", "../weights/all.bin", "/etc/passwd", "*/_ORT_MEM_ADDR_/*", "", ".", "x" * 300]
KINDS = [*sorted(TABLE | FOLDS), "Shape", "Size", "Constant", "QuantizeLinear", "DequantizeLinear", "If", "NonZero"]
MOST_SECONDS = 2.0
"""Of computing, for one small file."""
ROOM = 1 << 30
"""Bytes of address space beyond what the imports took."""
FEW_BYTES = 32
"""Of a weight, which are changed like everything else."""
FOLDER = Path(__file__).parent / "onnx_models"


def places(data):
    """Where the bytes of a file lie that are no large weights: what is changed in those changes little."""
    field, kept, end = FIELDS["TensorProto"]["raw_data"], [], 0
    found = tensors(ProtoMessage(ProtoBytes(memoryview(data))), "ModelProto")
    for start, stop in sorted(span for tensor in found for span in tensor.spans(field)):
        kept += range(end, min(start + FEW_BYTES, stop))
        end = stop
    return [*kept, *range(end, len(data) + 1)]


class Mutator:
    """Edits of the files of all cases; now and then of a real one."""

    def __init__(self, seed):
        self._random, self._places = random.Random(seed), None
        self._files = [case.data for case in CASES.values()] + [labelled_onnx(), apart_onnx()] * 20
        self._real = [(FOLDER / f"{name}.onnx").read_bytes() for name in ("gru", "lstm", "mobilenet_int8")]
        self._bytes = [self._flip, self._byte, self._varint, self._cut, self._drop, self._splice, self._repeat]
        self._fields = [self._kind, self._rename, self._attribute, self._dims, self._type, self._remove, self._twice]
        self._fields += [self._raw, self._opset, self._shape, self._elsewhere]

    def __call__(self):
        """A mutant: one to four edits of one file."""
        pick = self._random
        return self.edited(pick.choice(self._real) if pick.random() < 0.005 else pick.choice(self._files), pick)

    def edited(self, data, pick, where=None):
        """One to four edits of that file, as the random numbers of `pick` have it. `where`: its `places`; None: all.

        Raise what protocol buffers raise for edits that they refuse.
        """
        self._random, self._places = pick, where
        times = pick.choice((1, 1, 1, 2, 3, 4))
        if pick.random() < 0.5:
            mutant = bytearray(data)
            for _ in range(times):
                pick.choice(self._bytes)(mutant)
            return bytes(mutant)
        model = onnx.load_from_string(data)
        for _ in range(times):
            pick.choice(self._fields)(model.graph, model)
        return model.SerializeToString()

    # ---- bytes

    def _at(self, data):
        if self._places is None:
            return self._random.randrange(len(data) + 1)
        return min(self._random.choice(self._places), len(data))

    def _flip(self, data):
        if data:
            data[min(self._at(data), len(data) - 1)] ^= 1 << self._random.randrange(8)

    def _byte(self, data):
        if data:
            data[min(self._at(data), len(data) - 1)] = self._random.randrange(256)

    def _varint(self, data):
        at = self._at(data)
        data[at : at + 1] = b"\xff" * self._random.randrange(1, 11) + bytes([self._random.randrange(128)])

    def _cut(self, data):
        del data[self._at(data) :]

    def _drop(self, data):
        at = self._at(data)
        del data[at : at + self._random.randrange(1, 32)]

    def _splice(self, data):
        other, at, length = self._random.choice(self._files), self._at(data), self._random.randrange(1, 64)
        source = self._random.randrange(len(other))
        data[at : at + length] = other[source : source + length]

    def _repeat(self, data):
        at, length = self._at(data), self._random.randrange(1, 64)
        data[at:at] = data[at : at + length] * self._random.choice((1, 2, 50))

    # ---- fields

    def _node(self, graph):
        return self._random.choice(graph.node) if graph.node else None

    def _names(self, graph):
        return [name for node in graph.node for name in (*node.input, *node.output)] + WORDS

    def _kind(self, graph, _):
        if node := self._node(graph):
            node.op_type = self._random.choice(KINDS)

    def _rename(self, graph, _):
        node, pick = self._node(graph), self._random
        names = node and pick.choice((node.input, node.output))
        if names:
            names[pick.randrange(len(names))] = pick.choice(self._names(graph))
        elif node:
            node.input.append(pick.choice(self._names(graph)))

    def _attribute(self, graph, _):
        node, pick = self._node(graph), self._random
        if not node:
            return
        if not node.attribute:
            name = pick.choice(("axis", "axes", "pads", "group", "to", "keepdims", "perm", "kernel_shape", "blocksize"))
            node.attribute.append(onnx.helper.make_attribute(name, pick.choice((pick.choice(EDGES), [1, 1, 0, 2]))))
        found = pick.choice(node.attribute)
        found.i, found.f = pick.choice(EDGES), pick.choice(FLOATS)
        if found.ints:
            found.ints[pick.randrange(len(found.ints))] = pick.choice(EDGES)
            del found.ints[pick.randrange(len(found.ints)) + pick.randrange(2) :]
        if found.s:
            found.s = pick.choice(WORDS).encode()

    def _tensor(self, graph):
        return self._random.choice(graph.initializer) if graph.initializer else None

    def _dims(self, graph, _):
        tensor, pick = self._tensor(graph), self._random
        if tensor and tensor.dims:
            place = pick.randrange(len(tensor.dims))
            if pick.random() < 0.5:
                other = pick.randrange(len(tensor.dims))
                tensor.dims[place], tensor.dims[other] = tensor.dims[other], tensor.dims[place]
            else:
                tensor.dims[place] = pick.choice(EDGES)

    def _type(self, graph, _):
        pick = self._random
        if (tensor := self._tensor(graph)) and pick.random() < 0.5:
            tensor.data_type = pick.randrange(24)
        elif graph.input:
            pick.choice(graph.input).type.tensor_type.elem_type = pick.randrange(24)

    def _shape(self, graph, _):
        pick = self._random
        if graph.input:
            dims = pick.choice(graph.input).type.tensor_type.shape.dim
            if dims and pick.random() < 0.7:
                dim = pick.choice(dims)
                if pick.random() < 0.5:
                    dim.dim_param = "n"
                else:
                    dim.dim_value = pick.choice(EDGES)
            else:
                dims.add().dim_value = pick.choice(EDGES)

    def _raw(self, graph, _):
        tensor, pick = self._tensor(graph), self._random
        if tensor and tensor.raw_data:
            data = bytearray(tensor.raw_data)
            size = pick.choice((1, 4, 8))
            at = pick.randrange(max(len(data) // size, 1)) * size
            data[at : at + size] = (pick.choice(EDGES) % 2**64).to_bytes(8, "little")[:size]
            tensor.raw_data = bytes(data)

    def _elsewhere(self, graph, _):
        pick = self._random
        if tensor := self._tensor(graph):
            tensor.data_location = onnx.TensorProto.EXTERNAL
            if pick.random() < 0.5:
                tensor.ClearField("raw_data")
            for key, values in {"location": PATHS, "offset": EDGES, "length": EDGES}.items():
                if pick.random() < 0.7:
                    tensor.external_data.add(key=key, value=str(pick.choice(values)))

    def _remove(self, graph, _):
        lists = [part for part in (graph.node, graph.input, graph.output, graph.initializer) if part]
        if lists:
            part = self._random.choice(lists)
            del part[self._random.randrange(len(part))]

    def _twice(self, graph, _):
        lists = [part for part in (graph.node, graph.input, graph.output, graph.initializer) if part]
        if lists:
            part = self._random.choice(lists)
            part.append(self._random.choice(part))

    def _opset(self, _, model):
        if model.opset_import:
            model.opset_import[0].version = self._random.choice((1, 6, 7, 9, 10, 11, 12, 13, 18, 21, 99, -1))


def accepts(data, file=None):
    """Whether a mutant is a model; in file form if `file` is given. Everything but ImportFailed is for the caller."""
    try:
        if file is None:
            importer.read(memoryview(data))
        else:
            file.write_bytes(data)
            os.utime(file, (0, 0))  # of a file that was written just now, a copy waits for the next tick of its clock
            driver.load(file, form="file")
    except driver.ImportFailed:
        return False
    return True


def mutants(seed):
    """Mutants without end; edits that protocol buffers themselves refuse are made again."""
    mutate = Mutator(seed)
    while True:
        try:
            yield mutate()
        except (DecodeError, ValueError, TypeError):
            continue


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--form", choices=("file", "operations"), default="operations")
    options = parser.parse_args()
    file = options.folder / "mutant.onnx" if options.form == "file" else None
    made, accepted, longest = mutants(options.seed), 0, 0.0
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    for number in range(options.inputs):
        data, begun = next(made), time.process_time()
        try:
            accepted += accepts(data, file)
            longest = max(longest, taken := time.process_time() - begun)
            assert taken < MOST_SECONDS, f"{taken:.1f} s for {len(data)} bytes"
        except BaseException:
            (options.folder / f"mutant-{options.seed}-{number}.onnx").write_bytes(data)
            raise
    print(f"{options.inputs} mutants, {accepted} accepted, longest {longest * 1000:.1f} ms")


if __name__ == "__main__":
    main()
