"""Case files, their variations, and when an answer is right."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
from case_records import ADD, QUANTISED

from driver.nn import OperandType, validate
from driver.vts import BadCase, read_cases
from driver.vts.operations import difference, limits


@pytest.fixture
def case(write):
    """The case that a record describes."""
    return lambda record: next(read_cases(write(record)))


def test_a_line_is_a_case(case):
    """The model is valid, feeds have their operand's type and shape, and expected values are flat."""
    found = case(ADD)
    validate(found.model)
    assert found.name == "add_two"
    assert found.feeds[0].dtype == np.float32
    assert found.feeds[0].tolist() == [0.5, 1.5]
    assert found.expected[0].tolist() == [1.5, 3.5]
    assert not found.must_fail


def test_a_gzipped_file_is_read_as_it_is(tmp_path):
    """By its name."""
    path = tmp_path / "cases.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(ADD).encode()))
    assert [c.name for c in read_cases(path)] == ["add_two"]


def test_an_empty_feed_is_an_omitted_input(case):
    """Whatever its dims say; and an output that is not compared has no expected values."""
    found = case({**ADD, "feeds": [[]], "expected": [None]})
    assert (found.feeds, found.expected) == ((None,), (None,))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: Expecting"),
        ("[]", "line 2: "),
        (json.dumps({k: v for k, v in ADD.items() if k != "feeds"}), "line 2: the field 'feeds' is missing"),
        (json.dumps({**ADD, "feeds": []}), "line 2: 0 lists of values for 1 inputs"),
        (json.dumps({**ADD, "feeds": [[1.0]]}), "line 2: cannot reshape"),
        (json.dumps({**ADD, "operations": []}), "line 2: a model needs at least one operation"),
        (json.dumps({**ADD, "inputs": [9]}), "line 2: tuple index out of range"),
        (json.dumps({**ADD, "feeds": [["x", "y"]]}), "line 2: could not convert"),
        (json.dumps({**ADD, "feeds": [[[1.0, 2.0]]]}), "line 2: the values of a TENSOR_FLOAT32 must be a flat list"),
        (json.dumps({**ADD, "operands": [{**ADD["operands"][0], "type": "FLOAT"}]}), "is no operand type of the HAL"),
    ],
)
def test_a_malformed_line_is_named(write, line, words):
    """By the file and its number, with what is wrong."""
    path = write(ADD, line)
    with pytest.raises(BadCase) as error:
        list(read_cases(path))
    assert str(path) in str(error.value)
    assert words in str(error.value)


def test_a_damaged_archive_is_refused(tmp_path):
    """As is a file that is not there."""
    path = tmp_path / "cases.jsonl.gz"
    path.write_bytes(gzip.compress(b"x" * 1000)[:-9])
    for bad in (path, tmp_path / "none.jsonl"):
        with pytest.raises(BadCase, match="cannot be read"):
            list(read_cases(bad))


def test_a_signed_twin_is_128_lower(case):
    """Types, zero points, constants, inputs and outputs; it stands for the same numbers."""
    twin = case(QUANTISED).signed()
    validate(twin.model)
    x, constant, _, out = twin.model.main.operands
    assert {o.type for o in (x, constant, out)} == {OperandType.TENSOR_QUANT8_ASYMM_SIGNED}
    assert {o.zero_point for o in (x, constant, out)} == {0}
    assert constant.value.tolist() == [2, -2]
    assert (twin.feeds[0].tolist(), twin.expected[0].tolist()) == ([1, 122], [3, 120])


def test_not_everything_has_a_signed_twin(case):
    """Floats have none, and neither have models of several operations and the operations that are left out."""
    quantised = case(QUANTISED)
    (operation,) = quantised.model.main.operations
    assert case(ADD).signed() is None
    for operations in ([operation, operation], [replace_type(operation, "PAD_V2")]):
        graph = replace(quantised.model.main, operations=operations)
        assert replace(quantised, model=replace(quantised.model, main=graph)).signed() is None


def replace_type(operation, name):
    return type(operation)(name, operation.inputs, operation.outputs)


def test_open_outputs_keep_their_rank(case):
    """Every dimension of an output is 0 then, and of nothing else; what must fail has no such variation."""
    opened = case(ADD).with_open_outputs()
    assert [o.dimensions for o in opened.model.main.operands] == [(2,), (2,), (), (0,)]
    assert case({**ADD, "expect_failure": True}).with_open_outputs() is None


def test_limits_are_those_of_the_suites(case):
    """A step for integers, three for mobilenet's bytes, half precision for relaxed models and those with float16."""
    strict, step = case(ADD), (1.0, 0.0)
    assert limits(strict, OperandType.TENSOR_FLOAT32) == (float(np.float32(1e-5)), 5 * 2.0**-23)
    assert limits(case({**ADD, "relaxed": True}), OperandType.TENSOR_FLOAT32) == (5 * 2.0**-10,) * 2
    assert limits(strict, OperandType.TENSOR_QUANT8_ASYMM) == limits(strict, OperandType.TENSOR_INT32) == step
    assert limits(replace(strict, name="a_mobilenet_b"), OperandType.TENSOR_QUANT8_ASYMM) == (3.0, 0.0)
    assert limits(strict, OperandType.TENSOR_BOOL8) == (0.0, 0.0)
    with pytest.raises(ValueError, match="no tolerance"):
        limits(strict, OperandType.FLOAT32)


def test_what_is_right_and_what_is_not(case):
    """Values within the limits; not one beyond, not a NaN, not another number of values."""
    found = case(ADD)
    assert difference(found, 0, np.array([1.5, 3.50001], np.float32)) is None
    assert "value 1 is 3.625" in difference(found, 0, np.array([1.5, 3.625], np.float32))
    assert difference(found, 0, np.array([1.5, 3.50002], np.float32)) is not None
    assert "value 0 is nan" in difference(found, 0, np.array([np.nan, 3.5], np.float32))
    assert "3 values; expected 2" in difference(found, 0, np.zeros(3, np.float32))
    quantised = case(QUANTISED)
    assert difference(quantised, 0, np.array([130, 249], np.uint8)) is None
    assert difference(quantised, 0, np.array([129, 249], np.uint8)).startswith("output 0 (TENSOR_QUANT8_ASYMM): 1 of 2")


def test_draws_are_judged_by_their_frequency(case):
    """Of two classes as likely as each other, half and half is right, and one alone is not."""
    found = replace(case(ADD), feeds=(np.zeros((1, 2), np.float32),), frequency=0.1)
    assert difference(found, 0, np.array([0, 1] * 50, np.int32)) is None
    assert "class 0 is drawn 0.5 off" in difference(found, 0, np.zeros(100, np.int32))
    assert "class outside 0..1" in difference(found, 0, np.array([0, 2], np.int32))
