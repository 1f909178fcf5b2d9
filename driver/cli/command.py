"""The `burst` command. Each sub-command is imported only when it is called."""

from __future__ import annotations

import sys
from importlib import import_module
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Entry(NamedTuple):
    """Where a sub-command is defined, and the first sentence of its docstring."""

    attribute: str  #: module:name
    summary: str


COMMANDS = {
    "bench": _Entry("driver.cli.bench:bench", "Measure what a burst costs here, beside the alternatives."),
    "cache": _Entry("driver.cli.cache:cache", "List, verify and remove compilations kept on disk."),
    "check": _Entry("driver.cli.check:check", "Find every obstacle of a model file, in every form."),
    "completion": _Entry("driver.cli.completion:completion", "Print the shell code that completes this command."),
    "demo": _Entry("driver.cli.demo:demo", "Run a demo: camera frames or sound through a burst."),
    "devices": _Entry("driver.cli.devices:devices", "List devices: type, version, capabilities, speed."),
    "doctor": _Entry("driver.cli.doctor:doctor", "Check this machine, or what of a program runs where."),
    "exec": _Entry("driver.cli.exec:execute", "Run a program with its models in a device."),
    "record": _Entry("driver.cli.recording:record", "Run a program and record its requests to devices."),
    "renew": _Entry("driver.cli.renew:renew", "Have another engine take over from the engine of a running device."),
    "replay": _Entry("driver.cli.recording:replay", "Repeat recorded requests and compare their latency."),
    "run": _Entry("driver.cli.run:run", "Run a model file and report placement, outputs and times."),
    "serve": _Entry("driver.cli.serve:serve", "Serve a device to other programs and accounts."),
    "top": _Entry("driver.cli.top:top", "Show the bursts of running devices, live."),
    "trace": _Entry("driver.cli.trace:trace", "Trace running bursts into a file for Perfetto."),
    "vts": _Entry("driver.cli.vts:vts", "Run the conformance tests on a device."),
}


class _LazyGroup(click.Group):
    """A group that finds its sub-commands in `COMMANDS`."""

    def list_commands(self, _context: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, _context: click.Context, name: str) -> click.Command | None:
        """Import the sub-command's module."""
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name].attribute.partition(":")
        found: click.Command = getattr(import_module(module), attribute)
        return found

    def resolve_command(self, context: click.Context, args: list[str]) -> Any:
        """Return a command; an unknown name is an error that suggests the nearest one."""
        from driver.nn.errors import did_you_mean

        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            known = f"choose from {', '.join(sorted(COMMANDS))}"
            raise click.UsageError(f"no such command: {name!r}; {known}{did_you_mean(name, COMMANDS)}", context)
        return super().resolve_command(context, args)

    def format_commands(self, _context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of sub-commands into the help text; import none of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].summary) for name in sorted(COMMANDS)])

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the names of sub-commands; import none of them."""
        found = [CompletionItem(n, help=p.summary) for n, p in sorted(COMMANDS.items()) if n.startswith(incomplete)]
        return [*found, *click.Command.shell_complete(self, context, incomplete)]

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **more: Any,
    ) -> Any:
        """Run the command. Below --json an error is also an object on standard output: its text, and the status."""
        words = sys.argv[1:] if args is None else list(args)
        if not standalone_mode or "--json" not in takewhile(lambda word: word != "--", words):
            return super().main(words, prog_name, complete_var, standalone_mode=standalone_mode, **more)
        try:
            status = super().main(words, prog_name, complete_var, standalone_mode=False, **more)
        except click.ClickException as error:
            from driver.cli.output import print_json

            error.show()
            print_json({"error": error.format_message(), "status": error.exit_code})
            sys.exit(error.exit_code)
        except click.Abort:
            sys.exit("Aborted!")
        sys.exit(status if isinstance(status, int) else 0)

    def invoke(self, context: click.Context) -> Any:
        """Call a sub-command. An expected error becomes one line on stderr."""
        try:
            return super().invoke(context)
        except (click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            told = as_click_exception(error)
            if told is None:
                raise
            from fmq.printable import LAYOUT, printable

            told.message = printable(told.message, LAYOUT)  # type: ignore[misc]  # it may quote a model file
            if told is error:
                raise
            raise told from error


def as_click_exception(error: Exception) -> click.ClickException | None:
    """Return the error as one line; None for one that is not expected."""
    if isinstance(error, click.ClickException):
        return error
    from burst import BurstError, InternalError, PeerDied
    from driver.client.discovery import runtime_dir
    from driver.errors import DeviceNotFound, DriverError, ImportFailed, InvalidModel

    if isinstance(error, DeviceNotFound | ImportFailed | InvalidModel):
        return click.UsageError(str(error))
    if isinstance(error, PeerDied):
        return click.ClickException(f"{error}; device logs are in {runtime_dir()}")
    if isinstance(error, BurstError | DriverError) and not isinstance(error, InternalError):
        return click.ClickException(str(error))
    return None


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 for success, 1 for a failure, 2 for a usage error.",
)
@click.version_option(package_name="burst-engine", prog_name="burst")
def burst() -> None:
    """Run neural networks in another process, through shared memory.

    \b
    Begin with:
      burst doctor                              check this machine
      burst run net.tflite --input photo.jpg    run your own model
      burst demo camera                         see a burst at work (extra demo)
    """
