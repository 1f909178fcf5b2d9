"""Files that are damaged, or made to do harm: refused, at once and in little memory."""

import random
import struct
from functools import partial
from pathlib import Path

import fuzz_tflite
import numpy as np
import pytest
import stress
from fuzzer_runs import finds_nothing
from refusals import refused
from tflite_cases import CASES
from tflite_writer import Writer

import driver
from driver.importers.tflite import reader as tflite

PROGRAM = Path(fuzz_tflite.__file__)
refuse = partial(refused, tflite.read)


@pytest.mark.integration
def test_mutants_find_nothing(tmp_path):
    """Two thousand: refused with ImportFailed or valid, none slow; some of both."""
    count, accepted = finds_nothing(PROGRAM, tmp_path, 2000, seed=1, patience=60)
    assert count == 2000
    assert 20 < accepted < 1000


@pytest.mark.parametrize("name", ["BATCH_MATMUL", "CAST", "FULLY_CONNECTED", "GATHER", "PACK", "SELECT", "SELECT_V2"])
@pytest.mark.parametrize("count", [0, 1])
def test_too_few_inputs(name, count):
    """An operator whose result follows from its inputs, and which has none or one of them: refused, or valid."""
    w = Writer()
    x = w.input((2, 2))
    fuzz_tflite.accepts(w.file([w.operator(name, [x] * count, (0, 2))]))


@pytest.mark.stress
def test_a_million_mutants_find_nothing(tmp_path, tally):
    """The same with a million, or as many as the budget allows, from another seed each time."""
    seed, times = random.randrange(1, 2**31), stress.times(1_000_000)
    count, accepted = finds_nothing(PROGRAM, tmp_path, times, seed, patience=1800)
    tally("mutants of .tflite", count)
    assert count == times
    assert accepted > stress.times(1000)


@pytest.mark.parametrize("name", ["ADD", "CONV_2D per channel", "WHILE", "DEQUANTIZE of 16-bit weights"])
def test_every_truncation_is_refused(name):
    """Cut after any byte but the last few, which may be padding, the file is refused."""
    w = Writer()
    data = w.file(CASES[name](w))
    accepted = [n for n in range(len(data)) if fuzz_tflite.accepts(data[:n])]
    assert all(n > len(data) - 16 for n in accepted)


@pytest.mark.parametrize(
    "data", [b"", b"TFL3", bytes(64), b"\x00\x00\x00\x00TFL3", b"\xff" * 4 + b"TFL3" + b"\xff" * 64]
)
def test_what_is_no_flatbuffer(data):
    """Too short, or with a root outside."""
    refuse(data)


def test_an_empty_file(tmp_path):
    """It cannot be mapped; that is said as of any other damage."""
    (tmp_path / "model.tflite").touch()
    with pytest.raises(driver.ImportFailed, match="empty"):
        driver.load(tmp_path / "model.tflite")


class Repeating(Writer):
    """Lists every operator ten thousand times."""

    def _listed(self, graph):
        return super()._listed(graph) * 10_000


def test_one_operator_listed_over_and_over():
    """It writes its result only once."""
    w = Repeating()
    refuse(w.file([w.operator("ABS", [w.input((2,))], (2,))]), r"operator 1 .* has a value already")


@pytest.mark.integration
def test_operators_without_results_listed_over_and_over():
    """The number of operators is limited, whatever they do, so that the time is."""
    w = Repeating()
    graphs = w, w.graph(), w.graph()
    for number, graph in enumerate(graphs, start=1):
        graph.input((), "bool")
        graph.outputs = []
        graph.operators.append(("IF", [0], [], {"ThenSubgraphIndex": number, "ElseSubgraphIndex": number}))
    data = w.file([])
    with pytest.raises(driver.ImportFailed, match="more than 16384 operators"):
        tflite.read(memoryview(data))


def test_one_long_name_for_many_tensors():
    """Reading it for each would take the square of the file's size."""

    class OneName(Writer):
        def _text(self, text):
            return self._builder.CreateSharedString(text)

    w = OneName()
    inputs = [w.input((1,), name="x" * 200_000) for _ in range(2000)]
    refuse(w.file([w.operator("ADD_N", inputs, (1,))]), "repeatedly")


def test_one_long_constant_copied_many_times():
    """16-bit weights become 32-bit ones, but not a hundred times."""
    w = Writer()
    buffer = w.buffer(bytes(1 << 18))
    tensors = [w.tensor((1 << 17,), "float16", buffer) for _ in range(100)]
    outputs = [w.operator("DEQUANTIZE", [t], (1 << 17,)) for t in tensors]
    refuse(w.file(outputs), "repeatedly")


def test_a_bias_of_five_hundred_million_zeros():
    """Filters that are no constant may claim any number of channels."""
    w = Writer()
    w.input((1, 1, 1, 1))
    filters = w.tensor((2**29, 1, 1, 1))
    w.inputs.append(filters)
    fields = {"StrideW": 1, "StrideH": 1, "DilationWFactor": 1, "DilationHFactor": 1}
    refuse(w.file([w.operator("CONV_2D", [0, filters], (1, 1, 1, 2**29), **fields)]), "repeatedly")


@pytest.mark.parametrize("place", [(2, 2**63), (2**63, 2), (2**64 - 1, 2**64 - 1), (64, 1 << 20)])
def test_a_buffer_behind_the_tables(place):
    """Its offset and its size are checked as those inside are."""

    class Behind(Writer):
        def _table(self, kind, **fields):
            more = {"Offset": place[0], "Size": place[1]} if kind == "Buffer" and "Data" in fields else {}
            return super()._table(kind, **fields, **more)

    w = Behind()
    refuse(w.file([w.operator("ADD", [w.input((2,)), w.constant(np.float32([1, 2]))], (2,))]), "lie outside")


def test_a_buffer_behind_the_tables_is_read(run):
    """As files of more than two gigabytes have it."""

    class Behind(Writer):
        def _table(self, kind, **fields):
            if kind == "Buffer" and "Data" in fields:
                fields = {"Offset": 1 << 12, "Size": 8}
            return super()._table(kind, **fields)

    w = Behind()
    data = w.file([w.operator("ADD", [w.input((2,)), w.constant(np.float32([1, 2]))], (2,))])
    model = tflite.read(memoryview(data.ljust(1 << 12, b"\0") + struct.pack("<ff", 3, 4)))
    np.testing.assert_allclose(run(model, w.feeds)[0], w.feeds[0] + [3, 4])
    assert [o.location for o in model.main.operands if o.location] == [(1 << 12, 8)]


@pytest.mark.parametrize("index", [-2, 1000, 2**31 - 1])
@pytest.mark.parametrize("where", ["inputs", "outputs", "operator"])
def test_tensors_that_do_not_exist(where, index):
    """The number is named."""
    w = Writer()
    x = w.input((2,))
    y = w.operator("ABS", [index if where == "operator" else x], (2,))
    w.inputs = [index] if where == "inputs" else w.inputs
    refuse(w.file([index if where == "outputs" else y]), f"tensor {index} does not exist")
