"""Devices whose model works for as many microseconds as its first input says, and the same work in process.

The work is arithmetic in registers until the time is over: it takes as long on a cold processor as on a warm one, so
what a call takes beyond it is what the way to the device costs. "spinning_device:Spinning" is a C function that the
listener calls, as the litert and onnxruntime devices are; "spinning_device:SpinningInPython" is called by Python.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from native_device import Context, Native, compiled

if TYPE_CHECKING:
    from collections.abc import Callable

SOURCE = r"""
#include <stddef.h>
#include <stdint.h>
#include <time.h>
typedef struct { const float *a, *b; float *sum; size_t n; } Add;
static volatile double sink;
static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
int32_t add(void *context) {
    const Add *it = context;
    uint64_t end = now() + (uint64_t)(it->a[0] * 1e3);
    double x = 1;
    while (it->a[0] > 0 && now() < end)
        for (int i = 0; i < 50; i++) x = x * 1.0000001 + 1e-9;
    sink = x;
    it->sum[0] = it->a[0];
    return 0;
}
"""


class Spinning(Native):
    """The listener calls the C function."""

    name = "spinning"
    source = SOURCE


class SpinningInPython(Spinning):
    """Python calls it, through ctypes."""

    name = "spinning-python"
    is_native = False


def work_of(microseconds: float) -> Callable[[], int]:
    """The same function with memory of its own, called through ctypes, as a program calls its own runtime."""
    arrays = np.array([[microseconds, 0, 0, 0]], np.float32), np.zeros((1, 4), np.float32), np.zeros((1, 4), np.float32)
    context = Context(*(array.ctypes.data for array in arrays), 4)
    function = compiled(SOURCE)
    call = partial(function, ctypes.addressof(context))
    call.keeps = arrays, context  # type: ignore[attr-defined]
    return call
