"""What is recorded of a program's requests, and what is not."""

import asyncio
import os
import stat
import threading
import time

import numpy as np
import pytest
from inside import controller_of

import driver
from burst import Controller, DeviceBuffer, Request, RequestArgument
from driver.client import prepared_model
from driver.client.device_buffers import BufferDesc, BufferRole
from driver.client.executor import Forwarding
from driver.recording import Recording, Tape, record, recorder
from driver.recording.tape import UNANSWERED

X = np.arange(4, dtype=np.float32).reshape(1, 4)


@pytest.fixture
def device():
    """The reference device."""
    with driver.connect("reference") as device:
        yield device


@pytest.fixture
def path(tmp_path):
    """Of a file that is not there yet."""
    return tmp_path / "requests.burst"


def floats(parts):
    return [None if part is None else np.frombuffer(part[1], np.float32).reshape(part[0]).tolist() for part in parts]


def runs(path):
    """All of a recording that ends as it should."""
    with Recording(path) as recording:
        assert recording.trouble == ""
        return [recording.run(number) for number in range(len(recording))], dict(recording.streams), recording.left_out


class Counting(Forwarding):
    """Counts what it hands on."""

    count = 0

    def perform(self, job):
        Counting.count += 1
        return self._behind.perform(job)


def test_another_executor_in_front(device, path, kit, monkeypatch):
    """Hooks nest: one that is put in front of the recorder leaves the recorder where it is."""
    monkeypatch.setattr(prepared_model, "in_front", [*prepared_model.in_front, Counting])
    with record(path), device.prepare(kit.add_model()) as prepared:
        prepared.run(X)
    assert (Counting.count, len(runs(path)[0])) == (1, 1)


def test_all_ways_to_ask(device, path, kit):
    """Runs, submissions, tasks and explicit requests, in bursts and on the plain path: each is there once, in order."""
    request, _ = kit.request([X + 4], 16)
    with record(path), device.prepare(kit.add_model(), priority="high") as prepared:
        prepared.run(X)
        with prepared.burst() as burst:
            burst.run(X + 1)
            burst.inputs[0][...] = X + 2
            burst.run(timeout=5.0)
            assert asyncio.run(burst.run_async(X + 3)).outputs[0].tolist() == (X + 4).tolist()
            burst.execute(request)
        with prepared.burst(depth=3, spin=0.0) as burst:
            futures = [burst.submit(X + 5 + n, deadline=time.monotonic() + 5) for n in range(3)]
            [future.result() for future in futures]
            futures[-1].result().outputs[0][...] = -1  # after it was copied
        prepared.execute_async(request).result()
    found, streams, left_out = runs(path)
    assert [floats(run.inputs)[0] for run in found] == [(X + n).tolist() for n in (*range(8), 4)]
    assert [floats(run.outputs)[0] for run in found] == [(X + n + 1).tolist() for n in (*range(8), 4)]
    assert [run.deadline is None for run in found] == [True, True, False, True, True, False, False, False, True]
    assert all(0 < run.deadline <= 5e9 for run in found if run.deadline)
    assert all(run.status == 0 and run.took > 0 for run in found)
    assert [run.stream for run in found] == [1, 2, 2, 2, 2, 3, 3, 3, 4]
    assert [(s.path, s.depth, s.spin) for s in streams.values()] == [
        ("plain", 1, None),
        ("burst", 1, 50e-6),
        ("burst", 3, 0.0),
        ("plain", 1, None),
    ]
    assert left_out == {}
    with Recording(path) as recording:
        assert {m.priority for m in recording.models.values()} == {"high"}
        assert [m.address for m in recording.models.values()] == ["reference"]


def test_shapes_of_a_request(device, path, kit):
    """Shapes that the model leaves open, omitted inputs and outputs that had to grow are recorded as they were."""
    with record(path):
        with device.prepare(kit.open_model()) as prepared:
            prepared.run(np.ones((3, 4), np.float32))
            with prepared.burst(input_shapes=[(2, 4)]) as burst:
                burst.run(np.ones((2, 4), np.float32))
        with device.prepare(kit.optional_model()) as prepared:
            prepared.run(np.ones((2, 3), np.float32), None)
        with device.prepare(kit.reshape_model()) as prepared, prepared.burst() as burst:
            burst.run(np.ones((2, 3000), np.float32), np.array([3, 2000], np.int32))
    found, _, _ = runs(path)
    assert [[part and part[0] for part in run.inputs] for run in found] == [
        [(3, 4)],
        [(2, 4)],
        [(2, 3), None],
        [(2, 3000), (2,)],
    ]
    assert [run.outputs[0][0] for run in found] == [(3, 4), (2, 4), (3, 2), (3, 2000)]
    assert all(run.status == 0 for run in found)


def test_what_cannot_be_recorded_is_counted(device, path, kit):
    """Inputs in buffers of the device, and fenced executions, are executed and counted by their reason."""
    with record(path), device.prepare(kit.add_model()) as prepared:
        role = BufferRole(0, 0, 1.0)
        with device.allocate(BufferDesc(()), [prepared], [role]) as buffer:
            request, _ = kit.request([X], 16)
            buffer.copy_from(request.pools[0])
            there = Request((RequestArgument(pool=0),), request.outputs, (DeviceBuffer(buffer.token), request.pools[1]))
            assert prepared.execute(there).status == 0
            with prepared.burst() as burst:
                assert burst.execute(there).status == 0
        prepared.execute_fenced(request).wait(kit.patience)
    found, _, left_out = runs(path)
    assert found == []
    assert left_out == {
        "its inputs are in buffers of the device, or not what the model takes": 2,
        "it was launched with fences": 1,
    }


def test_requests_that_fail(device, path, kit):
    """Statuses are recorded, also that there was no answer in time; an impossible request fails as it always does."""
    request, _ = kit.request([X], 16)
    wrong = request._replace(outputs=(RequestArgument(pool=1, length=8),))
    with record(path), device.prepare(kit.add_model()) as prepared, prepared.burst() as burst:
        for run in (burst, prepared):
            assert run.execute(wrong).status != 0
            with pytest.raises(driver.StatusError):
                run.execute(request, deadline=time.monotonic() - 1).raise_for_status()
            with pytest.raises((TimeoutError, driver.StatusError)):
                run.run(X, timeout=1e-9)
    found, _, _ = runs(path)
    assert {run.status for run in found} <= {*range(1, 9), UNANSWERED}
    assert not any(run.outputs for run in found)


def test_a_device_that_dies(path, kit, process):
    """A burst that recovers is recorded across the death: what was answered is there once, in two streams."""
    with (
        record(path),
        driver.connect("reference") as device,
        device.prepare(kit.add_model()).burst(recover=True) as burst,
    ):
        for n in range(6):
            if n == 3:
                engine = process(device.engine_pid)
                engine.kill()
                assert engine.has_ended()
            assert burst.run(X + n).outputs[0].tolist() == (X + n + 1).tolist()
    found, streams, _ = runs(path)
    answered = [run for run in found if run.status == 0]
    assert [floats(run.inputs)[0] for run in answered] == [(X + n).tolist() for n in range(6)]
    assert len(streams) == 2


def test_the_file_is_its_owners(path, tmp_path):
    """Mode 0600 whatever the umask is; nothing that is there is written to, nor what a link points to."""
    umask = os.umask(0)
    try:
        with record(path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(umask)
    with pytest.raises(driver.DriverError, match="the file exists; remove it"), record(path):
        pass
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    with pytest.raises(driver.DriverError), record(tmp_path / "link"):
        pass
    assert not (tmp_path / "victim").exists()
    with pytest.raises(driver.DriverError, match="cannot create the recording"), record(tmp_path / "no" / "folder"):
        pass


class Stuck(Tape):
    """A tape on a disk that writes nothing until it is `free`."""

    def __init__(self, *arguments, **options):
        self.free = threading.Event()
        super().__init__(*arguments, **options)

    def _write_some(self):
        self.free.wait()
        super()._write_some()


def test_a_full_file(device, path, kit):
    """When the file is full, requests are left out and counted; the program goes on."""
    with record(path, most_bytes=8_000), device.prepare(kit.add_model()) as prepared, prepared.burst() as burst:
        for _ in range(200):  # of some 80 bytes each, and 512 more as long as it is not written
            burst.run(X)
    found, _, left_out = runs(path)
    assert 0 < len(found) < 200
    assert left_out == {"the file is full": 200 - len(found)}
    assert path.stat().st_size < 8_000


def test_a_slow_disk(device, path, kit):
    """When the disk is slow, requests are left out and counted."""
    with device.prepare(kit.add_model()) as prepared:
        tape = Stuck(path, 10**9, most_waiting=4000)
        number = tape.stream(prepared.remote, "plain", 1, None)
    for _ in range(10):
        tape.run([number, 1, 1, None, 0, [], []], [])
    tape.free.set()
    tape.close()
    with Recording(path) as recording:
        left_out = recording.left_out["the disk is too slow"]
        assert 0 < left_out == 10 - len(recording)


def test_a_disk_that_is_full(path, device, kit):
    """An error in writing ends the recording, and not the program."""
    with record(path) as tape, device.prepare(kit.add_model()) as prepared:

        def fail(_):
            raise OSError(28, "No space left on device")

        tape._write = fail
        prepared.run(X)
        kit.until(lambda: tape._most_bytes == 0)
        prepared.run(X)
    assert tape.left_out["the file is full"] >= 1  # and what came between the failure and its being known


def test_who_is_not_recorded_pays_nothing(device, path, kit, monkeypatch):
    """Without a recording neither the prepared model nor the burst's controller is another than ever."""
    monkeypatch.delenv(recorder.VARIABLE, raising=False)
    with record(path):
        pass
    with device.prepare(kit.add_model()) as prepared, prepared.burst() as burst:
        assert prepared.executor is prepared.remote
        assert type(controller_of(burst)) is Controller


def test_a_recording_in_a_recording(device, path, tmp_path, kit):
    """The inner one takes the requests of the models that are prepared in it."""
    with record(path):
        with record(tmp_path / "inner"), device.prepare(kit.add_model()) as prepared:
            prepared.run(X)
        with device.prepare(kit.add_model()) as prepared:
            prepared.run(X)
            prepared.run(X)
    assert [len(runs(where)[0]) for where in (tmp_path / "inner", path)] == [1, 2]


def test_many_threads(device, path, kit):
    """Threads on the plain path have a stream each, and nothing of theirs is lost or mixed."""

    def work(n):
        for _ in range(20):
            prepared.run(X + n)

    with record(path), device.prepare(kit.add_model()) as prepared:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found, streams, _ = runs(path)
    assert len(streams) == 4
    for number in streams:
        values = [floats(run.inputs)[0] for run in found if run.stream == number]
        assert len(values) == 20
        assert all(value == values[0] for value in values)
