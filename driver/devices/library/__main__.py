"""`python -m driver.devices.library --include | --cmake`: where the files are that a driver in C is built with."""

from __future__ import annotations

import argparse
from pathlib import Path

_FOLDER = Path(__file__).parent


def main() -> None:
    """Print the folder that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m driver.devices.library", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--include", action="store_true", help="the folder of burst_device.h and burst_device.c")
    which.add_argument("--cmake", action="store_true", help="BurstDevice_DIR, for find_package(BurstDevice)")
    parser.parse_args()
    print(_FOLDER)


if __name__ == "__main__":
    main()
