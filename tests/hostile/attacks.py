"""Every attack by its name, and the program that carries one out.

    python attacks.py NAME ADDRESS

goes on until it is killed. It prints "at work" when the first round is over or was refused, and each refusal once.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "driver")]

import attacks_on_memory  # noqa: E402 (their folder was just added)
import attacks_on_sockets  # noqa: E402
import attacks_on_time  # noqa: E402
from enemy import ATTACKS, REFUSED, Attack  # noqa: E402

__all__ = ["ATTACKS", "Attack"]
MODULES = attacks_on_memory, attacks_on_sockets, attacks_on_time
_MOST_TOLD = 20


def main() -> None:
    """Attacks."""
    attack, address = ATTACKS[sys.argv[1]], sys.argv[2]
    told: set[str] = set()
    rounds = 0
    while True:
        try:
            for _ in attack.work(address):
                rounds += 1
                if rounds == 1:
                    print("at work", flush=True)
        except REFUSED as error:
            text = f"{type(error).__name__}: {str(error)[:300]}"
            if text not in told and len(told) < _MOST_TOLD:
                told.add(text)
                print(f"refused: {text}", flush=True)
            if not rounds:
                rounds = 1
                print("at work", flush=True)
            threading.Event().wait(0.01)


if __name__ == "__main__":
    main()
