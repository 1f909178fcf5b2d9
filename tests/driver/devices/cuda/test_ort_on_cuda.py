"""What ONNX Runtime is told on CUDA: a stream, addresses of the GPU, runs that do not wait. Its part is played here."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from fake_cuda import Call, Word

from driver.devices.cuda.device_buffers import GpuBuffer
from driver.devices.cuda.driver_api import CudaFailed, ffi
from driver.devices.cuda.lane import CudaGpu
from driver.devices.gpu_place import GpuPlace
from driver.devices.onnxruntime import on_cuda
from driver.devices.onnxruntime.on_cuda import MOST_GRAPHS, OrtCudaExecution, OrtLane
from driver.errors import ExecutionFailed
from driver.interface import BufferArgument

PTX = b".visible .entry add_scalar(\n"
N = 512


class PlayedRuntime:
    """Adds 1 on the stream that it was given, from the address of its input to that of its output."""

    def __init__(self, context, stream):
        self._kernel, self._stream = context.kernel(PTX, "add_scalar"), stream
        self.bound, self.runs = [], []
        self._sess = self

    def io_binding(self):
        return SimpleNamespace(
            bind_input=lambda *said: self.bound.append(said),
            bind_output=lambda *said: self.bound.append(said),
            _iobinding=self,
        )

    def run_with_iobinding(self, binding, options):
        assert binding is self
        self.runs.append(options)
        source, target = (ffi.new("uint64_t *", said[-1]) for said in self.bound[-2:])
        values = source, target, ffi.new("float *", 1.0), ffi.new("uint32_t *", N)
        try:
            self._stream.launch(self._kernel, [1], [N], values)
        except CudaFailed as error:
            raise RuntimeError(f"CUDA failure {error.code}") from error


class RunOptions(dict):
    add_run_config_entry = dict.__setitem__


@pytest.fixture
def ends():
    """Why the engine would have ended."""
    return []


@pytest.fixture
def lane(context, ends, monkeypatch):
    monkeypatch.setattr(on_cuda, "library", lambda: SimpleNamespace(RunOptions=RunOptions))
    return OrtLane(CudaGpu(context, ends.append).lane(), has_graphs=True)


@pytest.fixture
def runtime(context, lane):
    return PlayedRuntime(context, lane.lane.compute)


def bound(runtime, lane):
    source, target = np.zeros(N, np.float32), np.zeros(N, np.float32)
    places = [(name, "FLOAT", (N,), array.view(np.uint8)) for name, array in (("x", source), ("y", target))]
    return OrtCudaExecution(runtime, lane, places[:1], places[1:]), source, target


def test_a_run_stays_on_the_stream(runtime, lane, fake):
    """Inputs and outputs are bound in the GPU's memory; copies and kernels follow each other without the CPU."""
    execution, source, target = bound(runtime, lane)
    assert [said[:3] for said in runtime.bound] == [("x", "cuda", 0), ("y", "cuda", 0)]
    assert [said[-1] for said in runtime.bound] == [execution.inputs[0].address, execution.outputs[0].address]
    for n in range(3):
        source[:] = n
        execution.run()
        assert (target == n + 1).all()
    assert execution.shapes == (((N,), True),)
    assert lane.provider_options() == {
        "user_compute_stream": str(lane.lane.compute.address),
        "has_user_compute_stream": "1",
        "enable_cuda_graph": "1",
    }


def test_buffers_of_the_gpu_are_bound_where_they_lie(runtime, lane, context, fake):
    """An argument in a buffer of the device is no copy: its address, from its offset on, is what ONNX Runtime gets."""
    size = 4 * N
    buffer = GpuBuffer(context.allocate(2 * size), 2 * size)
    values = np.arange(N, dtype=np.float32)
    buffer.copy_from(values.view(np.uint8), size)
    source = GpuPlace(BufferArgument(buffer, (N,), size, size))
    target = GpuPlace(BufferArgument(buffer, (N,), 0, size))
    execution = OrtCudaExecution(runtime, lane, [("x", "FLOAT", (N,), source)], [("y", "FLOAT", (N,), target)])
    copies = fake[Word.COPIES_IN], fake[Word.COPIES_OUT]
    execution.run()
    assert (fake[Word.COPIES_IN], fake[Word.COPIES_OUT]) == copies
    found = np.zeros(size, np.uint8)
    buffer.copy_to(found)
    assert (found.view(np.float32) == values + 1).all()


def test_each_request_has_a_recording_of_its_own(runtime, lane):
    """Runs do not wait for the GPU, and the first requests have numbers for their graphs; later ones have none."""
    for _ in range(MOST_GRAPHS + 2):
        bound(runtime, lane)[0].run()
    assert {options["disable_synchronize_execution_providers"] for options in runtime.runs} == {"1"}
    numbers = [int(options["gpu_graph_id"]) for options in runtime.runs]
    assert numbers == [*range(1, MOST_GRAPHS + 1), -1, -1]


def test_a_failed_run_is_told(runtime, lane, fake, ends):
    """An error of ONNX Runtime's is that execution's, unless the context is lost: that ends the engine."""
    execution, *_ = bound(runtime, lane)
    fake.fail(Call.LAUNCH, 1)
    with pytest.raises(ExecutionFailed, match="CUDA failure 1"):
        execution.run()
    assert not ends
    execution.run()
    fake[Word.LOST] = 700
    with pytest.raises(CudaFailed):
        execution.run()
    assert "ILLEGAL_ADDRESS" in ends[0]


def test_a_session_ends_before_its_stream(lane):
    """ONNX Runtime may use the stream when a session ends: it is destroyed later, though an execution lived longest."""
    ended, stream = [], weakref.ref(lane.lane.compute)

    class Core:
        def __del__(self):
            ended.append(stream() is not None)

    def ignore(*_):
        pass

    session = SimpleNamespace(_sess=Core())
    session.io_binding = lambda: SimpleNamespace(bind_input=ignore, bind_output=ignore, _iobinding=None)
    own = OrtLane(lane.lane, has_graphs=False)
    execution, *_ = bound(session, own)
    del session, own
    lane.lane = None
    assert not ended
    del execution
    assert ended == [True]
    assert stream() is None


def test_a_cancelled_execution_does_not_begin(runtime, lane):
    """Nothing is added to the streams for a client that is gone."""
    execution, *_ = bound(runtime, lane)
    execution.run()
    execution.cancel()
    assert not execution.is_running()
    for run in (execution.run, lambda: execution.launch(0)):
        with pytest.raises(ExecutionFailed, match="cancelled"):
            run()
    assert len(runtime.runs) == 1
