"""Kills of a device's processes."""

import os
import signal
from contextlib import suppress

SIDES = {"engine": ["engine_pid"], "service": ["service_pid"], "both": ["service_pid", "engine_pid"]}


def kill(device, side="engine"):
    """Kills these processes of a device."""
    for name in SIDES[side]:
        with suppress(ProcessLookupError):  # the other one may have followed already
            os.kill(getattr(device, name), signal.SIGKILL)
