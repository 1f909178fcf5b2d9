"""What any server of the protocol is asked by Triton's clients and their examples, by each kind of address."""

import gzip
import http.client
import json
import zlib

import numpy as np
import pytest
from oip_models import client_memory, rows, write_sum
from tritonclient.utils import InferenceServerException, shared_memory


def names(status):
    """Of the regions that a client is told of."""
    return {row["name"] for row in status} if isinstance(status, list) else set(status.regions)


@pytest.fixture
def region(client):
    """A region of 64 bytes, registered as "region": (client, handle, key)."""
    with client_memory(64) as (handle, key):
        client.register_system_shared_memory("region", key, 64)
        yield client, handle, key
        client.unregister_system_shared_memory()


@pytest.fixture
def post(server):
    """Posts a body to a path over HTTP: (status, header fields, body)."""
    host = server.its.addresses[1].removeprefix("http://")

    def posted(path, body, **fields):
        connection = http.client.HTTPConnection(host, timeout=20)
        connection.request("POST", path, body, {name.replace("_", "-"): value for name, value in fields.items()})
        answer = connection.getresponse()
        found = answer.status, answer.headers, answer.read()
        connection.close()
        return found

    return posted


class TestRegions:
    def test_twice(self, region):
        """A name that is registered is refused, and the region stays as it was."""
        client, _, key = region
        with pytest.raises(InferenceServerException, match="'region' is registered already"):
            client.register_system_shared_memory("region", key, 32)
        assert names(client.get_system_shared_memory_status("region")) == {"region"}

    def test_again_after_its_end(self, region):
        """A name is free after unregistering; unregistering what is unknown is no error."""
        client, _, key = region
        client.unregister_system_shared_memory("region")
        client.unregister_system_shared_memory("region")
        client.register_system_shared_memory("region", key, 32, offset=32)
        assert names(client.get_system_shared_memory_status()) == {"region"}

    def test_all_at_once(self, region):
        """Without a name, all regions end."""
        client, _, key = region
        client.register_system_shared_memory("other", key, 8, offset=8)
        assert names(client.get_system_shared_memory_status()) == {"region", "other"}
        client.unregister_system_shared_memory()
        assert names(client.get_system_shared_memory_status()) == set()

    @pytest.mark.parametrize(("nbytes", "offset"), [(65, 0), (64, 1), (1, 64), (0, 0), (0, 65), (64, 2**63)])
    def test_more_than_the_file(self, client, nbytes, offset):
        """A region has at least a byte, and ends where its file does."""
        with client_memory(64) as (_, key):
            with pytest.raises(InferenceServerException, match="'beyond' is refused"):
                client.register_system_shared_memory("beyond", key, nbytes, offset=offset)
            assert "beyond" not in names(client.get_system_shared_memory_status())

    def test_a_wrong_size(self, region):
        """An input of more or fewer bytes than its shape has is refused, with both numbers."""
        client, _, _ = region
        for nbytes in (16, 64):
            given = [client.placed("x", rows(), "FP32", "region", nbytes), client.input("y", rows())]
            with pytest.raises(InferenceServerException, match=f"has 32 bytes, and {nbytes} came"):
                client.infer("sum", given)

    @pytest.mark.parametrize(("nbytes", "offset"), [(32, 33), (32, 64), (32, 2**63 - 1)])
    def test_an_output_beyond_the_region(self, region, nbytes, offset):
        """A place that is not inside of its region is refused, and nothing is written."""
        client, handle, _ = region
        shared_memory.set_shared_memory_region(handle, [np.full(16, 7, np.float32)])
        with pytest.raises(InferenceServerException, match="are not in shared memory region 'region'"):
            client.sum(rows(), rows(), outputs=[client.output("sum", "region", nbytes, offset)])
        found = shared_memory.get_contents_as_numpy(handle, np.float32, (16,))
        np.testing.assert_array_equal(found, np.full(16, 7, np.float32))

    def test_an_output_alone(self, region):
        """Inputs in the message, the output in shared memory."""
        client, handle, _ = region
        client.sum(rows(), rows(), outputs=[client.output("sum", "region", 32, 32)])
        np.testing.assert_array_equal(shared_memory.get_contents_as_numpy(handle, np.float32, (2, 4), 32), 2 * rows())

    def test_ended_while_others_stay(self, region):
        """Requests on a region that has ended are refused; requests without it are answered."""
        client, _, _ = region
        given = [client.placed("x", rows(), "FP32", "region", 32), client.input("y", rows())]
        client.infer("sum", given)
        client.unregister_system_shared_memory("region")
        with pytest.raises(InferenceServerException, match="no shared memory region 'region'"):
            client.infer("sum", given)
        client.sum(rows(), rows())

    def test_no_values(self, client):
        """A tensor of no rows has no bytes, and is answered."""
        empty = np.zeros((0, 4), np.float32)
        assert client.sum(empty, empty).as_numpy("sum").shape == (0, 4)

    def test_cuda(self, client):
        """There are no CUDA regions, which is no error for a client that ends all before it begins."""
        client.unregister_cuda_shared_memory()
        client.unregister_cuda_shared_memory("mine")
        assert names(client.get_cuda_shared_memory_status()) == set()
        with pytest.raises(InferenceServerException, match="system shared memory alone"):
            client.register_cuda_shared_memory("mine", b"aGFuZGxl", 0, 64)
        with pytest.raises(InferenceServerException, match="no CUDA shared memory region 'mine'"):
            client.get_cuda_shared_memory_status("mine")


class TestParameters:
    def test_sequences(self, client):
        """Each request of a sequence is answered as if it stood alone, by a number or a string."""
        for number in (7, "seven"):
            for n in range(3):
                x = rows(begin=n)
                found = client.sum(x, x, sequence_id=number, sequence_start=n == 0, sequence_end=n == 2)
                np.testing.assert_array_equal(found.as_numpy("sum"), 2 * x)

    @pytest.mark.parametrize(
        ("parameters", "told"),
        [
            ({"sequence_id": -1}, "sequence_id=-1"),
            ({"sequence_id": True}, "sequence_id=True"),
            ({"sequence_id": 2**64}, "sequence_id=1844"),
            ({"sequence_start": True}, "sequence_start needs a sequence_id"),
            ({"sequence_id": "", "sequence_end": True}, "sequence_end needs a sequence_id"),
            ({"sequence_id": 1, "sequence_end": 1}, "sequence_end=1"),
        ],
    )
    def test_wrong_sequences(self, post, parameters, told):
        """What is no place in a sequence is refused."""
        status, _, body = post("/v2/models/sum/infer", json.dumps({"parameters": parameters}))
        assert status == 400
        assert told in json.loads(body)["error"]

    def test_others(self, client):
        """Parameters and header fields that this server does not know change nothing."""
        found = client.sum(rows(), rows(), parameters={"mine": "x", "number": 3}, headers={"mine": "x"})
        np.testing.assert_array_equal(found.as_numpy("sum"), 2 * rows())

    def test_compressed(self, server):
        """Messages that the client packs, and answers that it is ready to have packed."""
        for kind, words in (
            ("grpc", {"compression_algorithm": "gzip"}),
            ("grpc", {"compression_algorithm": "deflate"}),
            ("http", {"request_compression_algorithm": "gzip", "response_compression_algorithm": "deflate"}),
            ("http", {"request_compression_algorithm": "deflate", "response_compression_algorithm": "gzip"}),
        ):
            found = server.clients[kind].sum(rows(), rows(), **words)
            np.testing.assert_array_equal(found.as_numpy("sum"), 2 * rows())


class TestClasses:
    """The largest values of an output with their indices, and labels where the model's folder has a file of them."""

    X = np.array([[0, 3, -1, 3, 2], [9, 8, 7, 6, 5]], np.float32)

    def test_of_each_row(self, client):
        """Of a batch each row's, the largest first, of equal ones the first; with labels as far as the file goes."""
        given = [client.input("x", -self.X)]
        found = client.infer("batched", given, outputs=[client.kit.InferRequestedOutput("y", class_count=3)])
        expected = [
            [b"3.000000:1:two", b"3.000000:3", b"2.000000:4"],
            [b"9.000000:0:one", b"8.000000:1:two", b"7.000000:2:three"],
        ]
        assert found.as_numpy("y").tolist() == expected

    def test_of_a_whole_output(self, client):
        """Without max_batch_size, of all values; no more than there are. Integers are told as such."""
        for model, name, array in (("flat", "y", -self.X[0]), ("ranges", "range", np.array(5))):
            given = [client.input("x" if model == "flat" else "limit", array)]
            wanted = [client.kit.InferRequestedOutput(name, class_count=9)]
            told = client.infer(model, given, outputs=wanted).as_numpy(name).tolist()
            assert len(told) == 5
            assert told[0] == (b"3.000000:1" if model == "flat" else b"4:4")

    def test_more_than_are_told(self, client):
        """So many strings in an answer, and no more: they cost the server more than the values do."""
        given, x = client.input("limit", np.array(200_000)), np.arange(200_000)
        wanted = [client.kit.InferRequestedOutput("range", class_count=200_000)]
        with pytest.raises(InferenceServerException, match="200000 classes of 1 rows; at most 131072"):
            client.infer("ranges", [given], outputs=wanted)
        np.testing.assert_array_equal(client.infer("ranges", [given]).as_numpy("range"), x)

    def test_in_json(self, server):
        """Over HTTP they come as strings, too."""
        client = server.clients["http"]
        wanted = client.kit.InferRequestedOutput("y", binary_data=False, class_count=1)
        found = client.infer("flat", [client.input("x", -self.X[0])], outputs=[wanted])
        assert found.get_output("y") == {"name": "y", "datatype": "BYTES", "shape": [1], "data": ["3.000000:1"]}

    def test_not_in_shared_memory(self, client):
        """Classes are asked for in the message alone."""
        wanted = client.kit.InferRequestedOutput("y", class_count=1)
        wanted._parameters = {"classification": 1, "shared_memory_region": "r", "shared_memory_byte_size": 8}
        if client.kit.__name__.endswith("grpc"):
            wanted._output.parameters["shared_memory_region"].string_param = "r"
            wanted._output.parameters["shared_memory_byte_size"].int64_param = 8
        with pytest.raises(InferenceServerException, match="classes come in the message"):
            client.infer("flat", [client.input("x", self.X[0])], outputs=[wanted])


class TestHttpForms:
    @pytest.mark.parametrize("x_binary", [True, False])
    @pytest.mark.parametrize("sum_binary", [True, False])
    def test_json_beside_binary(self, server, x_binary, sum_binary):
        """Each input and output is in JSON or in binary form, as the client likes."""
        client = server.clients["http"]
        given = [client.input("x", rows(), binary_data=x_binary), client.input("y", rows(), binary_data=False)]
        wanted = [client.kit.InferRequestedOutput("sum", binary_data=sum_binary)]
        found = client.infer("sum", given, outputs=wanted)
        assert ("data" in found.get_output("sum")) is not sum_binary
        np.testing.assert_array_equal(found.as_numpy("sum"), 2 * rows())

    def test_nested_values(self, post):
        """Values in JSON lie flat, or in lists within lists."""
        tensors = [
            {"name": "x", "datatype": "FP32", "shape": [2, 4], "data": rows().tolist()},
            {"name": "y", "datatype": "FP32", "shape": [2, 4], "data": rows().reshape(-1).tolist()},
        ]
        status, _, body = post("/v2/models/sum/infer", json.dumps({"id": "one", "inputs": tensors}))
        assert status == 200
        said = json.loads(body)
        assert said["id"] == "one"
        assert said["outputs"][0]["data"] == (2 * rows()).reshape(-1).tolist()

    @pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
    def test_packed_by_hand(self, post, pack):
        """A body of JSON that is packed, and a field that names how."""
        encoding = "gzip" if pack is gzip.compress else "deflate"
        status, _, body = post("/v2/repository/index", pack(b"{}"), content_encoding=encoding)
        assert status == 200
        assert {row["name"] for row in json.loads(body)} >= {"sum"}

    def test_bytes_are_told(self, client):
        """Strings for an input of numbers: the error says what the input is, and what to do."""
        words = np.array([[b"a", b"b", b"c", b"d"]], dtype=np.object_)
        given = [client.input("x", words, "BYTES"), client.input("y", rows(1))]
        with pytest.raises(InferenceServerException, match=r"'x' is FP32, not BYTES: .* turn strings into numbers"):
            client.infer("sum", given)


class TestRaw:
    """Requests of an input's bytes alone, with `Inference-Header-Content-Length: 0`: -x of models with open sizes."""

    @pytest.mark.parametrize(("model", "shape"), [("flat", [8]), ("batched", [1, 8])])
    def test_one_open_size(self, post, model, shape):
        """It follows from the number of bytes; of a batch there is one row. The answer is in binary form."""
        x = np.arange(8, dtype=np.float32)
        status, fields, body = post(f"/v2/models/{model}/infer", x.tobytes(), inference_header_content_length="0")
        assert status == 200
        length = int(fields["Inference-Header-Content-Length"])
        (output,) = json.loads(body[:length])["outputs"]
        assert output["shape"] == shape
        np.testing.assert_array_equal(np.frombuffer(body[length:], np.float32), -x)

    @pytest.mark.parametrize(
        ("model", "nbytes", "told"),
        [
            ("flat", 7, "has 4 bytes, and 7 came"),
            ("square", 16, "has shape [-1, -1]: say in JSON"),
            ("sum", 32, "model 'sum' has 2"),
            ("nothing", 4, "no model 'nothing'"),
        ],
    )
    def test_no_shape_follows(self, post, model, nbytes, told):
        """Bytes that fit no shape, or several, and models of several inputs."""
        status, _, body = post(f"/v2/models/{model}/infer", bytes(nbytes), inference_header_content_length="0")
        assert 400 <= status < 500
        assert told in json.loads(body)["error"]


def test_names_that_are_no_models(client):
    """Names with folders, blanks or nothing in them are no models, whether to load, to unload or to ask."""
    for name in ("../etc", "a/../b", "..", "...", "/etc/passwd", "model/", " ", "\t", "model..1"):
        for call in (client.load_model, client.unload_model, client.get_model_metadata):
            with pytest.raises(InferenceServerException, match=r"there is no|404|Not Found"):
                call(name)
        assert not client.is_model_ready(name)


def test_a_large_model_is_not_taken(server):
    """A client that brings a model of its own in a request to load is refused, and the folder's model goes on."""
    write_sum(server.models / "own.onnx")
    for client in server.clients.values():
        client.load_model("own")
        with pytest.raises(InferenceServerException, match="not taken from clients"):
            client.load_model("own", config="{}", files={"file:1/model.onnx": b"x" * 100_000})
        client.sum(rows(), rows(), model="own")
