"""One server for the tests of this folder: some models on ONNX Runtime, at every kind of address."""

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from oip_models import Client, write_copies, write_counter, write_join, write_negation, write_ranges, write_sum
from packed_nets import write_net

from driver.gateways.oip.process import InferenceServer, OipOptions

EVERYTHING = OipOptions(shared_memory=True, model_control=True)


@pytest.fixture(scope="package")
def server():
    """.clients: by kind of address. .models: the folder."""
    with tempfile.TemporaryDirectory(prefix="burst-oip-") as place:
        folder = Path(place) / "models"
        write_sum(folder / "sum.onnx")
        write_copies(folder / "copies.onnx")
        write_join(folder / "join.onnx")
        write_ranges(folder / "ranges.onnx")
        write_negation(folder / "flat.onnx", ("n",))
        write_net("beside numbers", folder, "texts.onnx")
        write_net("classifier", folder, "maps.onnx")
        (folder / "joined" / "1").mkdir(parents=True)
        write_net("identity", folder / "joined" / "1", "model.onnx")
        (folder / "joined" / "config.pbtxt").write_text(
            "max_batch_size: 4 input [ { name: 'x' data_type: TYPE_STRING dims: [-1] } ]"
        )
        write_negation(folder / "square.onnx", ("n", "m"))
        write_negation(folder / "batched" / "1" / "model.onnx", ("rows", "n"))
        (folder / "batched" / "config.pbtxt").write_text(
            "max_batch_size: 4 output [ { name: 'y' data_type: TYPE_FP32 dims: [-1] label_filename: 'labels.txt' } ]"
        )
        write_counter(folder / "counts" / "1" / "model.onnx")
        (folder / "counts" / "config.pbtxt").write_text(
            "model_transaction_policy { decoupled: true } "
            """parameters { key: "feedback" value { string_value: '{"value": "step"}' } } """
            """parameters { key: "also" value { string_value: '["value"]' } } """
            """parameters { key: "until" value { string_value: "done" } } """
            """parameters { key: "most" value { string_value: "100000" } }"""
        )
        (folder / "batched" / "labels.txt").write_text("one\ntwo\nthree\n")
        addresses = ["127.0.0.1:0", "http://127.0.0.1:0", f"unix:{place}/grpc.sock"]
        its = InferenceServer("onnxruntime", folder, addresses, EVERYTHING)
        its.begin()
        clients = dict(zip(("grpc", "http", "unix"), map(Client, its.addresses), strict=True))
        try:
            yield SimpleNamespace(its=its, models=folder, clients=clients, repository=its.repository, uid=os.getuid())
        finally:
            for client in clients.values():
                client.close()
            its.close()


@pytest.fixture(params=["grpc", "http", "unix"])
def client(request, server):
    return server.clients[request.param]
