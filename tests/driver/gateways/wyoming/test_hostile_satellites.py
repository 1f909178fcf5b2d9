"""Many hostile connections at once to `burst serve --wyoming`, a process of its own."""

import asyncio
import json
import resource
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from wake_nets import RATE, silence, speech, write_models
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncClient
from wyoming.ping import Ping
from wyoming.wake import Detection

from driver.gateways.wyoming.satellite import MOST_SECONDS

pytestmark = pytest.mark.integration

SPOKEN = speech(1, 1.2, 1)
HELD_PER_SATELLITE = 6 << 20
"""Bytes: half a minute of sound is 1 MiB, of which there are a few copies, and what is read of the next message."""


@contextmanager
def serving(folder, *options):
    """What the command said of itself, and its process."""
    command = [sys.executable, "-m", "driver.cli", "serve", "onnxruntime", "--wyoming", "tcp://:0", "--json"]
    command += ["--wake-word", str(write_models(folder)), "--metrics", ":0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield json.loads(process.stdout.readline()), process
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def resident(process):
    """Bytes of its own."""
    text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private")) << 10


def metric(said, name):
    with urllib.request.urlopen(said["metrics"]) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


async def spoken_to(client):
    """Detections in what it hears."""
    await client.write_event(AudioStart(RATE, 2, 1).event())
    for begin in range(0, len(SPOKEN), 1024):
        await client.write_event(AudioChunk(RATE, 2, 1, SPOKEN[begin : begin + 1024].tobytes()).event())
    await client.write_event(AudioStop().event())
    await client.write_event(Ping().event())
    found = []
    while (event := await asyncio.wait_for(client.read_event(), 120)).type != "pong":
        found.append(event)
    return [Detection.from_event(event).name for event in found if Detection.is_type(event.type)]


def test_ten_thousand_connections(tmp_path):
    """Each is told at once that there are too many; they cost the server no memory, and a satellite that is there hears
    its words meanwhile and after them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(10_000, hard - 300)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 200), hard))

    def attack(port, held):
        for _ in range(count):
            its = held.enter_context(socket.create_connection(("127.0.0.1", port)))
            its.settimeout(60)
            assert b"--satellites" in its.recv(4096)  # all stay open at this side

    async def main(said):
        async with AsyncClient.from_uri(said["wyoming"]) as client:
            assert len(await spoken_to(client)) == 1
            before = resident(process)
            with ExitStack() as held:
                port = int(said["wyoming"].rpartition(":")[2])
                attacking = asyncio.create_task(asyncio.to_thread(attack, port, held))
                rounds = 0
                while not attacking.done():
                    assert len(await spoken_to(client)) == 1
                    rounds += 1
                await attacking
                assert rounds
                assert resident(process) < before + (8 << 20)
                assert len(await spoken_to(client)) == 1

    try:
        with serving(tmp_path, "--satellites", "1") as (said, process):
            asyncio.run(main(said))
            assert metric(said, "burst_satellites_refused_total") == count
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_fifteen_that_send_all_they_can(tmp_path):
    """As much sound as a message may have, without an end: what they keep in memory is bounded, and the sixteenth hears
    its word meanwhile, and after they have vanished.
    """
    flood = AudioChunk(RATE, 2, 1, silence(MOST_SECONDS).tobytes()).event()
    others = 15

    async def attack(uri, started):
        async with AsyncClient.from_uri(uri) as client:
            while True:
                await client.write_event(flood)
                started.set()

    async def main(said):
        async with AsyncClient.from_uri(said["wyoming"]) as client:
            await spoken_to(client)
            before = resident(process)
            started = [asyncio.Event() for _ in range(others)]
            attacks = [asyncio.create_task(attack(said["wyoming"], event)) for event in started]
            await asyncio.gather(*(event.wait() for event in started))
            assert len(await spoken_to(client)) == 1
            assert resident(process) < before + others * HELD_PER_SATELLITE
            for task in attacks:
                assert not task.done()
                task.cancel()
            await asyncio.gather(*attacks, return_exceptions=True)
            assert len(await spoken_to(client)) == 1

    with serving(tmp_path, "--satellites", "16") as (said, process):
        asyncio.run(main(said))
