"""`burst trace`: traces the requests of running bursts, stage by stage, into a file for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from driver.cli.epilog import examples
from driver.cli.output import echo
from driver.errors import DriverError
from driver.monitor import Followed, Watcher, follow, write
from driver.monitor.lateness import counted, told

if TYPE_CHECKING:
    from collections.abc import Sequence


_SECONDS = click.FloatRange(min=0, min_open=True)
_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.command(
    epilog=examples("burst trace -o trace.json.gz", "burst trace litert --burst 3 --seconds 5 -o trace.json")
)
@click.argument("device", required=False)
@click.option("--burst", "number", type=int, metavar="N", help="Only burst number N of `burst top`.")
@click.option("--pid", type=int, help="Only bursts of this client process.")
@click.option("--seconds", type=_SECONDS, default=1.0, show_default=True, help="How long to trace.")
@click.option("-o", "path", type=_FILE, metavar="FILE", required=True, help="File to write.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def trace(device: str | None, number: int | None, pid: int | None, seconds: float, path: Path, as_json: bool) -> None:
    """Trace running bursts into a file for Perfetto.

    DEVICE is a device's name, or the socket path of a served device; the default is all running devices of this
    account. Open FILE in https://ui.perfetto.dev; a name that ends in .gz is compressed. Ctrl-C stops early and still
    writes the file. Exits with 1 if no such burst is running.
    """
    try:
        watcher = Watcher([device] if device else [])
        followed = follow(watcher, seconds, lambda burst: number in {None, burst.number} and pid in {None, burst.pid})
    except DriverError as error:
        raise click.UsageError(str(error)) from error
    if not followed:
        raise click.ClickException(_nothing(watcher, number, pid))
    try:
        write(path, followed)
    except OSError as error:
        raise click.ClickException(f"-o {path}: {error}") from error
    echo(json.dumps({"file": str(path), "bursts": _plain(followed)}) if as_json else _told(path, followed))


def _nothing(watcher: Watcher, number: int | None, pid: int | None) -> str:
    wanted = f"burst {number}" if number is not None else "burst" if pid is None else f"burst of process {pid}"
    where = ", ".join(device.address for device in watcher.devices)
    why = " ".join(watcher.absent.values())
    return f"no {wanted} is running {f'on {where}' if where else 'here'}; see `burst top`. {why}".rstrip()


def _plain(followed: Sequence[Followed]) -> list[dict[str, Any]]:
    return [
        {
            "device": one.burst.device,
            "number": one.burst.number,
            "pid": one.burst.pid,
            "program": one.burst.program,
            "requests": len(one.records),
            "missed": one.missed,
            "late": counted(one.late),
        }
        for one in followed
    ]


def _told(path: Path, followed: Sequence[Followed]) -> str:
    requests, missed = sum(len(one.records) for one in followed), sum(one.missed for one in followed)
    bursts = f"{len(followed)} burst{'s' * (len(followed) != 1)}"
    late = [frame for one in followed for frame in one.late]
    why = f"\n{len(late)} frames late: {told(counted(late))}" if late else ""
    return f"{path}: {requests} requests of {bursts}, {missed} missed; open the file in https://ui.perfetto.dev{why}"
