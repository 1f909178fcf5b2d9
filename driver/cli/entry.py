"""The entry point of the `burst` command. Reports which extra to install when a library is missing."""

from __future__ import annotations

import sys
from io import TextIOWrapper

from burst_engine.names import install_command

# Imported library -> the extra that installs it.
_EXTRAS = {
    "click": "cli",
    "psutil": "cli",
    "rich": "cli",
    "av": "demo",
    "matplotlib": "demo",
    "aiohttp": "web",
    "PIL": "cli",
}


def main() -> None:
    """Run the `burst` command. Exit with 0 for success, 1 for a failure, 2 for a usage error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="replace")  # a terminal or a log that has no dots and arrows gets question marks
    try:
        from driver.cli.command import burst

        burst(prog_name="burst")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        print(f"Error: {missing} is not installed: {install_command(_EXTRAS[missing])}", file=sys.stderr)
        sys.exit(2)
