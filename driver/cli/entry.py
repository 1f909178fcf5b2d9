"""The entry point of the `burst` command. Reports which extra to install when a library is missing."""

from __future__ import annotations

import sys

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
    """The `burst` command. Exits with 0 for success, 1 for a failure, 2 for a usage error."""
    try:
        from driver.cli.command import burst

        burst(prog_name="burst")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        print(f"burst: {missing} is not installed: pip install 'burst-engine[{_EXTRAS[missing]}]'", file=sys.stderr)
        sys.exit(2)
