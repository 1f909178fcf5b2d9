"""DMA-BUFs: memory that a camera or a GPU shares with the CPU, whose caches the kernel keeps in step."""

from __future__ import annotations

import fcntl
import os
import stat
import struct

READ, WRITE, END = 1, 2, 4  # flags of an access
_SYNC = 0x40086200  # DMA_BUF_IOCTL_SYNC


def is_dma_buf(fd: int) -> bool:
    """Return True if the descriptor is of a DMA-BUF: nothing else takes its ioctl."""
    if stat.S_IFMT(os.fstat(fd).st_mode):  # a file, a device, a pipe: something with a name
        return False
    try:
        sync_dma_buf(fd, READ)
        sync_dma_buf(fd, READ | END)
    except OSError:
        return False
    return True


def sync_dma_buf(fd: int, flags: int) -> None:
    """Tell the kernel that the CPU begins an access, or with END that it is done. Raise OSError."""
    while True:
        try:
            fcntl.ioctl(fd, _SYNC, struct.pack("Q", flags))
        except (InterruptedError, BlockingIOError):
            continue
        return
