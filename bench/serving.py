"""Is `compiled.serve` a better place for a model in a web server than its own runtime in threads?

    python bench/serving.py MODEL.onnx [--shape 1,3,48,192] [--clients 32] [--seconds 3] [--pairs 9] [--json FILE]
    python bench/serving.py rows [--batch 32] [--clients 32] [--seconds 3] [--pairs 9] [--json FILE]
    python bench/serving.py images [--batch 8] [--clients 32] [--seconds 3] [--pairs 9] [--json FILE]

Three servers of aiohttp answer the same requests: a float32 array as the body of a POST, the first output as the
answer. One gives them to `compiled.serve(replicas=2)` on the device onnxruntime; one to ONNX Runtime's session as it
comes, by `asyncio.to_thread`, as most programs do; and one to ONNX Runtime's own session as it is tuned for this: one
intra-op thread, and as many threads as there are replicas. Both sessions log errors alone. Clients of this process ask
all in turns, in closed loops. With `rows`, the model is the network of bench/joined.py that waits for its weights, and
requests are joined: by `compiled.serve` itself before it sends them, or by the device, to which it sends each over a
burst of its own. With `images`, it is six convolutions, whose weights stay in the caches: one row keeps a processor as
busy as eight do.
What `compiled.serve` has measured at warm-up, and whether it joins requests therefore, decides what it is to reach.
With --batch 1, three times as many requests come as the device can do, too, without HTTP, each with 50 ms: a good
answer is one that came in time.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from aiohttp import ClientSession, TCPConnector, web
from joined import connected
from measure import Budget, progress, scratch, spell
from question import Finding, Inquiry

import driver
from burst import Busy
from driver.cli.timing import estimate, order_of_round
from driver.options import PREFERENCES
from driver.replicas.model_server import LEAST_GAIN

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from driver.cli.timing import Estimate
    from driver.replicas import ModelServer

    Answer = Callable[[np.ndarray[Any, Any]], Awaitable[np.ndarray[Any, Any]]]

SERVED = "compiled.serve"
BY_DEVICE = "compiled.serve, joined by the device"
DEFAULT, TUNED = "ONNX Runtime, default session, asyncio.to_thread", "ONNX Runtime, 1 intra-op thread, 2 threads"
KEYS = "rate", "p50", "p99"
KINDS = SERVED, BY_DEVICE, DEFAULT, TUNED
ROWS, IMAGES = "rows", "images"
CHANNELS = SIDE = 48
MODELS = {ROWS: ("1,1024", 32), IMAGES: ("1,3,48,48", 8)}  #: of ours: the shape of a request, rows of a run
REPLICAS, PATIENCE, OVERLOAD = 2, 0.05, 3
HEAD = ("clients", "server", "requests a second", "p50 ms", "p99 ms", "serve's requests x", "p50 x", "p99 x")


def in_threads(args: argparse.Namespace, stack: ExitStack) -> Answer:
    """The runtime itself, as its users serve it from asyncio."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if args.server == TUNED:
        options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(args.model, options, providers=["CPUExecutionProvider"])
    pool = stack.enter_context(ThreadPoolExecutor(REPLICAS)) if args.server == TUNED else None  # None: of `to_thread`
    name = session.get_inputs()[0].name

    async def answer(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        loop = asyncio.get_running_loop()
        return (await loop.run_in_executor(pool, session.run, None, {name: array}))[0]

    return answer


def compiled(args: argparse.Namespace) -> driver.CompiledModel:
    """The file, on the device with its runtime."""
    batch = driver.Batch(args.batch) if args.batch > 1 else None
    model = driver.load(args.model, form="file")
    return driver.compile(model, devices=["onnxruntime"], preference=args.preference, batch=batch)


async def serve_web(args: argparse.Namespace) -> None:
    """A server of one kind, until its parent is gone. Prints its port."""
    with ExitStack() as stack:
        if args.server not in (SERVED, BY_DEVICE):
            await _answer_arrays(in_threads(args, stack), args)
            return
        model = stack.enter_context(compiled(args))
        apart: dict[str, Any] = {"replicas": args.clients, "depth": 1, "batch": 1}
        options = apart if args.server == BY_DEVICE else {"replicas": REPLICAS}
        async with model.serve(queue=1024, shapes=(args.shape,), **options) as server:

            async def answer(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
                return (await server.run(array))[0]

            await _answer_arrays(answer, args, server.stats()["batch_gain"])


async def _answer_arrays(answer: Answer, args: argparse.Namespace, gain: float | None = None) -> None:
    async def handle(request: web.Request) -> web.Response:
        array = np.frombuffer(await request.read(), np.float32).reshape(args.shape)
        return web.Response(body=(await answer(array)).tobytes())

    await until_parent_ends(handle, gain or 0)


async def until_parent_ends(handle: Callable[[web.Request], Awaitable[web.Response]], *said: float) -> None:
    """Serve POST requests, until the parent is gone. Prints the port, and what else there is to say."""
    app = web.Application()
    app.router.add_post("/", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], *said, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await runner.cleanup()


@contextmanager
def web_server(kind: str, args: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """A server process of that kind: its address, and what joining gains it, 0 where it does not know."""
    words = ["--shape", ",".join(map(str, args.shape)), "--batch", str(args.batch), "--clients", str(args.clients)]
    words += ["--preference", args.preference]
    command = [sys.executable, __file__, args.model, "--server", kind, *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        try:
            port, gain = process.stdout.readline().split()
            yield f"http://127.0.0.1:{port}/", float(gain)
        finally:
            process.stdin.close()


async def ask_for(url: str, body: bytes, clients: int, seconds: float) -> np.ndarray[Any, Any]:
    """Seconds of each answer to so many clients, each of which asks again when it has one."""
    took: list[float] = []
    end = time.monotonic() + seconds

    async def client(session: ClientSession) -> None:
        while (begin := time.monotonic()) < end:
            async with session.post(url, data=body) as answer:
                answer.raise_for_status()
                await answer.read()
            took.append(time.monotonic() - begin)

    async with ClientSession(connector=TCPConnector(limit=clients)) as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
    return np.array(took)


def over_http(args: argparse.Namespace) -> tuple[dict[int, dict[str, dict[str, list[float]]]], float]:
    """Of each number of clients and each server: requests a second, and percentiles in ms, of each round. And what
    joining gains `compiled.serve`.
    """
    body = np.random.default_rng(1).random(args.shape, np.float32).tobytes()
    kinds = [kind for kind in KINDS if kind != BY_DEVICE or args.batch > 1]
    found = {n: {kind: {key: [] for key in KEYS} for kind in kinds} for n in (1, args.clients)}
    with ExitStack() as stack:
        servers = {kind: stack.enter_context(web_server(kind, args)) for kind in kinds}
        for url, _ in servers.values():
            asyncio.run(ask_for(url, body, args.clients, args.seconds / 3))
        for number in range(args.pairs):
            progress("over HTTP", f"round {number + 1} of {args.pairs}")
            for clients in found:
                for kind in order_of_round(kinds, number):
                    took = asyncio.run(ask_for(servers[kind][0], body, clients, args.seconds))
                    row = found[clients][kind]
                    row["rate"].append(took.size / args.seconds)
                    row["p50"].append(float(np.median(took)) * 1e3)
                    row["p99"].append(float(np.percentile(took, 99)) * 1e3)
    progress("")
    return found, servers[SERVED][1]


async def good_of_capacity(args: argparse.Namespace) -> list[float]:
    """Good answers of three times as many requests as can be done, over what can be done, of each round."""
    array = np.random.default_rng(1).random(args.shape, np.float32)
    with compiled(args) as model:
        async with model.serve(replicas=REPLICAS, queue=64, shapes=(args.shape,)) as server:
            found = []
            for number in range(args.pairs):
                progress("overload", f"round {number + 1} of {args.pairs}")
                before = await capacity(server, array, args.seconds / 2)
                good = await good_answers(server, array, OVERLOAD * before, args.seconds)
                after = await capacity(server, array, args.seconds / 2)
                found.append(2 * good / (before + after))
    progress("")
    return found


async def capacity(server: ModelServer, array: np.ndarray[Any, Any], seconds: float) -> float:
    """Answers a second to as many clients as keep all replicas busy."""
    count, end = 0, time.monotonic() + seconds

    async def client() -> None:
        nonlocal count
        while time.monotonic() < end:
            await server.run(array)
            count += 1

    await asyncio.gather(*(client() for _ in range(4 * REPLICAS)))
    return count / seconds


async def good_answers(server: ModelServer, array: np.ndarray[Any, Any], rate: float, seconds: float) -> float:
    """A second, of requests that come at that rate, at random."""
    random, tasks, good = np.random.default_rng(2), set[asyncio.Task[None]](), 0

    async def one() -> None:
        nonlocal good
        begin = time.monotonic()
        try:
            await server.run(array, deadline=begin + PATIENCE)
        except (TimeoutError, Busy):
            return
        good += time.monotonic() - begin <= PATIENCE

    at = begin = time.monotonic()
    while at < begin + seconds:
        at += random.exponential(1 / rate)
        await asyncio.sleep(max(0, at - time.monotonic()))
        task = asyncio.ensure_future(one())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    if tasks:
        await asyncio.wait(tasks)
    return good / (time.monotonic() - begin)


def goals(clients: int, other: str, ratios: dict[str, Estimate], *, is_joined: bool) -> list[Budget]:
    """What `compiled.serve` is to reach beside that server, with so many clients."""
    if clients == 1:
        return [Budget(f"one client: <= 1.1 x {other}", ratios["p50"], 1.1)]
    least = 1.3 if is_joined else 0.98
    found = [
        Budget(
            f"{clients} clients: >= {least} x the requests a second of {other}", ratios["rate"], least, at_least=True
        )
    ]
    if is_joined:
        found.append(Budget(f"{clients} clients: p99 <= 0.8 x {other}", ratios["p99"], 0.8))
    return found


def find(args: argparse.Namespace) -> Finding:
    """Over HTTP, and where requests are not to be joined, how many answers of an overload are good."""
    with scratch() as folder:
        if args.model in MODELS:
            args.model = str(written(args.model, folder / f"{args.model}.onnx"))
        return compared(args)


def written(model: str, path: Path) -> Path:
    """A file of ours, whose first dimension is open."""
    if model == ROWS:
        path.write_bytes(connected())
        return path
    from gpu_models import Graph

    random, graph, at = np.random.default_rng(1), Graph(), "x"
    for before in (3, *[CHANNELS] * 5):
        weights = graph.constant(random.standard_normal((CHANNELS, before, 3, 3)).astype(np.float32) / 20)
        at = graph.node("Relu", graph.node("Conv", at, weights, pads=[1] * 4))
    at = graph.node("Flatten", graph.node("GlobalAveragePool", at))
    return graph.save(path, ("n", 3, SIDE, SIDE), at, ("n", CHANNELS))


def compared(args: argparse.Namespace) -> Finding:
    """The same of a file."""
    found, gain = over_http(args)
    is_joined = gain >= LEAST_GAIN
    good = estimate(asyncio.run(good_of_capacity(args))) if args.batch == 1 else None
    lines: list[tuple[str, ...]] = []
    budgets: list[Budget] = []
    for clients, kinds in found.items():
        for kind, row in kinds.items():
            figures = [f"{np.median(row[key]):.4g}" for key in KEYS]
            ratios = {key: estimate(np.divide(kinds[SERVED][key], row[key])) for key in KEYS}
            lines.append(
                (str(clients), kind, *figures, *(["", "", ""] if kind == SERVED else map(spell, ratios.values())))
            )
            if kind in (DEFAULT, TUNED):
                budgets += goals(clients, kind, ratios, is_joined=is_joined)
    body: dict[str, Any] = {"over_http": found, "batch_gain": gain}
    if good:
        budgets.append(Budget("overload 3 x, 50 ms: good answers >= 0.95 x capacity", good, 0.95, at_least=True))
        body["good"] = good._asdict()
    said = [(f"{gain:.2f}", "yes" if is_joined else "no")] if gain else []
    more = [(said, ("rows a second of joined requests x, at warm-up", "joined"))] if said else []
    return Finding(lines, budgets, body, HEAD, more)


def settle(args: argparse.Namespace) -> None:
    """A shape is numbers; blocks are short for --quick; rows are joined where the model is made for it."""
    shape, batch = MODELS.get(args.model, ("1,3,48,192", 1))
    args.shape = tuple(map(int, (args.shape or shape).split(",")))
    args.batch = args.batch or batch
    args.seconds = 0.3 if args.quick else args.seconds


SERVING = Inquiry(
    __doc__,
    find,
    options={
        "model": {"help": f"an .onnx file with one float32 input, {ROWS}, or {IMAGES}"},
        "--shape": {"help": "of the input (default 1,3,48,192: of an OCR classifier)"},
        "--batch": {"type": int, "help": f"rows of a run (default: 32 with {ROWS}, 8 with {IMAGES}, else 1)"},
        "--preference": {"default": "sustained_speed", "choices": PREFERENCES, "help": "for which it is compiled"},
        "--clients": {"type": int, "default": 32},
        "--seconds": {"type": float, "default": 3.0, "help": "of a block"},
        "--server": {"choices": KINDS, "help": "serve, instead of measuring"},
    },
    settle=settle,
)

if __name__ == "__main__":
    if "--server" in sys.argv:
        asyncio.run(serve_web(SERVING.parsed()))
    else:
        SERVING.answer()
