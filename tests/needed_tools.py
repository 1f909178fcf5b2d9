"""What tests need and not every machine has: a package, a program, a file.

A machine without it skips these tests, with the remedy; in `make integration`, which sets BURST_INTEGRATION, they fail.
"""

import os
from typing import NoReturn

import pytest


def give_up(remedy: str) -> NoReturn:
    """Ends the test that needs it."""
    (pytest.fail if os.environ.get("BURST_INTEGRATION") else pytest.skip)(remedy)
