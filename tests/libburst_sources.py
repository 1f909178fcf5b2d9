"""The C sources of libburst, as its Makefile lists them."""

import re
from pathlib import Path

CSRC = Path(__file__).parents[1] / "csrc"


def libburst_sources():
    """Paths: the queue, what libburst shares with Python's client, and libburst's own."""
    shared = re.search(r"\.\./burst/, (.*?)\)", (CSRC / "libburst/Makefile").read_text())[1].split()
    own = [*sorted(CSRC.glob("fmq/*.c")), *sorted(CSRC.glob("libburst/*.c"))]
    return [*own, *(CSRC / "burst" / name for name in shared)]
