"""The first use of devices by a program, step by step, in whatever place it runs. `test_places.py` starts it.

    python first_use.py ANSWERS PREPARATION STEP,STEP…

Runs the Python code PREPARATION, which may take away what programs usually have, then each step, and appends one line
of JSON for each to the file ANSWERS: the step, and null, or the error's module, name, text and traceback.
"""

import json
import os
import sys
import traceback

answers = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def model():
    """Adds one to four numbers."""
    import numpy as np

    import driver

    m = driver.ModelBuilder()
    m.output(m.operation("ADD", m.input("float32", (4,)), np.ones(4, np.float32), 0))
    return m.build()


def devices():
    """Asks which devices there are."""
    import driver

    assert "reference" in {found.name for found in driver.devices()}


def run(**options):
    """Compiles a model, and runs it once, and in a burst."""
    import driver

    with driver.compile(model(), **options) as compiled:
        assert compiled.run([0, 1, 2, 3])[0].tolist() == [1, 2, 3, 4]
        with compiled.burst() as burst:
            assert burst.run([1, 2, 3, 4], timeout=60).outputs[0].tolist() == [2, 3, 4, 5]


def command(*words):
    """The command-line tool, to its end."""
    from driver.cli.entry import main

    sys.argv = ["burst", *words]
    try:
        main()
    except SystemExit as end:
        assert end.code in {None, 0, 1}, end.code  # noqa: PT017 (this is no test, but its subject)


STEPS = {
    "devices": devices,
    "reference": lambda: run(devices=["reference"]),
    "onnxruntime": lambda: run(devices=["onnxruntime"]),
    "default": run,
    "burst devices": lambda: command("devices"),
    "burst doctor": lambda: command("doctor"),
}


def tell(step, error):
    """Appends a line."""
    words = error and [
        type(error).__module__,
        type(error).__name__,
        str(error),
        "".join(traceback.format_exception(error)),
    ]
    os.write(answers, (json.dumps([step, words]) + "\n").encode())


def main():
    """All steps, whatever becomes of one."""
    for name in sys.argv[3].split(","):
        try:
            STEPS[name]()
        except BaseException as error:  # noqa: BLE001 (the test looks at it)
            tell(name, error)
        else:
            tell(name, None)


if __name__ == "__main__":
    exec(sys.argv[2])
    main()
