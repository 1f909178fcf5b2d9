"""LiteRT's lines of INFO, such as that of its first delegate, stay off standard error: it has no level for them."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def without_info_lines() -> Iterator[None]:
    """Keep back what is written to standard error meanwhile, and write it in the end, without those lines."""
    with ExitStack() as stack:
        try:
            told = stack.enter_context(open(os.memfd_create("litert"), "w+b"))
            kept = os.dup(2)
        except OSError:  # there is no standard error, or no descriptor is left
            yield
            return
        if sys.stderr:
            sys.stderr.flush()
        os.dup2(told.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            told.seek(0)
            os.write(2, b"".join(line for line in told if not line.startswith(b"INFO: ")))
