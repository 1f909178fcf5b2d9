"""Processes killed with SIGKILL, after every instruction of a call and at random moments: stepped.c and kills.c."""

import random
import re
from pathlib import Path

import pytest
import stress
from core_sources import CORE

pytestmark = pytest.mark.integration

NOW = ("-Wl,-z,now",)  # no symbol is looked up inside the call that is stepped
BIG = 4096  # MB: what a process with a model may hold

# scenario -> a line broken on purpose; without these the harness could be one that never fails.
MUTANTS = {
    "event, second waker": (
        "fmq/event.c",
        "    if (atomic_load(&f->sleepers)) futex_wake(&f->bits, INT_MAX, mask);\n",
        "",
        "    atomic_fetch_or(&f->bits, mask);",
        "    if (~atomic_fetch_or(&f->bits, mask) & mask) futex_wake(&f->bits, INT_MAX, mask);",
    ),
    "write": (
        "fmq/sleep.c",
        """futex_wait_either(e->shared.my_wait, saw.announced, e->shared.their_life, saw.life,
                                &e->signals.ended, saw.ended, slice < until ? slice : until)""",
        "futex_wait(e->shared.my_wait, saw.announced, ~0u, until)",
    ),
    "write to two readers": ("fmq/sleep.c", "    pass_on_death(e);\n", ""),
    "event, two waiters": (
        "fmq/event.c",
        "            futex_wake(peers[i]->shared.their_life, INT_MAX, FUTEX_BITSET_MATCH_ANY);\n",
        "",
    ),
    "release": (
        "fmq/life.c",
        "change(word_of(n));",
        "(void)change, *word_of(n) = LIFE_RELEASED, futex_wake(word_of(n), INT_MAX, ~0u);",
    ),
}
SKIPS_THE_CALL, OWN_WORD, *OTHERS = MUTANTS


def stepped(build, stride, offset):
    out = build("stepped.c", *CORE, flags=NOW, optimise="-O2")(str(stride), str(offset), timeout=500)
    if "not allowed" in out:
        pytest.skip("ptrace is not allowed here (a container's filter)")
    counts = re.findall(r": (\d+) kills in (\d+) instructions, told within (\d+) us", out)
    assert len(counts) == 15, out
    assert all(int(kills) >= int(steps) // stride > 10 for kills, steps, _ in counts), out
    return out


def killed(build, seed, rounds, megabytes=0):
    print(f"seed {seed}, {megabytes} MB:")
    out = build("kills.c", *CORE, flags=NOW, optimise="-O2")(str(seed), str(rounds), str(megabytes), timeout=600)
    assert int(re.search(r"told (\d+) times", out)[1]) >= rounds
    return out


def available_megabytes():
    return int(re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())[1]) // 1024


def test_a_kill_between_instructions_strands_nobody(build):
    """Killed in a write, read, commit, exchange, wake, stop or release, after every fifth instruction of it, a process
    leaves nobody asleep for more than 100 ms, and a queue that a successor can use."""
    print(stepped(build, 5, random.randrange(5)))


@pytest.mark.stress
def test_a_kill_after_every_single_instruction_strands_nobody(build):
    """The same for every instruction."""
    print(stepped(build, 1, 0))


@pytest.mark.parametrize(
    "scenario", [SKIPS_THE_CALL, OWN_WORD, *(pytest.param(name, marks=pytest.mark.stress) for name in OTHERS)]
)
def test_the_harness_finds_who_sleeps_for_ever(build, csrc, scenario):
    """A wake that is skipped because the bits are set, a sleep on the own word only, and a wake that is not passed on
    are found."""
    file, *changes = MUTANTS[scenario]
    text = (csrc / file).read_text()
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert text.count(old) == 1, f"the mutant for {scenario!r} no longer applies to {file}"
        text = text.replace(old, new)
    program = build("stepped.c", *CORE, flags=(*NOW, "-Wno-unused-function"), sources={file: text}, optimise="-O2")
    said = program("1", "0", scenario, fails=None)
    if "not allowed" in said:
        pytest.skip("ptrace is not allowed here (a container's filter)")
    assert "the survivor comes back" in said


def test_a_kill_at_a_random_moment_is_told(build):
    """300 readers and writers of all flavours die at random moments: each death is told within 100 ms, or (a broadcast
    writer, which is not told) the writer goes on; nothing is missing or torn, a successor goes on, and no descriptor or
    mapping stays."""
    print(killed(build, random.randrange(2**32), 300))


def test_a_big_process_is_told_as_soon(build):
    """A victim with 256 MB, which the kernel frees after the others were told."""
    print(killed(build, random.randrange(2**32), 1, 256))


@pytest.mark.stress
def test_ten_thousand_kills_are_told(build, tally):
    """The same with 10,000, or as many as the budget allows."""
    tally("kills of a process in C", kills := stress.times(10_000))
    print(killed(build, random.randrange(2**32), kills))


@pytest.mark.stress
def test_a_very_big_process_is_told_as_soon(build):
    """Five victims with 4 GB each, or with the largest quarter of it that fits: the kernel frees that for 0.3 s."""
    megabytes = next((BIG * k // 4 for k in (4, 3, 2, 1) if BIG * k // 4 < available_megabytes() * 0.8), 256)
    print(killed(build, random.randrange(2**32), 5, megabytes))
