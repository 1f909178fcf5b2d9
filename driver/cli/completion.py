"""`burst completion`: what a shell has to know to complete the command."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

_SHELLS = "bash", "zsh", "fish"
_VARIABLE = "_BURST_COMPLETE"


@click.command()
@click.argument("shell", required=False, type=click.Choice(_SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str | None) -> None:
    """Prints what makes a shell complete this command.

    For good: `burst completion bash >> ~/.bashrc`, the same with ~/.zshrc for zsh, and for fish
    `burst completion fish > ~/.config/fish/completions/burst.fish`. Sub-commands, options, files, devices and
    names of tests are completed.
    """
    shell = shell or Path(os.environ.get("SHELL", "")).name
    kind = get_completion_class(shell) if shell in _SHELLS else None
    if kind is None:
        raise click.UsageError(f"$SHELL is {shell!r}: say which, one of {', '.join(_SHELLS)}", context)
    click.echo(kind(context.find_root().command, {}, "burst", _VARIABLE).source())
