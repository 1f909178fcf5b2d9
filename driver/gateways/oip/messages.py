"""The protocol's messages, by name, in a descriptor pool of their own; and the service's methods.

open_inference.binpb is what protoc makes of open_inference.proto, as data: generated code would ask for one version of
protobuf. In a pool of their own the messages stand beside those of the same names of `tritonclient` and `kserve`.
"""

from __future__ import annotations

from importlib import resources
from typing import Any, NamedTuple

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_DATA = resources.files("driver.gateways.oip").joinpath("open_inference.binpb").read_bytes()
(_FILE,) = FileDescriptorSet.FromString(_DATA).file
_POOL = DescriptorPool()
_POOL.AddSerializedFile(_FILE.SerializeToString())
(_SERVICE,) = _FILE.service


class Method(NamedTuple):
    """A method of the service: names of its messages, and whether each side is a stream."""

    name: str
    request: str
    response: str
    streams: tuple[bool, bool]


def _short(type_name: str) -> str:
    return type_name.removeprefix(f".{_FILE.package}.")


SERVICE = f"{_FILE.package}.{_SERVICE.name}"
METHODS = tuple(
    Method(each.name, _short(each.input_type), _short(each.output_type), (each.client_streaming, each.server_streaming))
    for each in _SERVICE.method
)


def message(name: str) -> Any:
    """Return the class of the message of that name."""
    return GetMessageClass(_POOL.FindMessageTypeByName(f"{_FILE.package}.{name}"))


def enum_names(name: str) -> dict[int, str]:
    """Return the words of an enum, by number."""
    found = _POOL.FindEnumTypeByName(f"{_FILE.package}.{name}")
    return {value.number: value.name for value in found.values}


ModelInferRequest, ModelInferResponse = message("ModelInferRequest"), message("ModelInferResponse")
ModelStreamInferResponse = message("ModelStreamInferResponse")
ModelConfig = message("ModelConfig")
