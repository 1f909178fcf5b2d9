"""Clients of the Open Inference Protocol that send what is wrong, too much, or nothing.

Each gets an answer or loses its own connection, and the others are served.
"""

import contextlib
import gzip
import http.client
import json
import os
import queue
import random
import re
import select
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import grpc
import numpy as np
import pytest
from certificates import write_certificate
from half_request import HalfRequest, connected
from oip_models import Client, rows, write_sum
from tritonclient.utils import InferenceServerException
from waiting import PATIENCE, until

from driver.errors import DeviceFailed
from driver.gateways import request_memory
from driver.gateways.door_address import DoorAddress
from driver.gateways.oip import messages
from driver.gateways.oip.grpc_door import Credentials, DoorLimits, GrpcDoor, GrpcFront
from driver.gateways.oip.http_door import HttpDoor
from driver.gateways.oip.http_front import HttpFront
from driver.gateways.oip.oip_address import oip_address
from driver.gateways.oip.process import InferenceServer, OipOptions
from driver.gateways.oip.regions import RegionTable
from driver.gateways.oip.service import InferenceService
from driver.gateways.oip.unread_answers import UnreadAnswers
from driver.gateways.oip.unsent_answers import UnsentAnswers, unsent_in
from driver.gateways.refusal import Refusal
from driver.gateways.request_memory import LARGE, MemoryClaim, RequestMemory
from driver.service import metrics_server
from driver.service.peer_limiter import of_all
from driver.service.process_figures import private_bytes

METHODS = [each.name for each in messages.METHODS]
_OTHER = b'{"name": "y", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}'
_ONE = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": %s}, ' + _OTHER + b"]}"
CLASSES_OF_NONE = {"classification": {"int64_param": -1}}
WORDS = {"contents": {"bytes_contents": [b"a"] * 8}}
SIZES = DoorLimits(message=1 << 20, requests=4, connections=6, streams=2, patience=0.4, idle=2.0)


def _field(number, content):
    """One of protobuf, with its length."""
    size, head = len(content), bytearray([number << 3 | 2])
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes([*head, size]) + content


_MANY = 1 << 24
BOMBS = {
    "lists": (b'{"inputs": [' + b"[]," * _MANY + b"[]]}", None),
    "objects": (b'{"inputs": [' + b"{}," * _MANY + b"{}]}", None),
    "keys": (b"{" + b'"":0,' * (_MANY // 2) + b'"":0}', None),
    "inputs": (None, _field(1, b"sum") + b"\x2a\0" * 200_000),
    "parameters": (None, _field(1, b"sum") + b"\x22\0" * 200_000),
    "shapes": (None, _field(1, b"sum") + _field(5, _field(3, bytes(_MANY * 2)))),
    "strings": (None, _field(1, b"sum") + _field(5, _field(5, b"\x42\0" * 200_000))),
    "numbers": (None, _field(1, b"sum") + _field(5, _field(5, _field(3, bytes(_MANY * 2))))),
}


MANY = [
    "[]",
    "[0]",
    "{}",
    '{"a":0}',
    '{"a%d":0,"b%d":1}',
    '"ab%d"',
    "1%d",
    "0.5",
    "[[%d]]",
    '"\\u1234%d"',
    '"\U0001f600%d"',
]
PARTS = [*MANY, '"~"', '"~é"', '"~ሴ"', '"~\U0001f600"', '"~\\n"', '"~\\u1234"', '"~\\ud83d\\ude00"']
DECODE = """
import json, sys, tracemalloc
from driver.gateways.request_memory import json_bytes

found, long = {}, "a" * 2**20
for part in json.load(sys.stdin):
    count = 1 if "~" in part else 50_000
    parts = (part.replace("~", long) % ((n,) * part.count("%d")) for n in range(count))
    body = f"[{','.join(parts)}]".encode()
    tracemalloc.start()
    values = json.loads(body)
    found[part] = tracemalloc.get_traced_memory()[1], json_bytes(body)
    tracemalloc.stop()
    assert len(values) == count
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def decoded():
    """What decoding takes, and its estimate, of each part: in a process of its own, where no other thread allocates."""
    command = [sys.executable, "-c", DECODE]
    return json.loads(
        subprocess.run(command, input=json.dumps(PARTS).encode(), stdout=subprocess.PIPE, check=True).stdout
    )


@pytest.fixture
def fronts(server):
    service = InferenceService(server.repository, RegionTable(os.getuid()))
    return GrpcFront(service), HttpFront(service, 1 << 20)


def request(**changes):
    """A request that is right, with changes."""
    usual = {"model_name": "sum", "inputs": tensors(), "raw_input_contents": [rows().tobytes()] * 2}
    return messages.ModelInferRequest(**{**usual, **changes})


def tensors(**changes):
    return [{"name": name, "datatype": "FP32", "shape": [2, 4], **changes} for name in "xy"]


class TestWrong:
    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            ({"model_name": "nothing"}, "there is no model 'nothing'"),
            ({"model_name": "../sum"}, "there is no model"),
            ({"model_version": "7"}, "has no version '7'"),
            ({"model_version": "one"}, "has no version 'one'"),
            ({"inputs": tensors()[:1], "raw_input_contents": [rows().tobytes()]}, "input 'y' is missing"),
            ({"inputs": tensors(name="x")}, "an input is given twice"),
            ({"inputs": [*tensors(), {"name": "z"}], "raw_input_contents": [rows().tobytes()] * 3}, "no input 'z'"),
            ({"inputs": tensors(datatype="FP64")}, "is FP32, not 'FP64'"),
            ({"inputs": tensors(datatype="BYTES")}, "is FP32, not BYTES"),
            ({"inputs": tensors(datatype="BYTES", **WORDS), "raw_input_contents": []}, "is FP32, not BYTES"),
            ({"inputs": tensors(**WORDS), "raw_input_contents": []}, "values in bytes_contents, not in fp32_contents"),
            ({"inputs": tensors(datatype="FP99")}, "not a type of the protocol"),
            ({"inputs": tensors(shape=[2, 5])}, r"has shape \[-1, 4\], not \[2, 5\]"),
            ({"inputs": tensors(shape=[8])}, r"has shape \[-1, 4\], not \[8\]"),
            ({"inputs": tensors(shape=[-2, 4])}, "each size is from 0"),
            ({"inputs": tensors(shape=[2**40, 4])}, "each size is from 0"),
            ({"inputs": tensors(shape=[3, 4])}, "has 48 bytes, and 32 came"),
            ({"inputs": tensors(shape=[2**31, 4])}, "bytes, and 32 came"),
            ({"raw_input_contents": [rows().tobytes()]}, "has no raw contents"),
            ({"raw_input_contents": [rows().tobytes()] * 3}, "3 raw contents for 2 inputs"),
            ({"raw_input_contents": []}, "has no data"),
            ({"inputs": tensors(contents={"fp32_contents": [1.0] * 8})}, "has its values twice"),
            (
                {"inputs": tensors(contents={"fp32_contents": [1.0] * 7}), "raw_input_contents": []},
                "has not 7 values",
            ),
            (
                {"inputs": tensors(contents={"int_contents": [1] * 8}), "raw_input_contents": []},
                "has values in int_contents, not in fp32_contents",
            ),
            ({"outputs": [{"name": "sum"}, {"name": "sum"}]}, "an output is asked for twice"),
            ({"outputs": [{"name": "sum", "parameters": CLASSES_OF_NONE}]}, "classification=-1"),
        ],
    )
    def test_each_mistake_is_told(self, fronts, changes, told):
        """Names, types, shapes and sizes that are not the model's."""
        with pytest.raises((Refusal, ValueError), match=told):
            fronts[0].answer("ModelInfer", request(**changes).SerializeToString())

    def test_values_in_the_message(self, fronts):
        """Typed contents are taken as raw ones are."""
        values = request(inputs=tensors(contents={"fp32_contents": range(8)}), raw_input_contents=[])
        answer = messages.ModelInferResponse.FromString(fronts[0].answer("ModelInfer", values.SerializeToString()))
        np.testing.assert_array_equal(np.frombuffer(answer.raw_output_contents[0], np.float32), 2 * np.arange(8))

    @pytest.mark.parametrize(
        ("body", "told"),
        [
            (b"[]", "not a JSON object"),
            (b"{", "not valid JSON"),
            (b"[" * 100_000, "not valid JSON"),
            (b'{"inputs": 1}', "'inputs' must be a list"),
            (b'{"inputs": [{"name": 1}]}', "needs a name"),
            (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": ["2"]}]}', "a list of integers"),
            (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [2]}]}', "in exactly one place"),
            (b'{"parameters": {"timeout": -1}}', "timeout=-1"),
            (b'{"parameters": {"timeout": true}}', "timeout=True"),
            (b'{"parameters": {"priority": "high"}}', "priority='high'"),
            (b'{"outputs": [{"name": "sum", "parameters": {"classification": -3}}]}', "classification=-3"),
            (_ONE % b"[[1,2],[3]]", "not all of type FP32"),
            (_ONE % b'["1",2,3,4]', "not all of type FP32"),
        ],
    )
    def test_json(self, fronts, body, told):
        """What is no request is told with a status of the client's fault."""
        found = fronts[1].answer("POST", "/v2/models/sum/infer", {}, body)
        assert 400 <= found.status < 600
        assert found.status != 500
        assert told in json.loads(found.body[0])["error"]

    @pytest.mark.parametrize("length", ["-1", "999999", "x", "1e3", "٣"])
    def test_the_length_of_json(self, fronts, length):
        """The length of the JSON before binary tensors lies within the body."""
        fields = {"inference-header-content-length": length}
        assert fronts[1].answer("POST", "/v2/models/sum/infer", fields, b"{}").status == 400

    @pytest.mark.parametrize(
        "what", ["lists", "objects", "keys", "inputs", "shapes", "strings", "parameters", "numbers"]
    )
    def test_what_becomes_large_is_refused_before_it_is_decoded(self, fronts, server, what):
        """Requests that take more memory once they are decoded than a client may have, by what they are made of."""
        body, packet = BOMBS[what]
        if body:
            packed = gzip.compress(body, 1)
            front = HttpFront(InferenceService(server.repository, None), 64 << 20)
            found = front.answer("POST", "/v2/models/sum/infer", {"content-encoding": "gzip"}, packed)
            assert found.status == 429
            assert "MiB of memory when it is decoded; at most 1024" in json.loads(found.body[0])["error"]
        else:
            with pytest.raises(Refusal, match=r"fields|MiB of memory") as refused:
                fronts[0].answer("ModelInfer", packet)
            assert refused.value.code.http == 429

    @pytest.mark.integration
    @pytest.mark.parametrize("part", PARTS)
    def test_json_takes_no_more_than_was_estimated(self, decoded, part):
        """Python's own count of what decoding takes is no more than the estimate, of many values and of a long one."""
        taken, estimated = decoded[part]
        assert taken <= estimated

    def test_compressed(self, fronts):
        """A body that unpacks to more than may come is refused, and what is not packed, too."""
        import zlib

        bomb = zlib.compress(bytes(64 << 20))
        for packed in (bomb, b"nothing", zlib.compress(b"{}")[:-2]):
            found = fronts[1].answer("POST", "/v2/repository/index", {"content-encoding": "deflate"}, packed)
            assert found.status == 400

    def test_browsers(self, fronts):
        """A page in a browser cannot have its visitor's server do anything."""
        for field in ("origin", "sec-fetch-site"):
            assert fronts[1].answer("POST", "/v2/repository/models/sum/unload", {field: "x"}, b"").status == 403
        assert fronts[1].answer("GET", "/v2/models/sum/ready", {}, b"").status == 200

    def test_methods_and_paths(self, fronts):
        """A wrong verb is 405, a path that is not the protocol's 404."""
        assert fronts[1].answer("POST", "/v2", {}, b"").status == 405
        for path in ("/", "/v3", "/v2/models/sum/../sum", "/v2/models//ready", "/v2/models/a%2fb/ready/"):
            assert fronts[1].answer("GET", path, {}, b"").status == 404

    def test_parameters_of_loading(self, server, fronts):
        """A client cannot bring a model of its own, or another configuration."""
        load = messages.message("RepositoryModelLoadRequest")(model_name="sum")
        load.parameters["file:1/model.onnx"].bytes_param = b"model"
        with pytest.raises(Refusal, match="not taken from clients"):
            fronts[0].answer("RepositoryModelLoad", load.SerializeToString())
        with pytest.raises(Refusal, match="no model"):
            fronts[0].answer("RepositoryModelLoad", type(load)(model_name="../../etc/passwd").SerializeToString())


def mutants(seed, count):
    """Requests of every method that a few changes have made wrong, or left right."""
    randoms = random.Random(seed)
    placed = request(raw_input_contents=[])
    for tensor in placed.inputs:
        tensor.parameters["shared_memory_region"].string_param = "none"
        tensor.parameters["shared_memory_byte_size"].int64_param = 32
    seeds = [request().SerializeToString(), placed.SerializeToString()]
    seeds += [request(inputs=tensors(contents={"fp32_contents": [1.0] * 8}), raw_input_contents=[]).SerializeToString()]
    register = messages.message("SystemSharedMemoryRegisterRequest")
    others = [register(name="r", key="/none", offset=1, byte_size=64).SerializeToString(), b"\n\x03sum", b""]
    for _ in range(count):
        method = randoms.choice([*METHODS, *["ModelInfer"] * 12])
        packet = bytearray(randoms.choice(seeds if method in ("ModelInfer", "ModelStreamInfer") else others))
        for _ in range(randoms.randint(1, 4)):
            at = randoms.randrange(len(packet) + 1)
            match randoms.randrange(4):
                case 0 if packet:
                    packet[at % len(packet)] = randoms.choice((0, 1, 0x7F, 0x80, 0xFF, randoms.randrange(256)))
                case 1:
                    packet[at:at] = randoms.randbytes(randoms.randint(1, 8))
                case 2:
                    del packet[at : at + randoms.randint(1, 16)]
                case _ if packet:
                    begin = randoms.randrange(len(packet))
                    packet[at:at] = packet[begin : begin + randoms.randint(1, 32)]
        yield method, bytes(packet)


def throw(front, seed, count, monkeypatch=None):
    """All of them at a front; returns how many were answered. Anything but a refusal is a failure of the test."""
    answered = 0
    for method, packet in mutants(seed, count):
        if method in ("RepositoryModelUnload", "RepositoryModelLoad"):
            continue  # would be heeded where the mutation left the name as it was
        try:
            if method == "ModelStreamInfer":
                list(front.stream_answers(packet))
            else:
                front.answer(method, packet)
            answered += 1
        except Exception as error:  # noqa: BLE001 (looked at below)
            from driver.gateways.refusal import refusal_of

            def fail(error, method=method, packet=packet):
                raise AssertionError(f"{method} {packet.hex()}") from error

            refusal_of(error, fail)
    return answered


class TestMutants:
    def test_a_thousand(self, fronts, server):
        """Each of a thousand mutated messages is answered or refused, and none is a fault of the server's."""
        assert throw(fronts[0], 1, 1000) > 50
        assert server.clients["grpc"].is_model_ready("sum")

    @pytest.mark.stress
    def test_a_million(self, fronts, server, tally):
        """A million of them (a tenth by `make stress`)."""
        count = int(1_000_000 * float(os.environ.get("BURST_STRESS", "1")))
        throw(fronts[0], 2, count)
        tally("mutated messages of the Open Inference Protocol", count)
        x = rows()
        np.testing.assert_array_equal(server.clients["grpc"].sum(x, x).as_numpy("sum"), 2 * x)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A server whose limits are soon reached: (gRPC, HTTP and Unix addresses)."""
    place = tmp_path_factory.mktemp("small")
    write_sum(place / "models" / "sum.onnx")
    addresses = ["127.0.0.1:0", "http://127.0.0.1:0"]
    its = InferenceServer("onnxruntime", place / "models", addresses, OipOptions(limits=SIZES))
    its.begin()
    yield its
    its.close()


def ended(sock):
    """Whether the server ends the connection, whatever it says before."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


def until_served(address):
    """The server may not have seen yet that connections before this one have ended."""

    def served():
        with (
            contextlib.closing(Client(address)) as client,
            contextlib.suppress(InferenceServerException, ConnectionError),
        ):
            return [client.sum(rows(), rows())]

    (found,) = until(served)
    return found


ENDED = grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE


def _nothing_until(event):
    event.wait(PATIENCE)
    yield from ()


class TestIncomplete:
    def test_messages_that_do_not_come_whole(self, server):
        """They take 64 MiB together at most, where as many calls could take a GiB; others are answered."""
        service = InferenceService(server.repository, None)
        limits = DoorLimits(requests=16, incomplete=64 << 20)
        door = GrpcDoor(service, "127.0.0.1:0", limits)
        with contextlib.ExitStack() as stack:
            stack.callback(door.close, 0)
            door.begin()
            address = f"127.0.0.1:{door.port}"
            until_served(address)
            before = private_bytes(os.getpid())
            calls = [stack.enter_context(contextlib.closing(HalfRequest(address, 64 << 20))) for _ in range(10)]
            with ThreadPoolExecutor(len(calls)) as threads:
                sent = list(threads.map(lambda call: call.send(48 << 20), calls))
                assert b"send it again" in next(as_completed([threads.submit(call.told) for call in sent])).result()
                until(lambda: private_bytes(os.getpid()) < before + (64 << 20) + LARGE)
                for call in calls:
                    call.leave()
            until_served(address)


LONG = 40 << 20  # malloc gives the system back at once what it took beyond 32 MiB, and keeps less than that for later


class Talkative(InferenceService):
    """A service that has much to say about itself."""

    def server_metadata(self):
        return {"name": "x" * LONG}


@contextlib.contextmanager
def talkative(server, limits):
    """A door whose answers are long: its address."""
    door = GrpcDoor(Talkative(server.repository, None), "127.0.0.1:0", limits)
    with contextlib.ExitStack() as end:
        end.callback(door.close, 0)
        door.begin()
        address = f"127.0.0.1:{door.port}"
        until_served(address)
        yield address


ESTABLISHED = "01"  # in /proc/net/tcp


def unsent_by(address):
    """Bytes that were sent from an address on TCP connections that have not ended, and that nobody has taken yet."""
    port = f":{int(address.rpartition(':')[2]):04X}"
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path("/proc/net", name).read_text().splitlines()[1:]]
    return sum(int(row[4].partition(":")[0], 16) for row in rows if row[1].endswith(port) and row[3] == ESTABLISHED)


class TestUnread:
    def test_answers_that_are_not_read(self, server):
        """They take so much together, and not much more; a request that is under way meanwhile is answered.

        gRPC may keep its copy of an answer after the call has ended: those of all four are less.
        """
        limits = DoorLimits(requests=16, incomplete=5 * LONG)
        with contextlib.ExitStack() as stack:
            address = stack.enter_context(talkative(server, limits))
            before, comes = private_bytes(os.getpid()), threading.Event()

            def later():
                comes.wait(PATIENCE)
                yield request().SerializeToString()

            channel = stack.enter_context(grpc.insecure_channel(address))
            stack.callback(comes.set)
            honest = channel.stream_unary(f"/{messages.SERVICE}/ModelInfer").future(later())
            for _ in range(4):
                stack.enter_context(contextlib.closing(HalfRequest(address, 0, "ServerMetadata"))).send(5)
            until(lambda: private_bytes(os.getpid()) > before + limits.incomplete)
            until(lambda: private_bytes(os.getpid()) < before + limits.incomplete + (16 << 20))
            until_served(address)
            comes.set()
            assert honest.result(PATIENCE)

    def test_answers_to_a_client_that_takes_nothing(self, server, caplog):
        """Its windows let gRPC write all of its answers at once, and it reads none of them: its connections end soon
        after its calls, so that nothing of them is kept, and others are served.
        """
        limits = DoorLimits(requests=16, patience=1.0, slowest=1 << 30)

        def said(what):
            return sum(int(count) for count in re.findall(rf"(\d+) {what}", caplog.text))

        with contextlib.ExitStack() as stack:
            address = stack.enter_context(talkative(server, limits))
            due = said("calls have ended") + 4
            for _ in range(4):
                call = HalfRequest(address, 0, "ServerMetadata", grants=True)
                stack.enter_context(contextlib.closing(call)).send(5)
            until(lambda: said("calls have ended") == due and not unsent_by(address), lambda: unsent_by(address))
            assert said("connections have ended: their clients read nothing")
            until_served(address)

    def test_whose_connections_end(self):
        """Those that take nothing for a while, and not those that have read all, or have no call that was ended."""
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            pairs = []
            for _ in range(4):
                client = stack.enter_context(socket.create_connection(listener.getsockname()))
                pairs.append((stack.enter_context(listener.accept()[0]), client))
            unsent = UnsentAnswers(patience=0.0)
            for number, (server, client) in enumerate(pairs):
                server.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    while number != 2:
                        server.send(bytes(1 << 16))
                if number != 3:
                    unsent.note("ipv4:{}:{}".format(*client.getsockname()))
            unsent.note("unix:")
            assert unsent.hang_up() == 0
            while unsent_in(pairs[1][0]):
                pairs[1][1].recv(1 << 20)
            until(unsent.hang_up)
            assert unsent.hang_up() == 0
            assert select.select([server for server, _ in pairs], [], [], 0)[0] == [pairs[0][0]]

    def test_the_account_with_most(self):
        """Who leaves most unread loses answers first, the oldest of them, and none for memory that is being freed."""
        answers, ended = UnreadAnswers(), []

        for account, nbytes in (("a", 10), ("b", 30), ("b", 30), ("b", 30), ("a", 20)):
            name = f"{account}{nbytes}"
            answers.add(account, nbytes, PATIENCE, lambda name=name, *, is_evicted: ended.append((name, is_evicted)))
        assert (answers.evict(40), answers.evict(50)) == (2, 0)
        assert answers.evict(70) == 1
        assert ended == [("b30", True), ("b30", True), ("a10", True)]


class TestBounds:
    def test_size(self, small):
        """A message of more bytes than may be is refused by both doors."""
        big = np.zeros((100_000, 4), np.float32)
        for address in small.addresses:
            client = Client(address)
            with pytest.raises(InferenceServerException, match=r"(?i)larger than max|at most"):
                client.sum(big, big)
            x = rows()
            np.testing.assert_array_equal(client.sum(x, x).as_numpy("sum"), 2 * x)
            client.close()

    def test_connections(self, small):
        """A door takes so many connections; when silent ones have been ended, others are served."""
        for address in small.addresses:
            silent = [connected(address) for _ in range(12)]
            for sock in silent if address.startswith("http") else silent[SIZES.connections :]:
                assert ended(sock)
            for sock in silent:
                sock.close()
            until_served(address)

    @pytest.mark.integration
    def test_silent_tls_over_grpc(self, server, tmp_path):
        """gRPC counts a connection before its handshake is done, and closes those that are too many."""
        service = InferenceService(server.repository, RegionTable(os.getuid()))
        credentials, room = Credentials(*map(str, write_certificate(tmp_path))), of_all(SIZES.connections)
        for part in (b"", b"\x16"):
            with contextlib.ExitStack() as stack:
                door = GrpcDoor(service, "127.0.0.1:0", SIZES, credentials)
                stack.callback(door.close, 0)
                door.begin()
                silent = [stack.enter_context(connected(f"127.0.0.1:{door.port}")) for _ in range(room + 3)]
                for sock in silent:
                    with contextlib.suppress(ConnectionError):
                        sock.sendall(part)
                until(lambda silent=silent: len(select.select(silent, (), (), 0)[0]) == 3)  # the others have time

    def test_half_a_header(self, small):
        """A client that begins a request and sends no more of it loses its connection."""
        with connected(small.addresses[1]) as sock:
            sock.sendall(b"POST /v2/models/sum/infer HTTP/1.1\r\nHost: localhost\r\n")
            assert ended(sock)

    @pytest.mark.parametrize(("host", "status"), [("evil.example:8000", 403), ("192.0.2.1", 403), ("localhost:1", 200)])
    def test_a_name_that_was_made_to_mean_this_machine(self, small, host, status):
        """A page whose name resolves to 127.0.0.1 reads nothing at a loopback address: its Host names that page."""
        connection = http.client.HTTPConnection(small.addresses[1].removeprefix("http://"), timeout=20)
        with contextlib.closing(connection):
            connection.request("GET", "/v2", headers={"Host": host})
            assert connection.getresponse().status == status

    def test_an_answer_that_is_not_read(self, small):
        """Over HTTP: a client that sends requests, and reads no answer, loses its connection."""
        tensor = {"datatype": "FP32", "shape": [1000, 4], "parameters": {"binary_data_size": 16000}}
        head = json.dumps({"inputs": [{"name": name, **tensor} for name in "xy"]}).encode()
        body = head + bytes(32000)
        fields = f"Content-Length: {len(body)}\r\nInference-Header-Content-Length: {len(head)}\r\n"
        packet = f"POST /v2/models/sum/infer HTTP/1.1\r\nHost: localhost\r\n{fields}\r\n".encode() + body

        def send():
            for _ in range(10_000):
                sock.sendall(packet)

        with connected(small.addresses[1]) as sock, pytest.raises(ConnectionError):
            send()

    def test_streams(self, small):
        """So many streams; one more is refused, and requests beside them are answered."""
        method = f"/{messages.SERVICE}/ModelStreamInfer"
        with grpc.insecure_channel(small.addresses[0]) as channel:
            over, calls = threading.Event(), []

            def silent():
                yield request().SerializeToString()
                over.wait(20)

            stream = channel.stream_stream(method)
            for _ in range(SIZES.streams):
                calls.append(stream(silent()))
                assert next(calls[-1])
            with pytest.raises(grpc.RpcError) as error:
                next(stream(silent()))
            assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            until_served(small.addresses[0])
            over.set()
            for call in calls:
                call.cancel()

    @pytest.mark.parametrize("method", ["ModelInfer", "ServerLive", "ModelStreamInfer"])
    def test_calls_whose_message_never_comes(self, small, method):
        """Calls that say what they want and send no request are ended, without a deadline of their client's."""
        silence = threading.Event()
        with grpc.insecure_channel(small.addresses[0]) as channel, contextlib.ExitStack() as stack:
            stack.callback(silence.set)
            start = channel.stream_stream(f"/{messages.SERVICE}/{method}")
            calls = [start(_nothing_until(silence)) for _ in range(2 * SIZES.requests)]
            for call in calls:
                with pytest.raises(grpc.RpcError):
                    next(call)
                assert call.code() in ENDED
                if call.code() != grpc.StatusCode.UNAVAILABLE:
                    assert re.search(r"shared memory|again|later|end one", call.details())
            until_served(small.addresses[0])

    def test_a_body_has_one_deadline(self, small):
        """A body that was announced as large as one may be, and drips, has the time of any other."""
        head = f"POST /v2/models/sum/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {SIZES.message}\r\n\r\n"
        with connected(small.addresses[1]) as sock:
            sock.sendall(head.encode())
            while not select.select([sock], [], [], SIZES.patience / 20)[0]:
                sock.sendall(b" ")
            assert b" 408 " in sock.recv(65536)

    def test_a_body_that_comes_has_time(self, server):
        """The time for a body grows with what has come of it: one that lags is there still when a silent one ends."""
        service = InferenceService(server.repository, None)
        listener = socket.create_server(("127.0.0.1", 0))
        door = HttpDoor(service, listener, SIZES._replace(slowest=1))
        door.begin()
        with contextlib.ExitStack() as stack:
            stack.callback(door.close, 0)
            slow, silent = (stack.enter_context(connected(f"127.0.0.1:{door.port}")) for _ in range(2))
            head = b"POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1002\r\n\r\n"
            slow.sendall(head + b" " * 1000)
            silent.sendall(head)
            told = silent.recv(65536)
            assert b" 408 " in told
            assert b"binary data, or in shared memory" in told
            slow.sendall(b"{}")
            assert b" 200 " in slow.recv(65536)

    @pytest.mark.parametrize(
        ("waits", "silent", "limits"),
        [
            ("ModelStreamInfer", "ModelInfer", SIZES._replace(patience=0.1, slowest=1 << 30, idle=1e6)),
            ("ModelInfer", "ModelStreamInfer", SIZES._replace(patience=0.1, slowest=1, idle=0.1)),
        ],
        ids=["a stream", "a request"],
    )
    def test_a_call_has_its_time(self, server, waits, silent, limits):
        """A stream may wait for its first request, and a large message be under way, when calls of the other kind end
        for their silence.
        """
        door = GrpcDoor(InferenceService(server.repository, None), "127.0.0.1:0", limits)
        door.begin()
        comes, silence = threading.Event(), threading.Event()

        def later():
            comes.wait(PATIENCE)
            yield request().SerializeToString()

        with contextlib.ExitStack() as stack:
            stack.callback(door.close, 0)
            channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{door.port}"))
            stack.callback(silence.set)
            answers = channel.stream_stream(f"/{messages.SERVICE}/{waits}")(later())
            other = channel.stream_stream(f"/{messages.SERVICE}/{silent}")(_nothing_until(silence))
            with pytest.raises(grpc.RpcError) as ended:
                next(other)
            assert ended.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert "request" in ended.value.details()
            comes.set()
            assert len(list(answers)) == 1

    def test_a_stream_that_is_not_read(self, small):
        """Clients that send requests in streams, and read no answer, lose their streams: others may open theirs."""
        method = f"/{messages.SERVICE}/ModelStreamInfer"
        many = np.zeros((8000, 4), np.float32)
        big = request(inputs=tensors(shape=[8000, 4]), raw_input_contents=[many.tobytes()] * 2).SerializeToString()
        over, sent = threading.Event(), threading.Semaphore(0)

        def flood():
            while not over.is_set():
                yield big
                sent.release()

        with grpc.insecure_channel(small.addresses[0]) as silent, grpc.insecure_channel(small.addresses[0]) as channel:
            calls = [silent.stream_stream(method)(flood()) for _ in range(SIZES.streams)]
            assert sent.acquire(timeout=PATIENCE)

            def outcome():
                stream = channel.stream_stream(method)(iter([request().SerializeToString()]))
                answers = []
                with contextlib.suppress(grpc.RpcError):
                    answers += stream
                refused = stream.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                return None if refused else (len(answers), stream.code())

            assert until(outcome) == (1, grpc.StatusCode.OK)
            over.set()
            for call in calls:
                call.cancel()


class TestClosed:
    def test_off_unless_asked_for(self, small):
        """At TCP addresses, shared memory and loading are off by default."""
        for address in small.addresses:
            client = Client(address)
            for call in (
                lambda client=client: client.register_system_shared_memory("r", "/k", 8),
                lambda client=client: client.get_system_shared_memory_status(),
                lambda client=client: client.unload_model("sum"),
                lambda client=client: client.load_model("sum"),
            ):
                with pytest.raises(InferenceServerException, match=r"shared-memory|may not load"):
                    call()
            placed = [client.placed(n, rows(), "FP32", "r", 32) for n in "xy"]
            with pytest.raises(InferenceServerException, match="shared memory is off"):
                client.infer("sum", placed)
            client.close()

    def test_addresses(self, tmp_path):
        """A port alone is this machine's; what is no address is told."""
        assert oip_address(":8001").door.host == "127.0.0.1"
        assert not oip_address(":8001").door.is_open
        assert oip_address("0.0.0.0:8001").door.is_open
        assert oip_address("http://[::1]:80").door.place == "[::1]:80"
        assert oip_address("http+unix:/a/b").is_http
        paths = "unix:relative", "unix:/" + "x" * 120, "unix:/x,owner=no-such-account"
        for wrong in ("8001", "host:99999", "ftp://x:1", *paths):
            with pytest.raises(DeviceFailed, match="--oip"):
                oip_address(wrong)

    def test_a_folder_in_which_others_write(self, tmp_path):
        """A Unix socket is not made where others could put theirs in its place."""
        tmp_path.chmod(0o777)
        (Path(tmp_path) / "models").mkdir()
        for address in (f"unix:{tmp_path}/s", f"http+unix:{tmp_path}/s"):
            with pytest.raises(DeviceFailed, match="others may write"):
                InferenceServer("onnxruntime", tmp_path / "models", [address])

    def test_a_place_that_is_taken(self, tmp_path):
        """A socket at which a server listens, or a file, is left alone; a dead socket is replaced."""
        models = tmp_path / "models"
        models.mkdir()
        (tmp_path / "file").write_text("mine")
        with socket.socket(socket.AF_UNIX) as living:
            living.bind(str(tmp_path / "living"))
            living.listen()
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(tmp_path / "dead"))
            for name in ("living", "file"):
                for scheme in ("unix", "http+unix"):
                    with pytest.raises(DeviceFailed, match="something is there"):
                        InferenceServer("onnxruntime", models, [f"{scheme}:{tmp_path}/{name}"])
            InferenceServer("onnxruntime", models, [f"unix:{tmp_path}/dead"]).close()
        assert (tmp_path / "file").read_text() == "mine"

    @pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
    def test_a_place_whose_server_answers_nobody(self, tmp_path, kind):
        """A socket whose queue of connections is full, as an account may put one in the place of its own, and one of
        another kind are told at once and left alone, by gateways and metrics.
        """
        path = tmp_path / "s"
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            listener.bind(str(path))
            if kind == socket.SOCK_STREAM:
                listener.listen(0)
                while stack.enter_context(nobody()).connect_ex(str(path)) == 0:
                    pass
            with pytest.raises(DeviceFailed, match="something is there"):
                DoorAddress.of_path("--oip", str(path), os.getuid()).listen()
            with pytest.raises(DeviceFailed, match="cannot listen there"):
                metrics_server.listen(str(path))
            assert path.is_socket()


def nobody():
    """A socket that waits for nothing."""
    its = socket.socket(socket.AF_UNIX)
    its.setblocking(False)
    return its


def test_a_process_that_has_grown_gives_memory_back():
    """While more is resident than at the beginning, the C library is asked to return what it keeps."""
    asked = threading.Semaphore(0)
    returns = request_memory.MemoryReturn(0.01, lambda _: asked.release())
    returns.begin()
    try:
        grown = [np.ones(request_memory.LARGE, np.uint8)]
        while not asked.acquire(timeout=0.1):  # other tests' memory may go meanwhile
            grown.append(np.ones(32 << 20, np.uint8))
            assert len(grown) < 40
    finally:
        returns.close()


def test_memory_is_counted_by_account():
    """One that has its share is refused, another one waits for room, and what is given back is there again."""
    memory = RequestMemory(100, 150)
    with MemoryClaim(memory, "a") as first:
        first.wait_for(100)
        with pytest.raises(Refusal, match="at most 0 are given"):
            MemoryClaim(memory, "b").wait_for(101)
        with MemoryClaim(memory, "a") as second, pytest.raises(Refusal, match="send this one again"):
            second.wait_for(1, within=0.0)
        with MemoryClaim(memory, "b") as other:
            other.add(50)
            with pytest.raises(Refusal, match="send this one again"):
                other.add(1)
    with MemoryClaim(memory, "a") as later:
        later.add(100)


@pytest.mark.parametrize("of_all", [100, 1000], ids=["the address", "an account"])
def test_requests_wait_for_no_others_that_wait(of_all):
    """Three that have come hold so much together that none could be decoded beside the others: they take turns."""
    memory = RequestMemory(100, of_all)
    have_come, turns = threading.Barrier(3), queue.SimpleQueue()

    def take_turn():
        with MemoryClaim(memory, "a") as claim:
            claim.add(15)
            have_come.wait(PATIENCE)
            claim.wait_for(60, within=PATIENCE)
            turns.put(claim)

    with ThreadPoolExecutor(3) as threads:
        for each in [threads.submit(take_turn) for _ in range(3)]:
            each.result()
    assert turns.qsize() == 3
    MemoryClaim(memory, "a").add(100)


def test_what_requests_hold_while_they_wait_is_bounded():
    """One beyond half of what an account may have is refused at once; so is a body for which there is no room."""
    memory = RequestMemory(100, 1000)

    def has_room(nbytes):
        with contextlib.suppress(Refusal), MemoryClaim(memory, "a") as claim:
            claim.wait_for(nbytes, within=0.0)
            return True

    with MemoryClaim(memory, "a") as waits, MemoryClaim(memory, "a") as other, ThreadPoolExecutor(1) as threads:
        waits.add(40)
        other.add(20)
        with MemoryClaim(memory, "a") as runs:
            runs.add(20)
            assert not has_room(30)
            waiting = threads.submit(waits.wait_for, 60, PATIENCE)
            until(lambda: has_room(30))
            with pytest.raises(Refusal, match="yours hold 0 MiB"):
                other.wait_for(70, within=float("inf"))
            with pytest.raises(Refusal, match="send this one again"):
                MemoryClaim(memory, "a").add(30)
            other.give_back(20)
        waiting.result()
