from dataclasses import replace as edit

import numpy as np
import pytest

from driver.nn import InvalidModel, Model, ModelBuilder, Operand, Operation, Subgraph, required_version, validate


def constant(kind, value, **more):
    value = np.asarray(value)
    return Operand(kind, value.shape, lifetime="CONSTANT", value=value, **more)


F, Q = "TENSOR_FLOAT32", "TENSOR_QUANT8_ASYMM"


@pytest.fixture
def graph():
    """RELU, then ADD of a constant: operands 0 input, 1 temporary, 2 constant, 3 activation, 4 output."""
    operands = [
        Operand(F, (2, 2), lifetime="SUBGRAPH_INPUT"),
        Operand(F, (2, 2)),
        constant(F, np.ones((2, 2), np.float32)),
        constant("INT32", np.int32(0)),
        Operand(F, (2, 2), lifetime="SUBGRAPH_OUTPUT"),
    ]
    return Subgraph(operands, [Operation("RELU", (0,), (1,)), Operation("ADD", (1, 2, 3), (4,))], (0,), (4,))


def with_operand(graph, index, **changes):
    operands = list(graph.operands)
    operands[index] = edit(operands[index], **changes)
    return edit(graph, operands=operands)


def with_operation(graph, index, **changes):
    operations = list(graph.operations)
    operations[index] = edit(operations[index], **changes)
    return edit(graph, operations=operations)


def test_a_good_model_passes(graph):
    """The model that the following tests break is valid."""
    validate(Model(graph))


BROKEN_OPERANDS = [
    (0, {"dimensions": (2, 2**32)}, "operand 0 .*dimensions"),
    (0, {"dimensions": (2, -1)}, "operand 0 .*dimensions"),
    (0, {"scale": 1.0}, "scale 1.0 has to be 0"),
    (0, {"zero_point": 1}, "zero point 1 has to be 0"),
    (0, {"type": "TENSOR_INT32", "scale": -1.0}, "scale -1.0 has to be at least 0"),
    (0, {"type": Q}, "scale 0.0 has to be above 0"),
    (0, {"type": Q, "scale": float("nan")}, "scale nan"),
    (0, {"type": Q, "scale": float("inf")}, "scale inf"),
    (0, {"type": Q, "scale": 1.0, "zero_point": 256}, "zero point 256 has to be in 0..255"),
    (0, {"type": Q, "scale": 1.0, "zero_point": -1}, "zero point -1"),
    (0, {"type": Q + "_SIGNED", "scale": 1.0, "zero_point": 128}, "-128..127"),
    (0, {"type": "TENSOR_QUANT8_SYMM", "scale": 1.0, "zero_point": 1}, "0..0"),
    (0, {"type": "TENSOR_QUANT16_SYMM", "scale": 1.0, "zero_point": -1}, "0..0"),
    (0, {"type": "TENSOR_QUANT16_ASYMM", "scale": 1.0, "zero_point": 65536}, "0..65535"),
    (0, {"type": "OEM"}, "an OEM scalar has no size"),
    (0, {"channel_quant": ((1.0, 1.0), 0)}, "only TENSOR_QUANT8_SYMM_PER_CHANNEL"),
    (0, {"type": "TENSOR_QUANT8_SYMM_PER_CHANNEL"}, "channel_quant is missing"),
    (0, {"value": np.ones((2, 2), np.float32)}, "lifetime SUBGRAPH_INPUT has no value"),
    (0, {"number_of_consumers": 2}, "number_of_consumers is 2, not 1"),
    (1, {"number_of_consumers": 0}, "number_of_consumers is 0, not 1"),
    (0, {"lifetime": "SUBGRAPH"}, "SUBGRAPH does not belong to type TENSOR_FLOAT32"),
    (0, {"type": "SUBGRAPH", "dimensions": ()}, "SUBGRAPH_INPUT does not belong to type SUBGRAPH"),
    (2, {"value": None}, "has to be an ndarray, not NoneType"),
    (2, {"value": np.ones((2, 2))}, "dtype float64; convert it to float32"),
    (2, {"value": np.ones(3, np.float32)}, "12 bytes, the dimensions need 16"),
    (2, {"dimensions": (2, 0)}, "16 bytes, the dimensions need 0"),
    (2, {"dimensions": (2**31, 2**31)}, "operand 2 .*need 18446744073709551616 bytes"),
    (0, {"dimensions": (2**30,)}, r"need 4294967296 bytes, larger than 4 GiB"),
    (1, {"dimensions": (2**16, 2**14)}, "operand 1 .*need 4294967296 bytes"),
    (4, {"dimensions": (2**32 - 1,) * 32}, "operand 4 .*bytes"),
    (0, {"dimensions": (1,) * 33}, "rank 33; at most 32"),
    (2, {"lifetime": "NO_VALUE", "value": None}, "operation 1 .*input 1 is omitted but needed"),
    (2, {"dimensions": ()}, "a rank of at least 1"),
    (3, {"dimensions": (1,)}, "operand 3 .*a scalar has no dimensions"),
    (0, {"lifetime": "CONSTANT", "value": np.ones((2, 2), np.float32)}, "input operand 0 has lifetime CONSTANT_COPY"),
    (0, {"lifetime": "TEMPORARY"}, "input operand 0|reads operand 0"),
    (1, {"lifetime": "SUBGRAPH_INPUT"}, "writes operand 1, whose lifetime is SUBGRAPH_INPUT"),
    (1, {"lifetime": "SUBGRAPH_OUTPUT"}, "operand 1 has lifetime SUBGRAPH_OUTPUT but is not listed"),
    (1, {"lifetime": "CONSTANT", "value": np.ones((2, 2), np.float32)}, "writes operand 1"),
    (2, {"lifetime": "SUBGRAPH_INPUT", "value": None}, "operand 2 has lifetime SUBGRAPH_INPUT but is not listed"),
    (2, {"lifetime": "TEMPORARY", "value": None}, "reads operand 2 before it is written"),
    (4, {"lifetime": "TEMPORARY"}, "output operand 4 has lifetime TEMPORARY_VARIABLE"),
    (1, {"type": "TENSOR_FLOAT16"}, "operation 0 .*cannot give TENSOR_FLOAT16"),
    (2, {"type": "TENSOR_INT32", "value": np.ones((2, 2), np.int32)}, "operation 1 .*input 1 has type TENSOR_INT32"),
    (3, {"type": "UINT32", "value": np.uint32(0)}, "input 2 has type UINT32"),
    (0, {"dimensions": (1, 1, 1, 2, 2)}, "operation 0 .*rank 5"),
]


@pytest.mark.parametrize(("index", "changes", "reason"), BROKEN_OPERANDS)
def test_operand_rules(graph, index, changes, reason):
    """An operand that breaks a rule is named, and so is the rule."""
    with pytest.raises(InvalidModel, match=reason):
        validate(Model(with_operand(graph, index, **changes)))


@pytest.mark.parametrize(
    ("quant", "reason"),
    [
        (((1.0, 1.0), 4), "channel dimension 4"),
        (((1.0, 1.0), -1), "channel dimension -1"),
        (((1.0,), 0), "1 scales for 2 channels"),
        (((1.0, 0.0), 0), "above 0"),
        (((1.0, float("nan")), 0), "above 0"),
        (((1.0,), 1), "the filter counts channels along dimension 1; it has to be 0"),
    ],
)
def test_per_channel_rules(quant, reason):
    """Per-channel quantisation has one positive scale per channel, along the dimension the operation wants."""
    m = ModelBuilder()
    x = m.input("quant8_asymm", (1, 2, 2, 1), scale=1.0)
    w = m.constant(np.ones((2, 1, 1, 1), np.int8), channel_quant=((1.0, 1.0), 0))
    m.output(m.operation("CONV_2D", x, w, np.zeros(2, np.int32), 1, 1, 1, 0, scale=4.0))
    model = m.build()
    with pytest.raises(InvalidModel, match=reason):
        validate(Model(with_operand(model.main, 1, channel_quant=quant)))


BROKEN_OPERATIONS = [
    (0, {"type": "RELUX"}, r"operation 0 \(RELUX\): no such operation here; did you mean 'RELU'"),
    (0, {"type": "102"}, r"operation 0 \(102\): no such operation"),
    (0, {"type": str(7 << 16)}, "the code of an extension's operation"),
    (0, {"inputs": (5,)}, "operand 5 does not exist, there are 5"),
    (0, {"inputs": (-1,)}, "operand -1 does not exist"),
    (0, {"outputs": (9,)}, "operand 9 does not exist"),
    (0, {"inputs": ()}, "0 inputs"),
    (0, {"inputs": (0, 3)}, "2 inputs are not one of its forms, which have 1"),
    (0, {"outputs": ()}, "cannot give nothing"),
    (0, {"outputs": (1, 4)}, "cannot give TENSOR_FLOAT32, TENSOR_FLOAT32"),
    (0, {"outputs": (4,)}, "written|before"),
    (0, {"outputs": (2,)}, "writes operand 2, whose lifetime is CONSTANT_COPY"),
    (1, {"outputs": (1,)}, "operand 1 is written a second time"),
    (1, {"inputs": (4, 2, 3)}, "reads operand 4 before it is written"),
]


@pytest.mark.parametrize(("index", "changes", "reason"), BROKEN_OPERATIONS)
def test_operation_rules(graph, index, changes, reason):
    """An operation that breaks a rule is named by index and type."""
    with pytest.raises(InvalidModel, match=reason):
        validate(Model(with_operation(graph, index, **changes)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"operands": (), "operations": ()}, "at least one operand and one operation"),
        ({"operations": ()}, "at least one operand and one operation"),
        ({"inputs": (0, 0)}, "operand 0 is listed twice among the inputs"),
        ({"inputs": ()}, "operand 0 has lifetime SUBGRAPH_INPUT but is not listed"),
        ({"inputs": (0, 2)}, "input operand 2 has lifetime CONSTANT_COPY"),
        ({"inputs": (7,)}, "input operand 7 does not exist"),
        ({"outputs": ()}, "operand 4 has lifetime SUBGRAPH_OUTPUT but is not listed"),
        ({"outputs": (4, 1)}, "output operand 1 has lifetime TEMPORARY_VARIABLE"),
        ({"outputs": (-1,)}, "output operand -1 does not exist"),
    ],
)
def test_subgraph_rules(graph, changes, reason):
    """A subgraph lists exactly its inputs and outputs, each once."""
    with pytest.raises(InvalidModel, match=reason):
        validate(Model(edit(graph, **changes)))


def test_operations_stand_in_executable_order(graph):
    """Reading before writing is refused, which excludes cycles as well."""
    with pytest.raises(InvalidModel, match="put operations in executable order"):
        validate(Model(edit(graph, operations=graph.operations[::-1])))


def test_every_variable_is_written(graph):
    """A temporary that nothing writes is refused, even when nothing reads it."""
    with pytest.raises(InvalidModel, match=r"operand 5 .*never written"):
        validate(Model(edit(graph, operands=(*graph.operands, Operand(F, (1,))))))


def test_unused_constants_are_harmless(graph):
    """A constant without consumers is accepted."""
    unused = constant(F, np.ones(1, np.float32), number_of_consumers=0)
    validate(Model(edit(graph, operands=(*graph.operands, unused))))


def subgraph_operand(index):
    return Operand("SUBGRAPH", (), lifetime="SUBGRAPH", value=index)


def test_references_name_existing_subgraphs(graph):
    """A SUBGRAPH operand refers to one of the referenced subgraphs."""
    for index in (1, -1, None, "0"):
        broken = edit(graph, operands=(*graph.operands, subgraph_operand(index)))
        with pytest.raises(InvalidModel, match="is not one of the 1 referenced"):
            validate(Model(broken, (graph,)))


def test_referenced_subgraphs_keep_the_same_rules(graph):
    """A fault in a referenced subgraph is found, and the subgraph named."""
    with pytest.raises(InvalidModel, match="referenced subgraph 1, operand 0"):
        validate(Model(graph, (graph, with_operand(graph, 0, scale=1.0))))


@pytest.mark.parametrize("length", [1, 2, 3000])
def test_reference_cycles_are_refused(graph, length):
    """Cycles of references of any length are found without recursion; a chain of the same length is fine."""
    graphs = [edit(graph, operands=(*graph.operands, subgraph_operand(i))) for i in range(length)]
    validate(Model(graph, (graph, *graphs)))
    with pytest.raises(InvalidModel, match="refers to itself"):
        validate(Model(graph, (*graphs[1:], graphs[0])))


def test_the_largest_operand_costs_nothing(graph):
    """A model of the largest tensors there are is looked at without allocating them, and so is one of unknown ones."""
    for dimensions in ((2**30 - 1,), (2**32 - 1, 0, 2**32 - 1)):
        for index in (0, 1, 4):
            graph = with_operand(graph, index, dimensions=dimensions)
        validate(Model(graph))


def pool(m, *tail):
    return m.operation("MAX_POOL_2D", m.input("float32", (1, 2, 2, 1)), 1, 1, 1, 1, 1, 0, *tail)


def conv(m, *tail):
    x, w = m.input("float32", (1, 2, 2, 1)), np.ones((1, 1, 1, 1), np.float32)
    return m.operation("CONV_2D", x, w, np.zeros(1, np.float32), 1, 1, 1, 0, *tail)


@pytest.mark.parametrize(
    ("build", "version"),
    [
        (lambda m: m.operation("ADD", m.input("float32", (2,)), [1.0], 0), 0),
        (lambda m: m.operation("SUB", m.input("float32", (2,)), [1.0], 0), 1),
        (lambda m: m.operation("ADD", m.input("float16", (2,)), np.ones(1, np.float16), 0), 2),
        (lambda m: m.operation("ADD", m.input("int32", (2,)), [1], 0), 3),
        (lambda m: m.operation("RELU", m.input("quant8_asymm_signed", (2,), scale=1.0)), 3),
        (lambda m: m.operation("RELU", m.input("float32", ())), 2),
        (pool, 0),
        (lambda m: m.operation("MAX_POOL_2D", m.input("float32", (1, 2, 2, 1)), 1, 1, 1, 1, 1, 0, False), 0),
        (lambda m: m.operation("MAX_POOL_2D", m.input("float32", (1, 2, 2, 1)), 1, 1, 1, 1, 1, 0, True), 2),
        (
            lambda m: m.operation(
                "MAX_POOL_2D", m.input("float32", (1, 2, 2, 1)), 1, 1, 1, 1, 1, 0, m.input("BOOL", ())
            ),
            2,
        ),
        (lambda m: m.operation("RESIZE_BILINEAR", m.input("float32", (1, 2, 2, 1)), 1, 1, False, False, False), 0),
        (lambda m: m.operation("RESIZE_BILINEAR", m.input("float32", (1, 2, 2, 1)), 1.0, 1.0, False), 2),
        (lambda m: conv(m, False, 1, 1), 0),
        (lambda m: conv(m, False, 1, 2), 2),
        (lambda m: m.operation("SOFTMAX", m.input("float32", (2, 2)), 1.0, -1), 0),
        (lambda m: m.operation("SOFTMAX", m.input("float32", (2, 2)), 1.0, 1), 2),
        (lambda m: m.operation("RESIZE_BILINEAR", m.input("float32", (1, 2, 2, 1)), 1, 1, False, True), 3),
        (lambda m: m.operation("SOFTMAX", m.input("float32", (2, 2)), 1.0), 0),
        (lambda m: m.operation("SOFTMAX", m.input("float32", (2,)), 1.0), 2),
        (lambda m: m.operation("PAD", m.input("quant8_asymm", (2,), scale=1.0), [[1, 1]]), 1),
        (lambda m: m.operation("PAD", m.input("quant8_asymm", (2,), scale=1.0, zero_point=1), [[1, 1]]), 2),
    ],
)
def test_required_version(build, version):
    """The oldest HAL version a model can be put to follows from types, forms, quantisation and trailing defaults."""
    m = ModelBuilder()
    m.output(build(m))
    assert required_version(m.build()) == version


def test_a_relaxed_model_needs_1_1(graph):
    """Relaxed computation came with HAL 1.1, control flow with 1.3; what nothing reads does not count."""
    assert required_version(Model(graph)) == 0
    assert required_version(Model(graph, relaxed=True)) == 1
    unread = constant("TENSOR_FLOAT16", np.ones(1, np.float16))
    assert required_version(Model(edit(graph, operands=(*graph.operands, unread)))) == 0
