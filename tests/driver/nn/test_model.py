import pickle

import numpy as np
import pytest

from driver.nn import (
    DriverError,
    ExecutionFailed,
    InvalidModel,
    Model,
    Operand,
    OperandLifeTime,
    OperandType,
    Operation,
    OutputInsufficientSize,
    Subgraph,
    validate,
)


def test_records_take_names_or_enumerations():
    """Types and lifetimes may be spelt as in the HAL, in conformance files, or by the enumeration."""
    by_name = Operand(type="TENSOR_FLOAT32", dimensions=[1, 4], lifetime="INPUT")
    assert by_name.type is OperandType.TENSOR_FLOAT32
    assert by_name.lifetime is OperandLifeTime.SUBGRAPH_INPUT
    assert by_name.dimensions == (1, 4)
    assert Operand(3, (1, 4), lifetime=OperandLifeTime.SUBGRAPH_INPUT).type is by_name.type


def test_records_do_not_change():
    """A model that was validated stays as it is."""
    operand = Operand("INT32", ())
    with pytest.raises(AttributeError):
        operand.scale = 1.0
    operation = Operation("ADD", [0, 1], [2])
    assert (operation.inputs, operation.outputs) == ((0, 1), (2,))
    with pytest.raises(AttributeError):
        operation.type = "SUB"


def test_unknown_words_are_refused():
    """A type or lifetime outside the HAL is an invalid model at once."""
    with pytest.raises(InvalidModel, match="TENSOR_FLOAT64"):
        Operand("TENSOR_FLOAT64", ())
    with pytest.raises(InvalidModel, match="FOREVER"):
        Operand("INT32", (), lifetime="FOREVER")


def test_models_travel_between_processes():
    """Models pickle, constants included."""
    constant = Operand("TENSOR_INT32", (2,), lifetime="CONSTANT", value=np.array([1, 2], np.int32))
    operands = [Operand("TENSOR_INT32", (2,), lifetime="INPUT"), constant, Operand("INT32", (), lifetime="CONSTANT")]
    operands[2] = Operand("INT32", (), lifetime="CONSTANT", value=np.int32(0))
    operands.append(Operand("TENSOR_INT32", (2,), lifetime="OUTPUT"))
    model = Model(Subgraph(operands, [Operation("ADD", (0, 1, 2), (3,))], (0,), (3,)))
    copy = pickle.loads(pickle.dumps(model))
    validate(copy)
    assert copy.main.operands[1].value.tolist() == [1, 2]


def test_the_tree_of_errors():
    """One base for all, and ValueError beside it where a Python user would look for one."""
    assert {e.__base__ for e in (InvalidModel, ExecutionFailed, OutputInsufficientSize)} == {DriverError}
    assert issubclass(InvalidModel, ValueError)
    failure = ExecutionFailed(3, "ADD", "because")
    assert (failure.index, failure.operation, str(failure)) == (3, "ADD", "operation 3 (ADD): because")
