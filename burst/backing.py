"""The kind of memory behind a descriptor from a peer, found out without waiting for a process, and who pays
for it.

A page of shared memory is charged to the process that touches it first. So memory with *holes* is paid by its reader,
and a device takes from another account only memory that has all its pages: `fill_holes` makes them on the client's
side.
"""

from __future__ import annotations

import os
from enum import IntEnum

from burst._core import lib as bursts
from fmq._core import lib

_BLOCK = 512  # bytes, the unit of st_blocks on every file system


class Backing(IntEnum):
    """MEMORY: a memfd, or a file of tmpfs. DISK: a file of a file system on a block device of this machine. FILE: a
    file of any other one, which another process or machine may serve.
    """

    OTHER = lib.FMQ_OTHER
    MEMORY = lib.FMQ_MEMORY
    HUGE_PAGES = lib.FMQ_HUGE_PAGES
    DMA_BUF = lib.FMQ_DMA_BUF
    FILE = lib.FMQ_FILE
    DISK = lib.FMQ_DISK


_BACKINGS = {int(backing): backing for backing in Backing}  # quicker than the constructor


def backing_of(fd: int) -> Backing:
    """Return what lies behind a descriptor of this process. Asks no file system that could leave the question
    unanswered.
    """
    return _BACKINGS.get(lib.fmq_backing(fd), Backing.OTHER)


def is_at_hand(fd: int) -> bool:
    """Return True if memory or a file on a disk of this machine is behind it: what a kernel reads and
    writes by itself.
    """
    return backing_of(fd) in {Backing.MEMORY, Backing.DISK}


def has_holes(fd: int) -> bool:
    """Return True if memory lacks pages, which the process that touches them first would pay."""
    found = os.fstat(fd)
    return found.st_blocks * _BLOCK < found.st_size


def fill_holes(fd: int) -> None:
    """Give memory all its pages, charged to this process. What cannot have them, the device will refuse."""
    bursts.burst_fill_holes(fd)
