"""Do real model files load, run by name, and give what their own runtime gives, at its speed?

    python bench/corpus.py FOLDER [--only PART] [--rounds 9] [--page docs/real-models.md] [--json FILE]
    python bench/corpus.py bits FOLDER...
    python bench/corpus.py load [FILE ...] [--pairs 31] [--json FILE]

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
import tempfile
import time
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from litert import written
from measure import ask
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

    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[Any]]
    Shapes = dict[str, tuple[int, ...]]

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


# ---- bits


SIZES = 64, 32, 256, 512, 16, 8, 4
"""Of what a file leaves open beside its first dimension; then those that `corpus.py` gives."""


def shapes_with(model: driver.Model, size: int) -> Shapes:
    """A shape for each input."""
    return {
        tensor.name: tuple(own or (size if axis else 1) for axis, own in enumerate(tensor.shape or ()))
        for tensor in model.inputs
    }


def bits_random_inputs(model: driver.Model, shapes: Shapes) -> Arrays:
    """Noise of each input's type; integers are 0 or 1, which even types of tokens are."""
    random, found = np.random.default_rng(7), {}
    for tensor in model.inputs:
        shape = shapes[tensor.name]
        if tensor.name in VALUES:
            found[tensor.name] = np.full(shape, VALUES[tensor.name], tensor.dtype)
        else:
            drawn = random.random(shape) if tensor.dtype.kind == "f" else random.integers(0, 2, shape)
            found[tensor.name] = np.asarray(drawn, tensor.dtype)
    return found


def own_outputs(path: Path, model: driver.Model) -> tuple[Arrays, list[Sequence[Any]]]:
    """Inputs, and what the runtime gives in its second run and in the two after it. Raises what it raised last."""
    error: Exception | None = None
    for shapes in (*(shapes_with(model, size) for size in SIZES), shapes_for(path, model)):
        inputs = bits_random_inputs(model, shapes)
        try:
            own = own_runtime(path, [*inputs.values()])
        except Exception as raised:  # noqa: BLE001 (a runtime may raise anything for a size)
            error = raised
            continue
        if own is None:
            raise LookupError("its own runtime is not installed")
        return inputs, [own.call() for _ in range(3)]
    raise error or LookupError("it has no inputs")


def faults(path: Path) -> list[str]:
    """The ways on which a file gives other bits."""
    model = driver.load(path, form="file", optional=False)
    inputs, wanted = own_outputs(path, model)
    found: list[str] = []

    def compare(way: str, run: Callable[[Arrays], Sequence[Any]], number: int) -> None:
        pairs = zip(run(inputs), wanted[number], strict=True)
        if not all((a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()) for a, b in pairs):
            found.append(way)

    with TemporaryDirectory() as cache:
        for start in ("first start", "cached start"):
            with driver.compile(model, [DEVICES[path.suffix]], cache_dir=cache) as compiled:
                compiled.run(inputs)
                compare(f"run, {start}", compiled.run, 0)
                with compiled.burst(input_shapes={name: array.shape for name, array in inputs.items()}) as burst:
                    for number in (1, 2):
                        compare(f"burst, {start}", lambda its, burst=burst: burst.run(its).outputs, number)
    with driver.compile(driver.load(path, optional=False)) as compiled:
        compiled.run(inputs)
        compare("run, placed by itself", compiled.run, 0)
    return found


def bits() -> None:
    """Do real model files give the bits of their own runtime, from every start and on every way?

        python bench/corpus.py bits FOLDER...

    Every .onnx and .tflite file below the folders runs in its own runtime in this process, on one thread, and on the
    device with that runtime: compiled anew and from the cache, by `run` and in a burst, and as `driver.load` and
    `driver.compile` place it by themselves; on the same random inputs, of the first open sizes that the runtime
    takes. Files that keep a state are compared run by run.
    """
    parser = argparse.ArgumentParser(description=bits.__doc__.partition("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+")
    files = [p for folder in parser.parse_args().folders for p in sorted(folder.rglob("*")) if p.suffix in DEVICES]
    right = 0
    for path in files:
        try:
            told = ", ".join(faults(path))
        except Exception as error:  # noqa: BLE001 (whatever ails a peer is its row)
            told = f"{type(error).__name__}: {error}"
        right += not told
        if told:
            print(f"{path.parent.name}/{path.name}: {told}", flush=True)
    print(f"{right} of {len(files)} files: the bits of their own runtime")
    sys.exit(right < len(files))


# ---- load


BUDGET, LARGE = 1.5, 12_000_000


def own(path: Path) -> Callable[[], object]:
    """Loads the file in the runtime that it was made for, until it could run."""
    if path.suffix == ".onnx":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        return lambda: onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    from ai_edge_litert.interpreter import Interpreter

    def load() -> object:
        interpreter = Interpreter(str(path), num_threads=1)
        interpreter.allocate_tensors()
        return interpreter

    return load


def milliseconds(call: Callable[[], object]) -> float:
    """What a call takes; what it returns is dropped after the clock has stopped."""
    begin = time.perf_counter()
    found = call()
    took = 1e3 * (time.perf_counter() - begin)
    del found
    return took


def row(path: Path, pairs: int) -> dict[str, object]:
    """The medians of both sides, and the ratio."""
    calls = own(path), lambda: driver.load(path, form="file")
    for call in calls:
        call()
    found = []
    for number in range(pairs):
        order = (0, 1) if number % 2 else (1, 0)
        took = {side: milliseconds(calls[side]) for side in order}
        found.append((took[0], took[1]))
    theirs, ours = (float(np.median(side)) for side in zip(*found, strict=True))
    ratio = estimate([b / a for a, b in found])
    return {"bytes": path.stat().st_size, "own_ms": theirs, "file_form_ms": ours, "ratio": ratio._asdict()}


def load() -> None:
    """What does loading a model file take in file form, beside the runtime that the file was made for?

        python bench/corpus.py load [FILE ...] [--pairs 31] [--json FILE]

    Each round loads the file with `driver.load(file, form="file")` and in its own runtime, in turns: ONNX Runtime
    makes a session with one thread; LiteRT makes an interpreter and allocates its tensors, which is when it packs the
    weights. The ratio is ours over theirs: the median of the pairs, and its 95 % interval. The budget is 1.5 for
    files of 12 MB or more. Without a FILE: MobileNetV1 of 17 MB, written as .tflite.
    """
    parser = argparse.ArgumentParser(description=load.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--pairs", type=int, default=31)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    rows = {}
    print(f"{conditions()}\n{'':44} {'MB':>6} {'own ms':>8} {'load ms':>8} {'ratio':>7}  interval")
    with tempfile.TemporaryDirectory() as folder:
        if not args.files:
            args.files = [Path(folder) / "mobilenet.tflite"]
            args.files[0].write_bytes(written(mobilenet("float32")))
        for path in args.files:
            print(path.name, file=sys.stderr)
            rows[path.name] = found = row(path, args.pairs)
            size, ratio = found["bytes"] / 1e6, found["ratio"]
            missed = "  missed" if found["bytes"] >= LARGE and ratio["median"] > BUDGET else ""
            print(
                f"{path.name[:44]:44} {size:6.1f} {found['own_ms']:8.1f} {found['file_form_ms']:8.1f} "
                f"{ratio['median']:7.3f}  {ratio['low']:.3f} .. {ratio['high']:.3f}{missed}"
            )
    if args.json:
        args.json.write_text(json.dumps({"conditions": conditions(), "rows": rows}, indent=1))


if __name__ == "__main__":
    ask({"": main, "bits": bits, "load": load})
