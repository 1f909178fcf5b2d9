"""Outputs that are something else as well: files of every runtime, on memory that nothing else writes."""

from functools import cache
from importlib import import_module

import numpy as np
import onnx
import pytest
from aliased_files import ONNX_FILES, TFLITE_FILES
from onnx_files import DTYPES, file_model
from test_litert_file import Own
from test_litert_file import file_model as tflite_model

from driver.devices.litert import LiteRtDevice
from driver.devices.litert.weights import aligned
from driver.devices.onnxruntime import OnnxRuntimeDevice
from driver.devices.openvino import OpenVinoDevice
from driver.interface import BindOptions, Preparation

ort = pytest.importorskip("onnxruntime", reason="needs the extra 'onnxruntime'")


def own_onnxruntime(path):
    """ONNX Runtime as any program uses it."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    return lambda feeds: session.run(None, dict(zip(names, feeds, strict=True)))


@cache
def own_core():
    """One for all tests. Each core gives this thread a stack for signals; of two that end in the order in which they
    were made, the second gives back that of the first, which is unmapped. The next signal ends the process, or
    overwrites what lies there. The device has imported OpenVINO, without its converter.
    """
    return import_module("openvino").Core()


def own_openvino(path):
    """OpenVINO as any program uses it."""
    core = own_core()
    compiled = core.compile_model(core.read_model(path), "CPU", {"EXECUTION_MODE_HINT": "ACCURACY"})
    request, count = compiled.create_infer_request(), len(compiled.outputs)

    def run(feeds):
        request.infer(dict(enumerate(feeds)))
        return [request.get_output_tensor(n).data.copy() for n in range(count)]

    return run


RUNTIMES = {"onnxruntime": (OnnxRuntimeDevice, own_onnxruntime), "openvino": (OpenVinoDevice, own_openvino)}


def feeds_of(data, sign):
    """Arrays for the inputs of an .onnx file: nothing, or something."""
    random, found = np.random.default_rng(3), []
    for info in onnx.load_model_from_string(data).graph.input:
        shape = [dimension.dim_value or 4 for dimension in info.type.tensor_type.shape.dim]
        array = sign * random.standard_normal(shape).astype(np.float32)
        found.append(array > 0 if DTYPES[info.type.tensor_type.elem_type] == "bool" else array)
    return found


def differences(prepared, feeds, wanted):
    """Outputs that are not as they should be, of three runs on memory full of other bytes."""
    outputs = [aligned(1 << 15) for _ in wanted]
    placed = [
        aligned(feed.nbytes).view(np.uint8 if feed.dtype == bool else feed.dtype).reshape(feed.shape) for feed in feeds
    ]
    for place, feed in zip(placed, feeds, strict=True):
        place[...] = feed
    bound, found = prepared.bind(placed, outputs, BindOptions()), set()
    for _ in range(3):
        for output in outputs:
            output[:] = 0xA5
        bound.run()
        for n, ((shape, _), raw, (wanted_shape, wanted_bytes)) in enumerate(
            zip(bound.shapes, outputs, wanted, strict=True)
        ):
            if tuple(shape) != wanted_shape or raw[: len(wanted_bytes)].tobytes() != wanted_bytes:
                found.add(n)
    return found


@pytest.mark.integration
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_outputs_of_onnx_files(runtime, tmp_path):
    """Every output is written, in each run, whatever it is beside an output; also where branches take turns."""
    make, own = RUNTIMES[runtime]
    if lacks := make.missing():
        pytest.skip(lacks)
    device, wrong = make(), []
    for name, data in ONNX_FILES.items():
        prepared, path = device.prepare(file_model(data), Preparation()), tmp_path / "net.onnx"
        path.write_bytes(data)
        run = own(path)
        for sign in (1, 0, 1):
            feeds = feeds_of(data, sign)
            wanted = [(array.shape, array.tobytes()) for array in run(feeds)]
            wrong += [(name, sign, n) for n in differences(prepared, feeds, wanted)]
    assert wrong == []


def test_outputs_of_tflite_files():
    """The same of LiteRT, which also knows some of them before a run."""
    device, wrong = LiteRtDevice(threads=1), []
    for name, (data, feeds) in TFLITE_FILES.items():
        prepared = device.prepare(tflite_model(data), Preparation())
        wrong += [(name, n) for n in differences(prepared, feeds, Own(data).run(feeds))]
    assert wrong == []
