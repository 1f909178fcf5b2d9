"""Do real model files load, run by name, and give what their own runtime gives, at its speed?

    python bench/corpus.py FOLDER [--only PART] [--rounds 9] [--page docs/real-models.md] [--json FILE]

Every .onnx and .tflite file below FOLDER runs in its own runtime in this process, on one thread, and in a burst on the
device with that runtime, in turns, on the same random inputs, which are written anew for each run. Files are judged by
the first run: floats within 1e-4 of the output's range (outputs without variance: 1e-4), quantised values within 2
steps. The ratio is the burst's time over the own runtime's: the median over rounds, with its 95 % interval. The last
column is a burst on the operations form of the same file, where it can be had and is right. MobileNetV1 with random
weights, written as .tflite, is added. `--page` writes the table between two marks of that page.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from litert import written
from models import mobilenet

import driver
from burst import InvalidArgument
from driver.cli.own_runtime import own_runtime
from driver.cli.timing import conditions, count_for, estimate, in_words, order_of_round, seconds_of, time_calls
from driver.devices.files import RUNTIMES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[Any]]

DEVICES = {f".{kind}": device for kind, device in RUNTIMES.items()}
OPEN = {  # sizes for the dimensions that a file leaves open, in their order
    "*PP-OCRv4_det*": (1, 320, 320),
    "*PP-OCRv4_rec*": (1, 320),
    "*ppocr_mobile*cls*": (1, 48, 192),
    "*ddddocr__common*": (160,),
    "*attacut*": (40,),
    "*nudenet*": (1, 320, 320),
    "*melspectrogram*": (1, 17280),
    "*silero_vad.onnx": (1, 512, 1, 1),
}
VALUES = {"sr": 16000}  # what inputs mean, where random values would mean nothing
LONG = 1e-3  # seconds; shorter runs are judged by what the burst adds
BLOCK = 0.25  # seconds of a block
MARKS = "<!-- corpus -->", "<!-- end -->"


class Row(NamedTuple):
    """What came of a file. `fault`: why it has no figures."""

    name: str
    megabytes: float
    fault: str = ""
    error: float = 0.0  #: the largest, as a part of the output's range; 0.0: the same bits
    own: float = 0.0  #: seconds
    ours: float = 0.0
    ratio: tuple[float, float, float] = (0.0, 0.0, 0.0)
    operations: str = ""  #: milliseconds of that form, or why there are none

    @property
    def is_long(self) -> bool:
        """Whether the run takes long enough for a ratio to be asked of it."""
        return self.own >= LONG


def shapes_for(path: Path, model: driver.Model) -> dict[str, tuple[int, ...]]:
    """A shape for each input: what the file leaves open is filled from OPEN, or with ones."""
    sizes = iter(next((found for pattern, found in OPEN.items() if fnmatch(path.name, pattern)), ()))
    return {
        tensor.name: tuple(next(sizes, 1) if size is None else size for size in tensor.shape or ())
        for tensor in model.inputs
    }


def random_inputs(model: driver.Model, shapes: dict[str, tuple[int, ...]]) -> Arrays:
    """Noise of each input's type; small integers, which most files take for indices."""
    random, found = np.random.default_rng(7), {}
    for tensor in model.inputs:
        shape, dtype = shapes[tensor.name], tensor.dtype
        if tensor.name in VALUES:
            found[tensor.name] = np.full(shape, VALUES[tensor.name], dtype)
        elif dtype.kind == "f":
            found[tensor.name] = random.random(shape).astype(dtype)
        else:
            found[tensor.name] = random.integers(0, 20, shape).astype(dtype)
    return found


def error_of(found: NDArray[Any], wanted: NDArray[Any], scale: float) -> float:
    """The largest difference, as a part of what is allowed; 0.0: the same bits. inf: another type or shape."""
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return np.inf
    if found.tobytes() == wanted.tobytes():
        return 0.0
    if scale or wanted.dtype.kind != "f":
        step = 2 if scale else 0.5
        return float(np.abs(found.astype(np.int64) - wanted.astype(np.int64)).max()) / step
    spread = float(np.ptp(wanted)) or 1.0
    return float(np.abs(found.astype(np.float64) - wanted).max()) / spread / 1e-4


def measured(calls: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Median seconds of each call in each round."""
    counts = [count_for(seconds_of(call, BLOCK / 2), BLOCK) for call in calls]
    found = []
    for number in range(rounds):
        took = [0.0] * len(calls)
        for side in order_of_round(range(len(calls)), number):
            took[side] = float(np.median(time_calls(calls[side], counts[side]))) / 1e9
        found.append(took)
    return found


def judge(device: Any, path: Path, rounds: int) -> Row:
    """Runs one file on both sides, and in its operations form."""
    model = driver.load(path, form="file", optional=False)
    shapes = shapes_for(path, model)
    inputs = random_inputs(model, shapes)
    own = own_runtime(path, [*inputs.values()])
    if own is None:
        return Row(*_title(path), "its own runtime is not installed")
    wanted = own.call()
    with ExitStack() as stack:
        burst = opened(stack, device, model)
        error = worst_error(burst.run(inputs).outputs, wanted, model)
        if not error <= 1:  # nan is wrong, too
            return Row(*_title(path), f"wrong: {error:.3g} times what is allowed")
        calls = [own.call, lambda: burst.run(inputs)]
        operations, why = in_operations(stack, device, path, shapes, inputs, wanted)
        took = np.array(measured([*calls, operations] if operations else calls, rounds))
    ratio = estimate(took[:, 1] / took[:, 0])
    medians = np.median(took, axis=0)
    if operations:
        why = f"{1e3 * medians[2]:.3f}"
    return Row(*_title(path), "", error, medians[0], medians[1], (ratio.median, ratio.low, ratio.high), why)


def opened(stack: ExitStack, device: Any, model: driver.Model) -> Any:
    """A burst, which ends with the stack."""
    return stack.enter_context(stack.enter_context(device.prepare(model)).burst())


def in_operations(
    stack: ExitStack, device: Any, path: Path, shapes: dict[str, tuple[int, ...]], inputs: Arrays, wanted: Sequence[Any]
) -> tuple[Callable[[], object] | None, str]:
    """Runs the operations form of the file; None, and a word why, where that cannot be."""
    try:
        model = driver.load(path, form="operations", shapes=shapes)
        burst = opened(stack, device, model)
    except (driver.ImportFailed, driver.NotPlaced, InvalidArgument):
        return None, "-"
    given = dict(zip([tensor.name for tensor in model.inputs], inputs.values(), strict=True))
    found = burst.run(given).outputs
    return (lambda: burst.run(given), "") if worst_error(found, wanted, model) <= 1 else (None, "wrong")


def worst_error(found: Any, wanted: Sequence[Any], model: driver.Model) -> float:
    """Of all outputs, by name."""
    pairs = zip(model.outputs, wanted, strict=True)
    return float(np.max([error_of(found[info.name], array, info.scale) for info, array in pairs]))


def _title(path: Path) -> tuple[str, float]:
    """Its name, without the package's that `fetch` scripts put before it, and its megabytes."""
    return path.name.rpartition("__")[2], path.stat().st_size / 1e6


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown, and what the budgets make of them."""
    lines = [
        "| file | MB | right | own runtime, ms | burst, ms | ratio | interval | operations, ms |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        if row.fault:
            lines.append(f"| `{row.name}` | {row.megabytes:.1f} | **no**: {row.fault} | | | | | |")
            continue
        right = "same bits" if not row.error else f"{row.error:.2g} of what is allowed"
        times = f"{1e3 * row.own:.3f} | {1e3 * row.ours:.3f}"
        median, low, high = row.ratio
        ratio = f"{median:.3f} | {low:.3f} .. {high:.3f}" if row.is_long else f"+{1e6 * (row.ours - row.own):.0f} us |"
        lines.append(f"| `{row.name}` | {row.megabytes:.1f} | {right} | {times} | {ratio} | {row.operations} |")
    return "\n".join([*lines, "", *summary(rows)])


def summary(rows: Sequence[Row]) -> list[str]:
    """How many files are right, and what they cost."""
    right = [row for row in rows if not row.fault]
    ratios = [row.ratio[0] for row in right if row.is_long]
    added = [1e6 * (row.ours - row.own) for row in right if not row.is_long]
    lines = [f"{len(right)} of {len(rows)} files are right; {sum(not row.error for row in right)} bit for bit."]
    if ratios:
        lines.append(f"Of {len(ratios)} over 1 ms: median ratio {np.median(ratios):.3f}, worst {max(ratios):.3f}.")
    if added:
        lines.append(
            f"To the {len(added)} shorter ones a burst adds {np.median(added):.0f} us, at most {max(added):.0f}."
        )
    return lines


def write_page(page: Path, text: str) -> None:
    """Puts the text between the marks of the page. Raises ValueError where it has none."""
    before, begin, rest = page.read_text().partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not begin or not end:
        raise ValueError(f"{page} has no {MARKS[0]} and {MARKS[1]}")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def rows_of(paths: Sequence[Path], rounds: int) -> list[Row]:
    """One for each file, with a device for each kind of file."""
    found = []
    for suffix in sorted({path.suffix for path in paths}):
        with driver.connect(DEVICES[suffix]) as device:
            for path in (p for p in paths if p.suffix == suffix):
                print(path.name, file=sys.stderr)
                try:
                    found.append(judge(device, path, rounds))
                except Exception as error:  # noqa: BLE001 (whatever it is, the file fails)
                    words = f"{type(error).__name__}: {error}".splitlines()[0]
                    found.append(Row(*_title(path), words.replace("|", "/")))
    return found


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--only", default="", metavar="PART", help="files with this in their name")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--page", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    before = in_words(conditions())
    with TemporaryDirectory() as made:
        mobilenet_file = Path(made) / "mobilenet_v1.tflite"
        mobilenet_file.write_bytes(written(mobilenet("float32")))
        paths = [
            p for p in (*sorted(args.folder.rglob("*")), mobilenet_file) if p.suffix in DEVICES and args.only in p.name
        ]
        if not paths:
            parser.error(f"FOLDER: {args.folder} has no .onnx or .tflite file with {args.only!r} in its name")
        rows = rows_of(paths, args.rounds)
    text = f"{table(rows)}\n\nMeasured on: {before}."
    print(text)
    if args.page:
        write_page(args.page, text)
    if args.json:
        args.json.write_text(json.dumps({"conditions": before, "rows": [row._asdict() for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
