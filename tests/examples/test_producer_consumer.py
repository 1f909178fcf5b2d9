"""The two programs as a reader of the README runs them: in either order, killed, restarted, interrupted, misused."""

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


class Program:
    """One of the examples as a process; `says` reads its output up to a line that matches."""

    def __init__(self, which, *arguments):
        command = [sys.executable, "-u", EXAMPLES / f"{which}.py", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.watchdog = threading.Timer(20, self.process.kill)
        self.watchdog.start()
        self.heard = ""

    def says(self, pattern):
        for line in self.process.stdout:
            self.heard += line
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"{pattern!r} was not said in\n{self.heard}")

    def signal(self, number):
        self.process.send_signal(number)

    def ends(self, status=0):
        self.heard += self.process.stdout.read()
        assert self.process.wait() == status, self.heard
        return self.heard

    def close(self):
        self.watchdog.cancel()
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def name():
    chosen = f"/fmq-test-{os.getpid()}-{secrets.token_hex(4)}"
    yield chosen
    Path("/dev/shm" + chosen).unlink(missing_ok=True)


@pytest.fixture
def start():
    programs = []

    def run(which, *arguments):
        programs.append(Program(which, *arguments))
        return programs[-1]

    yield run
    for program in programs:
        program.close()


def is_gone(name):
    return not os.path.exists("/dev/shm" + name)


@pytest.mark.parametrize("first", ["producer", "consumer"])
def test_either_may_come_first(start, name, first):
    """Whoever comes first makes the queue; all blocks arrive, and the name is gone when both have ended."""
    both = {}
    for which in sorted(("producer", "consumer"), key=lambda which: which != first):
        both[which] = start(which, "--name", name, "--count", 200, *(["--rate", 0] if which == "producer" else []))
        both[which].says("(writing|reading)")
    assert "200 blocks" in both["producer"].ends()
    assert "200 blocks" in (said := both["consumer"].ends())
    assert " 0 lost, 1 producer" in said
    assert re.search(r"p50 \d+ p99 \d+ max \d+ us", said)
    assert is_gone(name)


def test_a_producer_that_ends_first_leaves_its_blocks(start, name):
    """A consumer that comes later finds them, and removes the name."""
    start("producer", "--name", name, "--count", 20, "--rate", 0).ends()
    assert not is_gone(name)
    assert "20 blocks" in start("consumer", "--name", name, "--count", 20).ends()
    assert is_gone(name)


def test_a_killed_producer_has_a_successor(start, name):
    """The consumer says that it died, goes on when another one comes, and nothing that was sent is lost."""
    consumer = start("consumer", "--name", name)
    consumer.says("nobody")
    producer = start("producer", "--name", name, "--rate", 0)
    producer.says("alive")
    producer.signal(signal.SIGKILL)
    consumer.says("producer is dead; waiting")
    producer = start("producer", "--name", name, "--count", 50, "--rate", 0)
    consumer.says("a producer is here")
    producer.ends()
    consumer.says("producer is released; waiting")
    consumer.signal(signal.SIGINT)
    assert re.search(" 0 lost, [12] producers?", consumer.ends())  # the first may have died before its first block
    assert is_gone(name)


def test_a_killed_consumer_has_a_successor(start, name):
    """The producer says that it died, waits, and goes on; the new consumer sees no gap from its first block on."""
    producer = start("producer", "--name", name, "--rate", 0, "--capacity", 8)
    producer.says("nobody")
    consumer = start("consumer", "--name", name)
    consumer.says("reading")
    consumer.signal(signal.SIGKILL)
    producer.says("consumer is dead; waiting")
    consumer = start("consumer", "--name", name, "--count", 500)
    producer.says("a consumer is here")
    assert "500 blocks" in (said := consumer.ends())
    assert " 0 lost, 1 producer" in said
    producer.says("consumer is released; waiting")
    producer.signal(signal.SIGINT)
    assert "producer: " in producer.ends()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_spawn_starts_its_own_consumer(start, method):
    """One command, no name, every start method; all blocks arrive and nothing stays behind."""
    before = set(os.listdir("/dev/shm"))
    said = start("producer", "--spawn", "--start-method", method, "--count", 300, "--rate", 0).ends()
    assert "producer: 300 blocks" in said
    assert re.search("consumer: 300 blocks.* 0 lost", said)
    new = {entry for entry in set(os.listdir("/dev/shm")) - before if not entry.startswith("fmq-test-")}  # other tests'
    assert not [entry for entry in new if "fmq" in entry or "burst" in entry]


@pytest.mark.parametrize("which", ["producer", "consumer"])
def test_ctrl_c_ends_with_the_summary(start, name, which):
    """Status 0 and one line, without a traceback, also while there is nobody on the other side."""
    program = (
        start(which, "--name", name, "--count", 1000, "--rate", 1)
        if which == "producer"
        else start(which, "--name", name)
    )
    program.says("nobody")
    program.signal(signal.SIGINT)
    said = program.ends()
    assert re.search(rf"{which}: \d+ blocks in", said)
    assert "Traceback" not in said


@pytest.mark.integration
def test_a_second_producer_is_refused(start, name):
    """It says why, and the first goes on."""
    first = start("producer", "--name", name, "--rate", 10)
    first.says("writing")
    assert "writer already" in start("producer", "--name", name).ends(1)
    assert first.process.poll() is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--bytes", "0"], "--bytes: '0' is not a whole number from 1 to"),
        (["--capacity", "many"], "--capacity: 'many' is not"),
        (["--count", "-1"], "--count"),
        (["--name", "blocks"], "name='blocks'"),
        (["--bytes", str(2**30), "--capacity", str(2**30)], f"capacity={2**30} of {2**30 + 24} bytes each"),
    ],
)
@pytest.mark.parametrize("which", ["producer", "consumer"])
def test_bad_input_is_named(start, which, arguments, said):
    """The argument, its value and what to do; no traceback."""
    program = start(which, *arguments)
    program.process.wait()
    assert program.process.returncode != 0
    heard = program.process.stdout.read()
    assert said in heard
    assert "Traceback" not in heard


def test_another_size_of_block_is_told(start, name):
    """The queue that is there already decides; the message says which size to give."""
    start("producer", "--name", name, "--count", 1, "--bytes", 16).ends()
    assert "--bytes 32: the queue" in start("consumer", "--name", name, "--bytes", 32).ends(1)


def test_unlink_removes_what_a_crash_left(start, name):
    """And says so when there is nothing."""
    producer = start("producer", "--name", name)
    producer.says("writing")
    producer.signal(signal.SIGKILL)
    producer.ends(-signal.SIGKILL)
    start("consumer", "--name", name, "--unlink").ends()
    assert is_gone(name)
    assert name in start("producer", "--name", name, "--unlink").ends(1)
