"""A check of fenced requests: they give the shapes of their outputs, as no caller waits to be told them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from burst import HardwareBuffer, InvalidArgument, Memory
from driver.engine.driver_memory import DriverPool
from driver.nn import combine_dimensions

if TYPE_CHECKING:
    from burst import Request
    from driver.nn import Model


def check_outputs(model: Model, request: Request) -> None:
    """Raise InvalidArgument unless model and request fix the shapes of all outputs, and their memory suffices."""
    graph = model.main
    for n, (argument, index) in enumerate(zip(request.outputs, graph.outputs, strict=False)):
        operand = graph.operands[index]
        found = combine_dimensions(operand.dimensions, argument.dimensions)
        if found is None or argument.has_no_value:
            continue  # binding refuses it
        if not operand.type.is_scalar and (not found or 0 in found):
            raise InvalidArgument(
                f"output {n}: dimensions {list(found)} are not fully known; a fenced request must give them"
            )
        pool = request.pools[argument.pool] if argument.pool < len(request.pools) else None
        needed = math.prod(found) * operand.type.element_size
        is_whole = isinstance(pool, HardwareBuffer) or (isinstance(pool, DriverPool) and pool.held)
        if isinstance(pool, Memory) and not is_whole and argument.length < needed:
            raise InvalidArgument(
                f"output {n}: {argument.length} bytes are too few for {operand.type.name} {list(found)}"
            )
