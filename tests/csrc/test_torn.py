"""Readers that the writer overtakes, under real threads: torn.c."""

import random
import re
from collections import Counter

import pytest
import stress
from core_sources import CORE

pytestmark = pytest.mark.integration

THREAD = ("-fsanitize=thread", "-Wno-tsan")  # it cannot see fences; what they order is all atomic
ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover")
WAKES_ALONE = "-DSLEEP_SHARED_SLICE=UINT64_C(1000000000000)"  # nobody looks again by himself
JITTER = ("-include", "scheduled.h", WAKES_ALONE)  # threads pause before accesses, at random
ENOUGH = 10**8

BEGIN = "    atomic_store_explicit(&e->shared.mine->begin, e->cursor.begun, memory_order_relaxed);\n"
PUBLISH = "    atomic_store_explicit(&e->shared.mine->counter, e->cursor.position, memory_order_seq_cst);\n"
LOOK = "uint64_t begin = atomic_load_explicit(&e->shared.theirs->begin, memory_order_relaxed);"
MUTANTS = {
    "looks at head only, as AOSP does": ("fmq/ring.c", LOOK, LOOK.replace("->begin,", "->counter,")),
    "says where it begins after the copy": (
        "fmq/ring.c",
        BEGIN,
        "",
        PUBLISH,
        f"    if (e->overwrites)\n    {BEGIN}{PUBLISH}",
    ),
    "does not look after the copy": (
        "fmq/queue.c",
        "    ring_copy_out(e, elements, n);\n    int r = still_ours(e);\n",
        "    ring_copy_out(e, elements, n);\n    int r = 0;\n",
    ),
}
SLEEP_MUTANTS = {
    "sleep": (
        "fmq/sleep.c",
        "atomic_fetch_add(e->shared.their_wait, 1);",
        "atomic_exchange(e->shared.their_wait, 0);",
        JITTER,
    ),
    "stop": ("fmq/sleep.c", "    if (end_has_many(e)) return LOOK_AGAIN;\n", "", ()),
}


def run(build, seed, milliseconds, mode, flags=()):
    program = build("torn.c", *CORE, flags=flags, optimise="-O2")
    print(f"seed {seed}, {milliseconds} ms at most:")
    out = program(str(seed), str(milliseconds), str(mode), timeout=milliseconds / 1000 + 500)
    assert "Sanitizer" not in out
    counts = {name: int(n) for name, n in re.findall(r"(\w+): (\d+)", out)}
    print(out)
    return counts


def seed():
    return random.randrange(2**32)


def often(build, milliseconds, mode, counted, least, flags=()):
    """Runs it, again where a busy machine asks for it, until each of these was counted more often than `least`."""
    total = Counter()
    while min(total[name] for name in counted) <= least:
        total += Counter(run(build, seed(), milliseconds, mode, flags))
        assert not total["torn"]


def test_no_torn_element_is_delivered(build):
    """A reader gets whole elements, and those that its position says, whatever their size and however often the writer
    overtakes it; or -EOVERFLOW."""
    often(build, 500, ENOUGH, ["ok", "overruns"], 100)


@pytest.mark.stress
@pytest.mark.parametrize("flags", [THREAD, ADDRESS], ids=["thread", "address,undefined"])
def test_the_sanitizers_find_nothing_in_a_torrent(build, flags):
    """The same under ThreadSanitizer, and under Address- and UBSanitizer."""
    counts = run(build, seed(), 600, ENOUGH, flags)
    assert counts["torn"] == 0
    assert min(counts["ok"], counts["overruns"]) > 100


def test_sleeping_readers_are_woken(build):
    """Every element that a writer seldom writes reaches each of several sleeping readers, wherever they pause."""
    often(build, 400, "sleep", ["ok"], 100, JITTER)


def test_readers_that_are_stopped_do_not_disturb_others(build):
    """Nobody sleeps for good because others are stopped, nor accuses the writer of waking it for nothing."""
    often(build, 800, "stop", ["ok", "stops"], 50)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_torn_elements_are_seen_when_a_rule_is_broken(build, csrc, mutant):
    """Each rule of the flavour is needed: without it torn elements arrive, and are seen."""
    file, *changes = MUTANTS[mutant]
    text = (csrc / file).read_text()
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert text.count(old) == 1, f"the mutant {mutant!r} no longer applies to {file}"
        text = text.replace(old, new)
    program = build("torn.c", *CORE, sources={file: text}, optimise="-O2")
    out = program(str(seed()), "10000", str(ENOUGH), fails=True)
    assert int(re.search(r"torn: (\d+)", out)[1]) > 0


@pytest.mark.stress
@pytest.mark.parametrize("mode", SLEEP_MUTANTS)
def test_sleepers_are_missed_when_a_rule_is_broken(build, csrc, mode):
    """A shared word that holds the same again, and counting other readers' stops as the writer's wakes, are found."""
    file, old, new, flags = SLEEP_MUTANTS[mode]
    text = (csrc / file).read_text()
    assert text.count(old) == 1, f"the mutant for {mode!r} no longer applies to {file}"
    program = build("torn.c", *CORE, flags=flags, sources={file: text.replace(old, new)}, optimise="-O2")
    out = ""
    while "torn: line" not in out:  # readers may keep apart for as long, where others have the processors
        out = program(str(seed()), "20000", mode, fails=None)


@pytest.mark.stress
def test_no_torn_element_in_a_hundred_million(build, tally):
    """The same until 10^8 elements were delivered, or as many as the budget allows, in five minutes at most."""
    enough = stress.times(ENOUGH)
    counts = run(build, seed(), 300_000, enough)
    tally("elements delivered under overruns", counts["ok"])
    assert counts["torn"] == 0
    assert counts["ok"] >= enough


@pytest.mark.stress
def test_sleeping_readers_are_woken_for_long(build):
    """The two tests of sleepers for half a minute each."""
    assert run(build, seed(), stress.times(30_000), "sleep", JITTER)["ok"] > stress.times(10_000)
    assert run(build, seed(), stress.times(30_000), "stop")["stops"] > stress.times(10_000)
