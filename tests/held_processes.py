"""Processes that are not our children, for tests that stop and kill them."""

import contextlib
import os
import re
import select
import signal
from pathlib import Path

from waiting import PATIENCE, until


class HeldProcess:
    """One that is held, so that its number cannot come to mean another."""

    def __init__(self, pid):
        self.pid, self.fd = pid, os.pidfd_open(pid)

    def signal(self, number):
        """And for SIGSTOP, waits until all of its threads have stopped."""
        signal.pidfd_send_signal(self.fd, number)
        if number == signal.SIGSTOP:
            until(lambda: all(state(self.pid, thread) == "T" for thread in os.listdir(f"/proc/{self.pid}/task")))

    def has_ended(self, seconds=PATIENCE):
        """Now, or within that time."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(seconds * 1e3))

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
            assert self.has_ended()
        os.close(self.fd)


def is_asleep(pid):
    """Whether all threads of a process sleep."""
    return all(state(pid, thread) == "S" for thread in os.listdir(f"/proc/{pid}/task"))


def switches(pid, *threads):
    """How often threads of a process, or all, have begun to run: none does that unseen."""
    statuses = (
        Path(f"/proc/{pid}/task/{one}/status").read_text() for one in threads or os.listdir(f"/proc/{pid}/task")
    )
    return sum(int(word) for text in statuses for word in re.findall(r"ctxt_switches:\s+(\d+)", text))


def state(pid, thread=None):
    """A thread's state, R, S or T, as the kernel tells it."""
    return Path(f"/proc/{pid}/task/{thread or pid}/stat").read_text().rpartition(")")[2].split()[0]
