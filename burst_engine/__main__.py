"""The `burst` command, also as `python -m burst_engine`: looks at the three names before it imports by them."""

from __future__ import annotations

import sys

from burst_engine.names import BEGINNINGS, expect


def main() -> None:
    """Run the command `burst`; exit with 2 if something else is imported in place of one of our packages."""
    try:
        expect(*BEGINNINGS)
    except ImportError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
    from driver.cli import main as command

    command()


if __name__ == "__main__":
    main()
