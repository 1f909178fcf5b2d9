"""The protocol's messages, by name, in a descriptor pool of their own; and the service's methods."""

from __future__ import annotations

from importlib import resources
from typing import Any

from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from driver.gateways.oip.proto_file import ProtoFile

_SOURCE = ProtoFile(
    "burst/open_inference.proto", resources.files("driver.gateways.oip").joinpath("open_inference.proto").read_text()
)
_POOL = DescriptorPool()
_POOL.AddSerializedFile(_SOURCE.file.SerializeToString())

SERVICE = _SOURCE.service
METHODS = tuple(_SOURCE.methods)


def message(name: str) -> Any:
    """The class of the message of that name."""
    return GetMessageClass(_POOL.FindMessageTypeByName(f"{_SOURCE.file.package}.{name}"))


def enum_names(name: str) -> dict[int, str]:
    """The words of an enum, by number."""
    found = _POOL.FindEnumTypeByName(f"{_SOURCE.file.package}.{name}")
    return {value.number: value.name for value in found.values}


ModelInferRequest, ModelInferResponse = message("ModelInferRequest"), message("ModelInferResponse")
ModelStreamInferResponse = message("ModelStreamInferResponse")
ModelConfig = message("ModelConfig")
