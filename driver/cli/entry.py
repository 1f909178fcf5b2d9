"""Where the command begins: it needs libraries that the packages themselves do not."""

from __future__ import annotations

import sys

# Which of them brings what.
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
    """The `burst` command. Exits with 0 when all is well, 1 when something failed, 2 when it was called wrongly."""
    try:
        from driver.cli.command import burst

        burst(prog_name="burst")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        print(f"burst: {missing} is not installed: pip install 'burst-engine[{_EXTRAS[missing]}]'", file=sys.stderr)
        sys.exit(2)
