"""What the scripts here share: subjects, the floor beside which each is measured, and runs of them in rounds.

Timed calls, the order within a round and the interval are those of `burst bench` (driver/cli/timing.py). The floor
(`peers/limit.c`) moves by a factor of ten within an hour on a shared machine, so a figure means something only next to
the floor of the same second: every subject runs once in every round, right after its floor.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from driver.cli.timing import Estimate, estimate, in_words, order_of_round, time_calls
from driver.cli.timing import conditions as machine_conditions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from driver import Burst

    Ask = Callable[[str, int, int], "Block"]  # a peer's name, bytes of a request, how many

HERE = Path(__file__).parent
CLIENT_CPU, DEVICE_CPU = 0, 1
ADD = "in process: numpy.add"  # the unit A, in the runs that have it
T = TypeVar("T")
Block = dict[str, Any]  # p50_us, p99_us, p999_us, max_us of one block; cdf_us where it is known


class NotMeasured(Exception):
    """A subject cannot run here; its row says why."""


def percentiles(samples: NDArray[np.float64]) -> Block:
    """Of samples in nanoseconds; `cdf_us` holds 201 quantiles from 0 to 100 %."""
    p50, p99, p999 = np.percentile(samples, [50, 99, 99.9]) / 1e3
    cdf = np.percentile(samples, np.linspace(0, 100, 201)) / 1e3
    return {
        "p50_us": float(p50),
        "p99_us": float(p99),
        "p999_us": float(p999),
        "max_us": float(samples.max() / 1e3),
        "cdf_us": cdf.round(4).tolist(),
    }


def block_of(call: Callable[[], object], count: int) -> Callable[[], Block]:
    """A block: a short warm-up, then `count` timed calls."""

    def block() -> Block:
        time_calls(call, max(10, count // 20))
        return percentiles(time_calls(call, count))

    return block


def seconds_in_flight(burst: Burst, count: int, depth: int, timeout: float | None = None) -> float:
    """Seconds that each of so many requests takes while `depth` are in flight, with the inputs in place. `timeout`: for
    one result.
    """
    begin, futures = time.perf_counter(), deque[Any]()
    for _ in range(count):
        if len(futures) == depth:
            futures.popleft().result(timeout)
        futures.append(burst.submit())
    for future in futures:
        future.result(timeout)
    return (time.perf_counter() - begin) / count


@dataclass
class Subject:
    """Something whose round trip is measured. `floor` names the floor that it stands beside."""

    name: str
    block: Callable[[], Block]
    floor: str
    is_ours: bool = False


class Runs:
    """What came of it: a block per round for every subject, and why some have none."""

    def __init__(self) -> None:
        self.blocks: dict[str, list[Block]] = {}
        self.errors: dict[str, str] = {}

    def values(self, name: str, key: str = "p50_us") -> NDArray[np.float64]:
        """One figure of every round."""
        return np.array([block[key] for block in self.blocks[name]])

    def add(self, name: str, block: Block) -> None:
        """Keep a block of this round."""
        self.blocks.setdefault(name, []).append(block)

    def medians(self, name: str, *keys: str) -> dict[str, float]:
        """Return the medians of these figures over all rounds."""
        return {key: float(np.median(self.values(name, key))) for key in keys}

    def attempt(self, name: str, block: Callable[[], Block], words: str) -> None:
        """Add a block to a subject that still has its rows, or drop it with why it was not measured. `words`: of the
        progress.
        """
        if name in self.errors:
            return
        progress(words, name)
        try:
            self.add(name, block())
        except NotMeasured as why:
            self.drop(name, str(why))

    def has(self, *names: str) -> bool:
        """True when all of them were measured."""
        return all(name in self.blocks for name in names)

    def drop(self, name: str, why: str) -> None:
        """Pairs need every round, so a subject that fails once has no rows."""
        self.errors[name] = why
        self.blocks.pop(name, None)


def rounds(pairs: int, subjects: Sequence[T], name: Callable[[T], str] = str) -> Iterator[T]:
    """Yield every subject once a round, backwards in every other one, and tell how far this is."""
    for number in range(pairs):
        for subject in subjects[:: -1 if number % 2 else 1]:
            progress(f"round {number + 1} of {pairs}", name(subject))
            yield subject
    progress("")


def interleave(
    subjects: Sequence[Subject], floors: dict[str, Callable[[], Block]], rounds: int, tell: Callable[[str, str], None]
) -> Runs:
    """Runs every subject once a round, each right after its floor; the order turns, and reverses every other round."""
    runs = Runs()
    for number in range(rounds):
        seen: dict[str, list[Block]] = {}
        for subject in order_of_round(subjects, number):
            if subject.name in runs.errors:
                continue
            tell(f"round {number + 1} of {rounds}", subject.name)
            floor = floors[subject.floor]()
            seen.setdefault(subject.floor, []).append(floor)
            try:
                block = subject.block()
            except NotMeasured as why:
                runs.drop(subject.name, str(why))
            else:
                runs.blocks.setdefault(subject.name, []).append({**block, "floor_us": floor["p50_us"]})
        for name, blocks in seen.items():
            runs.blocks.setdefault(name, []).append(_typical(blocks))
    tell("", "")
    return runs


def _typical(blocks: Sequence[Block]) -> Block:
    """One floor a round for the table; every subject keeps its own neighbour."""
    keys = ("p50_us", "p99_us", "p999_us", "max_us")
    row = {key: float(np.median([block[key] for block in blocks])) for key in keys}
    return {**row, "floor_us": row["p50_us"]}


def over_floor(runs: Runs, name: str) -> Estimate:
    """Microseconds above the floor of the same moment."""
    return estimate(runs.values(name) - runs.values(name, "floor_us"))


def over_floor_in_adds(runs: Runs, name: str) -> Estimate | None:
    """The same in units of A, which machines differ less in than in microseconds; None: it was not measured."""
    if not runs.has(name):
        return None
    return estimate((runs.values(name) - runs.values(name, "floor_us")) / runs.values(ADD))


def times_floor(runs: Runs, name: str) -> Estimate:
    """Ratio to the floor of the same moment."""
    return estimate(runs.values(name) / runs.values(name, "floor_us"))


def ratio(runs: Runs, name: str, reference: str, key: str = "p50_us") -> Estimate:
    """Ratio to another subject in the same round."""
    return estimate(runs.values(name, key) / runs.values(reference, key))


# Programs in C


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory for binaries and sockets, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="burst-bench-") as name:
        yield Path(name)


def compile_c(target: Path, *sources: Path, include: Path = HERE) -> Path:
    """cc -O2 -flto, as the extension is built. Ends the script with the compiler's words when that fails."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        sys.exit("bench: no C compiler 'cc'; install one (Debian: apt install gcc libc6-dev)")
    command = [compiler, "-O2", "-flto", "-I", include, "-o", target, *sources, "-lpthread"]
    if subprocess.run(command, check=False).returncode:
        sys.exit("bench: the C programs do not compile")
    return target


def compile_with_ours(target: Path, program: Path) -> Path:
    """A C program of the bench with our own C sources, but for those of Python's calls."""
    sources = HERE.parent / "csrc"
    ours = [path for path in sorted(sources.rglob("*.c")) if not re.search("<Python.h>|/hot.h", path.read_text())]
    return compile_c(target, program, *ours, include=sources)


def c_block(binary: Path, mode: str, count: int, nbytes: int = 64, *more: int) -> Callable[[], Block]:
    """A block of one of our C programs, which print one line of JSON in nanoseconds."""

    def block() -> Block:
        command = [str(binary), mode, str(count), str(nbytes), *map(str, more)]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)
        return {f"{key}_us": row[f"{key}_ns"] / 1e3 for key in ("p50", "p99", "p999", "max")}

    return block


# Peers

PEER_TIMEOUT = 60  # seconds for one block


@contextmanager
def server_process(command: list[str]) -> Iterator[int]:
    """The pid of a server that prints a line once clients may connect; it ends with the block."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdin
        assert process.stdout
        try:
            if not process.stdout.readline():
                raise SystemExit(f"the server has not started: {' '.join(command)}")
            yield process.pid
        finally:
            process.stdin.close()
            process.terminate()


@contextmanager
def peers_process() -> Iterator[Ask]:
    """peers/peers.py, which runs any of them in processes of its own that end with their block."""
    command = [sys.executable, str(HERE / "peers" / "peers.py"), "--stdin", "--timeout", str(PEER_TIMEOUT)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, **pipes) as process:

        def ask(name: str, nbytes: int, count: int) -> Block:
            try:
                print(name, nbytes, count, file=process.stdin, flush=True)
                return figures_of(json.loads(process.stdout.readline()))
            except (OSError, ValueError) as error:
                raise NotMeasured(f"{type(error).__name__}: {error}") from error

        try:
            yield ask
        finally:
            process.stdin.close()


def peer_block(ask: Ask, name: str, count: int, nbytes: int = 64) -> Callable[[], Block]:
    """A block of one of them."""
    return lambda: ask(name, nbytes, count)


def figures_of(row: Block) -> Block:
    """The row of a peer, unless it says why it has no figures."""
    if "error" not in row:
        return row
    is_missing = row["error"].startswith(("ModuleNotFoundError", "ImportError"))
    raise NotMeasured("not installed" if is_missing else row["error"])


# Conditions


def held(pid: int | str = "self") -> dict[str, float]:
    """What a process has; this one, after it has cleaned up."""
    if pid == "self":
        gc.collect()
    memory = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        key, _, value = line.partition(":")
        memory[key] = float(value.split()[0])
    return {
        "resident_kib": memory["Rss"],
        "shared_kib": memory["Shared_Clean"] + memory["Shared_Dirty"],
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "mappings": len(Path(f"/proc/{pid}/maps").read_text().splitlines()),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
    }


def shared_memory(pids: Iterable[int]) -> float:
    """MiB in memory, pages in proportion to who shares them."""
    lines = (Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() for pid in pids)
    return sum(int(line.split()[1]) for each in lines for line in each if line.startswith("Pss:")) / 1024


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all threads (CPUCLOCK_SCHED of clock_gettime(2))."""
    return time.clock_gettime(~pid << 3 | 2)


def pin_client() -> None:
    """Move this process to its CPU, before it has threads. Ends the script where there are not two CPUs."""
    if not {CLIENT_CPU, DEVICE_CPU} <= os.sched_getaffinity(0):
        sys.exit(f"bench: CPUs {CLIENT_CPU} and {DEVICE_CPU} are needed, one for each side")
    os.sched_setaffinity(0, {CLIENT_CPU})


def conditions() -> dict[str, Any]:
    """Those of `burst bench`, with all CPUs: a script that has pinned itself may use only one."""
    return {**machine_conditions(), "processors": os.cpu_count()}


# What is printed and written


class Budget(NamedTuple):
    """A promise, and what came of it: None when it could not be measured."""

    text: str
    found: Estimate | None
    limit: float
    unit: str = "x"
    at_least: bool = False  #: the limit is the least that keeps it, and not the most

    @property
    def verdict(self) -> str:
        """The median decides; an interval that contains the limit is told."""
        if self.found is None:
            return "not measured"
        median, low, high, _ = self.found
        is_kept = median >= self.limit if self.at_least else median <= self.limit
        is_within = low < self.limit <= high if self.at_least else low <= self.limit < high
        return ("met" if is_kept else "missed") + (", the interval contains the limit" if is_within else "")

    def line(self) -> str:
        """For people."""
        return f"{self.text}: {spell(self.found, self.unit)} -> {self.verdict}"


def spell(found: Estimate | None, unit: str = "") -> str:
    """A median with its interval."""
    if found is None:
        return "-"
    return f"{found.median:.2f}{unit and ' '}{unit} [{found.low:.2f} .. {found.high:.2f}]"


def size(nbytes: int) -> str:
    """For people."""
    if nbytes < 1024:
        return f"{nbytes} B"
    return f"{nbytes >> 10} KiB" if nbytes < 1 << 20 else f"{nbytes >> 20} MiB"


def arguments(doc: str | None, pairs: int = 9) -> argparse.ArgumentParser:
    """The options that all scripts have."""
    words = inspect.cleandoc(doc or "")
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, help=f"rounds; below 9 proves little (default {pairs}, with --quick 2)")
    parser.set_defaults(default_pairs=pairs)
    parser.add_argument("--quick", action="store_true", help="tiny blocks: shows that it works, measures nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all percentiles of all blocks, and the conditions")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture (.png, .svg, .pdf); needs matplotlib")
    return parser


def ask(questions: dict[str, Callable[[], object]]) -> None:
    """Answer one of a script's questions: that which the first word names, else the first."""
    words = sys.argv[1:2]
    if words and words[0] in questions:
        del sys.argv[1]
    questions[words[0] if words and words[0] in questions else next(iter(questions))]()


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line, checked before anything long begins."""
    args = parser.parse_args()
    if args.pairs is None:
        args.pairs = 2 if args.quick else args.default_pairs
    if args.pairs < 1:
        parser.error("--pairs: at least 1")
    if args.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib; install it, or the extra 'bench'")
    return args


_told: list[str] = []


def progress(stage: str, step: str = "") -> None:
    """One line that rewrites itself; a line per stage when stderr is no terminal. "" ends it."""
    if sys.stderr.isatty():
        print(f"\r{f'{stage}: {step}' if step else stage:<78}", end="" if stage else "\n", file=sys.stderr, flush=True)
    elif stage and _told != [stage]:
        _told[:] = [stage]
        print(stage, file=sys.stderr, flush=True)


def subject_rows(runs: Runs, subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """A row per floor and subject: medians over rounds, and the pairs."""
    floors = [Subject(name, dict, name) for name in dict.fromkeys(s.floor for s in subjects)]
    return [_row(runs, subject) for subject in (*floors, *subjects)]


def _row(runs: Runs, subject: Subject) -> dict[str, Any]:
    row: dict[str, Any] = {"name": subject.name, "ours": subject.is_ours, "floor": subject.floor}
    if subject.name in runs.errors:
        return {**row, "error": runs.errors[subject.name]}
    row |= runs.medians(subject.name, "p50_us", "p99_us", "p999_us")
    row["over_floor_us"] = over_floor(runs, subject.name)._asdict()
    row["times_floor"] = times_floor(runs, subject.name)._asdict()
    return {**row, "rounds": runs.blocks[subject.name]}


HEAD = ("", "p50 us", "p99 us", "p99.9 us", "over the floor, us", "x floor", "floor")


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table."""
    name = row["name"]
    if "error" in row:
        return name, "-", "-", "-", row["error"][:60], "", ""
    figures = tuple(f"{row[key]:.2f}" for key in ("p50_us", "p99_us", "p999_us"))
    if name == row["floor"]:
        return name, *figures, "", "", ""
    floor = row["floor"].removeprefix("floor: ").removeprefix("limit ").partition(",")[0]
    over, times = Estimate(**row["over_floor_us"]), Estimate(**row["times_floor"])
    return name, *figures, spell(over), f"{times.median:.2f}", floor


def table(lines: Sequence[Sequence[str]], head: Sequence[str] = HEAD) -> str:
    """Columns as wide as they need to be."""
    widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    show = [head, ["-" * w for w in widths], *lines]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in show)


def markdown(lines: Sequence[Sequence[str]], head: Sequence[str] = HEAD) -> str:
    """The same for a page."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


class Report(NamedTuple):
    """What a script has to say."""

    question: str
    conditions: dict[str, Any]
    lines: Sequence[Sequence[str]]
    budgets: Sequence[Budget]
    body: dict[str, Any]  #: what the JSON has besides
    head: Sequence[str] = HEAD
    more: Sequence[tuple[Sequence[Sequence[str]], Sequence[str]]] = ()  #: further tables: their lines and heads


def publish(args: argparse.Namespace, report: Report) -> None:
    """Prints all, and writes the JSON."""
    machine = in_words(report.conditions)
    print(f"{report.question}\n{machine}\n")
    tables = ((report.lines, report.head), *report.more)
    print("\n\n".join(table(*one) for one in tables), end="\n\n")
    print("\n".join(budget.line() for budget in report.budgets))
    if args.quick:
        print("\n--quick: these figures measure nothing.")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(_plain(report, args.pairs), indent=1) + "\n")


def _plain(report: Report, pairs: int) -> dict[str, Any]:
    budgets = [
        {**b._asdict(), "found": b.found._asdict() if b.found else None, "verdict": b.verdict} for b in report.budgets
    ]
    return {
        "question": report.question,
        "conditions": report.conditions,
        "pairs": pairs,
        "tables": [{"head": head, "rows": lines} for lines, head in ((report.lines, report.head), *report.more)],
        "budgets": budgets,
        **report.body,
    }
