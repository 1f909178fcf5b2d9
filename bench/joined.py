"""What do joined runs give several programs with one model, beside a session of each program's own?

    python bench/joined.py [--clients 1 8 16] [--pairs 9] [--seconds 2] [--embedding FILE] [--json FILE]

Each client is a process that asks without a pause, for --seconds after a warm-up. A small network, fully connected,
with 32 MB of weights, one row a request; and the text embedding FILE, with texts of 16 to 128 tokens that are the same
in all ways. In process: an ONNX Runtime session of one thread in each client. Apart: one device, without `batch`.
Joined: the same with `batch`. CPU: of all processes, the device's, too, for one answer. A figure is of all clients of a
round; p99 that of the median client. The first row of a client count is what ratios are of.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from measure import Runs, rounds, scratch, shared_memory
from own_device import own_device
from question import Question, against, interval, times

if TYPE_CHECKING:
    import argparse

    from question import Figure

    import driver

OWN, APART, JOINED = "in process", "apart", "joined"
WAYS = (OWN, APART, JOINED)
_SIDE, _LAYERS = 1024, 8
PROGRAM = """
import json, os, random, sys, time
import numpy as np

way, path, number, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
lengths, texts = random.Random(number), np.random.default_rng(number)

def text(names):
    length = lengths.randint(16, 128)
    values = {"attention_mask": np.ones((1, length), np.int64), "token_type_ids": np.zeros((1, length), np.int64)}
    words = texts.integers(1000, 20000, (1, length))
    return [values.get(name, words) for name in names]

def feeds(names):
    is_text = "input_ids" in names
    return [text(names) if is_text else [texts.standard_normal((1, 1024)).astype(np.float32)] for _ in range(32)]

if way == "in process":
    import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    ask = lambda feed: session.run(None, dict(zip(names, feed)))
else:
    import driver
    model = driver.load(path)
    names = [tensor.name for tensor in model.inputs]
    mask = "attention_mask" if "attention_mask" in names else None
    batch = driver.Batch(rows=32, mask=mask) if way == "joined" else None
    prepared = driver.connect("onnxruntime").prepare(model, batch=batch)
    burst = prepared.burst(input_shapes=[(1, 128 if mask else 1024)] * len(names))
    ask = lambda feed: burst.run(*feed)

given = feeds(names)
for feed in given:
    ask(feed)
print(flush=True)
input()
began, taken, count = os.times(), [], 0
end = time.monotonic() + seconds
while (begin := time.monotonic()) < end:
    ask(given[count % len(given)])
    taken.append(time.monotonic() - begin)
    count += 1
used = sum(os.times()[:2]) - sum(began[:2])
print(json.dumps([count, used, float(np.percentile(taken, 99)) * 1000]), flush=True)
input()
"""


def connected() -> bytes:
    """The small network, of matrices that are as large as possible for what they compute."""
    from onnx import TensorProto, helper, numpy_helper

    random, nodes, last = np.random.default_rng(1), [], "x"
    weights = [random.standard_normal((_SIDE, _SIDE)).astype(np.float32) / 32 for _ in range(_LAYERS)]
    for n in range(_LAYERS):
        nodes.append(helper.make_node("MatMul", [last, f"w{n}"], [f"m{n}"]))
        nodes.append(helper.make_node("Tanh", [f"m{n}"], [last := "y" if n == _LAYERS - 1 else f"t{n}"]))
    sides = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", _SIDE])] for name in "xy"]
    graph = helper.make_graph(
        nodes, "main", *sides, [numpy_helper.from_array(w, f"w{n}") for n, w in enumerate(weights)]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8).SerializeToString()


def _used(pid: int) -> float:
    """The processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def block(
    way: str, path: str, clients: int, seconds: float, *, device: driver.RemoteDevice | None, program: str = PROGRAM
) -> dict[str, Any]:
    """One round of one way: clients that begin together. `device`: the one that they use; None: none."""
    with ExitStack() as stack:
        programs = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", program, way, path, str(n), str(seconds)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for n in range(clients)
        ]
        pipes = [(program.stdin, program.stdout) for program in programs]
        for _, out in pipes:
            assert out
            out.readline()
        began, engine = time.monotonic(), [device.service_pid, device.engine_pid] if device else []
        used = sum(map(_used, engine))
        for line, _ in pipes:
            assert line
            line.write("\n")
            line.flush()
        found = [json.loads(out.readline()) for _, out in pipes if out]
        took, used = time.monotonic() - began, sum(map(_used, engine)) - used
        memory = shared_memory([*(program.pid for program in programs), *engine])
        for line, _ in pipes:
            assert line
            line.write("\n")
            line.flush()
    counts, own, late = (np.array(each) for each in zip(*found, strict=True))
    cpu = 1000 * (own.sum() + used) / counts.sum()
    return {"rate": counts.sum() / took, "cpu": cpu, "p99": float(np.median(late)), "memory": memory}


def run(args: argparse.Namespace) -> Runs:
    """All rounds of one model and number of clients after the other: each way once a round."""
    runs = Runs()
    with scratch() as folder, own_device("onnxruntime") as device:
        (folder / "connected.onnx").write_bytes(connected())
        files = {
            "connected": str(folder / "connected.onnx"),
            **({"embedding": args.embedding} if args.embedding else {}),
        }
        for kind, path in files.items():
            for clients in args.clients:
                for way in rounds(args.pairs, WAYS, lambda way, kind=kind, n=clients: f"{kind}, {n} clients, {way}"):
                    used = None if way == OWN else device
                    runs.add(f"{kind}, {clients}: {way}", block(way, path, clients, args.seconds, device=used))
    return runs


def _beside(way: str, key: str) -> Figure:
    """The ratio to the row of that way for the same model and number of clients."""
    return lambda runs, name: against(f"{name.partition(':')[0]}: {way}", key)(runs, name)


JOINED_RUNS = Question(
    __doc__,
    run,
    {
        "answers/s": interval("rate"),
        "x in process": times(_beside(OWN, "rate")),
        "x apart": times(_beside(APART, "rate")),
        "CPU ms": interval("cpu"),
        "CPU x in process": times(_beside(OWN, "cpu")),
        "p99 ms": interval("p99"),
        "MiB": interval("memory"),
    },
    options={
        "--clients": {"nargs": "+", "type": int, "default": [1, 8, 16], "metavar": "N"},
        "--seconds": {"type": float, "default": 2.0, "help": "of a round (default 2)"},
        "--embedding": {"metavar": "FILE", "help": "of a text embedding, with input_ids and attention_mask"},
    },
    figures=("rate", "cpu", "p99", "memory"),
    bars=("rate", "1/s"),
    group=lambda name: name.partition(":")[0],
    label=lambda name: name.partition(": ")[2],
    kept=("clients", "seconds"),
    is_pinned=False,
)

if __name__ == "__main__":
    JOINED_RUNS.answer()
