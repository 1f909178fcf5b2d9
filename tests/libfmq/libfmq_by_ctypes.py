"""libfmq from Python by ctypes, as a program in C would call it."""

import ctypes
import os
import sys
from ctypes import byref, c_char_p, c_int64, c_uint64, c_void_p

FOREVER = 2**64 - 1
SYNCHRONIZED, UNSYNCHRONIZED, BROADCAST = 1, 2, 3


class Shape(ctypes.Structure):
    _fields_ = ("capacity", c_uint64), ("element_bytes", ctypes.c_uint32), ("flavour", ctypes.c_int32)


class Spans(ctypes.Structure):
    _fields_ = ("first", c_void_p), ("second", c_void_p), ("n_first", c_uint64), ("n_second", c_uint64)


class Library:
    """The shared library at a path; a failure raises OSError with what it says."""

    def __init__(self, path):
        self.c = ctypes.CDLL(path)
        self.c.fmq_queue_why.restype = c_char_p
        self.c.fmq_now.restype = c_uint64
        for name in ("available", "lost", "receive", "position"):
            getattr(self.c, f"fmq_queue_{name}").restype = c_int64

    def checked(self, result):
        if result < 0:
            raise OSError(-result, self.c.fmq_queue_why().decode())
        return result

    def made(self, function, *arguments):
        handle = c_void_p()
        self.checked(getattr(self.c, function)(*arguments, byref(handle)))
        return handle

    def create(self, name=None, dtype=b"<i8", size=8, capacity=8, flavour=SYNCHRONIZED):
        return self.made("fmq_queue_create", name, dtype, size, c_uint64(capacity), flavour)

    def open(self, name, dtype=b"<i8"):
        return self.made("fmq_queue_open", name, dtype)

    def writer(self, queue):
        return self.made("fmq_queue_writer", queue)

    def reader(self, queue):
        return self.made("fmq_queue_reader", queue)

    def write(self, end, *values, deadline=0):
        return self.c.fmq_queue_write(end, (c_int64 * len(values))(*values), c_uint64(len(values)), c_uint64(deadline))

    def read(self, end, n=1, deadline=0):
        """A list, or -errno."""
        values = (c_int64 * n)()
        result = self.c.fmq_queue_read(end, values, c_uint64(n), c_uint64(deadline))
        return result or list(values)

    def within(self, seconds):
        return self.c.fmq_now() + int(seconds * 1e9)


def write_and_wait(path, name, forks):
    """A program: writes 1, 2, 3 to a queue, tells so, and waits to be killed; perhaps with a child that lives on."""
    library = Library(path)
    writer = library.writer(library.open(name.encode()))
    assert library.write(writer, 1, 2, 3) == 0
    child = os.fork() if forks == "forks" else -1
    if child == 0:
        assert library.write(writer, 4) < 0  # it is the parent's
        print(os.getpid(), flush=True)  # by now it has given back what it inherited
    elif child < 0:
        print(child, flush=True)
    sys.stdin.read(1)


if __name__ == "__main__":
    write_and_wait(*sys.argv[1:])
