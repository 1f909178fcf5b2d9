"""What does a file of PyTorch's or JAX's cost in the device, beside the same file in process?

    python bench/frameworks.py [--pixels 224] [--hidden 512] [--pairs 9] [--json FILE]
    python bench/frameworks.py first [--pairs 5]

A residual net as torchvision has them (torch, .pt2), and a perceptron of six layers (jax, .jax), on the CPU: a run with
its input and its output, in turns. PyTorch has half of the processors in the device, and as many in process. What both
compute is compared. A framework that is not installed has no rows.

first: from the file to the first result, in a process of its own each time: the framework loads there, or in the
device, which runs already. Each file is known to the device from a run before.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from framework_nets import jax_net, own_runtime_of, torch_net
from measure import Budget, NotMeasured, Runs, ask, progress, rounds, scratch
from own_device import own_device
from question import Question, against, interval, times

import driver
from driver.cli.timing import count_for, seconds_of, time_calls

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

FRAMEWORKS = {"torch": ".pt2", "jax": ".jax"}
BLOCK = 0.5  # seconds
MOST = 1.05


def written(name: str, folder: Path, args: argparse.Namespace) -> tuple[Path, list[NDArray[Any]]]:
    """The file, and its inputs. Raises NotMeasured."""
    path = folder / f"net{FRAMEWORKS[name]}"
    return path, torch_net(path, args.pixels) if name == "torch" else jax_net(path, args.hidden)


def both(name: str, path: Path, feeds: Sequence[NDArray[Any]], stack: ExitStack) -> dict[str, Callable[[], object]]:
    """A run in process and one in a burst, whose results are equal to rounding. Raises NotMeasured."""
    here = own_runtime_of(path, feeds)
    if name == "torch":
        sys.modules["torch"].set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    device = stack.enter_context(own_device(name))
    burst = stack.enter_context(stack.enter_context(device.prepare(driver.load(path))).burst())
    wanted, given = here()[0], burst.run(*feeds).outputs[0]
    if not np.allclose(wanted, given, rtol=1e-4, atol=1e-5):
        raise NotMeasured("the device computes something else")
    return {own(name): here, ours(name): lambda: burst.run(*feeds)}


def run(args: argparse.Namespace) -> Runs:
    """All rounds."""
    runs, calls = Runs(), dict[str, Any]()
    with ExitStack() as stack:
        folder = stack.enter_context(scratch())
        for name in FRAMEWORKS:
            try:
                calls |= both(name, *written(name, folder, args), stack)
            except (NotMeasured, driver.DriverError) as why:
                runs.drop(ours(name), str(why))
        counts = {name: count_for(seconds_of(call, args.block / 4), args.block) for name, call in calls.items()}
        for name in rounds(args.pairs, list(calls)):
            runs.add(name, {"us": float(np.median(time_calls(calls[name], counts[name]))) / 1e3})
    return runs


IN_PROCESS = """
import sys
from pathlib import Path
import numpy as np
from driver.cli.own_runtime import own_runtime
found = own_runtime(Path(sys.argv[1]), [np.load(sys.argv[2])])
print(float(np.asarray(found.call()[0]).sum()))
"""
IN_DEVICE = """
import sys
import numpy as np
import driver
with driver.connect(sys.argv[3]) as device, device.prepare(driver.load(sys.argv[1])) as model, model.burst() as burst:
    print(float(burst.run(np.load(sys.argv[2])).outputs[0].sum()))
"""


def run_first(args: argparse.Namespace) -> Runs:
    """Processes, from their start to their end."""
    runs, calls = Runs(), dict[str, partial[float]]()
    with ExitStack() as stack:
        folder = stack.enter_context(scratch())
        for name in FRAMEWORKS:
            try:
                path, (feed,) = written(name, folder, args)
                stack.enter_context(own_device(name))
            except (NotMeasured, driver.DriverError) as why:
                runs.drop(ours(name), str(why))
                continue
            np.save(given := folder / f"{name}.npy", feed)
            for row, program in ((own(name), IN_PROCESS), (ours(name), IN_DEVICE)):
                command = [sys.executable, "-c", program, str(path), str(given), name]
                calls[row] = partial(_seconds, command, os.environ["BURST_RUNTIME_DIR"])
        for row, call in calls.items():
            progress("once before", row)
            call()
        for row in rounds(args.pairs, list(calls)):
            runs.add(row, {"us": 1e6 * calls[row]()})
    return runs


def _seconds(command: list[str], runtime_dir: str) -> float:
    """Of a process that finds devices in that directory."""
    begin = time.perf_counter()
    environment = {**os.environ, "BURST_RUNTIME_DIR": runtime_dir}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - begin


def own(name: str) -> str:
    """The row of the framework in process."""
    return f"{name}, in process"


def ours(name: str) -> str:
    """The row of the device."""
    return f"{name}, in a burst"


def beside(runs: Runs, name: str) -> Any:
    """The ratio to the same framework in process."""
    return against(own(name.partition(",")[0]), "us")(runs, name)


def budgets(runs: Runs, _: argparse.Namespace) -> list[Budget]:
    """For each framework."""
    return [Budget(f"{name}, beside in process", beside(runs, ours(name)), MOST) for name in FRAMEWORKS]


def settle(args: argparse.Namespace) -> None:
    """Small nets and blocks with --quick."""
    args.block = 0.01 if args.quick else BLOCK
    if args.quick:
        args.pixels, args.hidden = 32, 32


_HOW: dict[str, Any] = {
    "columns": {"us": interval("us"), "x in process": times(beside, *map(own, FRAMEWORKS))},
    "budgets": budgets,
    "options": {
        "--pixels": {"type": int, "default": 224, "help": "of the image's sides (default 224)"},
        "--hidden": {"type": int, "default": 512, "help": "width of a layer (default 512)"},
    },
    "settle": settle,
    "figures": ("us",),
    "estimates": {"beside": beside},
    "ours": tuple(map(ours, FRAMEWORKS)),
    "kept": ("pixels", "hidden"),
    "bars": ("us", "us"),
    "is_pinned": False,
}
FRAMEWORK = Question(__doc__, run, **_HOW)
FIRST = Question(__doc__, run_first, pairs=5, **_HOW)

if __name__ == "__main__":
    ask({"": FRAMEWORK.answer, "first": FIRST.answer})
