"""Real threads under the sanitizers: ring_race.c, hostile.c, races of plans, runs in flight, cancels, run queues."""

import random
import re

import pytest
import stress
from core_sources import CORE

pytestmark = pytest.mark.integration

THREAD = ("-fsanitize=thread", "-Wno-tsan")  # it cannot see fences; what they order is all atomic
ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover")
RUN_QUEUE = ("burst/deadline.c", "burst/policy.c", "burst/flows.c", "burst/run_queue.c")
SERVING = ("burst/listener.c", "burst/inflight.c", "burst/timed.c", "burst/blame.c", "burst/real_time.c")
BURST = (*CORE, *RUN_QUEUE, "burst/packet.c", "burst/wire.c", "burst/caller.c", *SERVING)
FLAVOURS = {"synchronized": 1, "unsynchronized": 2, "broadcast": 3}


def race(build, flags, milliseconds, seed):
    return counted(
        build("ring_race.c", *CORE, flags=flags),
        milliseconds,
        seed,
        {"stream", "exchange", "stop", "broadcast", "busy"},
    )


def race_of_plans(build, flags, milliseconds, seed):
    names = {"answered", "learnt", "runs", "caught"}
    return counted(build("plan_race.c", *BURST, flags=flags), milliseconds, seed, names)


def race_of_runs_in_flight(build, flags, milliseconds, seed):
    names = {"answered", "learnt", "flown", "together", "failed", "caught"}
    return counted(build("inflight_race.c", *BURST, flags=flags), milliseconds, seed, names)


def race_of_cancels(build, flags, milliseconds, seed):
    program = build("foreign_race.c", "burst/foreign.c", *RUN_QUEUE, "fmq/futex.c", flags=flags)
    return counted(program, milliseconds, seed, {"whole", "before", "between", "within"})


def race_of_run_queues(build, flags, milliseconds, seed):
    program = build("run_queue_race.c", *CORE, *RUN_QUEUE, flags=flags)
    return counted(program, milliseconds, seed, {"served", "yielded", "missed", "closed"})


def counted(program, milliseconds, seed, names):
    """Its output; everything that it counts has happened, if need be in a longer run: the machine may be busy."""
    for factor in (1, 4, 16):
        out = program(str(seed), str(milliseconds * factor), timeout=milliseconds * factor / 1000 + 500)
        assert "Sanitizer" not in out
        counts = dict(re.findall(r"(\w+): (\d+)", out))
        assert set(counts) == names
        if all(int(n) > 0 for n in counts.values()):
            return out
    raise AssertionError(out)


def hostile(build, milliseconds, seed, flavour):
    program = build("hostile.c", *CORE, flags=ADDRESS)
    out = program(str(seed), str(milliseconds), str(FLAVOURS[flavour]), timeout=milliseconds / 1000 + 500)
    assert re.match(r"\d+ calls, [1-9]\d* ends lost", out), "the scribbler was never noticed"
    return out


@pytest.mark.parametrize("flags", [THREAD, ADDRESS], ids=["thread", "address,undefined"])
def test_two_threads_race_cleanly(build, flags):
    """Streams, exchanges, stops and competing threads have listed outcomes only, and the sanitizers find nothing."""
    race(build, flags, 300, 1)


@pytest.mark.parametrize("flags", [THREAD, ADDRESS], ids=["thread", "address,undefined"])
def test_plans_are_forgotten_while_they_run(build, flags):
    """Nobody touches a plan's memory after burst_forget said that it does not run, and what it said runs is told by
    -ESTALE: some are caught running. Every request is answered.
    """
    race_of_plans(build, flags, 300, 1)


@pytest.mark.parametrize("flags", [THREAD, ADDRESS], ids=["thread", "address,undefined"])
def test_runs_in_flight_end_in_any_order(build, flags):
    """Runs that end in other threads are answered once and in order, also where the client leaves no room for answers;
    plans that are forgotten meanwhile keep their memory until then.
    """
    race_of_runs_in_flight(build, flags, 300, 1)


@pytest.mark.parametrize("flags", [THREAD, ADDRESS], ids=["thread", "address,undefined"])
def test_runs_are_cancelled(build, flags):
    """Runs of one turn are cancelled before they begin, between two calls and within one, and no call follows; who is
    not cancelled makes all calls, alone.
    """
    race_of_cancels(build, flags, 300, 1)


@pytest.mark.parametrize("flags", [THREAD, ADDRESS], ids=["thread", "address,undefined"])
def test_turns_are_taken(build, flags):
    """Eight threads enter, yield and leave two slots while flows are closed: never three have one, nobody waits for
    ever, and who gets none is told why.
    """
    race_of_run_queues(build, flags, 800, 1)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_hostile_peer_gets_documented_errors_only(build, flavour):
    """Random words over the whole control page crash nothing, hang nothing, and reach no memory outside the ring."""
    hostile(build, 300, 1, flavour)


@pytest.mark.stress
@pytest.mark.parametrize("flags", [THREAD, ADDRESS], ids=["thread", "address,undefined"])
def test_two_threads_race_for_long(build, flags):
    """The same for a minute, from a printed seed."""
    seed = random.randrange(2**32)
    print(f"seed {seed}, 60 s:", race(build, flags, stress.times(60_000), seed))


@pytest.mark.stress
@pytest.mark.parametrize("flags", [THREAD, ADDRESS], ids=["thread", "address,undefined"])
def test_runs_are_cancelled_for_long(build, flags):
    """The same for half a minute, from a printed seed."""
    seed = random.randrange(2**32)
    print(f"seed {seed}, 30 s:", race_of_cancels(build, flags, stress.times(30_000), seed))


@pytest.mark.stress
@pytest.mark.parametrize("flags", [THREAD, ADDRESS], ids=["thread", "address,undefined"])
def test_runs_in_flight_end_for_long(build, flags):
    """The same for half a minute, from a printed seed."""
    seed = random.randrange(2**32)
    print(f"seed {seed}, 30 s:", race_of_runs_in_flight(build, flags, stress.times(30_000), seed))


@pytest.mark.stress
@pytest.mark.parametrize("flags", [THREAD, ADDRESS], ids=["thread", "address,undefined"])
def test_plans_are_forgotten_for_long(build, flags):
    """The same for half a minute, from a printed seed."""
    seed = random.randrange(2**32)
    print(f"seed {seed}, 30 s:", race_of_plans(build, flags, stress.times(30_000), seed))


@pytest.mark.stress
@pytest.mark.parametrize("flags", [THREAD, ADDRESS], ids=["thread", "address,undefined"])
def test_turns_are_taken_for_long(build, flags):
    """The same for half a minute, from a printed seed."""
    seed = random.randrange(2**32)
    print(f"seed {seed}, 30 s:", race_of_run_queues(build, flags, stress.times(30_000), seed))


@pytest.mark.stress
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_hostile_peer_for_long(build, flavour):
    """The same for half a minute, from a printed seed."""
    seed = random.randrange(2**32)
    print(f"seed {seed}, 30 s:", hostile(build, stress.times(30_000), seed, flavour))
