"""What does loading a model file take in file form, beside the runtime that the file was made for?

    python bench/load.py [FILE ...] [--pairs 31] [--json FILE]

Each round loads the file with `driver.load(file, form="file")` and in its own runtime, in turns: ONNX Runtime makes a
session with one thread; LiteRT makes an interpreter and allocates its tensors, which is when it packs the weights. The
ratio is ours over theirs: the median of the pairs, and its 95 % interval. The budget is 1.5 for files of 12 MB or more.
Without a FILE: MobileNetV1 of 17 MB, written as .tflite.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from litert import written
from measure import conditions
from models import mobilenet

import driver
from driver.cli.timing import estimate

if TYPE_CHECKING:
    from collections.abc import Callable

BUDGET, LARGE = 1.5, 12_000_000


def own(path: Path) -> Callable[[], object]:
    """Loads the file in the runtime that it was made for, until it could run."""
    if path.suffix == ".onnx":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        return lambda: onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    from ai_edge_litert.interpreter import Interpreter

    def load() -> object:
        interpreter = Interpreter(str(path), num_threads=1)
        interpreter.allocate_tensors()
        return interpreter

    return load


def milliseconds(call: Callable[[], object]) -> float:
    """What a call takes; what it returns is dropped after the clock has stopped."""
    begin = time.perf_counter()
    found = call()
    took = 1e3 * (time.perf_counter() - begin)
    del found
    return took


def row(path: Path, pairs: int) -> dict[str, object]:
    """The medians of both sides, and the ratio."""
    calls = own(path), lambda: driver.load(path, form="file")
    for call in calls:
        call()
    found = []
    for number in range(pairs):
        order = (0, 1) if number % 2 else (1, 0)
        took = {side: milliseconds(calls[side]) for side in order}
        found.append((took[0], took[1]))
    theirs, ours = (float(np.median(side)) for side in zip(*found, strict=True))
    ratio = estimate([b / a for a, b in found])
    return {"bytes": path.stat().st_size, "own_ms": theirs, "file_form_ms": ours, "ratio": ratio._asdict()}


def main() -> None:
    """Measures, and prints a row for each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--pairs", type=int, default=31)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    rows = {}
    print(f"{conditions()}\n{'':44} {'MB':>6} {'own ms':>8} {'load ms':>8} {'ratio':>7}  interval")
    with tempfile.TemporaryDirectory() as folder:
        if not args.files:
            args.files = [Path(folder) / "mobilenet.tflite"]
            args.files[0].write_bytes(written(mobilenet("float32")))
        for path in args.files:
            print(path.name, file=sys.stderr)
            rows[path.name] = found = row(path, args.pairs)
            size, ratio = found["bytes"] / 1e6, found["ratio"]
            missed = "  missed" if found["bytes"] >= LARGE and ratio["median"] > BUDGET else ""
            print(
                f"{path.name[:44]:44} {size:6.1f} {found['own_ms']:8.1f} {found['file_form_ms']:8.1f} "
                f"{ratio['median']:7.3f}  {ratio['low']:.3f} .. {ratio['high']:.3f}{missed}"
            )
    if args.json:
        args.json.write_text(json.dumps({"conditions": conditions(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
