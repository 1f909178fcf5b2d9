"""The C test programs on a processor with a weaker memory: compiled for aarch64 and run by qemu.

What this cannot show, with qemu 7: it runs each aarch64 access and barrier as the host's, so x86 reorders no more
than it would by itself, and a missing barrier goes unnoticed. What it does show: the sources compile without a warning,
8-byte atomics have no lock, and the code for another processor transfers, stops and refuses as it should.

In user mode set_robust_list and futex_waitv answer ENOSYS: no life word is ever marked, and every sleep is an old
kernel's (its own word, and a look every 50 ms). Deaths are therefore tried in an emulated machine, whose kernel is
that of Debian's installer for arm64.
"""

import random
import re
import shutil
import sys

import emulated_machine
import pytest
import stress
from core_sources import CORE
from emulated_machine import COMPILER

EMULATOR = "qemu-aarch64-static"
SCHEDULED = tuple(f"fmq/{name}.c" for name in ("queue", "sleep", "ring", "readers", "event"))
# program -> sources, flags, whether it takes SEED MILLISECONDS, and what its output has to have
PROGRAMS = {
    "ring_race.c": (CORE, (), r"stream: [1-9].*exchange: [1-9].*stop: [1-9].*busy: [1-9]"),
    "hostile.c": (CORE, (), r"\d+ calls, [1-9]\d* ends lost"),
}


@pytest.fixture
def emulated(build):
    """As `build`, for aarch64; the program runs in the emulator."""
    if not (shutil.which(COMPILER) and shutil.which(EMULATOR)):
        pytest.skip(
            f"no '{COMPILER}' or no '{EMULATOR}'; install them "
            "(Debian: apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static)"
        )

    def make(program, sources, flags=()):
        return build(program, *sources, flags=("-static", *flags), cc=COMPILER, runner=(EMULATOR,))

    return make


@pytest.fixture
def in_a_machine(build, tmp_path):
    """As `build`, for aarch64; the program runs on a kernel of its own, which marks the deaths."""
    if lacks := emulated_machine.absence():
        pytest.skip(lacks)
    runner = (sys.executable, emulated_machine.__file__, emulated_machine.compiled_init(tmp_path))
    return lambda program, *sources: build(program, *sources, flags=("-static",), cc=COMPILER, runner=runner)


def race(emulated, program, seed, milliseconds):
    sources, flags, expected = PROGRAMS[program]
    out = emulated(program, sources, flags)(str(seed), str(milliseconds), timeout=milliseconds / 1000 + 500)
    assert re.search(expected, out, re.DOTALL), out
    return out


@pytest.mark.stress
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_runs_on_aarch64(emulated, program):
    """Its claims hold there too, for half a minute, from a printed seed."""
    seed = random.randrange(2**32)
    print(f"seed {seed}, 30 s:", race(emulated, program, seed, stress.times(30_000)))


@pytest.mark.stress
def test_no_schedule_loses_a_wake_up_on_aarch64(emulated):
    """The explorer of schedules finds nothing there either, with every schedule of up to three preemptions."""
    print(emulated("schedules.c", SCHEDULED, ("-include", "scheduled.h"))("3", timeout=600))


@pytest.mark.stress
def test_deaths_are_told_on_aarch64(in_a_machine):
    """On a kernel for aarch64 the deaths of readers and writers, at random moments, are told, and successors go on."""
    seed = random.randrange(2**32)
    out = in_a_machine("kills.c", *CORE)(str(seed), str(stress.times(600)), "0", timeout=900)
    print(f"seed {seed}:", out)
    assert re.search(r"told [1-9]\d* times", out), out
