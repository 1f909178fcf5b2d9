"""What a device may answer, as noise: to calls, in questions, in results, on the plain path; under sanitizers."""

import os
import random
import subprocess
from pathlib import Path

import pytest
import stress
from libburst_by_ctypes import ROOT
from libburst_sources import libburst_sources
from wire_packets import GOLDEN, RESULTS, random_packet

pytestmark = pytest.mark.integration
CSRC = ROOT / "csrc"
FLAGS = ["-std=gnu11", "-O1", "-g", "-w", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
STEPS = ("hello", "prepare", "burst", "lane", "callback", "result", "plain")
LEAKING = ("if (n <= 0) message_close_fds(m);", "if (n <= 0) m->n_fds = 0;")  # what came with a packet of no bytes
BELIEVED = ("&& (uint64_t)rank + 2 <= t->how.room - at", "")  # a rank that is not compared with the room for it


def results():
    """Good results, each after its length."""
    rng, direction = random.Random(1), RESULTS[2]
    found = [golden.data for golden in GOLDEN if golden.direction == direction]
    found += [direction.encode(random_packet(rng, direction)) for _ in range(50)]
    return b"".join(len(one).to_bytes(4, "little") + one for one in found if len(one) <= 64 * 24)


@pytest.fixture
def fuzz(tmp_path):
    """fuzz(cases, seed, file=None, change=None): compiles it, with one of the library's files changed, and runs it."""

    def run(cases, seed, file=None, change=None):
        sources = [source for source in libburst_sources() if source.name != file]
        if file:
            text = next(source for source in libburst_sources() if source.name == file).read_text()
            assert text.count(change[0]) == 1
            (tmp_path / file).write_text(text.replace(*change))
            sources.append(tmp_path / file)
        (tmp_path / "results").write_bytes(results())
        program = Path(__file__).with_name("fuzz_answers.c")
        includes = [f"-I{CSRC}", f"-I{CSRC}/libburst"]
        command = ["cc", *FLAGS, *includes, program, *sources, "-o", tmp_path / "fuzz", "-pthread"]
        subprocess.run(command, check=True, timeout=240)
        arguments = [str(cases), str(seed), tmp_path / "results"]
        how = {"capture_output": True, "text": True, "timeout": 3600, "env": os.environ | {"TMPDIR": str(tmp_path)}}
        return subprocess.run([tmp_path / "fuzz", *arguments], check=False, **how)

    return run


@pytest.mark.parametrize("cases", [10_000, pytest.param(stress.times(2_000_000), marks=pytest.mark.stress)])
def test_noise_is_refused_or_believed_and_nothing_else(fuzz, tally, cases):
    """Calls return what burst.h documents, with a reason; no memory is misused or lost, no descriptor stays open."""
    done = fuzz(cases, cases)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    counts = dict(zip(STEPS, (tuple(map(int, line.split())) for line in done.stdout.splitlines()), strict=True))
    assert sum(map(sum, counts.values())) >= cases
    assert all(refused > cases / 500 for _, refused in counts.values())
    assert all(counts[step][0] > cases / 500 for step in ("callback", "result", "plain"))
    tally("lies of a device to a client in C", sum(map(sum, counts.values())))


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        pytest.param("messages.c", LEAKING, "descriptors stay open", id="a leak"),
        pytest.param("plain.c", BELIEVED, "AddressSanitizer", id="a count that is believed"),
    ],
)
def test_a_mistake_is_found(fuzz, file, change, words):
    """A descriptor that is not closed, and a count that is believed."""
    done = fuzz(4000, 1, file, change)
    assert done.returncode != 0
    assert words in done.stderr
