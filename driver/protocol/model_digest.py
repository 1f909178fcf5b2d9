"""Digests of models: what a model is, whatever memory its constants lie in."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgpack
import numpy as np
from blake3 import blake3

from driver.protocol.model_codec import operand_code

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from driver.nn import Model, Operand


def structure_digest(model: Model) -> bytes:
    """SHA-256 of everything in a model but the values of its constants."""
    packer, parts = msgpack.Packer(), []
    prefixes = dict(model.extensions)
    for graph in (model.main, *model.referenced):
        operands = [_described(operand, prefixes) for operand in graph.operands]
        operations = [(operation.type, operation.inputs, operation.outputs) for operation in graph.operations]
        parts.append(packer.pack((operands, operations, graph.inputs, graph.outputs)))
    return hashlib.sha256(b"".join([packer.pack((model.relaxed, len(parts), model.extensions)), *parts])).digest()


def _described(operand: Operand, prefixes: Mapping[str, int]) -> tuple[object, ...]:
    value = None if operand.lifetime.is_constant else operand.value
    numbers = (operand.scale, operand.zero_point, operand.number_of_consumers)
    rest = (int(operand.lifetime), value, operand.channel_quant, operand.extension_params)
    return operand_code(operand, prefixes), operand.dimensions, *numbers, *rest


_SAMPLES, _SAMPLE = 256, 4096


def sampled_digest(model: Model, structure: bytes) -> bytes:
    """Return the digest of a model file: of 256 parts of 4 KiB, evenly spread, if the file is larger than these.

    It tells files apart, but is no proof that two are the same.
    """
    digest = blake3(structure)
    for operand in model.main.operands:
        if operand.lifetime.is_constant:
            data = np.ascontiguousarray(operand.value).reshape(-1).view(np.uint8)
            last = max(0, data.size - _SAMPLE)
            starts: Sequence[int] = range(0, last + 1, _SAMPLE)
            if len(starts) > _SAMPLES:
                starts = [last * n // (_SAMPLES - 1) for n in range(_SAMPLES)]
            digest.update(data.nbytes.to_bytes(8, "little"))
            for start in (*starts, last):
                digest.update(data[start : start + _SAMPLE].data)
    return digest.digest()


def model_digest(model: Model, structure: bytes) -> bytes:
    """BLAKE3 of a model whose structure has that digest: SHA-256 of many constants takes three times as long."""
    digest = blake3(structure)
    for graph in (model.main, *model.referenced):
        for operand in graph.operands:
            if operand.lifetime.is_constant:
                array = np.ascontiguousarray(operand.value)
                digest.update(array.nbytes.to_bytes(8, "little"))
                digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.digest()
