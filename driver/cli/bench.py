"""`burst bench`: measures an execution in this process, through a burst, and on the plain path; of a model file, beside
the same file in its own runtime.

In a clone of the project it also runs the benchmark scripts in bench/, which are not part of a wheel.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import numpy as np

from driver.cli.comparison import Comparison, Subject, add_model, compared
from driver.cli.device_name import DeviceName
from driver.cli.epilog import examples
from driver.cli.inputs import FeedOptions
from driver.cli.names import as_options, form_option, header_of, is_model
from driver.cli.output import (
    digits,
    echo,
    interval,
    json_option,
    print_json,
    print_line,
    print_table,
    progress,
    spelled,
)
from driver.cli.own_runtime import OwnRuntime, own_runtime
from driver.cli.sizes import shape_option
from driver.cli.timing import conditions, in_words
from driver.cli.wiring import Wiring
from driver.devices import missing, names
from driver.devices.files import RUNTIMES
from driver.errors import ImportFailed
from driver.importers.files import Form, kind_of, load
from driver.nn.errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

_FILE: Any = click.Path(path_type=Path, dir_okay=False)
ADD = "ADD of 4 floats"


class _ModelOrScript(click.ParamType):  # type: ignore[type-arg] # as DeviceName
    """A model file, or a script of bench/."""

    name = "what"

    def shell_complete(self, _context: Any, _param: Any, incomplete: str) -> list[Any]:
        """Complete names of scripts and files."""
        from click.shell_completion import CompletionItem

        found = [CompletionItem(s.name, help=s.question) for s in all_scripts() if s.name.startswith(incomplete)]
        return [*found, CompletionItem(incomplete, type="file")]


@click.command(
    epilog=examples(
        "burst bench",
        "burst bench net.tflite --device litert --plot bench.png",
        "burst bench yolo.onnx --shape images=1x3x320x320",
        "burst bench --list",
        "burst bench burst_roundtrip --json",
    )
)
@click.argument("what", nargs=-1, type=_ModelOrScript(), metavar="[MODEL | SCRIPT…]")
@click.option(
    "--device",
    "devices",
    multiple=True,
    type=DeviceName(),
    metavar="NAME",
    help="Device to measure; repeatable. [default: all that are installed; with MODEL without reference]",
)
@click.option("--input", "inputs", multiple=True, metavar="[NAME=]FILE", help="As of `burst run`. [default: random]")
@shape_option
@form_option
@click.option(
    "--seconds",
    default=3.0,
    show_default=True,
    type=click.FloatRange(0.1),
    help="Measuring time for each model and device.",
)
@click.option("--pin/--no-pin", default=True, help="Pin client and device to separate CPUs. [default: pin]")
@click.option("--plot", type=_FILE, metavar="FILE", help="Draw the results (.png, .svg, .pdf); needs matplotlib.")
@click.option("--list", "listing", is_flag=True, help="List the scripts of bench/ and exit.")
@click.option("--quick", is_flag=True, help="Scripts only: check that they run; the figures mean nothing.")
@json_option
def bench(
    what: tuple[str, ...],
    devices: tuple[str, ...],
    inputs: tuple[str, ...],
    shapes: tuple[str, ...],
    form: Form,
    seconds: float,
    pin: bool,
    plot: Path | None,
    listing: bool,
    quick: bool,
    as_json: bool,
) -> None:
    """Measure what a burst costs here, beside the alternatives.

    Executes MODEL, a .tflite or .onnx file, in four ways: the file in the runtime that it was made for, in this process
    and on one thread; through a burst that polls; through a burst that sleeps; and on the plain path. Each writes its
    inputs. That is done for each form that the file has, on each device that takes it. Without MODEL, it is an
    addition of four floats, with the device's own code in this process as the first way. The four are interleaved, so
    that all meet the same conditions. With two CPUs or more, the client runs on one and the execution on the others.
    SCRIPT is a benchmark script named by --list; these need a clone of the project.
    """
    if listing:
        _list(as_json)
    elif what and not any(map(is_model, what)):
        _run_scripts(what, plot, quick=quick, as_json=as_json)
    else:
        if len(what) > 1:
            raise click.UsageError(f"{' '.join(what)}: pass either one MODEL or any number of SCRIPTs")
        if plot:
            _check_plot(plot)
        machine, usable = conditions(), devices or tuple(name for name in names() if not missing(name))
        if what:
            found = _of_file(_Trial(Path(what[0]), inputs, shapes, form, devices=devices, seconds=seconds, pin=pin))
        else:
            found = [compared(device, _addition(), seconds, pin=pin) for device in usable]
        _tell(found, machine, plot, as_json=as_json)


def _addition() -> Subject:
    return Subject(ADD, add_model(), [np.ones((1, 4), np.float32)] * 2)


class _Trial(NamedTuple):
    """A model file, and how it is to be measured."""

    path: Path
    inputs: Sequence[str]
    shapes: Sequence[str]
    form: Form
    devices: Sequence[str]  #: that were named; empty: those that are installed, without the reference
    seconds: float
    pin: bool

    def forms(self) -> tuple[Form, ...]:
        """Return all that may be measured."""
        return ("file", "operations") if self.form == "auto" else (self.form,)


def _of_file(trial: _Trial) -> list[Comparison]:
    """Return each form of the file on each device that takes it."""
    kind, found = kind_of(trial.path), list[Comparison]()
    installed = [name for name in names() if name != "reference" and not missing(name)]
    with (
        closing(Wiring.of(header_of(trial.path), trial.inputs, trial.shapes, (), options=FeedOptions())) as wiring,
        progress() as tell,
    ):
        own = _own_runtime(trial.path, wiring)
        for form in trial.forms():
            try:
                model = load(trial.path, wiring.shapes, form, optional=False)
            except ImportFailed as error:
                found.append(Comparison("", trial.path.name, form, trial.pin, reason=as_options(str(error))))
                continue
            subject = Subject(
                trial.path.name, model, [feed.array for feed in wiring.in_form_of(model).fed], own, is_from_file=True
            )
            for device in trial.devices or installed:
                tell(f"{trial.path.name} on {device}, as {'it is' if form == 'file' else form}")
                one = compared(device, subject, trial.seconds, pin=trial.pin)
                if one.ways or form != "file" or trial.devices or device == RUNTIMES[kind]:
                    found.append(one)
    return found


def _own_runtime(path: Path, wiring: Wiring) -> OwnRuntime | None:
    """Raise ClickException for a file, or inputs, that it does not take."""
    try:
        return own_runtime(path, [feed.array for feed in wiring.fed])
    except Exception as error:  # whatever the runtime raises
        words = f"{path.name}: the runtime that it was made for refuses it: {error}"
        raise click.ClickException(f"{words}{wiring.chosen_words}") from error


def _tell(found: Sequence[Comparison], machine: dict[str, Any], plot: Path | None, *, as_json: bool) -> None:
    if plot:
        _draw(plot, found, in_words(machine))
    if as_json:
        print_json({"conditions": machine, "comparisons": [one.as_json() for one in found]})
    else:
        _show(found, in_words(machine))
    raise SystemExit(0 if any(one.ways for one in found) else 1)


def _show(found: Sequence[Comparison], machine: str) -> None:
    print_line(machine)
    refused = [one for one in found if one.is_refused] if any(one.ways for one in found) else []
    for one in found:
        if one in refused:
            continue
        if one.reason:
            print_line(f"\n{one.title}: {one.reason}")
            continue
        rows = [
            (
                way.name,
                spelled(*way.p50[:3]),
                spelled(way.p99),
                spelled(way.processor),
                digits(way.ratio.median) + interval(way.ratio.low, way.ratio.high) if way.ratio else "",
            )
            for way in one.ways
        ]
        where = "client and device on separate CPUs" if one.is_pinned else "not pinned"
        print_line(f"\n{one.title}: {where}, {one.rounds} rounds; medians [95 % interval]")
        print_table(("", "p50", "p99", "CPU time", "ratio to the first"), rows, (1, 2, 3, 4))
    for one in refused:
        print_line(f"not measured: {one.title}: {one.reason}")


def _list(as_json: bool) -> None:
    """Print the scripts of bench/."""
    found = _scripts_of_clone()
    if as_json:
        print_json([script._asdict() for script in found])
    else:
        print_table(("script", "asks"), found)


def _run_scripts(names_: Sequence[str], plot: Path | None, *, quick: bool, as_json: bool) -> None:
    if plot:
        _check_plot(plot)
        if len(names_) > 1:
            raise click.UsageError(f"--plot {plot}: works with one script only")
    chosen = [_script_named(name) for name in names_]
    figures = {}
    for n, script in enumerate(chosen):
        echo(f"{n + 1} of {len(chosen)}: {script.name}: {script.question}", err=True)
        output, figures[script.name] = _measured(script, plot, quick=quick)
        if not as_json:
            echo(output)
    if as_json:
        print_json(figures)


FOLDER = Path(__file__).parents[2] / "bench"
_PICTURES = ".png", ".svg", ".pdf"


class Script(NamedTuple):
    """A benchmark script, and the question that it answers."""

    name: str
    question: str

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.py"


def all_scripts() -> list[Script]:
    """Return all benchmark scripts: programs whose docstring begins with a question. Empty outside a clone."""
    scripts = []
    is_clone = (FOLDER.parent / "pyproject.toml").is_file()
    for path in sorted(FOLDER.glob("*.py")) if is_clone else ():
        text = path.read_text()
        question = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        if question.endswith("?") and "__main__" in text:
            scripts.append(Script(path.stem, question))
    return scripts


def _scripts_of_clone() -> list[Script]:
    """Return what `all_scripts` does. Raise UsageError outside a clone."""
    if scripts := all_scripts():
        return scripts
    raise click.UsageError(
        "SCRIPT: the installed package does not contain the scripts of bench/; run this in a clone of the project, "
        "after `make .venv/bench`. `burst bench` and `burst bench MODEL` need no clone"
    )


def _script_named(name: str) -> Script:
    """Find a script by its name, with or without .py. Raise UsageError."""
    scripts = {script.name: script for script in _scripts_of_clone()}
    stem = name.removesuffix(".py")
    if stem not in scripts:
        raise click.UsageError(
            f"{name!r}: neither a model file (.tflite, .onnx) nor a script of bench/ (see --list)"
            f"{did_you_mean(stem, scripts)}"
        )
    return scripts[stem]


def _measured(script: Script, plot: Path | None, *, quick: bool) -> tuple[str, Any]:
    """Run a script; return its output and figures. Its progress goes to stderr. Raise ClickException on failure."""
    with tempfile.TemporaryDirectory(prefix="burst-bench-") as folder:
        figures = Path(folder, "figures.json")
        command = [sys.executable, str(script.path), "--json", str(figures)]
        command += ["--quick"] if quick else []
        command += ["--plot", str(plot)] if plot else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise click.ClickException(
                f"{script.name} exited with {done.returncode}; `make .venv/bench` installs what the scripts need"
            )
        return done.stdout, json.loads(figures.read_text())


def _check_plot(path: Path) -> None:
    """Raise UsageError for an unknown image format, or without matplotlib."""
    if path.suffix not in _PICTURES:
        raise click.UsageError(
            f"--plot {path}: unsupported format; use {', '.join(_PICTURES)}, for example {path.stem}.png"
        )
    if find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install matplotlib")


_HERE, _OURS = "#4c6a85", "#c1440e"


def _draw(path: Path, found: Sequence[Comparison], machine: str) -> None:
    """Draw a dot at each p50, the interval of its median, and a bar to p99. Raise OSError."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shown = [one for one in found if one.ways]
    rows = max(1, len(shown))
    figure, axes = plt.subplots(rows, 1, figsize=(8, 0.8 + 1.7 * rows), layout="constrained", squeeze=False)
    for axis, one in zip(axes[:, 0], shown, strict=False):
        _panel(axis, one)
    axes[-1, 0].set_xlabel("one execution: median (dot), its interval (thick), to p99 (thin)")
    figure.suptitle("What one execution costs", weight="bold")
    figure.text(0.005, -0.01, machine, fontsize=6, va="top", wrap=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def _panel(axis: Axes, one: Comparison) -> None:
    from matplotlib.ticker import NullFormatter

    for y, way in enumerate(one.ways):
        colour = _OURS if y else _HERE
        axis.plot([way.p50.median, way.p99], [y, y], color=colour, linewidth=1.2, marker="|", markevery=[1])
        axis.plot([way.p50.low, way.p50.high], [y, y], color=colour, linewidth=5, alpha=0.35, solid_capstyle="butt")
        axis.plot(way.p50.median, y, "o", color=colour)
        axis.annotate(
            spelled(way.p50.median), (way.p50.median, y), (0, 6), textcoords="offset points", fontsize=8, ha="center"
        )
    axis.set_yticks(np.arange(len(one.ways)), [way.name for way in one.ways])
    axis.set_ylim(len(one.ways) - 0.5, -0.7)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(lambda us, _: spelled(us))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_title(f"{one.title}{', not pinned' * (not one.is_pinned)}", loc="left", fontsize=10)
    axis.grid(visible=True, axis="x", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
