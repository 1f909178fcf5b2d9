"""Clients of the door in C++ that send what is wrong, too much, or nothing, and what becomes of its process.

The program is the one with AddressSanitizer and UndefinedBehaviorSanitizer, which say nothing until its end.
"""

import contextlib
import os
import random
import resource
import signal
import socket
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from half_request import HalfRequest, connected
from native_doors import EVERYTHING, answered, clean, descriptors, served_of, serving, until_here
from oip_models import Client, client_memory, rows, write_ranges, write_sum
from tritonclient.utils import InferenceServerException, shared_memory
from waiting import PATIENCE, until

from driver.gateways.oip import messages
from driver.gateways.oip.grpc_door import DoorLimits
from driver.gateways.oip.regions import RegionLimits
from driver.service.process_figures import private_bytes

pytestmark = pytest.mark.integration

INFER = f"/{messages.SERVICE}/ModelInfer"
SIZES = DoorLimits(message=1 << 20, requests=4, connections=6, streams=2, patience=0.4, idle=2.0)
MOST_RUNNING = 16  # in csrc/oip/calls.h
ENDED = grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE


@contextlib.contextmanager
def one_server(folder, program, options=EVERYTHING, *, sanitized=True):
    """A server at a Unix socket and a port, and a client of the first: .pid is the door's at it."""
    write_sum(folder / "models" / "sum.onnx")
    with (
        clean(program, sanitized=sanitized),
        serving(folder / "models", [f"unix:{folder}/s", "127.0.0.1:0"], program, options) as server,
        contextlib.closing(Client(server.addresses[0])) as client,
    ):
        until_here(server, client)
        pids = [door.pid for door in server.doors]
        yield SimpleNamespace(server=server, client=client, pid=pids[0], pids=pids, address=server.addresses[0])
        client.sum(rows(), rows())
        assert [door.pid for door in server.doors] == pids


@pytest.fixture(scope="module")
def one(tmp_path_factory, sanitized):
    with one_server(tmp_path_factory.mktemp("one"), sanitized) as found:
        yield found


@pytest.fixture(scope="module")
def small(tmp_path_factory, sanitized):
    """One whose limits are soon reached."""
    with one_server(tmp_path_factory.mktemp("small"), sanitized, EVERYTHING._replace(limits=SIZES)) as found:
        yield found


def request(**changes):
    tensors = [{"name": name, "datatype": "FP32", "shape": [2, 4]} for name in "xy"]
    usual = {"model_name": "sum", "inputs": tensors, "raw_input_contents": [rows().tobytes()] * 2}
    return messages.ModelInferRequest(**{**usual, **changes}).SerializeToString()


def memory_of(pid, kind):
    """Bytes that a process has of that kind: RssShmem in shared memory, VmHWM at most."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(kind))


def has_ended(sock):
    """Whether a connection is over, whatever was said before."""
    with contextlib.suppress(BlockingIOError, ConnectionResetError):
        while said := sock.recv(1 << 16, socket.MSG_DONTWAIT):
            assert said
        return True
    return False


def until_served(address):
    """Connections that were ended may be there still for a moment."""

    def served():
        with contextlib.closing(Client(address)) as client, contextlib.suppress(InferenceServerException):
            return [client.sum(rows(), rows())]

    return until(served)[0]


def refused(client, packet):
    """The code and the words of a refusal."""
    with grpc.insecure_channel(client) as channel, pytest.raises(grpc.RpcError) as error:
        channel.unary_unary(INFER)(packet, timeout=PATIENCE)
    return error.value.code(), error.value.details()


class TestProcess:
    def test_no_descriptors_are_left(self, one):
        """A door that has no descriptor for a connection takes the next ones when it has some again."""
        before = resource.prlimit(one.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(one.pid, resource.RLIMIT_NOFILE, (descriptors(one.pid) + 3, before[1]))
        with contextlib.ExitStack() as stack:
            for _ in range(12):
                stack.enter_context(contextlib.closing(connected(one.address)))
            stack.enter_context(contextlib.closing(late := connected(one.address)))
            late.settimeout(0.3)
            with pytest.raises(TimeoutError):
                late.recv(1)  # a server speaks first
            resource.prlimit(one.pid, resource.RLIMIT_NOFILE, before)
            late.settimeout(PATIENCE)
            assert late.recv(1)
            until_served(one.address)
        until_served(one.address)

    def test_room_for_answers(self, tmp_path, sanitized):
        """A large answer's memory is given back, also where small ones follow without a pause."""
        write_ranges(tmp_path / "models" / "ranges.onnx")
        with one_server(tmp_path, sanitized) as found:

            def ask(limit):
                return found.client.infer("ranges", [found.client.input("limit", np.array(limit, np.int64))])

            def is_here():
                ask(5)
                return answered(found.server, "ranges")

            until(is_here)
            ask(4_000_000)
            large = memory_of(found.pid, "RssShmem")
            until(lambda: [*map(ask, range(50))] and memory_of(found.pid, "RssShmem") < large - (16 << 20))

    def test_descriptors_of_clients(self, one):
        """A client that sends descriptors with its bytes loses them: the door keeps none."""
        before = descriptors(one.pid)
        with contextlib.closing(connected(one.address)) as sock:
            files = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
            with contextlib.suppress(OSError):  # since Linux 6.16 the kernel refuses them
                socket.send_fds(sock, [HalfRequest.PREFACE], files)
            for each in files:
                os.close(each)
            until_served(one.address)
            assert descriptors(one.pid) < before + 10

    def test_its_memory_stays(self, one):
        """Requests that are small and claim much leave its process as large as it was."""
        region = {"shared_memory_region": {"string_param": "r"}, "shared_memory_byte_size": {"int64_param": 1 << 28}}
        shapes = [[1 << 24, 4], [1 << 26], [2**31, 2**31], [2**62, 4], [-1, 4], [1] * 9, [1] * 40]
        with client_memory(64) as (_, key):
            one.client.register_system_shared_memory("r", key, 64)
            before = private_bytes(one.pid)
            for shape in shapes * 5:
                for parameters in ({}, region):
                    tensors = [{"name": n, "datatype": "FP32", "shape": shape, "parameters": parameters} for n in "xy"]
                    for raw in ([], [b"", b""]):
                        code, _ = refused(one.address, request(inputs=tensors, raw_input_contents=raw))
                        assert code == grpc.StatusCode.INVALID_ARGUMENT
            one.client.unregister_system_shared_memory("r")
        assert private_bytes(one.pid) < before + (64 << 20)

    def test_mutants(self, one):
        """Thousands of packets that a few changes have made wrong: each is answered or refused."""
        randoms, codes = random.Random(4), set()
        methods = [each.name for each in messages.METHODS if not any(each.streams)]
        with grpc.insecure_channel(one.address) as channel:
            for n in range(3000):
                packet = bytearray(request(id="one", outputs=[{"name": "sum"}]))
                for _ in range(randoms.randint(1, 4)):
                    at = randoms.randrange(len(packet))
                    packet[at : at + randoms.randint(0, 4)] = randoms.randbytes(randoms.randint(0, 6))
                method = methods[n % len(methods)] if n % 4 == 0 else "ModelInfer"
                if "Repository" in method or "Unregister" in method:
                    continue
                try:
                    channel.unary_unary(f"/{messages.SERVICE}/{method}")(bytes(packet), timeout=PATIENCE)
                except grpc.RpcError as error:
                    codes.add(error.code())
        assert not codes & {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN}

    def test_bytes_that_are_no_http(self, one):
        """Connections of anything but HTTP/2 are ended, and no others."""
        randoms = random.Random(5)
        for _ in range(50):
            with contextlib.closing(connected(one.address)) as sock:
                begin = randoms.choice((b"", HalfRequest.PREFACE))
                with contextlib.suppress(OSError):
                    sock.sendall(begin + randoms.randbytes(randoms.randrange(300)))


class TestRegions:
    def test_a_file_that_shrinks(self, one):
        """What a client does to its file later harms no process: its request is refused, or finds zeros."""
        with client_memory(1 << 16) as (region, key):
            one.client.register_system_shared_memory("shrinks", key, 1 << 16)
            x = rows()
            shared_memory.set_shared_memory_region(region, [x, x])
            given = [one.client.placed(n, x, "FP32", "shrinks", 32, offset) for n, offset in (("x", 0), ("y", 32))]
            wanted = [one.client.output("sum", "shrinks", 32, 1 << 15)]
            one.client.infer("sum", given, outputs=wanted)
            path = Path("/dev/shm") / key.lstrip("/")
            for size in (1 << 12, 16, 0):
                os.truncate(path, size)
                with contextlib.suppress(InferenceServerException):
                    one.client.infer("sum", given, outputs=wanted)
                assert path.stat().st_size == size
                one.client.sum(x, x)
            os.truncate(path, 1 << 16)
            one.client.infer("sum", given, outputs=wanted)
            one.client.unregister_system_shared_memory("shrinks")

    @pytest.mark.parametrize("offset", [2**63, 2**64 - 16, 2**62, 1 << 16])
    def test_places_outside(self, one, offset):
        """Places that end outside of their region, also where the sum is beyond 64 bits, are refused."""
        with client_memory(1 << 16) as (_, key):
            one.client.register_system_shared_memory("outside", key, 1 << 16)
            place = {"shared_memory_region": {"string_param": "outside"}}
            place |= {"shared_memory_byte_size": {"int64_param": 32}, "shared_memory_offset": {"uint64_param": offset}}
            tensors = [{"name": n, "datatype": "FP32", "shape": [2, 4], "parameters": place} for n in "xy"]
            for changes in (
                {"inputs": tensors, "raw_input_contents": []},
                {"outputs": [{"name": "sum", "parameters": place}]},
            ):
                assert refused(one.address, request(**changes))[0] == grpc.StatusCode.INVALID_ARGUMENT
            one.client.unregister_system_shared_memory("outside")

    def test_names_and_keys(self, one):
        """A key of several components is refused, whatever the region is called; a name may have any characters."""
        with client_memory(4096) as (region, key):
            for wrong in ("/../etc/passwd", "..", "a/b", "/dev/shm" + key, key + "/"):
                with pytest.raises(InferenceServerException):
                    one.client.register_system_shared_memory("r", wrong, 4096)
            shared_memory.set_shared_memory_region(region, [rows(), rows()])
            for name in ("../r", "a/b", "é", "x" * 255):
                one.client.register_system_shared_memory(name, key, 4096)
                given = [one.client.placed(n, rows(), "FP32", name, 32, 32 * i) for i, n in enumerate("xy")]
                np.testing.assert_array_equal(one.client.infer("sum", given).as_numpy("sum"), 2 * rows())
                one.client.unregister_system_shared_memory(name)

    def test_descriptors_are_closed(self, one):
        """Regions that come and go, also while requests run on them, leave no descriptor behind."""
        with client_memory(4096) as (region, key), ThreadPoolExecutor(4) as threads:
            shared_memory.set_shared_memory_region(region, [rows(), rows()])
            given = [one.client.placed(n, rows(), "FP32", "comes", 32, 32 * i) for i, n in enumerate("xy")]

            def ask(_):
                with contextlib.suppress(InferenceServerException):
                    one.client.infer("sum", given)

            def come_and_go():
                one.client.register_system_shared_memory("comes", key, 4096)
                asked = [threads.submit(ask, n) for n in range(4)]
                one.client.unregister_system_shared_memory("comes")
                for each in asked:
                    each.result()

            list(threads.map(lambda _: one.client.sum(rows(), rows()), range(100)))  # opens all bursts
            come_and_go()
            before = descriptors(one.pid)
            for _ in range(40):
                come_and_go()
        until(lambda: descriptors(one.pid) <= before + 2)

    def test_a_region_in_use_stays(self, tmp_path, sanitized):
        """A region that requests use is not idle, whichever process answers them; one that none uses ends."""
        options = EVERYTHING._replace(regions=RegionLimits(idle=1.0))
        with one_server(tmp_path, sanitized, options) as found, client_memory(4096) as (region, key):
            shared_memory.set_shared_memory_region(region, [rows(), rows()])
            client = found.client
            for name in ("used", "unused"):
                client.register_system_shared_memory(name, key, 4096)
            given = [client.placed(n, rows(), "FP32", "used", 32, 32 * i) for i, n in enumerate("xy")]

            def is_ended():
                client.infer("sum", given)
                regions = client.get_system_shared_memory_status().regions
                assert "used" in regions
                return "unused" not in regions

            until(is_ended)


class TestBounds:
    def test_size(self, small):
        """A message of more bytes than may be is refused."""
        big = np.zeros((100_000, 4), np.float32)
        with pytest.raises(InferenceServerException, match=r"(?i)larger than max"):
            small.client.sum(big, big)

    def test_connections(self, small):
        """There are so many; when silent ones have been ended, others are served."""
        for address in small.server.addresses:
            with contextlib.ExitStack() as stack:
                silent = [stack.enter_context(contextlib.closing(connected(address))) for _ in range(12)]
                until(lambda silent=silent: sum(map(has_ended, silent)) >= 12 - SIZES.connections)
            until_served(address)

    @pytest.mark.parametrize("method", ["ModelInfer", "ServerLive"])
    def test_calls_whose_message_never_comes(self, small, method):
        """They are ended, and told why, without a deadline of their client's."""
        silence = threading.Event()

        def nothing():
            silence.wait(PATIENCE)
            yield from ()

        with grpc.insecure_channel(small.address) as channel, contextlib.ExitStack() as stack:
            stack.callback(silence.set)
            start = channel.stream_stream(f"/{messages.SERVICE}/{method}")
            calls = [start(nothing()) for _ in range(2 * SIZES.requests)]
            for call in calls:
                with pytest.raises(grpc.RpcError):
                    next(call)
                assert call.code() in ENDED
            until_served(small.address)

    def test_streams(self, small):
        """So many streams; one more is refused, and requests beside them are answered."""
        with grpc.insecure_channel(small.address) as channel:
            over, calls = threading.Event(), []

            def silent():
                yield request()
                over.wait(PATIENCE)

            stream = channel.stream_stream(f"/{messages.SERVICE}/ModelStreamInfer")
            for _ in range(SIZES.streams):
                calls.append(stream(silent()))
                assert next(calls[-1])
            with pytest.raises(grpc.RpcError) as error:
                next(stream(silent()))
            assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            small.client.sum(rows(), rows())
            over.set()
            for call in calls:
                call.cancel()

    def test_messages_that_do_not_come_whole(self, tmp_path, sanitized):
        """They take so much together at most, and others are answered."""
        limits = DoorLimits(requests=16, incomplete=64 << 20)
        with (
            one_server(tmp_path, sanitized, EVERYTHING._replace(limits=limits)) as found,
            contextlib.ExitStack() as stack,
        ):
            calls = [stack.enter_context(contextlib.closing(HalfRequest(found.address, 64 << 20))) for _ in range(8)]
            with ThreadPoolExecutor(len(calls)) as threads:
                sent = list(threads.map(lambda call: call.send(40 << 20), calls))
                assert b"send it again" in next(as_completed([threads.submit(call.told) for call in sent])).result()
                for call in calls:
                    call.leave()
            until_served(found.address)


class Unread:
    """Clients that ask for ranges and read nothing of them, at the address of a server's last door."""

    def __init__(self, found, stack):
        self.server, self._stack = found.server, stack
        self.address, self.door = found.server.addresses[-1], found.server.doors[-1]
        (self._served,) = served_of(found.server, "ranges")
        client = stack.enter_context(contextlib.closing(Client(self.address)))

        def is_here():
            client.infer("ranges", [client.input("limit", np.array(5, np.int64))])
            return self.answered

        until(is_here)

    @property
    def answered(self):
        return self.door.counts(self._served).requests

    def ask(self, count, **options):
        """A client that asks for so many numbers, once the door has answered it."""
        tensor = {"name": "limit", "datatype": "INT64", "shape": []}
        raw = [np.int64(count).tobytes()]
        packet, before = request(model_name="ranges", inputs=[tensor], raw_input_contents=raw), self.answered
        call = HalfRequest(self.address, len(packet), body=packet, **options)
        self._stack.enter_context(contextlib.closing(call)).send(len(packet) + 5)
        until(lambda: self.answered > before)
        return call


@contextlib.contextmanager
def with_ranges(folder, program, limits, *, sanitized=True):
    """A server, and clients that read nothing."""
    write_ranges(folder / "models" / "ranges.onnx")
    options = EVERYTHING._replace(limits=limits)
    with one_server(folder, program, options, sanitized=sanitized) as found, contextlib.ExitStack() as stack:
        yield found, Unread(found, stack)


class TestUnread:
    def test_places(self, tmp_path, sanitized):
        """Calls whose answers are not read are no requests that run: as many as may be, and more, keep out none."""
        with with_ranges(tmp_path, sanitized, DoorLimits(requests=2, streams=2, patience=PATIENCE)) as (_, unread):
            for _ in range(12):
                unread.ask(100_000)
            with contextlib.closing(Client(unread.address)) as client:
                for _ in range(20):
                    client.sum(rows(), rows())

    def test_time(self, tmp_path, sanitized):
        """They have the time of an answer."""
        limits = DoorLimits(patience=0.4, slowest=1 << 30)
        with with_ranges(tmp_path, sanitized, limits) as (_, unread):
            calls = [unread.ask(100_000) for _ in range(4)]
            assert all(call.rest() < 800_000 for call in calls)

    def test_the_machine_with_most(self, tmp_path, program):
        """Together they take so much memory: those of the machine that has most of it are cut, and no others."""
        limits = DoorLimits(incomplete=32 << 20, patience=PATIENCE)
        with with_ranges(tmp_path, program, limits, sanitized=False) as (_, unread):
            before = private_bytes(unread.door.pid)
            slow = unread.ask(100_000)
            strangers = [unread.ask(1_000_000, source="127.0.0.2") for _ in range(12)]
            assert strangers[0].rest() < 8_000_000
            until(lambda: private_bytes(unread.door.pid) < before + limits.incomplete + (16 << 20))
            assert slow.rest(takes=True) > 800_000

    def test_a_client_that_takes_nothing(self, tmp_path, program):
        """Its windows let gRPC write all of its answers at once: its connections end soon after its calls."""
        limits = DoorLimits(patience=1.0, slowest=1 << 30)
        with with_ranges(tmp_path, program, limits, sanitized=False) as (_, unread):
            before = private_bytes(unread.door.pid)
            calls = [unread.ask(5_000_000, grants=True) for _ in range(4)]
            until(lambda: private_bytes(unread.door.pid) < before + (16 << 20))
            for call in calls:
                with contextlib.suppress(ConnectionError):
                    assert call.rest() < 40_000_000


class TestPacked:
    @pytest.mark.parametrize("packed", ["gzip", "deflate"])
    def test_what_becomes_large(self, one, packed):
        """A message that is small until it is unpacked is refused as at Python's door, and takes no memory here."""
        packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | (16 if packed == "gzip" else 0))
        bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(256)) + packer.flush()
        Path(f"/proc/{one.pid}/clear_refs").write_text("5")  # the peak begins anew
        before = memory_of(one.pid, "VmHWM")
        for method in ("ModelInfer", "ModelStreamInfer"):
            with contextlib.closing(HalfRequest(one.address, len(bomb), method, body=bomb, packed=packed)) as call:
                assert b"larger than max" in call.send(len(bomb) + 5).told()
        assert memory_of(one.pid, "VmHWM") < before + (64 << 20)


class TestDeadlines:
    def test_a_device_that_stands_still(self, one):
        """Requests whose deadline passes while they wait, or while the device has them, end; later ones are served."""
        pid, before = engine_of(one), answered(one.server, "sum")
        os.kill(pid, signal.SIGSTOP)
        try:
            with grpc.insecure_channel(one.address) as channel:
                call = channel.unary_unary(INFER)
                futures = [call.future(request(), timeout=0.5) for _ in range(8)]
                gone = [call.future(request()) for _ in range(4)]
                for each in futures:
                    assert each.exception().code() == grpc.StatusCode.DEADLINE_EXCEEDED
                for each in gone:
                    each.cancel()
                until(lambda: failures(one) > 0)  # the door knows of deadlines, too
                assert channel.unary_unary(f"/{messages.SERVICE}/ServerLive")(b"", timeout=PATIENCE)
        finally:
            os.kill(pid, signal.SIGCONT)
        one.client.sum(rows(), rows())
        assert answered(one.server, "sum") < before + 4  # nothing is executed for those that do not wait
        before = answered(one.server, "sum")
        until_here(one.server, one.client)
        until(lambda: [one.client.sum(rows(), rows())] and answered(one.server, "sum") > before)

    def test_as_many_as_may_run(self, tmp_path, sanitized):
        """Requests beyond those that may run here at once go by way of Python's door, and others are answered."""
        names = "first", "second"
        for name in names:
            write_sum(tmp_path / "models" / name / "1" / "model.onnx")
            (tmp_path / "models" / name / "config.pbtxt").write_text("instance_group { count: 16 }")
        with one_server(tmp_path, sanitized) as found, grpc.insecure_channel(found.address) as channel:
            for name in names:
                until_here(found.server, found.client, name)
            pid, before = engine_of(found), sum(answered(found.server, name) for name in names)
            os.kill(pid, signal.SIGSTOP)
            try:
                call = channel.unary_unary(INFER)
                asked = [call.future(request(model_name=name)) for name in names * 12]
                for _ in asked:
                    assert channel.unary_unary(f"/{messages.SERVICE}/ServerLive")(b"", timeout=PATIENCE)
            finally:
                os.kill(pid, signal.SIGCONT)
            for each in asked:
                assert each.result(PATIENCE)
            assert sum(answered(found.server, name) for name in names) == before + MOST_RUNNING


def failures(one):
    """How many requests have failed, as clients are told."""
    (figures,) = one.client.get_inference_statistics("sum").model_stats
    return figures.inference_stats.fail.count


def engine_of(one):
    """The number of the engine's process of the server's device."""
    from driver import connect

    assert one
    with connect("onnxruntime") as device:
        return device.engine_pid
