"""Model files in file form: what their headers say, the files beside them, shapes, and the form behind it."""

import contextlib
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import fuzz_onnx
import fuzz_tflite
import header_files
import numpy as np
import onnx
import pytest
import stress
from header_files import apart_onnx, labelled_onnx, labelled_tflite, onnx_file, strings_tflite
from onnx import TensorProto, helper
from tflite_writer import Writer

import driver
from burst.memory import frozen_memory
from driver.formats import onnx_schema, tflite_schema
from driver.importers import files
from driver.nn import OperandType, validate
from driver.nn.file_form import FILE, file_of

FLOAT = TensorProto.FLOAT
FOLDER = Path(__file__).parent / "onnx_models"


@pytest.fixture
def written(tmp_path):
    """written(data, kind="onnx") -> the path of a model file, with the file of weights beside it that some name."""

    def write(data, kind="onnx"):
        (tmp_path / "weights").mkdir(exist_ok=True)
        (tmp_path / "weights" / "all.bin").write_bytes(bytes(8) + header_files.WEIGHTS.tobytes())
        path = tmp_path / f"model.{kind}"
        path.write_bytes(data)
        return path

    return write


@pytest.fixture
def runs_here(monkeypatch):
    """runs_here(True or False): whether the runtimes of files are installed."""
    return lambda does: monkeypatch.setattr(files, "runs_files", lambda _: does)


def ends(model):
    """Name, type, dimensions of inputs, then of outputs."""
    graph = model.main
    return [
        [(o.extra["name"], o.type, o.dimensions) for o in map(graph.operands.__getitem__, side)]
        for side in (graph.inputs, graph.outputs)
    ]


def extra(model, place=0):
    """What the first output has besides."""
    return model.main.operands[model.main.outputs[place]].extra


# ---- what a header says ----------------------------------------------------------------------------------------------


def test_an_onnx_file_is_one_operation(written):
    """With the bytes of the file in memory that no process can write, and inputs and outputs in its order."""
    data = onnx_file({"a": (FLOAT, [2, 3]), "b": (TensorProto.INT64, [])}, {"y": (FLOAT, None), "z": (FLOAT, [])})
    model = driver.load(written(data), form="file")
    validate(model)
    found = file_of(model)
    assert (found.kind, found.data.tobytes(), found.external) == ("onnx", data, {})
    assert frozen_memory(found.data) is not None
    assert model.portable is None
    assert ends(model) == [
        [("a", OperandType.TENSOR_FLOAT32, (2, 3)), ("b", FILE.type("INT64"), ())],
        [("y", OperandType.TENSOR_FLOAT32, ()), ("z", OperandType.FLOAT32, ())],
    ]


@pytest.mark.parametrize("number", sorted(onnx_schema.DTYPES))
def test_every_type_of_onnx(written, number):
    """That numpy has, and bfloat16, has an operand type of the same elements."""
    name = onnx_schema.DTYPES[number]
    model = driver.load(written(onnx_file({"x": (number, [2])}, {"y": (number, [])})), form="file")
    tensor, scalar = (model.main.operands[side[0]].type for side in (model.main.inputs, model.main.outputs))
    assert tensor.dtype == scalar.dtype == np.dtype({"bfloat16": "uint16"}.get(name, name))
    assert (tensor.is_scalar, scalar.is_scalar) == (False, True)


def test_sizes_that_an_onnx_file_leaves_open(written):
    """By a name or by -1, as Paddle writes them; the names are told."""
    kind = (FLOAT, ["batch", 3, -1, 4])
    model = driver.load(written(onnx_file({"x": kind}, {"y": kind})), form="file")
    assert ends(model)[0][0][2] == (0, 3, 0, 4)
    assert extra(model)["dims"] == ("batch", None, None, None)


def test_a_tflite_file_is_one_operation(written):
    """With quantisation, open sizes, scalars, and types beyond the HAL's."""
    w = Writer()
    w.input((1, 2), "uint8", scale=0.5, zero_point=3, signature=[-1, 2])
    w.input((), "int64")
    w.input((3,), "int16", scale=0.25)
    w.input((2,), "int8")
    data = w.file([w.operator("ABS", [0], (1, 2), "int8", scale=0.125, zero_point=-7)])
    model = driver.load(written(data, "tflite"), form="file")
    assert file_of(model).data.tobytes() == data
    operands = [model.main.operands[i] for i in (*model.main.inputs, *model.main.outputs)]
    assert [(o.type, o.dimensions, o.scale, o.zero_point) for o in operands] == [
        (OperandType.TENSOR_QUANT8_ASYMM, (0, 2), 0.5, 3),
        (FILE.type("INT64"), (), 0, 0),
        (FILE.type("TENSOR_INT16"), (3,), 0, 0),
        (FILE.type("TENSOR_INT8"), (2,), 0, 0),
        (OperandType.TENSOR_QUANT8_ASYMM_SIGNED, (1, 2), 0.125, -7),
    ]
    assert operands[2].extra["quantisation"] == (0.25, 0)
    assert [(t.scale, t.zero_point) for t in model.inputs] == [(0.5, 3), (0, 0), (0.25, 0), (0, 0)]


def test_names_of_a_signature(written):
    """Are better than those of tensors, which are told, too."""
    w = Writer()
    x = w.input((2,), name="serving_default_x:0")
    y = w.operator("ABS", [x], (2,))
    model = driver.load(written(w.file([y], ({"x": x}, {"magnitude": y})), "tflite"), form="file")
    assert [side[0][0] for side in ends(model)] == ["x", "magnitude"]
    assert model.main.operands[model.main.inputs[0]].extra["tensor"] == "serving_default_x:0"


def test_labels_that_ultralytics_writes(written):
    """Classes with quotes in their names."""
    model = driver.load(written(labelled_onnx()), form="file")
    assert extra(model)["labels"] == ["person", "traffic light", 'baker\'s "shop"']


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ('{"0": "a", "1": "b c"}', ["a", "b c"]),
        ("['a', \"it's\", 'b\\\\c']", ["a", "it's", "b\\c"]),
        ("{0: 'a', 1: 'b", ["a", "b"]),
        ("nothing quoted", None),
    ],
)
def test_other_ways_to_write_labels(written, text, labels):
    """As JSON, as a list, and cut off."""
    found = driver.load(written(onnx_file({"x": (FLOAT, [2])}, {"y": (FLOAT, [2])}, names=text)), form="file")
    assert extra(found).get("labels") == labels


@pytest.mark.parametrize("text", ["1" * 400_000, "'\\'" * 200_000, "\"'" * 200_000, "' " * 200_000])
def test_labels_that_take_long_to_read(written, text):
    """They are read in one pass; what is read again and again would take hours."""
    data = onnx_file({"x": (FLOAT, [2])}, {"y": (FLOAT, [2])}, names=text)
    driver.load(written(data), form="file")


@pytest.mark.parametrize("relative", [False, True])
def test_labels_in_the_metadata_of_a_tflite_file(written, relative):
    """Which names a file in an archive behind the model."""
    model = driver.load(written(labelled_tflite(relative=relative), "tflite"), form="file")
    assert model.outputs[0].labels == ("cat", "dog", "üfo")


def test_labels_may_not_be_a_bomb(written):
    """A megabyte of them is read, whatever the archive unpacks to."""
    data = labelled_tflite(["x" * 100] * 100_000)
    assert len(data) < 100_000
    labels = extra(driver.load(written(data, "tflite"), form="file"))["labels"]
    assert sum(map(len, labels)) < 1 << 20


def test_damaged_metadata_is_ignored(written):
    """The runtime does not read it either."""
    data = labelled_tflite()
    model = driver.load(written(data.replace(b"PK\1\2", b"PK\0\0"), "tflite"), form="file")
    assert "labels" not in extra(model)


def test_places_of_fields_are_those_of_the_schema():
    """Each that is read of a flatbuffer, beside what the vendor's accessors read, for a table that has all fields."""
    import tflite

    for name, fields in tflite_schema.FIELDS.items():
        for field, place in fields.items():
            asked = []

            class Table:
                Pos = 0

                def Offset(self, slot, asked=asked):  # noqa: N802
                    asked.append(slot)
                    return 0

            word = "".join(part.capitalize() for part in field.split("_"))
            accessor = getattr(tflite, name)()
            accessor._tab = Table()
            method = getattr(accessor, f"{word}Length", None) or getattr(accessor, word)
            method()
            assert asked[0] == 4 + 2 * place, (name, field)


# ---- what is refused -------------------------------------------------------------------------------------------------


def tensor_of(number):
    return helper.make_tensor_type_proto(number, [2])


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ((TensorProto.COMPLEX64, [2]), "has elements of COMPLEX64"),
        (helper.make_sequence_type_proto(tensor_of(TensorProto.COMPLEX64)), "is a sequence of these elements"),
        (helper.make_optional_type_proto(tensor_of(TensorProto.BFLOAT16)), "is an optional value of these elements"),
        (helper.make_sparse_tensor_type_proto(FLOAT, [2]), "is a sparse tensor"),
        (helper.make_map_type_proto(TensorProto.STRING, tensor_of(TensorProto.INT4)), "is a map of these elements"),
        (onnx.TypeProto(), "has no type in the file.*; add it with onnx.shape_inference"),
    ],
)
@pytest.mark.parametrize("side", ["input", "output"])
def test_what_is_not_carried_is_named(written, side, kind, told):
    """Which input or output, what it is, and what to do; all of them at once."""
    other = (FLOAT, [2])
    data = onnx_file({"p": kind, "q": kind}, {"y": other}) if side == "input" else onnx_file({"x": other}, {"p": kind})
    with pytest.raises(driver.ImportFailed, match=f"{side} 'p' {told}") as caught:
        driver.load(written(data), form="file")
    assert ("input 'q'" in str(caught.value)) == (side == "input")


def test_every_other_type_of_onnx_is_named(written):
    """As ONNX calls it, in both forms."""
    known = {*onnx_schema.DTYPES, TensorProto.STRING, TensorProto.UNDEFINED}
    for name, number in TensorProto.DataType.items():
        if number in known:
            continue
        path = written(onnx_file({"x": (number, [2])}, {"y": (FLOAT, [2])}))
        for form in ("file", "operations"):
            with pytest.raises(driver.ImportFailed, match=rf"input 'x'.* of {name}\b") as caught:
                driver.load(path, form=form)
            assert len(str(caught.value)) < 360


@pytest.mark.parametrize(
    ("kind", "told", "shape"),
    [
        ((TensorProto.STRING, ["n", 2]), "tensor(string)", (None, 2)),
        ((TensorProto.STRING, None), "tensor(string)", None),
        (helper.make_sequence_type_proto(tensor_of(TensorProto.DOUBLE)), "seq(tensor(double))", None),
        (helper.make_optional_type_proto(tensor_of(TensorProto.STRING)), "optional(tensor(string))", None),
        (
            helper.make_sequence_type_proto(helper.make_map_type_proto(TensorProto.INT64, tensor_of(FLOAT))),
            "seq(map(int64,tensor(float)))",
            None,
        ),
    ],
)
def test_what_is_no_tensor_of_numbers(written, kind, told, shape):
    """It is carried as bytes; the model says in ONNX's words what it is, and the sizes of texts."""
    model = driver.load(written(onnx_file({"p": kind}, {"q": kind})), form="file")
    for tensor in (*model.inputs, *model.outputs):
        assert (tensor.kind, tensor.shape, tensor.dtype) == (told, shape, np.dtype(object))
    assert {operand.type.name for operand in model.main.operands[1:]} == {"PACKED"}


def test_strings_of_a_tflite_file(written):
    """By the name of the tensor."""
    with pytest.raises(driver.ImportFailed, match=r"output 0 \('words'\) has elements of STRING"):
        driver.load(written(strings_tflite(), "tflite"), form="file")


def test_auto_takes_operations_where_the_file_form_cannot(written, runs_here):
    """An output without a type is nothing to the importer; and where it fails too, both reasons are told."""
    runs_here(True)
    ends = {"x": (FLOAT, [2])}, {"y": onnx.TypeProto()}
    model = driver.load(written(onnx_file(*ends, [helper.make_node("Abs", ["x"], ["y"])])))
    assert [o.type for o in model.main.operations] == ["ABS"]
    path = written(onnx_file(*ends, [helper.make_node("NonZero", ["x"], ["y"])]))
    with pytest.raises(driver.ImportFailed, match=r"'y' has no type.*nor can it become operations.*NonZero"):
        driver.load(path)


@pytest.mark.parametrize("form", ["", "ops", "File", None])
def test_a_form_that_does_not_exist(written, form):
    """Those that do are listed."""
    with pytest.raises(driver.ImportFailed, match="choose from auto, file, operations"):
        driver.load(written(labelled_onnx()), form=form)


def test_a_file_that_is_none(tmp_path):
    """Nothing waits for a writer of a FIFO, and a folder is told as such."""
    os.mkfifo(tmp_path / "pipe.onnx")
    for form in ("file", "operations"):
        with pytest.raises(driver.ImportFailed, match=r"'pipe\.onnx' is not a regular file"):
            driver.load(tmp_path / "pipe.onnx", form=form)
        with pytest.raises(FileNotFoundError):
            driver.load(tmp_path / "none.onnx", form=form)


@pytest.mark.parametrize("change", ["grows", "shrinks", "is written"])
def test_a_file_that_changes_while_it_is_loaded(written, monkeypatch, change):
    """Is refused, since it may be neither the old one nor the new one."""
    path, read = written(labelled_onnx()), os.preadv

    def preadv(*arguments):
        count = read(*arguments)
        if change == "shrinks":
            os.truncate(path, 10)
        elif change == "grows":
            with path.open("ab") as file:
                file.write(b"more")
        else:
            os.utime(path, ns=(1, 1))
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(driver.ImportFailed, match=r"'model\.onnx' cannot be read: the file has changed.*load it again"):
        driver.load(path, form="file")


WRITER = """
import os, select, sys
path, contents = sys.argv[1], [open(name, "rb").read() for name in sys.argv[2:]]
fd = os.open(path, os.O_WRONLY)
for turn in range(10**9):
    content = contents[turn % 2]
    if turn % 8 < 6:
        os.pwrite(fd, content, 0)
    else:
        os.ftruncate(fd, len(content) // 2)
        os.ftruncate(fd, len(content))
        os.pwrite(fd, content, 0)
    if select.select([0], [], [], 0)[0]:  # rests between two bytes
        os.read(0, 1)
        os.write(1, b"!")
        os.read(0, 1)
"""


@pytest.mark.integration
def test_a_file_that_another_process_writes(written, tmp_path, kit):
    """While another process overwrites and truncates a file, each load gives one whole version of it, or is refused.

    But for a few: a file looks at rest while the kernel keeps its writer from going on in the midst of a write.
    """
    model, versions = onnx.load_model_from_string(onnx_file({"x": (FLOAT, [2])}, {"y": (FLOAT, [2])})), []
    for letter in "AB":
        model.doc_string = letter * 300_000
        versions.append(model.SerializeToString())
        (tmp_path / letter).write_bytes(versions[-1])
    path = written(versions[0])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    writer = kit.python(WRITER, path, tmp_path / "A", tmp_path / "B", **pipes)
    whole = torn = 0
    try:
        for turn in range(300):
            if turn % 3 == 0:
                writer.stdin.write(b"!")
                assert writer.stdout.read(1)
            elif turn % 3 == 1:
                writer.stdin.write(b"!")
            with contextlib.suppress(driver.ImportFailed):
                file = file_of(driver.load(path, form="file"))
                is_whole = bytes(file.data) in versions
                whole, torn = whole + is_whole, torn + (not is_whole)
    finally:
        writer.kill()
        writer.communicate()
    assert whole >= 100  # while the writer rested
    assert torn <= 3


# ---- shapes ----------------------------------------------------------------------------------------------------------


def test_shapes_are_those_of_the_inputs(written):
    """None stays open; a size with a name is then known in all inputs."""
    kind = (FLOAT, ["batch", 3, "height", "width"])
    path = written(onnx_file({"images": kind, "other": kind, "any": (FLOAT, None)}, {"y": kind}))
    model = driver.load(path, {"images": (None, 3, 320, np.int64(640)), "any": [2, 5]}, "file")
    assert [dimensions for *_, dimensions in ends(model)[0]] == [(0, 3, 320, 640), (0, 3, 320, 640), (2, 5)]


@pytest.mark.parametrize(
    ("shapes", "told"),
    [
        ({"image": (1, 3)}, r"'image', which is not an input; did you mean 'images'.*'images' \[batch, 3\], 'n' \[\]"),
        ({"images": (1, 3, 3)}, r"has 3 dimensions; the input is \[batch, 3\]"),
        ({"images": (1, 4)}, r"dimension 1 is 3 in the file; the input is \[batch, 3\]"),
        ({"images": (-1, 3)}, r"must be in 1..2147483647, or None"),
        ({"images": (2**31, 3)}, r"must be in 1..2147483647, or None"),
        ({"images": 3}, "give a size for each dimension"),
        ({"images": ("wide", 3)}, "give a size for each dimension"),
        ({"n": (1,)}, r"has 1 dimensions; the input is \[\]"),
    ],
)
def test_shapes_that_the_file_does_not_have(written, shapes, told):
    """The error has the names, the shape of the file, and what is wrong."""
    data = onnx_file({"images": (FLOAT, ["batch", 3]), "n": (FLOAT, [])}, {"y": (FLOAT, None)})
    with pytest.raises(driver.ImportFailed, match=told):
        driver.load(written(data), shapes, "file")


# ---- weights in other files ------------------------------------------------------------------------------------------


def test_weights_beside_the_file_travel_with_it(written):
    """All of each file, in memory that no process can write, under the name that the model has for it."""
    path = written(apart_onnx())
    found = file_of(driver.load(path, form="file"))
    assert list(found.external) == ["weights/all.bin"]
    assert found.external["weights/all.bin"].tobytes() == (path.parent / "weights" / "all.bin").read_bytes()
    assert frozen_memory(found.external["weights/all.bin"]) is not None


def test_weights_beside_the_file_are_used(written, home):
    """By ONNX Runtime in another process: in an initializer, a Constant and a branch, after the files are gone."""
    pytest.importorskip("onnxruntime", reason="no onnxruntime")
    path = written(apart_onnx())
    model = driver.load(path, form="file")
    for file in (path, path.parent / "weights" / "all.bin"):
        file.unlink()
    feed = np.ones((3, 4), np.float32)
    with driver.connect("onnxruntime") as device, device.prepare(model) as prepared:
        np.testing.assert_allclose(prepared.run(feed)[0], feed @ (3 * header_files.WEIGHTS))


@pytest.mark.parametrize("place", ["initializer", "Constant", "If"])
def test_weights_that_are_hidden(written, place):
    """In an initializer, in an attribute, or in a graph inside of one: no name of a file is missed."""
    model = onnx.load_from_string(apart_onnx("../secret"))
    kept = {"Constant": 0, "If": 1}.get(place)
    for number in (1, 0):
        if number != kept:
            del model.graph.node[number]
    if place != "initializer":
        del model.graph.initializer[0]
    with pytest.raises(driver.ImportFailed, match=r"'\.\./secret', which is not a file below"):
        driver.load(written(model.SerializeToString()), form="file")


def test_a_file_of_weights_that_changes(written, monkeypatch):
    """Is told by its name."""
    path, read = written(apart_onnx()), os.preadv
    held = path.parent / "weights" / "all.bin"

    def preadv(*arguments):
        stamp = held.stat().st_mtime_ns + 1
        os.utime(held, ns=(stamp, stamp))
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(driver.ImportFailed, match=r"'weights/all\.bin' cannot be read: the file has changed"):
        driver.load(path, form="file")


# ---- both forms ------------------------------------------------------------------------------------------------------


def test_the_second_form_is_made_once(runs_here):
    """When it is asked for, by the first of many threads; from the bytes that were loaded, not from the file."""
    runs_here(True)
    model = driver.load(FOLDER / "gru.onnx")
    assert file_of(model).kind == "onnx"
    assert model.form_for([FILE.name]) is model
    made, begin = [], threading.Barrier(4)

    def ask():
        begin.wait()
        made.append(model.form_for([]))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(one) for one in made}) == 1
    assert file_of(made[0]) is None
    wanted = driver.load(FOLDER / "gru.onnx", form="operations").main.operations
    assert [o.type for o in made[0].main.operations] == [o.type for o in wanted]


def test_the_second_form_has_its_weights(written, runs_here, run):
    """Those in other files, too, after all files are gone."""
    runs_here(True)
    w = header_files.outside()
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    path = written(onnx_file({"x": (FLOAT, [3, 4])}, {"y": (FLOAT, [3, 2])}, nodes, [w]))
    model = driver.load(path)
    (path.parent / "weights" / "all.bin").unlink()
    path.unlink()
    feed = np.ones((3, 4), np.float32)
    np.testing.assert_allclose(run(model.form_for([]), [feed])[0], feed @ header_files.WEIGHTS)


def test_a_second_form_that_cannot_be(written, runs_here):
    """Says why, each time that it is asked for."""
    runs_here(True)
    ends = {"x": (FLOAT, [2])}, {"y": (TensorProto.INT64, [1, None])}
    model = driver.load(written(onnx_file(*ends, [helper.make_node("NonZero", ["x"], ["y"])])))
    for _ in range(2):
        with pytest.raises(driver.ImportFailed, match="NonZero"):
            model.form_for([])


def test_auto_without_the_runtime_is_operations(runs_here):
    """At once, so what is wrong with the file is told when it is loaded."""
    runs_here(False)
    model = driver.load(FOLDER / "gru.onnx")
    assert file_of(model) is None
    assert model.portable is None


# ---- files that are damaged ------------------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.parametrize("program", [fuzz_onnx, fuzz_tflite])
def test_mutants_of_headers(tmp_path, program):
    """Three hundred: refused with ImportFailed or a valid model, none slow; some of both."""
    count, accepted = fuzzed(tmp_path, program, 300, seed=1, patience=60)
    assert count == 300
    assert 10 < accepted < 290


@pytest.mark.stress
@pytest.mark.parametrize("program", [fuzz_onnx, fuzz_tflite])
def test_a_million_mutants_of_headers(tmp_path, program, tally):
    """The same with a million, or as many as the budget allows, from another seed each time."""
    seed, times = int.from_bytes(os.urandom(3)), stress.times(1_000_000)
    count, accepted = fuzzed(tmp_path, program, times, seed, patience=3600)
    tally(f"mutants of headers, {program.__name__.removeprefix('fuzz_')}", count)
    assert count == times
    assert accepted > stress.times(1000)


def fuzzed(folder, program, inputs, seed, patience):
    """(mutants, accepted) of a run of a fuzzer in a process of its own."""
    options = ["--inputs", str(inputs), "--seed", str(seed), "--folder", folder, "--form", "file"]
    command = [sys.executable, "-W", "error", program.__file__, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return map(int, re.match(r"(\d+) mutants, (\d+) accepted", done.stdout).groups())


@pytest.mark.integration
@pytest.mark.parametrize("data", [labelled_onnx(), apart_onnx()], ids=["labelled", "apart"])
def test_every_truncation_of_an_onnx_header(written, data):
    """Is a model or refused, whatever is left."""
    taken = [fuzz_onnx.accepts(data[:size], written(data)) for size in range(1, len(data))]
    assert 0 < sum(taken) < len(taken)
