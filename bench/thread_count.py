"""How many threads should the litert device give a model?

    python bench/thread_count.py [--threads 1 2] [--json FILE] [--plot FILE]

Bursts of the litert device on as many threads as --threads says and on as many as the device chooses by itself, one
right after the other in each round: ADD of 4 floats, where there is nothing to share, and MobileNetV1 from its smallest
to its largest. No process is pinned. While "a processor is busy", another process computes without end, as a client
does that decodes the next frame: then threads wait for each other. What is chosen is right when it is no slower than
the best of the others.
"""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from burst_roundtrip import add_model
from in_process import InProcess
from litert_threads import NAMES, Chosen
from measure import Runs, conditions, percentiles, ratio
from models import feeds_of, mobilenet
from own_device import own_device
from verdict import Budget, Report, arguments, parse, progress, publish, spell

from driver.cli.timing import time_calls

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from measure import Block

    from driver import Model, RemoteDevice
    from driver.cli.timing import Estimate

QUESTION = "How many threads should the litert device give a model?"
IDLE, BUSY = "nothing else runs", "a processor is busy"
CHOSEN = "chosen"
MODELS: dict[str, Callable[[], Model]] = {
    "ADD of 4 floats": add_model,
    "MobileNetV1 0.25, 128 pixels": lambda: mobilenet("float32", 0.25, 128),
    "MobileNetV1 0.5, 160 pixels": lambda: mobilenet("float32", 0.5, 160),
    "MobileNetV1 1.0, 224 pixels": lambda: mobilenet("float32"),
    "MobileNetV1 1.0, 224 pixels, per-channel": lambda: mobilenet("per-channel"),
}


def products(model: Model) -> int:
    """What its convolutions multiply."""
    total, operands = 0, model.main.operands
    for operation in model.main.operations:
        if operation.type in {"CONV_2D", "DEPTHWISE_CONV_2D"}:
            sizes = operands[operation.inputs[1]].dimensions[1:]
            window = sizes[:2] if operation.type == "DEPTHWISE_CONV_2D" else sizes
            total += math.prod(operands[operation.outputs[0]].dimensions) * math.prod(window)
    return total


@contextmanager
def busy_processor() -> Iterator[Callable[[bool], None]]:
    """Another process that computes while it is told to; it stands still until then."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        process.send_signal(signal.SIGSTOP)
        try:
            yield lambda busy: process.send_signal(signal.SIGCONT if busy else signal.SIGSTOP)
        finally:
            process.kill()


def blocks_of(model: Model, devices: dict[str, RemoteDevice], milliseconds: float, stack: ExitStack) -> dict[str, Any]:
    """A block on each device, about so long."""
    found, feeds = {}, feeds_of(model)
    for who, device in devices.items():
        burst = stack.enter_context(stack.enter_context(device.prepare(model)).burst())
        for place, feed in zip(burst.inputs, feeds, strict=True):
            place[...] = feed
        found[who] = burst.run
    one = next(iter(found.values()))
    time_calls(one, 3)
    count = max(3, int(milliseconds * 1e6 / np.median(time_calls(one, 5))))
    return {who: _block(run, count) for who, run in found.items()}


def _block(run: Callable[[], object], count: int) -> Callable[[], Block]:
    """`block_of` with a warm-up that is a part of the block however few calls that has."""

    def block() -> Block:
        time_calls(run, max(3, count // 20))
        return percentiles(time_calls(run, count))

    return block


def measure(args: argparse.Namespace, models: dict[str, Model], stack: ExitStack) -> Runs:
    """All rounds; the order of the devices turns."""
    names = {**{str(n): NAMES[n] for n in args.threads}, CHOSEN: NAMES[None]}
    devices = {who: stack.enter_context(own_device(name)) for who, name in names.items()}
    tell = stack.enter_context(busy_processor())
    runs, blocks = Runs(), {}
    for name, model in models.items():
        progress("prepares", name)
        blocks[name] = list(blocks_of(model, devices, args.milliseconds, stack).items())
    for number in range(args.pairs):
        for state in (IDLE, BUSY):
            tell(state == BUSY)
            for name, sides in blocks.items():
                progress(f"round {number + 1} of {args.pairs}", f"{name}, {state}")
                turn = number % len(sides)
                for who, block in (*sides[turn:], *sides[:turn]):
                    runs.blocks.setdefault(row_of(name, state, who), []).append(block())
        tell(False)
    progress("")
    return runs


def row_of(name: str, state: str, who: object) -> str:
    """A row's name."""
    return f"{name}; {state}; {who}"


def best(runs: Runs, name: str, state: str, counts: list[int]) -> int:
    """The quickest number of threads."""
    return min(counts, key=lambda n: float(np.median(runs.values(row_of(name, state, n)))))


def to_best(runs: Runs, name: str, state: str, counts: list[int]) -> Estimate:
    """What is chosen to the quickest, in the same round."""
    return ratio(runs, row_of(name, state, CHOSEN), row_of(name, state, best(runs, name, state, counts)))


def lines(runs: Runs, state: str, models: dict[str, Model], chosen: dict[str, int], counts: list[int]) -> list[Any]:
    """One table."""
    found = []
    for name, model in models.items():
        times = [f"{np.median(runs.values(row_of(name, state, who))):.1f}" for who in (*counts, CHOSEN)]
        against = spell(to_best(runs, name, state, counts))
        found.append((name, f"{products(model) / 1e6:.1f}", *times[:-1], str(chosen[name]), times[-1], against))
    return found


def options() -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__)
    counts = [n for n in NAMES if n]
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], choices=counts, help="to compare (1 and 2)")
    args = parse(parser)
    args.milliseconds = 2.0 if args.quick else 100.0
    return args


def main() -> None:
    """Measures, prints, writes."""
    args = options()
    models = {name: build() for name, build in MODELS.items()}
    choose = Chosen().threads_for
    chosen = {name: InProcess(model, choose).threads for name, model in models.items()}
    found = conditions()
    with ExitStack() as stack:
        runs = measure(args, models, stack)
    budgets = [
        Budget(f"{name}, {state}: chosen <= 1.1 x the best", to_best(runs, name, state, args.threads), 1.1)
        for state in (IDLE, BUSY)
        for name in models
    ]
    subjects = [{"name": name, "rounds": blocks} for name, blocks in runs.blocks.items()]
    columns = ("10^6 products", *(f"on {n}, us" for n in args.threads), "chosen", "on that, us", "to the best")
    tables = [(lines(runs, state, models, chosen, args.threads), (state, *columns)) for state in (IDLE, BUSY)]
    body = {"subjects": subjects, "chosen": chosen}
    publish(args, Report(QUESTION, found, tables[0][0], budgets, body, tables[0][1], tables[1:]))
    if args.plot:
        import plots

        ratios = {budget.text.partition(":")[0]: budget.found.median for budget in budgets if budget.found}
        plots.bars(args.plot, ratios, "time as chosen, to the best", QUESTION)


if __name__ == "__main__":
    main()
