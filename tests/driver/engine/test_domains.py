"""Buffers that the device manages: whose they are, what they cost, and when they end.

What executions and copies do with them is tested by the `memory` category of `burst vts` (driver/vts/domains.py).
"""

import os
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import stress
from request_ways import executes
from small_models import sum_model

import driver
from burst import (
    BuffersLost,
    DeviceBuffer,
    GeneralFailure,
    InvalidArgument,
    Memory,
    PeerDied,
    Request,
    RequestArgument,
    ResourceExhaustedPersistent,
    ResourceExhaustedTransient,
    StatusError,
)
from driver import BufferDesc, BufferRole
from driver.devices.reference import ReferenceModel
from driver.engine.binding import execution
from driver.engine.device_memory import LoadedModel, ManagedBuffer, ManagedBuffers
from driver.engine.ledger import Ledger
from driver.engine.limits import limits
from driver.engine.models import SharedModel
from driver.engine.quota import Quota
from driver.nn import OperandType
from driver.protocol.buffers import BufferKind

ROLES = [BufferRole(0, 0)], [BufferRole(0, 0)]
X = np.array([[1, 2, 3, 4]], np.float32)


@pytest.fixture
def prepared(device):
    """x + y on the shared reference device."""
    with device.prepare(sum_model()) as found:
        yield found


def buffer_of(prepared, *, roles=ROLES, dimensions=()):
    return prepared.device.allocate(BufferDesc(dimensions), [prepared], *roles)


def reading(pool, nbytes=16):
    """x from a buffer, y = x, and the output in a memory."""
    return Request(
        (RequestArgument(pool=1), RequestArgument(pool=1)),
        (RequestArgument(length=nbytes),),
        (Memory.create(nbytes), pool),
    )


class TestTwoClients:
    """A client can name what is its own, and nothing else."""

    def test_no_token_of_another(self, prepared, connect):
        """None of a hundred tokens around another client's is known, to executions, copies and releases."""
        with buffer_of(prepared, roles=([BufferRole(0, 0), BufferRole(0, 1)], [])) as buffer:
            buffer.copy_from(X)
            other = connect()
            with other.prepare(sum_model()) as theirs, theirs.burst() as burst:
                for token in range(max(1, buffer.token - 50), buffer.token + 50):
                    for execute in (theirs.execute, burst.execute):
                        assert execute(reading(DeviceBuffer(token))).status == InvalidArgument.status
                memory = Memory.create(16)
                for method, *arguments in (("copy_from", []), ("copy_to",)):
                    with pytest.raises(InvalidArgument, match="no buffer of this client"):
                        other.call(method, buffer.token, *arguments, memory.to_wire(), fds=[memory.fd])
                with pytest.raises(InvalidArgument, match="no buffer of this client"):
                    other.call("release", buffer.token)
            assert prepared.execute(reading(buffer)).outputs[0].tolist() == (X + X).tolist()

    def test_no_model_of_another(self, prepared, connect):
        """A buffer is made for prepared models of the client that asks."""
        other = connect()
        with pytest.raises(InvalidArgument, match=r"prepared_models\[0\]"):
            other.allocate(BufferDesc(), [prepared], *ROLES)
        with pytest.raises(InvalidArgument, match="none with that number"):
            other.call("allocate", [], [prepared.home.number], [[0, 0, 1.0]], [])

    @pytest.mark.parametrize("clients", [2, pytest.param(stress.times(1000), marks=pytest.mark.stress)])
    def test_their_buffers_end_with_them(self, place, kit, clients):
        """Clients that are killed while they hold buffers leave the device with as much memory as before."""
        program = """
import sys, driver, numpy as np
from driver import BufferDesc, BufferRole
device = driver.connect()
m = driver.ModelBuilder(); x = m.input("float32", (1 << 18,)); m.output(m.operation("RELU", x))
prepared = device.prepare(m.build())
buffers = [device.allocate(BufferDesc(), [prepared], [BufferRole(0, 0)], []) for _ in range(8)]
for buffer in buffers: buffer.copy_from(np.ones(1 << 18, np.float32))
print("ready", flush=True); sys.stdin.read()
"""
        with driver.connect() as device, device.prepare(sum_model()) as prepared:

            def kill_one():
                with kit.python(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
                    assert client.stdout.readline() == "ready\n"
                    client.kill()
                    client.wait()

            resident = lambda: int(Path(f"/proc/{device.engine_pid}/statm").read_text().split()[1])  # noqa: E731
            kill_one()
            before = resident()
            for _ in range(clients):
                kill_one()
            pages_of_one = 8 * (4 << 18) // os.sysconf("SC_PAGE_SIZE")
            kit.until(lambda: resident() < before + pages_of_one // 2)
            assert prepared.run(X, X)[0].tolist() == (X + X).tolist()


class TestTheirLife:
    """From `allocate` until it is closed, let go, or lost."""

    def test_closed(self, prepared):
        """A closed buffer is refused before anything is sent, and closing it again does nothing."""
        buffer = buffer_of(prepared)
        buffer.close()
        buffer.close()
        with pytest.raises(ValueError, match="closed; allocate another"):
            buffer.copy_from(X)
        with pytest.raises(ValueError, match="closed; allocate another"):
            prepared.execute(reading(buffer))

    def test_let_go(self, prepared):
        """A buffer that nobody has any more is released: a quota for one is enough for a hundred, one by one."""
        size = limits().client_bytes * 2 // 3
        elements = size // 4
        with prepared.device.prepare(sum_model((elements,))) as large:
            for _ in range(100):
                buffer_of(large)

    def test_quota(self, prepared):
        """More than the quota is refused with the bytes that are needed and free, and what there is stays usable."""
        elements = limits().client_bytes // 4 * 2 // 3
        with prepared.device.prepare(sum_model((elements,))) as large, buffer_of(large), buffer_of(prepared) as small:
            with pytest.raises(ResourceExhaustedTransient, match=rf"needs {4 * elements} bytes, and \d+ of the \d+"):
                buffer_of(large)
            small.copy_from(X)
            found = np.zeros_like(X)
            small.copy_to(found)
            assert found.tolist() == X.tolist()

    def test_the_device_dies(self, place, kit):
        """A buffer is lost with its device: executions and copies say so, and so do they on the device's next life."""
        with driver.connect() as device, device.prepare(sum_model()) as prepared:
            buffer = buffer_of(prepared, roles=([BufferRole(0, 0), BufferRole(0, 1)], []))
            buffer.copy_from(X)
            os.kill(device.engine_pid, 9)
            with pytest.raises(PeerDied):
                buffer.copy_from(X)
            device.revive(device.connection)
            with pytest.raises(BuffersLost, match="belongs to a device that died"):
                prepared.execute(reading(buffer))
            with prepared.burst() as burst, pytest.raises(BuffersLost, match="belongs to a device that died"):
                burst.execute(reading(buffer))
            buffer.close()

    def test_after_a_fork(self, prepared):
        """A child that drops its copy of a buffer leaves the parent's alone."""
        with buffer_of(prepared, roles=([BufferRole(0, 0), BufferRole(0, 1)], [])) as buffer:
            buffer.copy_from(X)
            if not (pid := os.fork()):
                buffer.close()
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            assert prepared.execute(reading(buffer)).outputs[0].tolist() == (X + X).tolist()


class TestCopies:
    """From buffer to buffer: on one device without this process, else through its memory, by the same rules."""

    @pytest.fixture(params=["one device", "two connections"])
    def pair(self, request, prepared, connect):
        """A function that allocates two buffers, the second one on the same device or through another connection."""
        other = prepared if request.param == "one device" else connect().prepare(sum_model())

        def pair(**options):
            return buffer_of(prepared, **options), buffer_of(other, **options)

        return pair

    def test_a_value_and_its_dimensions_arrive(self, pair):
        """By copy_from and by copy_to, again and again, and the source keeps its value."""
        source, target = pair()
        for n, copy in enumerate([lambda: target.copy_from(source), lambda: source.copy_to(target)] * 2):
            source.copy_from(X + n)
            copy()
            for buffer in (source, target):
                found = np.zeros_like(X)
                buffer.copy_to(found)
                assert found.tolist() == (X + n).tolist()
                assert buffer.dimensions == X.shape
                assert buffer.has_value

    def test_a_scalar(self, device):
        """An array without dimensions is the value of a buffer for a scalar, which has none either."""
        m = driver.ModelBuilder()
        m.output(m.operation("RANK", m.input("float32", (2, 4))))
        with device.prepare(m.build()) as prepared:
            buffer = device.allocate(BufferDesc(), [prepared], (), [BufferRole(0, 0)])
            buffer.copy_from(np.array(7, np.int32))
            found = np.zeros((), np.int32)
            buffer.copy_to(found)
            assert (found.tolist(), buffer.dimensions) == (7, ())

    def test_open_dimensions(self, connect):
        """The target takes over the dimensions of the value, unless they contradict its own: then it has no value."""
        device, other = connect(), connect()
        open_model, wide = sum_model((0, 4)), sum_model((2, 4))
        with device.prepare(open_model) as a, device.prepare(wide) as b, other.prepare(wide) as c:
            source = buffer_of(a)
            assert source.dimensions == (0, 4)
            assert not source.has_value
            for target in (buffer_of(a), buffer_of(b), buffer_of(c)):
                source.copy_from(np.ones((2, 4), np.float32))
                target.copy_from(source)
                assert target.dimensions == (2, 4)
            for target in (buffer_of(b), buffer_of(c)):
                target.copy_from(np.ones((2, 4), np.float32))
                source.copy_from(np.ones((3, 4), np.float32))
                with pytest.raises(InvalidArgument, match=r"dimensions=\[3, 4\] contradict the buffer's \[2, 4\]"):
                    target.copy_from(source)
                assert not target.has_value

    def test_what_cannot_be_copied(self, pair, prepared):
        """No value, another type, and a closed buffer are refused; the target keeps its value."""
        source, target = pair()
        target.copy_from(X)
        with pytest.raises(GeneralFailure, match=f"buffer {source.token} has no value"):
            target.copy_from(source)
        builder = driver.ModelBuilder()
        builder.output(builder.operation("RELU", builder.input("quant8_asymm", (1, 4), scale=0.5, zero_point=3)))
        with prepared.device.prepare(builder.build()) as other:
            bytes_ = buffer_of(other)
            bytes_.copy_from(np.zeros((1, 4), np.uint8))
            with pytest.raises(
                InvalidArgument, match=r"QUANT8_ASYMM of scale 0\.5 and zero point 3; .* TENSOR_FLOAT32"
            ):
                target.copy_from(bytes_)
        source.close()
        with pytest.raises(ValueError, match=f"buffer {source.token} is closed"):
            target.copy_from(source)
        found = np.zeros_like(X)
        target.copy_to(found)
        assert found.tolist() == X.tolist()

    def test_itself(self, prepared):
        """A buffer copied to itself stays what it is, with a value or without."""
        with buffer_of(prepared) as buffer:
            buffer.copy_from(buffer)
            assert not buffer.has_value
            buffer.copy_from(X)
            buffer.copy_to(buffer)
            assert buffer.has_value

    def test_of_a_dead_device(self, place, kit):
        """A buffer that died with its device cannot be copied, and the target, on another device, keeps its value."""
        with (
            driver.connect(kit.odd("Picky")) as other,
            other.prepare(sum_model()) as prepared,
            driver.connect() as device,
            device.prepare(sum_model()) as doomed,
            buffer_of(prepared) as target,
        ):
            target.copy_from(X)
            source = buffer_of(doomed)
            source.copy_from(X + 1)
            os.kill(device.engine_pid, 9)
            for copy in (lambda: target.copy_from(source), lambda: source.copy_to(target)):
                with pytest.raises(PeerDied):
                    copy()
            assert target.has_value


class TestRaces:
    """What two threads of one client do to one buffer harms nobody but them."""

    def test_writer_and_readers(self, prepared, connect):
        """While one thread copies into a buffer, others read it in bursts: every answer comes, and each is a sum of
        values that were written at some time; another client notices nothing.
        """
        bystander = connect().prepare(sum_model())
        with buffer_of(prepared, roles=([BufferRole(0, 0), BufferRole(0, 1)], [])) as buffer:
            buffer.copy_from(X)
            stop, seen = threading.Event(), []

            def read():
                with prepared.burst() as burst:
                    request = reading(buffer)
                    while not stop.is_set():
                        result = burst.execute(request)
                        seen.append(result.outputs[0].copy() if result.status == 0 else None)

            readers = [threading.Thread(target=read) for _ in range(2)]
            for reader in readers:
                reader.start()
            for n in range(100):
                buffer.copy_from(np.full((1, 4), n, np.float32))
                assert bystander.run(X, X)[0].tolist() == (X + X).tolist()
            stop.set()
            for reader in readers:
                reader.join()
        assert len(seen) > 2
        values = {float(v) for array in seen for v in array.ravel()}
        assert all(0 <= v <= 198 for v in values)

    def test_released_while_used(self, prepared):
        """A buffer that is released while bursts execute on it: they are refused from then on, and nothing crashes."""
        for _ in range(20):
            buffer = buffer_of(prepared, roles=([BufferRole(0, 0), BufferRole(0, 1)], []))
            buffer.copy_from(X)
            token, begun, statuses = DeviceBuffer(buffer.token), threading.Event(), []

            request = reading(token)

            def use(request=request, begun=begun, statuses=statuses):
                with prepared.burst() as burst:
                    while not (statuses and statuses[-1]):
                        statuses.append(burst.execute(request).status)
                        begun.set()

            user = threading.Thread(target=use)
            user.start()
            assert begun.wait(20)
            buffer.close()
            user.join(20)
            assert not user.is_alive()
            assert statuses[-1] in (InvalidArgument.status, 2)


@pytest.mark.stress
class TestEndurance:
    """Nothing grows."""

    def test_a_million_cycles(self, place, tally):
        """Allocate, copy, execute, release, a million times, or as often as the budget allows: the engine's memory
        stays what it was after a thousand.
        """
        times = max(2000, stress.times(1_000_000))
        with driver.connect() as device, device.prepare(sum_model()) as prepared, prepared.burst() as burst:
            page = Path(f"/proc/{device.engine_pid}/statm")
            memory = Memory.create(16)
            for n in range(times):
                with buffer_of(prepared, roles=([BufferRole(0, 0), BufferRole(0, 1)], [])) as buffer:
                    buffer.copy_from(memory)
                    request = reading(buffer)
                    assert not burst.execute(request).status
                    burst.free_memory(request.pools[0])
                if n == 1000:
                    before = int(page.read_text().split()[1])
            assert int(page.read_text().split()[1]) < before + 1000
        tally("cycles of buffers", times)


class TestQuota:
    """Bytes are counted while an array on them lives."""

    def test_given_back(self):
        """When the last view is gone, and not before."""
        quota = Quota(100)
        room = quota.room(60)
        view = room[10:20]
        del room
        with pytest.raises(ResourceExhaustedTransient, match="needs 60 bytes, and 40 of the 100"):
            quota.room(60)
        del view
        assert quota.room(100).ctypes.data % 64 == 0

    def test_shared(self):
        """An account and all clients together have limits, too, and what one is refused takes nothing from others."""
        ledger = Ledger(replace(limits(), account_bytes=80, device_bytes=100, application_percent=100))
        one, mate, other = (
            Quota(90, ledger.account(uid).application(name)) for uid, name in ((1, "a"), (1, "b"), (2, ""))
        )
        held = one.room(70)
        with pytest.raises(
            ResourceExhaustedTransient, match=r"account_bytes = 80 is reached: this account has 70 bytes"
        ):
            mate.room(20)
        with pytest.raises(
            ResourceExhaustedTransient, match=r"device_bytes = 100 is reached: all accounts have 70 bytes"
        ):
            other.room(70)
        del held
        with pytest.raises(ResourceExhaustedPersistent, match=r"account_bytes = 80 is reached: this application has 0"):
            other.room(90)
        assert other.room(80).nbytes == 80

    def test_memory_to_spare(self):
        """A buffer that grows gets it where the client may have it, and else what it needs."""
        kind, quota = BufferKind(OperandType.TENSOR_FLOAT32, 0.0, 0, None), Quota(1000)
        one, other = (ManagedBuffer(kind, (0,), frozenset(), quota) for _ in range(2))
        one.grow(400, spare=200)
        one.grow(600, spare=300)
        other.grow(300, spare=150)
        assert (one.nbytes, other.nbytes) == (600, 300)

    def test_temporaries(self):
        """What an execution needs between its operations counts, and is given back with the last request on it."""
        builder = driver.ModelBuilder()
        wide = builder.operation("TILE", builder.input("float32", (1,)), np.array([1 << 20], np.int32))
        builder.output(builder.operation("SLICE", wide, np.array([5], np.int32), np.array([1], np.int32)))
        model, found = builder.build(), []
        kept = SharedModel(None, None, model, ReferenceModel(model, lambda: None))
        memory = Memory.create(8)
        request = Request((RequestArgument(length=4),), (RequestArgument(offset=4, length=4),), (memory,))

        def try_with(nbytes):
            buffers = ManagedBuffers(Quota(nbytes))
            try:
                for _ in range(3):
                    execution(LoadedModel(1, kept, 1), request, buffers, lambda: None).run()
                found.append("done")
            except ResourceExhaustedPersistent as error:
                found.append(str(error))

        for nbytes in (3 << 20, 5 << 20):
            thread = threading.Thread(target=try_with, args=(nbytes,))  # a thread works for one client
            thread.start()
            thread.join()
        assert "an execution or a buffer needs" in found[0]
        assert found[1] == "done"


class TestLimits:
    """~/.config/burst/limits.toml."""

    @pytest.mark.parametrize("text", ["client_bytes = 0", "client_bytes = true", "buffers = 3", "client_bytes ="])
    def test_refused(self, tmp_path, monkeypatch, text):
        """What makes no sense is refused with the file's name."""
        monkeypatch.setenv("HOME", str(tmp_path))
        path = tmp_path / ".config/burst/limits.toml"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        with pytest.raises(ValueError, match=r"limits\.toml"):
            limits()

    def test_configured(self, tmp_path, monkeypatch):
        """What is there counts; without a file there is a default."""
        monkeypatch.setenv("HOME", str(tmp_path))
        assert limits().client_bytes > 2**20
        path = tmp_path / ".config/burst/limits.toml"
        path.parent.mkdir(parents=True)
        path.write_text("client_bytes = 4096")
        assert limits().client_bytes == 4096


def test_errors_are_status_errors(prepared):
    """What the device refuses names the argument, and the device goes on."""
    with pytest.raises(StatusError, match="frequency=2"):
        prepared.device.allocate(BufferDesc(), [prepared], [BufferRole(0, 0, 2.0)], [])
    assert prepared.run(X, X)[0].tolist() == (X + X).tolist()


class TestFailures:
    """An output of an execution that failed has no value afterwards, whatever it was before, on every path."""

    @pytest.mark.parametrize("way", ["plain", "async", "fenced", "burst"])
    @pytest.mark.parametrize("why", ["it fails", "it is late", "it does not fit"])
    def test_an_output_has_no_value(self, connect, kit, way, why):
        """After an execution that failed on the device, was done too late, or could not be bound."""
        device = connect("Slow" if why == "it is late" else "Failing")
        with device.prepare(kit.add_model()) as prepared:
            execute = executes(prepared, prepared.burst())[way]
            state = device.allocate(BufferDesc(), [prepared], [], [BufferRole(0, 0)])
            memory = Memory.create(16)
            request = Request((RequestArgument(length=16),), (RequestArgument(pool=1),), (memory, state))
            assert execute(request).status == 0
            state.copy_to(found := np.empty((1, 4), np.float32))
            assert found.tolist() == [[1, 1, 1, 1]]
            memory.asarray(np.float32, 4)[0] = {"it fails": -1, "it is late": 0.1, "it does not fit": 0}[why]
            terms = {"deadline": time.monotonic() + 0.05} if why == "it is late" else {}
            if why == "it does not fit":
                request = request._replace(inputs=(RequestArgument(length=12),))
                if way == "fenced":
                    with pytest.raises(InvalidArgument):
                        execute(request)
                else:
                    assert execute(request).status == InvalidArgument.status
            else:
                assert execute(request, **terms).status != 0
            if why == "it is late":
                kit.until(lambda: is_without_value(state))  # the client may stop waiting before the device ends
            assert is_without_value(state)

    def test_a_native_execution(self, connect):
        """One that the listener refuses or runs in C."""
        pytest.importorskip("ai_edge_litert")
        device = connect("litert")
        with device.prepare(sum_model()) as prepared, prepared.burst() as burst:
            a = device.allocate(BufferDesc(), [prepared], [BufferRole(0, 0), BufferRole(0, 1)], [])
            b = device.allocate(BufferDesc(), [prepared], [], [BufferRole(0, 0)])
            request = Request((RequestArgument(pool=0),) * 2, (RequestArgument(pool=1),), (a, b))
            a.copy_from(X)
            for _ in range(3):
                assert burst.execute(request).status == 0
            with pytest.raises(InvalidArgument):
                a.copy_from(np.zeros(5, np.float32))
            assert burst.execute(request).status == GeneralFailure.status
            assert is_without_value(b)
            a.copy_from(X)
            assert burst.execute(request).status == 0
            assert not is_without_value(b)


def is_without_value(buffer):
    """Whether nothing can be copied from it."""
    try:
        buffer.copy_to(np.empty((1, 4), np.float32))
    except GeneralFailure:
        return True
    return False
