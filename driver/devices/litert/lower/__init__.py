"""HAL operations as TFLite operations: a table with a function for each.

A function reads its operands in the forms that it needs, emits TFLite operations, and raises UnsupportedError where
these would not compute exactly what the HAL says. A new operation is a function, and its line in its family's table.
"""

from collections.abc import Callable

from . import elementwise, movement, recurrent, reduce, window
from .node import Graph, Node, UnsupportedError

LOWERINGS: dict[str, Callable[[Node], None]] = {
    **elementwise.TABLE,
    **movement.TABLE,
    **recurrent.TABLE,
    **reduce.TABLE,
    **window.TABLE,
}

__all__ = ["LOWERINGS", "Graph", "Node", "UnsupportedError"]
