"""Texts, sequences, maps and optional values through the onnxruntime device: what ONNX Runtime gives in process."""

import asyncio
from functools import partial

import numpy as np
import pytest
from onnx import TensorProto, helper

import driver
from burst import GeneralFailure, InvalidArgument, Memory, Request, RequestArgument
from driver.protocol.packed_values import pack, unpack
from driver.recording import Recording, record, replay

pytest.importorskip("onnxruntime", reason="needs the extra 'onnxruntime'")

from packed_nets import NETS, ROWS, WORDS, own, plain, write_net


@pytest.fixture
def files(tmp_path):
    """Writes the file of a net; returns its path."""
    return partial(write_net, folder=tmp_path)


@pytest.mark.parametrize("name", NETS)
def test_values_are_those_of_onnx_runtime(connect, files, name):
    """By run, run_async, and a burst's run, submit and run_async: the same types, shapes and bits."""
    path, given = files(name), NETS[name][1]
    wanted = plain(own(path, given))
    with connect("onnxruntime").prepare(driver.load(path, form="file")) as prepared:
        by_name = dict(zip([tensor.name for tensor in prepared.model.inputs], given, strict=True))
        if isinstance(given[0], dict):  # by position it would be names of inputs
            given = [by_name]
        assert plain(prepared.run(*given)) == wanted
        assert plain(prepared.run(by_name)) == wanted
        assert plain(asyncio.run(prepared.run_async(*given))) == wanted
        with prepared.burst(depth=2) as burst:
            assert plain(burst.run(*given).outputs) == wanted
            assert plain(burst.submit(*given).result().outputs) == wanted
            assert plain(asyncio.run(burst.run_async(*given)).outputs) == wanted


@pytest.mark.parametrize(
    "given",
    [
        WORDS.astype(str),
        WORDS.tolist(),
        np.array([[text.encode() for text in row] for row in WORDS], object),
        np.strings.encode(WORDS.astype(str), "utf-8"),
        WORDS.astype(np.dtypes.StringDType()),
        np.asfortranarray(WORDS),
    ],
    ids=["str_", "lists", "bytes", "bytes_", "StringDType", "by columns"],
)
def test_what_texts_may_be_given_as(connect, files, given):
    """Arrays of any kind of text, and lists; bytes are UTF-8."""
    with connect("onnxruntime").prepare(driver.load(files("identity"), form="file")) as prepared:
        assert plain(prepared.run(given)[0]) == plain(WORDS)


def test_one_text(connect, files):
    """It is a tensor of one element, of the rank that the model says."""
    with connect("onnxruntime").prepare(driver.load(files("identity"), form="file")) as prepared:
        assert plain(prepared.run("alone")[0]) == plain(np.array([["alone"]], object))


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("identity", [[["a", 1]]], r"input 0 \('x'\) holds 1 at \[0, 1\]; a text is str, or bytes of UTF-8"),
        ("identity", [[["a", None]]], r"holds None at \[0, 1\]"),
        ("identity", [[[b"\xff"]]], r"bytes at \[0, 0\] that are no UTF-8"),
        ("identity", [np.ones((1, 1))], r"dtype float64; the model takes texts: convert it with .astype\(str\)"),
        ("identity", [["a"]], r"shape \(1,\); the model takes \[\?, \?\]"),
        ("identity", [[["\ud800"]]], "surrogates"),
        ("identity", [None], "only optional values may be omitted"),
        ("sequence", [ROWS], r"is ndarray; seq\(tensor\(float\)\) takes a list"),
        ("sequence", [[ROWS.astype(np.float64)]], r"\('s'\)\[0\] has dtype float64; the model takes float32"),
        ("map", [[(1, 2)]], "takes a dict"),
        ("map", [{"x": {"a": 1.0}}], r"has the key 'a'; map\(int64,tensor\(float\)\) takes keys of int64"),
        ("sequence", [[["a"]]], r"\('s'\)\[0\] has dtype <U1; the model takes float32"),
    ],
)
def test_what_does_not_fit(connect, files, name, given, words):
    """The error names the input, the value and the remedy."""
    with connect("onnxruntime").prepare(driver.load(files(name), form="file")) as prepared:
        for run in (prepared.run, prepared.burst().run):
            with pytest.raises((ValueError, InvalidArgument), match=words):
                run(*given)


def test_texts_of_any_length_in_one_burst(connect, files):
    """Inputs and outputs grow, and shrink again; results that are kept do not hold the burst's memory."""
    with connect("onnxruntime").prepare(driver.load(files("identity"), form="file")) as prepared:
        burst, kept = prepared.burst(), []
        for size in (1, 5_000, 1, 6_000_000, 2):
            text = "é" * size
            kept.append(burst.run([[text]]).outputs)
            assert kept[-1]["y"][0, 0] == text
        kept += [burst.run([["again"]]).outputs for _ in range(40)]
        assert kept[-1]["y"].tolist() == [["again"]]


def test_inputs_of_a_burst(connect, files):
    """Texts are assigned as a whole, where arrays are written in place; what is too large goes by run."""
    with connect("onnxruntime").prepare(driver.load(files("identity"), form="file")) as prepared:
        burst = prepared.burst()
        with pytest.raises(GeneralFailure, match="holds no value: none was given"):
            burst.run()
        burst.inputs["x"][...] = [["in place"]]
        assert burst.run().outputs["y"].tolist() == [["in place"]]
        with pytest.raises(ValueError, match="give the value to run or submit"):
            burst.inputs["x"][:] = [["x" * 10_000]]
        with pytest.raises(ValueError, match="written as a whole"):
            burst.inputs["x"][0] = "a"
        burst.warm_up()
        assert "'x'" in repr(burst.inputs)


def test_what_the_model_says(files):
    """Names, and in ONNX's words what is no tensor of numbers."""
    texts = driver.load(files("identity")).inputs[0]
    assert (texts.dtype, texts.shape, texts.kind) == (np.dtype(object), (None, None), "tensor(string)")
    assert str(texts) == "x: string [?, ?]"
    label, probabilities = driver.load(files("classifier")).outputs
    assert (label.name, label.kind) == ("label", "tensor(string)")
    assert str(probabilities) == "probabilities: seq(map(string,tensor(float)))"


def test_compiled_and_cached(files, home, tmp_path):
    """The first start and the one from the cache give the same, and nothing falls back."""
    path = files("classifier")
    wanted = plain(own(path, [ROWS]))
    for _ in range(2):
        with driver.compile(driver.load(path), cache_dir=tmp_path / "cache") as compiled:
            assert plain(compiled.run(ROWS)) == wanted
            assert "onnxruntime" in str(compiled.placement())
            assert compiled.burst().run(ROWS).outputs[0].tolist() == ["dog", "cat"]


def test_a_text_that_the_file_has(connect, tmp_path):
    """An input for which the file has a text may be left out, and given."""
    ports = [helper.make_tensor_value_info(name, TensorProto.STRING, [None]) for name in "xdy"]
    weights = [helper.make_tensor("d", TensorProto.STRING, [1], [b"!"])]
    graph = helper.make_graph([helper.make_node("StringConcat", ["x", "d"], ["y"])], "g", ports[:2], ports[2:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
    with connect("onnxruntime").prepare(driver.load(tmp_path / "net.onnx", form="file")) as prepared:
        for run in (prepared.run, lambda given: prepared.burst().run(given).outputs):
            assert run({"x": ["a", "b"]})["y"].tolist() == ["a!", "b!"]
            assert run({"x": ["a", "b"], "d": ["?"]})["y"].tolist() == ["a?", "b?"]


def test_served_in_batches(files, home):
    """Texts and maps of a row each are joined and taken apart; what has no rows runs alone."""

    async def answers(path, *given):
        with driver.compile(driver.load(path)) as compiled:
            async with compiled.serve(replicas=1, batch=8, batch_window=0.2, warm_up=False) as server:
                return await asyncio.gather(*(server.run(each) for each in given)), server.stats()["batches"]

    rows = [ROWS[:1], ROWS, ROWS[1:]]
    path = files("classifier")
    found, batches = asyncio.run(answers(path, *rows))
    assert [plain(each) for each in found] == [plain(own(path, [each])) for each in rows]
    assert max(batches) > 1
    texts = [WORDS, WORDS[:1]]
    path = files("identity")
    assert [plain(each) for each in asyncio.run(answers(path, *texts))[0]] == [plain(own(path, [x])) for x in texts]
    path = files("sequence")
    found, batches = asyncio.run(answers(path, *[[ROWS]] * 5))
    assert [plain(each) for each in found] == [plain(own(path, [[ROWS]]))] * 5
    assert max(batches) == 1


def test_an_explicit_request(connect, files):
    """`execute` takes and gives the bytes; its outputs are the values."""
    data = np.frombuffer(pack(WORDS), np.uint8)
    memory, room = Memory.create(data.nbytes), Memory.create(4096)
    memory.asarray(np.uint8)[: data.nbytes] = data
    inputs = [RequestArgument(pool=0, offset=0, length=data.nbytes, dimensions=(data.nbytes,))]
    with connect("onnxruntime").prepare(driver.load(files("identity"), form="file")) as prepared:
        for size, status in ((16, "OUTPUT_INSUFFICIENT_SIZE"), (4096, "NONE")):
            request = Request(inputs, [RequestArgument(pool=1, offset=0, length=size)], (memory, room))
            result = prepared.execute(request)
            assert result.status.name == status
            assert result.output_shapes[0].dimensions == (data.nbytes,)
        assert plain(result.outputs[0]) == plain(WORDS)
        assert plain(unpack(room.asarray(np.uint8))) == plain(WORDS)
        memory.asarray(np.uint8)[:8] = 255
        assert prepared.execute(request).status.name == "GENERAL_FAILURE"


def test_a_buffer_of_the_device(connect, files):
    """Texts that one execution leaves in a buffer of the device are the input of another."""
    data = np.frombuffer(pack(WORDS), np.uint8)
    memory, room = Memory.create(data.nbytes), Memory.create(4096)
    memory.asarray(np.uint8)[:] = data
    device, model = connect("onnxruntime"), driver.load(files("identity"), form="file")
    with device.prepare(model) as first, device.prepare(model) as second:
        roles = [driver.BufferRole(1, 0)], [driver.BufferRole(0, 0)]
        with device.allocate(driver.BufferDesc((4096,)), [first, second], *roles) as buffer:
            given = RequestArgument(pool=0, length=data.nbytes, dimensions=(data.nbytes,))
            assert first.execute(Request([given], [RequestArgument(pool=1)], (memory, buffer))).status.name == "NONE"
            request = Request([RequestArgument(pool=0)], [RequestArgument(pool=1, length=4096)], (buffer, room))
            assert plain(second.execute(request).outputs[0]) == plain(WORDS)


def test_a_device_that_takes_numbers_says_so(connect, files):
    """By the input, and with the device that runs such files."""
    pytest.importorskip("openvino", reason="needs the extra 'openvino'")
    words = "input 0 is no tensor of numbers: the device onnxruntime alone runs such files"
    assert connect("openvino").explain(driver.load(files("identity"), form="file")) == [words]


def test_recorded_and_replayed(files, home, tmp_path):
    """Texts and maps come back from a recording, through bursts and on the plain path, and are compared as values."""
    long = np.array([["é" * 9000, ""]], object)
    with record(tmp_path / "requests.burst"), driver.connect("onnxruntime") as device:
        with device.prepare(driver.load(files("identity"), form="file")) as prepared, prepared.burst() as burst:
            for words in (WORDS, long):
                prepared.run(words)
                burst.run(words)
        with device.prepare(driver.load(files("classifier"), form="file")) as prepared:
            prepared.run(ROWS)
    with Recording(tmp_path / "requests.burst") as recording:
        report = replay(recording, pace="max", tolerance=0.0)
    assert (report.compared, report.different) == (5, 0)
