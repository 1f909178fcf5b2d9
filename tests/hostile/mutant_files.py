"""What the runtimes make of mutants of real model files: each is loaded and run as a trial does it, by the thousand.

    python mutant_files.py onnx --count 100000 --seed 7 [--first N] [--folder DIR] [--json]

A process that is thrown away, confined as a trial is, takes one mutant after the other until one ends it, by a crash of
the runtime's own; the next process goes on behind that. Prints how many ended how. A mutant for which our own code has
no words is a fault: it ends the run with 1, and is written to the folder, as those are that ended their process.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import resource
import sys
import traceback
from collections import Counter
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from mutants import RealMutants

from burst import BurstError, Timeout
from driver.devices import device_class
from driver.devices.files import RUNTIMES, file_digest
from driver.errors import DriverError, signal_name
from driver.interface import Preparation
from driver.nn.file_form import file_of
from driver.protocol.model_codec import decode_valid, encode, sealed
from driver.service.fork_server import ForkServer
from driver.service.trials import run_once

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from burst.channel import Channel
    from driver.interface import Device

AT_ONCE = 1000
"""Mutants that a process takes at most."""
SECONDS, LOOP_SECONDS = 20.0, 0.05
"""That one may take, and each of its loops."""
ROOM = 2 << 30
"""Bytes of address space that a process may take, so that mutants leave the machine some memory."""
REFUSED, FAILS, RUNS = "refused", "fails when it runs", "runs"
LONG, LARGE = f"takes longer than {SECONDS:g} s", f"takes more than {ROOM >> 20} MiB"
FAULT = "fault"
NAMED = (BurstError, DriverError)
"""Errors that are meant."""
_FEWEST_WORDS = 3


class MutantLoader:
    """Processes that load mutants with one runtime, and what has come of them."""

    def __init__(self, kind: str, seed: int) -> None:
        """Fork the server of those processes. No thread may exist."""
        self.mutants = RealMutants(kind, seed)
        made = device_class(RUNTIMES[kind])
        device = made(threads=1) if "threads" in signature(made).parameters else made()
        self._server = ForkServer(device, partial(_take, device, self.mutants), ROOM)
        self.outcomes = Counter[str]()
        self.deadly: list[int] = []  #: mutants that ended their process, or would not end
        self.faults: list[str] = []  #: of ours
        self.accepted: list[int] = []  #: mutants that run, the last of them

    def load(self, first: int, last: int) -> None:
        """Load these mutants."""
        while first < last:
            with self._server.begin() as channel:
                channel.send([first, min(first + AT_ONCE, last)])
                first = self._follow(channel, first, min(first + AT_ONCE, last))

    def _follow(self, channel: Channel, number: int, last: int) -> int:
        """Count what a process says. The number of the mutant with which the next one begins."""
        while number < last:
            outcome, text = _told(channel)
            number += 1
            self.outcomes[outcome] += 1
            if outcome == FAULT:
                self.faults.append(f"{number - 1}: {text}")
            elif outcome == RUNS:
                self.accepted = [*self.accepted[-99:], number - 1]
            elif outcome not in {REFUSED, FAILS}:
                self.deadly.append(number - 1)
                break
        return number


def table(outcomes: dict[str, int]) -> str:
    """A line for each outcome."""
    return "\n".join(f"{times:>12,} {outcome}" for outcome, times in Counter(outcomes).most_common())


def _told(channel: Channel) -> tuple[str, str]:
    """The outcome of the next mutant, and its error."""
    try:
        message = channel.receive(SECONDS)
    except Timeout:
        return LONG, ""
    match message.body:
        case ["ended", int(code), str(words)]:
            how = signal_name(-code) if code < 0 else f"exit status {code}"
            return f"ends its process: {how}", words
        case ["refused", int(), str(words)]:
            return LARGE, words
        case [str(outcome), str(text)]:
            return outcome, text
    raise AssertionError(message.body)


# ---- the process of some mutants


def _take(device: Device, mutants: RealMutants, channel: Channel) -> None:
    faulthandler.disable()  # pytest's writes to a descriptor that is another one here
    first, last = channel.receive().body
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    for number in range(first, last):
        channel.send([*judged(device, mutants, number)])


def judged(device: Device, mutants: RealMutants, number: int) -> tuple[str, str]:
    """What a device makes of a mutant, and the error. FAULT: our own code does not know what it is."""
    outcome = REFUSED
    try:
        encoded = encode(mutants.model(number), 0)
        model = decode_valid(sealed([os.dup(encoded.fd)], encoded.where), encoded.where)
        file = file_of(model)
        assert file is not None
        file_digest(file)
        (reason,) = device.explain(model)
        if reason is not None:
            return checked(REFUSED, reason)
        prepared = device.prepare(model, Preparation())
        outcome = FAILS
        for fill in (np.zeros, partial(_at_random, np.random.default_rng(number))):
            run_once(prepared, model, fill, LOOP_SECONDS)
        outcome = RUNS
    except MemoryError:
        return outcome, "no memory"
    except NAMED as error:
        return checked(outcome, str(error))
    except Exception as error:  # noqa: BLE001 (it is the result)
        if outcome == REFUSED or not isinstance(error, ValueError):  # arrays that do not fit, as `bind` tells it
            return FAULT, traceback.format_exc()
        return checked(outcome, str(error))
    return outcome, ""


def checked(outcome: str, words: str) -> tuple[str, str]:
    """An outcome and its error, which has to say something."""
    return (outcome if len(words.split()) >= _FEWEST_WORDS else FAULT), words


def _at_random(pick: np.random.Generator, shape: list[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Any bits: indices that are far outside, numbers that are none."""
    return np.frombuffer(pick.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=RUNTIMES)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", action="store_true", help="print the table and the numbers for a program")
    args = parser.parse_args()
    loader = MutantLoader(args.kind, args.seed)
    for first in range(args.first, last := args.first + args.count, AT_ONCE):
        loader.load(first, min(first + AT_ONCE, last))
    if args.json:
        print(json.dumps({key: getattr(loader, key) for key in ("outcomes", "faults", "deadly", "accepted")}))
        return
    print(table(loader.outcomes), *loader.faults, sep="\n")
    for number in loader.deadly if args.folder else ():
        file, data = loader.mutants.mutant(number)
        (args.folder / f"{args.seed}-{number}-{file.name}").write_bytes(data)
    sys.exit(bool(loader.faults))


if __name__ == "__main__":
    main()
