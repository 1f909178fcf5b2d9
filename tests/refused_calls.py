"""System calls that the kernel refuses to this thread and to those that it starts, as an old one or a container."""

import ctypes
import os
import struct

FUTEX_WAITV = 449  # the same number on every processor
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2
_LOAD_NUMBER, _IS_EQUAL, _RETURN = 0x20, 0x15, 0x06
_THIRD = 32  # where the third argument lies
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000


def refuse(error, *numbers):
    """By a seccomp filter: each of these calls fails with that error from now on, and for good."""
    steps = [(_LOAD_NUMBER, 0, 0, 0)]
    steps += [(_IS_EQUAL, len(numbers) - n, 0, number) for n, number in enumerate(numbers)]
    _filter([*steps, (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERROR | error)])


def refuse_option(error, number, option):
    """The call of that number fails so where its third argument is `option`."""
    steps = [
        (_LOAD_NUMBER, 0, 0, 0),
        (_IS_EQUAL, 0, 3, number),
        (_LOAD_NUMBER, 0, 0, _THIRD),
        (_IS_EQUAL, 0, 1, option),
    ]
    _filter([*steps, (_RETURN, 0, 0, _ERROR | error), (_RETURN, 0, 0, _ALLOW)])


def _filter(steps):
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
    assert libc.prctl(_SECCOMP, _FILTER, program, 0, 0) == 0, os.strerror(ctypes.get_errno())
