"""The sleep protocol under every interleaving of two sides, deterministically: tests/csrc/schedules.c."""

import re

import pytest

pytestmark = pytest.mark.integration

WAIT = """futex_wait_either(e->shared.my_wait, saw.announced, e->shared.their_life, saw.life,
                                &e->signals.ended, saw.ended, slice < until ? slice : until)"""
STOP_WAKES = "if (e->shared.my_wait) futex_wake(e->shared.my_wait, INT_MAX, FUTEX_BITSET_MATCH_ANY);"
ANNOUNCE = "saw->announced = sleep_announce(e->shared.my_wait);"
LOOK = "    int r = ring_need(e, n);\n"
# Each is a line of sleep.c or ring.c broken on purpose; the explorer has to notice, or it proves nothing.
MUTANTS = {
    "looks before it announces": (
        "fmq/sleep.c",
        f"    {ANNOUNCE}\n{LOOK}",
        f"{LOOK}    {ANNOUNCE}\n",
    ),
    "wakes before it publishes": (
        "fmq/ring.c",
        "atomic_store_explicit(&e->shared.mine->counter, e->cursor.position",
        "wake_early(e",
    ),
    "sleeps on its own word only": (
        "fmq/sleep.c",
        WAIT,
        "futex_wait(e->shared.my_wait, saw.announced, ~0u, until)",
    ),
    "looks at life after data": (
        "fmq/sleep.c",
        "if (r == -EAGAIN) r = sleep_ended(e, saw->life, saw->ended);",
        "if (r == -EAGAIN) r = sleep_ended(e, saw->life = atomic_load(e->shared.their_life), saw->ended);",
    ),
    "stop does not wait for the call inside": (
        "fmq/sleep.c",
        "} while (atomic_load(&e->signals.busy));",
        "} while (0);",
    ),
    "stop does not wake": (
        "fmq/sleep.c",
        f"    tell_own_threads(e, END_STOPPED);\n    do {{\n        {STOP_WAKES}",
        "    atomic_fetch_or(&e->signals.ended, END_STOPPED);\n    do {",
    ),
    "a dead peer is told before its last words": (
        "fmq/sleep.c",
        f"{LOOK}    if (r == -EAGAIN) r = sleep_ended(e, saw->life, saw->ended);",
        "    int r = sleep_ended(e, saw->life, saw->ended);\n    if (r == -EAGAIN) r = ring_need(e, n);",
    ),
    "one word, and no look at what is told by it": (
        "fmq/sleep.c",
        "    return is_same ? futex_wait(",
        "    return is_same || true ? futex_wait(",
    ),
    "one word, which who tells leaves as it was": (
        "fmq/sleep.c",
        "        atomic_fetch_add(e->shared.my_wait, 2); /* pairs: TOLD */\n",
        "",
    ),
    "one word, and who tells wakes no thread": (
        "fmq/sleep.c",
        "/* pairs: TOLD */\n        futex_wake(e->shared.my_wait, INT_MAX, FUTEX_BITSET_MATCH_ANY);\n",
        "/* pairs: TOLD */\n",
    ),
    "a loss wakes no thread": ("fmq/sleep.c", "    futex_wake_private(&e->signals.ended);\n", ""),
    "a loss is not noted": (
        "fmq/sleep.c",
        "tell_own_threads(e, END_LOST)",
        "tell_own_threads(e, 0)",
    ),
    "a loss is told before last words": (
        "fmq/sleep.c",
        f"    {ANNOUNCE}\n{LOOK}",
        f"    {ANNOUNCE}\n    int r = end_is_lost(e, saw->life, saw->ended) ? -EPIPE : ring_need(e, n);\n",
    ),
}
WAKE_EARLY = """
#define wake_early(e, order) \\
    do { uint64_t now = (e)->cursor.position; \\
         if (atomic_load((e)->shared.their_wait) & 1) atomic_fetch_add((e)->shared.their_wait, 1); \\
         atomic_store(&(e)->shared.mine->counter, now); } while (0)
"""


def explorer(build, sources=None):
    return build(
        "schedules.c",
        "fmq/queue.c",
        "fmq/sleep.c",
        "fmq/ring.c",
        "fmq/readers.c",
        "fmq/event.c",
        flags=["-include", "scheduled.h"],
        sources=sources or {},
    )


def test_no_schedule_loses_a_wake_up(build):
    """Reads, writes, commits and exchanges end under every schedule with at most two preemptions, also when the peer is
    killed at any point, stops, releases, or the kernel is old; every result is one that the scenario lists."""
    out = explorer(build)("2")
    counts = [int(n) for n in re.findall(r": (\d+) schedules", out)]
    assert len(counts) == 28
    assert sum(counts) > 15_000


@pytest.mark.stress
def test_no_schedule_loses_a_wake_up_with_four_preemptions(build, tally):
    """The same with every schedule of up to four preemptions: bounded, about six million."""
    print(out := explorer(build)("4", timeout=3000))
    tally("schedules", sum(int(n) for n in re.findall(r": (\d+) schedules", out)))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_explorer_finds_what_is_broken_on_purpose(build, csrc, mutant):
    """A protocol with one step removed or swapped is caught, so that silence above means something."""
    file, old, new = MUTANTS[mutant]
    text = (csrc / file).read_text()
    assert text.count(old) == 1, f"the mutant {mutant!r} no longer applies to {file}"
    changed = text.replace(old, new).replace('#include "fmq/ring.h"', '#include "fmq/ring.h"' + WAKE_EARLY)
    out = explorer(build, {file: changed})("2", fails=True)
    assert re.search("sleeps for ever|may not be|does not end", out)
