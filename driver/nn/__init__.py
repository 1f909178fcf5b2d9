"""Networks on numpy: the records of a model, its rules, and an interpreter that defines every operation.

A leaf: it imports nothing else of ours, and knows arrays but neither files nor threads.
"""

from .builder import ModelBuilder, Value
from .errors import DriverError, ExecutionFailed, InvalidModel, LoopTimeout, OutputInsufficientSize
from .extension import Extension, ExtensionType
from .interpreter import Bound, Interpreter
from .model import Model, Operand, Operation, Subgraph
from .operation import LONGEST_LOOP_TIMEOUT, LOOP_TIMEOUT
from .ops import OPERATIONS
from .tensors import TensorInfo
from .types import OperandLifeTime, OperandType, combine_dimensions
from .validate import required_version, validate

__all__ = [
    "LONGEST_LOOP_TIMEOUT",
    "LOOP_TIMEOUT",
    "OPERATIONS",
    "Bound",
    "DriverError",
    "ExecutionFailed",
    "Extension",
    "ExtensionType",
    "Interpreter",
    "InvalidModel",
    "LoopTimeout",
    "Model",
    "ModelBuilder",
    "Operand",
    "OperandLifeTime",
    "OperandType",
    "Operation",
    "OutputInsufficientSize",
    "Subgraph",
    "TensorInfo",
    "Value",
    "combine_dimensions",
    "required_version",
    "validate",
]
