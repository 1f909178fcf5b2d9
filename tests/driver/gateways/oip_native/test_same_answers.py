"""The door in C++ answers as Python's does: the same bytes, the same codes, the same words.

Each packet goes to both doors as it is, and what comes back is compared. Where a request is of the usual form, it is
also counted that the door in C++ has answered it itself.
"""

import contextlib
import os
import random
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from native_doors import answered, numbered, until_here
from oip_models import TYPES, Client, client_memory, rows
from tritonclient.utils import InferenceServerException, shared_memory
from waiting import until

from driver.gateways.oip import messages
from driver.gateways.oip.native_door import VARIABLE

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[4]
NBYTES = rows().nbytes
SIZES = {"BOOL": 1, "UINT8": 1, "INT8": 1, "UINT16": 2, "INT16": 2, "FP16": 2, "BF16": 2}
SIZES |= {"UINT32": 4, "INT32": 4, "FP32": 4, "UINT64": 8, "INT64": 8, "FP64": 8}
INFER = messages.ModelInferRequest


def asked(client, packet, method="ModelInfer", **options):
    """What a server says to a packet: its code, and its message or words."""
    with grpc.insecure_channel(client, [("grpc.max_receive_message_length", -1)]) as channel:
        call = channel.unary_unary(f"/{messages.SERVICE}/{method}")
        try:
            return "OK", call(packet, timeout=60, **options)
        except grpc.RpcError as error:
            return error.code().name, numbered(error.details())


def same(pair, packet, method="ModelInfer", **options):
    """The code that both doors answer with. Answers are compared as messages: the order of fields is free."""
    ours, theirs = (asked(each.addresses[0], packet, method, **options) for each in (pair.server, pair.other))
    if ours[0] == "OK" == theirs[0]:
        kind = messages.message(next(each.response for each in messages.METHODS if each.name == method))
        assert kind.FromString(ours[1]) == kind.FromString(theirs[1])
    else:
        assert ours == theirs
    return ours[0]


def tensors(**changes):
    return [{"name": name, "datatype": "FP32", "shape": [2, 4], **changes} for name in "xy"]


def request(**changes):
    """A request that is right, with changes, encoded."""
    usual = {"model_name": "sum", "inputs": tensors(), "raw_input_contents": [rows().tobytes()] * 2}
    return INFER(**{**usual, **changes}).SerializeToString()


def varint(number):
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def field(number, content):
    return varint(number << 3 | 2) + varint(len(content)) + content


def here(pair, packet, name="sum"):
    """Asserts that both doors say the same to a packet, and the door in C++ by itself."""
    before = answered(pair.server, name)
    assert same(pair, packet) == "OK"
    assert answered(pair.server, name) == before + 1


class TestUsual:
    def test_each_type(self, pair):
        """Raw values of each type come back as they were."""
        count, randoms = 5, random.Random(1)
        inputs = [{"name": f"in_{name}", "datatype": name, "shape": [count]} for name in TYPES]
        raw = [
            bytes(count * SIZES[name]) if name[:2] in ("FP", "BF", "BO") else randoms.randbytes(count * SIZES[name])
            for name in TYPES
        ]
        packet = INFER(model_name="copies", inputs=inputs, raw_input_contents=raw).SerializeToString()

        def is_here():
            assert same(pair, packet) == "OK"
            return answered(pair.server, "copies")

        until(is_here)
        here(pair, packet, "copies")

    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"id": "one"},
            {"model_version": "1"},
            {"model_name": "fixed"},
            {"outputs": [{"name": "sum"}]},
            {"inputs": tensors(shape=[6, 4]), "raw_input_contents": [rows(6).tobytes()] * 2},
            {"inputs": tensors(shape=[50_000, 4]), "raw_input_contents": [rows(50_000).tobytes()] * 2},
            {"inputs": tensors()[::-1], "raw_input_contents": [rows(2, 1).tobytes(), rows().tobytes()]},
        ],
    )
    def test_changes(self, pair, changes):
        """Ids, versions, outputs, sizes and orders."""
        here(pair, request(**changes), changes.get("model_name", "sum"))

    def test_outputs_that_grow(self, pair):
        """An output whose size only its execution tells, small, large and small again."""

        def asks(limit):
            tensor = {"name": "limit", "datatype": "INT64", "shape": []}
            raw = [struct.pack("<q", limit)]
            return INFER(model_name="ranges", inputs=[tensor], raw_input_contents=raw).SerializeToString()

        def is_here():
            assert same(pair, asks(5)) == "OK"
            return answered(pair.server, "ranges")

        until(is_here)
        for limit in (100_000, 3, 1_000_000, 8):
            here(pair, asks(limit), "ranges")

    def test_versions(self, pair):
        """A version by its number, and the latest without one, each of its own shape."""
        x = np.arange(4, dtype=np.float32)
        for version in ("", "1", "2", "01", "3", "x"):
            tensor = {"name": "x", "datatype": "FP32", "shape": [4]}
            changes = {"inputs": [tensor], "raw_input_contents": [x.tobytes()]}
            same(pair, request(model_name="versions", model_version=version, **changes))

    def test_rows(self, pair):
        """A batch has as many rows as its configuration says, and not one more."""
        for count, code in ((1, "OK"), (4, "OK"), (5, "INVALID_ARGUMENT")):
            tensor = {"name": "x", "datatype": "FP32", "shape": [count, 4]}
            changes = {"inputs": [tensor], "raw_input_contents": [rows(count).tobytes()]}
            assert same(pair, request(model_name="batched", **changes)) == code

    def test_eight_clients(self, pair):
        """Each of eight clients at once gets its own answers."""

        def ask_on(number):
            client = Client(pair.server.addresses[number % 2])
            with contextlib.closing(client):
                for n in range(200):
                    x = rows(2, number * 1000 + n)
                    np.testing.assert_array_equal(client.sum(x, x, request_id=str(n)).as_numpy("sum"), 2 * x)

        before = answered(pair.server, "sum")
        until_here(pair.server, Client(pair.server.addresses[1]))
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(ask_on, range(8)))
        assert answered(pair.server, "sum") >= before + 1600


class TestSharedMemory:
    def test_in_place(self, pair):
        """Inputs and outputs in shared memory, at offsets; the answer says where, and what is beside them stays."""
        with client_memory(4 * NBYTES) as (region, key):
            for client in (pair.native, pair.python):
                client.register_system_shared_memory("r", key, 3 * NBYTES, offset=NBYTES)
            shared_memory.set_shared_memory_region(region, [rows(2, 7), rows(), rows(2, 3)])

            def place(offset):
                names = ("region", "byte_size", "offset")
                values = ({"string_param": "r"}, {"int64_param": NBYTES}, {"int64_param": offset})
                return {f"shared_memory_{name}": value for name, value in zip(names, values, strict=True)}

            inputs = [{**each, "parameters": place(n * NBYTES)} for n, each in enumerate(tensors())]
            outputs = [{"name": "sum", "parameters": place(2 * NBYTES)}]
            here(pair, request(inputs=inputs, outputs=outputs, raw_input_contents=[]))
            found = shared_memory.get_contents_as_numpy(region, np.float32, (8, 4))
            np.testing.assert_array_equal(found, [*rows(2, 7), *rows(), *rows(2, 3), *(rows() + rows(2, 3))])
            here(pair, request(inputs=[inputs[0], tensors()[1]], raw_input_contents=[rows().tobytes()]))
            here(pair, request(outputs=outputs))
            for client in (pair.native, pair.python):
                assert client.get_system_shared_memory_status().regions["r"].byte_size == 3 * NBYTES
                client.unregister_system_shared_memory("r")
            assert same(pair, request(inputs=inputs, raw_input_contents=[])) == "NOT_FOUND"

    def test_large_tensors(self, pair):
        """What is too large to be copied goes by way of Python's door, and gives the same."""
        count = 200_000
        with client_memory(3 * count * 16) as (region, key):
            pair.native.register_system_shared_memory("large", key, 3 * count * 16)
            x = rows(count)
            shared_memory.set_shared_memory_region(region, [x, x])
            given = [
                pair.native.placed(name, x, "FP32", "large", x.nbytes, n * x.nbytes) for n, name in enumerate("xy")
            ]
            pair.native.infer("sum", given, outputs=[pair.native.output("sum", "large", x.nbytes, 2 * x.nbytes)])
            found = shared_memory.get_contents_as_numpy(region, np.float32, (3 * count, 4))
            np.testing.assert_array_equal(found[2 * count :], 2 * x)
            pair.native.unregister_system_shared_memory("large")


REGION = {"shared_memory_region": {"string_param": "none"}, "shared_memory_byte_size": {"int64_param": NBYTES}}
WRONG = {
    "no model": {"model_name": "nothing"},
    "a path": {"model_name": "../sum"},
    "no version": {"model_version": "7"},
    "a word": {"model_version": "one"},
    "a missing input": {"inputs": tensors()[:1], "raw_input_contents": [rows().tobytes()]},
    "an input twice": {"inputs": tensors(name="x")},
    "an unknown input": {"inputs": [*tensors(), {"name": "z"}], "raw_input_contents": [rows().tobytes()] * 3},
    "another type": {"inputs": tensors(datatype="FP64")},
    "texts": {"inputs": tensors(datatype="BYTES")},
    "no type": {"inputs": tensors(datatype="FP99")},
    "another size": {"inputs": tensors(shape=[2, 5])},
    "another rank": {"inputs": tensors(shape=[8])},
    "nine sizes": {"inputs": tensors(shape=[1] * 9)},
    "a thousand sizes": {"inputs": tensors(shape=[1] * 1000)},
    "negative sizes": {"inputs": tensors(shape=[-2, 4])},
    "large sizes": {"inputs": tensors(shape=[2**40, 4])},
    "sizes beyond 64 bits": {"inputs": tensors(shape=[2**31, 2**31])},
    "sizes that are 0 modulo 2**64": {"inputs": tensors(shape=[2**62, 4])},
    "the least size": {"inputs": tensors(shape=[-(2**63), 4])},
    "no rows": {"inputs": tensors(shape=[0, 4]), "raw_input_contents": [b"", b""]},
    "too few bytes": {"inputs": tensors(shape=[3, 4])},
    "one raw content": {"raw_input_contents": [rows().tobytes()]},
    "three raw contents": {"raw_input_contents": [rows().tobytes()] * 3},
    "no contents": {"raw_input_contents": []},
    "contents twice": {"inputs": tensors(contents={"fp32_contents": [1.0] * 8})},
    "contents": {"inputs": tensors(contents={"fp32_contents": [1.0] * 8}), "raw_input_contents": []},
    "wrong contents": {"inputs": tensors(contents={"int_contents": [1] * 8}), "raw_input_contents": []},
    "an output twice": {"outputs": [{"name": "sum"}, {"name": "sum"}]},
    "an unknown output": {"outputs": [{"name": "difference"}]},
    "classes": {"outputs": [{"name": "sum", "parameters": {"classification": {"int64_param": 2}}}]},
    "classes of none": {"outputs": [{"name": "sum", "parameters": {"classification": {"int64_param": -1}}}]},
    "no region": {"inputs": tensors(parameters=REGION), "raw_input_contents": []},
    "a region for an output": {"outputs": [{"name": "sum", "parameters": REGION}]},
    "half a place": {"inputs": tensors(parameters={"shared_memory_offset": {"int64_param": 1}})},
    "other parameters": {"parameters": {"mine": {"string_param": "x"}, "number": {"double_param": 0.5}}},
    "a priority": {"parameters": {"priority": {"uint64_param": 1}}},
    "no priority": {"parameters": {"priority": {"uint64_param": 9}}},
    "a timeout": {"parameters": {"timeout": {"int64_param": 60_000_000}}},
    "no timeout": {"parameters": {"timeout": {"string_param": "1"}}},
    "a sequence": {"parameters": {"sequence_id": {"int64_param": 1}, "sequence_start": {"bool_param": True}}},
    "no sequence": {"parameters": {"sequence_start": {"bool_param": True}}},
    "an id of UTF-8": {"id": "é" * 20},
    "joined": {"model_name": "joined", "inputs": tensors()[:1], "raw_input_contents": [rows().tobytes()]},
}


class TestUnusual:
    @pytest.mark.parametrize("what", WRONG)
    def test_each(self, pair, what):
        """What is wrong, or right and seldom: the same code and the same words, or the same answer."""
        same(pair, request(**WRONG[what]))

    @pytest.mark.parametrize(
        "packet",
        [
            b"",
            b"\xff" * 40,
            b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7fsum",
            field(1, b"sum") + field(1, b"fixed") + request()[5:],
            field(1, b"\xff\xfe"),
            request() + field(3, b"\xff"),
            request() + field(99, b"unknown"),
            request() + b"\x28\x01",
            request(inputs=[]) + field(5, field(1, b"x") + field(2, b"FP32") + b"\x18\x02\x18\x04"),
            field(1, b"sum") + field(5, b"") * 500,
            field(1, b"sum") + field(7, b"") * 500,
            field(1, b"sum") + b"\x2a\0" * 200_000,
            field(1, b"sum") + field(5, field(3, bytes(1 << 24))),
        ],
    )
    def test_bytes(self, pair, packet):
        """Packets that are no messages, or have fields twice, unknown ones, or very many."""
        same(pair, packet)

    def test_other_methods(self, pair):
        """Each other method says the same, and so does one that is none."""
        question = messages.message("ModelReadyRequest")(name="sum").SerializeToString()
        for method in messages.METHODS:
            if not any(method.streams) and method.name not in ("ModelInfer", "ModelStatistics"):
                packets = [b"", question] if "Repository" not in method.name else [b""]
                for packet in packets:
                    same(pair, packet, method.name)
        for method in (f"/{messages.SERVICE}/Nothing", "/any.Service/ModelInfer"):
            told = []
            for each in (pair.server, pair.other):
                with grpc.insecure_channel(each.addresses[0]) as channel, pytest.raises(grpc.RpcError) as error:
                    channel.unary_unary(method)(request(), timeout=60)
                told.append((error.value.code(), error.value.details()))
            assert told[0] == told[1]

    def test_figures(self, pair):
        """ModelStatistics counts what both processes of a server have answered."""

        def counted():
            (figures,) = pair.native.get_inference_statistics("fixed").model_stats
            return figures.inference_count, figures.inference_stats.success.count

        before = counted()
        for changes in ({}, {"parameters": {"mine": {"string_param": "x"}}}):
            assert same(pair, request(model_name="fixed", **changes)) == "OK"
        assert counted() == (before[0] + 2, before[1] + 2)

    def test_texts_and_streams(self, pair):
        """Texts, packed messages and streams go by way of Python's door."""
        for client in (pair.native, pair.python):
            for words in ({"compression_algorithm": "gzip"}, {"compression_algorithm": "deflate"}):
                np.testing.assert_array_equal(client.sum(rows(), rows(), **words).as_numpy("sum"), 2 * rows())
        packets = [request(id=str(n)) for n in range(20)]
        told = []
        for each, packing in (pair.server, None), (pair.server, grpc.Compression.Gzip), (pair.other, None):
            with grpc.insecure_channel(each.addresses[0], compression=packing) as channel:
                stream = channel.stream_stream(f"/{messages.SERVICE}/ModelStreamInfer")
                told.append(list(stream(iter([*packets, request(model_name="nothing")]))))
        assert len(told[0]) == 21
        kind = messages.ModelStreamInferResponse
        assert all([*map(kind.FromString, each)] == [*map(kind.FromString, told[2])] for each in told)

    def test_loading(self, pair):
        """A client that unloads a model has it unloaded for both processes, and back when it loads it."""
        for client in (pair.native, pair.python):
            client.unload_model("fixed")
        assert same(pair, request(model_name="fixed")) == "UNAVAILABLE"
        for client in (pair.native, pair.python):
            client.load_model("fixed")
        until_here(pair.server, pair.native, "fixed")
        assert same(pair, request(model_name="fixed")) == "OK"

    def test_mutants(self, pair):
        """Requests that a few changes have made wrong, or left right."""
        randoms, codes = random.Random(3), set()
        for _ in range(300):
            packet = bytearray(request(id="a", outputs=[{"name": "sum"}]))
            for _ in range(randoms.randint(1, 3)):
                at = randoms.randrange(len(packet))
                match randoms.randrange(3):
                    case 0:
                        packet[at] = randoms.choice((0, 1, 0x7F, 0x80, 0xFF, randoms.randrange(256)))
                    case 1:
                        packet[at:at] = randoms.randbytes(randoms.randint(1, 8))
                    case _:
                        del packet[at : at + randoms.randint(1, 16)]
            codes.add(same(pair, bytes(packet)))
        assert {"OK", "INVALID_ARGUMENT"} <= codes


def test_the_tests_of_pythons_door(program):
    """What is asked of Python's door in its own tests holds where the door in C++ stands in front of it."""
    environment = {**os.environ, VARIABLE: str(program)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n",
        "0",
        "-m",
        "not stress",
    ]
    files = ("clients", "command", "generic_cases", "hostile_calls", "regions", "repository", "known_calls", "texts")
    paths = [f"tests/driver/gateways/oip/test_{name}.py" for name in files]
    done = subprocess.run(
        [*command, *paths], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]


def test_a_program_that_is_not_there(tmp_path, monkeypatch):
    """A name that is no program is told before anything is served."""
    from driver.errors import DeviceFailed
    from driver.gateways.oip.process import InferenceServer

    for name, told in (("no-such-program", "no such program"), ("/bin/false", "it has ended")):
        monkeypatch.setenv(VARIABLE, name)
        with pytest.raises(DeviceFailed, match=told):
            InferenceServer("reference", tmp_path, [f"unix:{tmp_path}/s"]).begin()


def test_wrong_words_of_a_client(pair):
    """tritonclient raises the same error at both."""
    said = []
    for client in (pair.native, pair.python):
        with pytest.raises(InferenceServerException) as error:
            client.infer("sum", [client.input("x", rows())])
        said.append((error.value.status(), error.value.message()))
    assert said[0] == said[1]
