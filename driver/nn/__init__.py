"""Networks on numpy: the records of a model, its rules, and an interpreter that defines every operation.

A leaf: it imports nothing else of ours, and knows arrays but neither files nor threads.
"""

from .builder import ModelBuilder, Value
from .errors import DriverError, ExecutionFailed, InvalidModel, OutputInsufficientSize
from .interpreter import Bound, Interpreter
from .model import Model, Operand, Operation, Subgraph
from .ops import OPERATIONS
from .types import OperandLifeTime, OperandType, combine_dimensions
from .validate import required_version, validate

__all__ = [
    "OPERATIONS",
    "Bound",
    "DriverError",
    "ExecutionFailed",
    "Interpreter",
    "InvalidModel",
    "Model",
    "ModelBuilder",
    "Operand",
    "OperandLifeTime",
    "OperandType",
    "Operation",
    "OutputInsufficientSize",
    "Subgraph",
    "Value",
    "combine_dimensions",
    "required_version",
    "validate",
]
