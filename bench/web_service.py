"""What does a request of a web service cost at its own pace, in both kinds of time, beside the runtime in process?

    python bench/pipelines.py web [--clients 4] [--rate 20] [--pairs 5] [--seconds 4] [--json FILE]

Servers of aiohttp answer the same requests: a JPEG of 640 x 480 as the body of a POST, which is decoded, scaled for
MobileNetV1 (.onnx), and answered with its five best classes as JSON. In process: ONNX Runtime's session as it comes, by
`asyncio.to_thread`, and as it is tuned for this: one intra-op thread, and two threads that call it. Burst: one, awaited
by all requests; and `compiled.serve`, two bursts behind a queue; each on a device of its own, which chooses its number
of threads (docs/preference.md). Each client asks at a fixed rate, --rate for all of them together, from a time in its
turn that is drawn for each round. Time runs from when a request is due. Processor time is that of the server and of its
device, for one request; the clients' is not in it. Each server has blocks in turns. Nothing is pinned.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import subprocess
import sys
import time
from contextlib import AsyncExitStack, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from aiohttp import ClientSession, TCPConnector, web
from measure import Budget, Runs, cpu_seconds, rounds, scratch
from models import IMAGE
from own_device import own_device
from PIL import Image
from question import Question, against, interval, median, times
from serving import DEFAULT, SERVED, TUNED, in_threads, until_parent_ends

import driver

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from measure import Block
    from serving import Answer

BURST = "burst"
KINDS = DEFAULT, TUNED, BURST, SERVED
DEPTH, BEST, PICTURES = 4, 5, 16
CHOOSING = 80  #: requests until a device has chosen


# ---- the server


def pixels_of(body: bytes) -> np.ndarray[Any, Any]:
    """A picture as the model takes it."""
    with Image.open(io.BytesIO(body)) as picture:
        scaled = picture.convert("RGB").resize(IMAGE[1:3])
    return np.asarray(scaled, np.float32).transpose(2, 0, 1)[None] / 128 - 1


async def through(kind: str, path: str, stack: AsyncExitStack) -> tuple[Answer, Sequence[int]]:
    """What answers, and the processes that do it beside this one."""
    if kind in (DEFAULT, TUNED):
        threads = stack.enter_context(ExitStack())
        return in_threads(argparse.Namespace(server=kind, model=path), threads), ()
    device = stack.enter_context(own_device("onnxruntime"))
    processes = device.service_pid, device.engine_pid
    model = driver.load(path, form="file")
    if kind == BURST:
        burst = stack.enter_context(stack.enter_context(device.prepare(model)).burst(depth=DEPTH))

        async def answer(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            return (await burst.run_async(array)).outputs[0]

        return answer, processes
    compiled = stack.enter_context(driver.compile(model, devices=["onnxruntime"]))
    server = await stack.enter_async_context(compiled.serve())

    async def served(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return (await server.run(array))[0]

    return served, processes


async def serve(kind: str, path: str) -> None:
    """A server of one kind, until its parent is gone. Prints its port, and the processes of its device."""
    async with AsyncExitStack() as stack:
        answer, processes = await through(kind, path, stack)

        async def handle(request: web.Request) -> web.Response:
            scores = (await answer(pixels_of(await request.read())))[0]
            best = np.argsort(scores)[: -BEST - 1 : -1]
            return web.json_response([{"class": int(n), "score": float(scores[n])} for n in best])

        await until_parent_ends(handle, *processes)


# ---- the clients


class Server(NamedTuple):
    """Where a server is, and its processes."""

    url: str
    processes: Sequence[int]

    def cpu_seconds(self) -> float:
        """Processor time, of all of them, so far."""
        return sum(map(cpu_seconds, self.processes))


@contextmanager
def server_of(kind: str, path: Path) -> Iterator[Server]:
    """A server of that kind."""
    command = [sys.executable, __file__, kind, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        try:
            port, *others = map(int, process.stdout.readline().split())
            yield Server(f"http://127.0.0.1:{port}/", (process.pid, *others))
        finally:
            process.stdin.close()


def pictures() -> list[bytes]:
    """JPEGs of soft noise."""
    random, found = np.random.default_rng(1), []
    for _ in range(PICTURES):
        file, small = io.BytesIO(), random.integers(0, 256, (48, 64, 3), np.uint8)
        Image.fromarray(small).resize((640, 480), Image.Resampling.BICUBIC).save(file, "JPEG", quality=85)
        found.append(file.getvalue())
    return found


async def ask(url: str, bodies: Sequence[bytes], args: argparse.Namespace, begins: Sequence[float]) -> list[float]:
    """Seconds from when each request was due to its answer; a client begins at its part of the time between two."""
    took: list[float] = []
    every, begin = len(begins) / args.rate, time.monotonic()

    async def client(session: ClientSession, at: float) -> None:
        while at < begin + args.seconds:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            async with session.post(url, data=bodies[len(took) % len(bodies)]) as answer:
                answer.raise_for_status()
                await answer.read()
            took.append(time.monotonic() - at)
            at += every

    async with ClientSession(connector=TCPConnector(limit=len(begins))) as session:
        await asyncio.gather(*(client(session, begin + part * every) for part in begins))
    return took


def block(server: Server, bodies: Sequence[bytes], args: argparse.Namespace, number: int) -> Block:
    """All clients, for so many seconds; those of one round begin alike at every server."""
    used = server.cpu_seconds()
    begins = np.random.default_rng(number).random(args.clients).tolist()
    took = asyncio.run(ask(server.url, bodies, args, begins))
    p50, p99 = np.percentile(took, (50, 99)) * 1e3
    return {"p50_ms": p50, "p99_ms": p99, "cpu_ms": (server.cpu_seconds() - used) * 1e3 / len(took)}


def measure(args: argparse.Namespace) -> Runs:
    """Every server once a round; devices choose before the first one."""
    from gpu_models import mobilenet

    runs, bodies = Runs(), pictures()
    with ExitStack() as stack:
        path = mobilenet(stack.enter_context(scratch()) / "mobilenet.onnx")
        servers = {kind: stack.enter_context(server_of(kind, path)) for kind in KINDS}
        first = argparse.Namespace(**{**vars(args), "seconds": args.seconds if args.quick else CHOOSING / args.rate})
        for server in servers.values():
            block(server, bodies, first, 0)
        for turn, kind in enumerate(rounds(args.pairs, KINDS)):
            runs.add(kind, block(servers[kind], bodies, args, 1 + turn // len(KINDS)))
    return runs


def budgets(runs: Runs, _: argparse.Namespace) -> list[Budget]:
    """Of both ways through a device, beside both in process."""
    return [
        Budget(f"{way}: processor time over that of {other}", against(other, "cpu_ms")(runs, way), 1.05)
        for way in (BURST, SERVED)
        for other in (DEFAULT, TUNED)
    ]


def settle(args: argparse.Namespace) -> None:
    """Check the numbers: each client asks in each block. Raises ValueError."""
    if args.quick:
        args.seconds = 0.5
    if args.clients < 1 or args.rate <= 0 or args.seconds < args.clients / args.rate:
        raise ValueError("--clients, --rate, --seconds: each client is to ask at least once in a block")


WEB = Question(
    __doc__,
    measure,
    {
        "p50 ms": interval("p50_ms"),
        "p99 ms": median("p99_ms"),
        "CPU ms a request": interval("cpu_ms"),
        "CPU x default session": times(against(DEFAULT, "cpu_ms")),
        "CPU x 1 intra-op thread": times(against(TUNED, "cpu_ms")),
    },
    options={
        "--clients": {"type": int, "default": 4, "help": "that ask at once (default 4)"},
        "--rate": {"type": float, "default": 20, "help": "requests a second, of all of them (default 20)"},
        "--seconds": {"type": float, "default": 4, "help": "for one block (default 4)"},
    },
    settle=settle,
    budgets=budgets,
    figures=("p50_ms", "p99_ms", "cpu_ms"),
    bars=("cpu_ms", "ms"),
    ours=(BURST, SERVED),
    kept=("clients", "rate"),
    pairs=5,
    is_pinned=False,
)

if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
