"""Who lets others run while it polls (csrc/fmq/sleep.c)."""

import re

import pytest

pytestmark = pytest.mark.integration


def test_only_one_of_many_readers_yields(build):
    """Readers of a broadcast queue are more than there are processors; a lone peer polls on without a system call."""
    sources = [f"fmq/{name}.c" for name in ("queue", "sleep", "ring", "readers", "event", "futex")]
    out = build("yields.c", *sources, flags=["-Dsched_yield=counted_yield"])()
    counts = {name: int(count) for name, count in re.findall(r"^(.*): (\d+)$", out, re.MULTILINE)}
    assert counts["one reader"] == 0
    assert counts["one of many"] > 0
