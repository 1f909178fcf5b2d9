"""HAL operations as TFLite operations: a table with a function for each.

A function reads its operands in the forms that it needs, emits TFLite operations, and raises UnsupportedError where
these would not compute exactly what the HAL says. A new operation is a function, and its line in its family's table.
"""

from .node import LiteRtGraph, LiteRtNode, Lowering
from .table import LOWERINGS

__all__ = ["LOWERINGS", "LiteRtGraph", "LiteRtNode", "Lowering"]
