"""VTS's mutations of models and requests: every one is refused, with the operand or the operation and the rule."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import driver
from burst import ErrorStatus, Memory, Request, RequestArgument
from driver.nn import OPERATIONS, InvalidModel, ModelBuilder, validate
from driver.protocol.model_codec import encode
from driver.vts.graphs import graphs
from driver.vts.makers import IMAGE_MAKERS, MAKERS
from driver.vts.mutations import model_mutations, request_mutations

F, Q = "float32", "quant8_asymm"


def arithmetic(m):
    x = m.input(F, (2, 2))
    return m.operation("RELU", m.operation("ADD", m.operation("MUL", x, x, 0), np.ones((2, 2), np.float32), 1))


def half(m):
    x = m.input("float16", (2, 2))
    return m.operation("SOFTMAX", m.operation("SUB", x, m.input("float16", (2,)), 0), 1.0)


def dense(m):
    x, w = m.input(F, (2, 3)), np.ones((4, 3), np.float32)
    return m.operation("SOFTMAX", m.operation("FULLY_CONNECTED", x, w, np.zeros(4, np.float32), 0), 1.0, -1)


def network(m):
    x = m.input(Q, (1, 4, 4, 2), scale=0.5, zero_point=7)
    w = m.constant(np.ones((3, 2, 2, 2), np.uint8), scale=0.25, zero_point=100)
    b = m.constant(np.zeros(3, np.int32), scale=0.125)
    y = m.operation("CONV_2D", x, w, b, 1, 1, 1, 0, scale=1.0)
    return m.operation("LOGISTIC", m.operation("AVERAGE_POOL_2D", y, 1, 1, 1, 2, 2, 0))


def per_channel(m):
    x = m.input("quant8_asymm_signed", (1, 3, 3, 2), scale=0.5)
    w = m.constant(np.ones((1, 2, 2, 2), np.int8), channel_quant=((0.5, 0.25), 3))
    y = m.operation("DEPTHWISE_CONV_2D", x, w, np.zeros(2, np.int32), 1, 1, 1, 1, 0, False, scale=1.0, zero_point=-3)
    return m.operation("DEQUANTIZE", m.operation("MAX_POOL_2D", y, 0, 0, 0, 0, 1, 1, 2, 2, 0, True))


def movement(m):
    x = m.input(F, (2, 3))
    y = m.operation("CONCATENATION", x, m.input(F, (1, 3)), np.ones((1, 3), np.float32), 0)
    y = m.operation("PAD", m.operation("TRANSPOSE", y, [1, 0]), [[1, 0], [0, 0]])
    y = m.operation("STRIDED_SLICE", y, [0, 0], [4, 4], [1, 2], 0, 0, 0)
    return m.operation("SQUEEZE", m.operation("RESHAPE", y, [1, 8]), None)


def image(m):
    x = m.input(F, (1, 2, 2, 1))
    y = m.operation("RESIZE_BILINEAR", m.operation("RESIZE_BILINEAR", x, 4, 4), 2.0, 2.0, False, False, True)
    return m.operation("QUANTIZE", m.operation("MEAN", y, [1, 2], 1), scale=0.5)


def unknown(m):
    x = m.input(F, (0, 3))
    return m.operation("DIV", m.operation("TANH", x), m.input(F, ()), 0)


def integers(m):
    x = m.input("int32", (2,))
    return m.operation("DIV", m.operation("MUL", x, [3, 4], 0), x, 0)


BUILDERS = (arithmetic, half, dense, network, per_channel, movement, image, unknown, integers)


def built(build):
    m = ModelBuilder()
    m.output(build(m))
    return m.build()


RULES = {
    "execution-order": r"operation \d+ .*reads operand \d+ before it is written",
    "operand-type": r"is no operand type of the HAL",
    "operand-rank": r"operand \d+ .*a scalar has no dimensions, not \[1\]",
    "operand-scale": r"operand \d+ .*scale",
    "operand-zero-point": r"operand \d+ .*zero point",
    "operand-lifetime": r"operation \d+ .*(reads operand \d+ before it is written|writes operand \d+, whose)",
    "listing": r"operand \d+ has lifetime",
    "number-of-consumers": r"operand \d+ .*number_of_consumers is \d+, not \d+",
    "second-writer": r"operation \d+ .*operand \d+ is written a second time",
    "operation-operand-type": r"operation \d+ .*(input|cannot give)|operand \d+ .*does not belong to type SUBGRAPH",
    "operation-type": r"operation \d+ .*no such operation",
    "operation-input-index": r"operation \d+ .*operand \d+ does not exist",
    "operation-output-index": r"operation \d+ .*operand \d+ does not exist",
    "remove-write": r"reads operand \d+ before it is written|operand \d+ .*never written",
    "remove-operand": r"operation \d+ .*(input|cannot give)",
    "remove-operation": r"reads operand \d+ before|operand \d+ .*never written|at least one operand and one operation",
    "remove-operation-input": r"operation \d+ .*input",
    "remove-operation-output": r"operation \d+ .*cannot give",
    "add-operation-input": r"operation \d+ .*input",
    "add-operation-output": r"operation \d+ .*cannot give",
}


def verdict(mutation):
    """What a record or validation says of it, None when neither refuses it."""
    try:
        validate(mutation.make())
    except InvalidModel as error:
        return str(error)
    return None


def survivors(mutations):
    """Those that are not refused for the rule that they break."""
    return [m.name for m in mutations if not re.search(rule_of(m), verdict(m) or "")]


def rule_of(mutation):
    return RULES[mutation.name.removeprefix("subgraph-0/").split("/")[0]]


@pytest.mark.integration
@pytest.mark.parametrize("build", BUILDERS, ids=lambda b: b.__name__)
def test_every_mutation_of_a_model_is_refused(build):
    """A valid model passes; each of its mutations is refused for its own rule, which names the operand or operation."""
    model = built(build)
    validate(model)
    mutations = list(model_mutations(model))
    assert len({m.name for m in mutations}) == len(mutations) > 100
    assert survivors(mutations) == []


@pytest.mark.integration
@pytest.mark.parametrize("name", sorted((MAKERS | IMAGE_MAKERS).keys() & OPERATIONS.keys()))
def test_every_mutation_of_every_operation_is_refused(name):
    """So it is for calls of each operation that is drawn at random, in several forms and types."""

    @settings(max_examples=5, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(graphs([name], largest=1))
    def check(graph):
        assert [m.name for m in model_mutations(graph.model) if verdict(m) is None] == []

    check()


def test_the_list_is_that_of_vts():
    """Every kind of VTS's mutations occurs."""
    assert {m.name.split("/")[0] for build in BUILDERS for m in model_mutations(built(build))} == set(RULES)


def names(build, kind):
    return [m.name for m in model_mutations(built(build)) if m.name.startswith(kind + "/")]


def test_what_stays_legal_is_no_mutation():
    """Shorter and longer forms, and operands of several legal types, are left out."""
    assert names(movement, "remove-operation-input")[0] == "remove-operation-input/0/input-3"
    assert "remove-operation-input/1/input-2" not in names(dense, "remove-operation-input")
    assert "add-operation-input/0" not in names(half, "add-operation-input")[1:]
    assert "TENSOR_QUANT8_ASYMM_SIGNED" not in retyped_outputs(image, 3)
    assert "TENSOR_QUANT8_ASYMM_SIGNED" in retyped_outputs(network, 2)


def retyped_outputs(build, operation):
    """The types that the output of an operation gets as a mutation."""
    (index,) = built(build).main.operations[operation].outputs
    start = f"operation-operand-type/{operation}/operand-{index}/"
    return {name.removeprefix(start) for name in names(build, "operation-operand-type") if name.startswith(start)}


def test_mutations_of_subgraphs_carry_their_number():
    """A referenced subgraph is mutated as the main one is, and the rest of the model stays."""
    model = built(arithmetic)
    both = replace(model, referenced=(built(integers).main,))
    mutations = [m for m in model_mutations(both) if m.name.startswith("subgraph-0/")]
    assert len(mutations) == len(list(model_mutations(built(integers))))
    assert survivors(mutations) == []
    assert mutations[0].make().main is both.main


ARGUMENT, OTHER = RequestArgument(length=16), RequestArgument(offset=16, length=4)


def test_mutations_of_a_request():
    """A request lacks each of its inputs and outputs in turn."""
    request = Request((ARGUMENT, OTHER), (ARGUMENT,))
    assert dict(request_mutations(request)) == {
        "remove-input/0": Request((OTHER,), (ARGUMENT,)),
        "remove-input/1": Request((ARGUMENT,), (ARGUMENT,)),
        "remove-output/0": Request(request.inputs, ()),
    }


def sent(device, method, model):
    """Put a model to a device without looking at it first."""
    encoded = encode(model)
    return device.call(method, encoded.where, fds=encoded.fds)


@pytest.mark.integration
@pytest.mark.parametrize("build", [network, movement], ids=lambda b: b.__name__)
def test_a_device_refuses_every_mutation_that_travels(device, build):
    """A device process answers each mutated model with INVALID_ARGUMENT and the rule, and goes on."""
    model, travelled = built(build), 0
    for mutation in model_mutations(model):
        if mutation.name.startswith("operand-type/"):
            continue
        mutated = mutation.make()
        travelled += 1
        for method in ("supported", "prepare"):
            with pytest.raises(driver.InvalidArgument, match=rule_of(mutation)):
                sent(device, method, mutated)
    assert travelled > 300
    assert device.supported_operations(model) == [True] * len(model.main.operations)


@pytest.mark.parametrize("code", [-1, 16, 9999, 10002, 0x10000])
def test_a_device_refuses_types_that_no_record_can_hold(device, code):
    """Operand types that the HAL does not know reach a device from other clients; it names the operand."""
    model = built(arithmetic)
    object.__setattr__(model.main.operands[3], "type", code)
    with pytest.raises(driver.InvalidArgument, match=f"operand 3: .*{code}"):
        sent(device, "prepare", model)
    device.prepare(built(arithmetic)).close()


def test_a_device_refuses_every_mutation_of_a_request(device):
    """A request that lacks an input or an output is an invalid argument; the whole one runs."""
    places = [RequestArgument(offset=offset, length=length) for offset, length in ((0, 8), (8, 4), (16, 8))]
    request = Request(tuple(places[:2]), tuple(places[2:]), (Memory.create(64),))
    with device.prepare(built(half)) as prepared, prepared.burst() as burst:
        for _, mutated in request_mutations(request):
            for result in (prepared.execute(mutated), burst.execute(mutated)):
                assert result.status == ErrorStatus.INVALID_ARGUMENT
                assert (result.outputs, result.output_shapes) == ((), ())
            assert "the model has" in prepared.execute(mutated).message
        assert prepared.execute(request).status == burst.execute(request).status == ErrorStatus.NONE
