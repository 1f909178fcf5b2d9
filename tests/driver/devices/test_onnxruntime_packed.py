"""Texts, sequences, maps and optional values through the onnxruntime device: what ONNX Runtime gives in process."""

import asyncio

import numpy as np
import pytest
from onnx import TensorProto, helper

import driver
from burst import GeneralFailure

pytest.importorskip("onnxruntime", reason="needs the extra 'onnxruntime'")

import onnxruntime as ort

node, of = helper.make_node, helper.make_value_info
FLOAT, INT64, STRING, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING, TensorProto.BOOL
ML = {"domain": "ai.onnx.ml"}
WORDS = np.array([["hello", "wörld 😀"], ["", "a b  c"]], object)
ROWS = np.array([[0.1, 0.9], [0.7, 0.3]], np.float32)


def tensor(name, kind, shape=None):
    return helper.make_tensor_value_info(name, kind, shape)


def sequence(name, inner):
    return of(name, helper.make_sequence_type_proto(inner))


def of_tensors(kind):
    return helper.make_tensor_type_proto(kind, None)


def classifier():
    """As skl2onnx writes one: a label, and a map of probabilities for each row."""
    nodes = [
        node("ZipMap", ["x"], ["probabilities"], classlabels_strings=["cat", "dog"], **ML),
        node("ArgMax", ["x"], ["index"], axis=1, keepdims=0),
        node("LabelEncoder", ["index"], ["label"], keys_int64s=[0, 1], values_strings=["cat", "dog"], **ML),
    ]
    maps = helper.make_map_type_proto(STRING, of_tensors(FLOAT))
    return nodes, [tensor("x", FLOAT, ["n", 2])], [tensor("label", STRING, ["n"]), sequence("probabilities", maps)]


def tfidf():
    """Texts become numbers."""
    attributes = {"mode": "TF", "min_gram_length": 1, "max_gram_length": 1, "max_skip_count": 0}
    pool = {"ngram_counts": [0], "ngram_indexes": [0, 1, 2], "pool_strings": ["a", "b", "c"]}
    nodes = [node("TfIdfVectorizer", ["x"], ["y"], **attributes, **pool)]
    return nodes, [tensor("x", STRING, ["n"])], [tensor("y", FLOAT, [3])]


def beside_numbers():
    """Texts, booleans and integers."""
    nodes = [node("Identity", ["t"], ["u"]), node("Not", ["b"], ["c"]), node("Neg", ["i"], ["j"])]
    inputs = [tensor("t", STRING), tensor("b", BOOL), tensor("i", INT64)]
    return nodes, inputs, [tensor("u", STRING), tensor("c", BOOL), tensor("j", INT64)]


def one(op, inputs, outputs, **attributes):
    """A net of one node."""
    return [node(op, [i.name for i in inputs], [o.name for o in outputs], **attributes)], inputs, outputs


FLOATS, MAP = sequence("s", of_tensors(FLOAT)), helper.make_map_type_proto(INT64, of_tensors(FLOAT))
OPTIONAL = helper.make_optional_type_proto(of_tensors(FLOAT))
NETS = {
    "identity": (one("Identity", [tensor("x", STRING, ["n", "m"])], [tensor("y", STRING)]), [WORDS]),
    "concat": (
        one("StringConcat", [tensor("a", STRING, [2, 2]), tensor("b", STRING)], [tensor("y", STRING)]),
        [WORDS, np.array("!", object)],
    ),
    "split": (
        one("StringSplit", [tensor("x", STRING, [None])], [tensor("y", STRING), tensor("n", INT64)], delimiter=" "),
        [WORDS[:, 1]],
    ),
    "match": (one("RegexFullMatch", [tensor("x", STRING)], [tensor("y", BOOL)], pattern=r"[a-z]+"), [WORDS]),
    "normalizer": (
        one(
            "StringNormalizer",
            [tensor("x", STRING, ["n"])],
            [tensor("y", STRING)],
            locale="C",
            case_change_action="UPPER",
            stopwords=["", "a b  c"],
        ),
        [WORDS.reshape(-1)],
    ),
    "gather": (
        one("Gather", [tensor("x", STRING, [2, 2]), tensor("i", INT64, ["k"])], [tensor("y", STRING)], axis=1),
        [WORDS, np.array([1, 1, 0])],
    ),
    "codes": (
        one(
            "CategoryMapper",
            [tensor("x", STRING)],
            [tensor("y", INT64)],
            cats_strings=["", "hello"],
            cats_int64s=[7, 8],
            default_int64=-5,
            **ML,
        ),
        [WORDS],
    ),
    "nothing": (one("Identity", [tensor("x", STRING, ["n"])], [tensor("y", STRING)]), [np.empty(0, object)]),
    "tfidf": (tfidf(), [np.array(["a", "c", "a", "z"], object)]),
    "classifier": (classifier(), [ROWS]),
    "sequence": (one("Identity", [FLOATS], [sequence("y", of_tensors(FLOAT))]), [[ROWS, ROWS[0], ROWS[:0]]]),
    "of texts": (
        one("SequenceConstruct", [tensor("x", STRING), tensor("z", STRING)], [sequence("y", of_tensors(STRING))]),
        [WORDS, WORDS[:1]],
    ),
    "map": (
        one("DictVectorizer", [of("x", MAP)], [tensor("y", FLOAT)], int64_vocabulary=[3, 1, 2], **ML),
        [{1: 0.5, 3: 2.0}],
    ),
    "optional": (one("Identity", [of("x", OPTIONAL)], [of("y", OPTIONAL)]), [ROWS]),
    "absent": (one("Identity", [of("x", OPTIONAL)], [of("y", OPTIONAL)]), [None]),
    "beside numbers": (beside_numbers(), [WORDS, np.array([True, False]), np.array([[1, -2]])]),
}


@pytest.fixture
def files(tmp_path):
    """Writes the file of a net; returns its path."""

    def written(name):
        (nodes, inputs, outputs), _ = NETS[name]
        graph = helper.make_graph(nodes, "main", inputs, outputs)
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.ml", 3)]
        path = tmp_path / "net.onnx"
        path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())
        return path

    return written


def own(path, given):
    """What ONNX Runtime gives in this process."""
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip([i.name for i in session.get_inputs()], given, strict=True)))


def plain(value):
    """Types, shapes and values, to be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tolist()
    return [plain(each) for each in value] if isinstance(value, list | tuple) else (type(value), value)


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
    ],
)
def test_what_does_not_fit(connect, files, name, given, words):
    """The error names the input, the value and the remedy."""
    from burst import InvalidArgument

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
