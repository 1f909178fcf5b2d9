"""Unmodified clients of the Open Inference Protocol: tritonclient over gRPC (TCP and a Unix socket) and HTTP."""

import queue
from types import SimpleNamespace

import numpy as np
import pytest
import tritonclient.grpc
from google.protobuf.json_format import MessageToDict
from oip_models import TYPES, client_memory, rows
from tritonclient.utils import InferenceServerException, shared_memory, triton_to_np_dtype

from driver.gateways.oip import messages
from driver.gateways.oip.decoupled import DecoupledTerms
from driver.gateways.oip.model_config import FolderConfig

NBYTES = rows().nbytes
FEEDBACK = """
model_transaction_policy { decoupled: true }
parameters { key: "feedback" value { string_value: '{"value": "step"}' } }
"""


def as_json(message):
    """What HTTP says in JSON, of either client's answer."""
    if isinstance(message, dict | list):
        return message
    return MessageToDict(message, preserving_proto_field_name=True)


class TestMessages:
    def test_fields_are_the_protocols(self):
        """Each message and field has the name, number and type that the published definitions have."""
        from tritonclient.grpc import model_config_pb2, service_pb2

        published = {
            **service_pb2.DESCRIPTOR.message_types_by_name,
            **model_config_pb2.DESCRIPTOR.message_types_by_name,
        }
        seen = set()

        def compare(ours, theirs):
            if ours.full_name in seen or ours.name == "Unread":
                return
            seen.add(ours.full_name)
            for field in ours.fields:
                other = theirs.fields_by_name[field.name]
                kinds = [(f.number, f.type, f.is_repeated) for f in (field, other)]
                assert kinds[0] == kinds[1], f"{ours.full_name}.{field.name}"
                if field.message_type is not None:
                    compare(field.message_type, other.message_type)
                if field.enum_type is not None:
                    numbers = [{v.name: v.number for v in f.enum_type.values} for f in (field, other)]
                    assert numbers[0] == numbers[1]

        for method in messages.METHODS:
            for name in (method.request, method.response):
                compare(messages.message(name).DESCRIPTOR, published[name])
        assert len(seen) > 40

    def test_methods_are_the_protocols(self):
        """Names and streams of the service are as published."""
        published = tritonclient.grpc.service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
        assert published.full_name == messages.SERVICE
        for method in messages.METHODS:
            its = published.methods_by_name[method.name]
            assert (its.client_streaming, its.server_streaming) == method.streams
            assert (its.input_type.name, its.output_type.name) == (method.request, method.response)


def test_what_the_runtime_refuses_is_told_in_its_words(client, caplog):
    """Sizes that only the runtime knows not to fit; the log of the server has no traceback of it."""
    x, y = (client.input(name, np.ones((n, 2), np.float32)) for name, n in (("x", 2), ("y", 3)))
    with pytest.raises(InferenceServerException, match="Non concat axis dimensions must match") as refused:
        client.infer("join", [x, y])
    assert refused.value.status() in {"StatusCode.INTERNAL", "500"}
    assert "Traceback" not in caplog.text


def test_a_scalar_has_no_sizes(client):
    """Its metadata say so; a client may give it one size of 1 all the same, in the message or in shared memory."""
    (port,) = as_json(client.get_model_metadata("ranges"))["inputs"]
    assert port.get("shape", []) == []
    for limit in (np.array(3), np.array([3])):
        given = client.input("limit", limit)
        np.testing.assert_array_equal(client.infer("ranges", [given]).as_numpy("range"), np.arange(3))
        with client_memory(8) as (region, key):
            shared_memory.set_shared_memory_region(region, [np.array([3])])
            client.register_system_shared_memory("scalar", key, 8)
            try:
                given.set_shared_memory("scalar", 8)
                np.testing.assert_array_equal(client.infer("ranges", [given]).as_numpy("range"), np.arange(3))
            finally:
                client.unregister_system_shared_memory("scalar")
    with pytest.raises(InferenceServerException, match=r"shape \[\], not \[2\]"):
        client.infer("ranges", [client.input("limit", np.array([3, 3]))])


class TestQuestions:
    def test_health(self, client):
        """Server and models say that they are ready; one that does not exist is not."""
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("sum")
        assert client.is_model_ready("sum", "1")
        assert not client.is_model_ready("sum", "2")
        assert not client.is_model_ready("nothing")

    def test_metadata(self, client):
        """Names, types and shapes; -1 where the model leaves a size open."""
        found = as_json(client.get_model_metadata("sum"))
        assert (found["name"], found["versions"]) == ("sum", ["1"])
        assert [(t["name"], t["datatype"], [int(d) for d in t["shape"]]) for t in found["inputs"]] == [
            ("x", "FP32", [-1, 4]),
            ("y", "FP32", [-1, 4]),
        ]
        extensions = as_json(client.get_server_metadata())["extensions"]
        assert {"system_shared_memory", "model_repository", "statistics"} <= set(extensions)

    def test_config(self, client):
        """A model without a configuration has one of its inputs and outputs."""
        found = as_json(client.get_model_config("sum"))
        found = found.get("config", found)
        assert [each["name"] for each in found["input"]] == ["x", "y"]
        assert found["output"][0]["data_type"] == "TYPE_FP32"

    def test_index(self, client):
        """Every model of the folder, and its state."""
        found = as_json(client.get_model_repository_index())
        rows = found if isinstance(found, list) else found["models"]
        assert {(row["name"], row["state"]) for row in rows} >= {("sum", "READY"), ("copies", "READY")}

    def test_statistics(self, client):
        """A request counts, and so does a failed one."""

        def counts():
            found = as_json(client.get_inference_statistics("sum"))
            its = found["model_stats"][0]["inference_stats"]
            return [int(its.get(word, {}).get("count", 0)) for word in ("success", "fail")]

        before = counts()
        client.sum(rows(), rows())
        with pytest.raises(InferenceServerException):
            client.sum(rows(), rows()[:, :2])
        assert [after - b for after, b in zip(counts(), before, strict=True)] == [1, 1]


class TestInference:
    @pytest.mark.parametrize("count", [1, 5])
    def test_arrays(self, client, count):
        """Inputs in the message, of any size along an open dimension."""
        x = rows(count)
        found = client.sum(x, x + 1, request_id="seven")
        np.testing.assert_array_equal(found.as_numpy("sum"), 2 * x + 1)
        response = found.get_response()
        assert (response["id"] if isinstance(response, dict) else response.id) == "seven"

    def test_every_type(self, client):
        """What goes in comes out, bit by bit, in each type that model files have."""
        raw = np.arange(16, dtype=np.uint8)
        given, expected = [], {}
        for name in TYPES:
            array = np.frombuffer(raw.tobytes(), np.dtype(triton_to_np_dtype(name)))[:2]
            given.append(client.input(f"in_{name}", array, name))
            expected[name] = array
        found = client.infer("copies", given)
        for name, array in expected.items():
            np.testing.assert_array_equal(found.as_numpy(f"out_{name}"), array, err_msg=name)

    def test_some_outputs(self, client):
        """Only what is asked for comes, in the order in which it is asked for."""
        with pytest.raises(InferenceServerException, match="no output 'product'"):
            client.sum(rows(), rows(), outputs=[client.output("product")])
        found = client.sum(rows(), rows(), outputs=[client.output("sum")])
        assert found.as_numpy("sum") is not None

    def test_timeout(self, client):
        """A timeout that cannot be kept ends the request with an error, and no later one."""
        with pytest.raises(InferenceServerException):
            client.sum(rows(), rows(), timeout=1)
        client.sum(rows(), rows(), timeout=20_000_000)

    @pytest.mark.parametrize("priority", [1, 2, 3])
    def test_priority(self, client, priority):
        """Requests of each priority are answered."""
        x = rows()
        np.testing.assert_array_equal(client.sum(x, x, priority=priority).as_numpy("sum"), 2 * x)

    def test_a_priority_that_is_none(self, client):
        """A clear error: there are three priorities."""
        with pytest.raises(InferenceServerException, match="priority=9"):
            client.sum(rows(), rows(), priority=9)

    def test_load_and_unload(self, client):
        """A model that a client unloads stays away until a client loads it."""
        client.unload_model("ranges")
        assert not client.is_model_ready("ranges")
        with pytest.raises(InferenceServerException, match="load it first"):
            client.infer("ranges", [client.input("limit", np.array(3))])
        client.load_model("ranges")
        np.testing.assert_array_equal(
            client.infer("ranges", [client.input("limit", np.array(3))]).as_numpy("range"), np.arange(3)
        )


class TestStream:
    def test_answers_in_order(self, server):
        """Each request of a stream is answered, in order; one that is wrong gets an error, and the stream goes on."""
        client, answers = server.clients["grpc"], queue.Queue()
        raw = tritonclient.grpc.InferenceServerClient(server.its.addresses[0])
        raw.start_stream(lambda result, error: answers.put((result, error)))
        for n in range(5):
            x = rows(begin=n)
            raw.async_stream_infer("sum", [client.input("x", x), client.input("y", x)], request_id=str(n))
        raw.async_stream_infer("nothing", [client.input("x", rows())])
        raw.async_stream_infer(
            "sum", [client.input("x", rows()), client.input("y", rows())], enable_empty_final_response=True
        )
        for n in range(5):
            result, error = answers.get(timeout=20)
            assert error is None
            assert result.get_response().id == str(n)
            np.testing.assert_array_equal(result.as_numpy("sum"), 2 * rows(begin=n))
        assert "no model" in str(answers.get(timeout=20)[1])
        last, _ = answers.get(timeout=20)
        assert last.get_response().parameters["triton_final_response"].bool_param
        raw.stop_stream()
        raw.close()


class TestDecoupled:
    """A model that answers a request many times, by the results of a stream."""

    @pytest.fixture
    def answers(self, server):
        """.ask(limit, …): sends a request. .next(): its next answer's (value, parameters), or the error."""
        client, found = server.clients["grpc"], queue.Queue()
        raw = tritonclient.grpc.InferenceServerClient(server.its.addresses[0])
        raw.start_stream(lambda result, error: found.put((result, error)))

        def ask(limit=1e6, **terms):
            step, limits = np.zeros(1, np.float32), np.full(1, limit, np.float32)
            raw.async_stream_infer("counts", [client.input("step", step), client.input("limit", limits)], **terms)

        def take():
            result, error = found.get(timeout=20)
            if error:
                return str(error)
            told = result.get_response()
            return told.id, int(result.as_numpy("value")[0]), told.parameters["triton_final_response"].bool_param

        yield SimpleNamespace(ask=ask, next=take, raw=raw)
        raw.stop_stream(cancel_requests=True)
        raw.close()

    def test_answers(self, answers):
        """Each step is an answer, the last one says so; the output that ends it counts, and a request's own number."""
        answers.ask(3, request_id="a")
        answers.ask(request_id="b", parameters={"most": 2}, enable_empty_final_response=True)
        found = [answers.next() for _ in range(5)]
        assert found == [("a", 1, False), ("a", 2, False), ("a", 3, True), ("b", 1, False), ("b", 2, True)]

    @pytest.mark.parametrize("most", [0, 100_001, "2"])
    def test_a_wrong_number(self, answers, most):
        """It is refused by its name, and the connection's stream goes on."""
        answers.ask(parameters={"most": most})
        answers.ask(1)
        assert "most=" in answers.next()
        assert answers.next()[1:] == (1, True)

    def test_a_client_that_stops(self, answers, feeds, kit):
        """A stream without an end ends on the device, too, when its client has cancelled the call."""
        answers.ask()
        assert answers.next()[1] == 1
        assert feeds
        answers.raw.stop_stream(cancel_requests=True)
        kit.until(lambda: not feeds)

    @pytest.mark.parametrize("client", ["grpc", "http"])
    def test_one_answer(self, client, server):
        """`ModelInfer` is for models that answer once: the refusal says what to use."""
        client, x = server.clients[client], np.zeros(1, np.float32)
        with pytest.raises(InferenceServerException, match="use ModelStreamInfer"):
            client.infer("counts", [client.input("step", x), client.input("limit", x)])

    def test_outputs(self, server):
        """Those that are fed back are told where `also` names them; `ModelConfig` says that the model is decoupled."""
        assert server.clients["grpc"].get_model_config("counts").config.model_transaction_policy.decoupled
        terms = DecoupledTerms.of("", FolderConfig(FEEDBACK).message.parameters)
        assert terms.plan("", server.its.repository.get("counts").ports.model).told == {1}


class TestSharedMemory:
    def test_in_place(self, client, server):
        """Inputs and outputs in shared memory: nothing of them is copied."""
        x = rows()
        with client_memory(3 * NBYTES) as (handle, key):
            shared_memory.set_shared_memory_region(handle, [x, x + 1])
            client.register_system_shared_memory("memory", key, 3 * NBYTES)
            try:
                given = [
                    client.placed("x", x, "FP32", "memory", NBYTES),
                    client.placed("y", x, "FP32", "memory", NBYTES, offset=NBYTES),
                ]
                client.infer("sum", given, outputs=[client.output("sum", "memory", NBYTES, 2 * NBYTES)])
                found = shared_memory.get_contents_as_numpy(handle, np.float32, (2, 4), offset=2 * NBYTES)
                np.testing.assert_array_equal(found, 2 * x + 1)
                lanes = server.its.repository.get("sum").burst_stats()
                assert [lane["copied_bytes"]["bulk"] for lane in lanes] == [0] * len(lanes) != []
            finally:
                client.unregister_system_shared_memory("memory")

    def test_beside_messages(self, client):
        """One input in shared memory and one in the message; the output in the message."""
        x = rows(3)
        with client_memory(x.nbytes) as (handle, key):
            shared_memory.set_shared_memory_region(handle, [x])
            client.register_system_shared_memory("half", key, x.nbytes)
            try:
                given = [client.placed("x", x, "FP32", "half", x.nbytes), client.input("y", x)]
                np.testing.assert_array_equal(client.infer("sum", given).as_numpy("sum"), 2 * x)
            finally:
                client.unregister_system_shared_memory("half")

    def test_an_output_of_unknown_size(self, client):
        """It may be smaller than its place, and then says its size; where it is larger, the error says by how much."""
        with client_memory(4096) as (handle, key):
            client.register_system_shared_memory("ranges", key, 4096)
            try:
                limit = client.input("limit", np.array(5))
                found = client.infer("ranges", [limit], outputs=[client.output("range", "ranges", 4096)])
                its = found.get_output("range")
                assert [int(size) for size in (its["shape"] if isinstance(its, dict) else its.shape)] == [5]
                np.testing.assert_array_equal(shared_memory.get_contents_as_numpy(handle, np.int64, (5,)), np.arange(5))
                limit = client.input("limit", np.array(1000))
                with pytest.raises(InferenceServerException, match="8000 bytes; its place in shared memory has 4096"):
                    client.infer("ranges", [limit], outputs=[client.output("range", "ranges", 4096)])
            finally:
                client.unregister_system_shared_memory("ranges")

    def test_a_large_output_beside_shared_memory(self, client):
        """One that is larger than was guessed comes whole in the message, while the input is in shared memory."""
        with client_memory(8) as (handle, key):
            shared_memory.set_shared_memory_region(handle, [np.array([600_000])])
            client.register_system_shared_memory("limit", key, 8)
            try:
                found = client.infer("ranges", [client.placed("limit", np.array(0), "INT64", "limit", 8)])
                np.testing.assert_array_equal(found.as_numpy("range"), np.arange(600_000))
            finally:
                client.unregister_system_shared_memory("limit")

    def test_status(self, client):
        """The regions that are registered are told; after unregistering there are none."""
        with client_memory(64) as (_, key):
            client.register_system_shared_memory("told", key, 32, offset=16)
            found = as_json(client.get_system_shared_memory_status("told"))
            row = found[0] if isinstance(found, list) else found["regions"]["told"]
            assert (row["key"], int(row["offset"])) == (key, 16)
            client.unregister_system_shared_memory("told")
            with pytest.raises(InferenceServerException, match="no shared memory region 'told'"):
                client.get_system_shared_memory_status("told")
