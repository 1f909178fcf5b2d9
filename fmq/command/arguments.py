"""The arguments of `python -m fmq`, and how it fails: one line on stderr; status 1, or 2 for a wrong call."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from fmq.command import remove, send, show, tail
from fmq.errors import FmqError, InvalidDescriptor
from fmq.region import checked_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_SIGPIPE, _SIGINT = 128 + 13, 128 + 2  # as a shell tells them


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options = _parser().parse_args(words)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that nothing is flushed into it at exit
        return _SIGPIPE
    except KeyboardInterrupt:
        return _SIGINT
    except (FmqError, ImportError, OSError, ValueError) as error:
        print(f"fmq {options.command}: {_why(error, getattr(options, 'name', None))}", file=sys.stderr)
        return 1
    return status


def _why(error: Exception, name: object) -> str:
    """Return one line that names the queue, what is wrong with it, and what to do."""
    text = getattr(error, "strerror", None) or str(error)
    if not isinstance(name, str):
        return str(error)
    if name not in text:
        text = f"name={name!r}: {text}"
    if isinstance(error, FileNotFoundError):
        text += show.meant(name)
    if isinstance(error, InvalidDescriptor):
        text += f"; if it is yours and not needed: python -m fmq unlink --force {name}"
    return text


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog.removeprefix('python -m ')}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m fmq",
        description="Shows named queues in shared memory, and fills them. Reading disturbs neither side of a queue.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="list|info|tail|send|unlink")

    def command(
        name: str, run: Callable[[argparse.Namespace], int], text: str, more: str = ""
    ) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = commands.add_parser(name, help=text, description=f"{text} {more}")
        added.add_argument("--json", action="store_true", help="for programs: JSON, one object per line")
        added.set_defaults(run=run)
        return added

    command("list", show.show_all, "Lists your queues, with their elements and which roles are held.")
    one = command("info", show.show_one, "Shows everything about one queue, and what to do when it is stale.")
    one.add_argument("name", type=_name, metavar="NAME")
    _add_tail(
        command("tail", tail.run, "Shows the newest elements of a queue, then later ones. Takes none away.", _TAIL)
    )
    _add_send(command("send", send.run, "Writes elements to a queue, as its writer.", _SEND))
    gone = command("unlink", remove.run, "Removes queues, and says how many unread elements each had.", _UNLINK)
    gone.add_argument("name", type=_name, nargs="*", metavar="NAME")
    gone.add_argument("--stale", action="store_true", help="all queues that were in use and whose processes are gone")
    gone.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    gone.add_argument("--force", action="store_true", help="also a queue in use, and memory that is not a queue")
    return parser


_UNLINK = (
    "Programs that have one open keep it; the name is free. Unread elements of a queue that no program has open are "
    "lost: look before, with --dry-run, or read them with tail."
)

_TAIL = (
    "In a synchronized queue only unread elements are sure to be whole; elements that the reader takes between two "
    "looks count as missed. tail polls, so no writer has to wake it."
)


def _add_tail(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", type=_name, metavar="NAME")
    parser.add_argument(
        "-n", type=_number(int, 0, 2**63), default=10, metavar="N", help="newest elements first shown (10)"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="go on until Ctrl-C, or until the queue is gone")
    parser.add_argument(
        "--taken", action="store_true", help="also what its reader has taken, marked ~: it may be damaged"
    )
    parser.add_argument(
        "--interval", type=_number(float, 0.001, 3600), default=0.05, metavar="S", help="seconds between looks (0.05)"
    )


_SEND = (
    "Without VALUE it writes the lines of standard input. It waits while the queue is full. When it ends, a reader "
    "that wants more learns that the writer has left."
)


def _add_send(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", type=_name, metavar="NAME")
    parser.add_argument(
        "values", nargs="*", metavar="VALUE", help="an element as `tail --json` shows it; texts as they are"
    )
    parser.add_argument("--timeout", type=_number(float, 0, 2**31), metavar="S", help="seconds to wait for room")


def _name(text: str) -> str:
    if text and "/" not in text:
        raise argparse.ArgumentTypeError(f"{text!r}: a queue's name begins with '/'; did you mean '/{text}'?")
    try:
        return checked_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _number(kind: type[int | float], least: float, most: float) -> Callable[[str], float]:
    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(-1)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: a number from {least} to {most}")
        return value

    return convert
