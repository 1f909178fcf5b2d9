"""What a hostile process may write into a queue's memory, as noise: before it is opened, and while calls run."""

import subprocess
from pathlib import Path

import pytest
import stress
from libburst_by_ctypes import ROOT

pytestmark = pytest.mark.integration
CSRC = ROOT / "csrc"
FLAGS = ["-std=gnu11", "-O1", "-g", "-w", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
STEPS = ("open", "role", "transfer", "look", "wait")
MISTAKES = {
    "a size that is believed": (
        "libfmq/queues.c",
        "if (control > q->bytes || ring > q->bytes - control)",
        "if (control > q->bytes && ring > q->bytes - control)",
    ),
    "a counter that is believed": (
        "fmq/ring.c",
        "    if (now - e->cursor.seen > e->ring.capacity || lag > e->ring.capacity) return ring_broken(e);\n",
        "    (void)lag;\n",
    ),
    "a count that becomes an error": (
        "libfmq/ends.c",
        "(int64_t)(fmq_lost(e->end) & INT64_MAX)",
        "(int64_t)fmq_lost(e->end)",
    ),
}


@pytest.fixture
def fuzz(tmp_path):
    """fuzz(cases, seed, mistake=None): compiles it, with one of the library's files changed, and runs it."""

    def run(cases, seed, mistake=None):
        sources = {
            path.relative_to(CSRC).as_posix(): path for path in [*CSRC.glob("fmq/*.c"), *CSRC.glob("libfmq/*.c")]
        }
        if mistake:
            file, right, wrong = MISTAKES[mistake]
            text = sources[file].read_text()
            assert text.count(right) == 1, "the mistake no longer applies"
            sources[file] = tmp_path / Path(file).name
            sources[file].write_text(text.replace(right, wrong))
        program = [
            Path(__file__).with_name("fuzz_memory.c"),
            CSRC / "libburst/handles.c",
            CSRC / "burst/failure.c",
            *sources.values(),
        ]
        command = ["cc", *FLAGS, f"-I{CSRC}", f"-I{CSRC}/libfmq", *program, "-o", tmp_path / "fuzz", "-pthread"]
        subprocess.run(command, check=True, timeout=240)
        arguments = [tmp_path / "fuzz", str(cases), str(seed)]
        return subprocess.run(arguments, capture_output=True, text=True, timeout=3600, check=False)

    return run


@pytest.mark.parametrize("cases", [3000, pytest.param(stress.times(1_000_000), marks=pytest.mark.stress)])
def test_noise_in_the_memory_is_refused_or_believed_and_nothing_else(fuzz, tally, cases):
    """Calls return what fmq.h documents, with a reason; nothing beyond the ring is touched; no descriptor leaks."""
    done = fuzz(cases, cases)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    counts = dict(zip(STEPS, (tuple(map(int, line.split())) for line in done.stdout.splitlines()), strict=True))
    assert sum(counts["open"]) == cases
    assert all(accepted > cases / 5 for accepted, _ in counts.values())
    assert all(counts[step][1] > cases / 5 for step in ("open", "role", "transfer", "look"))
    tally("calls on a queue with a hostile peer in C", sum(map(sum, counts.values())))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(fuzz, mistake):
    """A size, a counter and a count that are believed."""
    done = fuzz(3000, 1, mistake)
    assert done.returncode != 0
    assert "fuzz_memory: " in done.stderr or "Sanitizer" in done.stderr
