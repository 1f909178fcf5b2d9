"""`burst bench`: measures an execution in this process, through a burst, and on the plain path.

In a clone of the project it also runs the benchmark scripts in bench/, which are not part of a wheel.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import numpy as np

from driver.cli.comparison import IN_PROCESS, Comparison, add_model, compared
from driver.cli.inputs import feeds
from driver.cli.names import DeviceName, is_model, loaded
from driver.cli.output import (
    digits,
    examples,
    interval,
    json_option,
    print_json,
    print_line,
    print_table,
    progress,
    spelled,
)
from driver.cli.ports import inputs_of
from driver.cli.timing import conditions, in_words
from driver.devices import missing, names
from driver.nn.errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from driver.nn import Model

_FILE: Any = click.Path(path_type=Path, dir_okay=False)
ADD = "ADD of 4 floats"


class _ModelOrScript(click.ParamType):  # type: ignore[type-arg] # as DeviceName
    """A model file, or a script of bench/."""

    name = "what"

    def shell_complete(self, _context: Any, _param: Any, incomplete: str) -> list[Any]:
        """Completes names of scripts and files."""
        from click.shell_completion import CompletionItem

        found = [CompletionItem(s.name, help=s.question) for s in all_scripts() if s.name.startswith(incomplete)]
        return [*found, CompletionItem(incomplete, type="file")]


@click.command(
    epilog=examples(
        "burst bench",
        "burst bench net.tflite --device litert --plot bench.png",
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
    help="Device to measure; repeatable. [default: all installed devices]",
)
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
    seconds: float,
    pin: bool,
    plot: Path | None,
    listing: bool,
    quick: bool,
    as_json: bool,
) -> None:
    """Measure what a burst costs here, beside the alternatives.

    Executes an addition of four floats, and MODEL (a .tflite or .onnx file, on random inputs) if given, in four ways:
    with the device's code in this process, through a burst that polls, through a burst that sleeps, and on the plain
    path. The four are interleaved, so that all meet the same conditions. With two CPUs or more, the client runs on one
    and the execution on the others. SCRIPT is a benchmark script named by --list; these need a clone of the project.
    """
    if listing:
        _list(as_json)
    elif what and not any(map(is_model, what)):
        _run_scripts(what, plot, quick=quick, as_json=as_json)
    else:
        usable = devices or tuple(name for name in names() if not missing(name))
        _compare(_models(what), usable, seconds, plot, pin=pin, as_json=as_json)


def _models(what: Sequence[str]) -> dict[str, tuple[Model, Sequence[Any]]]:
    """Models and their inputs, by name."""
    if len(what) > 1:
        raise click.UsageError(f"{' '.join(what)}: pass either one MODEL or any number of SCRIPTs")
    found = {ADD: add_model(), **{Path(name).name: loaded(Path(name)) for name in what}}
    fed = {name: feeds(inputs_of(model), (), (), 0, None) for name, model in found.items()}
    return {name: (model, [feed.array for feed in fed[name]]) for name, model in found.items()}


def _compare(
    models: dict[str, tuple[Model, Sequence[Any]]],
    devices: Sequence[str],
    seconds: float,
    plot: Path | None,
    *,
    pin: bool,
    as_json: bool,
) -> None:
    if plot:
        _check_plot(plot)
    machine = conditions()
    found = []
    with progress() as tell:
        for device in devices:
            for name, (model, arrays) in models.items():
                tell(f"{name} on {device}")
                found.append(compared(device, name, model, arrays, seconds, pin=pin))
    if plot:
        _draw(plot, found, in_words(machine))
    if as_json:
        print_json({"conditions": machine, "comparisons": [one.as_json() for one in found]})
    else:
        _show(found, in_words(machine))
    raise SystemExit(0 if any(one.ways for one in found) else 1)


def _show(found: Sequence[Comparison], machine: str) -> None:
    print_line(machine)
    for one in found:
        if one.reason:
            print_line(f"{one.model} on {one.device}: {one.reason}")
            continue
        rows = [
            (
                way.name,
                spelled(*way.p50[:3]),
                spelled(way.p99),
                digits(way.ratio.median) + interval(way.ratio.low, way.ratio.high) if way.ratio else "",
            )
            for way in one.ways
        ]
        where = "client and device on separate CPUs" if one.is_pinned else "not pinned"
        print_line(f"\n{one.model} on {one.device}: {where}, {one.rounds} rounds; medians [95 % interval]")
        print_table(("", "p50", "p99", f"x {one.ways[0].name}"), rows, (1, 2, 3))


def _list(as_json: bool) -> None:
    """Prints the scripts of bench/."""
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
        click.echo(f"{n + 1} of {len(chosen)}: {script.name}: {script.question}", err=True)
        output, figures[script.name] = _measured(script, plot, quick=quick)
        if not as_json:
            click.echo(output)
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
    """All benchmark scripts: programs whose docstring begins with a question. Empty outside a clone."""
    scripts = []
    is_clone = (FOLDER.parent / "pyproject.toml").is_file()
    for path in sorted(FOLDER.glob("*.py")) if is_clone else ():
        text = path.read_text()
        question = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        if question.endswith("?") and "__main__" in text:
            scripts.append(Script(path.stem, question))
    return scripts


def _scripts_of_clone() -> list[Script]:
    """The same as `all_scripts`. Raises UsageError outside a clone."""
    if scripts := all_scripts():
        return scripts
    raise click.UsageError(
        "SCRIPT: the installed package does not contain the scripts of bench/; run this in a clone of the project, "
        "after `make .venv/bench`. `burst bench` and `burst bench MODEL` need no clone"
    )


def _script_named(name: str) -> Script:
    """Finds a script by its name, with or without .py. Raises UsageError."""
    scripts = {script.name: script for script in _scripts_of_clone()}
    stem = name.removesuffix(".py")
    if stem not in scripts:
        raise click.UsageError(
            f"{name!r}: neither a model file (.tflite, .onnx) nor a script of bench/ (see --list)"
            f"{did_you_mean(stem, scripts)}"
        )
    return scripts[stem]


def _measured(script: Script, plot: Path | None, *, quick: bool) -> tuple[str, Any]:
    """Runs a script; returns its output and figures. Its progress goes to stderr. Raises ClickException on failure."""
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
    """Raises UsageError for an unknown image format, or without matplotlib."""
    if path.suffix not in _PICTURES:
        raise click.UsageError(
            f"--plot {path}: unsupported format; use {', '.join(_PICTURES)}, for example {path.stem}.png"
        )
    if find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install matplotlib")


_HERE, _OURS = "#4c6a85", "#c1440e"


def _draw(path: Path, found: Sequence[Comparison], machine: str) -> None:
    """Draws a dot at each p50, the interval of its median, and a bar to p99. Raises OSError."""
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
        colour = _HERE if way.name == IN_PROCESS else _OURS
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
    axis.set_title(f"{one.model} on {one.device}{', not pinned' * (not one.is_pinned)}", loc="left", fontsize=10)
    axis.grid(visible=True, axis="x", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
