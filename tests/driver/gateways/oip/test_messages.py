"""The protocol's messages are those that its .proto file declares."""

from pathlib import Path

import pytest

import driver.gateways.oip

pytest.importorskip("google.protobuf")
protoc = pytest.importorskip("grpc_tools.protoc")
from google.protobuf.descriptor_pb2 import FileDescriptorSet  # noqa: E402 (only where there is protobuf)

FOLDER = Path(driver.gateways.oip.__file__).parent


@pytest.mark.sources
def test_the_descriptors_are_those_of_the_proto_file(tmp_path):
    """What protoc makes of it today says the same; the command is at the beginning of the .proto file."""
    made = tmp_path / "made.binpb"
    assert protoc.main(["", f"-I{FOLDER}", f"--descriptor_set_out={made}", "open_inference.proto"]) == 0
    committed = (FOLDER / "open_inference.binpb").read_bytes()
    assert FileDescriptorSet.FromString(made.read_bytes()) == FileDescriptorSet.FromString(committed)
