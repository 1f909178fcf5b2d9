"""Hear keypad digits in noise, 20 ms at a time, with a recurrent network in another process.

    python examples/audio.py                        generated keys in more and more noise, in real time
    python examples/audio.py --wav call.wav         a sound file
    python examples/audio.py --microphone default   a microphone, by its name in ALSA
    python examples/audio.py --fast                 without waiting for the sound to pass

What the network remembers from block to block stays on the device, in buffers that take turns: what one execution
writes the next one reads, and no byte of it passes through this program. Every block goes to the same device over the
plain RPC path too. The run prints keys as it hears them, leaves a picture in --out, and closes with tables.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from audio_report import Notes, report
from audio_sources import Pace, Source, open_source
from keypad import BLOCK
from listener import CLASSES, STATES, build_model
from report import Latencies
from rich.console import Console

import burst
import driver
from burst import Request, RequestArgument

if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT = 5.0  # seconds for one execution
WARM_UP = 20  # blocks of silence on each path before anything is measured


class Listener:
    """The network on one path to the device: a block goes in, an answer comes out, and its memory stays there."""

    def __init__(self, prepared: driver.RemotePreparedModel, execute: Callable[..., burst.Result]) -> None:
        """`execute`: that of the prepared model, which is the plain path, or of a burst on it."""
        self._execute = execute
        self._memory = driver.Memory.create(4 * (BLOCK + CLASSES))
        self.block = self._memory.asarray(np.float32, (BLOCK,))  # to be written in place
        roles = [driver.BufferRole(0, n) for n in (1, 2)]  # a state is input n of the model, and output n
        allocate, desc = prepared.device.allocate, driver.BufferDesc()
        self._states = [[allocate(desc, [prepared], [role], [role]) for role in roles] for _ in range(2)]
        # Two requests that never change: whoever executes them recognises them, and checks and binds them once.
        self._requests = [self._request(*self._states), self._request(*reversed(self._states))]
        self.forget()
        for _ in range(WARM_UP):  # memory is mapped, and caches are filled
            self.step()
        self.forget()

    def _request(self, old: list[driver.Buffer], new: list[driver.Buffer]) -> Request:
        block, answer = RequestArgument(length=4 * BLOCK), RequestArgument(offset=4 * BLOCK, length=4 * CLASSES)
        *states, one, other = (RequestArgument(pool=n) for n in range(1, 5))  # whole buffers: no offset, no length
        return Request((block, *states), (answer, one, other), (self._memory, *old, *new))

    def forget(self) -> None:
        """Begin as if nothing had ever been heard."""
        for buffer, shape in zip(self._states[0], STATES, strict=True):
            buffer.copy_from(np.zeros(shape, np.float32))
        self._turn, self.latencies = 0, Latencies()

    def step(self) -> np.ndarray:
        """Hear the block: how likely each key is, in memory that the next step writes to."""
        start = time.perf_counter()
        result = self._execute(self._requests[self._turn], measure=True, timeout=TIMEOUT)
        self.latencies.add(time.perf_counter() - start, result.timing.time_on_device)
        result.raise_for_status()
        self._turn = 1 - self._turn
        return result.outputs[0][0]  # the outputs in buffers are None


def run(listeners: dict[str, Listener], source: Source, blocks: int, pace: Pace, notes: Notes) -> None:
    """Hear so many blocks, or all there are; Ctrl-C ends it early."""
    fast, *others = listeners.values()
    try:
        for index in range(blocks):
            if not source.read(fast.block):
                break
            for other in others:
                other.block[...] = fast.block
            pace.wait()
            turns = sorted(listeners, reverse=index % 2 == 1)  # neither path always comes second
            answers = {path: listeners[path].step() for path in turns}
            notes.add(fast.block, [answers[path] for path in listeners])
    except KeyboardInterrupt:
        notes.console.print("stopped early")


def arguments() -> argparse.Namespace:
    """Read the command line and refuse what cannot work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, source = parser.add_argument, parser.add_mutually_exclusive_group()
    source.add_argument("--wav", type=Path, metavar="FILE", help="a sound file, at any rate, in anything FFmpeg reads")
    source.add_argument("--microphone", metavar="NAME", help="a microphone that ALSA knows by that name")
    add("--seconds", type=float, default=20, help="of sound, at most 600 (default: 20)")
    add("--seed", type=int, default=0, help="which generated sound, at most 999 (default: 0)")
    add("--fast", action="store_true", help="do not wait for the sound to pass")
    best = "litert" if find_spec("ai_edge_litert") else "reference"
    add("--device", default=best, help=f"which device runs the network (default here: {best})")
    out = Path(__file__).with_name("out")
    add("--out", type=Path, default=out, help="folder for the results (default: examples/out)")
    args = parser.parse_args()
    for name, least, most in (("seconds", 0.02, 600), ("seed", 0, 999)):
        if not least <= getattr(args, name) <= most:
            parser.error(f"--{name} {getattr(args, name)}: must be from {least} to {most:g}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {args.out}: cannot be made ({error.strerror}); pass a folder you may write to")
    return args


def main() -> None:
    """Run the demo."""
    args, console = arguments(), Console()
    try:
        with ExitStack() as stack:
            source = stack.enter_context(closing(open_source(args.wav, args.microphone, args.seed, args.seconds)))
            device = stack.enter_context(driver.connect(args.device))
            prepared = stack.enter_context(device.prepare(build_model()))
            fast = stack.enter_context(prepared.burst(measure=True))
            paths = {"burst": fast.execute, "plain RPC": prepared.execute}
            listeners = {path: Listener(prepared, execute) for path, execute in paths.items()}
            pace, notes = Pace(not (args.fast or source.is_live)), Notes(source, console)
            run(listeners, source, round(args.seconds * 50), pace, notes)
            runs = fast.stats()["runs"]
    except burst.PeerDied as error:
        raise SystemExit("audio.py: the device died, and what the network remembered with it; start again") from error
    except (ValueError, driver.DriverError, burst.BurstError) as error:
        raise SystemExit(f"audio.py: {error}") from error
    facts = {
        "source": f"{source.name}; {pace.late} blocks taken late",
        "device": f"{args.device}; {runs['burst']} runs in the burst ({WARM_UP} to warm up), {runs['plain']} fell back",
    }
    report(notes, {path: listener.latencies for path, listener in listeners.items()}, facts, args.out)


if __name__ == "__main__":
    main()
