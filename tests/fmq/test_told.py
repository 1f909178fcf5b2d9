"""An end that is linked to its peer sleeps on its wait word alone; its own process tells it of its peer's life."""

import os
import platform
import socket
import threading
from pathlib import Path

import pytest
from waiting import PATIENCE, until

import fmq
from fmq.region import Region

FUTEX = {"x86_64": "202", "aarch64": "98"}.get(platform.machine())
ONE_WORD, SEVERAL = (FUTEX, "0x9"), "449"  # FUTEX_WAIT_BITSET of memory that is shared; futex_waitv
END = {"released": fmq.Closed, "dead": fmq.PeerDied}


class Linked:
    """A reader, and the page and the socket of its peer: this process has both, so the socket never hangs up."""

    def __init__(self, memory):
        self.queue = fmq.MessageQueue.create("u1", 8, memory=memory)
        self.writer, self.reader = self.queue.writer(), self.queue.reader(follows=True)
        self.page, self.sockets, self.told = fmq.LifePage(), socket.socketpair(), []
        region = Region.from_fd(os.dup(self.page.fd), fmq.LifePage.nbytes, writable=False)
        region.close()
        self.reader.follow(region, self.sockets[0].fileno())
        self.thread = threading.Thread(target=self._read)

    def _read(self):
        try:
            self.told.append(self.reader.read(1).tolist())
        except fmq.FmqError as error:
            self.told.append(type(error))

    @property
    def sleeps_on(self):
        """ONE_WORD, SEVERAL, or None while it runs or waits for something else."""
        words = Path(f"/proc/self/task/{self.thread.native_id}/syscall").read_text().split()
        return SEVERAL if words[0] == SEVERAL else ONE_WORD if (words[0], *words[2:3]) == ONE_WORD else None

    def close(self):
        for each in (self.reader, self.writer, self.queue, self.page, *self.sockets):
            each.close()
        if self.thread.ident:
            self.thread.join(PATIENCE)


@pytest.fixture
def asleep(request):
    """One whose thread sleeps."""
    linked = Linked(getattr(request, "param", "memfd"))
    try:
        linked.thread.start()
        until(lambda: linked.sleeps_on)
        yield linked
    finally:
        linked.close()


pytestmark = pytest.mark.skipif(FUTEX is None, reason="the numbers of system calls are not known here")


@pytest.mark.parametrize(("asleep", "on"), [("memfd", ONE_WORD), ("posix", SEVERAL)], indirect=["asleep"])
def test_it_sleeps_on_one_word_where_no_one_can_cut_that_off(asleep, on):
    """Memory that a peer may truncate has the three words: a futex that is cut off is woken by nobody."""
    assert asleep.sleeps_on == on
    asleep.writer.write([7])
    asleep.thread.join(PATIENCE)
    assert asleep.told == [[7]]


@pytest.mark.parametrize("end", END)
def test_its_peers_end_wakes_it(asleep, end):
    """Although the socket stays open and the wait word is nobody's to wake: the bridge watches the peer's life."""
    assert asleep.sleeps_on == ONE_WORD
    asleep.page.die() if end == "dead" else asleep.page.close()
    asleep.thread.join(PATIENCE)
    assert asleep.told == [END[end]]


def test_the_end_of_the_socket_wakes_it(asleep):
    """Where the kernel could not mark the page."""
    assert asleep.sleeps_on == ONE_WORD
    asleep.sockets[1].close()
    asleep.thread.join(PATIENCE)
    assert asleep.told == [fmq.PeerDied]


def test_it_can_be_closed(asleep):
    """By another thread, as any end."""
    assert asleep.sleeps_on == ONE_WORD
    asleep.reader.close()
    asleep.thread.join(PATIENCE)
    assert asleep.told == [fmq.Closed]


def test_an_end_that_is_closed_is_told_nothing():
    """Its bell is taken down with the link, and the peer's life is none of its business any more."""
    linked = Linked("memfd")
    linked.reader.close()
    linked.page.die()
    linked.close()
