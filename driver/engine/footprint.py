"""An estimate of what the engine's own objects for a model and its requests occupy. It is charged to the client.

The figures are those of the reference device, whose objects are Python's. tests/driver/engine/test_footprint.py holds
them to measured memory. What a library allocates for a model of another device is not among them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver.nn import Model

_OPERAND, _CONSTANT, _OPERATION, _LEAST_MODEL = 540, 260, 440, 8192  # of a model; a constant is an operand and more
_ARGUMENT, _STEP, _FURTHER, _LEAST_PLAN = 350, 550, 300, 2048  # of a plan
_FEW = 4  # operands of an operation, which `_STEP` includes


class Footprint(NamedTuple):
    """The bytes of a decoded and prepared model, and of each request that stays bound to it."""

    model: int
    plan: int

    @classmethod
    def of(cls, model: Model, pace: Callable[[], object]) -> Footprint:
        """Return the footprint of a valid model. `pace`: called after each operation."""
        decoded, plan = _LEAST_MODEL, _LEAST_PLAN
        for graph in (model.main, *model.referenced):
            constants = sum(operand.lifetime.is_constant for operand in graph.operands)
            decoded += _OPERAND * len(graph.operands) + _CONSTANT * constants + _OPERATION * len(graph.operations)
            plan += _STEP * len(graph.operations)
            for operation in graph.operations:
                plan += _FURTHER * max(0, len(operation.inputs) + len(operation.outputs) - _FEW)
                pace()
        return cls(decoded, plan + _ARGUMENT * (len(model.main.inputs) + len(model.main.outputs)))
