"""Digests of models: what a model is, whatever memory its constants lie in."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgpack
import numpy as np

if TYPE_CHECKING:
    from driver.nn import Model, Operand


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
