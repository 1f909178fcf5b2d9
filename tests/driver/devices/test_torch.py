"""Programs that PyTorch has exported, on the device `torch`."""

import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from file_runs import bound, computed, prepared

import driver
from driver.devices.lowering.errors import LibraryFailed
from driver.devices.torch import TorchDevice
from driver.errors import ExecutionFailed, ImportFailed, OutputInsufficientSize
from driver.nn import InvalidModel

if lacks := TorchDevice.missing():
    pytest.skip(f"{lacks}; needs the extra 'torch'", allow_module_level=True)

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]  # PyTorch takes seconds to load, and warns

DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES += ("float16", "float32", "float64", "bfloat16")
TREES = Path(__file__).parents[1] / "importers" / "pt2_files" / "trees.pt2"


@pytest.fixture(scope="module")
def device():
    return TorchDevice()


@pytest.fixture(scope="module")
def torch(device):
    return sys.modules["torch"]


def exported(torch, function, *examples, **options):
    class Module(torch.nn.Module):
        def forward(self, *given):
            return function(*given)

    return torch.export.export(Module(), examples, **options)


def test_the_bits_of_pytorch_itself(device, torch):
    """A network of convolutions gives the bits that PyTorch gives in this process."""
    torch.manual_seed(3)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 10)
    ).eval()
    x = torch.rand(1, 3, 8, 8)
    ((shape, raw),) = computed(prepared(device, driver.load(torch.export.export(network, (x,)))), [x.numpy()])
    with torch.inference_mode():
        wanted = network(x)
    assert (shape, raw) == ((1, 10), wanted.numpy().tobytes())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type(device, torch, dtype):
    """Tensors of every type, scalars and empty ones come back as they are."""
    for shape in ((), (3,), (2, 0, 3)):
        example = torch.zeros(shape, dtype=getattr(torch, dtype))
        model = prepared(device, driver.load(exported(torch, lambda x: x.clone(), example)))
        stored = {"bool": np.uint8, "bfloat16": np.uint16}.get(dtype, dtype)
        x = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape).astype(stored) % 2
        assert model.is_static
        assert computed(model, [x]) == [(shape, x.tobytes())]


def test_open_sizes(device):
    """Each run has its own, sizes that the program does not take are refused, and too little memory is told with the
    shapes.
    """
    model = prepared(device, driver.load(TREES))
    for n in (2, 5):
        shapes = [shape for shape, _ in computed(model, [np.ones((n, 8), np.float32), np.ones((), np.float32)])]
        assert shapes == [(n, 4), (), (n, 8)]
    with pytest.raises(ExecutionFailed, match="the file"):
        computed(model, [np.ones((2, 7), np.float32), np.ones((), np.float32)])
    execution, _ = bound(model, [np.ones((9, 8), np.float32), np.ones((), np.float32)], 64)
    with pytest.raises(OutputInsufficientSize) as caught:
        execution.run()
    assert caught.value.shapes == (((9, 4), False), ((), True), ((9, 8), False))


def test_on_the_clients_memory(device, torch):
    """Floats are read where they lie, also from memory that may only be read; outputs are copied once."""
    model = prepared(device, driver.load(exported(torch, lambda x: x[:2] + 1, torch.zeros(1024))))
    x = np.ones(1024, np.float32)
    x.flags.writeable = False
    execution, outputs = bound(model, [x])
    assert execution.copied_bytes == 2 * 4
    execution.run()
    assert outputs[0][:8].view(np.float32).tolist() == [2, 2]


def test_what_is_refused(torch):
    """A module that is not exported, one that keeps state and one that writes to its input, with what helps."""
    with pytest.raises(ImportFailed, match=r"Linear, is not exported; load torch\.export\.export"):
        driver.load(torch.nn.Linear(2, 2))

    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            return x + self.count

    with pytest.raises(ImportFailed, match="changes 'b_count' in place, by add_"):
        driver.load(torch.export.export(Counter(), (torch.zeros(2),)))
    with pytest.raises(ImportFailed, match="changes 'view' in place, by mul_"):
        driver.load(exported(torch, lambda x: x.view(2, 2).mul_(2), torch.zeros(4)))
    assert driver.load(exported(torch, lambda x: (x + 1).mul_(2), torch.zeros(4))).inputs[0].shape == (4,)


WRITES = {
    "a part": lambda torch, x: x.split(2)[0].mul_(5),
    "a row": lambda torch, x: x.view(2, 2).unbind()[1].add_(5),
    "an output argument": lambda torch, x: torch.ops.aten.add.out(x, x, out=x),
    "what returns its argument": lambda torch, x: torch.dropout(x, 0.5, train=False).mul_(5),
    "what has nothing to do": lambda torch, x: x.conj_physical().mul_(5),
    "an equation": lambda torch, x: torch.einsum("ij->ji", x.view(2, 2)).mul_(5),
}


@pytest.mark.parametrize("case", WRITES)
def test_no_program_writes_to_its_input(device, torch, case):
    """Nor to a view of it, by any operator: it is the client's memory, and that of weights is of all clients."""
    model = driver.load(exported(torch, lambda x: WRITES[case](torch, x), torch.ones(4)))
    with pytest.raises(InvalidModel, match=r"would write to .*; export a function that changes no argument"):
        prepared(device, model)


def test_memory_of_its_own_is_written(device, torch):
    """Operators in place on what a program has computed are run: most networks have some."""
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3),
        torch.nn.BatchNorm2d(2),
        torch.nn.ReLU(inplace=True),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 2),
        torch.nn.SiLU(inplace=True),
    ).eval()
    x = torch.rand(1, 1, 4, 4)
    ((_, raw),) = computed(prepared(device, driver.load(torch.export.export(network, (x,)))), [x.numpy()])
    assert raw == network(x).detach().numpy().tobytes()
    model = driver.load(exported(torch, lambda x: torch.relu_((x * 2).add_(x)), torch.ones(4)))
    assert computed(prepared(device, model), [np.ones(4, np.float32)]) == [((4,), np.full(4, 3, np.float32).tobytes())]


def test_a_file_that_pytorch_believes(device, tmp_path):
    """A size that is no number has PyTorch's reader raise IndexError: that is a refusal, as any other of its errors."""
    damaged = tmp_path / "damaged.pt2"
    with zipfile.ZipFile(TREES) as source, zipfile.ZipFile(damaged, "w") as made:
        for entry in source.infolist():
            raw = source.read(entry)
            if entry.filename.endswith("model_weights_config.json"):
                raw = raw.replace(b'{"as_int": 8}', b'{"as_int": {}}')
            made.writestr(entry.filename, raw)
    with pytest.raises(LibraryFailed, match="PyTorch rejected the file: IndexError"):
        prepared(device, driver.load(damaged))


def test_in_a_device(torch, home):
    """A program that lives in this process runs in the device's, by names, and in a burst."""
    program = exported(torch, lambda x, gain: {"louder": x * gain, "peak": x.max()}, torch.zeros(4), torch.zeros(()))
    model = driver.load(program)
    x, gain = np.arange(4, dtype=np.float32), np.ones((), np.float32) * 3
    with driver.compile(model) as compiled:
        found = compiled.run(x, gain)
        assert found["louder"].tolist() == [0, 3, 6, 9]
        assert found["peak"] == 3
        with compiled.burst() as burst:
            for n in range(3):
                assert burst.run(x + n, gain).outputs["peak"] == 3 + n
