"""Accounts that share one engine, because its device exists once: none keeps the others from running."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import accounts
import pytest

pytestmark = pytest.mark.integration

SERVER, GROUP, VICTIM, ATTACKER = 61011, 61901, 61012, 61013  # numbers need no account
SCARCE = "burst_test_devices.odd:Scarce"  # two slots; an execution takes as many seconds as its input says, to the end
CLIENT = """
import json, sys, threading, time
import numpy as np
import driver
builder = driver.ModelBuilder()
X = np.ones((1, 4), np.float32)
builder.output(builder.operation("ADD", builder.input("float32", (1, 4)), X, 0))
model = builder.build()
def connect():
    device = driver.connect(sys.argv[1])
    return device, device.prepare(model)
device, prepared = connect()
bursts = [prepared.burst() for _ in range(4)]
def waiting():
    return device.stats()["priorities"]["medium"]["waiting"]
def hold(burst, seconds):
    while True:
        burst.run(X * seconds)
def hold_all(seconds):
    for burst in bursts:
        threading.Thread(target=hold, args=(burst, seconds), daemon=True).start()
    while not waiting():
        pass
def worst_of(times):
    worst = 0.0
    for _ in range(times):
        begin = time.monotonic()
        bursts[0].run(X * 0, timeout=30)
        worst = max(worst, time.monotonic() - begin)
    return worst
print(flush=True)
for line in sys.stdin:
    out = None
    exec(line)
    print(json.dumps(out), flush=True)
"""


@pytest.fixture
def scarce():
    """The socket of such a device under an account of its own, open to the group."""
    if why := accounts.missing():
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="burst-t-", dir="/tmp") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o755)
        os.chown(folder, SERVER, SERVER)
        words = [sys.executable, "-m", "driver.cli", "serve", SCARCE, "--dir", f"{folder}/run", "--group", str(GROUP)]
        log = stack.enter_context(open(folder / "log", "wb"))
        process = stack.enter_context(
            subprocess.Popen(
                accounts.words_as(SERVER, (GROUP,), words),
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"HOME": name},
                cwd="/",
            )
        )
        stack.callback(process.kill)
        _, is_served, address = process.stdout.readline().decode().partition(" is served at ")
        assert is_served, (folder / "log").read_text()
        yield address.strip()


@contextlib.contextmanager
def client(uid, address):
    """A process of that account with four bursts; it runs a line of Python, and answers what that leaves in `out`."""
    words = accounts.python_as(uid, (GROUP,), CLIENT, address)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd="/", **pipes) as process:
        try:
            assert process.stdout.readline() == "\n"

            def do(line):
                print(line, file=process.stdin, flush=True)
                return json.loads(process.stdout.readline())

            yield do
        finally:
            process.kill()


def test_executions_that_nothing_ends_leave_a_slot_to_the_others(scarce):
    """Four bursts of one account, each at an execution of five seconds after the other, hold one of two slots:
    executions of another account begin at once.
    """
    with client(VICTIM, scarce) as victim, client(ATTACKER, scarce) as attacker:
        assert victim("worst_of(20)") is None
        assert attacker("hold_all(5)") is None
        assert victim("out = worst_of(300)") < 1.0
        assert attacker("out = waiting()") > 0


def test_estimates_that_lie_are_believed_once(scarce):
    """Executions that were brief until they were estimated to be so take both slots once, for a second; then one. An
    account that comes again still owes what it used.
    """
    with client(VICTIM, scarce) as victim, client(ATTACKER, scarce) as attacker:
        assert victim("worst_of(20)") is None
        assert attacker("out = [burst.run(X * 0).status.name for burst in bursts * 20]") == ["NONE"] * 80
        assert attacker("hold_all(1)") is None
        assert victim("out = worst_of(1)") < 5.0
        assert victim("out = worst_of(300)") < 0.9
        owes = attacker("out = device.stats()['share']")
        assert owes > 0.1
    with client(ATTACKER, scarce) as attacker:
        assert attacker("out = device.stats()['share']") >= owes / 2


def test_what_executions_take_is_learnt_for_each_account(scarce):
    """Two accounts prepare equal models, which are one on the device. Executions of one take a second, by their inputs;
    those of the other are neither refused for that, with a deadline before it, nor held back.
    """
    with client(VICTIM, scarce) as victim, client(ATTACKER, scarce) as attacker:
        assert attacker("out = [bursts[0].run(X).status.name for _ in range(3)]") == ["NONE"] * 3
        run = "out = [bursts[0].run(X * 0, timeout=0.5).status.name for _ in range(20)]"
        assert victim(run) == ["NONE"] * 20


def test_threads_of_low_priority_are_not_nice_where_accounts_share_an_engine(scarce):
    """Beside busy programs a nice thread keeps its slot, and the queue's lock, for long: others would wait for it."""
    with client(ATTACKER, scarce) as attacker:
        assert attacker("low = device.prepare(model, priority='low').burst(); low.run(X * 0)") is None
        engine = attacker("out = device.engine_pid")
        stats = [
            (task / "stat").read_text().rpartition(") ")[2].split() for task in Path(f"/proc/{engine}/task").iterdir()
        ]
        assert {words[16] for words in stats} == {"0"}
