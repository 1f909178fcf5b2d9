from dataclasses import dataclass

import numpy as np
import pytest

from driver.nn import ExecutionFailed, Interpreter, InvalidModel, Model, Operand, Operation, Subgraph, validate
from driver.nn.operands import constant_operand

BATCH, WIDTH, CELLS = 3, 5, 6
GATES = "input", "forget", "cell", "output"


@dataclass(frozen=True)
class Raw:
    """A stored array with its type and parameters."""

    array: np.ndarray
    type: str
    scale: float = 0.0
    zero_point: int = 0

    @property
    def real(self):
        return (self.array.astype(np.float64) - self.zero_point) * float(np.float32(self.scale or 1))


def compute(operation, inputs, outputs, *, is_fed):
    """Outputs of one operation: `inputs` and `outputs` are Raw, scalars or None, all but the first constant or fed."""
    operands, feeds = [], []
    for position, given in enumerate((*inputs, *outputs)):
        if given is None:
            kind = "TENSOR_QUANT16_SYMM" if position in (9, 10, 11, *range(20, 24)) else "TENSOR_QUANT8_SYMM"
            kind = "TENSOR_INT32" if position in (12, 17) else kind
            operands.append(Operand(kind, (), 0.5 if "QUANT" in kind else 0, lifetime="NO_VALUE"))
            continue
        raw = given if isinstance(given, Raw) else Raw(np.array(given), None)
        operand = constant_operand(raw.array, raw.type, scale=raw.scale, zero_point=raw.zero_point)
        if position >= len(inputs):
            operand = with_lifetime(operand, "SUBGRAPH_OUTPUT")
        elif is_fed or position == 0:
            feeds.append(operand.value)
            operand = with_lifetime(operand, "SUBGRAPH_INPUT")
        operands.append(operand)
    kinds = [o.lifetime.name for o in operands]
    places = [[i for i, k in enumerate(kinds) if k == kind] for kind in ("SUBGRAPH_INPUT", "SUBGRAPH_OUTPUT")]
    step = Operation(operation, range(len(inputs)), places[1])
    model = Model(Subgraph(operands, [step], *places))
    validate(model)
    bound = Interpreter(model).bind(feeds)
    bound.run()
    return [result.data for result in bound.results]


def with_lifetime(operand, lifetime):
    return Operand(operand.type, operand.dimensions, operand.scale, operand.zero_point, lifetime)


@pytest.fixture(params=["constants", "all inputs"])
def is_fed(request):
    return request.param == "all inputs"


def sigmoid(v):
    return 1 / (1 + np.exp(-v))


FORMS = ("", "coupled", "peephole", "projection", "norm", "cell-clip", "projection projection-clip")
ALL = "peephole projection bias norm cell-clip", "coupled peephole projection bias norm cell-clip"


def make(form, hidden_zero=0):
    """Inputs of a QUANTIZED_LSTM cell, in order."""
    rng, words = np.random.default_rng(5), form.split()
    units = 4 if "projection" in words else CELLS

    def values(kind, scale, *shape, zero_point=0, size=100):
        return Raw(rng.integers(-size, size, shape), kind, scale, zero_point)

    def weights(*shape):
        return values("TENSOR_QUANT8_SYMM", 0.01, *shape)

    def vector(scale, size=30000):
        return values("TENSOR_QUANT16_SYMM", scale, CELLS, size=size)

    def has(word, gate, make):
        return make() if word in words and not (gate == "input" and "coupled" in words) else None

    def biases(count, size):
        return values("TENSOR_INT32", 0, count, size=size)

    present = [g != "input" or "coupled" not in words for g in GATES]
    inputs = [values("TENSOR_QUANT8_ASYMM_SIGNED", 1 / 64, BATCH, WIDTH, zero_point=3)]
    inputs += [weights(CELLS, WIDTH) if there else None for there in present]
    inputs += [weights(CELLS, units) if there else None for there in present]
    inputs += [has("peephole", g, lambda: vector(2.0**-15)) for g in GATES if g != "cell"]
    inputs += [biases(CELLS, 10**7) if there else None for there in present]
    inputs += [weights(units, CELLS) if "projection" in words else None]
    inputs += [biases(units, 2000) if "bias" in words else None]
    inputs += [values("TENSOR_QUANT8_ASYMM_SIGNED", 1 / 128, BATCH, units, zero_point=-7 * ("projection" in words))]
    inputs += [values("TENSOR_QUANT16_SYMM", 2.0**-11, BATCH, CELLS, size=3000)]
    inputs += [has("norm", g, lambda: vector(2.0**-15)) for g in GATES]
    clips = [0.25 if "cell-clip" in words else 0.0, 0.5 if "projection-clip" in words else 0.0]
    return [*inputs, *map(np.float32, (*clips, *[2.0**-12] * 4)), hidden_zero, np.float32(1 / 128)]


def define(inputs):
    """The output and the cell state of a QUANTIZED_LSTM cell in real numbers."""
    real = [i.real if isinstance(i, Raw) else i for i in inputs]
    x, h, c = real[0], real[18], real[19]

    def gate(g, memory=None, peephole=None):
        v = x @ real[1 + g].T + h @ real[5 + g].T
        if memory is not None and real[peephole] is not None:
            v = v + memory * real[peephole]
        if real[20 + g] is not None:
            v = (v - v.mean(-1, keepdims=True)) / v.std(-1, keepdims=True)
            v = v * real[20 + g] + real[12 + g] * inputs[20 + g].scale / 1024
        return v

    forget = sigmoid(gate(1, c, 10))
    enter = 1 - forget if real[1] is None else sigmoid(gate(0, c, 9))
    c = forget * c + enter * np.tanh(gate(2))
    c = c.clip(-real[24], real[24]) if real[24] else c
    h = sigmoid(gate(3, c, 11)) * np.tanh(c)
    if real[16] is None:
        return h, c
    bias = 0 if real[17] is None else real[17] * inputs[16].scale * float(inputs[31])
    h = h @ real[16].T + bias
    if not real[25]:
        return h, c
    raw = np.round(h / inputs[18].scale) + inputs[18].zero_point
    limit = int(real[25] / inputs[16].scale)
    return (raw.clip(-limit, limit) - inputs[18].zero_point) * inputs[18].scale, c


def quantised_cell(inputs, is_fed, **changed):
    state, memory = changed.get("state", inputs[18]), changed.get("memory", inputs[19])
    return compute("QUANTIZED_LSTM", inputs, [state, memory, state], is_fed=is_fed)


@pytest.mark.parametrize("form", [*FORMS, *ALL])
def test_quantized_lstm(is_fed, form):
    """Every optional part of the int8 cell does what it does in real numbers, but for a few units of rounding."""
    inputs = make(form)
    state, memory, output = quantised_cell(inputs, is_fed)
    h, c = define(inputs)
    np.testing.assert_array_equal(state, output)
    np.testing.assert_allclose(memory * 2.0**-11, c, atol=6 * 2.0**-11)
    expected = (h / inputs[18].scale + inputs[18].zero_point).clip(-128, 127)
    np.testing.assert_allclose(state, expected, atol=2.5)
    assert len(np.unique(memory)) > 5
    assert len(np.unique(state)) > 5


def test_quantized_lstm_projects_whatever_the_zero_point_of_the_hidden_state(is_fed):
    """It is taken out of the hidden state and added again; only its low 8 bits count."""
    expected = quantised_cell(make("projection bias"), is_fed)
    for zero_point in (11, 11 + 256, -11):
        found = quantised_cell(make("projection bias", zero_point), is_fed)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=1)


@pytest.mark.parametrize(
    ("index", "value", "reason"),
    [
        (19, Raw(np.zeros((BATCH, CELLS), np.int16), "TENSOR_QUANT16_SYMM", 0.0006), "power of two"),
        (19, Raw(np.zeros((BATCH, CELLS), np.int16), "TENSOR_QUANT16_SYMM", 2.0**-8), "power of two"),
        (19, Raw(np.zeros((BATCH, CELLS), np.int16), "TENSOR_QUANT16_SYMM", 2.0**-16), "power of two"),
        (13, Raw(np.zeros(CELLS + 1, np.int32), "TENSOR_INT32"), "input 13"),
        (24, np.float32(-1), "clip"),
        (25, np.float32(np.nan), "clip"),
        (26, np.float32(0), "multiplier"),
        (29, np.float32(-1), "multiplier"),
        (31, np.float32(np.nan), "multiplier"),
        (1, None, "input gate"),
    ],
)
def test_quantized_lstm_refuses_bad_inputs(is_fed, index, value, reason):
    """Scales, clips and sizes have to make sense."""
    inputs = make("projection")
    inputs[index] = value
    with pytest.raises((ExecutionFailed, InvalidModel), match=reason):
        quantised_cell(inputs, is_fed)


@pytest.mark.parametrize(("number", "word"), [(18, "state"), (19, "memory")])
def test_quantized_lstm_gives_states_as_it_takes_them(is_fed, number, word):
    """Outputs have the parameters of the states that they replace."""
    inputs = make("")
    other = Raw(inputs[number].array, inputs[number].type, inputs[number].scale * 2)
    with pytest.raises(ExecutionFailed, match="has scale"):
        quantised_cell(inputs, is_fed, **{word: other})


def square_cell(width, scale=0.004):
    """Inputs of QUANTIZED_16BIT_LSTM, in order."""
    rng, byte = np.random.default_rng(6), "TENSOR_QUANT8_ASYMM"

    def values(kind, scale, zero_point, low, high, *shape):
        return Raw(rng.integers(low, high, shape), kind, scale, zero_point)

    return [
        values(byte, 1 / 128, 128, 0, 256, BATCH, width),
        *(values(byte, scale, 100, 0, 256, CELLS, width) for _ in GATES),
        *(values(byte, scale, 100, 0, 256, CELLS, CELLS) for _ in GATES),
        *(values("TENSOR_INT32", float(np.float32(scale)) / 128, 0, -30000, 30000, CELLS) for _ in GATES),
        values("TENSOR_QUANT16_SYMM", 2.0**-11, 0, -3000, 3000, BATCH, CELLS),
        values(byte, 1 / 128, 128, 0, 256, BATCH, CELLS),
    ]


@pytest.mark.parametrize("width", [2, CELLS, 400])
def test_quantized_16bit_lstm(is_fed, width):
    """The uint8 cell multiplies [input | last output] with [recurrent weights | weights], in this order."""
    inputs = square_cell(width)
    memory, output = compute("QUANTIZED_16BIT_LSTM", inputs, inputs[13:], is_fed=is_fed)
    x = np.concatenate([inputs[0].real, inputs[14].real], -1)
    gates = [
        (x @ np.concatenate([inputs[5 + g].real, inputs[1 + g].real], -1).T + inputs[9 + g].real).clip(-8, 8)
        for g in range(4)
    ]
    c = sigmoid(gates[1]) * inputs[13].real + sigmoid(gates[0]) * np.tanh(gates[2])
    h = sigmoid(gates[3]) * np.tanh(c)
    np.testing.assert_allclose(memory * 2.0**-11, c, atol=3 * 2.0**-11)
    np.testing.assert_allclose(output, (h * 128 + 128).clip(0, 255), atol=1.1)


def test_quantized_16bit_lstm_saturates(is_fed):
    """Neither a gate nor the cell state leaves its 16 bits."""
    inputs = square_cell(2)
    inputs[9:13] = [Raw(np.full(CELLS, 2**31 - 1, np.int32), "TENSOR_INT32", i.scale) for i in inputs[9:13]]
    inputs[13] = Raw(np.full((BATCH, CELLS), 2**15 - 1), "TENSOR_QUANT16_SYMM", 2.0**-11)
    memory, output = compute("QUANTIZED_16BIT_LSTM", inputs, inputs[13:], is_fed=is_fed)
    assert (memory == 2**15 - 1).all()
    assert (output == 255).all()


@pytest.mark.parametrize("index", range(15))
def test_quantized_16bit_lstm_refuses_other_parameters(is_fed, index):
    """All scales and zero points are prescribed by the first weights."""
    inputs = square_cell(2)
    inputs[index] = Raw(inputs[index].array, inputs[index].type, inputs[index].scale * 2, inputs[index].zero_point)
    with pytest.raises(ExecutionFailed, match="scale"):
        compute("QUANTIZED_16BIT_LSTM", inputs, square_cell(2)[13:], is_fed=is_fed)


@pytest.mark.parametrize("index", range(1, 15))
def test_quantized_16bit_lstm_refuses_bad_shapes(is_fed, index):
    """Each input has to have the size that the others ask for."""
    inputs = square_cell(2)
    old = inputs[index]
    inputs[index] = Raw(np.zeros([d + 1 for d in old.array.shape], np.int32), old.type, old.scale, old.zero_point)
    with pytest.raises(ExecutionFailed, match="has dimensions"):
        compute("QUANTIZED_16BIT_LSTM", inputs, square_cell(2)[13:], is_fed=is_fed)
