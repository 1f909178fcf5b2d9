"""Who lets others run while it polls (csrc/fmq/sleep.c)."""

import re

import pytest
from core_sources import ENDS

pytestmark = pytest.mark.integration


def test_only_one_of_many_readers_yields(build):
    """Readers of a broadcast queue are more than there are processors; a lone peer polls on without a system call."""
    out = build("yields.c", *ENDS, flags=["-Dsched_yield=counted_yield"])()
    counts = {name: int(count) for name, count in re.findall(r"^(.*): (\d+)$", out, re.MULTILINE)}
    assert counts["one reader"] == 0
    assert counts["one of many"] > 0
