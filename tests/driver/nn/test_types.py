import numpy as np
import pytest

from driver.nn import InvalidModel, OperandLifeTime, OperandType, combine_dimensions


@pytest.mark.parametrize(
    ("name", "value", "size", "since", "is_scalar"),
    [
        ("FLOAT32", 0, 4, 0, True),
        ("TENSOR_FLOAT32", 3, 4, 0, False),
        ("TENSOR_QUANT8_ASYMM", 5, 1, 0, False),
        ("BOOL", 6, 1, 2, True),
        ("TENSOR_FLOAT16", 8, 2, 2, False),
        ("TENSOR_QUANT8_SYMM_PER_CHANNEL", 11, 1, 2, False),
        ("TENSOR_QUANT16_ASYMM", 12, 2, 2, False),
        ("TENSOR_QUANT8_ASYMM_SIGNED", 14, 1, 3, False),
        ("SUBGRAPH", 15, 0, 3, True),
        ("OEM", 10000, 0, 0, True),
        ("TENSOR_OEM_BYTE", 10001, 1, 0, False),
    ],
)
def test_types_are_those_of_the_hal(name, value, size, since, is_scalar):
    """Names, values, sizes and versions are the HAL's."""
    kind = OperandType[name]
    assert (kind, kind.element_size, kind.since, kind.is_scalar) == (value, size, since, is_scalar)


def test_booleans_are_stored_as_bytes():
    """Arrays of booleans are numpy's bool; a device reads their bytes, since one from another process may be any."""
    for kind in (OperandType.BOOL, OperandType.TENSOR_BOOL8):
        assert (kind.dtype, kind.stored_dtype, kind.element_size) == (np.bool_, np.uint8, 1)


def test_lifetimes_have_the_names_of_conformance_files():
    """INPUT, OUTPUT, TEMPORARY and CONSTANT are accepted beside the HAL 1.3 names."""
    assert OperandLifeTime.parse("INPUT") == OperandLifeTime.SUBGRAPH_INPUT == 1
    assert OperandLifeTime.parse("OUTPUT") == OperandLifeTime.SUBGRAPH_OUTPUT == 2
    assert OperandLifeTime.parse("TEMPORARY") == OperandLifeTime.TEMPORARY_VARIABLE == 0
    assert OperandLifeTime.parse("CONSTANT") == OperandLifeTime.parse(3) == OperandLifeTime.CONSTANT_COPY


@pytest.mark.parametrize("parse", [OperandType.parse, OperandLifeTime.parse])
@pytest.mark.parametrize("name", ["NO_SUCH", 99, -1])
def test_unknown_names_are_refused(parse, name):
    """A name or number outside the HAL is an invalid model, not a KeyError."""
    with pytest.raises(InvalidModel, match=str(name)):
        parse(name)


def test_misspelt_names_are_corrected():
    """A name nearly right gets the right one as a remedy."""
    with pytest.raises(InvalidModel, match="did you mean 'TENSOR_FLOAT32'"):
        OperandType.parse("TENSOR_FLOAT_32")


def test_extension_types_are_refused():
    """A code above 0xFFFF is called what it is, and any other that the HAL lacks is refused as well."""
    for code in (0x10000, 0xFFFFFFFF):
        with pytest.raises(InvalidModel, match=f"operand type {code} belongs to an extension"):
            OperandType.parse(code)
    for code in (-1, 16, 9999, 10002):
        with pytest.raises(InvalidModel, match=f"^{code} is no operand type"):
            OperandType.parse(code)


@pytest.mark.parametrize(
    ("a", "b", "both"),
    [
        ((), (), ()),
        ((), (2, 3), (2, 3)),
        ((2, 0), (), (2, 0)),
        ((2, 0), (0, 3), (2, 3)),
        ((2, 3), (2, 4), None),
        ((2, 3), (2, 3, 1), None),
    ],
)
def test_combine_dimensions(a, b, both):
    """Unknown ranks and dimensions yield to known ones; contradictions give None."""
    assert combine_dimensions(a, b) == combine_dimensions(b, a) == both
