"""kserve's clients, as they come from PyPI, at all kinds of addresses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from needed_tools import give_up
from oip_models import rows, write_model
from onnx import TensorProto, helper

PYTHON = Path(sys.prefix) / "kserve" / "bin" / "python"
PROGRAM = Path(__file__).parent / "kserve_requests.py"


@pytest.fixture(scope="module")
def said(server):
    """What the clients were told, by kind of address."""
    if not PYTHON.exists():
        give_up(f"no kserve in {PYTHON.parents[1]}: `make integration` makes it")
    ports = dict.fromkeys(("x", "y", "sum"), (TensorProto.FLOAT16, ("rows", 4)))
    output = {"sum": ports.pop("sum")}
    write_model(server.models / "half.onnx", [helper.make_node("Add", ["x", "y"], ["sum"])], ports, output)
    server.clients["unix"].load_model("half")
    grpc, http, path = server.its.addresses
    command = [str(PYTHON), str(PROGRAM), grpc, path, http]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.integration
@pytest.mark.parametrize("address", ["port", "path", "http"])
def test_questions(said, address):
    """It learns that the server and a model are ready, and another is not."""
    assert [said[address][word] for word in ("live", "ready", "sum", "nothing")] == [True, True, True, False]


@pytest.mark.integration
@pytest.mark.parametrize("address", ["port", "path", "http"])
@pytest.mark.parametrize("form", ["binary", "values", "half"])
def test_inference(said, address, form):
    """It gets the sum of what it sent, in binary form, as values, and of float16."""
    expected = {"id": "one", "name": "sum", "values": (2 * rows() + 1).tolist()}
    assert said[address][form] == expected


@pytest.mark.integration
@pytest.mark.parametrize("address", ["port", "path", "http"])
def test_mistakes(said, address):
    """A model that is not there, and a wrong type: its errors have the server's words."""
    codes = [404, 400] if address == "http" else ["NOT_FOUND", "INVALID_ARGUMENT"]
    found = [said[address]["wrong nothing"], said[address]["wrong sum"]]
    assert [code for code, _ in found] == codes
    assert "there is no model 'nothing'" in found[0][1]
    assert "is FP32, not 'FP16'" in found[1][1]
