"""The folder by which tests tell a device what to do, BURST_RUNTIME_DIR: a sandbox leaves it to no device by itself."""

import os

from driver.interface import Needs


def needs(*system_calls: str, write: tuple[str, ...] = ()) -> Needs:
    """Of a device that reads and writes files there. In a process without that variable, no device runs."""
    folder = os.environ.get("BURST_RUNTIME_DIR")
    return Needs((), (*write, *((folder,) if folder else ())), system_calls)
