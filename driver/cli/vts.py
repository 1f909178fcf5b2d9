"""`burst vts`: runs the conformance tests on a device."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from burst import BurstError
from driver.cli.device_name import DeviceName
from driver.cli.epilog import examples
from driver.cli.output import TerminalConsole, echo, json_option, print_json, with_options
from driver.errors import DeviceFailed, DriverError
from driver.vts import (
    ALL,
    CATEGORIES,
    SMOKE,
    USUAL,
    BadCase,
    BadKnownFailures,
    KnownFailures,
    Report,
    Scope,
    Target,
    Test,
    cases_of,
    catalogue,
    run,
)
from driver.vts.report import KINDS
from driver.vts.sanitizers import Sanitizers, read_without_runtimes
from driver.vts.target import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

_FILE: Any = click.Path(path_type=Path)
_SCOPES = {"smoke": SMOKE, "usual": USUAL, "all": ALL}


def _names_of_tests(_context: Any, _option: Any, incomplete: str) -> list[str]:
    """Complete test names: first categories, then the tests of a category."""
    if "/" not in incomplete:
        return [f"{category}/" for category in CATEGORIES if category.startswith(incomplete)]
    return [test.name for test in catalogue((), USUAL) if test.name.startswith(incomplete)]


def _sanitize(_context: Any, _option: Any, is_wanted: bool) -> bool:
    if is_wanted:
        read_without_runtimes()
    return is_wanted


_options = with_options(
    click.option(
        "--filter",
        "glob",
        metavar="GLOB",
        default="*",
        help="Only tests whose names match, for example 'burst/*'.",
        shell_complete=_names_of_tests,
    ),
    click.option(
        "--cases",
        metavar="FILE",
        help="Additional cases: JSON lines (gzipped if FILE ends in .gz), or module:function, which yields "
        "driver.vts.Case, also of operations of your own.",
    ),
    click.option("--smoke", "scope", flag_value="smoke", help="Run only a few tests of each kind; takes seconds."),
    click.option(
        "--all", "scope", flag_value="all", help="Run every mutation of every model, and every case in a burst."
    ),
    click.option("--list", "listing", is_flag=True, help="List the tests, each with its family in AOSP, and exit."),
    json_option,
    click.option("--junit", type=_FILE, metavar="FILE", help="Also write the results as JUnit XML."),
    click.option("--known-failures", type=_FILE, metavar="FILE", help="TOML file of failures to count as skipped."),
    click.option(
        "--sanitize",
        is_flag=True,
        is_eager=True,  # before DEVICE is looked at
        callback=_sanitize,
        help="DEVICE is a library built with sanitizers; their reports are failures. Starts a device of its own.",
    ),
    click.option("--timeout", default=PATIENCE, show_default=True, help="Seconds after which a call counts as hung."),
)


@click.command(
    context_settings={"show_default": False},
    epilog=examples("burst vts litert --smoke", "burst vts mypackage:MyDevice --filter 'operations/*' --junit out.xml"),
)
@click.argument("device", type=DeviceName())
@_options
def vts(
    device: str,
    glob: str,
    cases: str | None,
    scope: str | None,
    listing: bool,
    as_json: bool,
    junit: Path | None,
    known_failures: Path | None,
    sanitize: bool,
    timeout: float,
) -> None:
    """Run the conformance tests on a device.

    DEVICE is the name of an installed device, "module:Class", or the path of a driver in C. Test names begin with
    their category: device, extension, model, request, operations, burst, memory, caching, qos. Exits with 0 if no test
    failed, else 1.
    """
    if timeout <= 0:
        raise click.UsageError(f"--timeout {timeout}: must be above 0")
    tests = _tests(glob, cases, _SCOPES[scope or "usual"])
    if listing:
        _list(tests, as_json=as_json)
        return
    report, stale = _run(device, tests, known_failures, timeout, sanitize=sanitize)
    if junit:
        _write(junit, report.as_junit())
    if as_json:
        print_json(report.as_json())
    else:
        _show(report, TerminalConsole())
    for entry in stale:
        echo(f"{known_failures}: {entry}", err=True)
    raise SystemExit(1 if report.summary["failed"] else 0)


def _list(tests: Sequence[Test], *, as_json: bool) -> None:
    """Print the names of tests, with a tab and their families; as JSON the names alone."""
    if as_json:
        print_json([test.name for test in tests])
    else:
        echo("\n".join(f"{test.name}\t{test.family or '-'}" for test in tests))


def _tests(glob: str, cases: str | None, scope: Scope) -> list[Test]:
    try:
        tests = list(catalogue(cases_of(cases) if cases else (), scope))
    except BadCase as error:
        raise click.UsageError(f"--cases {error}") from error
    found = [test for test in tests if fnmatchcase(test.name, glob)]
    if not found:
        begins = ", ".join(f"{category}/" for category in CATEGORIES)
        raise click.UsageError(f"--filter {glob!r} matches none of {len(tests)} tests; their names begin with {begins}")
    return found


def _run(
    device: str, tests: Sequence[Test], known_failures: Path | None, timeout: float, *, sanitize: bool
) -> tuple[Report, Sequence[str]]:
    with ExitStack() as stack:
        try:
            sanitizers = stack.enter_context(Sanitizers(device)) if sanitize else None
        except DeviceFailed as error:
            raise click.UsageError(str(error)) from error
        target, progress = stack.enter_context(Target(device, timeout, sanitizers)), stack.enter_context(_progress())
        try:
            version = target.device.version
        except (BurstError, DriverError) as error:
            raise click.ClickException(str(error)) from error
        try:
            known = KnownFailures.read(known_failures, device, version) if known_failures else KnownFailures()
        except BadKnownFailures as error:
            raise click.UsageError(f"--known-failures {error}") from error
        report = Report(device, version)
        task = progress.add_task("", total=len(tests))
        for outcome in map(known.judge, run(tests, target)):
            report.add(outcome)
            progress.update(task, advance=1, description=f"{report.failures} failed, {outcome.category}")
    return report, known.stale()


def _progress() -> Progress:
    """Return a progress bar on standard error, if that is a terminal."""
    console = TerminalConsole(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise click.UsageError(f"--junit {path}: cannot be written: {error}") from error


def _show(report: Report, console: Console) -> None:
    """Print each failure, the number of skipped tests by reason, and a summary by category."""
    for outcome in report.of_kind("failed"):
        console.print(Text.assemble(("failed ", "red"), outcome.name, ": ", outcome.message), soft_wrap=True)
    for reason, count in Counter(outcome.message for outcome in report.of_kind("skipped")).most_common():
        console.print(Text.assemble(("skipped ", "yellow"), f"{count}: {reason}"), soft_wrap=True)
    console.print(Text(f"{report.device}, version {report.version}"), soft_wrap=True)
    table = Table("", *KINDS, show_footer=True)
    for column in table.columns[1:]:
        column.justify = "right"
    for category, counts in report.categories.items():
        table.add_row(category, *(str(counts[kind]) for kind in KINDS))
    for column, total in zip(table.columns, ("all", *map(str, report.summary.values())), strict=True):
        column.footer = total
    console.print(table)
    idle = [name for name, counts in report.categories.items() if sum(counts.values()) == counts["skipped"] > 0]
    if idle:
        told = f"not tested: {', '.join(idle)}; most of these tests need ADD of two TENSOR_FLOAT32; --cases adds yours"
        console.print(Text(told, "yellow"), soft_wrap=True)
