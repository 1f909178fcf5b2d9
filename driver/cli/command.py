"""The `burst` command and its sub-commands, each of which is imported when it is called, and not before."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from burst import BurstError, InternalError, PeerDied
from driver.client.discovery import runtime_dir
from driver.errors import DeviceNotFound, DriverError, ImportFailed, InvalidModel
from driver.nn.errors import did_you_mean

_CALLED_WRONGLY = DeviceNotFound, ImportFailed, InvalidModel


class _Place(NamedTuple):
    """Where a sub-command is, and the first sentence of its docstring."""

    attribute: str  #: module:name
    summary: str


COMMANDS = {
    "bench": _Place("driver.cli.bench:bench", "Measures bursts on this machine, beside the other ways."),
    "cache": _Place("driver.cli.cache:cache", "Compilations that are kept on disk."),
    "completion": _Place("driver.cli.completion:completion", "Prints what makes a shell complete this command."),
    "demo": _Place("driver.cli.demo:demo", "Shows what a burst does, on frames or sound."),
    "devices": _Place("driver.cli.devices:devices", "Lists the devices: what they are, what they can, how fast."),
    "doctor": _Place("driver.cli.doctor:doctor", "Looks at everything that bursts depend on."),
    "record": _Place("driver.cli.record:record", "Runs COMMAND, and records its requests to devices."),
    "replay": _Place("driver.cli.replay:replay", "Plays a recording, and says how long requests took then and now."),
    "run": _Place("driver.cli.run:run", "Runs a model file, and says what it does, where, and how fast."),
    "serve": _Place("driver.cli.serve:serve", "Runs a device under this account, for others to use."),
    "top": _Place("driver.cli.top:top", "Shows the bursts of each DEVICE that runs, until Ctrl-C."),
    "trace": _Place("driver.cli.trace:trace", "Follows bursts, and writes what they did for Perfetto."),
    "vts": _Place("driver.cli.vts:vts", "Tests whether a device does what a device has to do."),
}


class _Commands(click.Group):
    """A group that knows its sub-commands by `COMMANDS`."""

    def list_commands(self, _context: click.Context) -> list[str]:
        """Their names."""
        return sorted(COMMANDS)

    def get_command(self, _context: click.Context, name: str) -> click.Command | None:
        """One of them; its module is imported."""
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name].attribute.partition(":")
        found: click.Command = getattr(import_module(module), attribute)
        return found

    def resolve_command(self, context: click.Context, args: list[str]) -> Any:
        """What is to be called. A name that nobody has is answered with the nearest one."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            known = f"there are {', '.join(sorted(COMMANDS))}"
            raise click.UsageError(f"no such command: {name!r}; {known}{did_you_mean(name, COMMANDS)}", context)
        return super().resolve_command(context, args)

    def format_commands(self, _context: click.Context, formatter: click.HelpFormatter) -> None:
        """For the help text, without importing one."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].summary) for name in sorted(COMMANDS)])

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        """For the shell, without importing one."""
        found = [CompletionItem(n, help=p.summary) for n, p in sorted(COMMANDS.items()) if n.startswith(incomplete)]
        return [*found, *click.Command.shell_complete(self, context, incomplete)]

    def invoke(self, context: click.Context) -> Any:
        """Calls one of them: what may be expected to go wrong is a line on stderr."""
        try:
            return super().invoke(context)
        except InternalError:
            raise
        except _CALLED_WRONGLY as error:
            raise click.UsageError(str(error)) from error
        except PeerDied as error:
            raise click.ClickException(f"{error}; the logs of devices are in {runtime_dir()}") from error
        except (BurstError, DriverError) as error:
            raise click.ClickException(str(error)) from error


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Ends with 0 when all is well, 1 when something failed, 2 when it was called wrongly.",
)
@click.version_option(package_name="burst-engine", prog_name="burst")
def burst() -> None:
    """Runs neural networks in other processes."""
