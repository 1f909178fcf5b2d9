"""How many Python calls does a request take, through how many files: in the client, the service, the engine, a gateway?

    python bench/walks.py [PYTHON ...] [--only WORD ...] [--repeat 5] [--json FILE]
    python bench/walks.py --show "execute_fenced"     # each call of those walks, in order

PYTHON is the interpreter of another checkout's .venv; each checkout is a column. Without any, this one is walked. A
cell holds calls / files / moves from file to file of the packages fmq, burst and driver. Calls of the standard
library, of numpy and of C are not counted. Each walk runs once before, then `--repeat` times: the figure is the median.

A profile function in every thread (`sys.setprofile`, `threading.setprofile`) writes one line for each call into a file
that is opened before a device gives its files up. A byte of shared memory says whether a walk is being recorded.
"""

from __future__ import annotations

import _thread
import argparse
import json
import math
import mmap
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

PACKAGES = ("fmq", "burst", "driver")
ROLES = ("client", "service", "engine", "gateway")
EDGES = Path(__file__).parents[1] / "driver/demos/edges.onnx"  # of one operation
IMAGE, FOUND = (1, 3, 64, 64), (1, 1, 62, 62)  # its input and output, float32
QUIET = 0.1  # seconds without a call: a walk has ended in every process
Call = tuple[str, int, str, str]  # role, thread, file, function
Walk = tuple[str, "Callable[[], object]", "Callable[[], object]"]  # its name, what is not recorded before it, the walk


# ---- in the processes that are walked


class Recorder:
    """A profile function that writes calls of the product into a file while a walk is recorded."""

    def __init__(self, folder: Path, roles: Sequence[str]) -> None:
        """`roles`: of this process, of one that it forks, of one that that forks."""
        self.roles, self.role = iter(roles[1:]), roles[0]
        os.register_at_fork(after_in_child=self._forked)
        self.file = os.open(folder / "calls", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with open(folder / "recording", "r+b") as page:
            self.is_recording = mmap.mmap(page.fileno(), 1)
        self.roots = {
            str(Path(spec.origin).parents[1]) + "/" for spec in map(find_spec, PACKAGES) if spec and spec.origin
        }
        self.names: dict[Any, str] = {}  # by code object; "" is not of the product

    def _forked(self) -> None:
        self.role = next(self.roles, self.role)

    def start(self) -> None:
        """Record this thread, and all that are started from now on, also those that `threading` does not know."""
        begin = _thread.start_new_thread

        def begin_recorded(function: Callable[..., object], *arguments: Any) -> int:
            def run(*given: Any, **named: Any) -> None:
                sys.setprofile(self)
                function(*given, **named)

            return begin(run, *arguments)

        _thread.start_new_thread = threading._start_new_thread = begin_recorded
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and self.is_recording[0]:
            name = self.names.get(frame.f_code)
            if name is None:
                name = self.names[frame.f_code] = self._name(frame)
            if name:
                with suppress(OSError):  # the trial of a model file may not write any
                    os.write(self.file, f"{self.role} {threading.get_ident()} {name}\n".encode())

    def _name(self, frame: FrameType) -> str:
        path, code = frame.f_code.co_filename, frame.f_code
        for root in self.roots:
            inside = path.removeprefix(root)
            if inside != path and inside.split("/")[0] in PACKAGES and code.co_name != "<module>":
                return f"{inside} {code.co_qualname.replace('.<locals>', '')}"
        return ""


def run_recorded(folder: Path, words: list[str]) -> None:
    """Run a script or `-m module` as Python would, with the recorder in all of its threads and forks."""
    Recorder(folder, ["launcher", "service", "engine"] if words[0] != "-m" else ["gateway"]).start()
    words = [word for word in words if word != "-P"]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


# ---- in the client


class Walks:
    """Records walks in this process and in those that it starts. Uses public names alone, so that old checkouts run."""

    def __init__(self, folder: Path, repeat: int) -> None:
        (folder / "recording").write_bytes(b"\0")
        self.folder, self.repeat = folder, repeat
        self.recorder = Recorder(folder, ["client"])
        self.python = folder / "python"  # what runs devices, and the gateway
        self.python.write_text(f'#!/bin/sh\nexec {sys.executable} -P {__file__} --inside {folder} "$@"\n')
        self.python.chmod(0o700)

    def record(self, before: Callable[[], object], walk: Callable[[], object]) -> list[Call]:
        """All calls of one walk, in order, once every process has become quiet."""
        before()
        self._settle()
        start = (self.folder / "calls").stat().st_size
        self.recorder.is_recording[0] = 1
        walk()
        self._settle()
        self.recorder.is_recording[0] = 0
        with open(self.folder / "calls") as calls:
            calls.seek(start)
            lines = [line.split(maxsplit=3) for line in calls]
        return [(role, int(thread), file, name.strip()) for role, thread, file, name in lines]

    def _settle(self) -> None:
        size = -1
        while size != (size := (self.folder / "calls").stat().st_size):
            time.sleep(QUIET)

    def figures(self, walk: Walk) -> dict[str, Any]:
        """Medians of calls, files and moves of each process, and the last recording."""
        _, before, call = walk
        before()
        call()
        seen = [self.record(before, call) for _ in range(self.repeat)]
        counted = [count(calls) for calls in seen]
        table = {}
        for role in {role for counts in counted for role in counts}:
            row = [round(median(counts.get(role, (0, 0, 0))[n] for counts in counted)) for n in range(3)]
            table |= {role: row} if row[0] else {}
        return {"figures": table, "calls": seen[-1]}


def count(calls: list[Call]) -> dict[str, tuple[int, int, int]]:
    """By role: calls, files, and moves between files within each thread."""
    found = {}
    for role in {call[0] for call in calls}:
        own = [call for call in calls if call[0] == role]
        threads = [[file for _, thread, file, _ in own if thread == one] for one in {call[1] for call in own}]
        moves = sum(a != b for files in threads for a, b in pairwise(files))
        found[role] = len(own), len({call[2] for call in own}), moves
    return found


def nothing() -> None:
    """What most walks need before them."""


def walks_of_a_model(stack: ExitStack, _: Walks) -> Iterator[Walk]:
    """Of one device and one model, ADD of four floats: connect, prepare, plain, fenced, burst."""
    import numpy as np

    import driver
    from burst import Memory, Request, RequestArgument

    builder, four = driver.ModelBuilder(), ("float32", (1, 4))
    builder.output(builder.operation("ADD", builder.input(*four), builder.input(*four), 0))
    model, kept = builder.build(), []
    ones = np.ones((1, 4), np.float32)

    def keep(made: Any) -> Any:
        kept.append(stack.enter_context(made))
        return made

    def request() -> Request:
        there = tuple(RequestArgument(offset=at, length=16) for at in (0, 64))
        return Request(there, (RequestArgument(offset=128, length=16),), (Memory.create(192),))

    device = stack.enter_context(driver.connect("reference"))
    prepared = stack.enter_context(device.prepare(model))
    burst, known = stack.enter_context(prepared.burst()), request()
    yield "burst.run, known", lambda: burst.run(ones, ones), lambda: burst.run(ones, ones)
    yield "burst.run, new pools", lambda: keep(prepared.burst()), lambda: kept[-1].run(ones, ones)
    yield "burst.execute, new pools", nothing, lambda: burst.execute(request())
    yield "connect", nothing, lambda: keep(driver.connect("reference"))
    yield "device.prepare", nothing, lambda: keep(device.prepare(model))
    yield "prepared.burst()", nothing, lambda: keep(prepared.burst())
    yield "prepared.run", nothing, lambda: prepared.run(ones, ones)
    yield "prepared.execute", nothing, lambda: prepared.execute(known)
    yield "prepared.execute_async", nothing, lambda: prepared.execute_async(known).result()
    yield "prepared.execute_fenced", nothing, lambda: prepared.execute_fenced(known).result()


def walks_of_a_file(stack: ExitStack, _: Walks) -> Iterator[Walk]:
    """Of a model file: compile, and what a compiled model executes, with the CPU to fall back to and without it."""
    import driver
    from burst import Memory, Request, RequestArgument

    made: list[Any] = []

    def load() -> None:
        made.append(driver.load(EDGES))

    yield "load of an .onnx", nothing, load
    yield "compile of an .onnx", load, lambda: made.append(driver.compile(made[-1]))
    sides = [RequestArgument(pool=n, length=4 * math.prod(shape)) for n, shape in enumerate((IMAGE, FOUND))]
    request = Request(tuple(sides[:1]), tuple(sides[1:]), tuple(Memory.create(side.length) for side in sides))
    for name, options in (("", {"require_device": "onnxruntime"}), (", CPU fallback", {})):
        each = stack.enter_context(driver.compile(driver.load(EDGES), **options))
        yield f"compiled.execute{name}", nothing, lambda each=each: each.execute(request)
        yield f"compiled.execute_fenced{name}", nothing, lambda each=each: each.execute_fenced(request).result()


def walks_of_the_gateway(stack: ExitStack, walks: Walks) -> Iterator[Walk]:
    """Of a client that speaks the Open Inference Protocol, over HTTP and over gRPC. Its own calls are not ours."""
    import numpy as np

    import driver

    stack.enter_context(driver.connect("onnxruntime"))  # else the gateway would start one, which is not recorded
    (models := walks.folder / "models").mkdir()
    (models / "edges.onnx").write_bytes(EDGES.read_bytes())
    web, grpc = walks.folder / "http", walks.folder / "grpc"
    words = ["serve", "onnxruntime", "--oip", f"http+unix:{web}", "--oip", f"unix:{grpc}", "--models", str(models)]
    command, log = [walks.python, "-m", "driver.cli", *words], (walks.folder / "log").open("w")
    process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log))
    stack.callback(process.terminate)
    if not process.stdout.readline():
        raise SystemExit(f"bench: the gateway did not start: {(walks.folder / 'log').read_text()[-2000:]}")
    image = np.zeros(IMAGE, np.float32)
    connection = HTTPConnection("localhost")
    connection.sock = stack.enter_context(socket.socket(socket.AF_UNIX))
    connection.sock.connect(str(web))
    fields = {"name": "image", "datatype": "FP32", "shape": IMAGE, "data": image.ravel().tolist()}

    def ask() -> None:
        connection.request("POST", "/v2/models/edges/infer", json.dumps({"inputs": [fields]}))
        if "edges" not in (answer := connection.getresponse().read().decode()):
            raise SystemExit(f"bench: the gateway answers {answer[:200]}")

    yield "OIP infer over HTTP", nothing, ask
    with suppress(ImportError):
        import tritonclient.grpc as triton

        client = triton.InferenceServerClient(f"unix:{grpc}")
        stack.callback(client.close)
        tensor = triton.InferInput("image", list(IMAGE), "FP32")
        tensor.set_data_from_numpy(image)
        yield "OIP infer over gRPC", nothing, lambda: client.infer("edges", [tensor])


# ---- what is printed


def walk_here(folder: Path, repeat: int, only: list[str]) -> dict[str, Any]:
    """All walks of this checkout, by name. Devices live in that folder and end with it."""
    walks = Walks(folder, repeat)
    sys.executable = str(walks.python)  # what starts devices; 0.2.0 has no driver.set_executable
    walks.recorder.start()
    found = {}
    for group in (walks_of_a_model, walks_of_a_file, walks_of_the_gateway):
        with ExitStack() as stack:
            for walk in group(stack, walks):
                if not only or any(word in walk[0] for word in only):
                    print(walk[0], file=sys.stderr)
                    found[walk[0]] = walks.figures(walk)
    return found


def walk(python: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The same of that interpreter's checkout, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="burst-walks-") as name:
        folder = Path(name)
        environment = {**os.environ, "BURST_RUNTIME_DIR": name, "XDG_CACHE_HOME": name, "OPENBLAS_NUM_THREADS": "1"}
        command = [python, "-P", __file__, "--within", name, "--repeat", str(args.repeat), "--only", *args.only]
        subprocess.run(command, cwd="/", env=environment, check=True)
        return json.loads((folder / "found.json").read_text())


def show(walks: dict[str, Any]) -> None:
    """Each call, by process and thread, in order."""
    for name, found in walks.items():
        threads: dict[tuple[str, int], list[str]] = {}
        for role, thread, file, function in found["calls"]:
            threads.setdefault((role, thread), []).append(f"{file}: {function}")
        for (role, thread), calls in threads.items():
            print(f"\n{name}, {role}, thread {thread}: {len(calls)} calls")
            print("\n".join(f"  {call}" for call in calls))


def table(columns: dict[str, dict[str, Any]]) -> list[str]:
    """Markdown: a row for each walk and process, a column for each checkout."""
    lines = [f"| walk | process | {' | '.join(columns)} |", f"|---|---|{'---|' * len(columns)}"]
    for name in dict.fromkeys(name for walks in columns.values() for name in walks):
        figures = [walks.get(name, {}).get("figures", {}) for walks in columns.values()]
        for role in (role for role in ROLES if any(role in each for each in figures)) if any(figures) else ["client"]:
            cells = [" / ".join(map(str, each[role])) if role in each else "0" for each in figures]
            lines.append(f"| {name} | {role} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """The command line."""
    if sys.argv[1:2] == ["--inside"]:
        run_recorded(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="interpreters of checkouts (default: this one)")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="walks whose name has one of these words")
    parser.add_argument("--show", nargs="+", metavar="WORD", help="each call of these walks, in order")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="each walk twice: shows that it works")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--within", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.only, args.repeat = args.show or args.only, 1 if args.quick else args.repeat
    if args.within:
        found = walk_here(args.within, args.repeat, args.only)
        (args.within / "found.json").write_text(json.dumps(found))
        os._exit(0)  # without what its threads would still report
    pythons = [Path(python).absolute() for python in args.pythons or [sys.executable]]  # a link: not resolved
    columns = {python.parents[2].name: walk(python, args) for python in pythons}
    if args.show:
        for walks in columns.values():
            show(walks)
    print("\n".join(table(columns)))
    if args.json:
        args.json.write_text(json.dumps(columns))


if __name__ == "__main__":
    main()
