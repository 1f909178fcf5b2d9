"""`burst top`: live figures of devices and bursts, read from memory that they write anyway."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict
from itertools import count as forever
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console, Group
from rich.live import Live

from burst.turns import give_way
from driver.cli.output import examples
from driver.cli.top_view import COLUMNS, view
from driver.errors import DriverError
from driver.watching import Sample, Watcher

if TYPE_CHECKING:
    from collections.abc import Iterator


@click.command(
    epilog=examples("burst top", "burst top litert --sort p99", "burst top --json --count 1 /run/burst/litert.sock")
)
@click.argument("devices", metavar="[DEVICE]…", nargs=-1)
@click.option("--every", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Seconds per sample.")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="Exit after N samples.")
@click.option(
    "--sort", type=click.Choice(list(COLUMNS)), default="rate", show_default=True, help="Sort bursts by this column."
)
@click.option("--json", "as_json", is_flag=True, help="Print each sample as one line of JSON.")
def top(devices: tuple[str, ...], every: float, count: int | None, sort: str, as_json: bool) -> None:
    """Show the bursts of running devices, live.

    DEVICE is a device's name, or the socket path of a served device; the default is all running devices of this
    account. Never starts a device or keeps one alive, and gives way to all other programs. Figures cover the time
    between two samples. Ctrl-C ends it.
    """
    give_way()
    try:
        samples = _samples(Watcher(devices), every, count)
        if as_json:
            for sample in samples:
                click.echo(json.dumps(_plain(sample)))
        else:
            _show(samples, sort, Console())
    except DriverError as error:
        raise click.UsageError(str(error)) from error
    except KeyboardInterrupt:
        sys.exit(0)


def _samples(watcher: Watcher, every: float, count: int | None) -> Iterator[Sample]:
    for _ in range(count) if count else forever():
        yield watcher.sample_after(every)


def _plain(sample: Sample) -> dict[str, Any]:
    """The sample as JSON prints it: spreads and run queues become objects."""
    found = asdict(sample)
    for burst, plain in zip(sample.bursts, found["bursts"], strict=True):
        plain["latency"] = burst.latency and burst.latency._asdict()
        plain["stages"] = {name: spread._asdict() for name, spread in burst.stages.items()}
    for device, plain in zip(sample.devices, found["devices"], strict=True):
        plain["run_queue"] = {name: queue._asdict() for name, queue in device.run_queue.items()}
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
