"""What do several programs with a stream each get of one language model, beside a session of each program's own?

    python bench/sentences.py [--clients 1 8] [--pairs 9] [--seconds 4] [--file FILE] [--json FILE]

Each client is a process that generates 64 tokens to a prompt of 8, again and again, for --seconds after a first answer.
FILE: as examples/language_model.py writes it; without one, a model of that kind with random weights, of 84 MB. In
process: an ONNX Runtime session of one thread in each client, and OrtValues that are bound by IOBinding. As a stream:
one device, which repeats the steps. Where the package onnxruntime-genai is installed: its generator, in each client, on
the same weights (of the model with random ones). A figure is of all clients of a round; CPU and memory are the
device's, too. The first row of a client count is what ratios are of.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from joined import block
from measure import Runs, rounds, scratch
from own_device import own_device
from question import Question, against, interval, times

if TYPE_CHECKING:
    import argparse

    from question import Figure

OWN, STREAM, GENERATOR = "in process", "as a stream", "in process, onnxruntime-genai"
VOCABULARY = 16384
EXAMPLES = Path(__file__).parents[1] / "examples"
PROGRAM = """
import json, os, sys, time
import numpy as np

way, path, number, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
MOST, prompt = 64, np.arange(8, dtype=np.int64) + number

if way == "in process":
    import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    shape = session.get_inputs()[1].shape
    made = onnxruntime.OrtValue.ortvalue_from_numpy

    def answer():
        empty = np.empty((1, shape[1], 0, shape[3]), np.float32)
        values = [made(prompt), *(made(empty) for _ in names[1:])]
        for _ in range(MOST):
            binding = session.io_binding()
            for name, value in zip(names, values):
                given = name.replace("present", "past").replace("next", "tokens")
                binding.bind_ortvalue_input(given, value)
                binding.bind_output(name)
            session.run_with_iobinding(binding)
            values = binding.get_outputs()
            yield int(values[0].numpy()[0])
elif "genai" in way:
    import onnxruntime_genai
    model = onnxruntime_genai.Model(path)

    def answer():
        parameters = onnxruntime_genai.GeneratorParams(model)
        parameters.set_search_options(max_length=len(prompt) + MOST, do_sample=False)
        generator = onnxruntime_genai.Generator(model, parameters)
        generator.append_tokens(prompt.astype(np.int32))
        while not generator.is_done():
            generator.generate_next_token()
            yield int(generator.get_next_tokens()[0])
else:
    import driver
    prepared = driver.connect("onnxruntime").prepare(driver.load(path))
    burst = prepared.burst(depth=8)
    states = prepared.model.inputs[1:]

    def answer():
        first = {"tokens": prompt} | {s.name: np.empty((1, s.shape[1], 0, s.shape[3]), np.float32) for s in states}
        feedback = {"next": "tokens"} | {s.name.replace("past", "present"): s.name for s in states}
        for result in burst.stream_results(first, feedback=feedback, most=MOST, also=["next"]):
            yield int(result.outputs["next"][0])

expected = list(answer())
print(flush=True)
input()
began, taken, count = os.times(), [], 0
end = time.monotonic() + seconds
while (begin := time.monotonic()) < end:
    for token, right in zip(answer(), expected):
        assert token == right
        count += 1
        if time.monotonic() > end:
            break
    taken.append(time.monotonic() - begin)
used = sum(os.times()[:2]) - sum(began[:2])
print(json.dumps([count, used, float(np.percentile(taken, 99)) * 1000]), flush=True)
input()
"""


class RandomWeights:
    """The weights of a small language model, as `examples/language_model.py` reads them of a file."""

    def __init__(self) -> None:
        words = {"block_count": 4, "attention.head_count": 8, "attention.head_count_kv": 4, "embedding_length": 512}
        self.about: dict[str, Any] = {f"llama.{word}": value for word, value in words.items()}
        self.about["llama.attention.layer_norm_rms_epsilon"] = 1e-5
        self._random = np.random.default_rng(1)

    def __contains__(self, name: str) -> bool:
        return False

    def __getitem__(self, name: str) -> Any:
        ends = {"attn_k": (256, 512), "attn_v": (256, 512), "ffn_gate": (1536, 512), "ffn_up": (1536, 512)}
        ends |= {"ffn_down": (512, 1536), "token_embd": (VOCABULARY, 512), "attn_norm": (512,), "ffn_norm": (512,)}
        part = name.removesuffix(".weight").rpartition(".")[2]
        shape = ends.get(part, (512,) if part.endswith("norm") else (512, 512))
        return (self._random.standard_normal(shape) / 16).astype(np.float32)


def write_model(path: Path) -> None:
    """A language model with random weights."""
    sys.path.insert(0, str(EXAMPLES))
    import onnx
    from language_model import llama

    onnx.save(llama(RandomWeights()), path)


def write_generator(file: Path, folder: Path) -> None:
    """The same model as onnxruntime-genai takes it: tokens of several rows in, logits out."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    model = onnx.load(file)
    graph, wide = model.graph, helper.make_tensor_value_info
    tokens, (chosen,) = graph.input[0], [node for node in graph.node if node.op_type == "ArgMax"]
    (last,) = [node for node in graph.node if node.op_type == "Gather" and node.input[1] == "int64 (1,) [-1]"]
    for node in graph.node:  # of each token, not of the last one alone
        node.input[:] = [last.input[0] if name == last.output[0] else name for name in node.input]
    graph.node.remove(last)
    graph.node.remove(chosen)
    graph.node.insert(0, helper.make_node("Reshape", ["input_ids", "flat"], ["tokens"]))
    graph.node.append(helper.make_node("Unsqueeze", [chosen.input[0], "first"], ["logits"]))
    graph.initializer.extend(numpy_helper.from_array(np.array([n]), name) for n, name in ((-1, "flat"), (0, "first")))
    graph.input.remove(tokens)
    graph.input.insert(0, wide("input_ids", TensorProto.INT64, ["batch", "count"]))
    graph.output.remove(graph.output[0])
    graph.output.insert(0, wide("logits", TensorProto.FLOAT, ["batch", "count", VOCABULARY]))
    onnx.save(model, folder / "model.onnx")
    ends = {"bos_token_id": 0, "eos_token_id": VOCABULARY - 1, "pad_token_id": 0}
    sizes = {"head_size": 64, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    names = {
        "inputs": {"input_ids": "input_ids", "past_key_names": "past_k_%d", "past_value_names": "past_v_%d"},
        "outputs": {"logits": "logits", "present_key_names": "present_k_%d", "present_value_names": "present_v_%d"},
    }
    options = {"session_options": {"intra_op_num_threads": 1, "provider_options": []}, "filename": "model.onnx"}
    decoder = {**sizes, **names, **options, "num_hidden_layers": 4}
    about = {"type": "llama", **ends, "vocab_size": VOCABULARY, "context_length": 2048, "decoder": decoder}
    search = {"max_length": 72, "past_present_share_buffer": False, "do_sample": False, "num_beams": 1}
    (folder / "genai_config.json").write_text(json.dumps({"model": about, "search": search}))


def run(args: argparse.Namespace) -> Runs:
    """All rounds of one number of clients after the other: each way once a round."""
    runs = Runs()
    with scratch() as folder, own_device("onnxruntime") as device:
        path = args.file or str(folder / "model.onnx")
        paths = {OWN: path, STREAM: path}
        if not args.file:
            write_model(Path(path))
            if find_spec("onnxruntime_genai"):
                (generator := folder / "generator").mkdir()
                write_generator(Path(path), generator)
                paths[GENERATOR] = str(generator)
        for clients in args.clients:
            for way in rounds(args.pairs, list(paths), lambda way, n=clients: f"{n} clients, {way}"):
                used = device if way == STREAM else None
                found = block(way, paths[way], clients, args.seconds, device=used, program=PROGRAM)
                runs.add(f"{clients} clients: {way}", found)
    return runs


def _beside(key: str) -> Figure:
    """The ratio to the row in process for the same number of clients."""
    return lambda runs, name: against(f"{name.partition(':')[0]}: {OWN}", key)(runs, name)


SENTENCES = Question(
    __doc__,
    run,
    {
        "tokens/s": interval("rate"),
        "x in process": times(_beside("rate")),
        "CPU ms": interval("cpu"),
        "MiB": interval("memory"),
        "MiB x in process": times(_beside("memory")),
    },
    options={
        "--clients": {"nargs": "+", "type": int, "default": [1, 8], "metavar": "N"},
        "--seconds": {"type": float, "default": 4.0, "help": "of a round (default 4)"},
        "--file": {"metavar": "FILE", "help": "that examples/language_model.py has written"},
    },
    figures=("rate", "cpu", "memory"),
    bars=("rate", "1/s"),
    group=lambda name: name.partition(":")[0],
    label=lambda name: name.partition(": ")[2],
    kept=("clients", "seconds"),
    is_pinned=False,
)

if __name__ == "__main__":
    SENTENCES.answer()
