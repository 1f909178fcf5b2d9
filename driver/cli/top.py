"""`burst top`: live figures of devices and bursts, read from memory that they write anyway.

A few lines for each device, and a table of bursts that fits the terminal.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from itertools import count as forever
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from burst.run_queue import give_way
from burst.trace import STAGES
from driver.cli.epilog import examples
from driver.cli.output import TerminalConsole, echo
from driver.client.discovery import runtime_dir
from driver.engine.limits import NO_LIMIT
from driver.errors import DriverError
from driver.monitor import Sample, Watcher
from driver.monitor.lateness import told

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rich.console import RenderableType

    from driver.monitor import AccountFigures, BurstFigures, DeviceFigures, GpuFigures, Spread

_MANY = 3  # with more devices, each gets only one line
_WIDE, _WIDEST = 100, 140  # width of a terminal with room for application and priority, and for the stages
_NAMES = {"program", "device", "model"}
_WORDS = {*_NAMES, "application"}
_NONE, _LEAST = "-", 4
_ENOUGH = 24  # of a name: to show as much, columns make room
_MAKE_ROOM: tuple[tuple[str, ...], ...] = (tuple(STAGES), ("path",), ("number",), ("queued",))
"""Columns that are left out for names that do not fit, the first ones first."""

COLUMNS: Mapping[str, Callable[[BurstFigures], Any]] = {
    "rate": lambda burst: -burst.rate,
    "p50": lambda burst: -(burst.latency.p50 if burst.latency else 0),
    "p99": lambda burst: -(burst.latency.p99 if burst.latency else 0),
    "queued": lambda burst: -burst.queued,
    "flight": lambda burst: -burst.in_flight,
    "lost": lambda burst: -(burst.drops + burst.timeouts),
    "cpu": lambda burst: -(burst.client_cpu + (burst.device_cpu or 0)),
    "pid": lambda burst: burst.pid,
    "program": lambda burst: burst.program,
}
"""Sort keys of --sort. Bursts with equal keys keep the order in which they were first seen."""


def view(sample: Sample, sort: str, width: int, height: int | None) -> Iterator[RenderableType]:
    """Render a sample from top to bottom. `height` None: all bursts, however many."""
    lines = list(_above(sample))
    yield from lines
    if not sample.bursts:
        return
    bursts = sorted(sample.bursts, key=COLUMNS[sort])
    room = len(bursts) if height is None else max(1, height - len(lines) - 1)  # less the head
    shown = bursts if len(bursts) <= room else bursts[: max(1, room - 1)]
    yield _table(shown, width, len(sample.devices) > 1)
    if len(shown) < len(bursts):
        yield _line(f"… {len(bursts) - len(shown)} more", "dim")


def _above(sample: Sample) -> Iterator[Text]:
    for name, why in sample.absent.items():
        yield _line(f"{name}: {why}", "yellow")
    if not sample.devices and not sample.absent:
        yield _line(f"No device of this account is running in {runtime_dir()}.", "yellow")
        yield _line("A device starts when a program calls driver.connect() or driver.compile().")
        yield _line("To see a served device, pass its socket: burst top /run/burst/litert.sock")
    for device in sample.devices:
        yield _head(device)
        if len(sample.devices) <= _MANY:
            yield _line(f"  run queue  {_run_queue(device)}")
            yield from _engine_memory(device)
            yield from _stages(sample, device)
            yield from _late(sample, device)
        yield from map(_account, device.accounts)
    yield from map(_gpu, sample.gpus)
    yield Text()


def _line(words: str, style: str = "") -> Text:
    """Return one line, cut at the terminal's width."""
    return Text(words, style, no_wrap=True, overflow="ellipsis")


def _head(device: DeviceFigures) -> Text:
    counts = f"{_plural(device.clients, 'client')}, {_plural(device.bursts, 'burst')}"
    memory = f"RSS {_size(device.rss)}, PSS {_size(device.pss)}"
    memory += "" if device.gpu_memory is None else f", GPU memory {_size(device.gpu_memory)}"
    text = Text(device.address, "bold", no_wrap=True, overflow="ellipsis")
    return text.append(f"  {counts}, CPU {_percent(device.cpu)} %, {memory}, pid {device.engine_pid}", "not bold")


def _engine_memory(device: DeviceFigures) -> Iterator[Text]:
    """Return what the engines hold, what of it is their runtimes', and how that grows."""
    if device.engine_memory is None:
        return
    held = f"{_size(device.engine_memory)} in engines, {_size(device.runtime_memory)} of it the runtime's"
    growth = device.runtime_growth
    grows = "" if growth is None else f", {'-' if growth < 0 else '+'}{_size(int(abs(growth)))} an hour"
    yield _line(f"  memory     {held}{grows}")


def _gpu(gpu: GpuFigures) -> Text:
    """Return all users of the GPU together."""
    memory = f"memory {_size(gpu.memory_used)} of {_size(gpu.memory_total)}"
    return _line(f"GPU {gpu.index}  {gpu.name or 'unknown'}, {memory}, utilisation {_percent(gpu.utilisation)} %")


def _run_queue(device: DeviceFigures) -> str:
    """Return the device's run queue, for each priority that a burst has."""
    found = [
        f"{name}: {_plural(queue.bursts, 'burst')}, {queue.waiting} waiting, {_number(queue.waits_per_s)} waits/s"
        + (f", {_number(queue.joined_per_s)} joined/s" if queue.joined_per_s else "")
        for name, queue in device.run_queue.items()
        if queue.bursts
    ]
    return " · ".join(found) or "no bursts"


def _account(found: AccountFigures) -> Text:
    """Render what an account or an application holds, nearest to its limits first, and what it has spent."""
    whose = f"  uid {found.uid}" if found.application is None else f"    {found.application or 'no application'}"
    spent = [f"{_number(amount)} {figure.replace('_', ' ')}" for figure, amount in found.spent.items()]
    held = [
        f"{figure.replace('_', ' ')} {_amount(figure, held)}{'' if most >= NO_LIMIT else f'/{_amount(figure, most)}'}"
        for figure, (held, most) in found.holdings.items()
    ]
    where = " in the service" if found.process == "service" else ""
    return _line(f"{whose}{where}: {', '.join([*held, *spent]) or 'nothing'}")


def _amount(figure: str, value: int) -> str:
    return _size(value) if figure.endswith("bytes") else str(value)


def _stages(sample: Sample, device: DeviceFigures) -> Iterator[Text]:
    """Render times of each stage, as medians over the device's bursts; always two lines."""
    found = [burst.stages for burst in sample.bursts if burst.device == device.address and burst.stages]
    for n, name in enumerate(("p50 us", "p99 us")):
        each = [f"{stage} {_number(np.median([stages[stage][n] for stages in found]))}" for stage in STAGES if found]
        yield _line(f"  {name}  {'  '.join(each) or 'no results yet'}")


def _late(sample: Sample, device: DeviceFigures) -> Iterator[Text]:
    """Render why frames of the device's streams came late, if any did."""
    late = sum((Counter(burst.late) for burst in sample.bursts if burst.device == device.address), Counter[str]())
    if late:
        yield _line(f"  late       {told(late)}")


def _table(bursts: list[BurstFigures], width: int, is_of_many: bool) -> Text:
    """Return the table of bursts. Cuts words to fit, never figures. One Text, because a rich.Table takes 20 ms of CPU
    time.
    """
    cells = _cells(width, is_of_many)
    columns = {name: [name, *(cell(burst) for burst in bursts)] for name, cell in cells.items()}
    widths = {name: max(map(cell_len, column)) for name, column in columns.items()}
    for absent in _MAKE_ROOM:
        if _spare(widths, width) >= sum(min(_ENOUGH, widths[name]) for name in widths if name in _NAMES):
            break
        for name in widths.keys() & set(absent):
            del columns[name], widths[name]
    spare, names = _spare(widths, width), sorted(widths.keys() & _NAMES, key=widths.__getitem__)
    for left, name in zip(range(len(names), 0, -1), names, strict=True):
        widths[name] = max(_LEAST, min(widths[name], spare // left))
        spare -= widths[name]
    if "application" in widths:
        widths["application"] = min(widths["application"], _LEAST + max(0, spare))
    padded = ([_fitted(cell, widths[name], name in _WORDS) for cell in column] for name, column in columns.items())
    head, *lines = (" ".join(line).rstrip() for line in zip(*padded, strict=True))
    return Text("\n", no_wrap=True, overflow="crop").join([Text(head, "bold"), *map(Text, lines)])


def _spare(widths: Mapping[str, int], width: int) -> int:
    """Return what figures and the least of an application leave of a line of that width for names."""
    figures = sum(its for name, its in widths.items() if name not in _WORDS)
    return width - len(widths) - figures - _LEAST * ("application" in widths)


def _fitted(cell: str, width: int, is_words: bool) -> str:
    """Pad a cell: words align left, figures right."""
    if cell_len(cell) > width:
        cell = set_cell_size(cell, width - 1) + "…"
    space = " " * (width - cell_len(cell))
    return cell + space if is_words else space + cell


def _cells(width: int, is_of_many: bool) -> dict[str, Callable[[BurstFigures], str]]:
    """Return the columns that fit."""
    cells: dict[str, Callable[[BurstFigures], str]] = {
        "number": lambda burst: str(burst.number),
        "pid": lambda burst: str(burst.pid),
        "program": lambda burst: burst.program or _NONE,
        "device": lambda burst: burst.device,
        "model": lambda burst: burst.model or _NONE,
        "application": lambda burst: burst.application.rpartition("/")[2] or _NONE,
        "priority": lambda burst: burst.priority or _NONE,
        "rate/s": lambda burst: _number(burst.rate),
        "p50 us": lambda burst: _number(burst.latency and burst.latency.p50),
        "p99 us": lambda burst: _number(burst.latency and burst.latency.p99),
        **{stage: partial(_stage, stage) for stage in STAGES},
        "queued": lambda burst: str(burst.queued),
        "flight": lambda burst: f"{burst.in_flight}/{burst.depth}",
        "lost": lambda burst: f"{burst.drops}/{burst.timeouts}",
        "path": lambda burst: burst.path or _NONE,
        "cpu %": lambda burst: f"{_percent(burst.client_cpu)}/{_percent(burst.device_cpu)}",
    }
    absent = {*(STAGES if width < _WIDEST else ()), *(() if width >= _WIDE else ("application", "priority"))}
    absent |= set() if is_of_many else {"device"}
    return {name: cell for name, cell in cells.items() if name not in absent}


def _stage(name: str, burst: BurstFigures) -> str:
    found: Spread | None = burst.stages.get(name)
    return f"{_number(found.p50)}/{_number(found.p99)}" if found else _NONE


def _number(value: float | None) -> str:
    """Format a number in at most six characters."""
    if not value:
        return _NONE if value is None else "0"
    for most, unit, divisor in ((99.95, "", 1), (99_999.5, "", 1), (9_999_500, "k", 1e3), (float("inf"), "M", 1e6)):
        if abs(value) < most:
            return f"{value / divisor:.{1 if most < 100 else 0}f}{unit}"
    return _NONE


def _plural(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"


def _percent(share: float | None) -> str:
    return _NONE if share is None else f"{100 * share:.0f}"


def _size(nbytes: int | None) -> str:
    return _NONE if nbytes is None else f"{nbytes / 1e6:.0f} MB"


@click.command(
    epilog=examples("burst top", "burst top litert --sort p99", "burst top --json --count 1 /run/burst/litert.sock")
)
@click.argument("devices", metavar="[DEVICE]…", nargs=-1)
@click.option("--every", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Seconds per sample.")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="Exit after N samples.")
@click.option(
    "--sort", type=click.Choice(list(COLUMNS)), default="rate", show_default=True, help="Sort bursts by this column."
)
@click.option("--accounts", is_flag=True, help="Show what accounts and applications hold of each device, too.")
@click.option("--json", "as_json", is_flag=True, help="Print each sample as one line of JSON.")
def top(devices: tuple[str, ...], every: float, count: int | None, sort: str, accounts: bool, as_json: bool) -> None:
    """Show the bursts of running devices, live.

    DEVICE is a device's name, or the socket path of a served device; the default is all running devices of this
    account. Never starts a device or keeps one alive, and gives way to all other programs. Figures cover the time
    between two samples. Ctrl-C ends it.
    """
    give_way()
    try:
        samples = _samples(Watcher(devices, accounts), every, count)
        if as_json:
            for sample in samples:
                echo(json.dumps(_plain(sample)))
        else:
            _show(samples, sort, TerminalConsole())
    except DriverError as error:
        raise click.UsageError(str(error)) from error
    except KeyboardInterrupt:
        sys.exit(0)


def _samples(watcher: Watcher, every: float, count: int | None) -> Iterator[Sample]:
    for _ in range(count) if count else forever():
        yield watcher.sample_after(every)


def _plain(sample: Sample) -> dict[str, Any]:
    """Return the sample as JSON prints it: spreads and run queues become objects."""
    found = asdict(sample)
    for burst, plain in zip(sample.bursts, found["bursts"], strict=True):
        plain["latency"] = burst.latency and burst.latency._asdict()
        plain["stages"] = {name: spread._asdict() for name, spread in burst.stages.items()}
    for device, plain in zip(sample.devices, found["devices"], strict=True):
        plain["run_queue"] = {name: queue._asdict() for name, queue in device.run_queue.items()}
        for account, its in zip(device.accounts, plain["accounts"], strict=True):
            its["holdings"] = {figure: holding._asdict() for figure, holding in account.holdings.items()}
    return found


def _show(samples: Iterator[Sample], sort: str, console: Console) -> None:
    is_live = console.is_terminal
    with Live(console=console, screen=True, auto_refresh=False) if is_live else nullcontext() as live:
        last = None
        for sample in samples:
            last = Group(*view(sample, sort, console.width, console.height if is_live else None))
            if live:
                live.update(last, refresh=True)
            else:
                console.print(last)
    if live and last:
        console.print(last)  # remains after the terminal's previous screen is restored
