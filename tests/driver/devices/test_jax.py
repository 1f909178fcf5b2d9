"""Functions that JAX has exported, on the device `jax`."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from file_runs import bound, computed, prepared

import driver
from driver.devices.jax import JaxDevice
from driver.devices.lowering.errors import LibraryFailed
from driver.errors import ExecutionFailed, OutputInsufficientSize
from driver.nn import InvalidModel

if lacks := JaxDevice.missing():
    pytest.skip(f"{lacks}; needs the extra 'jax'", allow_module_level=True)

pytestmark = pytest.mark.integration  # JAX takes seconds to load

DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES += ("float16", "float32", "float64", "bfloat16")
TREES = Path(__file__).parents[1] / "importers" / "jax_files" / "trees.jax"


@pytest.fixture(scope="module")
def device():
    return JaxDevice()


@pytest.fixture(scope="module")
def jax(device):
    """After the device: it chooses the CPU before JAX looks for others."""
    return pytest.importorskip("jax.export") and sys.modules["jax"]


def exported(jax, function, *shapes, dtype="float32", **options):
    given = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return jax.export.export(jax.jit(function), **options)(*given)


def test_the_bits_of_jax_itself(device, jax):
    """A network of floats gives the bits that JAX gives in this process."""
    random = np.random.default_rng(5)
    weights = [random.standard_normal((n, m), np.float32) for n, m in ((64, 256), (256, 256), (256, 10))]

    def network(x):
        for weight in weights[:-1]:
            x = jax.nn.gelu(x @ weight)
        return jax.nn.softmax(x @ weights[-1])

    x = random.standard_normal((8, 64), np.float32)
    ((shape, raw),) = computed(prepared(device, driver.load(exported(jax, network, x.shape))), [x])
    wanted = np.asarray(jax.jit(network)(x))
    assert (shape, raw) == (wanted.shape, wanted.tobytes())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type(device, jax, dtype):
    """Arrays of every type, 64-bit ones too, scalars and empty ones come back as they are."""
    for shape in ((), (3,), (2, 0, 3)):
        model = prepared(device, driver.load(exported(jax, lambda x: x, shape, dtype=jax.numpy.dtype(dtype))))
        stored = {"bool": np.uint8, "bfloat16": np.uint16}.get(dtype, dtype)
        x = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape).astype(stored) % 2
        assert model.is_static
        assert computed(model, [x]) == [(shape, x.tobytes())]


def test_open_sizes(device, jax):
    """Each run has its own, sizes that the function does not take are refused in JAX's words, and too little memory is
    told with the shape.
    """
    (batch,) = jax.export.symbolic_shape("batch")
    model = prepared(device, driver.load(exported(jax, lambda x, y: x + y, (batch, 4), (batch, 4))))
    for n in (1, 3):
        x = np.ones((n, 4), np.float32)
        assert computed(model, [x, x]) == [((n, 4), (x + x).tobytes())]
    with pytest.raises(ExecutionFailed, match="batch"):
        computed(model, [np.ones((2, 4), np.float32), np.ones((3, 4), np.float32)])
    execution, _ = bound(model, [np.ones((9, 4), np.float32)] * 2, 64)
    with pytest.raises(OutputInsufficientSize) as caught:
        execution.run()
    assert caught.value.shapes == (((9, 4), False),)


def test_sizes_that_the_model_fixes(device):
    """Compile the function before the first run: the shapes of the outputs are known then."""
    model = prepared(device, driver.load(TREES, shapes={"arg0": (3, 8)}))
    assert [port.shape for port in model.outputs] == [(3, 4), (), (3, 8)]


def test_on_the_clients_memory(device, jax):
    """Floats are read where they lie, indices are copied; outputs are copied once."""
    model = prepared(device, driver.load(exported(jax, lambda x: x[:2], (1024,))))
    assert bound(model, [np.ones(1024, np.float32)])[0].copied_bytes == 2 * 4
    model = prepared(device, driver.load(exported(jax, lambda x: x[:2], (1024,), dtype="int32")))
    assert bound(model, [np.ones(1024, np.int32)])[0].checked_bytes == 1024 * 4 + 2 * 4


def test_what_is_refused(device, jax, tmp_path):
    """A function for other processors or several devices, and one that no JAX can read, with what helps."""
    with pytest.raises(InvalidModel, match=r"exported for tpu; export it with platforms=\['cpu'\]"):
        prepared(device, driver.load(exported(jax, lambda x: x + 1, (2,), platforms=["tpu"])))
    damaged = bytearray(TREES.read_bytes())
    at = damaged.index(b"ML\xefR")  # where MLIR's bytecode begins
    damaged[at : at + 4] = b"ABCD"
    path = tmp_path / "damaged.jax"
    path.write_bytes(damaged)
    with pytest.raises(LibraryFailed, match="JAX rejected the file"):
        prepared(device, driver.load(path, shapes={"arg0": (2, 8)}))


@pytest.mark.parametrize("name", ["xla_ffi_python_cpu_callback", "xla_buffer_python_cpu_callback", "system", "abort"])
def test_no_code_but_xlas(device, jax, name):
    """Calls into Python, which would take a number of the file for an object, are refused, below a branch, too; so is
    the name of any function that is not registered for XLA.
    """
    x = jax.ShapeDtypeStruct((4,), np.float32)
    call = jax.ffi.ffi_call(name, x)
    function = jax.jit(lambda x: jax.lax.cond(x.sum() > 3, lambda x: call(x, index=np.uint64(0)), lambda x: x, x))
    check = jax.export.DisabledSafetyCheck.custom_call(name)
    said = f"calls into Python, by '{name}'|No FFI handler registered"
    with pytest.raises((InvalidModel, LibraryFailed), match=said):
        prepared(device, driver.load(jax.export.export(function, disabled_checks=[check])(x)))


def test_in_a_device(jax, home):
    """A function that lives in this program runs in the device's process, by names, and in a burst; a program that only
    loads the file has no JAX.
    """
    single = jax.numpy.float32
    x, gain = jax.ShapeDtypeStruct((4,), single), jax.ShapeDtypeStruct((), single)
    function = jax.export.export(jax.jit(lambda x, *, gain: {"louder": x * gain, "peak": x.max()}))(x, gain=gain)
    x, gain = np.arange(4, dtype=np.float32), np.float32(3)
    with driver.compile(driver.load(function)) as compiled:
        found = compiled.run(arg0=x, gain=gain)
        assert found["louder"].tolist() == [0, 3, 6, 9]
        assert found["peak"] == 3
        with compiled.burst() as burst:
            for n in range(3):
                assert burst.run(x + n, gain).outputs["peak"] == 3 + n
    code = f"import sys, driver; driver.load({str(TREES)!r}); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
