"""Files that ONNX Runtime runs on memory of a GPU, where it lies.

There is no CUDA provider here. What a session binds as "cuda" is checked, and emulated: the values are taken from the
tests' libcuda.so.1 before the run on the CPU, and put back after it.
"""

import numpy as np
import onnx
import pytest
from fake_cuda import Word
from onnx import TensorProto, helper

import driver
from driver.devices.cuda.device_buffers import GPU_KINDS, GpuMemory
from driver.devices.onnxruntime import OnnxRuntimeDevice, OrtCudaDevice
from driver.devices.onnxruntime.library import Binding
from driver.interface import BindOptions, BufferArgument, BufferRequest, Preparation
from driver.nn import OperandType

pytest.importorskip("onnxruntime")
X = np.arange(6, dtype=np.float32).reshape(2, 3)


class Emulated:
    """An IOBinding whose bindings to a GPU are copies."""

    def __init__(self, inner, context):
        self.inner, self.context, self._iobinding = inner, context, inner._iobinding
        self.bound, self.ins, self.outs = [], [], []

    def bind_input(self, name, device, ordinal=0, dtype=None, shape=None, address=None):
        self._bind(self.inner.bind_input, self.ins, name, device, ordinal, dtype, shape, address)

    def bind_output(self, name, device="cpu", ordinal=0, dtype=None, shape=None, address=None):
        self._bind(self.inner.bind_output, self.outs, name, device, ordinal, dtype, shape, address)

    def _bind(self, bind, kept, name, device, *rest):
        if device == "cpu":
            bind(name, device, *rest)
            return
        ordinal, dtype, shape, address = rest
        self.bound.append((name, device, ordinal, address))
        place = np.zeros(shape, helper.tensor_dtype_to_np_dtype(dtype))
        kept.append((place, address))
        bind(name, "cpu", 0, dtype, shape, place.ctypes.data)

    def get_outputs(self):
        return self.inner.get_outputs()

    def addresses(self):
        """Where outputs lie that were bound to the GPU's memory, by where they lie here."""
        return {place.ctypes.data: address for place, address in self.outs}


class Result:
    """A result that lies at an address of the GPU."""

    def __init__(self, inner, address):
        self.inner, self.address = inner, address

    def data_ptr(self):
        return self.address

    def __getattr__(self, name):
        return getattr(self.inner, name)


@pytest.fixture
def sessions(context, monkeypatch):
    """The bindings that were made."""
    import onnxruntime

    made, run, results, make = [], Binding.run, Binding.results, onnxruntime.InferenceSession.io_binding

    def emulated(session):
        made.append(Emulated(make(session), context))
        return made[-1]

    def run_on_gpu(self, options=None):
        binding = made[-1]
        for place, address in binding.ins:
            context.copy_out(place.ctypes.data, address, place.nbytes)
        fault = run(self, options)
        for place, address in binding.outs:
            context.copy_in(address, place.ctypes.data, place.nbytes)
        return fault

    monkeypatch.setattr(onnxruntime.InferenceSession, "io_binding", emulated)

    def results_on_gpu(self):
        addresses = made[-1].addresses()
        return [Result(v, addresses[v.data_ptr()]) if v.data_ptr() in addresses else v for v in results(self)]

    monkeypatch.setattr(Binding, "run", run_on_gpu)
    monkeypatch.setattr(Binding, "results", results_on_gpu)
    return made


def file_model(tmp_path, *, shape=(2, 3), kind=TensorProto.FLOAT, node="Add"):
    """x + x of a file, or what `node` makes of x."""
    ends = [helper.make_tensor_value_info(name, kind, shape) for name in "xy"]
    graph = helper.make_graph([helper.make_node(node, ["x", "x"], ["y"])], "g", ends[:1], ends[1:])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return driver.load(path, form="file")


@pytest.fixture
def memory(context):
    return GpuMemory(context)


def buffer_of(memory, value=None, nbytes=24):
    request = BufferRequest(OperandType.TENSOR_FLOAT32, (nbytes // 4,), ())
    found = memory.allocate(request)
    if value is not None:
        found.copy_from(value.reshape(-1).view(np.uint8))
    return found


def value_of(buffer, like=X):
    found = np.zeros(buffer.room, np.uint8)
    buffer.copy_to(found)
    return found[: like.nbytes].view(like.dtype).reshape(like.shape)


def bound(model, inputs, outputs):
    prepared = OnnxRuntimeDevice().prepare(model, Preparation())
    return prepared, prepared.bind(inputs, outputs, BindOptions())


def test_buffers_are_bound_where_they_lie(sessions, memory, tmp_path):
    """By their addresses on the GPU, at the offset of the argument; the result lies there and nowhere else."""
    source, target = buffer_of(memory, np.concatenate([X, X]), 48), buffer_of(memory)
    arguments = [BufferArgument(source, (2, 3), 24, 24)], [BufferArgument(target, (2, 3))]
    _, execution = bound(file_model(tmp_path), *arguments)
    assert sessions[-1].bound == [("x", "cuda", 0, source.address + 24), ("y", "cuda", 0, target.address)]
    execution.run()
    execution.run()
    assert (value_of(target) == 2 * X).all()
    assert execution.copied_bytes == 0


def test_a_frame_beside_a_buffer(sessions, memory, tmp_path):
    """Memory of the CPU is bound as before."""
    target = buffer_of(memory)
    _, execution = bound(file_model(tmp_path), [X.copy()], [BufferArgument(target, (2, 3))])
    assert sessions[-1].bound == [("y", "cuda", 0, target.address)]
    execution.run()
    assert (value_of(target) == 2 * X).all()


def test_an_output_of_open_shape_comes_to_its_buffer(sessions, memory, tmp_path, fake):
    """Where ONNX Runtime allocates the first result, it is copied in; the next is written in place."""
    source, target = buffer_of(memory, X), buffer_of(memory)
    model = file_model(tmp_path, shape=("n", "m"))
    arguments = [BufferArgument(source, (2, 3))], [BufferArgument(target, (0, 0))]
    prepared, execution = bound(model, *arguments)
    execution.run()
    assert (value_of(target) == 2 * X).all()
    target.copy_from(np.zeros(24, np.uint8))
    again = prepared.bind(*arguments, BindOptions())
    assert sessions[-1].bound[-1] == ("y", "cuda", 0, target.address)
    again.run()
    assert (value_of(target) == 2 * X).all()
    assert fake[Word.LOST] == 0


def test_a_state_that_is_read_and_written(sessions, memory, tmp_path):
    """One buffer as input and output: ONNX Runtime does not write where it reads."""
    state = buffer_of(memory, X)
    both = [BufferArgument(state, (2, 3))], [BufferArgument(state, (2, 3))]
    _, execution = bound(file_model(tmp_path), *both)
    assert [name for name, *_ in sessions[-1].bound] == ["x"]
    execution.run()
    assert (value_of(state) == 2 * X).all()


def test_values_that_choose_addresses_are_refused(sessions, memory, tmp_path):
    """Indices on the GPU could change while they are used; an output of such values is copied in."""
    model = file_model(tmp_path, kind=TensorProto.INT64)
    numbers = np.arange(6).reshape(2, 3)
    source, target = buffer_of(memory, numbers, 48), buffer_of(memory, nbytes=48)
    with pytest.raises(ValueError, match=r"input 0 \(x\): its values may choose addresses"):
        bound(model, [BufferArgument(source, (2, 3))], [BufferArgument(target, (2, 3))])
    _, execution = bound(model, [numbers], [BufferArgument(target, (2, 3))])
    execution.run()
    assert sessions[-1].bound == []
    assert (value_of(target, numbers) == 2 * numbers).all()


def test_the_device_of_cuda_has_it():
    """Its class names the kind of pools, which clients ask for before a GPU is touched."""
    assert OrtCudaDevice.own_memory_kinds == GPU_KINDS
    assert "~/.config/burst/cuda.toml" in OrtCudaDevice.needs.read_paths


def test_models_of_operations_take_the_cpus_memory(memory):
    """They say what to do instead."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (2, 3))
    builder.output(builder.operation("ADD", x, np.ones(1, np.float32), 0))
    source = BufferArgument(buffer_of(memory, X), (2, 3))
    with pytest.raises(ValueError, match="load the file with form='file'"):
        bound(builder.build(), [source], [np.zeros(24, np.uint8)])
