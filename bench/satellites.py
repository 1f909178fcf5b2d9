"""What do sixteen satellites on one wake word's model cost, beside one?

    python bench/satellites.py FOLDER [--word hey_jarvis_v0.1.onnx] [--seconds 8] [--pairs 3] [--json FILE]

FOLDER has openWakeWord's melspectrogram.onnx, embedding_model.onnx and the wake word's model. `burst serve onnxruntime
--wyoming` and its device are started anew for each measurement; satellites, wyoming's own clients in this process, send
80 ms of noise every 80 ms, each at its own phase, and a ping behind it: the answer to that tells when the sound was
listened to. Memory of the server and of both processes of the device at the end, while all are connected, and their
processor time per second of one satellite's sound.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from account_memory import family, held
from measure import conditions, scratch
from verdict import Budget, Report, arguments, parse, progress, publish, spell
from wyoming.audio import AudioChunk, AudioStart
from wyoming.client import AsyncClient
from wyoming.ping import Ping

import driver
from driver.cli.timing import estimate, order_of_round

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

QUESTION = "What do sixteen satellites on one wake word's model cost, beside one?"
MANY, STEP, RATE = 16, 1280, 16000
MOST_MEMORY, MOST_MS = 1.1, 80.0
HEAD = ("satellites", "memory, MB", "CPU s / s of sound", "listened to after, ms: p50", "p99")
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pids: Sequence[int]) -> float:
    """Of these processes, since they began."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / _TICKS


async def satellite(address: str, phase: float, seconds: float) -> list[float]:
    """Milliseconds from each chunk to the answer of the ping behind it."""
    noise = np.random.default_rng(1).integers(-500, 500, STEP).astype(np.int16).tobytes()
    chunk, found = AudioChunk(RATE, 2, 1, noise).event(), []
    async with AsyncClient.from_uri(address) as client:
        await client.write_event(AudioStart(RATE, 2, 1).event())
        begin = time.monotonic() + phase
        for n in range(round(seconds * RATE / STEP)):
            await asyncio.sleep(max(0.0, begin + n * STEP / RATE - time.monotonic()))
            sent = time.monotonic()
            await client.write_event(chunk)
            await client.write_event(Ping().event())
            if await client.read_event() is None:
                raise SystemExit("the server ended the connection")
            found.append(1e3 * (time.monotonic() - sent))
        await asyncio.sleep(max(0.0, begin + seconds - time.monotonic()))  # all stay until all are done
    return found


async def measured(address: str, pids: Sequence[int], count: int, seconds: float) -> dict[str, float]:
    """`count` satellites for so long."""
    before = cpu_seconds(pids)
    tasks = [asyncio.create_task(satellite(address, n * STEP / RATE / count, seconds)) for n in range(count)]
    await asyncio.sleep(seconds * 0.95)
    megabytes = held(list(pids))
    times = np.concatenate(await asyncio.gather(*tasks))
    p50, p99 = np.percentile(times, (50, 99))
    cpu = (cpu_seconds(pids) - before) / count / seconds
    return {"megabytes": megabytes, "cpu": cpu, "p50_ms": float(p50), "p99_ms": float(p99)}


def with_server(folder: Path, word: str, count: int, seconds: float) -> dict[str, float]:
    """On a server and a device of their own."""
    with scratch() as place:
        os.environ["BURST_RUNTIME_DIR"] = str(place)
        words = ["serve", "onnxruntime", "--wyoming", "tcp://:0", "--wake-word", str(folder / word), "--json"]
        command = [sys.executable, "-m", "driver.cli", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            try:
                assert process.stdout
                said = json.loads(process.stdout.readline() or "{}")
                if not said:
                    raise SystemExit(f"burst serve has not begun: run burst {' '.join(words)}")
                with driver.connect("onnxruntime") as device:
                    pids = sorted({*family(process.pid), *family(device.service_pid), *family(device.engine_pid)})
                    found = asyncio.run(measured(said["wyoming"], pids, count, seconds))
            finally:
                process.terminate()
        for pid in (device.service_pid, device.engine_pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        return found


def main() -> None:
    """Measures one and many in turns."""
    parser = arguments(__doc__, pairs=3)
    parser.add_argument("folder", type=Path, help="of openWakeWord's models")
    parser.add_argument("--word", default="hey_jarvis_v0.1.onnx", help="(default %(default)s)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement (default %(default)s)")
    args: argparse.Namespace = parse(parser)
    seconds = 1.0 if args.quick else args.seconds
    found: dict[int, list[dict[str, float]]] = {1: [], MANY: []}
    for number in range(args.pairs):
        for count in order_of_round([1, MANY], number):
            progress("satellites", f"round {number + 1}, {count}")
            found[count].append(with_server(args.folder, args.word, count, seconds))
    progress("")
    of = {n: {key: estimate([each[key] for each in rounds]) for key in rounds[0]} for n, rounds in found.items()}
    ratios = [many["megabytes"] / one["megabytes"] for one, many in zip(found[1], found[MANY], strict=True)]
    budgets = [
        Budget(f"memory of {MANY} satellites beside one", estimate(ratios), MOST_MEMORY),
        Budget(f"80 ms of {MANY} satellites are listened to within, p99", of[MANY]["p99_ms"], MOST_MS, "ms"),
    ]
    lines = [
        (str(n), spell(each["megabytes"]), spell(each["cpu"]), spell(each["p50_ms"]), spell(each["p99_ms"]))
        for n, each in of.items()
    ]
    body: dict[str, Any] = {"rounds": {str(n): rounds for n, rounds in found.items()}}
    publish(args, Report(QUESTION, conditions(), lines, budgets, body, HEAD))


if __name__ == "__main__":
    main()
