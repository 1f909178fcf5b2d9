"""DMA-BUFs of the kernel's own, where it has /dev/udmabuf."""

import fcntl
import os

import numpy as np


def udmabuf(nbytes):
    """A DMA-BUF on a memfd of whole pages."""
    memfd = os.memfd_create("udmabuf", os.MFD_ALLOW_SEALING)
    os.ftruncate(memfd, nbytes)
    try:
        return udmabuf_on(memfd)
    finally:
        os.close(memfd)


def udmabuf_on(memfd):
    """A DMA-BUF on that one, which must allow sealing."""
    fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    asked = np.array([memfd, 1, 0, 0, 0, 0], np.uint32)  # UDMABUF_FLAGS_CLOEXEC; offset and size of 64 bits each
    asked[2:].view(np.uint64)[:] = 0, os.fstat(memfd).st_size
    with open("/dev/udmabuf", "r+b", buffering=0) as maker:
        return fcntl.ioctl(maker, 0x40187542, asked.tobytes())
