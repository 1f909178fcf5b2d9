"""CUDA graphs of the device `torch-cuda`, with a PyTorch that is played (burst_test_devices.frameworks)."""

import gc
import importlib
import io
import threading

import numpy as np
import pytest
from burst_test_devices import frameworks
from fake_cuda import Call

import driver
from burst import ResourceExhaustedTransient
from driver.devices import torch, torch_cuda
from driver.devices.cuda import torch_graphs, torch_program
from driver.devices.cuda.lane import CudaGpu
from driver.devices.file_device import FilePort
from driver.devices.torch_cuda import TorchCudaDevice
from driver.interface import BindOptions

X = np.arange(4, dtype=np.float32)
PORT = FilePort("x", "float32", (4,))


@pytest.fixture
def played(context, monkeypatch):
    """PyTorch, on the fake's GPU, in this process."""
    found, gpu = frameworks.PlayedTorch(), frameworks.PlayedGpu(context)
    for module in (torch, torch_cuda, torch_graphs, torch_program):
        monkeypatch.setattr(module, "torch_module", lambda: found)
    monkeypatch.setattr(frameworks, "played_gpu", lambda: gpu)
    return found


@pytest.fixture
def model(context, played):
    """x + 1 of four floats."""
    return made(context, played)


def made(context, played, **options):
    builder = driver.ModelBuilder()
    x = builder.input("float32", (4,))
    builder.output(builder.operation("ADD", x, np.ones(4, np.float32), 0))
    device = TorchCudaDevice(**options)
    device.gpu = CudaGpu(context, pytest.fail)
    return device.model_of(builder.build(), played.export.load(io.BytesIO()), [PORT], [PORT])


class Bound:
    """A request that is bound once, with memory of its own."""

    def __init__(self, model, priority="medium"):
        self.x, self.y = X.copy(), np.zeros(4, np.float32)
        options = BindOptions(priority=priority)
        self._execution = model.bind([self.x], [self.y.view(np.uint8)], options)

    def is_right(self, *values):
        """Whether a run with each of these gives what it should."""
        found = []
        for value in values:
            self.x[:], self.y[:] = value, -1
            self._execution.run()
            found.append(bool((self.y == value + 1).all()))
        return all(found)


def counts(played):
    return played.said.get("recorded", 0), played.said.get("replayed", 0)


def test_a_request_that_comes_again_is_recorded_once(model, played):
    """Its second run records what it does, and later ones launch that, on new values at the same addresses."""
    request = Bound(model)
    assert request.is_right(5)
    assert counts(played) == (0, 0)
    assert request.is_right(6)
    assert counts(played) == (1, 0)
    assert request.is_right(*range(10))
    assert counts(played) == (1, 10)


def test_each_plan_has_a_graph_of_its_own(model, played):
    """Two bursts that run the same model in turns, whose graphs share memory on the GPU."""
    first, second = Bound(model), Bound(model)
    for n in range(5):
        assert first.is_right(n)
        assert second.is_right(n + 100)
    assert counts(played) == (2, 6)
    one, other = played.said["pools"]
    assert one is other
    assert len(one) == 1


def test_priorities_share_no_memory(model, played, context, monkeypatch):
    """Their lanes run at the same time, so what one graph computes must not lie where another one computes. A graph is
    recorded on a stream of its lane's priority, which its kernels keep.
    """
    priorities, stream = [], context.stream

    def noted(priority=0):
        priorities.append(priority)
        return stream(priority)

    monkeypatch.setattr(context, "stream", noted)
    assert Bound(model, "high").is_right(1, 2, 3)
    assert Bound(model, "low").is_right(1, 2, 3)
    one, other = played.said["pools"]
    assert one is not other
    assert len(set(priorities)) == 2
    assert all(priorities.count(priority) == 4 for priority in priorities)  # in, compute, out, and that of recordings


def test_two_bursts_at_once(model, played):
    """Each thread records and replays its own, whichever comes first, and gets its own values."""
    requests = [Bound(model, priority) for priority in ("high", "medium", "medium", "low")]
    found = [False] * len(requests)
    barrier = threading.Barrier(len(requests))

    def run(number):
        barrier.wait()
        found[number] = requests[number].is_right(*range(100 * number, 100 * number + 30))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found)
    assert all(request.is_right(-5) for request in requests)  # those that ran only while another one was recorded
    recorded, replayed = counts(played)
    assert recorded == len(requests)
    assert replayed <= 29 * len(requests)


def test_while_one_is_recorded_others_run(model, played):
    """A request that would be recorded meanwhile runs as before, and is recorded later."""
    request = Bound(model)
    with torch_graphs.RECORDING:
        assert request.is_right(1, 2, 3)
        assert counts(played) == (0, 0)
    assert request.is_right(4, 5)
    assert counts(played) == (1, 1)


def test_no_garbage_is_collected_while_recording(model, played, monkeypatch):
    """What that frees may be memory of the GPU, which CUDA forbids to the thread that records."""
    states = []
    add = played.add
    monkeypatch.setattr(
        played, "add", lambda work: (states.append((bool(played.recordings), gc.isenabled())), add(work))
    )
    assert Bound(model).is_right(1, 2, 3)
    assert set(states) == {(False, True), (True, False)}
    assert gc.isenabled()


def test_once_all_graphs_have_gone_others_are_recorded(model, played, caplog):
    """The last client of a model leaves, and another one comes: PyTorch takes no graph into the memory of the first."""
    assert Bound(model).is_right(1, 2, 3)
    assert Bound(model).is_right(4, 5, 6)
    assert counts(played) == (2, 2)
    one, other = played.said["pools"]
    assert one is not other
    assert not caplog.text


# ---- what goes wrong


def test_a_program_that_waits_for_the_gpu_runs_without(model, played, caplog):
    """It breaks the recording, which PyTorch cannot end: the request is served, and the log says why. Others are still
    recorded.
    """
    played.waits = True
    request = Bound(model)
    assert request.is_right(1, 2, 3, 4)
    assert "without a CUDA graph: CUDA error: operation not permitted when stream is capturing" in caplog.text
    played.waits = False
    assert Bound(model).is_right(1, 2, 3)
    assert counts(played) == (1, 1)
    assert caplog.text.count("without a CUDA graph") == 1


def test_a_recording_that_cannot_begin(model, played, monkeypatch, caplog):
    """There is nothing to end: the request is served, and others are still recorded."""

    def fail(*_, **__):
        raise RuntimeError("CUDA error: out of memory")

    request = Bound(model)
    with monkeypatch.context() as patch:
        patch.setattr(frameworks.PlayedGraph, "capture_begin", fail)
        assert request.is_right(1, 2, 3)
    assert "without a CUDA graph: CUDA error: out of memory" in caplog.text
    assert request.is_right(4)
    assert counts(played) == (0, 0)
    assert Bound(model).is_right(1, 2, 3)
    assert counts(played) == (1, 1)


def test_a_result_in_memory_of_the_cpu(model, played, caplog):
    """A replay would copy it from memory that is free by then."""
    played.returns_cpu = True
    assert Bound(model).is_right(1, 2, 3)
    assert counts(played) == (0, 0)
    assert caplog.text.count("returns memory of the CPU") == 1


def test_no_memory_for_a_recording(model, played, fake, caplog):
    """The request has been served before it is recorded; others are still recorded."""
    request = Bound(model)
    assert request.is_right(1)
    fake.fail(Call.ALLOC, 2, after=1)  # the first allocation of a run is that of PyTorch's result
    assert request.is_right(2, 3)
    gc.collect()  # the recording that failed has gone, too
    assert "without a CUDA graph" in caplog.text
    assert counts(played)[1] == 0
    assert Bound(model).is_right(1, 2, 3)
    assert counts(played)[1] == 1


def test_a_graph_that_cannot_be_launched_is_dropped(model, played, caplog):
    """Nothing of it runs then, so the same run goes on without it."""
    request = Bound(model)
    assert request.is_right(1, 2)
    played.fails_to_launch = True
    assert request.is_right(3)
    played.fails_to_launch = False
    assert request.is_right(4, 5)
    assert counts(played) == (1, 0)
    assert caplog.text.count("could not be launched, and is dropped: CUDA error: out of memory") == 1


def test_a_graph_that_was_dropped_takes_no_place(model, played, monkeypatch):
    """Of those that a lane may have, while its request goes on without."""
    monkeypatch.setattr(torch_graphs, "MOST", 1)
    request = Bound(model)
    assert request.is_right(1, 2)
    played.fails_to_launch = True
    assert request.is_right(3)
    played.fails_to_launch = False
    assert Bound(model).is_right(1, 2, 3)
    assert counts(played) == (2, 1)


def test_a_full_gpu_fails_a_request_that_is_not_recorded(model, fake):
    """In words of ours, and the next run is served."""
    request = Bound(model)
    fake.fail(Call.ALLOC, 2)
    with pytest.raises(ResourceExhaustedTransient, match="no memory left"):
        request.is_right(1)
    assert request.is_right(2, 3, 4)


def test_a_lane_has_only_so_many_graphs(model, played, monkeypatch):
    """CUDA keeps memory for each, which no ledger counts: later requests run without, until an earlier one has gone."""
    monkeypatch.setattr(torch_graphs, "MOST", 2)
    requests = [Bound(model) for _ in range(3)]
    for request in requests:
        assert request.is_right(1, 2, 3)
    assert counts(played) == (2, 2)
    del request, requests[0]
    assert Bound(model).is_right(1, 2, 3)
    assert counts(played) == (3, 3)


def test_the_option_switches_them_off(context, played):
    """Then every run adds its kernels one by one."""
    assert Bound(made(context, played, graphs=False)).is_right(*range(5))
    assert counts(played) == (0, 0)


def test_an_earlier_pytorch_records_nothing(context, played, caplog):
    """Its random numbers may fail in other threads meanwhile."""
    played.__version__ = "2.13.1+cu130"
    assert Bound(made(context, played)).is_right(*range(5))
    assert counts(played) == (0, 0)
    assert "they need PyTorch 2.14, and this is 2.13.1+cu130" in caplog.text


# ---- which programs


def test_programs_with_control_flow_and_open_sizes_are_not_recorded(monkeypatch):
    """`torch.cond`, and operators that ask the GPU for values or sizes: each is named. Others are recorded."""
    real = pytest.importorskip("torch", reason="needs the extra 'torch'")
    monkeypatch.setattr(real, "__version__", "2.14.0")

    class Chooses(real.nn.Module):
        def forward(self, x):
            return real.cond(x.sum() > 0, lambda x: x + 1, lambda x: x * 2, (x,))

    class Finds(real.nn.Module):
        def forward(self, x):
            return real.nonzero(x).sum(0)

    assert "cond chooses" in obstacle(Chooses())
    assert "nonzero" in obstacle(Finds())
    assert obstacle(real.nn.Linear(4, 2)) is None


def test_programs_that_take_random_numbers_are_not_recorded(monkeypatch):
    """Attention and dropout may take some, by their arguments: where dropout is off, they do not."""
    real = pytest.importorskip("torch", reason="needs the extra 'torch'")
    monkeypatch.setattr(real, "__version__", "2.14.0")

    class Attends(real.nn.Module):
        def __init__(self, share):
            super().__init__()
            self.share = share

        def forward(self, x):
            return real.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=self.share)

    class Draws(real.nn.Module):
        def forward(self, x):
            return x + real.rand(4)

    for module in (Draws(), real.nn.Dropout(0.5).train(), Attends(0.5)):
        assert "takes random numbers" in obstacle(module, 1, 4, 4)
    for module in (real.nn.Dropout(0.5).eval(), real.nn.RReLU().eval(), Attends(0.0)):
        assert obstacle(module, 1, 4, 4) is None


def obstacle(module, *sizes):
    """Why an exported module is not recorded, whose input has such sizes."""
    real = importlib.import_module("torch")
    return torch_graphs.obstacle_to_graphs(real.export.export(module, (real.ones(sizes or 4),)))
