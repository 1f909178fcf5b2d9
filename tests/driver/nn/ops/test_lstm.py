import numpy as np
import pytest

from driver.nn import ExecutionFailed, InvalidModel, ModelBuilder, required_version
from driver.nn.ops import lstm

LIMITS = {np.float32: {"rtol": 2e-5, "atol": 2e-5}, np.float16: {"rtol": 1e-2, "atol": 1e-2}}
BATCH, TIME, WIDTH, AUX, CELLS = 2, 4, 3, 2, 5

GATES = "input", "forget", "cell", "output"
ORDER = (
    *(f"{g} weights" for g in GATES),
    *(f"{g} recurrent" for g in GATES),
    *(f"{g} peephole" for g in GATES if g != "cell"),
    *(f"{g} bias" for g in GATES),
    "projection",
    "projection bias",
)
"""The inputs of a cell that stand together in every operation."""
NORM = tuple(f"{g} norm" for g in GATES)
LINK = tuple(f"{g} aux" for g in GATES)

FORMS = {
    "plain": "",
    "coupled": "coupled",
    "peephole": "peephole",
    "coupled peephole": "coupled peephole",
    "projection": "projection",
    "projection bias": "projection projection-bias",
    "norm": "norm",
    "coupled norm": "coupled norm",
    "all": "peephole projection projection-bias norm cell-clip projection-clip",
    "all but the input gate": "coupled peephole projection projection-bias norm cell-clip projection-clip",
    "cell clip": "cell-clip",
    "projection clip": "projection projection-clip",
    "projection clip without projection": "projection-clip",
    "relu6": "relu6",
}


def sigmoid(v):
    return 1 / (1 + np.exp(-v))


def make(form, dtype=np.float32, width=WIDTH, aux=None, seed=1):
    """The named parts of a cell of one of FORMS."""
    rng, words = np.random.default_rng(seed), FORMS[form].split()
    units = 4 if "projection" in words else CELLS
    gates = GATES[1:] if "coupled" in words else GATES
    shapes = {f"{g} weights": (CELLS, width) for g in gates} | {f"{g} recurrent": (CELLS, units) for g in gates}
    shapes |= {f"{g} bias": (CELLS,) for g in gates} | {"state": (BATCH, units), "memory": (BATCH, CELLS)}
    if "peephole" in words:
        shapes |= {f"{g} peephole": (CELLS,) for g in gates if g != "cell"}
    if "norm" in words:
        shapes |= {f"{g} norm": (CELLS,) for g in gates}
    if aux is not None:
        shapes |= {f"{g} aux": (CELLS, aux) for g in gates}
    if "projection" in words:
        shapes["projection"] = units, CELLS
    if "projection-bias" in words:
        shapes["projection bias"] = (units,)
    parts = {name: (rng.standard_normal(shape) * 0.7).astype(dtype) for name, shape in shapes.items()}
    parts["cell clip"] = dtype(0.25 if "cell-clip" in words else 0)
    parts["projection clip"] = dtype(0.125 if "projection-clip" in words else 0)
    return parts | {"code": 3 if "relu6" in words else 4}


def entering(p, name, row, extra, state, memory):
    """What goes through the activation of one gate, for one row of one step."""
    v = p[f"{name} weights"] @ row + p[f"{name} recurrent"] @ state
    if f"{name} aux" in p:
        v = v + p[f"{name} aux"] @ extra
    if f"{name} peephole" in p:
        v = v + p[f"{name} peephole"] * memory
    if f"{name} norm" in p:
        v = (v - v.mean()) / np.sqrt(v.var() + 1e-8) * p[f"{name} norm"]
    return v + p[f"{name} bias"]


def advance(p, act, row, extra, h, c):
    """The output and the cell state after one row of one step."""
    forget = sigmoid(entering(p, "forget", row, extra, h, c))
    enter = sigmoid(entering(p, "input", row, extra, h, c)) if "input weights" in p else 1 - forget
    c = forget * c + enter * act(entering(p, "cell", row, extra, h, c))
    c = np.clip(c, -p["cell clip"], p["cell clip"]) if p["cell clip"] > 0 else c
    h = sigmoid(entering(p, "output", row, extra, h, c)) * act(c)
    if "projection" in p:
        h = p["projection"] @ h + p.get("projection bias", 0)
        h = np.clip(h, -p["projection clip"], p["projection clip"]) if p["projection clip"] > 0 else h
    return h, c


def unroll(parts, x, aux=None):
    """The definition: outputs [time, batch, units], output state and cell state."""
    p = {k: np.asarray(v, np.float64) for k, v in parts.items()}
    act = {3: lambda v: np.clip(v, 0, 6), 4: np.tanh}[parts["code"]]
    out = np.zeros((len(x), *p["state"].shape))
    state, memory = p["state"].copy(), p["memory"].copy()
    for t, step in enumerate(x.astype(np.float64)):
        for b, row in enumerate(step):
            extra = None if aux is None else aux[t, b]
            state[b], memory[b] = advance(p, act, row, extra, state[b], memory[b])
        out[t] = state
    return out, state, memory


def listed(parts, names):
    """Parts in order, None where there is none."""
    return [parts.get(name) for name in names]


def one_cell(x, parts, *flags):
    """Inputs of LSTM and UNIDIRECTIONAL_SEQUENCE_LSTM."""
    settings = parts["code"], parts["cell clip"], parts["projection clip"]
    return [x, *listed(parts, ORDER), parts["state"], parts["memory"], *settings, *flags, *listed(parts, NORM)]


def two_cells(x, forward, backward, aux, merged, time_major):
    """Inputs of BIDIRECTIONAL_SEQUENCE_LSTM."""
    states = [part[name] for part in (forward, backward) for name in ("state", "memory")]
    settings = [forward["code"], forward["cell clip"], forward["projection clip"], merged, time_major]
    links = [aux, *listed(forward, LINK), *listed(backward, LINK)]
    norms = [*listed(forward, NORM), *listed(backward, NORM)]
    return [x, *listed(forward, ORDER), *listed(backward, ORDER), *states, *links, *settings, *norms]


def sequence(dtype, width=WIDTH, seed=2):
    return np.random.default_rng(seed).standard_normal((TIME, BATCH, width)).astype(dtype)


def order(time_major):
    """To and from the order in which a sequence is passed; as a view, whose elements do not lie in order."""
    return lambda a: a if time_major else a.swapaxes(0, 1)


@pytest.mark.parametrize(
    ("operation", "outputs", "version"),
    [
        ("LSTM", 4, 2),
        ("UNIDIRECTIONAL_SEQUENCE_LSTM", 1, 2),
        ("UNIDIRECTIONAL_SEQUENCE_LSTM", 3, 3),
        ("BIDIRECTIONAL_SEQUENCE_LSTM", 1, 2),
        ("BIDIRECTIONAL_SEQUENCE_LSTM", 5, 3),
    ],
)
def test_final_states_need_a_newer_hal(operation, outputs, version):
    """Outputs for the final states exist since HAL 1.3; so does layer normalisation in LSTM since 1.2."""
    parts, x, m = make("norm"), sequence(np.float32), ModelBuilder()
    inputs = one_cell(x, parts, True) if operation.startswith("UNI") else two_cells(x, parts, parts, None, True, True)
    inputs = one_cell(x[0], parts) if operation == "LSTM" else inputs
    results = m.operation(operation, m.input("float32", inputs[0].shape), *inputs[1:], outputs=outputs)
    m.output(*(results if outputs > 1 else (results,)))
    assert required_version(m.build()) == version


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", LIMITS)
def test_lstm(evaluate, dtype, form):
    """Every optional part of a cell does what the definition says, alone and with all the others."""
    parts, x = make(form, dtype), sequence(dtype)[:1]
    scratch, *found = evaluate("LSTM", *one_cell(x[0], parts))
    assert scratch.shape == (BATCH, (3 if "input weights" not in parts else 4) * CELLS)
    out, state, memory = unroll(parts, x)
    for result, wanted in zip(found, (state, memory, out[0]), strict=True):
        np.testing.assert_allclose(result, wanted, **LIMITS[dtype])


@pytest.mark.integration
@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_unidirectional_sequence_lstm(evaluate, form, outputs, time_major):
    """A sequence is so many steps of the same cell; its last states are outputs on request."""
    parts, x, turned = make(form), sequence(np.float32), order(time_major)
    found = evaluate("UNIDIRECTIONAL_SEQUENCE_LSTM", *one_cell(turned(x), parts, time_major), outputs=outputs)
    out, *states = unroll(parts, x)
    expected = turned(out), *(states if outputs == 3 else ())
    for result, wanted in zip(found if outputs == 3 else [found], expected, strict=True):
        np.testing.assert_allclose(result, wanted, **LIMITS[np.float32])


@pytest.mark.integration
@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("link", ["none", "cross", "parallel"])
@pytest.mark.parametrize("form", ["plain", "coupled", "all"])
def test_bidirectional_sequence_lstm(evaluate, form, link, has_states, merged, time_major):
    """Two cells walk in opposite directions, and the auxiliary input is linked in one of three ways."""
    x, aux, turned = sequence(np.float32), sequence(np.float32, AUX, 3), order(time_major)
    width = AUX if link == "cross" else None
    forward = make(form, aux=width)
    backward = make(form, aux=width, width=AUX if link == "parallel" else WIDTH, seed=4)
    there, *first = unroll(forward, x, aux)
    back, *second = unroll(backward, (aux if link == "parallel" else x)[::-1], aux[::-1])
    inputs = two_cells(turned(x), forward, backward, None if link == "none" else turned(aux), merged, time_major)
    outputs = (1 if merged else 2) + 4 * has_states
    found = evaluate("BIDIRECTIONAL_SEQUENCE_LSTM", *inputs, outputs=outputs)
    both = turned(there), turned(back[::-1])
    expected = [np.concatenate(both, -1)] if merged else [*both]
    expected += [*first, *second] if has_states else []
    for result, wanted in zip(found if outputs > 1 else [found], expected, strict=True):
        np.testing.assert_allclose(result, wanted, **LIMITS[np.float32])


@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("length", [1, 3])
def test_bidirectional_sequence_lstm_in_blocks(evaluate, monkeypatch, length, time_major):
    """A sequence that goes in blocks of steps has the same result, in both directions."""
    monkeypatch.setattr(lstm, "BLOCK", length * 4 * BATCH * CELLS)
    x, aux, turned = sequence(np.float32), sequence(np.float32, AUX, 3), order(time_major)
    forward, backward = make("all", aux=AUX), make("all", aux=AUX, seed=4)
    inputs = two_cells(turned(x), forward, backward, turned(aux), False, time_major)
    found = evaluate("BIDIRECTIONAL_SEQUENCE_LSTM", *inputs, outputs=6)
    there, *first = unroll(forward, x, aux)
    back, *second = unroll(backward, x[::-1], aux[::-1])
    for result, wanted in zip(found, (turned(there), turned(back[::-1]), *first, *second), strict=True):
        np.testing.assert_allclose(result, wanted, **LIMITS[np.float32])


def test_bidirectional_sequence_lstm_of_cells_that_differ(evaluate):
    """The directions have their own sizes and forms; in half precision too."""
    forward, backward = make("all", np.float16), make("coupled", np.float16, seed=4)
    backward["cell clip"], backward["projection clip"] = forward["cell clip"], forward["projection clip"]
    x = sequence(np.float16)
    found = evaluate("BIDIRECTIONAL_SEQUENCE_LSTM", *two_cells(x, forward, backward, None, True, True), outputs=1)
    wanted = np.concatenate([unroll(forward, x)[0], unroll(backward, x[::-1])[0][::-1]], -1)
    np.testing.assert_allclose(found, wanted, **LIMITS[np.float16])


def test_lstm_of_infinities(evaluate):
    """Infinite and undefined numbers go through without a complaint."""
    parts, x = make("all"), np.full((BATCH, WIDTH), np.inf, np.float32)
    assert not np.isfinite(evaluate("LSTM", *one_cell(x, parts))[2]).any()


def test_lstm_of_a_row_without_variance(evaluate):
    """Normalisation of equal numbers gives the bias."""
    parts = make("norm")
    for gate in GATES:
        parts[f"{gate} weights"][:] = parts[f"{gate} recurrent"][:] = 0
    x = np.zeros((BATCH, WIDTH), np.float32)
    np.testing.assert_allclose(evaluate("LSTM", *one_cell(x, parts))[3], unroll(parts, x[None])[1], rtol=1e-5)


@pytest.mark.parametrize(
    ("form", "without", "reason"),
    [
        ("plain", "input weights", "input gate"),
        ("plain", "input recurrent", "input gate"),
        ("plain", "input bias", "input gate"),
        ("peephole", "input peephole", "peephole"),
        ("peephole", "forget peephole", "peephole"),
        ("coupled peephole", "output peephole", "peephole"),
        ("norm", "input norm", "layer norm"),
        ("norm", "cell norm", "layer norm"),
        ("coupled norm", "output norm", "layer norm"),
        ("projection bias", "projection", "projection"),
        ("projection", "projection", "projection"),
    ],
)
def test_lstm_refuses_half_of_a_part(evaluate, form, without, reason):
    """Parts that belong together are given or omitted together."""
    parts = make(form)
    del parts[without]
    with pytest.raises((ExecutionFailed, InvalidModel), match=reason):
        evaluate("LSTM", *one_cell(sequence(np.float32)[0], parts))


@pytest.mark.parametrize("extra", ["input bias", "input norm", "input peephole"])
def test_lstm_refuses_parts_of_a_gate_that_is_not_there(evaluate, extra):
    """A coupled input gate has no bias and no normalisation of its own, and no lone peephole."""
    parts = make("coupled norm") | {extra: np.zeros(CELLS, np.float32)}
    with pytest.raises((ExecutionFailed, InvalidModel), match="input gate"):
        evaluate("LSTM", *one_cell(sequence(np.float32)[0], parts))


@pytest.mark.parametrize("name", [*ORDER, *NORM, "state", "memory"])
def test_lstm_refuses_bad_shapes(evaluate, name):
    """Each part has to have the size that the others ask for."""
    parts = make("all")
    parts[name] = np.zeros([d + 1 for d in parts[name].shape], np.float32)
    with pytest.raises((ExecutionFailed, InvalidModel), match="has dimensions"):
        evaluate("LSTM", *one_cell(sequence(np.float32)[0], parts))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"code": 2}, "activation 2"),
        ({"cell clip": np.float32(-1)}, "at least 0"),
        ({"projection clip": np.float32(np.nan)}, "at least 0"),
    ],
)
def test_lstm_refuses_bad_settings(evaluate, change, reason):
    """Only the activations of recurrent operations exist; clips are not negative."""
    with pytest.raises((ExecutionFailed, InvalidModel), match=reason):
        evaluate("LSTM", *one_cell(sequence(np.float32)[0], make("plain") | change))


@pytest.mark.parametrize("missing", [*LINK, "all of the backward cell", "auxiliary input"])
def test_bidirectional_sequence_lstm_refuses_other_links(evaluate, missing):
    """Auxiliary weights are those of all gates of both cells, and come with an auxiliary input."""
    forward, backward = make("plain", aux=AUX), make("plain", aux=AUX)
    aux = None if missing == "auxiliary input" else sequence(np.float32, AUX)
    gone = LINK if missing.startswith("all") else [missing]
    backward = {name: part for name, part in backward.items() if name not in gone}
    inputs = two_cells(sequence(np.float32), forward, backward, aux, True, True)
    with pytest.raises((ExecutionFailed, InvalidModel), match="auxiliary"):
        evaluate("BIDIRECTIONAL_SEQUENCE_LSTM", *inputs, outputs=1)


@pytest.mark.parametrize(("merged", "outputs"), [(True, 2), (True, 6), (False, 1), (False, 5)])
def test_bidirectional_sequence_lstm_refuses_outputs_that_do_not_go_with_merge(evaluate, merged, outputs):
    """Merged sequences are one output, others two."""
    inputs = two_cells(sequence(np.float32), make("plain"), make("plain"), None, merged, True)
    with pytest.raises((ExecutionFailed, InvalidModel), match="merge"):
        evaluate("BIDIRECTIONAL_SEQUENCE_LSTM", *inputs, outputs=outputs)
