"""What does one execution of ADD on four floats cost a client in C, and what of that is the device's?

    python bench/burst_from_c.py [--pairs N] [--json FILE]

As burst_roundtrip.py: the client is pinned to CPU 0, the devices to CPU 1, and every block stands beside one of the
floor (peers/limit.c). The program in C (peers/libburst_add.c) is linked with libburst as `make install` leaves it. The
native device (native_device.py) has a C function for a model, which a listener calls without Python; "reference" has
the interpreter. The last table says where a round trip's time goes on the native device, by the trace of Python's
burst there: bind and execute are the device's, by its own clock.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from burst_roundtrip import SPIN, add_model, burst_subject, in_process
from measure import (
    ADD,
    HERE,
    Subject,
    c_block,
    compile_c,
    conditions,
    interleave,
    over_floor_in_adds,
    pin_client,
    scratch,
)
from own_device import own_device, pinned
from verdict import Budget, Report, arguments, cells, parse, progress, publish, subject_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from measure import Block

    from driver import RemotePreparedModel

QUESTION = "What does one execution of ADD on four floats cost a client in C?"
IN_C, IN_C_REFERENCE = "from C, native device", "from C, reference"
IN_PYTHON, IN_PYTHON_REFERENCE = "from Python, native device", "from Python, reference"
DEVICES = (("native_device:Native", IN_C, IN_PYTHON), ("reference", IN_C_REFERENCE, IN_PYTHON_REFERENCE))
STAGE_HEAD = ("native device, from Python", "p50 us")
LIBRARY = HERE.parent / "csrc/libburst"


def build(folder: Path) -> Path:
    """The program, and the library that it is linked with."""
    make = ["make", "--silent", "install", f"PREFIX={folder}", f"BUILD={folder / 'build'}"]
    if subprocess.run(make, cwd=LIBRARY, check=False).returncode:
        sys.exit("bench: libburst does not build")
    program = folder / "libburst_add"
    linked = [f"-I{folder}/include", f"-L{folder}/lib", "-lburst", f"-Wl,-rpath,{folder}/lib"]
    source = HERE / "peers" / "libburst_add.c"
    if subprocess.run(["cc", "-O2", source, *linked, "-o", program], check=False).returncode:
        sys.exit("bench: peers/libburst_add.c does not compile")
    return program


@contextmanager
def client_in_c(program: Path, socket: Path, count: int) -> Iterator[Callable[[], Block]]:
    """A block of its calls; the program ends with this."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([program, socket], text=True, **pipes) as process:
        assert process.stdin
        assert process.stdout
        given, told = process.stdin, process.stdout

        def block() -> Block:
            given.write(f"{count}\n")
            given.flush()
            row = json.loads(told.readline())
            return {f"{key}_us": row[f"{key}_ns"] / 1e3 for key in ("p50", "p99", "p999", "max")}

        if told.readline() != "ready\n":
            sys.exit("bench: the client in C has not begun")
        try:
            yield block
        finally:
            given.close()


def subjects(program: Path, count: int, stack: ExitStack) -> tuple[list[Subject], list[RemotePreparedModel]]:
    """From C and from Python, on either device; and the models there."""
    found, models = [], []
    for name, in_c, in_python in DEVICES:
        device = stack.enter_context(own_device(name))
        (socket,) = [path for path in os.scandir(os.environ["BURST_RUNTIME_DIR"]) if path.name.endswith(".sock")]
        block = stack.enter_context(client_in_c(program, socket.path, count))
        found.append(Subject(in_c, pinned(device, block), SPIN, is_ours=True))
        prepared = stack.enter_context(device.prepare(add_model()))
        models.append(prepared)
        subject = burst_subject(in_python, SPIN, prepared, count, stack)
        subject.block = pinned(device, subject.block)
        found.append(subject)
    return found, models


def stages(prepared: RemotePreparedModel, count: int) -> list[tuple[str, str]]:
    """Of a request: the median of each stage, in microseconds."""
    with prepared.burst() as burst:
        for place in burst.inputs:
            place[...] = 1
        for _ in range(count):
            burst.run()
        return [(name, f"{each['p50']:.3f}") for name, each in burst.stats()["stages"].items()]


def main() -> None:
    """Measures, prints, writes."""
    args = parse(arguments(__doc__))
    pin_client()
    found, count = conditions(), 50 if args.quick else 2000
    with ExitStack() as stack:
        folder = stack.enter_context(scratch())
        limit = compile_c(folder / "limit", HERE / "peers" / "limit.c")
        found_there, models = subjects(build(folder), count, stack)
        measured = [*in_process(count)[:1], *found_there]
        runs = interleave(measured, {SPIN: c_block(limit, "spin", count * 10)}, args.pairs, progress)
        parts = stages(models[0], count)
    assert measured[0].name == ADD
    rows = subject_rows(runs, measured)
    words = "floor + 0.5 x in-process numpy.add, in numpy.adds"
    limits = [
        Budget(f"from C, native device <= {words}", over_floor_in_adds(runs, IN_C), 0.5),
        Budget(f"from C, reference <= {words.replace('0.5', '2.5')}", over_floor_in_adds(runs, IN_C_REFERENCE), 2.5),
    ]
    publish(
        args,
        Report(QUESTION, found, [cells(row) for row in rows], limits, {"subjects": rows}, more=((parts, STAGE_HEAD),)),
    )


if __name__ == "__main__":
    main()
