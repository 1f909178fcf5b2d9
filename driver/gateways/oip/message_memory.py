"""The memory of messages over gRPC: what they can become, and what has not come whole.

Two bytes of protobuf can become an input of 200.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from driver.gateways.refusal import Refusal, RefusalCode
from driver.gateways.request_memory import malloc_trim
from driver.service.process_figures import private_bytes

if TYPE_CHECKING:
    from driver.gateways.request_memory import RequestMemory

_FIELD = 512  # bytes that one field can take: an input without a name is one, and so is an empty string
_MOST_FIELDS = 1 << 17
_PARAMETERS: dict[int, Any] = {2: {}}
_CONTENTS = {n: 12 if n in (6, 7) else 40 for n in range(1, 8)}
_TENSOR: dict[int, Any] = {3: 40, 4: _PARAMETERS, 5: _CONTENTS}
_INFER: dict[int, Any] = {4: _PARAMETERS, 5: _TENSOR, 6: {2: _PARAMETERS}, 7: 2}
_QUESTION = {3: _PARAMETERS}
"""Numbers of the fields of a request, to infer and any other -> the fields in it, or what each of its bytes becomes."""


class UnclaimedMemory:
    """Memory that this process has taken since it was idle, and no request has claimed: over gRPC, messages that have
    not come whole, of which the library tells nothing, and answers that are not read.
    """

    def __init__(self, memory: RequestMemory, most: int) -> None:
        """`most`: bytes that are no `excess`."""
        self._memory, self._most = memory, most
        self.note_idle()

    def note_idle(self) -> None:
        """Note that there is no call, and so nothing to count."""
        self._idle = private_bytes(os.getpid())

    @property
    def excess(self) -> int:
        """Bytes beyond what may be, without what the C library keeps of freed memory."""
        if self._beyond() > 0 and malloc_trim:
            malloc_trim(0)
        return max(0, self._beyond())

    def _beyond(self) -> int:
        return private_bytes(os.getpid()) - self._idle - self._memory.claimed - self._most


def message_bytes(packet: bytes, *, is_infer: bool) -> int:
    """Return how many bytes a request over gRPC takes at most once it is decoded. Raise Refusal.

    It looks at the heads of fields alone, and skips what is in them; a message of more fields than any has is refused.
    """
    found, fields = len(packet), 0
    parts = [(0, len(packet), _INFER if is_infer else _QUESTION)]
    try:
        while parts:
            at, end, known = parts.pop()
            while at < end:
                fields += 1
                if fields > _MOST_FIELDS:
                    raise _too_many(len(packet))
                tag, at = _number(packet, at)
                inside = known.get(tag >> 3, 1)
                match tag & 7:
                    case 0:
                        _, at = _number(packet, at)
                    case 1 | 5 as kind:
                        at += 8 if kind == 1 else 4
                    case 2:
                        size, at = _number(packet, at)
                        if isinstance(inside, dict):
                            parts.append((at, min(end, at + size), inside))
                        else:
                            found += min(size, end - at) * inside
                        at += size
    except IndexError:
        pass  # the message ends within a field: the decoder will say so
    return found + _FIELD * fields


def _number(packet: bytes, at: int) -> tuple[int, int]:
    """Return a number of protobuf's, and where the next byte is. Raise IndexError."""
    found = shift = 0
    while (byte := packet[at]) > 127:
        found |= (byte & 127) << shift
        shift, at = shift + 7, at + 1
        if shift > 63:
            raise IndexError
    return found | byte << shift, at + 1


def _too_many(nbytes: int) -> Refusal:
    return Refusal(
        RefusalCode.RESOURCE_EXHAUSTED,
        f"this request of {nbytes} bytes has more than {_MOST_FIELDS} fields: send tensors as raw bytes",
    )
