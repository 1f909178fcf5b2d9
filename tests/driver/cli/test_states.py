"""Outputs that are inputs of the next execution: recognised by their names and shapes, or told."""

import click
import pytest

from driver.cli.ports import Port
from driver.cli.states import recognised, states_of
from driver.nn import Operand


def ports(*named):
    """Ports from "name" or "name:1x2", float32 of 1 x 8 unless told."""
    found = []
    for word in named:
        name, _, shape = word.partition(":")
        sizes = [int(size) for size in (shape or "1x8").split("x")]
        found.append(Port(name, Operand("TENSOR_FLOAT32", sizes, extra={"name": name})))
    return found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("state", "stateN"),
        ("h", "hn"),
        ("c0", "cn"),
        ("h_in", "h_out"),
        ("cache_in", "cache_out"),
        ("prev_hidden", "hidden"),
        ("hidden_1_in", "hidden_1_out"),
        ("lstm_state_0", "new_lstm_state_0"),
        ("past_memory", "present_memory"),
        ("encoderCache", "nextEncoderCache"),
    ],
)
def test_names_that_leave_no_doubt(before, after):
    """A word for a state, and one for before or after it."""
    assert recognised(ports("input", before), ports("output", after)) == {1: 1}


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (["image", "sigma"], ["image_out"]),  # not a word for a state
        (["input", "h"], ["output", "h_mean"]),
        (["input", "state:1x8"], ["output", "stateN:1x9"]),
        (["state"], ["stateN"]),  # nothing else goes in
        (["x", "h_in", "prev_h"], ["y", "h_out"]),  # which?
        (["input", "hidden"], ["output", "hidden"]),
    ],
)
def test_doubtful_ones_are_none(inputs, outputs):
    """Another shape, another meaning, or two candidates."""
    assert recognised(ports(*inputs), ports(*outputs)) == {}


def test_states_of_the_importer():
    """Its inputs and outputs with the same number belong together."""
    ins, outs = ports("x", "a", "b"), ports("y", "a", "b")
    for number, (one, other) in enumerate([(1, 2), (2, 1)]):
        ins[one].operand.extra["state"] = outs[other].operand.extra["state"] = number
    assert recognised(ins, outs) == {2: 1, 1: 2}


def test_states_that_are_told():
    """--state adds to what is recognised; "none" switches that off; names may have a =."""
    ins, outs = ports("x", "h", "a=b:0x8"), ports("y", "hn", "z=1")
    assert states_of(ins, outs, ["z=1=a=b"]) == {2: 2, 1: 1}
    assert states_of(ins, outs, ["y=h"]) == {0: 1}
    assert states_of(ins, outs, ["none"]) == {}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["hm=h"], r"pass OUTPUT=INPUT; outputs: y, hn; inputs: x, h"),
        (["hn"], "pass OUTPUT=INPUT"),
        (["y=x"], "output 'y' is float32 2 x 2, and input 'x' is float32 1 x 8; a state has one type and shape"),
        (["hn=h", "hn=x"], "is given twice"),
        (["hn=h", "none"], "pass it alone"),
    ],
)
def test_a_wrong_state_is_told(given, told):
    """With the names that there are."""
    with pytest.raises(click.UsageError, match=told):
        states_of(ports("x", "h"), ports("y:2x2", "hn"), given)
