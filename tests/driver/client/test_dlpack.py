"""Arrays of other libraries: what speaks DLPack or the buffer protocol goes in, and results go out without a copy."""

import array
import gc

import numpy as np
import pytest

import driver


class Foreign:
    """An array of another library: it has nothing but DLPack."""

    def __init__(self, data, versioned=True):
        self._data, self._versioned, self.asked = data, versioned, []

    def __dlpack__(self, **wanted):
        self.asked.append(wanted)
        if not self._versioned:
            wanted = {}
        return self._data.__dlpack__(**wanted)

    def __dlpack_device__(self):
        return self._data.__dlpack_device__()


class Accelerator(Foreign):
    """Lies where we cannot look."""

    def __dlpack__(self, **_):
        raise BufferError("this lies in the memory of another device")

    def __dlpack_device__(self):
        return (2, 0)


X = np.array([[1, 2, 3, 4]], np.float32)


@pytest.fixture
def burst(device, kit):
    with device.prepare(kit.add_model()) as prepared, prepared.burst(depth=2) as found:
        yield found


def bytes_model():
    """The same bytes with their axes reversed."""
    builder = driver.ModelBuilder()
    x = builder.input("quant8_asymm", (2, 3), scale=1.0, zero_point=0)
    builder.output(builder.operation("TRANSPOSE", x, np.array((1, 0), np.int32)))
    return builder.build()


class TestIn:
    @pytest.mark.parametrize("versioned", [True, False])
    def test_dlpack(self, burst, versioned):
        """What has nothing but __dlpack__ goes in, with a capsule of version 1.x or of before."""
        given = Foreign(X.copy(), versioned)
        assert burst.run(given).outputs[0].tolist() == (X + 1).tolist()
        assert burst.submit(given).result().outputs[0].tolist() == (X + 1).tolist()
        assert given.asked
        assert any("max_version" in wanted for wanted in given.asked) == (
            np.lib.NumpyVersion(np.__version__) >= "2.1.0"
        )

    def test_torch(self, burst):
        """A tensor of PyTorch goes in, and a result comes out as one."""
        torch = pytest.importorskip("torch", reason="PyTorch is not installed; the small class stands for it")
        result = burst.run(torch.from_numpy(X))
        assert torch.from_dlpack(result.outputs[0]).tolist() == (X + 1).tolist()

    def test_read_only(self, burst):
        """What must not be written may be read."""
        x = X.copy()
        x.flags.writeable = False
        assert burst.run(x).outputs[0].tolist() == (X + 1).tolist()
        if np.lib.NumpyVersion(np.__version__) >= "2.1.0":
            assert burst.run(Foreign(x)).outputs[0].tolist() == (X + 1).tolist()

    def test_not_contiguous(self, burst):
        """Strides may be anything."""
        wide = np.zeros((4, 2), np.float32)
        wide[:, :1] = X.T
        assert burst.run(Foreign(wide[:, :1].T)).outputs[0].tolist() == (X + 1).tolist()

    @pytest.mark.parametrize(
        ("given", "match"),
        [
            (Foreign(X.astype(np.float64)), r"input 0 has dtype float64; .*\.astype\('float32'\)"),
            (Foreign(X[0]), r"input 0 has shape \(4,\); the model takes \(1, 4\)"),
            (Accelerator(X), "input 0 cannot be read by DLPack: .*; bring it to the CPU"),
            (b"1234", "input 0 has dtype uint8"),
            (object(), "input 0 has dtype object"),
        ],
        ids=["dtype", "shape", "not in our memory", "bytes for floats", "no array"],
    )
    def test_refused(self, burst, given, match):
        """What does not fit is refused by its name, and never converted silently."""
        with pytest.raises(ValueError, match=match):
            burst.run(given)
        assert burst.run(X).outputs[0].tolist() == (X + 1).tolist()

    def test_buffers(self, device, kit):
        """array.array and memoryview go in by their own shapes; bytes have none and take the input's."""
        with device.prepare(kit.mul_model()) as prepared, prepared.burst() as burst:
            floats = array.array("f", [1, 2, 3, 4])
            for given in (floats, memoryview(floats), memoryview(X)[0:1].cast("B").cast("f")):
                assert burst.run(given).outputs[0].tolist() == [1, 4, 9, 16]
        with device.prepare(bytes_model()) as prepared, prepared.burst() as burst:
            for given in (bytes(range(6)), bytearray(range(6)), memoryview(bytes(range(6))).cast("B", (2, 3))):
                assert burst.run(given).outputs[0].tolist() == [[0, 3], [1, 4], [2, 5]]
            with pytest.raises(ValueError, match=r"input 0 has shape \(5,\); the model takes \(2, 3\)"):
                burst.run(bytes(5))

    def test_own_output(self, burst):
        """A result goes in again, without the burst writing over what it reads."""
        result = burst.run(X)
        for n in range(2, 30):
            result = burst.run(result.outputs[0])
            assert result.outputs[0].tolist() == (X + n).tolist()


class TestOut:
    def test_zero_copy(self, burst):
        """An output exported by DLPack is the same memory, is writable, and is kept until the consumer lets go."""
        result = burst.run(X)
        address = result.outputs[0].ctypes.data
        taken = np.from_dlpack(result.outputs[0])
        del result
        assert taken.ctypes.data == address
        assert taken.flags.writeable
        taken[...] = 7
        for n in range(30):
            burst.run(X + n)
        assert (taken == 7).all()
        del taken
        assert address in {burst.run(X).outputs[0].ctypes.data for _ in range(4)}

    def test_outlives_the_burst(self, device, kit):
        """It is readable when the burst, the model and the result are gone."""
        with device.prepare(kit.add_model()) as prepared, prepared.burst() as burst:
            taken = np.from_dlpack(burst.run(X).outputs[0])
        del burst, prepared
        gc.collect()
        assert taken.tolist() == (X + 1).tolist()
