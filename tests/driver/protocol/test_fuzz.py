"""What a client sends to a device, mutated: every message is answered, and none is a surprise."""

import importlib.util
import random
import re
from contextlib import closing
from pathlib import Path

import fuzz_messages
import msgpack
import pytest
import stress
from fuzz_messages import fuzz_parsers

from burst import ErrorStatus
from driver.protocol.lane_codec import in_turn

PROGRAM = Path(fuzz_messages.__file__)
TARGETS = ("calls", "plain", "streams")
DEEP = b"\x91" * 1015 + b"\xc0"


@pytest.mark.parametrize("target", TARGETS)
def test_mutants_find_nothing(target):
    """Six thousand mutated calls and requests: answered as documented, and many of them carried out."""
    count, accepted, _, _ = fuzz_parsers.finds_nothing(PROGRAM, target, "--plain", "--inputs", 6_000, "--seconds", 20)
    assert count >= 1000
    assert accepted > count / 100


@pytest.mark.parametrize("slot", [[], {}, [[1]]], ids=repr)
def test_slots_that_are_no_numbers(slot):
    """They are malformed, as anything else in the place of a number is; then KNOWN can go."""
    request = msgpack.packb([1, [], [], [slot], False, None])
    with closing(fuzz_messages.Plain(seed=1)) as target:
        status, *_, text, _ = target.answer(in_turn(1, None, request))
    assert status == ErrorStatus.GENERAL_FAILURE
    assert text.startswith("Malformed: ")


@pytest.mark.parametrize(
    ("make", "data"),
    [
        (fuzz_messages.Calls, b"\x93\x01\xa5hello" + DEEP),
        (fuzz_messages.Calls, b"\x93\x01\xa6memory" + DEEP),
        (fuzz_messages.Calls, b"\x93\x01\xa5queue" + DEEP),
        (fuzz_messages.Plain, in_turn(1, None, b"\x96\x01\x91" + DEEP + b"\x90\x90\xc2\xc0")),
    ],
    ids=["hello", "memory", "queue", "argument"],
)
def test_deeply_nested_arguments(make, data):
    """A thousand lists in each other are refused like a single one."""
    with closing(make(seed=1)) as target:
        assert not target.check(data)


def test_the_number_of_a_call_is_as_long_as_a_message():
    """The answer to it has no room for the number; that ends the connection, not the thread that serves it."""
    with closing(fuzz_messages.Calls(seed=1)) as target:
        target.check(msgpack.packb(["x" * 65530, "nothing"]))


@pytest.mark.skipif(not importlib.util.find_spec("atheris"), reason="no atheris (make .venv/fuzz)")
@pytest.mark.stress
@pytest.mark.parametrize("target", TARGETS)
def test_the_fuzzer_finds_nothing(target, tmp_path):
    """Guided by coverage, three hundred thousand messages each."""
    seed = random.randrange(1, 2**31)
    options = "--inputs", stress.times(300_000), "--seconds", 60, "--seed", seed, "--folder", tmp_path
    count, accepted, said, out = fuzz_parsers.finds_nothing(PROGRAM, target, *options, patience=120)
    coverage = int(re.findall(r"cov: (\d+)", out)[-1])
    print(f"{said}, coverage {coverage} edges, seed {seed}")
    assert accepted > count / 1000
    assert coverage >= 40
