import numpy as np
import pytest

from driver.nn import ExecutionFailed, InvalidModel

ACTIVATIONS = {
    0: lambda v: v,
    1: lambda v: np.maximum(v, 0),
    3: lambda v: np.clip(v, 0, 6),
    4: np.tanh,
    6: lambda v: 1 / (1 + np.exp(-v)),
}
LIMITS = {np.float32: {"rtol": 1e-5, "atol": 1e-5}, np.float16: {"rtol": 5e-3, "atol": 5e-3}}
BATCH, TIME, WIDTH, AUX = 2, 5, 3, 4


def recur(entering, recurrent, bias, state, code):
    """The definition: `entering` [time, batch, units] is x . W^T, plus that of the auxiliary input."""
    results = []
    for step in entering.astype(np.float64):
        state = ACTIVATIONS[code](step + state @ recurrent.T.astype(np.float64) + bias)
        results.append(state)
    return np.array(results)


def random(seed, dtype):
    """random(shape) -> numbers about 0, small enough for the recurrence to stay calm."""
    rng = np.random.default_rng(seed)
    return lambda *shape: (rng.standard_normal(shape) * 0.5).astype(dtype)


def cell(numbers, units, width=WIDTH):
    """Weights, recurrent weights, bias and state."""
    return numbers(units, width), numbers(units, units), numbers(units), numbers(BATCH, units)


@pytest.mark.parametrize("code", ACTIVATIONS)
@pytest.mark.parametrize("dtype", LIMITS)
def test_rnn(evaluate, dtype, code):
    """RNN is one step, and gives its result twice."""
    numbers = random(1, dtype)
    x, (w, r, b, h) = numbers(BATCH, WIDTH), cell(numbers, 4)
    expected = recur((x @ w.T)[None], r, b, h, code)[0]
    for result in evaluate("RNN", x, w, r, b, h, code):
        np.testing.assert_allclose(result, expected, **LIMITS[dtype])


@pytest.mark.parametrize("time_major", [0, 1])
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("dtype", LIMITS)
def test_unidirectional_sequence_rnn(evaluate, dtype, outputs, time_major):
    """A sequence is so many steps, whichever axis is that of time; its last state is an output on request."""
    numbers = random(2, dtype)
    x, (w, r, b, h) = numbers(TIME, BATCH, WIDTH), cell(numbers, 4)
    expected = recur(x @ w.T, r, b, h, 4)
    given = x if time_major else x.swapaxes(0, 1)
    results = evaluate("UNIDIRECTIONAL_SEQUENCE_RNN", given, w, r, b, h, 4, time_major, outputs=outputs)
    sequence = results[0] if outputs == 2 else results
    np.testing.assert_allclose(sequence if time_major else sequence.swapaxes(0, 1), expected, **LIMITS[dtype])
    if outputs == 2:
        np.testing.assert_allclose(results[1], expected[-1], **LIMITS[dtype])


@pytest.mark.integration
@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("link", ["none", "cross", "parallel"])
@pytest.mark.parametrize("dtype", LIMITS)
def test_bidirectional_sequence_rnn(evaluate, dtype, link, has_states, merged, time_major):
    """The backward direction walks from the end, and the auxiliary input is linked in one of three ways."""
    numbers = random(3, dtype)
    x, aux = numbers(TIME, BATCH, WIDTH), numbers(TIME, BATCH, AUX)
    forward, backward = cell(numbers, 3), cell(numbers, 2, AUX if link == "parallel" else WIDTH)
    wf, wb = (numbers(3, AUX), numbers(2, AUX)) if link == "cross" else (None, None)
    enter_f, enter_b = x @ forward[0].T, (aux if link == "parallel" else x) @ backward[0].T
    if link == "cross":
        enter_f, enter_b = enter_f + aux @ wf.T, enter_b + aux @ wb.T
    there, back = recur(enter_f, *forward[1:], 4), recur(enter_b[::-1], *backward[1:], 4)[::-1]

    def turned(a):
        return a if time_major else a.swapaxes(0, 1)

    given_aux = None if link == "none" else turned(aux)
    outputs = (1 if merged else 2) + 2 * has_states
    results = evaluate(
        "BIDIRECTIONAL_SEQUENCE_RNN",
        turned(x), *forward, *backward, given_aux, wf, wb, 4, time_major, merged,
        outputs=outputs,
    )  # fmt: skip
    expected = [turned(np.concatenate([there, back], -1))] if merged else [turned(there), turned(back)]
    expected += [there[-1], back[0]] if has_states else []
    for result, wanted in zip(results if outputs > 1 else [results], expected, strict=True):
        np.testing.assert_allclose(result, wanted, **LIMITS[dtype])


def test_rnn_of_infinities(evaluate):
    """Infinite and undefined numbers go through without a complaint."""
    numbers = random(4, np.float32)
    _, r, b, h = cell(numbers, 1)
    x = np.array([[np.inf, 0, 0], [np.nan, 0, 0]], np.float32)
    for code, expected in ((6, [[1.0], [np.nan]]), (3, [[6.0], [np.nan]])):
        results = evaluate("RNN", x, np.ones((1, 3), np.float32), r, b, h, code)
        np.testing.assert_array_equal(results[0], expected)


@pytest.mark.parametrize("code", [-1, 2, 5, 7])
def test_rnn_refuses_other_activations(evaluate, code):
    """The codes of recurrent operations are their own."""
    numbers = random(5, np.float32)
    with pytest.raises((ExecutionFailed, InvalidModel), match=f"activation {code} "):
        evaluate("RNN", numbers(BATCH, WIDTH), *cell(numbers, 4), code)


@pytest.mark.parametrize("wrong", [1, 2, 3, 4])
def test_rnn_refuses_bad_shapes(evaluate, wrong):
    """Each input has to have the size that the others ask for."""
    numbers = random(6, np.float32)
    inputs = [numbers(BATCH, WIDTH), *cell(numbers, 4)]
    inputs[wrong] = numbers(*(d + 1 for d in inputs[wrong].shape))
    with pytest.raises((ExecutionFailed, InvalidModel), match="has dimensions"):
        evaluate("RNN", *inputs, 0)


def test_unidirectional_sequence_rnn_refuses_other_orders(evaluate):
    """Time-major is 0 or 1."""
    numbers = random(7, np.float32)
    with pytest.raises((ExecutionFailed, InvalidModel), match="time-major is 2"):
        evaluate("UNIDIRECTIONAL_SEQUENCE_RNN", numbers(TIME, BATCH, WIDTH), *cell(numbers, 4), 0, 2, outputs=1)


@pytest.mark.parametrize("given", [(0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 0, 1)])
def test_bidirectional_sequence_rnn_refuses_other_links(evaluate, given):
    """Auxiliary weights come in pairs, and with an auxiliary input."""
    numbers = random(8, np.float32)
    extra = [numbers(TIME, BATCH, AUX), numbers(3, AUX), numbers(3, AUX)]
    links = [e if g else None for e, g in zip(extra, given, strict=True)]
    inputs = numbers(TIME, BATCH, WIDTH), *cell(numbers, 3), *cell(numbers, 3), *links
    with pytest.raises((ExecutionFailed, InvalidModel), match="auxiliary"):
        evaluate("BIDIRECTIONAL_SEQUENCE_RNN", *inputs, 0, True, True, outputs=1)


def test_bidirectional_sequence_rnn_refuses_an_auxiliary_input_of_its_own_length(evaluate):
    """Auxiliary input and input walk together."""
    numbers = random(9, np.float32)
    inputs = numbers(TIME, BATCH, WIDTH), *cell(numbers, 3), *cell(numbers, 3, AUX), numbers(TIME + 1, BATCH, AUX)
    with pytest.raises((ExecutionFailed, InvalidModel), match="sequences"):
        evaluate("BIDIRECTIONAL_SEQUENCE_RNN", *inputs, None, None, 0, True, True, outputs=1)


@pytest.mark.parametrize(("merged", "outputs"), [(True, 2), (True, 4), (False, 1), (False, 3)])
def test_bidirectional_sequence_rnn_refuses_outputs_that_do_not_go_with_merge(evaluate, merged, outputs):
    """Merged sequences are one output, others two."""
    numbers = random(10, np.float32)
    inputs = numbers(TIME, BATCH, WIDTH), *cell(numbers, 3), *cell(numbers, 3), None, None, None
    with pytest.raises((ExecutionFailed, InvalidModel), match="merge"):
        evaluate("BIDIRECTIONAL_SEQUENCE_RNN", *inputs, 0, True, merged, outputs=outputs)
