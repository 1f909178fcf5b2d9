"""One fresh process that compiles a model and runs it once; prints what each stage took as JSON, in nanoseconds.

    python cache_result.py MODEL DEVICE FOLDER

MODEL is a name out of cache.MODELS, or a model file; FOLDER a cache folder or "none". DEVICE "own": the file in the
runtime that it was made for, in this process.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import driver

if TYPE_CHECKING:
    from collections.abc import Callable

Stages = dict[str, int]


def compiled(load: Callable[[], driver.Model], inputs: Any, device: str, folder: str) -> tuple[Stages, str, Any]:
    """Stages, what came of the cache, and the outputs."""
    driver.compile, driver.connect, driver.load  # noqa: B018 (they are imported when they are first asked for)
    begin = time.monotonic_ns()
    model = load()
    loaded = time.monotonic_ns()
    found = driver.compile(model, [device], cache_dir=None if folder == "none" else folder)
    ready = time.monotonic_ns()
    burst = found.burst()
    opened = time.monotonic_ns()
    outputs = burst.run(inputs).outputs if isinstance(inputs, dict) else burst.run(*inputs).outputs
    done = time.monotonic_ns()
    (step,) = found.stats()["compilations"]
    stages = {"load": loaded - begin, "compile": ready - loaded, "burst": opened - ready, "first run": done - opened}
    return stages, step["outcome"], outputs


def own(path: Path, inputs: dict[str, Any]) -> tuple[Stages, str, Any]:
    """The same in the file's own runtime; importing it is not counted."""
    from corpus import own_runtime

    __import__("onnxruntime" if path.suffix == ".onnx" else "ai_edge_litert.interpreter")
    begin = time.monotonic_ns()
    run = own_runtime(path, inputs)
    loaded = time.monotonic_ns()
    outputs = run(inputs)
    return {"load": loaded - begin, "first run": time.monotonic_ns() - loaded}, "own", outputs


def main() -> None:
    """Measures, then prints."""
    from cold_start import MODELS
    from corpus import random_inputs, shapes_for
    from models import feeds_of

    name, device, folder = sys.argv[1:]
    if name in MODELS:
        model = MODELS[name]()
        stages, outcome, outputs = compiled(lambda: model, feeds_of(model), device, folder)
        del stages["load"]
    else:
        path = Path(name)
        model = driver.load(path)
        inputs = random_inputs(model, shapes_for(path, model))
        del model  # what follows loads it anew
        if device == "own":
            stages, outcome, outputs = own(path, inputs)
        else:
            stages, outcome, outputs = compiled(lambda: driver.load(path), inputs, device, folder)
    print(json.dumps({"stages": stages, "outcome": outcome, "sum": float(outputs[0].sum(dtype=float))}))


if __name__ == "__main__":
    main()
