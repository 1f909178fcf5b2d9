"""Entries of .tflite files as files of their own, whose state goes in and comes out."""

import numpy as np
import pytest
from lite_nets import convolution, counter, entries, memory, selection, spread
from tflite_writer import Writer

pytest.importorskip("ai_edge_litert", reason="needs the extra 'litert'")

from ai_edge_litert.interpreter import Interpreter

from driver.devices.litert.entry_file import EntryFile
from driver.nn import InvalidModel


def entry_of(data, number=0):
    return EntryFile(np.frombuffer(data, np.uint8), number)


def ran(data, arrays):
    """What a new interpreter gives for these inputs."""
    interpreter = Interpreter(model_content=bytes(data))
    interpreter.allocate_tensors()
    for told, array in zip(interpreter.get_input_details(), arrays, strict=True):
        interpreter.set_tensor(told["index"], array)
    interpreter.invoke()
    return [interpreter.get_tensor(told["index"]) for told in interpreter.get_output_details()]


@pytest.mark.parametrize("data", [convolution(), selection()], ids=["plain", "sizes"])
def test_without_a_state_it_is_the_file(data):
    """Not one byte is added."""
    entry = entry_of(data)
    assert not entry.has_state
    assert bytes(entry.data) == data


@pytest.mark.parametrize("data", [memory(), counter()], ids=["cells", "variable"])
def test_a_state_goes_in_and_comes_out(data):
    """A new interpreter for each run, which is given the state, computes what one does that keeps it."""
    own, entry = Interpreter(model_content=data), entry_of(data)
    own.allocate_tensors()
    (told,), (output,) = own.get_input_details(), own.get_output_details()
    state = [np.zeros((1, 6), np.float32)] if entry.cells else ran(entry.initial(), [])
    for n in range(4):
        x = spread(n, *told["shape"])
        own.set_tensor(told["index"], x)
        own.invoke()
        found, *state = ran(entry.data, [x, *state])
        assert found.tobytes() == own.get_tensor(output["index"]).tobytes()


def test_entries_of_one_variable():
    """What one has left is what the other finds, in whatever order."""
    data = entries()
    own = Interpreter(model_content=data)
    state = ran(entry_of(data).initial(), [])
    for n, (key, number) in enumerate([("add", 0), ("multiply", 2), ("multiply", 2), ("add", 0)]):
        x = spread(n, 2)
        expected = own.get_signature_runner(key)(x=x)["y"]
        found, *state = ran(entry_of(data, number).data, [x, *state])
        assert found.tobytes() == expected.tobytes()


def test_an_entry_beside_a_state():
    """It takes the state and gives it back."""
    data = entries()
    expected = Interpreter(model_content=data).get_signature_runner("scale")(x=spread(1, 1, 4))["y"]
    found, state = ran(entry_of(data, 3).data, [spread(1, 1, 4), np.float32([5, 6])])
    assert (found.tobytes(), state.tolist()) == (expected.tobytes(), [5, 6])


def test_which_outputs_a_run_writes():
    """An input that is an output, and a constant, are not among them."""
    w = Writer()
    x, kept = w.input((1,)), w.constant(np.ones(1, np.float32))
    total = w.operator("ADD", [x, kept], (1,))
    entry = entry_of(w.file([total, x, kept]))
    assert entry.made.intersection(entry.outputs) == {total}


def test_no_such_entry():
    """The number is named."""
    with pytest.raises(InvalidModel, match="has 1 subgraphs, and no number 7"):
        entry_of(convolution(), 7)


@pytest.mark.parametrize("data", [memory(), entries()], ids=["cells", "variable"])
def test_a_file_that_is_cut_off_or_changed(data):
    """It is refused, or an entry is made of it; nothing else happens."""
    random = np.random.default_rng(3)
    for _ in range(300):
        changed = np.frombuffer(data, np.uint8)[: random.integers(8, len(data) + 1)].copy()
        for place in random.integers(8, changed.size, 2) if changed.size > 8 else []:
            changed[place] = random.integers(256)
        try:
            entry = EntryFile(changed, 0)
            assert entry.data.size >= changed.size
            assert entry.initial().size
        except InvalidModel:
            pass
