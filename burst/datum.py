"""Elements of packets: FmqRequestDatum and FmqResultDatum, and how each kind lies in its 24 bytes.

The queue carries opaque elements of `DATUM_DTYPE`. The dtype of a kind shows its fields:

    >>> element = np.frombuffer(packet, FmqRequestDatum.PACKET_INFORMATION.dtype, count=1)[0]
    >>> element["packetSize"], element["numberOfInputs"]
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import Any, Final

import numpy as np

DATUM: Final = 24
"""Bytes in one element."""
DATUM_DTYPE: Final = f"V{DATUM}"
"""The numpy dtype of a queue of elements."""


class Datum(Enum):
    """A table of kinds: each member is a discriminator and its payload.

    The payload is a list of `offset name code`, the code being that of `struct`; all other bytes are zero.
    """

    def __init__(self, number: int, payload: str) -> None:
        fields = [(int(at), name, code) for at, name, code in map(str.split, payload.split(", "))]
        names, codes, offsets = ["discriminator"], ["B"], [0]
        layout, end = "<B", 1
        for at, name, code in fields:
            layout += f"{at - end}x{code}"
            end = at + struct.calcsize(f"<{code}")
            names.append(name)
            codes.append(code)
            offsets.append(at)
        self.number = number
        self.struct = struct.Struct(f"{layout}{DATUM - end}x")
        self.dtype: np.dtype[Any] = np.dtype(
            {"names": names, "formats": [f"<{code}" for code in codes], "offsets": offsets, "itemsize": DATUM}
        )


class FmqRequestDatum(Datum):
    """The kinds of element that a request is made of."""

    PACKET_INFORMATION = 0, "4 packetSize I, 8 numberOfInputs I, 12 numberOfOutputs I, 16 numberOfPools I"
    INPUT_OPERAND_INFORMATION = 1, "4 hasNoValue ?, 8 poolIndex I, 12 offset I, 16 length I, 20 numberOfDimensions I"
    INPUT_OPERAND_DIMENSION_VALUE = 2, "4 dimension I"
    OUTPUT_OPERAND_INFORMATION = 3, "4 hasNoValue ?, 8 poolIndex I, 12 offset I, 16 length I, 20 numberOfDimensions I"
    OUTPUT_OPERAND_DIMENSION_VALUE = 4, "4 dimension I"
    POOL_IDENTIFIER = 5, "4 slot i"
    MEASURE_TIMING = 6, "4 measure i"
    BUFFER_TOKEN = 7, "4 token I"
    LOOP_TIMEOUT = 8, "8 nanoseconds Q"
    REQUEST_IDENTIFIER = 9, "8 id Q, 16 deadline Q"


class FmqResultDatum(Datum):
    """The kinds of element that a result is made of."""

    PACKET_INFORMATION = 0, "8 packetSize I, 12 errorStatus i, 16 numberOfOperands I"
    OPERAND_INFORMATION = 1, "8 isSufficient ?, 12 numberOfDimensions I"
    OPERAND_DIMENSION_VALUE = 2, "8 dimension I"
    EXECUTION_TIMING = 3, "8 timeOnDevice Q, 16 timeInDriver Q"
    REQUEST_IDENTIFIER = 4, "8 id Q"
