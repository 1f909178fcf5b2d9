"""`burst run`: runs a model file on this machine's devices, with inputs from files, streams or random numbers."""

from __future__ import annotations

import time
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from burst import BurstError, StatusError
from driver.cli.device_name import DeviceName
from driver.cli.epilog import examples
from driver.cli.images import FITS, LETTERBOX, PIXELS
from driver.cli.inputs import FeedOptions, storable, write_arrays
from driver.cli.names import as_options, form_option, header_of, loaded, signature_option
from driver.cli.output import json_option, print_json, print_line, print_table, progress, spelled, with_options
from driver.cli.ports import shape_words
from driver.cli.sizes import shape_option
from driver.cli.steps import execution, steps, streamed, until_of
from driver.cli.summaries import (
    brief,
    brief_words,
    classes,
    range_text,
    ranges,
    read_labels,
    readable,
    summary,
    summary_words,
)
from driver.cli.wiring import Wiring
from driver.client.names import copies
from driver.errors import NotPlaced
from driver.nn.file_form import is_file
from driver.options import PREFERENCES, PRIORITIES
from driver.runtime.compilation import compile  # noqa: A004 (its name)
from driver.runtime.local import NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from driver.cli.steps import Stages, TimedStep
    from driver.importers.files import Form
    from driver.runtime.compiled import CompiledModel

_MOST_STEPS = 4096  # of a stream that an output ends
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
        help="Image, video, camera, stream, .wav, .npy or .npz; a number; a text; or the word random. "
        "[default: random]",
    ),
    shape_option,
    form_option,
    signature_option,
    click.option(
        "--pixels",
        type=click.Choice(PIXELS),
        help="Range of pixel values. [default: 0..1; for 8-bit inputs the bytes themselves]",
    ),
    click.option(
        "--fit",
        type=click.Choice(FITS),
        default=LETTERBOX,
        show_default=True,
        help="How an image gets its size: with grey bars, or stretched.",
    ),
    click.option("--frames", type=click.IntRange(1), metavar="N", help="Stop after N frames, blocks or steps."),
    click.option("--block", type=click.IntRange(1), metavar="N", help="Samples in a block of sound."),
    click.option(
        "--hop", type=click.IntRange(1), metavar="N", help="Samples from one block to the next. [default: a block]"
    ),
    click.option(
        "--state",
        "states",
        multiple=True,
        metavar="OUTPUT=INPUT",
        help="Output that is the input of the next execution; repeatable. 'none': do not look for any.",
    ),
    click.option(
        "--stream",
        is_flag=True,
        help="Have the device repeat the execution on its states, at most --frames times, and show each result.",
    ),
    click.option(
        "--until",
        metavar="OUTPUT[=VALUE,…]",
        help="With --stream: stop after the step in which that output is true, or has one of these values.",
    ),
    click.option("--seed", default=0, show_default=True, help="Seed for random inputs."),
    click.option("--runs", default=20, show_default=True, type=click.IntRange(1), help="Number of timed runs."),
    click.option("--plain", is_flag=True, help="Use the plain path instead of a burst."),
    click.option("--top", default=5, show_default=True, type=click.IntRange(0), help="Number of classes to show."),
    click.option(
        "--labels",
        type=_PATH,
        metavar="FILE",
        help="Text file, a class name per line. [default: the model's own]",
    ),
    click.option("--output", type=_PATH, metavar="FILE.npz", help="Write all values of the outputs to this file."),
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
    click.option(
        "--deadline",
        type=click.FloatRange(0, min_open=True),
        metavar="SECONDS",
        help="Limit for each run, or the stream.",
    ),
    json_option,
)


@dataclass(frozen=True, slots=True)
class _Arguments:
    """The arguments of the command line."""

    model: Path
    devices: tuple[str, ...]
    inputs: tuple[str, ...]
    shapes: tuple[str, ...]
    form: Form
    signature: str | None
    pixels: str | None
    fit: str
    frames: int | None
    block: int | None
    hop: int | None
    states: tuple[str, ...]
    stream: bool
    until: str | None
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

    def check(self) -> None:
        """Raise UsageError for what needs no file to be seen."""
        if self.output and self.output.suffix != ".npz":
            raise click.UsageError(f"--output {self.output}: outputs are written as .npz; use {self.output.stem}.npz")
        if self.output and not self.output.parent.is_dir():
            raise click.UsageError(f"--output {self.output}: there is no folder {self.output.parent}; make it first")
        if self.until and not self.stream:
            raise click.UsageError("--until: it ends a stream; pass --stream, too")
        if self.stream and self.plain:
            raise click.UsageError("--plain: a stream has a burst; leave one of --plain and --stream out")


@dataclass(slots=True)
class _Ran:
    """Outputs and times of all executions."""

    outputs: Sequence[NDArray[Any]] = ()  #: of the first; of frames or blocks, of the last one
    first: float = 0.0  #: us of the first, which includes all one-time work
    us: list[float] = field(default_factory=list)  #: of the others
    rows: list[dict[str, Any]] = field(default_factory=list)  #: what --json prints of each frame or block
    kept: list[list[NDArray[Any]]] = field(default_factory=list)  #: outputs for --output
    stages: list[Stages] = field(default_factory=list)


@click.command(
    epilog=examples(
        "burst run net.tflite",
        "burst run yolo.onnx --input photo.jpg --shape 1x3x320x320 --top 3",
        "burst run yolo.onnx --input clip.mp4 --frames 100 --output out.npz",
        "burst run silero_vad.onnx --input input=speech.wav --block 576 --hop 512 --input sr=16000",
        "burst run net.tflite --input image=photo.jpg --input state=random --device litert",
        "burst run words.onnx --stream --state present=past --until token=2 --frames 100",
    )
)
@click.argument("model", type=_PATH)
@_options
def run(**given: Any) -> None:
    """Run a model file and report placement, outputs and times.

    MODEL is a .tflite or .onnx file. Inputs are random unless --input names a file; how a file was converted to fit the
    input is printed. Sizes that the model leaves open are those of the file, or of --shape. A video, a stream or a long
    sound is executed frame by frame or block by block, and outputs that are states go from one to the next. With one
    --device, the whole model runs there or the command fails. With several, it runs where it is fastest. Times are
    measured by the client and cover whole requests, including writing the inputs.
    """
    wish = _Arguments(**given)
    wish.check()
    labels, options = read_labels(wish.labels), FeedOptions(wish.seed, wish.pixels, wish.fit, wish.block, hop=wish.hop)
    wiring = Wiring.of(header_of(wish.model, wish.signature), wish.inputs, wish.shapes, wish.states, options=options)
    with closing(wiring), _with_remedy(wiring), progress() as tell:
        begin = time.monotonic()
        with _compiled(wish, wiring, tell) as compiled:
            wiring = wiring.in_form_of(compiled.model)
            wiring = wiring.as_stream() if wish.stream else wiring
            found = _head(wish, compiled, wiring) | {"seconds_to_compile": time.monotonic() - begin}
            tell("run")
            if not wish.as_json:
                _show_head(found)
            ran = _run(wish, compiled, wiring, labels)
            found |= _report(wish, compiled, wiring, ran, labels=labels)
    if wish.output:
        _write(wish.output, wiring, ran.kept)
    if wish.as_json:
        print_json(readable(found))
    else:
        _show(found)


@contextmanager
def _with_remedy(wiring: Wiring) -> Iterator[None]:
    """Say, if an execution fails, which sizes were chosen for it, and how to choose others."""
    try:
        yield
    except StatusError as error:
        raise click.ClickException(as_options(str(error)) + wiring.chosen_words) from error
    except NotPlaced as error:
        raise click.ClickException(as_options(str(error))) from error


def _compiled(wish: _Arguments, wiring: Wiring, tell: Callable[[str], object]) -> CompiledModel:
    """Load the file with the sizes that its inputs have, and compile it."""
    model = loaded(wish.model, wiring.shapes, wish.form, wish.signature)
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
        raise click.UsageError(as_options(str(error))) from error


def _head(wish: _Arguments, compiled: CompiledModel, wiring: Wiring) -> dict[str, Any]:
    """Return what is known before the first execution, as --json prints it."""
    placement, pairs = compiled.placement(), zip(wiring.inputs, wiring.fed, strict=True)
    return {
        "model": str(wish.model),
        "form": "file" if is_file(compiled.model) else "operations",
        "placement": [
            {"device": device, "operations": len(numbers), "ranges": ranges(numbers)} for device, numbers in placement
        ],
        "measured": placement.figures.seconds,
        "compilations": compiled.stats()["compilations"],
        "inputs": [
            {"name": p.name, "dtype": p.dtype, "shape": f.array.shape, "source": f.source, "done": f.done}
            for p, f in pairs
        ],
        "states": {wiring.outputs[o].name: wiring.inputs[i].name for o, i in wiring.states.items()},
        "path": "plain" if wish.plain else "burst",
    }


def _run(wish: _Arguments, compiled: CompiledModel, wiring: Wiring, labels: Sequence[str]) -> _Ran:
    """Return all executions: of each frame or block; else a first one and those that are timed."""
    ran, limit = _Ran(), wish.frames if wiring.unit else 1 + wish.runs
    if wiring.is_stream:
        until = until_of(wish.until)
        most = limit or (_MOST_STEPS if until else wish.runs)
        found = streamed(compiled, wiring.fed, wiring.states, until=until, most=most, deadline=wish.deadline)
        with closing(found), suppress(KeyboardInterrupt):
            _follow(wish, wiring, ran, found, labels=labels)
        return ran
    with (
        execution(compiled, [feed.array for feed in wiring.fed], wish.deadline, plain=wish.plain) as its,
        suppress(KeyboardInterrupt),  # a stream has no end
    ):
        executed = islice(steps(its.call, wiring.fed, wiring.states if wiring.unit else {}), limit)
        _follow(wish, wiring, ran, executed, labels=labels)
        ran.stages = its.stages()
    return ran


def _follow(wish: _Arguments, wiring: Wiring, ran: _Ran, found: Iterable[TimedStep], *, labels: Sequence[str]) -> None:
    """Note executions as they come; show them where each is a frame, a block or a step."""
    for step in found:
        _note(wish, ran, step)
        if wiring.unit:
            ran.outputs = step.outputs
            ran.rows.append(_row(wish, wiring, step, labels))
            if not wish.as_json:
                print_line(_row_words(wiring.unit, ran.rows[-1]))


def _note(wish: _Arguments, ran: _Ran, step: TimedStep) -> None:
    """Keep the times, and the outputs that --output needs."""
    if step.number == 0:
        ran.first, ran.outputs = step.us, copies(tuple(step.outputs))
    else:
        ran.us.append(step.us)
    if wish.output and (step.number == 0 or ran.rows):
        ran.kept.append([storable(output) for output in step.outputs])


def _row(wish: _Arguments, wiring: Wiring, step: TimedStep, labels: Sequence[str]) -> dict[str, Any]:
    """Return one frame or block, as --json prints it: the outputs without states."""
    outputs = {}
    for n, (port, array) in enumerate(zip(wiring.outputs, step.outputs, strict=True)):
        if n not in wiring.states:
            top = [one._asdict() for one in classes(port, array, wish.top, labels)]
            outputs[port.name] = brief(summary(port, array), top)
    return {wiring.unit: step.number, "second": step.second, "us": step.us, **outputs}


def _row_words(unit: str, row: dict[str, Any]) -> str:
    outputs = (brief_words(name, found) for name, found in row.items() if name not in (unit, "second", "us"))
    return f"{unit} {row[unit]} at {row['second']:.3f} s: {', '.join(outputs)}; {spelled(row['us'])}"


def _report(
    wish: _Arguments, compiled: CompiledModel, wiring: Wiring, ran: _Ran, labels: Sequence[str]
) -> dict[str, Any]:
    """Return what is known after the last execution, as --json prints it."""
    outputs = [summary(port, array) for port, array in zip(wiring.outputs, ran.outputs, strict=True)]
    for port, array, found in zip(wiring.outputs, ran.outputs, outputs, strict=True):
        found["top"] = [one._asdict() for one in classes(port, array, wish.top, labels)]
    if labels and not any(found["top"] for found in outputs) and wish.top:
        raise click.UsageError(f"--labels {wish.labels}: no output of this model is a row of class scores")
    stats, us = compiled.stats(), ran.us or [ran.first]
    p50, p99 = np.percentile(us, [50, 99])
    return {
        "outputs": outputs,
        **({"unit": wiring.unit, "steps": ran.rows} if wiring.unit else {}),
        "runs": len(us),
        "us": {"first": ran.first, "p50": float(p50), "p99": float(p99), "least": min(us), "most": max(us)},
        "stages": [{"device": one.device or compiled.placement()[0][0], "us": one.us} for one in ran.stages],
        "fallbacks": stats["fallbacks"],
    }


def _write(path: Path, wiring: Wiring, kept: Sequence[Sequence[NDArray[Any]]]) -> None:
    """Write the outputs: of frames or blocks one after the other, along a new first axis, if all have one shape."""
    found: dict[str, NDArray[Any]] = {}
    for n, (port, arrays) in enumerate(zip(wiring.outputs, zip(*kept, strict=True), strict=True)):
        if wiring.is_stream and n in wiring.states:
            continue  # it has stayed on the device
        if not wiring.unit:
            found[port.name] = arrays[0]
        elif len({array.shape for array in arrays}) == 1:
            found[port.name] = np.stack(arrays)
        else:
            found |= {f"{port.name}.{step}": array for step, array in enumerate(arrays)}
    try:
        write_arrays(path, found)
    except OSError as error:
        raise click.UsageError(f"--output {path}: cannot be written: {error.strerror}") from error


def _show_head(found: dict[str, Any]) -> None:
    operations = sum(step["operations"] for step in found["placement"])
    form = "the file as it is" if found["form"] == "file" else f"{operations} operations"
    print_line(f"{found['model']}: {form}, compiled in {spelled(1e6 * found['seconds_to_compile'])}")
    for step in found["placement"]:
        what = "" if found["form"] == "file" else f": operations {', '.join(map(range_text, step['ranges']))}"
        print_line(f"on {step['device']}{what}")
    if len(found["measured"]) > 1:
        compared = sorted(found["measured"].items(), key=lambda pair: pair[1])
        print_line(f"measured: {', '.join(f'{name} {spelled(1e6 * seconds)}' for name, seconds in compared)}")
    for given in found["inputs"]:
        done = f" ({given['done']})" if given["done"] else ""
        print_line(f"input {given['name']}: {given['dtype']} {shape_words(given['shape'])}, {given['source']}{done}")
    for output, its in found["states"].items():
        print_line(f"state: output {output} is the next input {its}")


def _show(found: dict[str, Any]) -> None:
    for output in found["outputs"] if "unit" not in found else ():
        print_line(f"output {output['name']}: {summary_words(output)}")
    for reason in found["fallbacks"]["reasons"].values():
        print_line(f"fell back: {reason}")
    _show_times(found)
    for output in found["outputs"] if "unit" not in found else ():
        if output["top"]:
            rows = [(str(c["number"]), c["label"] or "", f"{c['value']:.4g}") for c in output["top"]]
            print_table(("class", "label", output["name"]), rows, (0, 2))


def _show_times(found: dict[str, Any]) -> None:
    us, runs, way = found["us"], found["runs"], "through a burst" if found["path"] == "burst" else "on the plain path"
    times = f"p50 {spelled(us['p50'])}, p99 {spelled(us['p99'])}, max {spelled(us['most'])}"
    what = found.get("unit", "run") + "s" * (runs > 1)
    print_line(f"{runs} {what} {way}: {times}; the first {what.removesuffix('s')} took {spelled(us['first'])}")
    for stages in found["stages"]:
        spread = {name: figures for name, figures in stages["us"].items() if figures}
        words = (f"{name} {spelled(figures['p50'])}" for name, figures in spread.items())
        print_line(f"stages on {stages['device']}, p50: {', '.join(words)}")
