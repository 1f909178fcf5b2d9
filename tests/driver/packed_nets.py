"""Nets with texts, sequences, maps and optional values; and what ONNX Runtime itself gives for them."""

import numpy as np
from onnx import TensorProto, helper

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


def write_net(name, folder, file="net.onnx"):
    """Writes the file of a net; returns its path."""
    (nodes, inputs, outputs), _ = NETS[name]
    graph = helper.make_graph(nodes, "main", inputs, outputs)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.ml", 3)]
    path = folder / file
    path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())
    return path


def own(path, given):
    """What ONNX Runtime gives in this process."""
    import onnxruntime as ort

    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip([i.name for i in session.get_inputs()], given, strict=True)))


def plain(value):
    """Types, shapes and values, to be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tolist()
    return [plain(each) for each in value] if isinstance(value, list | tuple) else (type(value), value)
