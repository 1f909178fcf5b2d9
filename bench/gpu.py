"""Does a GPU behind a burst keep its promises: latency, overlap, memory, recovery, pinned pools?

    python bench/gpu.py [--device onnxruntime-cuda] [--only CHECK …] [--models FILE …] [--rounds 9] [--quick]
                        [--graphs] [--allow-none | --stand-ins] [--limit 240] [--total 400] [--json FILE] [--markdown]

Every check is one line: what it found, or that it did not run and why. A check or a model that fails does not stop the
others. FILE of --json is written again after each line, so a run that is cut short has left what it found. Without a
GPU the script says so and exits with 1, with --allow-none with 0: then what needs no GPU still runs on the device,
which shows that the script works. --stand-ins does so on a CUDA that is none (tests/devices/c/libcuda.c), quickly.

pinning    Can sealed memory of a pool be pinned for CUDA, and a mapping that may only be read? Copies, pinned and not.
launch     ADD of 4 floats: a bare CUDA launch and its wait, and the same through a burst.
models     MobileNetV1, a transformer's encoder and each .onnx file of --models (files, or folders of them; yolov8n.onnx
           has to be given): the same ONNX Runtime session in this process and the burst, in turns, on the same input.
           The limit: 20 us more. With --graphs both have CUDA graphs (the option `graphs` of the device), else both
           have what the device's configuration says.
depth      A model whose copies take as long as its products: its rate with 4 requests in flight beside 1 (limit 1.8).
clients    GPU memory that 16 client processes on one device occupy, beside 1 (limit 1.1).
recovery   The engine is killed under 16 client processes: the longest time until each is served again (limit 2 s).
lane       The lane of CUDA without a runtime: latency, requests in flight, a state on the GPU, pools of the client in
           place, by PyTorch and by CuPy, no memory left, a dead engine, a kernel that never ends.
library    The driver in C of examples/device-cuda, built by nvcc; without it its host part, on a stand-in of CUDA.
torch, jax A residual net, a perceptron: the framework in this process and the burst, in turns; on the GPU or the CPU.
webgpu     The first of the models on Vulkan: the session in this process and the burst, in turns. With --stand-ins an
           ADD on SwiftShader, if it is installed.
played     The devices torch-cuda and jax-cuda with frameworks that are played: with --stand-ins alone.

Runs on a machine without a network: it downloads nothing (docs/howto/gpu.md lists the wheels to carry).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gpu_frameworks import jax, played, torch
from gpu_lane import ADDING, LANE, adding, lane, library
from gpu_rows import MOST_ADDED, MOST_SECONDS, Added, Row, attempted, connected, usable, use_stand_ins
from gpu_session import configure_graphs, has_graphs, own_session
from measure import NotMeasured, conditions, scratch, seconds_in_flight

import driver
from burst import Memory
from driver.cli.timing import count_for, in_words, order_of_round, seconds_of, time_calls
from driver.devices.lowering.errors import LibraryFailed, LibraryMissing
from driver.devices.nvidia import missing_gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from driver import Model, RemoteDevice

BLOCK = 0.3  # seconds of a block
CUDA_DEVICE, VULKAN_DEVICE = "onnxruntime-cuda", "onnxruntime-webgpu"
LEAST_OVERLAP, MOST_MEMORY = 1.8, 1.1
CLIENTS, DEPTH = 16, 4
PINNED = 64 << 20  # bytes
_ROW = "a row of gpu.py: "
_PTX = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry add_scalar(.param .u64 from, .param .u64 to, .param .f32 value, .param .u32 n)
{
    .reg .pred %out; .reg .u64 %a<4>; .reg .u32 %r<3>; .reg .f32 %f<3>;
    ld.param.u32 %r1, [n]; mov.u32 %r2, %tid.x; setp.ge.u32 %out, %r2, %r1; @%out ret;
    ld.param.u64 %a1, [from]; ld.param.u64 %a2, [to]; ld.param.f32 %f1, [value];
    mul.wide.u32 %a3, %r2, 4; add.u64 %a1, %a1, %a3; add.u64 %a2, %a2, %a3;
    ld.global.f32 %f2, [%a1]; add.f32 %f2, %f2, %f1; st.global.f32 [%a2], %f2;
    ret;
}
"""


class Bench:
    """The options, and where models are written."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.device, self.models, self.folder = args.device, args.models, folder
        self.rounds, self.is_quick = (2, True) if args.quick else (args.rounds, False)
        self.block, self.clients = (0.01, 3) if args.quick else (BLOCK, CLIENTS)
        self.has_stand_ins = args.stand_ins

    def session_files(self) -> Iterator[tuple[str, Callable[[], Path]]]:
        """The models of the check `models`: names, and what finds the file, or raises NotMeasured."""
        given = [
            path for place in self.models for path in (sorted(place.glob("*.onnx")) if place.is_dir() else [place])
        ]
        names = {path.name for path in given}
        pixels = 64 if self.is_quick else 224
        made: dict[str, Callable[[Path], Path]] = {
            "mobilenet_v1.onnx": lambda path: _onnx_models().mobilenet(path, pixels),
            "encoder.onnx": lambda path: _onnx_models().encoder(path),
            "yolov8n.onnx": _not_given,
        }
        for name, make in made.items():
            if name not in names and not (self.has_stand_ins and name == "encoder.onnx"):
                yield name, partial(make, self.folder / name)
        for path in given:
            yield path.name, partial(_given, path)

    def any_file(self) -> Path:
        """The first of these models that there is. Raises NotMeasured."""
        absent = []
        for _, find in self.session_files():
            try:
                return find()
            except NotMeasured as why:
                absent.append(str(why))
        raise NotMeasured("; ".join(absent))

    def shared(self) -> tuple[str, str]:
        """The device and the model of checks with many clients; an addition in PTX where the device lacks something."""
        if not self.has_stand_ins:
            with suppress(NotMeasured):
                return usable(self.device), str(self.any_file())
        return LANE, ADDING

    def median(self, call: Callable[[], object]) -> float:
        """Seconds of one call, over a block."""
        return float(np.median(time_calls(call, count_for(seconds_of(call, self.block / 4), self.block)))) / 1e9

    def in_turns(self, *calls: Callable[[], object]) -> NDArray[np.float64]:
        """Seconds of each call in each round, of which every other one goes backwards."""
        took = np.zeros((self.rounds, len(calls)))
        for number in range(self.rounds):
            for side in order_of_round(range(len(calls)), number):
                took[number, side] = self.median(calls[side])
        return took


def _given(path: Path) -> Path:
    if not path.is_file():
        raise NotMeasured(f"--models: {path} is no file")
    return path


def _not_given(path: Path) -> Path:
    raise NotMeasured(f"there is no {path.name}; name the file after --models")


def _onnx_models() -> Any:
    try:
        import gpu_models
    except ModuleNotFoundError as error:
        raise NotMeasured(f"it writes its models with the module {error.name}, which is not installed") from error
    return gpu_models


def fed(model: Model, seed: int = 7) -> list[NDArray[Any]]:
    """Noise for each input; dimensions that the file leaves open are 1."""
    random = np.random.default_rng(seed)
    shapes = [(tensor.dtype, tuple(size or 1 for size in tensor.shape or ())) for tensor in model.inputs]
    return [
        random.random(shape).astype(dtype) if dtype.kind == "f" else random.integers(0, 20, shape).astype(dtype)
        for dtype, shape in shapes
    ]


def loaded(path: Path) -> Model:
    """The file as it is."""
    return driver.load(path, form="file")


# ---- CUDA, without ONNX Runtime


def cuda() -> Any:
    """The context. Raises NotMeasured."""
    from driver.devices.cuda.context import cuda_context

    try:
        return cuda_context(0)
    except (LibraryFailed, LibraryMissing) as error:
        raise NotMeasured(str(error)) from error


def pinning(_: Bench) -> Iterator[Row]:
    """Which mappings can be pinned, and what that gains."""
    context = cuda()
    nbytes = PINNED
    sealed = Memory.create(nbytes)
    frozen = Memory.frozen(np.arange(nbytes // 4, dtype=np.uint32))
    plain = np.arange(nbytes // 4, dtype=np.uint32)
    sealed.asarray()[:] = plain.view(np.uint8)
    subjects = ("sealed pool", sealed.asarray(), False), ("read-only sealed pool", frozen.asarray(), True)
    for name, array, is_read_only in subjects:
        try:
            pinned = context.register(array.ctypes.data, nbytes, is_read_only=is_read_only)
        except Exception as error:  # noqa: BLE001 (the answer to the question)
            yield Row("pinning", name, f"cannot be pinned: {error}", False)
            continue
        with pinned:
            yield _copied(context, f"{name}, pinned", array)
    yield _copied(context, "pageable memory", plain.view(np.uint8))


def _copied(context: Any, name: str, array: NDArray[np.uint8]) -> Row:
    """The rate of copies to the GPU; the bytes that come back are compared."""
    back = np.zeros_like(array)
    with context.allocate(array.nbytes) as there, context.stream() as stream:

        def copy() -> None:
            stream.copy_in(there.address, array.ctypes.data, array.nbytes)
            stream.synchronize()

        seconds = float(np.median(time_calls(copy, 5))) / 1e9
        context.copy_out(back.ctypes.data, there.address, back.nbytes)
    if not np.array_equal(array, back):
        return Row("pinning", name, "the GPU has other bytes", False)
    rate = array.nbytes / seconds / 1e9
    return Row("pinning", name, f"copied in at {rate:.1f} GB/s", figures={"gb_per_s": rate})


def launch(bench: Bench) -> Iterator[Row]:
    """The least that an execution on the GPU can cost, and what a burst makes of it."""
    bare = "a bare launch and wait"
    try:
        yield _in_us(bare, _bare_launch(bench))
    except (NotMeasured, LibraryFailed) as why:
        yield Row("launch", bare, f"did not run: {why}")
    with connected(bench.device) as device:
        model = loaded(_onnx_models().addition(bench.folder / "addition.onnx"))
        with device.prepare(model) as prepared, prepared.burst() as burst:
            found = burst.run(*(feed := fed(model))).outputs[0]
            if not np.allclose(found, feed[0] + 1):
                yield Row("launch", "ADD of 4 floats", f"is wrong: {found}", False)
            yield _in_us("ADD of 4 floats through a burst", bench.median(burst.run))


def _in_us(name: str, seconds: float) -> Row:
    return Row("launch", name, f"{1e6 * seconds:.1f} us", figures={"us": 1e6 * seconds})


def _bare_launch(bench: Bench) -> float:
    from driver.devices.cuda.driver_api import ffi

    context = cuda()
    kernel = context.kernel(_PTX, "add_scalar")
    source, found = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    with context.allocate(32) as there, context.stream() as stream:
        context.copy_in(there.address, source.ctypes.data, 16)
        values = (
            ("CUdeviceptr *", there.address),
            ("CUdeviceptr *", there.address + 16),
            ("float *", 1),
            ("unsigned *", 4),
        )
        arguments = [ffi.new(type_, value) for type_, value in values]

        def run() -> None:
            stream.launch(kernel, (1,), (4,), arguments)
            stream.synchronize()

        seconds = bench.median(run)
        context.copy_out(found.ctypes.data, there.address + 16, 16)
    if not np.array_equal(found, source + 1):
        raise NotMeasured(f"the kernel computes {found.tolist()}")
    return seconds


# ---- models


def models(bench: Bench) -> Iterator[Row]:
    """The same session in this process and through a burst."""
    with connected(bench.device) as device:
        for name, find in bench.session_files():
            yield attempted("models", name, partial(_beside_own, bench, device, find))


def _beside_own(bench: Bench, device: RemoteDevice, find: Callable[[], Path]) -> tuple[Any, ...]:
    path = find()
    model = loaded(path)
    feeds = fed(model)
    own = own_session(device.name, path, feeds)
    with device.prepare(model) as prepared, prepared.burst() as burst:
        for place, feed in zip(burst.inputs, feeds, strict=True):
            place[...] = feed
        worst = max(_difference(a, b) for a, b in zip(burst.run().outputs, own(), strict=True))
        if not worst <= 1e-3:
            return f"differs from the session in process by {worst:.1e} of its range", False
        found = Added.of(bench.in_turns(own, burst.run))
    low, high = (f"{1e6 * seconds:+.1f}" for seconds in (found.added.low, found.added.high))
    words = f"{found} [{low} .. {high}]{', CUDA graphs' if has_graphs(device.name) else ''}"
    return words, found.added.median <= MOST_ADDED, found.figures


def webgpu(bench: Bench) -> Iterator[Row]:
    """The same by the provider of WebGPU, on a GPU or in software."""
    with connected(usable(VULKAN_DEVICE)) as device:
        name, find = next(bench.session_files())
        if device.type != "GPU":  # in software, the first run of a net takes a minute
            name = "addition.onnx"
            find = partial(_onnx_models().addition, bench.folder / name)
        row = attempted("webgpu", f"{name} on a {device.type}", partial(_beside_own, bench, device, find))
        yield row if device.type == "GPU" or row.figures is None else row._replace(is_kept=None)


def _difference(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    """The largest one, as a part of the range of what is wanted; numbers of any type."""
    if not wanted.size:
        return 0.0
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    return float(np.abs(a - b).max() / (np.ptp(b) or 1))


def depth(bench: Bench) -> Iterator[Row]:
    """Copies of one request beside the products of another."""
    make, rows = partial(_onnx_models().chain, rows=256 if bench.is_quick else 8192), {}
    with connected(bench.device) as device:

        def seconds(links: int, depth: int) -> float:
            model = loaded(make(bench.folder / f"chain{links}.onnx", links))
            with device.prepare(model) as prepared, prepared.burst(depth=depth) as burst:
                return _each(bench, burst, fed(model), depth)

        one, nine = seconds(1, 1), seconds(9, 1)
        product = max(1e-9, (nine - one) / 8)
        links = int(np.clip(round((one - product) / product), 1, 64))
        for number in (1, DEPTH):
            rows[number] = seconds(links, number)
    gain = rows[1] / rows[DEPTH]
    words = f"{1e3 * rows[1]:.2f} ms each, with {DEPTH} in flight {1e3 * rows[DEPTH]:.2f} ms: {gain:.2f} x"
    figures = {"alone_ms": 1e3 * rows[1], "in_flight_ms": 1e3 * rows[DEPTH], "gain": gain, "links": links}
    yield Row("depth", f"{links} products", words, gain >= LEAST_OVERLAP, figures)


def _each(bench: Bench, burst: Any, feeds: list[NDArray[Any]], depth: int) -> float:
    """Seconds that each request adds while `depth` are in flight, the input in place."""
    burst.run(*feeds)
    count = max(2 * depth, count_for(seconds_of(burst.run, bench.block / 4), bench.block))
    return float(np.median([seconds_in_flight(burst, count, depth) for _ in range(bench.rounds)]))


# ---- many clients


def client(name: str, path: str) -> None:
    """A client process: a line when it is served, then executions until its input ends; it prints the longest pause
    between two results, and whether the last execution had one.
    """
    ended = threading.Event()
    model = adding() if path == ADDING else loaded(Path(path))
    with driver.connect(name) as device, device.prepare(model) as prepared, prepared.burst(recover=True) as burst:
        burst.run(*fed(model))
        print(json.dumps({"engine": device.engine_pid}), flush=True)
        threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
        longest, is_served, before = 0.0, True, time.monotonic()
        while not ended.is_set():
            try:
                burst.run()
            except Exception:  # noqa: BLE001 (it runs again; the pause counts)
                is_served = False
                continue
            is_served, now = True, time.monotonic()
            longest, before = max(longest, now - before), now
        longest = max(longest, time.monotonic() - before)
    print(json.dumps({"longest": longest, "is_served": is_served}), flush=True)


@contextmanager
def clients(device: str, path: str, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """So many, all served. Raises NotMeasured when one is not."""
    command = [sys.executable, __file__, "--client", device, path]
    with ExitStack() as stack:
        started = []
        for _ in range(count):
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            started.append(process)
        for process in started:
            assert process.stdout
            if not process.stdout.readline():
                raise NotMeasured("a client was not served; its error is above")
        yield started


def gpu_bytes() -> int:
    """Of all programs, on GPU 0. Raises NotMeasured."""
    from driver.monitor import GpuReader

    reader = GpuReader()
    found = reader.read()
    if found and found[0].memory_used is not None:
        return found[0].memory_used
    try:
        free, total = cuda().memory_info()  # with a context of this process, before and after
    except NotMeasured as why:
        raise NotMeasured(f"{reader.absence or 'NVML does not tell how much memory is in use'}; {why}") from why
    return int(total - free)


def clients_memory(bench: Bench) -> Iterator[Row]:
    """What more clients of one model occupy on the GPU."""
    name, path = bench.shared()
    before = gpu_bytes()
    with connected(name):
        occupied = {}
        for count in (1, bench.clients):
            with clients(name, path, count):
                occupied[count] = gpu_bytes() - before
    ratio = occupied[bench.clients] / max(1, occupied[1])
    words = (
        f"{occupied[1] / 1e6:.0f} MB, of {bench.clients} clients {occupied[bench.clients] / 1e6:.0f} MB: {ratio:.2f} x"
    )
    figures = {"one_mb": occupied[1] / 1e6, "all_mb": occupied[bench.clients] / 1e6, "ratio": ratio}
    yield Row("clients", f"GPU memory of one client of {name}", words, ratio <= MOST_MEMORY, figures)


def recovery(bench: Bench) -> Iterator[Row]:
    """A kill -9 of the engine while all clients execute."""
    name, path = bench.shared()
    with connected(name) as device, clients(name, path, bench.clients) as all_clients:
        time.sleep(bench.block)  # every client is executing
        os.kill(device.engine_pid, signal.SIGKILL)
        time.sleep((1.5 if bench.is_quick else 3) * MOST_SECONDS)
        found = [_ended(process) for process in all_clients]
    longest, served = max(one["longest"] for one in found), sum(one["is_served"] for one in found)
    words = f"{served} of {bench.clients} were served again, the last after {longest:.2f} s"
    is_kept = served == bench.clients and longest <= MOST_SECONDS
    yield Row("recovery", "engine killed", words, is_kept, {"longest_s": longest, "served": served})


def _ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What the client has seen. Raises NotMeasured for one that has failed."""
    said, _ = process.communicate(timeout=60)
    if not said:
        raise NotMeasured("a client was not served again; its error is above")
    found: dict[str, Any] = json.loads(said)
    return found


CHECKS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "pinning": pinning,
    "launch": launch,
    "models": models,
    "depth": depth,
    "clients": clients_memory,
    "recovery": recovery,
    "lane": lane,
    "library": library,
    "torch": torch,
    "jax": jax,
    "webgpu": webgpu,
    "played": played,
}


def rows_of(bench: Bench, name: str) -> Iterator[Row]:
    """Of one check, whatever it raises."""
    try:
        yield from CHECKS[name](bench)
    except NotMeasured as why:
        yield Row(name, "did not run", str(why))
    except Exception as error:  # noqa: BLE001 (its row says why)
        traceback.print_exc()
        yield Row(name, "failed", f"{type(error).__name__}: {error}", False)


def rows_of_process(name: str, limit: float) -> Iterator[Row]:
    """Of one check in a process of its own, which a crash or a hang of the driver's ends alone."""
    command = [sys.executable, __file__, *sys.argv[1:], "--only", name, "--alone"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(limit, process.kill)
        timer.start()
        assert process.stdout
        for line in process.stdout:
            if line.startswith(_ROW):
                yield Row(*json.loads(line.removeprefix(_ROW)))
            else:
                print(line, end="", file=sys.stderr)
        ended = process.wait()
        timer.cancel()
    if timer.finished.is_set() and ended == -signal.SIGKILL:
        yield Row(name, "failed", f"it was killed: a limit of {limit:g} s (--limit), or the system", False)
    elif ended:
        yield Row(name, "failed", f"its process ended with {ended}; the reason is above", False)


def no_gpu(device: str) -> str:
    """Why this machine has no GPU for that device; "": it has one."""
    found = next((info for info in driver.devices() if info.name == device), None)
    if found is None:
        return f"no device {device!r} is installed"
    if found.type != "GPU":
        return f"the device {device} is of type {found.type}"
    return missing_gpu() or "" if device == CUDA_DEVICE else found.missing  # what else it lacks, its checks say


def main() -> None:
    """Runs the checks, prints a line for each row, and exits with 1 if one failed or there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=CUDA_DEVICE, help="default %(default)s")
    parser.add_argument("--only", nargs="+", choices=CHECKS, metavar="CHECK", help="default all")
    parser.add_argument(
        "--models",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help=".onnx files, such as yolov8n.onnx, or folders",
    )
    parser.add_argument(
        "--limit", type=float, default=240, metavar="S", help="seconds for a check; default %(default)s"
    )
    parser.add_argument("--total", type=float, default=400, metavar="S", help="seconds for all; default %(default)s")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="tiny blocks: shows that it works, measures nothing")
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs, in this process and on the device")
    parser.add_argument("--allow-none", action="store_true", help="run what needs no GPU, and exit with 0")
    parser.add_argument("--stand-ins", action="store_true", help="quickly, on a CUDA that is none, and exit with 0")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", action="store_true", help="print the rows for README.md")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--client", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stand_ins:
        args.quick, args.allow_none = True, True
        args.device = "onnxruntime" if args.device == CUDA_DEVICE else args.device
    args.only = args.only or [name for name in CHECKS if name != "played" or args.stand_ins]
    if args.client:
        client(*args.client)
        return
    if args.alone:
        alone(args)
        return
    why = no_gpu(args.device)
    print(f"no GPU: {why}" if why else f"GPU: {args.device}", flush=True)
    if why and not args.allow_none:
        sys.exit(1)
    rows: list[Row] = []
    begin, machine = time.monotonic(), conditions()
    with scratch() as folder:
        if args.stand_ins:
            use_stand_ins(folder / "home")
        if args.graphs:
            configure_graphs(folder / "home", args.device)
        for name in args.only:
            print(f"[{time.monotonic() - begin:4.0f} s] {name} …", file=sys.stderr, flush=True)
            left = min(args.limit, args.total - time.monotonic() + begin)
            none = [Row(name, "did not run", "no time is left (--total)")]
            for row in rows_of_process(name, left) if left > 0 else none:
                rows.append(row if not (args.stand_ins and row.figures) else row._replace(is_kept=None))
                store(args.json, machine, rows)
                print(rows[-1].line(), flush=True)
    if args.markdown:
        print(f"`gpu.py {' '.join(sys.argv[1:])}`\n\n{in_words(machine)}\n\n| check | subject | found |\n|---|---|---|")
        print("\n".join(f"| {row.check} | {row.subject} | {row.line().partition(': ')[2]} |" for row in rows))
    sys.exit(any(row.is_kept is False for row in rows) and not (why or args.quick))


def alone(args: argparse.Namespace) -> None:
    """The check of `rows_of_process`: prints its rows for that."""
    with scratch() as folder:
        for name in args.only:
            for row in rows_of(Bench(args, folder), name):
                print(f"{_ROW}{json.dumps(row)}", flush=True)


def store(path: Path | None, machine: dict[str, Any], rows: list[Row]) -> None:
    """Writes the rows so far, if that was asked for."""
    if path:
        new = path.with_name(f"{path.name}.new")
        new.write_text(json.dumps({"conditions": machine, "rows": [row._asdict() for row in rows]}, indent=1))
        new.replace(path)


if __name__ == "__main__":
    main()
