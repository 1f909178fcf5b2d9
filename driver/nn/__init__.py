"""Networks on numpy: the records of a model, its rules, and an interpreter that defines every operation.

A leaf: it knows arrays, but neither files nor threads. What works with the table of operations, which takes 40 ms to
make, is imported when it is first asked for.
"""

from typing import TYPE_CHECKING

from driver.late_names import late_names

from .errors import DriverError, ExecutionFailed, InvalidModel, LoopTimeout, OutputInsufficientSize
from .extension import Extension, ExtensionType
from .model import Model, Operand, Operation, Subgraph
from .tensors import TensorInfo
from .types import OperandLifeTime, OperandType, combine_dimensions
from .validate import required_version, validate

if TYPE_CHECKING:
    from .builder import ModelBuilder, Value
    from .interpreter import Bound, Interpreter
    from .operation import LONGEST_LOOP_TIMEOUT, LOOP_TIMEOUT
    from .ops import OPERATIONS

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

__getattr__, __dir__ = late_names(
    __name__,
    {
        "driver.nn.builder": "ModelBuilder Value",
        "driver.nn.interpreter": "Bound Interpreter",
        "driver.nn.operation": "LONGEST_LOOP_TIMEOUT LOOP_TIMEOUT",
        "driver.nn.ops": "OPERATIONS",
    },
)
