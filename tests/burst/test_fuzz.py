"""The parsers of burst under hostile inputs, each in a process of its own: nothing but what fuzz_parsers.py claims."""

import importlib.util
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import stress

sys.path.insert(0, str(Path(__file__).parent))

import fuzz_parsers
import wire_oracle

PROGRAM = Path(fuzz_parsers.__file__)
PACKETS = ("request1", "request2", "result1", "result2")
MESSAGES = ("memories", "descriptors")
# Edges of coverage, of packets those of the oracle; each is reached within seconds. What is missing is what only the
# encoders do, and of messages a check that some seeds do not come to.
FLOOR = {"request1": 40, "request2": 51, "result1": 49, "result2": 50, "memories": 125, "descriptors": 125}
guided = pytest.mark.skipif(
    not importlib.util.find_spec("atheris"), reason="no atheris (make .venv/fuzz; it needs CPython and x86-64)"
)

# What runs before the program when a bug is to be found: one text of the oracle is another. The C is right, so what
# differs from it is found, as a bug of the C would be.
PLANT = """
import inspect, os, runpy, sys
sys.path.insert(0, os.path.dirname(sys.argv[3]))
import wire_oracle
old, new = sys.argv[1:3]
text = inspect.getsource(wire_oracle)
assert text.count(old) == 1, "the mutant no longer applies"
exec(compile(text.replace(old, new), wire_oracle.__file__, "exec"), vars(wire_oracle))
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Bug(NamedTuple):
    """One text in place of another in the sources, the parser that has it then, and what is said of it."""

    target: str
    old: str
    new: str
    said: str


REQUEST_COUNTS = "    reader.check_size(size, least=(2 if version == 1 else 4)"
MEASURE = "def _take_measure(reader):\n"
BUGS = {
    "padding unseen": Bug("request2", "if datum.struct.pack(*values) != raw:", "if False:", "C says .* has padding"),
    "elements too many": Bug("request2", "if self.element != self.size:", "if False:", "C says .* the packet goes on"),
    "token 0": Bug("request2", "if not token.token:", "if False:", "token 0 stands for no buffer"),
    "no such pool": Bug("request1", "and pool >= pools:", "and pool > pools:", "the packet names . pools"),
    "believed count": Bug("request2", REQUEST_COUNTS, "    [0] * pools\n" + REQUEST_COUNTS, "MemoryError"),
    "leak": Bug(
        "request2", MEASURE, MEASURE.replace(")", ", kept=[])", 1) + "    kept.append(bytes(2**12))\n", "left behind"
    ),
    "hang": Bug("request1", REQUEST_COUNTS, "    while outputs > 3: pass\n" + REQUEST_COUNTS, "[Tt]imeout"),
}
SLOW = {"leak", "hang"}  # to be found, or to be believed


@pytest.mark.parametrize("target", [*PACKETS, *MESSAGES])
def test_mutants_find_nothing(target):
    """Six thousand mutated packets and messages: refused or canonical, and many of them accepted."""
    count, accepted, _, _ = fuzz_parsers.finds_nothing(PROGRAM, target, "--plain", "--inputs", 6_000, "--seconds", 20)
    assert count >= 1000
    assert accepted > count / 100


def finds(bug, *options, patience=30.0):
    """Plants the bug; what was said of it."""
    target, old, new, said = BUGS[bug]
    status, out = fuzz_parsers.spawn(PROGRAM, target, *options, prefix=("-c", PLANT, old, new), patience=patience)
    assert status != 0, out[-4000:]
    assert re.search(said, out), out[-4000:]
    return out


@pytest.mark.integration
@pytest.mark.parametrize("bug", sorted(set(BUGS) - SLOW))
def test_mutants_find_a_bug(bug):
    """Without one check of the decoders they find an input, and print it, within seconds."""
    assert re.search(r"after \d+ inputs, found [0-9a-f]+\n", finds(bug, "--plain", "--seconds", 20))


def lines_of_the_decoders():
    """All lines of the functions that take packets apart; the checks are the encoders', too."""
    for function in fuzz_parsers.functions_of(wire_oracle):
        if function.__qualname__.startswith(("decode_", "_take_", "PacketReader.")):
            code = function.__code__
            yield from (line for *_, line in code.co_lines() if line not in {None, code.co_firstlineno})


def test_mutants_reach_every_line():
    """Of the decoders: two thousand mutants of each one's golden packets leave none out, so deep checks are made."""
    due = set(lines_of_the_decoders())
    assert len(due) > 50

    def trace(frame, event, argument):
        if frame.f_code.co_filename != wire_oracle.__file__:
            return None
        due.discard(frame.f_lineno)
        return trace

    for name in PACKETS:
        target, rng = fuzz_parsers.TARGETS[name](seed=1), random.Random(1)
        pool, before = list(target.seeds), sys.gettrace()
        for _ in range(2000):
            data = target.mutate(rng.choice(pool))
            sys.settrace(trace)
            try:
                accepted = target.check(data)
            finally:
                sys.settrace(before)
            pool += [data] * accepted
    assert due == set()


@pytest.mark.parametrize("name", MESSAGES)
def test_deeply_nested_messages(name):
    """A thousand lists in each other are refused with the documented error, as anything else that was not meant."""
    deep = b"\x91" * 1015 + b"\xc0"
    for data in (deep, b"\x92\x00" + deep, b"\x92\x00\x92" + deep + deep, b"\x94\x02\xa5'<u4'\x01" + deep):
        for at_the_end in (b"", b"\0"):  # which decides how many descriptors come along
            assert not fuzz_parsers.TARGETS[name](seed=1).check(data + at_the_end)


@guided
@pytest.mark.stress
def test_the_fuzzer_finds_nothing(tmp_path, tally):
    """More than 10^7 packets, guided by coverage, and a million messages, times the budget; two parsers at a time.

    Whatever the budget, 200,000 messages of each kind, because 30,000 do not always come to the floor.
    A quarter of an hour each at most; about three minutes in all while nobody else needs the two cores.
    """

    def one(target):
        seed = random.randrange(1, 2**31)
        inputs = stress.times(2_600_000) if target in PACKETS else max(200_000, stress.times(600_000))
        options = "--inputs", inputs, "--seconds", 900, "--seed", seed, "--folder", tmp_path
        count, accepted, said, out = fuzz_parsers.finds_nothing(PROGRAM, target, *options, patience=960)
        coverage = int(re.findall(r"cov: (\d+)", out)[-1])
        print(f"{said}, coverage {coverage} edges, seed {seed}")
        return target, count, accepted, coverage

    with ThreadPoolExecutor(2) as both:
        results = list(both.map(one, [*PACKETS, *MESSAGES]))
    packets = sum(count for target, count, _, _ in results if target in PACKETS)
    print(f"{packets} packets in all")
    tally("packets to parsers", packets)
    assert packets >= stress.times(10**7), "this machine is too slow, or too busy, for the claim"
    for target, count, accepted, coverage in results:
        assert accepted > count / 1000, target
        assert coverage >= FLOOR[target], target


@guided
@pytest.mark.stress
@pytest.mark.parametrize("bug", BUGS)
def test_the_fuzzer_finds_a_bug(bug, tmp_path):
    """Each is found, however busy the processors are, and the input is kept."""
    finds(bug, "--seconds", 600, "--folder", tmp_path, patience=660)
    assert list(tmp_path.glob("*-*"))
