"""`burst bench`: measures an execution in this process, through a burst, and on the plain path."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from driver.cli import scripts
from driver.cli.comparison import Comparison, compared
from driver.cli.conditions import conditions, in_words
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
from driver.cli.work import add_model
from driver.devices import names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driver.nn import Model

_FILE: Any = click.Path(path_type=Path, dir_okay=False)
ADD = "ADD of 4 floats"


class _ModelOrScript(click.ParamType):  # type: ignore[type-arg] # as DeviceName
    """A model file, or a script of bench/."""

    name = "what"

    def shell_complete(self, _context: Any, _param: Any, incomplete: str) -> list[Any]:
        """Completes names of scripts and files."""
        from click.shell_completion import CompletionItem

        found = [CompletionItem(s.name, help=s.question) for s in scripts.found() if s.name.startswith(incomplete)]
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
        _compare(_models(what), devices or tuple(names()), seconds, plot, pin=pin, as_json=as_json)


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
        scripts.check_plot(plot)
    machine = conditions()
    found = []
    with progress() as tell:
        for device in devices:
            for name, (model, arrays) in models.items():
                tell(f"{name} on {device}")
                found.append(compared(device, name, model, arrays, seconds, pin=pin))
    if plot:
        from driver.cli.picture import draw

        draw(plot, found, in_words(machine))
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
    found = scripts.all_of_them()
    if as_json:
        print_json([script._asdict() for script in found])
    else:
        print_table(("script", "asks"), found)


def _run_scripts(names_: Sequence[str], plot: Path | None, *, quick: bool, as_json: bool) -> None:
    if plot:
        scripts.check_plot(plot)
        if len(names_) > 1:
            raise click.UsageError(f"--plot {plot}: works with one script only")
    chosen = [scripts.named(name) for name in names_]
    figures = {}
    for n, script in enumerate(chosen):
        click.echo(f"{n + 1} of {len(chosen)}: {script.name}: {script.question}", err=True)
        output, figures[script.name] = scripts.measured(script, plot, quick=quick)
        if not as_json:
            click.echo(output)
    if as_json:
        print_json(figures)
