"""`burst bench`: what an execution costs on this machine, in this process and through each way to another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from driver.cli import scripts
from driver.cli.comparison import Comparison, compared
from driver.cli.conditions import conditions, in_words
from driver.cli.inputs import feeds
from driver.cli.names import DeviceName, is_model, loaded
from driver.cli.output import digits, interval, json_option, print_json, print_line, print_table, spelled, watched
from driver.cli.ports import inputs_of
from driver.cli.work import add_model
from driver.devices import names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driver.nn import Model

_FILE: Any = click.Path(path_type=Path, dir_okay=False)
ADD = "ADD of 4 floats"


class _What(click.ParamType):  # type: ignore[type-arg] # as DeviceName
    """A model file, or a script of bench/."""

    name = "what"

    def shell_complete(self, _context: Any, _param: Any, incomplete: str) -> list[Any]:
        """Scripts, and files."""
        from click.shell_completion import CompletionItem

        found = [CompletionItem(s.name, help=s.question) for s in scripts.found() if s.name.startswith(incomplete)]
        return [*found, CompletionItem(incomplete, type="file")]


@click.command()
@click.argument("what", nargs=-1, type=_What(), metavar="[MODEL | SCRIPT…]")
@click.option(
    "--device",
    "devices",
    multiple=True,
    type=DeviceName(),
    metavar="NAME",
    help="To be measured; several. [default: all that are installed]",
)
@click.option(
    "--seconds", default=3.0, show_default=True, type=click.FloatRange(0.1), help="For each model and device."
)
@click.option("--pin/--no-pin", default=True, help="Client and device on processors of their own. [default: pin]")
@click.option("--plot", type=_FILE, metavar="FILE", help="A picture (.png, .svg, .pdf); needs matplotlib.")
@click.option("--list", "listing", is_flag=True, help="Only list the scripts of bench/.")
@click.option("--quick", is_flag=True, help="Scripts only: shows that they work, measures nothing.")
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
    """Measures bursts on this machine, beside the other ways.

    An addition of four floats, and MODEL if there is one (a .tflite or .onnx file, on random inputs), are executed by
    the device's own code in this process, through a burst, through one that sleeps, and on the plain path; by turns, so
    that all of them meet the same machine. Where there are two processors, the client has one of them, and whoever
    executes has the others. SCRIPT is one of --list; those are in a clone of the project, and answer one question each.
    """
    if listing:
        _list(as_json)
    elif what and not any(map(is_model, what)):
        _run_scripts(what, plot, quick=quick, as_json=as_json)
    else:
        _compare(_models(what), devices or tuple(names()), seconds, plot, pin=pin, as_json=as_json)


def _models(what: Sequence[str]) -> dict[str, tuple[Model, Sequence[Any]]]:
    """By their names; with inputs."""
    if len(what) > 1:
        raise click.UsageError(f"{' '.join(what)}: give one MODEL, or any number of SCRIPTs, and not both")
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
    with watched() as tell:
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
                digits(way.ratio.value) + interval(way.ratio.low, way.ratio.high) if way.ratio else "",
            )
            for way in one.ways
        ]
        where = "client and device apart" if one.is_pinned else "nobody pinned"
        print_line(f"\n{one.model} on {one.device}: {where}, {one.rounds} rounds; medians [and their interval of 95 %]")
        print_table(("", "p50", "p99", f"x {one.ways[0].name}"), rows, (1, 2, 3))


def _list(as_json: bool) -> None:
    """The scripts of bench/."""
    found = scripts.all_of_them()
    if as_json:
        print_json([script._asdict() for script in found])
    else:
        print_table(("script", "asks"), found)


def _run_scripts(names_: Sequence[str], plot: Path | None, *, quick: bool, as_json: bool) -> None:
    if plot:
        scripts.check_plot(plot)
        if len(names_) > 1:
            raise click.UsageError(f"--plot {plot}: for one script at a time")
    chosen = [scripts.named(name) for name in names_]
    figures = {}
    for n, script in enumerate(chosen):
        click.echo(f"{n + 1} of {len(chosen)}: {script.name}: {script.question}", err=True)
        output, figures[script.name] = scripts.measured(script, plot, quick=quick)
        if not as_json:
            click.echo(output)
    if as_json:
        print_json(figures)
