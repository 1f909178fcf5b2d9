"""Recurrent builtin operators: a variable of the file becomes an input (state) and an output (next state)."""

from collections.abc import Sequence

from driver.errors import ImportFailed

from .call import TfliteCall
from .graph import Ref

_Weights = list[Ref | None]


def _weights(call: TfliteCall, positions: Sequence[int]) -> _Weights:
    return [call.optional_weights(i) for i in positions]


def _layer_norm(call: TfliteCall) -> _Weights:
    """The four weights of layer normalisation; none when absent."""
    found = _weights(call, range(20, 24))
    return found if any(found) else []


def rnn(call: TfliteCall) -> None:
    """RNN: the state comes before the result."""
    state, after = call.graph.state(call.number(4))
    code = call.options.FusedActivationFunction()
    inputs = (call.input(0), *_weights(call, range(1, 4)), state, code)
    call.emit("RNN", *inputs, to=[after, call.output()])


def sequence_rnn(call: TfliteCall) -> None:
    """UNIDIRECTIONAL_SEQUENCE_RNN."""
    state, after = call.graph.state(call.number(4))
    tail = (call.options.FusedActivationFunction(), int(call.options.TimeMajor()))
    inputs = (call.input(0), *_weights(call, range(1, 4)), state, *tail)
    call.emit("UNIDIRECTIONAL_SEQUENCE_RNN", *inputs, to=[call.output(), after])


def bidirectional_rnn(call: TfliteCall) -> None:
    """BIDIRECTIONAL_SEQUENCE_RNN."""
    (forward, forward_after), (backward, backward_after) = (call.graph.state(call.number(i)) for i in (4, 8))
    first, second = _weights(call, range(1, 4)), _weights(call, range(5, 8))
    further = [call.optional(9), *_weights(call, (10, 11))]
    options = call.options
    tail = (options.FusedActivationFunction(), bool(options.TimeMajor()), bool(options.MergeOutputs()))
    inputs = (call.input(0), *first, forward, *second, backward, *further, *tail)
    outputs = [call.output(i) for i in range(1 if options.MergeOutputs() else 2)]
    call.emit("BIDIRECTIONAL_SEQUENCE_RNN", *inputs, to=[*outputs, forward_after, backward_after])


def svdf(call: TfliteCall) -> None:
    """SVDF: the state comes before the result."""
    state, after = call.graph.state(call.number(4))
    inputs = (call.input(0), *_weights(call, range(1, 4)), state)
    call.emit("SVDF", *inputs, call.options.Rank(), call.options.FusedActivationFunction(), to=[after, call.output()])


def lstm(call: TfliteCall) -> None:
    """LSTM, with the scratch buffer that the HAL requires."""
    if call.options.KernelType():
        raise ImportFailed("the BASIC kernel stores its gates in one matrix; convert the model with the FULL kernel")
    (state, after), (cell, cell_after) = (call.graph.state(call.number(i)) for i in (18, 19))
    inputs = (call.input(0), *_weights(call, range(1, 18)), state, cell, *_clips(call), *_layer_norm(call))
    gates = 4 if call.given(1) else 3
    scratch = call.temporary(call.input(0), (call.shape(0, 2)[0], gates * call.shape(2, 2)[0]))
    call.emit("LSTM", *inputs, to=[scratch, after, cell_after, call.output()])


def sequence_lstm(call: TfliteCall) -> None:
    """UNIDIRECTIONAL_SEQUENCE_LSTM."""
    if call.options.DiagonalRecurrentTensors():
        raise ImportFailed("diagonal recurrent weights have no counterpart in the HAL")
    (state, after), (cell, cell_after) = (call.graph.state(call.number(i)) for i in (18, 19))
    norm = _layer_norm(call) or [None] * 4
    tail = (*_clips(call), bool(call.options.TimeMajor()), *norm)
    inputs = (call.input(0), *_weights(call, range(1, 18)), state, cell, *tail)
    call.emit("UNIDIRECTIONAL_SEQUENCE_LSTM", *inputs, to=[call.output(), after, cell_after])


def bidirectional_lstm(call: TfliteCall) -> None:
    """BIDIRECTIONAL_SEQUENCE_LSTM, which has no layer normalisation in TFLite."""
    states = [call.graph.state(call.number(i)) for i in range(35, 39)]
    further = [call.optional(39), *_weights(call, range(40, 48))]
    flags = (bool(call.options.MergeOutputs()), bool(call.options.TimeMajor()))
    inputs = (call.input(0), *_weights(call, range(1, 35)), *(before for before, _ in states), *further)
    outputs = [call.output(i) for i in range(1 if call.options.MergeOutputs() else 2)]
    after = [ref for _, ref in states]
    call.emit("BIDIRECTIONAL_SEQUENCE_LSTM", *inputs, *_clips(call), *flags, *[None] * 8, to=[*outputs, *after])


def _clips(call: TfliteCall) -> tuple[int, float, float]:
    """The activation and the two clips."""
    return call.options.FusedActivationFunction(), call.options.CellClip(), call.options.ProjClip()
