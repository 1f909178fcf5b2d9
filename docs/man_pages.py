"""Writes the manual pages of the `burst` command, one for each sub-command, into a folder: `make man`.

They are made of what `--help` prints, so that there is one text.
"""

from __future__ import annotations

import sys
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING

import click

from driver.cli.command import burst
from fmq.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator


def roff(text: str) -> str:
    """Return text as roff has it: no character of it is an instruction."""
    plain = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    plain = "".join(each if each.isascii() else f"\\[u{ord(each):04X}]" for each in plain)
    return "\n".join(f"\\&{line}" if line.startswith(".") else line for line in plain.splitlines())


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a command's help; those after \\b keep their lines."""
    for part in cleandoc(text).split("\n\n"):
        lines = [line.rstrip() for line in part.strip("\n").splitlines()]
        if lines[:1] == ["\b"]:
            yield ".nf\n" + roff("\n".join(lines[1:])) + "\n.fi"
        else:
            yield roff(" ".join(line.strip() for line in lines))


def page(command: click.Command, context: click.Context) -> str:
    """Return the manual page of a command."""
    name = context.command_path.replace(" ", "-")
    usage = " ".join(command.collect_usage_pieces(context))
    summary = command.get_short_help_str(limit=200).rstrip(".")
    found = [
        f'.TH "{roff(name.upper())}" 1 "" "burst-engine {__version__}" "Burst"',
        f".SH NAME\n{roff(name)} \\- {roff(summary)}",
        f".SH SYNOPSIS\n.B {roff(context.command_path)}\n{roff(usage)}",
        ".SH DESCRIPTION\n" + "\n.PP\n".join(paragraphs(command.help or summary)),
    ]
    given = [param for param in command.get_params(context) if isinstance(param, click.Option)]
    if options := [record for param in given if (record := param.get_help_record(context))]:
        found.append(".SH OPTIONS\n" + "\n".join(f".TP\n.B {roff(flags)}\n{roff(words)}" for flags, words in options))
    if isinstance(command, click.Group):
        inner = ((each, command.get_command(context, each)) for each in command.list_commands(context))
        rows = (
            f".TP\n.BR {roff(f'{name}-{each}')} (1)\n{roff(it.get_short_help_str(200))}" for each, it in inner if it
        )
        found.append(".SH COMMANDS\n" + "\n".join(rows))
    if command.epilog:
        found.append(".SH MORE\n" + "\n.PP\n".join(paragraphs(command.epilog)))
    return "\n".join(found) + "\n"


def pages(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of the pages of a command, and of those below it."""
    context = click.Context(command, parent, info_name=name, **command.context_settings)
    yield context.command_path.replace(" ", "-"), page(command, context)
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            if found := command.get_command(context, each):
                yield from pages(found, each, context)


def main() -> None:
    """Write the pages into a folder."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages(burst, "burst"):
        (folder / f"{name}.1").write_text(text)


if __name__ == "__main__":
    main()
