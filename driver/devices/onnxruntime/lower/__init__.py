"""HAL operations as ONNX operations: a table with a function for each.

A function reads its operands in the forms that it needs, emits ONNX operations, and raises UnsupportedError where these
would not compute what the HAL says. A new operation is a function, and its line in its family's table.
"""

from .node import OrtGraph, OrtNode
from .table import LOWERINGS

__all__ = ["LOWERINGS", "OrtGraph", "OrtNode"]
