"""Clients of the Open Inference Protocol that send what is wrong, too much, or nothing.

Each gets an answer or loses its own connection, and the others are served.
"""

import contextlib
import json
import os
import random
import socket
import threading
from pathlib import Path

import grpc
import numpy as np
import pytest
from certificates import write_certificate
from oip_models import Client, rows, write_sum
from tritonclient.utils import InferenceServerException
from waiting import PATIENCE, until

from driver.errors import DeviceFailed
from driver.gateways.oip import messages
from driver.gateways.oip.grpc_door import Credentials, DoorLimits, GrpcDoor, GrpcFront
from driver.gateways.oip.http_front import HttpFront
from driver.gateways.oip.oip_address import oip_address
from driver.gateways.oip.process import InferenceServer, OipOptions
from driver.gateways.oip.refusal import Refusal
from driver.gateways.oip.regions import RegionTable
from driver.gateways.oip.service import InferenceService

METHODS = [each.name for each in messages.METHODS]
_OTHER = b'{"name": "y", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}'
_ONE = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": %s}, ' + _OTHER + b"]}"
CLASSES_OF_NONE = {"classification": {"int64_param": -1}}
WORDS = {"contents": {"bytes_contents": [b"a"] * 8}}
SIZES = DoorLimits(message=1 << 20, requests=4, connections=6, streams=2, patience=0.4)


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
                front.stream_answer(packet)
            else:
                front.answer(method, packet)
            answered += 1
        except Exception as error:  # noqa: BLE001 (looked at below)
            from driver.gateways.oip.refusal import refusal_of

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


def connected(address):
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


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

    def test_silent_tls_over_grpc(self, server, tmp_path):
        """gRPC counts a connection before its handshake is done, and closes those that are too many."""
        service = InferenceService(server.repository, RegionTable(os.getuid()))
        door = GrpcDoor(service, "127.0.0.1:0", SIZES, Credentials(*map(str, write_certificate(tmp_path))))
        door.begin()
        with contextlib.ExitStack() as stack:
            stack.callback(door.close, 0)
            for part in (b"", b"\x16"):
                silent = [stack.enter_context(connected(f"127.0.0.1:{door.port}")) for _ in range(12)]
                for sock in silent[: SIZES.connections]:
                    sock.sendall(part)
                for sock in silent[SIZES.connections :]:
                    assert ended(sock)

    def test_half_a_header(self, small):
        """A client that begins a request and sends no more of it loses its connection."""
        with connected(small.addresses[1]) as sock:
            sock.sendall(b"POST /v2/models/sum/infer HTTP/1.1\r\nHost: x\r\n")
            assert ended(sock)

    def test_an_answer_that_is_not_read(self, small):
        """Over HTTP: a client that sends requests, and reads no answer, loses its connection."""
        tensor = {"datatype": "FP32", "shape": [1000, 4], "parameters": {"binary_data_size": 16000}}
        head = json.dumps({"inputs": [{"name": name, **tensor} for name in "xy"]}).encode()
        body = head + bytes(32000)
        fields = f"Content-Length: {len(body)}\r\nInference-Header-Content-Length: {len(head)}\r\n"
        packet = f"POST /v2/models/sum/infer HTTP/1.1\r\nHost: x\r\n{fields}\r\n".encode() + body

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
