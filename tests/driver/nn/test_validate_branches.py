"""The rules between IF and WHILE and the subgraphs they refer to, on models made by hand."""

from dataclasses import replace as edit

import pytest

from driver.nn import OPERATIONS, InvalidModel, Model, Operand, Operation, Subgraph, required_version, validate
from driver.nn.operation import OperationType, Signature

F, B = "TENSOR_FLOAT32", "TENSOR_BOOL8"


@pytest.fixture(autouse=True)
def _control_flow(monkeypatch):
    """Signatures of IF and WHILE: validation needs no more of them."""
    for name, code, types, inputs in (("IF", 96, "b3", "T g g ANY..."), ("WHILE", 97, "g3", "g g ANY...")):
        signature = Signature(types, inputs, outputs="ANY...")
        if name not in OPERATIONS:
            monkeypatch.setitem(OPERATIONS, name, OperationType(name, code, (signature,), None, None))


def graph_of(inputs, outputs, operations, *others):
    """A subgraph of given operands: inputs, then outputs, then others."""
    given = [
        *(edit(o, lifetime="SUBGRAPH_INPUT") for o in inputs),
        *(edit(o, lifetime="SUBGRAPH_OUTPUT") for o in outputs),
    ]
    n, m = len(inputs), len(outputs)
    return Subgraph([*given, *others], operations, range(n), range(n, n + m))


def reference(index):
    return Operand("SUBGRAPH", (), lifetime="SUBGRAPH", value=index)


X, TRUTH = Operand(F, (2,)), Operand(B, (1,))
RELU = graph_of([X], [X], [Operation("RELU", (0,), (1,))])


def if_model(then=RELU, other=RELU, condition=TRUTH, x=X, y=X):
    """Operands 0 condition, 1 x, 2 y, 3 and 4 the branches."""
    main = graph_of([condition, x], [y], [Operation("IF", (0, 3, 4, 1), (2,))], reference(0), reference(1))
    return Model(main, (then, other))


def test_if_passes():
    """A model with IF is valid, and needs HAL 1.3."""
    validate(if_model())
    assert required_version(if_model()) == 3


def test_unknown_dimensions_are_compatible():
    """Dimensions are compared only where both sides know them."""
    open_x, no_rank = Operand(F, (0,)), Operand(F, ())
    open_relu = graph_of([open_x], [no_rank], [Operation("RELU", (0,), (1,))])
    validate(if_model(then=open_relu))
    validate(if_model(x=open_x, y=no_rank))
    validate(while_model(x=open_x))


HALF, LONG, FLAT = Operand("TENSOR_FLOAT16", (2,)), Operand(F, (3,)), Operand(F, (1, 2))
Q1, Q2, Q3 = (Operand("TENSOR_QUANT8_ASYMM", (2,), s, z) for s, z in ((1.0, 0), (2.0, 0), (1.0, 1)))


def relu(x):
    return graph_of([x], [x], [Operation("RELU", (0,), (1,))])


def quantised(then):
    return if_model(relu(then), relu(Q1), x=Q1, y=Q1)


ADD = graph_of([X, X], [X], [Operation("ADD", (0, 1, 3), (2,))], Operand("INT32", (), lifetime="NO_VALUE"))
TWICE = graph_of([X], [X, X], [Operation("RELU", (0,), (1,)), Operation("RELU", (0,), (2,))])


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (if_model(condition=Operand(B, (2,))), r"condition .* is TENSOR_BOOL8 \[2\]; it has to be TENSOR_BOOL8 \[1\]"),
        (if_model(condition=Operand(B, (0,))), r"condition .* \[0\]"),
        (if_model(condition=Operand(B, ())), r"condition .* \[\]"),
        (if_model(condition=Operand(B, (1, 1))), "input 0 has rank 2"),
        (if_model(condition=Operand(F, (1,))), "input 0 has type TENSOR_FLOAT32"),
        (if_model(then=relu(HALF)), "input 0 of the then branch has type TENSOR_FLOAT16, where TENSOR_FLOAT32 is"),
        (if_model(other=relu(LONG)), r"input 0 of the else branch has dimensions \[3\], where \[2\] are needed"),
        (if_model(other=relu(FLAT)), r"dimensions \[1, 2\], where \[2\]"),
        (if_model(other=TWICE), "the else branch has 2 outputs; it has to have 1"),
        (if_model(y=LONG), r"output 0 of the then branch has dimensions \[2\], where \[3\]"),
        (quantised(Q2), "scale 2.0, where 1.0"),
        (quantised(Q3), "zero point 1, where 0"),
    ],
)
def test_if_rules(model, reason):
    """The condition is one truth value, and both branches take and give what the operation does."""
    with pytest.raises(InvalidModel, match=r"^operation 0 \(IF\): .*" + reason):
        validate(model)


def test_if_needs_an_input_for_every_argument_of_a_branch():
    """Too few and too many inputs are refused, and so are operations without outputs or branches."""
    main = if_model().main
    for inputs, outputs, reason in (
        ((0, 3, 4), (2,), "the then branch has 1 inputs; it has to have 0"),
        ((0, 3, 4, 1, 1), (2,), "the then branch has 1 inputs; it has to have 2"),
        ((0, 3, 4, 1), (), "4 inputs and 0 outputs"),
        ((0, 3), (2,), "2 inputs are not one of its forms, which have 3 or more"),
        ((0, 3, 1, 1), (2,), "input 2 has type TENSOR_FLOAT32 and should have SUBGRAPH"),
        ((0, 3, 4, 5), (2,), "input 3 is omitted"),
    ):
        operands = (*main.operands, Operand(F, (2,), lifetime="NO_VALUE"))
        operations = [Operation("IF", inputs, outputs), *([] if outputs else [Operation("RELU", (1,), (2,))])]
        model = Model(edit(main, operands=operands, operations=operations), (RELU, RELU))
        with pytest.raises(InvalidModel, match=reason):
            validate(model)


LESS = graph_of([X], [TRUTH], [Operation("RELU", (0,), (1,))])


def while_model(condition=None, body=RELU, x=X, y=X, more=()):
    """Operands 0 x, 1 y, 2 and 3 the subgraphs; `more` inputs follow x."""
    inputs = [x, *more]
    n = len(inputs)
    operation = Operation("WHILE", (n + 1, n + 2, *range(n)), (n,))
    main = graph_of(inputs, [y], [operation], reference(0), reference(1))
    return Model(main, (condition or _asks([*inputs]), body))


def _asks(inputs, truth=TRUTH, extra=()):
    """A condition: compares its first input with itself."""
    outputs = [truth, *extra]
    n = len(inputs)
    return graph_of(inputs, outputs, [Operation("COMPARE", (0,), (n + i,)) for i in range(len(outputs))])


@pytest.fixture(autouse=True)
def _compare(monkeypatch):
    signature = Signature("f0 h0", "T", outputs="ANY")
    monkeypatch.setitem(OPERATIONS, "COMPARE", OperationType("COMPARE", 2000, (signature,), None, None))


SUM = graph_of([X, X], [X], [Operation("ADD", (0, 1, 3), (2,))], Operand("INT32", (), lifetime="SUBGRAPH_INPUT"))
PAIR = graph_of([X, X], [X, X], [Operation("RELU", (0,), (2,)), Operation("RELU", (1,), (3,))])
FIRST = graph_of([X, X], [X], [Operation("RELU", (0,), (2,))])


def test_while_passes():
    """A loop may carry values that its outputs do not show, and values that its body does not change."""
    validate(while_model())
    validate(while_model(more=[X], body=PAIR))
    validate(while_model(more=[X], body=FIRST))
    assert required_version(while_model()) == 3


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (while_model(condition=_asks([X], extra=[TRUTH])), "the condition has 2 outputs; it has to have 1"),
        (while_model(condition=_asks([X], Operand(B, (2,)))), r"output of the condition is TENSOR_BOOL8 \[2\]"),
        (while_model(condition=_asks([X], Operand(F, (1,)))), r"output of the condition is TENSOR_FLOAT32 \[1\]"),
        (while_model(condition=_asks([X, X])), "the condition has 2 inputs; it has to have 1"),
        (while_model(condition=_asks([LONG])), r"input 0 of the condition has dimensions \[3\]"),
        (while_model(body=PAIR), "the body has 2 inputs; it has to have 1"),
        (while_model(body=TWICE), "the body has 2 outputs; from 1, the outputs here, to 1, its inputs, are possible"),
        (while_model(body=relu(HALF)), "input 0 of the body has type TENSOR_FLOAT16"),
        (while_model(y=LONG), r"output 0 of the body has dimensions \[2\], where \[3\]"),
        (while_model(y=HALF), "output 0 of the body has type TENSOR_FLOAT32, where TENSOR_FLOAT16"),
    ],
)
def test_while_rules(model, reason):
    """The condition gives one truth value of all that the loop carries; the body renews the first values."""
    with pytest.raises(InvalidModel, match=r"^operation 0 \(WHILE\): .*" + reason):
        validate(model)


def test_the_body_keeps_its_values_compatible():
    """What the body gives has to fit what it takes in the next turn."""
    grows = graph_of([X], [LONG], [Operation("RELU", (0,), (1,))])
    with pytest.raises(InvalidModel, match=r"output 0 of the body has dimensions \[3\], where \[2\]"):
        validate(while_model(body=grows, y=LONG))


def test_control_flow_inside_a_subgraph_is_checked():
    """An IF in a branch keeps the same rules, and its subgraph is named."""
    inner = if_model().main
    nested = edit(inner, operands=[edit(o, value=o.value + 1) if o.value is not None else o for o in inner.operands])
    outer = graph_of([TRUTH, TRUTH, X], [X], [Operation("IF", (0, 4, 4, 1, 2), (3,))], reference(0))
    validate(Model(outer, (nested, RELU, RELU)))
    with pytest.raises(InvalidModel, match=r"referenced subgraph 0, operation 0 \(IF\): input 0 of the else branch"):
        validate(Model(outer, (nested, RELU, relu(HALF))))
