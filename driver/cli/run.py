"""`burst run`: runs a model file on this machine's devices, with inputs from files or random."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import numpy as np

from burst import BurstError
from driver.cli.inputs import PIXELS, Feed, feeds, write_arrays
from driver.cli.names import DeviceName, loaded
from driver.cli.output import (
    examples,
    json_option,
    print_json,
    print_line,
    print_table,
    progress,
    spelled,
    with_options,
)
from driver.cli.ports import inputs_of, outputs_of, shape_words
from driver.cli.timing import time_calls
from driver.options import PREFERENCES, PRIORITIES
from driver.runtime.compilation import compile  # noqa: A004 (its name)
from driver.runtime.local import NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from driver.cli.ports import Port
    from driver.nn import Model
    from driver.runtime.compilation import CompiledModel

_PATH: Any = click.Path(path_type=Path)
_options = with_options(
    click.option(
        "--device",
        "devices",
        multiple=True,
        type=DeviceName(NAME, served=True),
        metavar="NAME",
        help="Device to run on; repeat it in order of preference. [default: all installed devices, and cpu]",
    ),
    click.option(
        "--input",
        "inputs",
        multiple=True,
        metavar="[NAME=]FILE",
        help="Input file: an image, .wav, .npy or .npz, or the word random. [default: random]",
    ),
    click.option(
        "--shape", "shapes", multiple=True, metavar="[NAME=]1x224x…", help="Shape of an input whose shape is open."
    ),
    click.option(
        "--pixels",
        type=click.Choice(PIXELS),
        help="Range of pixel values. [default: 0..1; for 8-bit inputs the bytes themselves]",
    ),
    click.option("--seed", default=0, show_default=True, help="Seed for random inputs."),
    click.option("--runs", default=20, show_default=True, type=click.IntRange(1), help="Number of timed runs."),
    click.option("--plain", is_flag=True, help="Use the plain path instead of a burst."),
    click.option("--top", default=5, show_default=True, type=click.IntRange(0), help="Number of classes to show."),
    click.option("--labels", type=_PATH, metavar="FILE", help="Text file with one class name per line."),
    click.option("--output", type=_PATH, metavar="FILE.npz", help="Write the outputs to this file."),
    click.option("--cache-dir", type=_PATH, metavar="FOLDER", help="Cache the compiled model in this folder."),
    click.option(
        "--preference",
        type=click.Choice(PREFERENCES),
        default="fast_single_answer",
        show_default=True,
        help="What to optimise for.",
    ),
    click.option(
        "--priority",
        type=click.Choice(PRIORITIES),
        default="medium",
        show_default=True,
        help="Priority on a device that other programs use too.",
    ),
    click.option("--deadline", type=click.FloatRange(0, min_open=True), metavar="SECONDS", help="Limit for each run."),
    json_option,
)


@dataclass(frozen=True, slots=True)
class _Arguments:
    """The arguments of the command line."""

    model: Path
    devices: tuple[str, ...]
    inputs: tuple[str, ...]
    shapes: tuple[str, ...]
    pixels: str | None
    seed: int
    runs: int
    plain: bool
    top: int
    labels: Path | None
    output: Path | None
    cache_dir: Path | None
    preference: Any
    priority: Any
    deadline: float | None
    as_json: bool


class _Ran(NamedTuple):
    """Outputs and times of all runs."""

    outputs: Sequence[NDArray[Any]]
    first: float  #: us of the first run, which includes all one-time work
    us: NDArray[np.float64]  #: of each timed run
    stages: list[tuple[str, dict[str, Any]]]  #: device, and the times of each stage


@click.command(
    epilog=examples(
        "burst run net.tflite",
        "burst run net.onnx --device onnxruntime --input photo.jpg --labels labels.txt",
        "burst run net.tflite --input image=photo.jpg --input state=random --output out.npz",
    )
)
@click.argument("model", type=_PATH)
@_options
def run(**given: Any) -> None:
    """Run a model file and report placement, outputs and times.

    MODEL is a .tflite or .onnx file. Inputs are random unless --input names a file; how a file was converted to fit the
    input is printed. With one --device, the whole model runs there or the command fails. With several, each operation
    runs on the fastest one. Times are measured by the client and cover whole requests, including writing the inputs.
    """
    wish = _Arguments(**given)
    model = loaded(wish.model)
    ports, labels = inputs_of(model), read_labels(wish.labels)
    fed = feeds(ports, wish.inputs, wish.shapes, wish.seed, wish.pixels)
    if wish.output and wish.output.suffix != ".npz":
        raise click.UsageError(f"--output {wish.output}: outputs are written as .npz; use {wish.output.stem}.npz")
    begin = time.monotonic()
    with progress() as tell, _compiled(wish, model, tell) as compiled:
        seconds = time.monotonic() - begin
        tell(f"run {wish.runs} times")
        ran = _run(wish, compiled, [feed.array for feed in fed])
        found = _report(wish, compiled, fed, ran, labels) | {"seconds_to_compile": seconds}
    if wish.output:
        _write(wish.output, dict(zip([port.name for port in outputs_of(model)], ran.outputs, strict=True)))
    if wish.as_json:
        print_json(found)
    else:
        _show(found, len(model.main.operations))


def _compiled(wish: _Arguments, model: Model, tell: Callable[[str], object]) -> CompiledModel:
    try:
        return compile(
            model,
            wish.devices or None,
            preference=wish.preference,
            priority=wish.priority,
            cache_dir=wish.cache_dir,
            progress=lambda what, done: tell(f"{what} ({done:.0%})"),
        )
    except BurstError:
        raise
    except ValueError as error:  # a device that is named twice, a folder that cannot be used
        raise click.UsageError(str(error)) from error


def _run(wish: _Arguments, compiled: CompiledModel, arrays: Sequence[Any]) -> _Ran:
    """One untimed run, then the timed ones."""
    if wish.plain:
        return _timed(lambda: compiled.run(*arrays, timeout=wish.deadline), wish.runs, dict)
    is_open = not all(port.operand.is_known for port in inputs_of(compiled.model))
    with compiled.burst(input_shapes=[array.shape for array in arrays] if is_open else None) as burst:
        return _timed(lambda: burst.run(*arrays, timeout=wish.deadline).outputs, wish.runs, burst.stats)


def _timed(call: Callable[[], Sequence[Any]], runs: int, stats: Callable[[], dict[str, Any]]) -> _Ran:
    begin = time.perf_counter()
    outputs = [np.array(output) for output in call()]
    first = 1e6 * (time.perf_counter() - begin)
    us, figures = time_calls(call, runs) / 1e3, stats()
    steps = figures.get("steps", [{"device": "", **figures}])
    return _Ran(outputs, first, us, [(step["device"], step["stages"]) for step in steps if "stages" in step])


def _report(
    wish: _Arguments, compiled: CompiledModel, fed: Sequence[Feed], ran: _Ran, labels: Sequence[str]
) -> dict[str, Any]:
    """The report, as --json prints it."""
    ports, model = outputs_of(compiled.model), compiled.model
    given = [
        {"name": p.name, "type": p.operand.type.name, "shape": f.array.shape, "source": f.source, "done": f.done}
        for p, f in zip(inputs_of(model), fed, strict=True)
    ]
    outputs = [summary(port, array) for port, array in zip(ports, ran.outputs, strict=True)]
    for port, array, found in zip(ports, ran.outputs, outputs, strict=True):
        found["top"] = [one._asdict() for one in classes(port, array, wish.top, labels)]
    if labels and not any(found["top"] for found in outputs) and wish.top:
        raise click.UsageError(f"--labels {wish.labels}: no output of this model is a row of class scores")
    placement, stats = compiled.placement(), compiled.stats()
    p50, p99 = np.percentile(ran.us, [50, 99])
    return {
        "model": str(wish.model),
        "placement": [{"device": device, "operations": list(numbers)} for device, numbers in placement],
        "compilations": stats["compilations"],
        "inputs": given,
        "outputs": outputs,
        "path": "plain" if wish.plain else "burst",
        "runs": len(ran.us),
        "us": {"first": ran.first, "p50": float(p50), "p99": float(p99), "least": ran.us.min(), "most": ran.us.max()},
        "stages": [{"device": device or placement[0][0], "us": stages} for device, stages in ran.stages],
        "fallbacks": stats["fallbacks"],
    }


def _write(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    try:
        write_arrays(path, arrays)
    except OSError as error:
        raise click.UsageError(f"--output {path}: cannot be written: {error.strerror}") from error


def _show(found: dict[str, Any], operations: int) -> None:
    print_line(f"{found['model']}: {operations} operations, compiled in {spelled(1e6 * found['seconds_to_compile'])}")
    for step in found["placement"]:
        print_line(f"on {step['device']}: {_numbers(step['operations'])}")
    for given in found["inputs"]:
        done = f" ({given['done']})" if given["done"] else ""
        print_line(f"input {given['name']}: {given['type']} {shape_words(given['shape'])}, {given['source']}{done}")
    for output in found["outputs"]:
        print_line(f"output {output['name']}: {summary_words(output)}")
    for reason in found["fallbacks"]["reasons"].values():
        print_line(f"fell back: {reason}")
    _show_times(found)
    for output in found["outputs"]:
        if output["top"]:
            rows = [(str(c["number"]), c["label"] or "", f"{c['value']:.4g}") for c in output["top"]]
            print_table(("class", "label", output["name"]), rows, (0, 2))


def _numbers(operations: Sequence[int]) -> str:
    """The numbers of a step's operations; consecutive ones as a range."""
    first, last = operations[0], operations[-1]
    if len(operations) == last - first + 1:
        return f"operation {first}" if first == last else f"operations {first} to {last}"
    return f"operations {', '.join(map(str, operations))}"


def _show_times(found: dict[str, Any]) -> None:
    us, runs, way = found["us"], found["runs"], "through a burst" if found["path"] == "burst" else "on the plain path"
    times = f"p50 {spelled(us['p50'])}, p99 {spelled(us['p99'])}, max {spelled(us['most'])}"
    print_line(f"{runs} run{'s' * (runs > 1)} {way}: {times}; the first run took {spelled(us['first'])}")
    for stages in found["stages"]:
        spread = {name: figures for name, figures in stages["us"].items() if figures}
        words = (f"{name} {spelled(figures['p50'])}" for name, figures in spread.items())
        print_line(f"stages on {stages['device']}, p50: {', '.join(words)}")


_FEWEST_CLASSES = 5  # without labels; four numbers may be a box


class Class(NamedTuple):
    """One of the most likely classes."""

    number: int
    label: str | None
    value: float


def classes(port: Port, array: NDArray[Any], top: int, labels: Sequence[str]) -> list[Class]:
    """The classes with the largest scores; none unless the output looks like class scores.

    Class scores are real numbers in one row: without labels, at least five. `labels`: one for each class, or none.
    """
    is_real = array.dtype.kind == "f" or port.operand.type.is_quantised
    fewest = 1 if labels else _FEWEST_CLASSES
    if not is_real or port.is_state or not array.ndim or array.size < fewest or array.size != array.shape[-1]:
        return []
    real = port.real(array).reshape(-1)
    if labels and len(labels) != len(real):
        raise click.UsageError(f"--labels: {len(labels)} lines, but output {port.name!r} has {len(real)} classes")
    order = np.argsort(-np.nan_to_num(real, nan=-np.inf), kind="stable")[:top]
    return [Class(int(n), labels[n] if labels else None, float(real[n])) for n in order]


def read_labels(path: Path | None) -> list[str]:
    """Reads the labels, one per line. Raises UsageError."""
    if path is None:
        return []
    try:
        return path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--labels {path}: {error}; pass a text file with one class name per line") from error


def summary(port: Port, array: NDArray[Any]) -> dict[str, Any]:
    """An output as --json prints it."""
    real = port.real(array).astype(np.float64)
    figures = {"min": float(real.min()), "mean": float(real.mean()), "max": float(real.max())} if real.size else {}
    return {"name": port.name, "type": port.operand.type.name, "shape": list(array.shape), **figures}


def summary_words(found: dict[str, Any]) -> str:
    """The summary of an output as one line of text."""
    words = f"{found['type']} {shape_words(found['shape'])}"
    return words + (f", {found['min']:.4g} to {found['max']:.4g}" if "min" in found else "")
