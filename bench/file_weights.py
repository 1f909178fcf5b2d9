"""What do the weights of one .onnx file cost the device, for one program that opens it and for eight?

    python bench/file_weights.py [--clients N …] [--json FILE]

Three files of one operator with a constant, and the largest element of what it gives. ONNX Runtime treats these
constants differently: Add reads it where it lies, MatMul and Conv pack it anew. Each client is a process that compiles
the file and runs it once. What counts is what the device's two processes have in memory beyond what they had before,
pages in proportion to who shares them.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from measure import conditions
from memory import MOST, device_bytes
from onnx import TensorProto, helper, numpy_helper
from own_device import own_device
from verdict import Budget, Report, arguments, parse, progress, publish

import driver
from driver.cli.timing import estimate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

QUESTION = "What do the weights of one .onnx file cost, for programs that share it?"
MEGABYTES = 32
NETS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {  # operator: shapes of the input, of the weights
    "Add": ((1, 1024), (MEGABYTES << 8, 1024)),
    "MatMul": ((1, 4096), (4096, MEGABYTES << 6)),
    "Conv": ((1, 1024, 4, 4), (MEGABYTES << 5, 1024, 3, 3)),
}


def written(operator: str, folder: Path) -> Path:
    """The file of such a net."""
    shape, weights = NETS[operator]
    values = np.random.default_rng(1).standard_normal(weights).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node(operator, ["x", "w"], ["all"]), helper.make_node("ReduceMax", ["all"], ["y"], keepdims=0)],
        operator,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [])],
        [numpy_helper.from_array(values, "w")],
    )
    path = folder / f"{operator}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def _client(path: Path, ready: Any, end: Any) -> None:
    with driver.compile(driver.load(path), ["onnxruntime"]) as compiled:
        compiled.run(np.ones(NETS[path.stem][0], np.float32))
        ready.set()
        end.wait()


def resident(path: Path, clients: int) -> float:
    """Megabytes of the device beyond what it has without a client."""
    context = multiprocessing.get_context("spawn")
    with own_device("onnxruntime") as device:
        before, end, processes = device_bytes(device), context.Event(), []
        for _ in range(clients):
            ready = context.Event()
            processes.append(context.Process(target=_client, args=(path, ready, end)))
            processes[-1].start()
            ready.wait()
        found = (device_bytes(device) - before) / 2**20
        end.set()
        for process in processes:
            process.join()
    return found


def measured(clients: Sequence[int], rounds: int) -> dict[str, dict[int, list[float]]]:
    """Megabytes by operator and number of clients, once a round."""
    found: dict[str, dict[int, list[float]]] = {name: {count: [] for count in clients} for name in NETS}
    with tempfile.TemporaryDirectory() as folder:
        paths = [written(name, Path(folder)) for name in NETS]
        for number in range(rounds):
            for path in paths:
                for count in clients:
                    progress(f"round {number + 1}", f"{path.stem}, {count} clients")
                    found[path.stem][count].append(resident(path, count))
    progress("")
    return found


def options() -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__)
    parser.add_argument("--clients", nargs=2, type=int, default=[1, 8], help="that open the file")
    return parse(parser)


def main() -> None:
    """Measures, prints, writes."""
    args = options()
    found = measured(args.clients, 1 if args.quick else 3)
    few, many = args.clients
    shares = {name: [b / a for a, b in zip(*each.values(), strict=True)] for name, each in found.items()}
    told = [Budget(f"{name}: {many} clients <= {MOST} x {few}", estimate(each), MOST) for name, each in shares.items()]
    head = ("operator, weights", *(f"MB of the device, {count} clients" for count in args.clients))
    rows = [
        (f"{name}, {np.prod(NETS[name][1]) >> 18} MB", *(f"{np.median(values):.0f}" for values in each.values()))
        for name, each in found.items()
    ]
    publish(args, Report(QUESTION, conditions(), rows, told, {"resident": found}, head))


if __name__ == "__main__":
    main()
