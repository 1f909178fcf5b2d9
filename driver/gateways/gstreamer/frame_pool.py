"""Memory for frames that the element offers to the one before it: anonymous files, which a device can map as well."""

from __future__ import annotations

import os

import gi

gi.require_version("GstAllocators", "1.0")
gi.require_version("GstVideo", "1.0")
from gi.repository import Gst, GstAllocators, GstVideo  # noqa: E402 (after their versions)

_LEAST = 4
"""Buffers of a pool: one is written, one is looked at, and two may lie in a queue."""

_SEALS = 0x0001 | 0x0002 | 0x0004  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW


class FrameAllocator(Gst.Allocator):
    """Each memory is a file of its own, sealed in its size, that stays mapped as long as it lives."""

    def __init__(self) -> None:
        super().__init__()
        self._of_descriptors = GstAllocators.FdAllocator.new()

    def do_alloc(self, size: int, params: Gst.AllocationParams | None) -> Gst.Memory | None:
        """Allocate memory that begins on a page, which is more than any alignment that `params` ask for."""
        import fcntl

        fd = os.memfd_create("burstinfer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(fd)
            return None
        flags = GstAllocators.FdMemoryFlags.KEEP_MAPPED
        return GstAllocators.FdAllocator.alloc(self._of_descriptors, fd, size, flags)  # owns fd


def offer(query: Gst.Query) -> Gst.BufferPool | None:
    """Answer an allocation query with a pool of such memory; None: its caps say no size."""
    caps, _wants_pool = query.parse_allocation()
    info = None if caps is None else GstVideo.VideoInfo.new_from_caps(caps)
    if info is None:
        return None
    allocator, pool = FrameAllocator(), GstVideo.VideoBufferPool()
    config = pool.get_config()
    Gst.BufferPool.config_set_params(config, caps, info.size, _LEAST, 0)
    Gst.BufferPool.config_set_allocator(config, allocator, None)
    pool.set_config(config)
    query.add_allocation_param(allocator, None)  # most elements take the allocator from here, not from the pool
    query.add_allocation_pool(pool, info.size, _LEAST, 0)
    return pool


def descriptor_of(buffer: Gst.Buffer) -> tuple[int, int, int] | None:
    """(descriptor, offset, end) of a buffer that lies in one memory with a descriptor; None: it does not."""
    if buffer.n_memory() != 1:
        return None
    memory = buffer.peek_memory(0)
    if not GstAllocators.is_fd_memory(memory):
        return None
    size, offset, _most = memory.get_sizes()
    return GstAllocators.fd_memory_get_fd(memory), offset, offset + size
