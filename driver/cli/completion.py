"""`burst completion`: prints the shell code that completes the command."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from driver.cli.epilog import examples

_SHELLS = "bash", "zsh", "fish"
_VARIABLE = "_BURST_COMPLETE"


@click.command(
    epilog=examples(
        "burst completion bash >> ~/.bashrc",
        "burst completion zsh >> ~/.zshrc",
        "burst completion fish > ~/.config/fish/completions/burst.fish",
    )
)
@click.argument("shell", required=False, type=click.Choice(_SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str | None) -> None:
    """Print the shell code that completes this command.

    Completes sub-commands, options, files, devices and test names. Without an argument, the shell is taken from $SHELL.
    """
    shell = shell or Path(os.environ.get("SHELL", "")).name
    kind = get_completion_class(shell) if shell in _SHELLS else None
    if kind is None:
        raise click.UsageError(f"unsupported $SHELL {shell!r}: pass one of {', '.join(_SHELLS)}", context)
    click.echo(kind(context.find_root().command, {}, "burst", _VARIABLE).source())
