"""Files that the litert device runs as they are."""

import contextlib
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tflite
from lite_nets import convolution, counter, memory, selection, spread
from tflite_writer import DTYPES, Writer

import driver
from burst import MissedDeadlineTransient
from driver.deadlines import due
from driver.devices.lowering.errors import LibraryFailed
from driver.errors import ExecutionFailed, LoopTimeout, OutputInsufficientSize
from driver.importers.tflite.header import read_header
from driver.nn import InvalidModel
from driver.nn.file_form import ModelFile, model_of_file

pytest.importorskip("ai_edge_litert", reason="needs the extra 'litert'")

from ai_edge_litert.interpreter import Interpreter, OpResolverType

from driver.devices.litert import LiteRtDevice, interpreted
from driver.devices.litert.tflite_file import TfliteOutline
from driver.devices.litert.weights import aligned
from driver.interface import BindOptions, Preparation

FOLDER = Path(__file__).parents[1] / "importers/vendor"
TYPES = {**DTYPES, "float64": "FLOAT64", "uint16": "UINT16", "uint32": "UINT32"}


@pytest.fixture(scope="module")
def litert():
    return LiteRtDevice(threads=1)


def now():
    """No burst wants to run."""


def file_model(data, shapes=None, settings=None):
    """The model in file form of a .tflite file, without `driver.load`."""
    header = read_header(memoryview(data)).with_shapes(shapes)
    sides = [[tensor.operand() for tensor in side] for side in (header.inputs, header.outputs)]
    return model_of_file(ModelFile("tflite", np.frombuffer(data, np.uint8), {}, settings or {}), *sides)


def with_operand(model, place, **changes):
    operands = [*model.main.operands]
    operands[place] = replace(operands[place], **changes)
    return replace(model, main=replace(model.main, operands=operands))


def placed(array):
    """The array in memory that LiteRT can use in place; flags as bytes."""
    place = aligned(array.nbytes)
    place[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return place.view(np.uint8 if array.dtype == bool else array.dtype).reshape(array.shape)


def computed(prepared, feeds, room=4096, loop_timeout=2.0):
    """The shapes and bytes of the outputs of one run, and the execution."""
    outputs = [aligned(room) for _ in prepared.outputs]
    bound = prepared.bind([placed(feed) for feed in feeds], outputs, BindOptions(loop_timeout))
    bound.run()
    sizes = [int(np.prod(shape)) * port.size for port, (shape, _) in zip(prepared.outputs, bound.shapes, strict=True)]
    found = [(shape, raw[:n].tobytes()) for (shape, _), raw, n in zip(bound.shapes, outputs, sizes, strict=True)]
    return found, bound


class Own:
    """LiteRT as any program uses it."""

    def __init__(self, data):
        self._interpreter, self._shapes = Interpreter(model_content=data, num_threads=1), None

    def run(self, feeds):
        numbers = [told["index"] for told in self._interpreter.get_input_details()]
        if self._shapes != [feed.shape for feed in feeds]:
            self._shapes = [feed.shape for feed in feeds]
            for number, feed in zip(numbers, feeds, strict=True):
                self._interpreter.resize_tensor_input(number, feed.shape)
            self._interpreter.allocate_tensors()
        for number, feed in zip(numbers, feeds, strict=True):
            self._interpreter.set_tensor(number, feed)
        self._interpreter.invoke()
        found = [self._interpreter.get_tensor(told["index"]) for told in self._interpreter.get_output_details()]
        return [(array.shape, array.tobytes()) for array in found]


def counting(step):
    """Counts to its second input in steps; with a step of 0 for ever."""
    w = Writer()
    ends = [w.input((1,), "int32", low=0, high=0), w.input((1,), "int32", low=10, high=10)]
    condition, body = w.graph(), w.graph()
    for graph in (condition, body):
        graph.ends = [graph.input((1,), "int32") for _ in ends]
    condition.outputs = [condition.operator("LESS", condition.ends, (1,), "bool")]
    more = body.operator("ADD", [body.ends[0], body.constant(np.full((1,), step, np.int32))], (1,), "int32")
    body.outputs = [more, body.ends[1]]
    counts = w.operator("WHILE", ends, (1,), "int32", count=2, CondSubgraphIndex=1, BodySubgraphIndex=2)
    return w.file(counts[:1])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (3,), (1, 2, 1, 3, 2, 1)], ids=str)
def test_every_type_of_any_rank(litert, monkeypatch, dtype, shape):
    """Tensors of every type, scalars and those of many dimensions go in and out as they are."""
    monkeypatch.setattr("tflite_writer.DTYPES", TYPES)
    w = Writer()
    data = w.file(
        [
            w.operator(
                "BROADCAST_TO", [w.input(shape, dtype, low=0, high=1), w.constant(np.array(shape, "i4"))], shape, dtype
            )
        ]
    )
    assert computed(litert.prepare(file_model(data), Preparation()), w.feeds)[0] == Own(data).run(w.feeds)


def test_in_place(litert):
    """Inputs and outputs are used where they lie, in C; those that are not aligned are copied, as are numbers that may
    be indices or sizes.
    """
    prepared = litert.prepare(file_model(convolution()), Preparation())
    assert prepared.is_static
    x = spread(1, 1, 8, 8, 4)
    found, bound = computed(prepared, [x])
    assert bound.native
    assert bound.copied_bytes == 0
    shifted = aligned(x.nbytes + 4)[4:].view(np.float32).reshape(x.shape)
    shifted[:] = x
    outputs = [aligned(8 * 8 * 8 * 4)]
    bound = prepared.bind([shifted], outputs, BindOptions())
    bound.run()
    assert bound.copied_bytes == x.nbytes
    assert outputs[0].tobytes() == found[0][1]
    numbers, bound = computed(
        litert.prepare(file_model(counting(3)), Preparation()), [np.zeros(1, "i4"), np.full(1, 10, "i4")]
    )
    assert bound.checked_bytes == bound.copied_bytes == 12
    assert numbers == [((1,), np.array([12], "i4").tobytes())]


def test_flags_may_be_any_byte(litert):
    """A flag from another process is true unless it is 0."""
    w = Writer()
    data = w.file([w.operator("LOGICAL_NOT", [w.input((3,), "bool")], (3,), "bool")])
    prepared = litert.prepare(file_model(data), Preparation())
    outputs = [np.empty(3, np.uint8)]
    prepared.bind([np.array([0, 7, 255], np.uint8)], outputs, BindOptions()).run()
    assert outputs[0].tolist() == [1, 0, 0]


def test_open_sizes(litert):
    """Where the file leaves sizes open, each run has its own."""
    data = convolution(signature=(-1, 8, 8, 4))
    prepared = litert.prepare(file_model(data), Preparation())
    assert prepared.is_static
    own = Own(data)
    for rows in (1, 3, 2, 3):
        x = spread(rows, rows, 8, 8, 4)
        assert computed(prepared, [x], 2**14)[0] == own.run([x])
    with pytest.raises(LibraryFailed, match="LiteRT rejected the file"):
        computed(prepared, [spread(0, 1, 8, 8, 5)])


def test_no_elements(litert):
    """A tensor may have none."""
    w = Writer()
    x = w.input((2, 3), signature=(-1, 3))
    data = w.file([w.operator("ADD", [x, x], (2, 3))])
    prepared = litert.prepare(file_model(data), Preparation())
    assert prepared.is_static
    for rows in (0, 2, 0):
        assert prepared.bind([spread(rows, rows, 3)], [aligned(64)], BindOptions()).shapes == (((rows, 3), True),)
        assert computed(prepared, [spread(rows, rows, 3)])[0] == Own(data).run([spread(rows, rows, 3)])


def test_shapes_that_only_a_run_knows(litert):
    """Outputs whose shapes depend on data are right in each run; too little memory for one is told with its shape."""
    data = selection()
    prepared = litert.prepare(file_model(data), Preparation())
    assert not prepared.is_static
    for x in ([1, -1, 1, 1], [-1, -1, -1, 2], [1, 1, 1, 1]):
        feed = np.array(x, np.float32)
        assert computed(prepared, [feed])[0] == Own(data).run([feed])
    assert computed(prepared, [-np.ones(4, np.float32)])[0] == [((0, 1), b"")] * 2
    bound = prepared.bind([np.ones(4, np.float32)], [np.empty(16, np.uint8), np.empty(24, np.uint8)], BindOptions())
    with pytest.raises(OutputInsufficientSize, match=r"output 1 needs dimensions \[4, 1\]"):
        bound.run()
    assert bound.shapes == (((4, 1), True), ((4, 1), False))


def test_outputs_that_nothing_makes(litert):
    """An output may be an input, a constant, or be given twice."""
    w = Writer()
    x = w.input((2, 3))
    y = w.operator("NEG", [x], (2, 3))
    data = w.file([x, y, y, w.constant(np.arange(3, dtype=np.float32))])
    assert computed(litert.prepare(file_model(data), Preparation()), w.feeds)[0] == Own(data).run(w.feeds)


def test_too_small_an_output(litert):
    """A file whose shapes are known does not run with too little memory for an output."""
    outputs = [np.full(12, 7, np.uint8)]
    bound = litert.prepare(file_model(convolution()), Preparation()).bind(
        [spread(1, 1, 8, 8, 4)], outputs, BindOptions()
    )
    with pytest.raises(OutputInsufficientSize, match=r"output 0 needs dimensions \[1, 8, 8, 8\]"):
        bound.run()
    assert (outputs[0] == 7).all()


def test_order_and_names(litert):
    """Inputs and outputs are in the order of the file's first subgraph, whatever their names and its signatures say."""
    w = Writer()
    a, b = w.input((2,), name="z"), w.input((2,), name="a")
    outputs = [w.operator("SUB", [a, b], (2,)), w.operator("ADD", [a, b], (2,))]
    for names in (None, ({"x": b, "y": a}, {"second": outputs[1], "first": outputs[0]})):
        found, _ = computed(
            litert.prepare(file_model(w.file(outputs, names)), Preparation()), [np.float32([3, 3]), np.float32([1, 1])]
        )
        assert [np.frombuffer(raw, np.float32).tolist() for _, raw in found] == [[2, 2], [4, 4]]


@pytest.mark.parametrize("file", [memory, counter])
def test_state(litert, file):
    """Variables keep their values from one run to the next, for each prepared model its own, and are not forgotten
    while it rests.
    """
    data = file()
    shape = (1, 4) if file is memory else (1,)
    prepared, other, own = (
        litert.prepare(file_model(data), Preparation()),
        litert.prepare(file_model(data), Preparation()),
        Own(data),
    )
    first = Own(data).run([spread(0, *shape)])
    for n in range(4):
        assert computed(prepared, [spread(n, *shape)])[0] == own.run([spread(n, *shape)])
        prepared.rest()
    assert computed(other, [spread(0, *shape)])[0] == first


def test_state_of_open_sizes(litert):
    """With inputs of other shapes the state goes on as it does in the runtime."""
    w = Writer()
    x, cells = w.input((1, 4), signature=(-1, 4)), w.variable((1, 6))
    data = w.file([w.operator("SVDF", [x, w.random((3, 4)), w.random((3, 2)), -1, cells], (1, 3), Rank=1)])
    prepared, own = litert.prepare(file_model(data), Preparation()), Own(data)
    for n, rows in enumerate([1, 1, 1]):
        assert computed(prepared, [spread(n, rows, 4)])[0] == own.run([spread(n, rows, 4)])


def test_executions_of_one_state_take_turns(litert):
    """Executions in several threads each add to the state once: none is lost, none is counted twice."""
    prepared, found = litert.prepare(file_model(counter()), Preparation()), []

    def run():
        for _ in range(50):
            (_, raw), *_ = computed(prepared, [np.ones(1, np.float32)])[0]
            found.append(int(np.frombuffer(raw, np.float32)[0]))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(11, 211))


def endless(litert, loop_timeout=1000.0):
    prepared = litert.prepare(file_model(counting(0)), Preparation())
    feeds = [placed(np.zeros(1, np.int32)), placed(np.full(1, 10, np.int32))]
    return prepared.bind(feeds, [aligned(4)], BindOptions(loop_timeout))


def test_a_loop_without_end(litert):
    """It ends at its loop timeout, at the deadline, or when it is cancelled, and says which."""
    with pytest.raises(LoopTimeout, match=r"loop timeout of 0\.05 s"):
        endless(litert, 0.05).run()
    with due(time.monotonic_ns() + 50_000_000), pytest.raises(MissedDeadlineTransient):
        endless(litert).run()
    bound, failed = endless(litert), []

    def run():
        with pytest.raises(ExecutionFailed, match=r"the file.*cancelled") as caught:
            bound.run()
        failed.append(caught)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        bound.cancel()
        thread.join(0.01)
    assert failed
    with pytest.raises(ExecutionFailed, match="cancelled"):
        bound.run()  # cancelled for good


def test_sparse_weights(litert):
    """Weights of which the file holds only those that are not zero."""
    w = Writer()
    weights = np.random.default_rng(3).standard_normal((8, 12)).astype(np.float32) * (
        np.arange(96).reshape(8, 12) % 3 == 0
    )
    dense = w.operator("DENSIFY", [w.sparse(weights.astype(np.float32))], (8, 12))
    data = w.file([w.operator("FULLY_CONNECTED", [w.input((1, 12)), dense, -1], (1, 8))])
    assert computed(litert.prepare(file_model(data), Preparation()), w.feeds)[0] == Own(data).run(w.feeds)


def test_operators_that_the_runtime_lacks(litert):
    """Custom operators of other programs are refused by name: the runtime says which it has, and no list of ours."""
    for name in ("Landmarks2TransformMatrix", "FlexErf"):
        w = Writer()
        x = w.input((1, 4))
        model = file_model(w.file([w.operator(f"CUSTOM:{name}", [x], (1, 4))]))
        with pytest.raises(LibraryFailed, match=rf"LiteRT rejected the file: .*Node number 0 \({name}\)") as caught:
            litert.prepare(model, Preparation())
        assert len(str(caught.value)) < 400
        assert "\n" not in str(caught.value)


def test_operators_of_the_default_delegate(litert):
    """XNNPACK has operators that LiteRT's own resolver has not: what the interpreter runs, the device runs."""
    w = Writer()
    x, weights, bias = w.input((1, 4, 4, 2)), w.constant(spread(1, 3, 2, 2, 2)), w.constant(spread(2, 3))
    options = np.int32([1, 2, 2]).tobytes()  # padded SAME, strides of 2
    made = w.operator("CUSTOM:Convolution2DTransposeBias", [x, weights, bias], (1, 8, 8, 3), custom=options)
    data = w.file([made])
    assert computed(litert.prepare(file_model(data), Preparation()), w.feeds)[0] == Own(data).run(w.feeds)


def test_what_the_runtime_says(litert):
    """A file that the runtime does not take is refused in its own words."""
    w = Writer()
    wrong = w.operator("CONCATENATION", [w.input((2, 3)), w.input((3, 2))], (2, 5), Axis=1)
    with pytest.raises(LibraryFailed, match=r"LiteRT rejected the file: .*failed to prepare"):
        litert.prepare(file_model(w.file([wrong])), Preparation())


def test_what_the_runtime_does_not_expect(litert):
    """An operator without a result, over which its delegate ends in an exception of C++: the file is refused."""
    data = bytearray((FOLDER / "transformer_dynamic.tflite").read_bytes())
    graph = tflite.Model.GetRootAs(data).Subgraphs(0)
    made = [graph.Operators(n).OutputsAsNumpy() for n in range(graph.OperatorsLength())]
    next(outputs for outputs in made if outputs[0] == 102)[:] = -1
    with pytest.raises(LibraryFailed, match="LiteRT rejected the file: _Map_base::at"):
        litert.prepare(file_model(bytes(data)), Preparation())


def test_what_the_runtime_says_of_a_run(litert):
    """So is a run that fails."""
    w = Writer()
    gathered = w.operator("GATHER", [w.input((3,)), w.input((2,), "int32", low=7, high=9)], (2,))
    prepared = litert.prepare(file_model(w.file([gathered])), Preparation())
    for _ in range(2):
        with pytest.raises(ExecutionFailed, match=r"the file.*gather index out of bounds"):
            computed(prepared, w.feeds)


@pytest.mark.parametrize("resolver", ["AUTO", "BUILTIN_REF", "BUILTIN_WITHOUT_DEFAULT_DELEGATES"])
def test_the_interpreter_that_a_program_asks_for(litert, resolver):
    """With its resolver and threads it computes the program's own bits, also for sizes that the file has not."""
    options = {"resolver": resolver, "num_threads": 2, "package": "ai_edge_litert.interpreter"}
    own = Interpreter(
        model_content=convolution(), num_threads=2, experimental_op_resolver_type=OpResolverType[resolver]
    )
    for shape in [(1, 8, 8, 4), (2, 6, 8, 4)]:
        model = file_model(convolution(), settings={"interpreter": options})
        model = with_operand(model, *model.main.inputs, dimensions=shape)
        prepared = litert.prepare(model, Preparation())
        assert litert.explain(model) == [None]
        assert prepared.serves_all
        own.resize_tensor_input(own.get_input_details()[0]["index"], shape)
        own.allocate_tensors()
        own.set_tensor(own.get_input_details()[0]["index"], spread(7, *shape))
        own.invoke()
        expected = own.get_tensor(own.get_output_details()[0]["index"])
        assert computed(prepared, [spread(7, *shape)])[0] == [(expected.shape, expected.tobytes())]


def test_an_interpreter_has_no_more_threads_than_processors(litert):
    """However many a client asks for: threads are few for all accounts together."""
    before, many = len(os.listdir("/proc/self/task")), {"num_threads": interpreted.MOST_THREADS_ASKED}
    prepared = litert.prepare(file_model(convolution(), settings={"interpreter": many}), Preparation())
    assert len(os.listdir("/proc/self/task")) < before + os.cpu_count()
    del prepared


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"colour": 1}, "the setting 'colour', which this device does not have"),
        ({"interpreter": 3}, "is 3, and no object"),
        ({"interpreter": {"colour": 1}}, "the unknown option 'colour'"),
        ({"interpreter": {"num_threads": 0}}, "num_threads = 0: from 1 to 256"),
        ({"interpreter": {"package": "os"}}, "is of 'os': choose from ai_edge_litert.interpreter"),
        ({"interpreter": {"resolver": "BEST"}}, "the resolver 'BEST': choose from AUTO"),
        ({"interpreter": {"experimental_disable_delegate_clustering": 1}}, "no boolean"),
    ],
)
def test_settings_that_nothing_has(litert, settings, words):
    """They are refused, by their names."""
    model = file_model(convolution(), settings=settings)
    assert words in litert.explain(model)[0]


def test_settings_that_are_none(litert):
    """Bytes in the place of settings that are no JSON, or no object of it."""
    for told in (b"{", b"[]", b"[" * 10000, b" " * 70000):
        model = file_model(convolution(), settings={"interpreter": {}})
        place = model.main.operations[0].inputs[2]
        model = with_operand(model, place, value=np.frombuffer(told, np.uint8), dimensions=(len(told),))
        assert "its settings" in litert.explain(model)[0]


def test_a_model_that_is_not_its_file(litert):
    """Inputs and outputs of the model have to be those of the file: as many, of the same types and shapes."""
    w = Writer()
    given = file_model(w.file([w.operator("NEG", [w.input((4,))], (4,))])).main
    sides = [given.operands[i] for i in given.inputs], [given.operands[i] for i in given.outputs]
    for dtype, shape, words in (
        ("int32", (4,), r"input 0 \(t0\): the model says TENSOR_FLOAT32, but the file has int32"),
        ("float32", (5,), r"input 0 \(t0\): the model says \[4\], but the file has \[5\]"),
        ("float32", (2, 2), r"input 0 \(t0\): the model says \[4\], but the file has \[2, 2\]"),
    ):
        other = Writer()
        data = other.file([other.operator("NEG", [other.input(shape, dtype)], shape, dtype)])
        with pytest.raises(InvalidModel, match=words):
            litert.prepare(model_of_file(ModelFile("tflite", np.frombuffer(data, np.uint8)), *sides), Preparation())
    model = model_of_file(ModelFile("tflite", np.frombuffer(convolution(), np.uint8)), sides[0] * 2, sides[1])
    with pytest.raises(InvalidModel, match=r"the model has 2 inputs, and its \.tflite file has 1"):
        litert.prepare(model, Preparation())


@pytest.mark.integration
@pytest.mark.parametrize("file", [convolution, counter, counting])
def test_a_file_that_is_cut_off_or_changed(litert, file):
    """Damage to the tables that this device reads is told as an error."""
    data, random = file(3) if file is counting else file(), np.random.default_rng(9)
    model = file_model(data).main
    sides = [[model.operands[i] for i in side] for side in (model.inputs, model.outputs)]
    for n in range(0, len(data) - 9, max(1, len(data) // 150)):
        damaged = bytearray(data)
        del damaged[n + 8 :]
        damaged[4:8] = b"TFL3"
        with pytest.raises((InvalidModel, LibraryFailed)):
            litert.prepare(
                model_of_file(ModelFile("tflite", np.frombuffer(bytes(damaged), np.uint8)), *sides), Preparation()
            )
        damaged = bytearray(data)
        damaged[random.integers(len(data))] = random.integers(256)
        with contextlib.suppress(InvalidModel, LibraryFailed):
            TfliteOutline(np.frombuffer(bytes(damaged), np.uint8))


def test_weights_stay_where_they_are(litert):
    """A file in shared memory is mapped a second time, behind the tables that differ: its bytes are not copied."""
    data = convolution()
    memory = driver.Memory.frozen(np.frombuffer(data, np.uint8)).asarray()
    assert TfliteOutline(memory).image([(1, 8, 8, 4)]).root >= len(data)
    assert TfliteOutline(np.frombuffer(data, np.uint8)).image([(1, 8, 8, 4)]).root == 0


def test_through_a_burst(connect, tmp_path):
    """Files run in another process, by name, by bursts and one by one, with open sizes and a state."""
    path = tmp_path / "net.tflite"
    path.write_bytes(convolution(signature=(-1, 8, 8, 4), name="image"))
    own, model = Own(path.read_bytes()), driver.load(path)
    with connect("litert").prepare(model) as prepared:
        for rows in (1, 2):
            x = spread(rows, rows, 8, 8, 4)
            assert prepared.run({"image": x})[0].tobytes() == own.run([x])[0][1]
        with prepared.burst(input_shapes=[x.shape]) as burst:
            for _ in range(3):
                assert burst.run(x).outputs[0].tobytes() == own.run([x])[0][1]
        assert prepared.run({"image": x[:0]})[0].shape == (0, 8, 8, 8)
    path.write_bytes(counter())
    with connect("litert").prepare(driver.load(path)) as prepared, prepared.burst() as burst:
        found = [burst.run(np.ones(1, np.float32)).outputs[0].item() for _ in range(3)]
        found.append(prepared.run(np.ones(1, np.float32))[0].item())
        assert found == [11, 12, 13, 14]


@pytest.mark.parametrize("file", [convolution, memory, counter, selection])
def test_restored(litert, file):
    """What was found out about a file is not looked for again, and it computes the same."""
    data = file()
    model, root = file_model(data), np.frombuffer(data, np.uint8)
    prepared = litert.prepare(model, Preparation())
    saved = prepared.saved(root)
    kept = type(saved)(*([np.frombuffer(part, np.uint8) for part in side] for side in saved))
    restored = litert.restore(model, kept, root, Preparation())
    assert restored.is_static == prepared.is_static
    shape = {convolution: (1, 8, 8, 4), memory: (1, 4), counter: (1,), selection: (4,)}[file]
    for n in range(2):
        feeds = [spread(n, *shape)]
        assert computed(restored, feeds)[0] == computed(prepared, feeds)[0]
    assert (
        litert.prepare(file_model(convolution(signature=(-1, 8, 8, 4))), Preparation()).saved(root) is None
    )  # nothing is known


def test_a_cached_file(tmp_path):
    """A compiled file comes back from the cache, and computes the same."""
    path = tmp_path / "net.tflite"
    path.write_bytes(convolution())
    x, outcomes = spread(1, 1, 8, 8, 4), []
    for _ in range(2):
        with driver.compile(driver.load(path), devices=["litert"], cache_dir=tmp_path / "cache") as compiled:
            assert compiled.run(x)[0].tobytes() == Own(path.read_bytes()).run([x])[0][1]
            outcomes += [told["outcome"] for told in compiled.stats()["compilations"]]
    assert outcomes == ["saved", "restored"]
