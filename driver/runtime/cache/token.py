"""What a cache entry stands for: everything that makes a compilation what it is, in 32 bytes.

The first part is the application's: by default the SHA-256 of the model, or 32 bytes of its own, which stand for the
model's constants then, and save the time to hash those. The rest is what the HAL's runtime adds (which operations of
the model run on the device, its name and version, preference and priority), and what ours does: the model's structure,
this library's version, and the processor. So what is there under a token is what would be compiled now.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING

import msgpack
import numpy as np

from driver.engine.cache.processor import processor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driver.nn import Model, Operand

TOKEN_BYTES = 32


def structure_digest(model: Model) -> bytes:
    """SHA-256 of everything in a model but the values of its constants."""
    packer, parts = msgpack.Packer(), []
    for graph in (model.main, *model.referenced):
        operands = [_described(operand) for operand in graph.operands]
        operations = [(operation.type, operation.inputs, operation.outputs) for operation in graph.operations]
        parts.append(packer.pack((operands, operations, graph.inputs, graph.outputs)))
    return hashlib.sha256(b"".join([packer.pack((model.relaxed, len(parts))), *parts])).digest()


def _described(operand: Operand) -> tuple[object, ...]:
    value = None if operand.lifetime.is_constant else operand.value
    numbers = (operand.scale, operand.zero_point, operand.number_of_consumers)
    return int(operand.type), operand.dimensions, *numbers, int(operand.lifetime), value, operand.channel_quant


def model_digest(model: Model, structure: bytes) -> bytes:
    """SHA-256 of a model whose structure has that digest."""
    digest = hashlib.sha256(structure)
    for graph in (model.main, *model.referenced):
        for operand in graph.operands:
            if operand.lifetime.is_constant:
                array = np.ascontiguousarray(operand.value)
                digest.update(array.nbytes.to_bytes(8, "little"))
                digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.digest()


def token_of(application: bytes, structure: bytes, *terms: object) -> bytes:
    """`application`: its token. `terms`: msgpack knows how to write them."""
    return hashlib.sha256(application + structure + msgpack.packb([*terms, _release(), processor()])).digest()


@cache
def _release() -> str:
    return version("burst-engine")


def part_token(
    application: bytes, structure: bytes, operations: Sequence[int] | None, device: tuple[str, str], *how: str
) -> bytes:
    """Of what one device compiles. `operations`: None when that is the whole model. `device`: name and version."""
    return token_of(application, structure, "part", operations, device, how)
