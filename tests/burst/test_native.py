"""Executions with a C function: the listener calls it without Python and without the GIL."""

import ctypes
import mmap
import subprocess
import threading

import numpy as np
import pytest

from burst import ErrorStatus, GeneralFailure, OutputShape
from burst.messages import NO_TIMING
from burst.wire import VERSIONS, ResultPacket
from fmq import clock

SOURCE = r"""
#define _GNU_SOURCE
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef struct { _Atomic uint32_t entered, open, gated, runs, busy_ms; int32_t status; } control; /* shared */
typedef struct { control *control; const unsigned char *source; unsigned char *target; uint64_t n; } job;

void post(_Atomic uint32_t *word) {
    atomic_fetch_add(word, 1);
    syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

int take(_Atomic uint32_t *word) {
    const struct timespec patience = {20, 0};
    uint32_t now;
    while (!(now = atomic_load(word)))
        if (syscall(SYS_futex, word, FUTEX_WAIT, 0, &patience, NULL, 0) && !atomic_load(word)) return 0;
    atomic_fetch_sub(word, 1);
    return 1;
}

void hold(control *c) { post(&c->entered), take(&c->open); }

static uint64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

int32_t increment(void *context) {
    job *j = context;
    control *c = j->control;
    if (atomic_load(&c->gated)) hold(c);
    for (uint64_t end = now_ms() + atomic_load(&c->busy_ms) + 1; atomic_load(&c->busy_ms) && now_ms() < end;) {}
    for (uint64_t i = 0; i < j->n; i++) j->target[i] = (unsigned char)(j->source[i] + 1);
    atomic_fetch_add(&c->runs, 1);
    return c->status;
}
"""


class Control(ctypes.Structure):
    """As in C; `python_runs` counts calls of `run`, and `go` starts whoever is to hold the GIL."""

    _fields_ = [(name, ctypes.c_uint32) for name in ("entered", "open", "gated", "runs", "busy_ms")]
    _fields_ += [("status", ctypes.c_int32), ("python_runs", ctypes.c_uint32), ("go", ctypes.c_uint32)]

    def at(self, name):
        return ctypes.addressof(self) + getattr(Control, name).offset


class Job(ctypes.Structure):
    """As in C."""

    _fields_ = [("control", ctypes.c_void_p), ("source", ctypes.c_void_p), ("target", ctypes.c_void_p)]
    _fields_ += [("n", ctypes.c_uint64)]


@pytest.fixture(params=VERSIONS)
def wire(request):
    """Everything here holds in each wire version."""
    return request.param


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The path of the compiled SOURCE."""
    folder = tmp_path_factory.mktemp("native")
    (folder / "native.c").write_text(SOURCE)
    command = ["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", folder / "native.c"]
    subprocess.run([*command, "-o", folder / "native.so"], check=True)
    return folder / "native.so"


@pytest.fixture
def native(library, increment):
    """A class of executions with a C function, its `control` block, and `post` and `wait` for words of that."""
    functions, page = ctypes.CDLL(library), mmap.mmap(-1, mmap.PAGESIZE)  # shared with children
    for function in (functions.post, functions.take, functions.hold):
        function.argtypes = [ctypes.c_void_p]

    class Native(increment):
        control = Control.from_buffer(page)

        def __init__(self, request):
            super().__init__(request)
            places = self.source.ctypes.data, self.target.ctypes.data, len(self.source)
            self.job = Job(ctypes.addressof(self.control), *places)
            address = ctypes.cast(functions.increment, ctypes.c_void_p).value
            self.native = address, ctypes.addressof(self.job)

        def run(self):
            super().run()
            self.control.python_runs += 1

        @classmethod
        def post(cls, word):
            functions.post(cls.control.at(word))

        @classmethod
        def wait(cls, word):
            assert functions.take(cls.control.at(word)), f"nobody posts {word}"

        @classmethod
        def hold_the_gil(cls):
            """Once `go` is posted, until `open` is."""
            cls.wait("go")
            ctypes.PyDLL(library).hold(ctypes.c_void_p(ctypes.addressof(cls.control)))

    return Native


def test_served_without_python(native, service, burst, memory):
    """While another thread of the device's process holds the GIL, a thousand requests are executed and answered. `run`
    is called when a request is bound, and not again.
    """

    class Holding(native):
        def __init__(self, request):
            super().__init__(request)
            threading.Thread(target=self.hold_the_gil).start()

    client, pool = burst(service(Holding)[1]), memory()
    array = pool.asarray(shape=8)
    assert client.run(pool).status is ErrorStatus.NONE
    native.post("go")
    native.wait("entered")
    try:
        for n in range(1000):
            array[:4] = n % 200
            assert client.run(pool, timeout=20) == (ErrorStatus.NONE, (OutputShape((4,)),), (None, None), 0)
            assert list(array[4:]) == [n % 200 + 1] * 4
    finally:
        native.post("open")
    assert (native.control.python_runs, native.control.runs) == (1, 1000)


@pytest.mark.parametrize("status", [*range(9), 9, 255, -1, 2**31 - 1, -(2**31)])
def test_statuses(native, host, burst, memory, wire, status):
    """What the function returns arrives; what is no status, and in version 1 what HAL 1.2 has no word for, arrives as
    GENERAL_FAILURE. No error has shapes or times, and the next success is one.
    """
    client, pool = burst(host(native)), memory()
    client.run(pool)
    native.control.status = status
    expected = status if 0 <= status <= (8 if wire > 1 else 4) else ErrorStatus.GENERAL_FAILURE
    for _ in range(2):
        result = client.run(pool)
        assert result.status == expected
        assert result.output_shapes == (() if expected else (OutputShape((4,)),))
    measured = client.encode(native.request(pool), measure=True)
    client.send(measured)
    assert (client.send(measured).timing == (None, None)) == (expected != 0)
    native.control.status = 0
    assert client.run(pool).output_shapes == (OutputShape((4,)),)
    assert native.control.python_runs == 2


def test_times(native, host, burst, memory):
    """Times of a C function are measured when asked for: the run itself on the device, all of it in the driver."""
    client, pool = burst(host(native)), memory()
    packets = [client.encode(native.request(pool), measure=measure) for measure in (True, False)]
    for packet in packets:
        client.send(packet)
    native.control.busy_ms = 20
    on_device, in_driver = client.send(packets[0]).timing
    assert 20_000 <= on_device <= in_driver < 20e6
    assert client.send(packets[1]).timing == (None, None)
    assert native.control.runs == 2


def start_gated(client, pool, native):
    """A request that runs until `open` is posted."""
    packet = client.encode(native.request(pool))
    client.send(packet)
    native.control.gated = 1
    client.start(packet)
    native.wait("entered")
    native.control.gated = 0


def test_memory_freed_while_it_runs(native, host, burst, memory, mappings):
    """free_memory returns at once; the memory stays mapped until the function has returned, and no longer than until
    the next request.
    """
    device = host(native)
    client, pool = burst(device), memory()
    start_gated(client, pool, native)
    client.free_memory(pool)
    device.wait_freed()
    assert mappings(pool) == 2
    native.post("open")
    assert client.receive(20).status is ErrorStatus.NONE
    assert list(pool.asarray(shape=8)) == [0, 1, 2, 3, 1, 2, 3, 4]
    assert client.run(memory()).status is ErrorStatus.NONE
    assert mappings(pool) == 1


@pytest.mark.parametrize("wire", [2])
def test_a_deadline_that_has_passed(native, host, burst, memory):
    """A request whose deadline passed before it was its turn does not run, bound or not, and its memory is not even
    asked for: MISSED_DEADLINE_PERSISTENT when it had passed already, else MISSED_DEADLINE_TRANSIENT.
    """
    client, pool, late = burst(host(native)), memory(), memory()
    missed = ResultPacket(ErrorStatus.MISSED_DEADLINE_TRANSIENT, (), NO_TIMING)
    client.start(client.encode(native.request(late)), deadline=clock.now())
    assert client.receive(20) == missed._replace(status=ErrorStatus.MISSED_DEADLINE_PERSISTENT)
    assert client.asked == []
    start_gated(client, pool, native)
    packet = client.encode(native.request(pool))
    by = clock.now() + 10**7
    client.start(packet, deadline=by)
    client.start(packet, deadline=clock.now() + 10**12)
    while clock.now() <= by:
        pass
    native.post("open")
    assert client.receive(20).status is ErrorStatus.NONE
    assert client.receive(20) == missed
    assert client.receive(20).status is ErrorStatus.NONE
    assert native.control.runs == 2


def test_stop_while_it_runs(native, host, burst, memory, mappings):
    """stop returns at once; the function ends on its memory, its result is dropped, and all is freed."""
    device, pool = host(native), memory()
    client = burst(device)
    start_gated(client, pool, native)
    stopper = threading.Thread(target=device.server.stop)
    stopper.start()
    stopper.join(20)
    waits, mapped = stopper.is_alive(), mappings(pool)
    native.post("open")
    stopper.join()
    assert not waits
    assert mapped == 2
    with pytest.raises(GeneralFailure, match="ended this burst"):
        client.receive(20)
    device.wait_ended()
    assert list(pool.asarray(shape=8)) == [0, 1, 2, 3, 1, 2, 3, 4]
    assert mappings(pool) == 1


def test_two_run_at_once(native, host, burst, memory):
    """Two bursts of one process are inside the function at the same time."""
    device, pools = host(native), [memory(), memory()]
    clients = [burst(device) for _ in pools]
    for client, pool in zip(clients, pools, strict=True):
        start_gated(client, pool, native)
    for _ in clients:
        native.post("open")
    for client in clients:
        assert client.receive(20).status is ErrorStatus.NONE


def test_shapes_that_change(native, host, burst, memory):
    """An execution whose shapes are not known beforehand is run by Python, C function or not."""

    class Dynamic(native):
        is_static = False

    client, pool = burst(host(Dynamic)), memory()
    for _ in range(3):
        assert client.run(pool).output_shapes == (OutputShape((4,)),)
    assert (native.control.python_runs, native.control.runs) == (3, 0)
    assert np.array_equal(pool.asarray(shape=8)[4:], [1, 2, 3, 4])
