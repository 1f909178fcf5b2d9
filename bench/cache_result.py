"""One fresh process that compiles a model and runs it once; prints what each stage took as JSON, in nanoseconds.

    python cache_result.py MODEL DEVICE FOLDER

MODEL is a name out of cache.MODELS, FOLDER a cache folder or "none".
"""

import json
import sys
import time

import driver


def main() -> None:
    """Measures, then prints."""
    from cache import MODELS
    from models import feeds_of

    name, device, folder = sys.argv[1:]
    model = MODELS[name]()
    feeds = feeds_of(model)
    begin = time.monotonic_ns()
    compiled = driver.compile(model, [device], cache_dir=None if folder == "none" else folder)
    ready = time.monotonic_ns()
    burst = compiled.burst()
    opened = time.monotonic_ns()
    outputs = burst.run(*feeds).outputs
    done = time.monotonic_ns()
    stages = {"compile": ready - begin, "burst": opened - ready, "first run": done - opened}
    (step,) = compiled.stats()["compilations"]
    print(json.dumps({"stages": stages, "outcome": step["outcome"], "sum": float(outputs[0].sum(dtype=float))}))


if __name__ == "__main__":
    main()
