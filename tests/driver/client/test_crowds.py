"""A device that many processes want at the very same moment: one is started, whoever dies meanwhile."""

import subprocess
import sys

import pytest

CROWD = 32
PATIENCE = 60.0  # seconds: as many processes wait for two processors
# Has imported everything before it forks, so that its children come to `connect` within microseconds of each other.
ZYGOTE = """
import os, signal, subprocess, sys, threading, driver
real = subprocess.Popen

class FirstDies(real):
    def __init__(self, *arguments, **options):
        moment, path = sys.argv[2:]
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return super().__init__(*arguments, **options)
        os.write(file, str(os.getpid()).encode())
        if moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer(float(moment), os.kill, (os.getpid(), signal.SIGKILL)).start()
        super().__init__(*arguments, **options)
        threading.Event().wait()  # holds the lock until it is killed

if len(sys.argv) > 2:
    subprocess.Popen = FirstDies
go, end = os.pipe(), os.pipe()
children = []
for _ in range(int(sys.argv[1])):
    if pid := os.fork():
        children.append(pid)
        continue
    os.close(go[1]), os.close(end[1])
    os.read(go[0], 1)  # until the zygote closes its end, for all at once
    try:
        device = driver.connect()
        answer = f"{device.service_pid} {device.engine_pid}"
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    os.write(1, f"{os.getpid()} {answer}\\n".encode())
    os.read(end[0], 1)  # connected until then
    os._exit(0)
os.write(1, (" ".join(map(str, children)) + "\\n").encode())
sys.stdin.read(1)
os.close(go[1])
sys.stdin.read(1)
os.close(end[1])
for pid in children:
    os.waitpid(pid, 0)
"""


class Crowd:
    """Processes that wait, connect together when told to, and stay connected until the end of the block."""

    def __init__(self, count, *moment_and_file):
        self._zygote = subprocess.Popen(
            [sys.executable, "-c", ZYGOTE, str(count), *moment_and_file],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pids = {int(pid) for pid in self._zygote.stdout.readline().split()}
        assert len(self.pids) == count

    def _say(self):
        self._zygote.stdin.write("!")
        self._zygote.stdin.flush()

    def go(self):
        self._say()

    def answers(self, killed=None):
        """What each process says of its device, by its number. killed: the file that names the one that cannot."""
        found = {}
        while len(found) < len(self.pids) - bool(killed):
            pid, answer = self._zygote.stdout.readline().rstrip("\n").split(" ", 1)
            found[int(pid)] = answer
        if killed:
            assert self.pids - found.keys() == {int(killed.read_text())}
        return found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._say()
        self._zygote.communicate(timeout=PATIENCE)


def test_a_crowd_gets_one_device(place):
    """Thirty-two processes connect at the same moment in a fresh runtime directory: one service and one engine."""
    with Crowd(CROWD) as crowd:
        crowd.go()
        answers = set(crowd.answers().values())
        assert len(answers) == 1, answers
        assert sorted(map(int, answers.pop().split())) == place.pids()


# Where the process that starts the device is killed: before it starts a process, or so many seconds after that began.
MOMENTS = "before", 0.0, 0.01, 0.03


@pytest.mark.integration
@pytest.mark.parametrize(
    "moment", [*MOMENTS, *(pytest.param(n / 400 + 1e-3, marks=pytest.mark.stress) for n in range(40))], ids=str
)
def test_the_starter_of_a_crowd_is_killed(place, moment):
    """kill -9 of the process that starts the device, in the middle: the others have one service and one engine."""
    with Crowd(CROWD, str(moment), str(place.path / "killed")) as crowd:
        crowd.go()
        answers = crowd.answers(killed=place.path / "killed")
        assert len(set(answers.values())) == 1, answers
        assert sorted(map(int, answers.popitem()[1].split())) == place.pids()
