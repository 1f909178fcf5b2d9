"""The rules for every request, whatever its model: checked before it is encoded, and by the device after
decoding.

So a request that breaks one of these rules gets the same status and the same text on every way.
"""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Final

from burst.errors import InvalidArgument
from burst.memory import DeviceBuffer, Memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from burst.messages import RequestArgument

MOST_POOLS: Final = 1024
"""Pools that one request may name."""
_LARGEST = 2**32 - 1  # of a number in an argument
_PLACE = "offset", "length"


def check_request(inputs: Sequence[RequestArgument], outputs: Sequence[RequestArgument], pools: int) -> None:
    """`pools`: how many the request names. Raise InvalidArgument; TypeError for numbers that are not whole."""
    if pools > MOST_POOLS:
        raise InvalidArgument(
            f"{pools} pools in one request; at most {MOST_POOLS} are allowed: put several arguments into one pool"
        )
    for side, arguments in (("input", inputs), ("output", outputs)):
        for n, argument in enumerate(arguments):
            _check_argument(f"{side} {n}", argument, pools)


def _check_argument(where: str, argument: RequestArgument, pools: int) -> None:
    has_no_value, pool, offset, length, dimensions = argument
    if has_no_value:
        if pool or offset or length or dimensions:
            raise InvalidArgument(
                f"{where} is omitted, so it has no pool, offset, length or dimensions: leave them out"
            )
        return
    if not 0 <= index(pool) < pools:
        raise InvalidArgument(f"{where}: there is no pool {pool}; the request has {pools}")
    for name, value in zip(_PLACE, (offset, length), strict=True):
        if not 0 <= index(value) <= _LARGEST:
            raise InvalidArgument(f"{where}: {name} {value} is not from 0 to {_LARGEST} bytes")
    if dimensions and not 0 <= min(map(index, dimensions)) <= max(map(index, dimensions)) <= _LARGEST:
        raise InvalidArgument(f"{where}: dimensions {list(dimensions)} are not all from 0 to {_LARGEST}")


def check_pool(n: int, pool: object) -> None:
    """Check a pool here. Raise TypeError for what is no pool, ValueError for one that its owner has closed."""
    if isinstance(pool, Memory):
        if pool.is_closed:
            raise ValueError(f"pool {n} is closed; a pool stays open while requests use it")
    elif not isinstance(pool, DeviceBuffer):
        raise TypeError(f"pool {n} is {pool!r:.60}; a pool is a burst.Memory, or a buffer that a device allocated")
