"""One fresh process from a model's file to its results; prints what each stage took as JSON, in nanoseconds.

    python first_result.py FILE DEVICE BEGAN

BEGAN is CLOCK_MONOTONIC when this process was started, in nanoseconds: what passes until the first line is Python's.
"""

import sys
import time


def main() -> None:
    """Measures, then prints."""
    path, name, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
    stages = {}

    def done(stage: str) -> None:
        nonlocal last
        now = time.monotonic_ns()
        stages[stage], last = now - last, now

    done("python")
    import driver

    done("import")
    model = driver.load(path, form="file" if name == "litert" else "operations")
    done("load")
    device = driver.connect(name)
    done("connect")
    prepared = device.prepare(model)
    done("prepare")
    burst = prepared.burst()
    done("burst")
    first = burst.run().outputs[0].copy()
    done("first run")
    second = burst.run().outputs[0]
    done("second run")
    import json

    print(json.dumps({"stages": stages, "service": device.service_pid, "is_same": bool((first == second).all())}))


if __name__ == "__main__":
    main()
