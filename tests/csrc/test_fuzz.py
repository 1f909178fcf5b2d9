"""Coverage-guided fuzzing of what peers control: fuzz_attach.c, the page as found, fuzz_peer.c, while calls run,
fuzz_listener.c, the client of a burst, and fuzz_wire.c, its packets.
"""

import random
import re
import shutil
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import stress
from wire_packets import GOLDEN

HERE = Path(__file__).parent
CORE = tuple(f"fmq/{name}.c" for name in ("queue", "sleep", "ring", "readers", "event", "bridge"))
BURST = tuple(
    f"burst/{name}.c"
    for name in (
        "packet",
        "wire",
        "listener",
        "inflight",
        "timed",
        "blame",
        "real_time",
        "deadline",
        "policy",
        "flows",
        "run_queue",
    )
)
FLAGS = ("-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror")
PARTS = {
    "fuzz_attach": CORE,
    "fuzz_peer": CORE,
    "fuzz_listener": CORE + BURST,
    "fuzz_wire": ("burst/wire.c",),
}
SANITIZE = ("-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all")
HINT = "no clang with libFuzzer (Debian: apt install clang libclang-rt-14-dev)"

SYNCHRONIZED, UNSYNCHRONIZED = 1, 2
# Edges; what the seeds and the first seconds reach is well above.
FLOOR = {"fuzz_attach": 300, "fuzz_peer": 450, "fuzz_listener": 300, "fuzz_wire": 150}
MUTANTS = {  # what is left out, and what it is replaced by
    "fuzz_peer": (
        "fmq/ring.c",
        "    if (now - e->cursor.seen > e->ring.capacity || lag > e->ring.capacity) return ring_broken(e);\n",
        "    (void)lag;\n",
    ),
    "fuzz_listener": (
        "burst/listener.c",
        "    return atomic_fetch_and(&p->state, ~(uint32_t)RUNS) & VALID ? 0 : -ESTALE;",
        "    atomic_fetch_and(&p->state, ~(uint32_t)RUNS);\n    return 0;",
    ),
    "fuzz_wire": ("burst/wire.c", "    if (r->element == r->size)\n        return", "    if (0)\n        return"),
}


def page(flavour, head, tail, capacity=5, element_bytes=24, life=42 | 1 << 31):
    """A control page as layout.h has it, up to the life words."""
    words = struct.pack("<QIIQQI", 0x514D465453525542, 2, flavour, capacity, 7, element_bytes).ljust(128, b"\0")
    words += struct.pack("<QQI", head, head, 1).ljust(128, b"\0") + struct.pack("<Q", tail).ljust(512, b"\0")
    return words + struct.pack("<I", life).ljust(128, b"\0") + struct.pack("<I", life)


def seeds(program, rng):
    """A small corpus: each is read as arbitrary bytes by the fuzzer, which goes on from there."""
    if program == "fuzz_wire":
        for golden in GOLDEN:
            kind, version = golden.direction
            yield bytes([(kind == "request") | 2 * (version == 2) | 4 * rng.randrange(2)]) + golden.data
        return
    if program == "fuzz_attach":
        for flavour in (SYNCHRONIZED, UNSYNCHRONIZED):
            for head, tail in [(0, 0), (7, 5), (9, 4), (3, 8), (2**64 - 2, 2**64 - 3)]:
                yield rng.randbytes(32) + page(
                    flavour, head, tail, life=rng.choice([0, 42 | 1 << 31, 1 << 31, 1 << 30])
                )
    for _ in range(0 if program == "fuzz_attach" else 60):
        calls, peer = rng.randbytes(rng.randrange(8, 80)), rng.randbytes(rng.randrange(80))
        share = min(255, 256 * len(calls) // (len(calls) + len(peer)) + 1)
        yield rng.randbytes(2) + bytes([share]) + calls + peer


class Fuzzer:
    """A program built with libFuzzer, and its corpus."""

    def __init__(self, folder, csrc, program, sources=None):
        self.binary, self.corpus, self.program = folder / program, folder / f"{program}.corpus", program
        for file, text in (sources or {}).items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text(text)
        files = [(folder if file in (sources or {}) else csrc) / file for file in PARTS[program]]
        command = [
            "clang",
            *FLAGS,
            *SANITIZE,
            *(() if program == "fuzz_wire" else ("-include", "scheduled.h")),
            f"-I{csrc}",
            f"-I{HERE}",
            *files,
            HERE / f"{program}.c",
            "-o",
            self.binary,
        ]
        done = subprocess.run([*command, "-pthread"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def run(self, seconds):
        """Its exit status and output; the seed is in the output."""
        rng = random.Random(1)
        self.corpus.mkdir(exist_ok=True)
        for i, seed in enumerate(seeds(self.program, rng)):
            (self.corpus / f"seed{i}").write_bytes(seed)
        command = [
            self.binary,
            self.corpus,
            f"-max_total_time={seconds}",
            "-max_len=1100",
            "-len_control=0",
            "-timeout=20",
        ]
        done = subprocess.run(
            [*command, f"-seed={random.randrange(1, 2**31)}", "-rss_limit_mb=4096", f"-artifact_prefix={self.corpus}/"],
            capture_output=True,
            timeout=seconds + 120,
            check=False,
        )
        return done.returncode, done.stderr.decode(errors="replace")


@pytest.fixture
def fuzzer(tmp_path, csrc):
    """fuzzer(program, sources=): builds it; skips where there is no libFuzzer."""
    probe = "int LLVMFuzzerTestOneInput(const void *p, unsigned long n) { return !p && n; }"
    command = ["clang", "-x", "c", "-", "-fsanitize=fuzzer", "-o", tmp_path / "probe"]
    if (
        not shutil.which("clang")
        or subprocess.run(command, input=probe.encode(), capture_output=True, check=False).returncode
    ):
        pytest.skip(HINT)
    return lambda program, sources=None: Fuzzer(tmp_path, csrc, program, sources)


def fuzz(fuzzer, program, seconds):
    status, out = fuzzer(program).run(seconds)
    assert status == 0, out[-8000:]
    executions, edges = map(int, re.search(r"^#(\d+)\s+DONE\s+cov: (\d+)", out, re.MULTILINE).groups())
    print(
        f"{program}: {executions} executions in {seconds} s, coverage {edges} edges,", re.search(r"Seed: \d+", out)[0]
    )
    assert executions > 1000
    assert edges >= FLOOR[program]


def fuzz_all(fuzzer, seconds):
    with ThreadPoolExecutor() as both:
        list(both.map(lambda program: fuzz(fuzzer, program, seconds), FLOOR))


@pytest.mark.stress
def test_the_fuzzers_find_nothing(fuzzer):
    """Arbitrary pages, a peer that writes arbitrary words between any two accesses of a call, and a client of a burst
    that also sends arbitrary packets: documented results, no access outside, no call that does not end, -EPROTO for
    good, and of plans only the one that the packet was learnt as, and never after it was forgotten. Packets are refused
    with a reason, or canonical. Two minutes each.
    """
    fuzz_all(fuzzer, round(stress.seconds(120)))


@pytest.mark.stress
@pytest.mark.parametrize("program", MUTANTS)
def test_the_fuzzers_find_what_is_missing(fuzzer, csrc, program):
    """Without the check of the peer's counter, the word that a plan was forgotten, or the end of a packet, thirty
    seconds are enough.
    """
    file, present, without = MUTANTS[program]
    text = (csrc / file).read_text()
    assert text.count(present) == 1, "the mutant no longer applies"
    status, out = fuzzer(program, {file: text.replace(present, without)}).run(30)
    assert status != 0
    assert re.search(r"fuzz: |AddressSanitizer", out), out[-4000:]
