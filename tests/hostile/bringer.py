"""A client that brings mutants of model files to a served device, as a process: a number a line on stdin, and the
outcome in JSON on stdout.

    python bringer.py ADDRESS KIND SEED

Each mutant is prepared, and runs on zeros and on any bits. Where that has ended the account's engine, the client comes
again, and says so once another engine serves it.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from enemy import plus_one
from mutant_files import FAILS, FAULT, NAMED, REFUSED, RUNS, checked
from mutants import RealMutants
from waiting import until

import driver
from burst import PeerDied

QUARANTINED, ENDED = "ends its trial, and is quarantined", "ends its account's engine, and another one serves"
SECONDS = 5.0
_MOST_BYTES = 1 << 26  # of inputs


class Bringer:
    """A connection that is made anew when its engine has ended."""

    def __init__(self, address: str, kind: str, seed: int) -> None:
        self._address, self._mutants = address, RealMutants(kind, seed)
        self._device = driver.connect(address)

    def bring(self, number: int) -> tuple[str, str]:
        """The outcome, and the error."""
        outcome = REFUSED
        try:
            model = self._mutants.model(number)
            with self._device.prepare(model, deadline=time.monotonic() + 4 * SECONDS) as prepared:
                outcome = FAILS
                self._run(prepared, model, number)
        except PeerDied as error:
            self._come_again()
            return ENDED, str(error)
        except (*NAMED, ValueError) as error:
            if outcome == REFUSED and "is quarantined on this device" in str(error):
                outcome = QUARANTINED
            return checked(outcome, str(error))
        return RUNS, ""

    def _run(self, prepared: Any, model: driver.Model, number: int) -> None:
        pick, operands = random.Random(number), [model.main.operands[i] for i in model.main.inputs]
        shapes = [tuple(size or 1 for size in operand.dimensions) for operand in operands]
        sizes = [int(np.prod(s)) * o.type.dtype.itemsize for s, o in zip(shapes, operands, strict=True)]
        if sum(sizes) > _MOST_BYTES:
            return
        rows = list(zip(shapes, sizes, (operand.type.dtype for operand in operands), strict=True))
        for make in (bytes, pick.randbytes):
            feeds = [np.frombuffer(make(size), dtype).reshape(shape) for shape, size, dtype in rows]
            prepared.run(*feeds, deadline=time.monotonic() + SECONDS)

    def _come_again(self) -> None:
        """Wait until an engine computes for this account."""

        def serves() -> bool:
            try:
                self._device.close()
                self._device = driver.connect(self._address)
                with self._device.prepare(plus_one(self._device)) as prepared:
                    return bool((prepared.run(np.ones(4, np.float32))[0] == 2).all())
            except NAMED:
                return False

        until(serves)


def main() -> None:
    """Reads numbers until the end of its input."""
    bringer = Bringer(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        try:
            found = bringer.bring(int(line))
        except Exception as error:  # noqa: BLE001 (it is the answer)
            found = FAULT, f"{type(error).__name__}: {error}"
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
