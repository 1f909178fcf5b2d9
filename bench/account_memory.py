"""What does an engine for each account cost in memory?

    python bench/account_memory.py [DEVICE …] [--rounds N]

`burst serve DEVICE --group` under an account of its own; clients of other accounts, which only root can start. Each
prepares a FULLY_CONNECTED with 100 MB of weights, and runs it in a burst that stays open. For one client, for 16 of one
account, and for 16 of two: what all processes of the device keep in memory together, with the cell of the device's own
account, which is always there. Private pages, and pages of files, count in proportion to who shares them (PSS), and
shared memory counts whole: a model that the engine has mapped, and does not touch, is no page of its own, but is there.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

import driver

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVER, GROUP, ONE, TWO = 61701, 61799, 61702, 61703  # numbers need no account
WEIGHTS = 25_600, 1024  # float32: 100 MB
CLIENTS = 16
MOST_OF_ONE, MOST_OF_TWO = 1.1, 2.2  # times the memory of one client
ACCOUNTS = Path(__file__).resolve().parents[1] / "tests/accounts.py"
SETTLED, LOOKS = 0.5, 20  # seconds between two looks that have to agree; at most so many


def client(address: str) -> None:
    """Prepares the model, runs it, says so, and keeps it until its standard input ends."""
    m = driver.ModelBuilder()
    weights, bias = np.ones(WEIGHTS, np.float32), np.zeros(WEIGHTS[0], np.float32)
    m.output(m.operation("FULLY_CONNECTED", m.input("float32", (1, WEIGHTS[1])), weights, bias, 0))
    with driver.connect(address) as device, device.prepare(m.build()) as prepared, prepared.burst() as burst:
        burst.run(np.ones((1, WEIGHTS[1]), np.float32))
        print("ready", flush=True)
        sys.stdin.read()


def begun(uid: int, words: list[str], environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """A process of that account, in the group."""
    command = [sys.executable, "-I", "-S", str(ACCOUNTS), str(uid), f"{uid},{GROUP}", sys.executable, *words]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": "/", "env": environment}
    return subprocess.Popen(command, **pipes, start_new_session=True)


@contextmanager
def served(device: str) -> Iterator[tuple[str, int]]:
    """The socket of a device that is served to the group, and the process that listens."""
    with tempfile.TemporaryDirectory(prefix="burst-m-", dir="/tmp") as name:
        home = Path(name)
        home.chmod(0o755)
        os.chown(home, SERVER, SERVER)
        words = ["-m", "driver.cli", "serve", device, "--group", str(GROUP), "--dir", f"{home}/run"]
        with begun(SERVER, words, os.environ | {"HOME": name}) as process:
            assert process.stdout
            while "is ready after" not in (line := process.stdout.readline()):
                if not line:
                    raise SystemExit(f"{device} was not served")
            try:
                yield f"{home}/run/{device}.sock", process.pid
            finally:
                process.terminate()


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def held(pids: list[int]) -> float:
    """Megabytes that these processes keep: their part of private and of file pages, and shared memory whole."""
    kilobytes, shared = 0, dict[int, int]()
    for pid in pids:
        roll = Path(f"/proc/{pid}/smaps_rollup").read_text()
        kilobytes += sum(map(int, re.findall(r"^Pss_(?:Anon|File):\s+(\d+)", roll, re.MULTILINE)))
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            where, _, _, _, inode, *path = line.split(maxsplit=5)
            if path and path[0].startswith(("/memfd:", "/dev/shm/", "/dev/zero")) and int(inode) not in shared:
                with suppress(FileNotFoundError):  # it was there a moment ago
                    shared[int(inode)] = os.stat(f"/proc/{pid}/map_files/{where}").st_blocks // 2
    return (kilobytes + sum(shared.values())) / 1024


def settled(pid: int) -> float:
    """Megabytes of a process and all below it, when they do not change any more."""
    before = 0.0
    for _ in range(LOOKS):
        now = held(family(pid))
        if abs(now - before) < now / 100:
            break
        before = now
        time.sleep(SETTLED)
    return now


def measured(device: str, uids: list[int]) -> float:
    """Megabytes of the device with clients of these accounts."""
    with served(device) as (address, pid), ExitStack() as stack:
        words = [str(Path(__file__).resolve()), "--client", address]
        for uid in uids:
            process = stack.enter_context(begun(uid, words))
            stack.callback(process.kill)
            assert process.stdout
            if process.stdout.readline() != "ready\n":
                raise SystemExit(f"the client of uid {uid} failed")
        return settled(pid)


def main() -> None:
    """Prints a table, and whether the budgets are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("devices", nargs="*", default=["litert", "onnxruntime", "reference"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--client", metavar="ADDRESS", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        client(given.client)
        return
    if os.geteuid():
        raise SystemExit("only root can start clients of other accounts")
    half = CLIENTS // 2
    ways = {"none": [], "one": [ONE], "16 of one": [ONE] * CLIENTS, "16 of two": [ONE] * half + [TWO] * half}
    print("| device | no client, MB | one client, MB | 16 of one account | 16 of two accounts |\n|---|---|---|---|---|")
    is_kept = True
    for device in given.devices:
        none, one, same, two = (median(measured(device, uids) for _ in range(given.rounds)) for uids in ways.values())
        print(f"| {device} | {none:.0f} | {one:.0f} | {same:.0f}, {same / one:.2f} x | {two:.0f}, {two / one:.2f} x |")
        is_kept &= same <= MOST_OF_ONE * one and two <= MOST_OF_TWO * one
    raise SystemExit(0 if is_kept else f"more than {MOST_OF_ONE} x or {MOST_OF_TWO} x")


if __name__ == "__main__":
    main()
