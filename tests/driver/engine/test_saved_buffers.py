"""Forks of a device's buffers, and their values in files."""

import os

import numpy as np
import pytest
from small_models import sum_model

import driver
from burst import GeneralFailure, InvalidArgument, Memory, Request, RequestArgument, ResourceExhaustedTransient
from driver import BufferDesc, BufferRole

X = np.array([[1, 2, 3, 4]], np.float32)


@pytest.fixture
def prepared(device):
    """x + y on the shared reference device."""
    with device.prepare(sum_model()) as found:
        yield found


def buffer_of(prepared):
    return prepared.device.allocate(BufferDesc(), [prepared], [BufferRole(0, 0), BufferRole(0, 1)], [])


def reading(pool):
    """x and y from a buffer, and the output in a memory."""
    inputs = RequestArgument(pool=1), RequestArgument(pool=1)
    return Request(inputs, (RequestArgument(length=16),), (Memory.create(16), pool))


class TestForks:
    """Two sequences from one beginning; and values that outlive their device, in files."""

    def test_a_fork(self, prepared):
        """It has the value of then, and what is written to one of the two is not in the other."""
        with buffer_of(prepared) as buffer:
            buffer.copy_from(X)
            with buffer.fork() as fork:
                buffer.copy_from(2 * X)
                assert prepared.execute(reading(fork)).outputs[0].tolist() == (2 * X).tolist()
                assert prepared.execute(reading(buffer)).outputs[0].tolist() == (4 * X).tolist()

    def test_of_no_value(self, prepared):
        """There is nothing to go on from: it is said, and no buffer is left behind."""
        with buffer_of(prepared) as buffer:
            before = set(prepared.device.connection.buffers)
            with pytest.raises(GeneralFailure, match="has no value"):
                buffer.fork()
            assert set(prepared.device.connection.buffers) == before

    def test_of_models_that_are_gone(self, prepared):
        """A buffer keeps no model alive, and says why it has no roles any more."""
        with prepared.device.prepare(sum_model()) as theirs:
            buffer = buffer_of(theirs)
        del theirs
        with buffer, pytest.raises(ValueError, match="are gone: keep them"):
            buffer.fork()

    def test_too_many(self, configure):
        """Ten thousand forks: the one beyond what a client may hold is refused with the limit's name and figure, and
        there is room when some are gone.
        """
        configure(client_bytes=2**20)
        with driver.connect() as device, device.prepare(sum_model()) as prepared, buffer_of(prepared) as buffer:
            buffer.copy_from(X)
            forks = []

            def fork():
                forks.extend(buffer.fork() for _ in range(10_000))

            with pytest.raises(
                ResourceExhaustedTransient, match=r"of the 1048576 that .* \(client_bytes\); release buffers"
            ):
                fork()
            assert 100 < len(forks) < 10_000
            for each in forks[50:]:
                each.close()
            forks.append(buffer.fork())
            found = np.zeros_like(X)
            forks[-1].copy_to(found)
            assert found.tolist() == X.tolist()

    def test_a_file(self, prepared, connect, tmp_path):
        """A device of this account takes the value that another one saved, in a buffer of that kind alone."""
        with buffer_of(prepared) as buffer:
            buffer.copy_from(X)
            buffer.save(tmp_path / "state")
        assert (tmp_path / "state").stat().st_mode & 0o777 == 0o600
        with connect().prepare(sum_model()) as again, buffer_of(again) as buffer:
            buffer.restore(tmp_path / "state")
            assert again.execute(reading(buffer)).outputs[0].tolist() == (2 * X).tolist()
            assert [path.name for path in tmp_path.iterdir()] == ["state"]

    @pytest.mark.parametrize("at", ["value", "digest", "dimensions", "kind", "format", "end", "all"])
    def test_a_file_that_was_changed(self, prepared, tmp_path, at):
        """It is refused, whatever of it was changed, and the buffer has no wrong value."""
        path = tmp_path / "state"
        with buffer_of(prepared) as buffer:
            buffer.copy_from(X)
            buffer.save(path)
            whole = path.read_bytes()
            head, line, value = whole.partition(b"\n")
            changed = {
                "value": head + line + value[:-1] + bytes([value[-1] ^ 1]),
                "digest": head.replace(b'"digest": "', b'"digest": "00') + line + value,
                "dimensions": head.replace(b"[1, 4]", b"[4, 1]") + line + value,
                "kind": head.replace(b"FLOAT32", b"INT32") + line + value,
                "format": head.replace(b"buffer 1", b"buffer 2") + line + value,
                "end": whole[:-1],
                "all": os.urandom(100),
            }[at]
            assert changed != whole
            path.write_bytes(changed)
            said = pytest.raises((InvalidArgument, GeneralFailure))
            with said as told:
                buffer.restore(path)
            if at == "value":
                assert "was changed since" in str(told.value)
                assert not buffer.has_value
            path.write_bytes(whole)
            buffer.restore(path)
            found = np.zeros_like(X)
            buffer.copy_to(found)
            assert found.tolist() == X.tolist()
