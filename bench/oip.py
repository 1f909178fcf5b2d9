"""What does the Open Inference Protocol cost in front of a burst: with shared memory, inline, and for many clients?

    python bench/oip.py [--clients 32] [--calls 200] [--seconds 4] [--pairs 9] [--only latency small] [--json FILE]

tritonclient, as it comes from PyPI, asks over gRPC on a Unix socket. One client: `burst serve onnxruntime --oip` beside
an empty servicer, which decodes the same requests by the same protobufs, and answers as many bytes without a model; and
beside a burst on the same model in this process. ADD of 4 floats, and a corner of a frame of 24.9 MB, each with inputs
and outputs in shared memory and, the frame, inline, too. Small: eight clients of nghttp2's `h2load`, each with one
ADD in shared memory at a time, if it is installed. Many clients: MobileNetV1, beside a server of the same gRPC
library that calls ONNX Runtime itself, one intra-op thread, two executions at a time.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import numpy as np
import onnx
import tritonclient.grpc as triton
from measure import Budget, progress, server_process, spell
from models import layers
from onnx import TensorProto, helper, numpy_helper
from question import Finding, Inquiry
from tritonclient.utils import shared_memory

import driver
from driver.cli.timing import Estimate, estimate, order_of_round, time_calls
from driver.gateways.oip import messages

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

OURS, EMPTY, ORT = "burst serve --oip", "empty servicer", "ONNX Runtime in a gRPC server"
FRAME = (1, 2160, 3840, 3)
IMAGE = (1, 3, 224, 224)
BUDGET_US = 50.0
PARTS = ("latency", "small", "clients")
HEAD = ("what", "us, or as said", "beside")
LIMITS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_ANSWERS = {"add": ("sum", [1, 4], "FP32", 16), "frame": ("corner", [1, 1, 1, 3], "UINT8", 3)}


# ---- models


def _save(path: Path, nodes: list[Any], inputs: dict[str, Any], outputs: dict[str, Any], weights: list[Any]) -> None:
    sides = [[helper.make_tensor_value_info(n, *t) for n, t in side.items()] for side in (inputs, outputs)]
    graph = helper.make_graph(nodes, "graph", *sides, initializer=weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def write_models(folder: Path) -> None:
    """ADD, the corner of a frame, and MobileNetV1 1.0."""
    four = (TensorProto.FLOAT, (1, 4))
    _save(
        folder / "add.onnx", [helper.make_node("Add", ["x", "y"], ["sum"])], {"x": four, "y": four}, {"sum": four}, []
    )
    bounds = {"begin": [0, 0, 0], "end": [1, 1, 1], "axes": [0, 1, 2]}
    weights = [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in bounds.items()]
    corner = [helper.make_node("Slice", ["x", *bounds], ["corner"])]
    sides = {"x": (TensorProto.UINT8, FRAME)}, {"corner": (TensorProto.UINT8, (1, 1, 1, 3))}
    _save(folder / "frame.onnx", corner, *sides, weights)
    _write_mobilenet(folder / "mobilenet.onnx")


def _write_mobilenet(path: Path) -> None:
    nodes, weights, x = [], [], "image"
    *body, last = layers()
    for n, layer in enumerate(body):
        shape = (3, 0, 1, 2) if layer.depthwise else (0, 3, 1, 2)
        weights.append(numpy_helper.from_array(np.ascontiguousarray(layer.weights.transpose(shape)), f"w{n}"))
        weights.append(numpy_helper.from_array(layer.bias, f"b{n}"))
        group, size = layer.bias.size if layer.depthwise else 1, layer.weights.shape[1]
        pads = [0, 0, 1, 1] if layer.stride == 2 else [size // 2] * 4
        options = {"strides": [layer.stride] * 2, "pads": pads, "group": group}
        nodes.append(helper.make_node("Conv", [x, f"w{n}", f"b{n}"], [f"c{n}"], **options))
        nodes.append(helper.make_node("Relu", [f"c{n}"], [x := f"r{n}"]))
    weights += [
        numpy_helper.from_array(last.weights[:, 0, 0, :].T.copy(), "w"),
        numpy_helper.from_array(last.bias, "b"),
    ]
    nodes.append(helper.make_node("GlobalAveragePool", [x], ["pooled"]))
    nodes.append(helper.make_node("Flatten", ["pooled"], ["flat"]))
    nodes.append(helper.make_node("Gemm", ["flat", "w", "b"], ["logits"]))
    nodes.append(helper.make_node("Softmax", ["logits"], ["classes"]))
    sides = {"image": (TensorProto.FLOAT, IMAGE)}, {"classes": (TensorProto.FLOAT, (1, last.bias.size))}
    _save(path, nodes, *sides, weights)


# ---- servers


def _answer(request: Any) -> Any:
    """What our server would answer, without a model."""
    name, shape, datatype, nbytes = _ANSWERS[request.model_name]
    answer = messages.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
    output = answer.outputs.add(name=name, datatype=datatype, shape=shape)
    if request.outputs and "shared_memory_region" in request.outputs[0].parameters:
        for key, value in request.outputs[0].parameters.items():
            output.parameters[key].CopyFrom(value)
    else:
        answer.raw_output_contents.append(bytes(nbytes))
    return answer


def _ort_answer(folder: Path) -> Callable[[Any], Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    path = str(folder / "mobilenet.onnx")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    turns = threading.BoundedSemaphore(2)

    def answer(request: Any) -> Any:
        image = np.frombuffer(request.raw_input_contents[0], np.float32).reshape(tuple(request.inputs[0].shape))
        with turns:
            (found,) = session.run(None, {"image": image})
        answer = messages.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
        answer.outputs.add(name="classes", datatype="FP32", shape=found.shape)
        answer.raw_output_contents.append(found.tobytes())
        return answer

    return answer


def serve_peer(kind: str, folder: Path, path: str) -> None:
    """Until standard input ends."""
    answer = _answer if kind == EMPTY else _ort_answer(folder)
    decode, encode = messages.ModelInferRequest.FromString, messages.ModelInferResponse.SerializeToString
    method = grpc.unary_unary_rpc_method_handler(lambda request, _: answer(request), decode, encode)
    server = grpc.server(ThreadPoolExecutor(65), options=LIMITS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(messages.SERVICE, {"ModelInfer": method}),))
    server.add_insecure_port(f"unix:{path}")
    server.start()
    print("ready", flush=True)
    sys.stdin.read()
    server.stop(None).wait()


@contextmanager
def server(kind: str, folder: Path) -> Iterator[str]:
    """A server process of that kind; its address."""
    path = str(folder.parent / f"{kind.split(maxsplit=1)[0]}.sock")
    ours = [
        sys.executable,
        "-m",
        "driver.cli",
        "serve",
        "onnxruntime",
        "--oip",
        f"unix:{path}",
        "--models",
        str(folder),
    ]
    command = ours if kind == OURS else [sys.executable, __file__, "--server", kind, str(folder), path]
    with server_process(command):
        yield f"unix:{path}"


# ---- one client


class Memory:
    """Shared memory of a client's: its arrays one after the other, and room for the output."""

    def __init__(self, name: str, inputs: dict[str, np.ndarray[Any, Any]], room: int) -> None:
        self.name, self.inputs, self.room = name, inputs, room
        self.nbytes = sum(array.nbytes for array in inputs.values()) + room
        self.key = f"/burst-bench-{os.getpid()}-{name}"
        self.handle = shared_memory.create_shared_memory_region(name, self.key, self.nbytes)
        shared_memory.set_shared_memory_region(self.handle, list(inputs.values()))

    def _placed(self) -> Iterator[tuple[str, np.ndarray[Any, Any], int]]:
        """Each input, and where it lies; the output is behind them."""
        offset = 0
        for name, array in self.inputs.items():
            yield name, array, offset
            offset += array.nbytes

    def request(self) -> tuple[list[Any], list[Any]]:
        """Inputs and outputs of a request in this memory."""
        inputs = []
        for name, array, offset in self._placed():
            inputs.append(triton.InferInput(name, list(array.shape), _datatype(array)))
            inputs[-1].set_shared_memory(self.name, array.nbytes, offset=offset)
        output = triton.InferRequestedOutput(_ANSWERS[self.name][0])
        output.set_shared_memory(self.name, self.room, offset=self.nbytes - self.room)
        return inputs, [output]

    def message(self) -> Any:
        """The same request as a protobuf."""
        found = messages.ModelInferRequest(model_name=self.name)
        for name, array, offset in self._placed():
            tensor = found.inputs.add(name=name, datatype=_datatype(array), shape=array.shape)
            self._place(tensor.parameters, array.nbytes, offset)
        output = found.outputs.add(name=_ANSWERS[self.name][0])
        self._place(output.parameters, self.room, self.nbytes - self.room)
        return found

    def _place(self, parameters: Any, nbytes: int, offset: int) -> None:
        parameters["shared_memory_region"].string_param = self.name
        parameters["shared_memory_byte_size"].int64_param = nbytes
        parameters["shared_memory_offset"].int64_param = offset

    def close(self) -> None:
        shared_memory.destroy_shared_memory_region(self.handle)


def _datatype(array: np.ndarray[Any, Any]) -> str:
    return "FP32" if array.dtype == np.float32 else "UINT8"


def inline(inputs: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
    """The same inputs in the message."""
    found = []
    for name, array in inputs.items():
        found.append(triton.InferInput(name, list(array.shape), _datatype(array)))
        found[-1].set_data_from_numpy(array)
    return found


class LatencyRounds(NamedTuple):
    """Microseconds of the median of each round, by subject."""

    seconds: dict[str, list[float]]

    def difference(self, name: str, *others: str) -> Estimate:
        return estimate(np.array(self.seconds[name]) - sum(np.array(self.seconds[other]) for other in others))

    def ratio(self, name: str, other: str) -> Estimate:
        return estimate(np.divide(self.seconds[name], self.seconds[other]))


def latency(args: argparse.Namespace, folder: Path) -> LatencyRounds:
    """In rounds, each subject once."""
    four = np.arange(4, dtype=np.float32).reshape(1, 4)
    given = {"add": {"x": four, "y": four}, "frame": {"x": np.ones(FRAME, np.uint8)}}
    with ExitStack() as stack:
        calls: dict[str, tuple[Callable[[], object], int]] = {}
        urls = {kind: stack.enter_context(server(kind, folder)) for kind in (OURS, EMPTY)}
        clients = {kind: triton.InferenceServerClient(url) for kind, url in urls.items()}
        for model, inputs in given.items():
            memory = Memory(model, inputs, _ANSWERS[model][3])
            stack.callback(memory.close)
            clients[OURS].register_system_shared_memory(model, memory.key, memory.nbytes)
            for kind, client in clients.items():
                its, outputs = memory.request()

                def call(client: Any = client, model: str = model, its: Any = its, outputs: Any = outputs) -> object:
                    return client.infer(model, its, outputs=outputs)

                calls[f"{model}: {kind}, shared memory"] = call, args.calls
                held = inline(inputs)

                def send(client: Any = client, model: str = model, held: Any = held) -> object:
                    return client.infer(model, held)

                calls[f"{model}: {kind}, inline"] = send, args.calls if model == "add" else 3
            compiled = stack.enter_context(driver.compile(driver.load(folder / f"{model}.onnx"), device="onnxruntime"))
            burst = stack.enter_context(compiled.burst())
            burst.run(**inputs)
            calls[f"{model}: burst"] = burst.run, args.calls
        found: dict[str, list[float]] = {name: [] for name in calls}
        for call, _ in calls.values():
            time_calls(call, 3)
        for number in range(args.pairs):
            progress("one client", f"round {number + 1} of {args.pairs}")
            for name in order_of_round(list(calls), number):
                found[name].append(float(np.median(time_calls(*calls[name]))) / 1e3)
    progress("")
    return LatencyRounds(found)


# ---- eight clients on a small model

SMALL_CLIENTS, SMALL_RATE = 8, 5000.0


def small(args: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Requests a second of each round."""
    four, found = np.arange(4, dtype=np.float32).reshape(1, 4), {OURS: list[float](), EMPTY: list[float]()}
    packet = folder.parent / "request"
    with ExitStack() as stack:
        memory = Memory("add", {"x": four, "y": four}, _ANSWERS["add"][3])
        stack.callback(memory.close)
        urls = {kind: stack.enter_context(server(kind, folder)) for kind in found}
        client = triton.InferenceServerClient(urls[OURS])
        client.register_system_shared_memory("add", memory.key, memory.nbytes)
        body = memory.message().SerializeToString()
        packet.write_bytes(b"\0" + len(body).to_bytes(4, "big") + body)
        for number in range(-1, args.pairs):  # a first round warms up
            progress("eight clients", f"round {number + 1} of {args.pairs}")
            for kind in order_of_round(list(found), number):
                before = _answered(client)
                rate = loaded(urls[kind].removeprefix("unix:"), packet, args.seconds)
                if kind == OURS and _answered(client) - before < rate * args.seconds * 0.99:
                    sys.exit("bench: some of the requests were refused")
                if number >= 0:
                    found[kind].append(rate)
    progress("")
    return found


def _answered(client: Any) -> int:
    return int(client.get_inference_statistics("add").model_stats[0].inference_stats.success.count)


def loaded(path: str, packet: Path, seconds: float) -> float:
    """Requests a second that a server on a Unix socket answers to clients that ask again when they have an answer."""
    clients = ("-c", str(SMALL_CLIENTS), "-m", "1", "-D", str(max(1, round(seconds))))
    headers = ("-H", "content-type: application/grpc", "-H", "te: trailers")
    target = ("-d", str(packet), "-B", f"unix:{path}", f"http://localhost/{messages.SERVICE}/ModelInfer")
    done = subprocess.run(["h2load", *clients, *headers, *target], capture_output=True, text=True, check=True)
    found = re.search(r"finished in .*?, ([\d.]+) req/s", done.stdout)
    failed = re.search(r"(\d+) failed, (\d+) errored", done.stdout)
    if not (found and failed) or failed.groups() != ("0", "0"):
        sys.exit(f"bench: h2load says {done.stdout}")
    return float(found[1])


def _of_small(found: dict[str, list[float]]) -> tuple[list[tuple[str, ...]], list[Budget]]:
    lines = [
        (f"add, {SMALL_CLIENTS} clients: {kind}", f"{np.median(its):.0f} requests/s", "") for kind, its in found.items()
    ]
    rate = estimate(np.array(found[OURS]))
    return lines, [Budget(f"{SMALL_CLIENTS} clients on a small model", rate, SMALL_RATE, " requests/s", at_least=True)]


# ---- many clients


def many(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Requests a second and milliseconds, of each server and round."""
    found = {kind: {"rate": [], "p50": [], "p99": []} for kind in (OURS, ORT)}
    image = {"image": np.random.default_rng(1).random(IMAGE, np.float32)}
    with ExitStack() as stack:
        urls = {kind: stack.enter_context(server(kind, folder)) for kind in found}
        for url in urls.values():
            ask(url, image, args.clients, args.seconds / 4)
        for number in range(args.pairs):
            progress("many clients", f"round {number + 1} of {args.pairs}")
            for kind in order_of_round(list(found), number):
                took = ask(urls[kind], image, args.clients, args.seconds)
                found[kind]["rate"].append(took.size / args.seconds)
                found[kind]["p50"].append(float(np.median(took)) * 1e3)
                found[kind]["p99"].append(float(np.percentile(took, 99)) * 1e3)
    progress("")
    return found


def ask(url: str, inputs: dict[str, Any], clients: int, seconds: float) -> np.ndarray[Any, Any]:
    """Seconds of each answer to so many clients, each of which asks again when it has one."""
    took: list[float] = []
    end = time.monotonic() + seconds

    def ask_on() -> None:
        with triton.InferenceServerClient(url) as client:
            its = inline(inputs)
            while (begin := time.monotonic()) < end:
                client.infer("mobilenet", its)
                took.append(time.monotonic() - begin)

    threads = [threading.Thread(target=ask_on) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return np.array(took)


def _of_one(rounds: LatencyRounds) -> tuple[list[tuple[str, ...]], list[Budget]]:
    lines = [(name, f"{np.median(values):.4g}", "") for name, values in rounds.seconds.items()]
    budgets = []
    for model in ("add", "frame"):
        more = rounds.difference(
            f"{model}: {OURS}, shared memory", f"{model}: {EMPTY}, shared memory", f"{model}: burst"
        )
        lines.append((f"{model}: over the empty servicer and the burst", spell(more), ""))
        budgets.append(Budget(f"{model}: <= empty servicer + burst + {BUDGET_US:g} us", more, BUDGET_US))
    times = rounds.ratio(f"frame: {OURS}, inline", f"frame: {OURS}, shared memory")
    budgets.append(Budget("24.9 MB in shared memory: >= 100 x as fast as inline", times, 100, at_least=True))
    return lines, budgets


def _of_many(found: dict[str, dict[str, list[float]]]) -> tuple[list[tuple[str, ...]], list[Budget]]:
    lines = []
    for kind, row in found.items():
        rate, p50, p99 = (f"{np.median(row[key]):.4g}" for key in ("rate", "p50", "p99"))
        lines.append((f"MobileNet, many clients: {kind}", f"{rate} requests/s", f"p50 {p50} ms, p99 {p99} ms"))
    of = {key: estimate(np.divide(found[OURS][key], found[ORT][key])) for key in ("rate", "p99")}
    budgets = [
        Budget("many clients: >= 1.0 x the requests a second of ONNX Runtime", of["rate"], 1.0, at_least=True),
        Budget("many clients: p99 <= that of ONNX Runtime", of["p99"], 1.0),
    ]
    return lines, budgets


def find(args: argparse.Namespace) -> Finding:
    """What `--only` names."""
    lines: list[tuple[str, ...]] = []
    budgets: list[Budget] = []
    raw: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="burst-bench-") as place:
        os.environ["BURST_RUNTIME_DIR"] = place  # a device of the script's own
        folder = Path(place) / "models"
        folder.mkdir()
        write_models(folder)
        if "latency" in args.only:
            rounds = latency(args, folder)
            raw["latency_us"] = rounds.seconds
            lines, budgets = _of_one(rounds)
        if "small" in args.only and shutil.which("h2load"):
            raw["small"] = small(args, folder)
            more = _of_small(raw["small"])
            lines, budgets = lines + more[0], budgets + more[1]
        if "clients" in args.only:
            raw["clients"] = many(args, folder)
            more = _of_many(raw["clients"])
            lines, budgets = lines + more[0], budgets + more[1]
    return Finding(lines, budgets, raw, HEAD)


def settle(args: argparse.Namespace) -> None:
    """Short blocks for --quick."""
    if args.quick:
        args.calls, args.seconds = 20, 0.5


OIP = Inquiry(
    __doc__,
    find,
    options={
        "--clients": {"type": int, "default": 32},
        "--calls": {"type": int, "default": 200, "help": "of a block"},
        "--seconds": {"type": float, "default": 4.0, "help": "of a block of many clients"},
        "--only": {"nargs": "+", "choices": PARTS, "default": PARTS},
    },
    settle=settle,
)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--server"]:
        serve_peer(sys.argv[2], Path(sys.argv[3]), sys.argv[4])
    else:
        OIP.answer()
