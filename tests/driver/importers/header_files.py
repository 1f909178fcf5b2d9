"""Files whose headers say more than most: labels, weights in other files, types that the HAL lacks."""

import io
import zipfile

import flatbuffers
import numpy as np
import onnx
import tflite
from onnx import TensorProto, helper, numpy_helper
from tflite_writer import Writer

WEIGHTS = np.arange(8, dtype=np.float32).reshape(4, 2)


def onnx_file(inputs, outputs, nodes=None, initializers=(), **properties):
    """The bytes of a model. inputs, outputs: name -> (ONNX type, shape), or a whole type."""
    infos = [
        [
            helper.make_value_info(name, kind)
            if isinstance(kind, onnx.TypeProto)
            else helper.make_tensor_value_info(name, *kind)
            for name, kind in side.items()
        ]
        for side in (inputs, outputs)
    ]
    if nodes is None:
        nodes = [helper.make_node("Identity", [next(iter(inputs))], [name]) for name in outputs]
    graph = helper.make_graph(nodes, "g", *infos, list(initializers))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(model, {key: str(value) for key, value in properties.items()})
    return model.SerializeToString()


def labelled_onnx():
    """As ultralytics writes them: the classes as a Python dict."""
    names = {0: "person", 1: "traffic light", 2: 'baker\'s "shop"'}
    shape = (TensorProto.FLOAT, ["batch", 3])
    return onnx_file({"images": shape}, {"output0": shape}, names=names, stride=32)


def outside(name="weights/all.bin", **place):
    """A tensor whose values lie in another file."""
    tensor = numpy_helper.from_array(WEIGHTS, "w")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in ({"location": name, "offset": "8", "length": "32"} | place).items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def apart_onnx(name="weights/all.bin", **place):
    """Weights in another file, as an initializer, in a Constant, and in a branch of an If."""
    ends = {"x": (TensorProto.FLOAT, ["n", 4])}, {"y": (TensorProto.FLOAT, ["n", 2])}
    branch = helper.make_graph(
        [helper.make_node("Identity", ["w"], ["b"])], "branch", [], [helper.make_empty_tensor_value_info("b")]
    )
    branch.initializer.append(outside(name, **place))
    nodes = [
        helper.make_node("Constant", [], ["c"], value=outside(name, **place)),
        helper.make_node("If", ["yes"], ["d"], then_branch=branch, else_branch=branch),
        helper.make_node("Add", ["c", "d"], ["cd"]),
        helper.make_node("Add", ["v", "cd"], ["sum"]),
        helper.make_node("MatMul", ["x", "sum"], ["y"]),
    ]
    first = outside(name, **place)
    first.name = "v"
    return onnx_file(*ends, nodes, [first, numpy_helper.from_array(np.array(True), "yes")])


class Labelled(Writer):
    """With TFLite's metadata: the labels of its output are in an archive at the end of the file."""

    def __init__(self, labels, *, relative=False):
        """relative: the archive's offsets count from its own beginning, and not from that of the file."""
        super().__init__()
        self._labels, self._relative = labels, relative
        self._held = self.buffer(metadata("labels.txt"))

    def file(self, outputs, names=None):
        data = super().file(outputs, names)
        held = io.BytesIO(b"" if self._relative else data)
        with zipfile.ZipFile(held, "a", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("other.txt", "something else")
            archive.writestr("labels.txt", "\n".join(self._labels))
        return data + held.getvalue() if self._relative else held.getvalue()

    def _table(self, kind, **fields):
        if kind == "Model":
            name = self._builder.CreateString("TFLITE_METADATA")
            fields["Metadata"] = self._vector([super()._table("Metadata", Name=name, Buffer=self._held)])
        return super()._table(kind, **fields)


def metadata(name, kind=2):
    """A flatbuffer of TFLite's metadata schema: the first output has an associated file, of labels (2: per axis)."""
    b = flatbuffers.Builder(256)

    def table(slots, **fields):
        b.StartObject(slots)
        for slot, value in fields.items():
            add = b.PrependInt8Slot if slot == "s2b" else b.PrependUOffsetTRelativeSlot
            add(int(slot[1]), value, 0)
        return b.EndObject()

    def vector(offset):
        b.StartVector(4, 1, 4)
        b.PrependUOffsetTRelative(offset)
        return b.EndVector()

    file = table(5, s0=b.CreateString(name), s2b=kind)
    tensor = table(7, s6=vector(file))
    graph = table(5, s3=vector(tensor))
    b.Finish(table(8, s3=vector(graph)), b"M001")
    return bytes(b.Output())


def labelled_tflite(labels=("cat", "dog", "üfo"), **how):
    """A small network with labels."""
    w = Labelled(labels, **how)
    return w.file([w.operator("ABS", [w.input((1, 3))], (1, 3))])


def strings_tflite():
    """A file whose output holds strings."""
    w = Writer()
    w.tensor((2,), name="words", Type=tflite.TensorType.STRING)
    x = w.input((2,))
    w.operators.append(("ABS", [x], [0], {}))
    return w.file([0])
