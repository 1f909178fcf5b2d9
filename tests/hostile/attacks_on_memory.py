"""Attacks by memory and descriptors: pools, holes, files that do not answer, tables that are shared."""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
from enemy import (
    PATIENCE,
    REFUSED,
    Line,
    add,
    asked,
    attack,
    convolution,
    execute,
    hold,
    lines,
    memfd,
    own_burst,
    register,
    sealed_model,
    structure,
    together,
)
from unsealed import truncate_queues

import driver
from burst import Controller, Memory, Request, RequestArgument
from burst.channel import pack
from driver.protocol.lane_codec import launch_behind

if TYPE_CHECKING:
    from collections.abc import Iterator


def silent() -> int:
    """The descriptor of a file that answers no read. It stays open: its close would not be answered either."""
    return os.open(sys.argv[3], os.O_RDWR | os.O_CLOEXEC)


@attack("C1")
def truncated_queues(address: str) -> Iterator[object]:
    """Bursts on queues without seals, truncated while the listener sleeps."""
    while True:
        with driver.connect(address) as device, device.prepare(add()) as prepared:
            with suppress(*REFUSED):
                truncate_queues(prepared)
            with suppress(*REFUSED):
                prepared.burst(memory="posix")
            yield


@attack("C2a")
def many_pools(address: str) -> Iterator[object]:
    """40,000 pools of one page each, on a plain path; the next path takes as many."""
    fd, held = memfd(40_000 * 4096), []
    while True:
        with suppress(*REFUSED):
            held.append(line := Line(address))
            plain = line.opened("lane")
            held.append(plain)
            for slot in range(40_000):
                register(plain, slot, ["mmap_fd", 4096, 3, 4096 * slot], fd)
            yield execute(plain, 1, [0, 0, 16, []], [0, 16, 16, []], slots=[0])
        hold(1.0)
        if len(held) > 8:
            for one in held:
                one.close()
            held.clear()
        yield


@attack("C2a")
def sparse_pools(address: str) -> Iterator[object]:
    """Pools of 2^46, 2^45, … bytes of an empty memfd, until the engine has no addresses left."""
    fd = memfd(2**46)
    while True:
        with Line(address) as line, line.opened("lane") as plain:
            slots = count()
            for size in range(46, 20, -1):
                for _ in range(4):
                    register(plain, next(slots), ["mmap_fd", 2**size, 3, 0], fd)
            yield execute(plain, 1, [0, 0, 16, []], [0, 16, 16, []], slots=[0])
            hold()


@attack("C2b")
def no_map_for_a_fault(address: str) -> Iterator[object]:
    """As many mappings as there may be, then an execution on a pool that was truncated."""
    pages = memfd(60_000 * 4096)
    while True:
        with Line(address) as line, line.opened("lane") as plain:
            model, pool = line.prepared(add()), memfd(4096, 0)
            register(plain, 0, ["ashmem", 4096, False], pool)
            arguments = [0, 0, 16, []], [0, 64, 16, []]
            execute(plain, model, *arguments, slots=[0])
            for slot in range(1, 60_000):
                register(plain, slot, ["mmap_fd", 4096, 3, 4096 * slot], pages)
            os.ftruncate(pool, 0)
            yield execute(plain, model, *arguments, slots=[0])
            hold()
            os.close(pool)


@attack("C2c")
def many_fences(address: str) -> Iterator[object]:
    """Executions that wait for 64 copies of one eventfd each, from many connections, and idle connections beside."""
    never, pool = os.eventfd(0), memfd(4096)
    while True:
        held = lines(address, 60)
        for line in list(held):
            with suppress(*REFUSED):
                model, fenced = line.prepared(add()), line.opened("lane")
                held.append(fenced)
                register(fenced, 0, ["ashmem", 4096, True], pool)
                request = pack([model, [[0, 0, 16, []]], [[0, 64, 16, []]], [0], False, None])
                for turn in range(16):
                    fenced.send_raw(launch_behind(64, turn, None, None, request), [never] * 64)
                    fenced.receive(PATIENCE).close()
        idle = lines(address, 358)
        yield
        hold()
        for one in (*held, *idle):
            one.close()


@attack("H1")
def holes(address: str) -> Iterator[object]:
    """An ADD from a hole of 256 MiB into another one, again and again on new memory."""
    n = 2**26
    while True:
        with Line(address) as line, line.opened("lane") as plain:
            model = line.prepared(add(n))
            for slot in range(8):
                fd = memfd(8 * n)
                register(plain, slot, ["ashmem", 8 * n, True], fd)
                os.close(fd)
                yield execute(plain, model, [0, 0, 4 * n, []], [0, 4 * n, 4 * n, []], slots=[slot])


def hole_model(nbytes: int) -> tuple[int, list[int]]:
    """x + a constant of so many bytes, none of which was ever written."""
    n = nbytes // 4
    operands = [
        [3, [1], 0.0, 0, 3, None, None, 1],
        [3, [n], 0.0, 0, 2, [0, nbytes], None, 1],
        [0, [], 0.0, 0, 2, [nbytes, 4], None, 1],
        [3, [n], 0.0, 0, 4, None, None, 0],
    ]
    raw = structure([1, False, 1], [4, 1, [0], [3]], *operands, ["ADD", [0, 1, 2], [3]])
    return sealed_model(raw, nbytes + 64)


@attack("H2")
def sparse_models(address: str) -> Iterator[object]:
    """A sealed model of which 8 KiB are there and 1.5 GiB are not, prepared twice so that both are compared."""
    for size in (3 << 29, 1 << 30, 1 << 28, 1 << 27):
        fd, where = hole_model(size)
        other, _ = hole_model(size)
        with suppress(*REFUSED), Line(address) as line, Line(address) as second:
            line.prepare(fd, where)
            while True:
                yield second.prepare(other, where)
        yield
    while True:
        with suppress(*REFUSED), Line(address) as line:
            line.prepare(fd, where)
        yield


@attack("H5", "silent_file")
def silent_pools(address: str) -> Iterator[object]:
    """Executions on a pool in a file that answers no read."""
    fd = silent()
    while True:
        with Line(address) as line, line.opened("lane") as plain:
            model = line.prepared(add())
            register(plain, 0, ["mmap_fd", 4096, 3, 0], fd)
            plain.send_raw(asked(model, [[0, 0, 16, []]], [0, 16, 16, []], [0]))
            with suppress(*REFUSED):
                plain.receive(1.0).close()
            yield


@attack("new", "silent_file")
def silent_bursts(address: str) -> Iterator[object]:
    """A burst whose pool is in a file that answers no read: the callback hands it over."""
    fd = silent()
    while True:
        device = driver.connect(address)
        memory = Memory.adopt(fd, 4096, sealed=False)
        prepared = device.prepare(add())
        controller = Controller(prepared.configure_burst(0.0))
        request = Request((RequestArgument(offset=0, length=16),), (RequestArgument(offset=64, length=16),), (memory,))
        with suppress(*REFUSED):
            controller.send(controller.encode(request), timeout=0.5)
        yield
        device.close()


@attack("new", "silent_file")
def silent_models(address: str) -> Iterator[object]:
    """A model in a file that answers neither a read nor the close of a descriptor."""
    fd = silent()
    while True:
        with Line(address) as line:
            line.channel.send([1, "prepare", [0, 4096], None, None, "fast_single_answer", None, 1], [fd])
            with suppress(*REFUSED):
                line.channel.receive(1.0).close()
            yield


@attack("new", "silent_file")
def silent_contexts(address: str) -> Iterator[object]:
    """A file that does not answer its close, sent on a burst's context, whose thread serves all bursts."""
    fd = silent()
    while True:
        with suppress(*REFUSED), driver.connect(address) as device, device.prepare(add()) as prepared:
            context, held = own_burst(prepared)
            context.send(["free_memory", 0], [fd])
            yield
            hold()
            context.close()
            del held
        yield


def lingering() -> int:
    """A TCP socket whose last close waits an hour for a peer that does not read."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    _unread.append(far)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
    near.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            near.send(bytes(65536))
    near.setblocking(True)
    return near.detach()


_unread: list[socket.socket] = []


@attack("new")
def lingering_contexts(address: str) -> Iterator[object]:
    """A socket whose close waits for an hour, sent on a burst's context, whose thread serves all bursts."""
    held = []
    while True:
        device = driver.connect(address)
        prepared = device.prepare(add())
        context, rest = own_burst(prepared)
        held.append((device, prepared, rest))
        fd = lingering()
        for _ in range(100):  # so that our descriptor is closed before the device's, which then is the last
            context.send(["free_memory", 0])
        context.send(["free_memory", 0], [fd])
        threading.Thread(target=os.close, args=(fd,), daemon=True).start()
        yield
        if len(held) > 20:
            held.pop(0)[0].close()


@attack("new")
def lingering_models(address: str) -> Iterator[object]:
    """A socket whose close waits for an hour in place of a model: the validating thread closes it."""
    while True:
        line = Line(address)
        fd = lingering()
        for _ in range(50):
            line.channel.send([1, "turns"])
        line.channel.send([1, "prepare", [0, 4096], None, None, "fast_single_answer", None, 1], [fd])
        threading.Thread(target=os.close, args=(fd,), daemon=True).start()
        yield
        with suppress(*REFUSED):
            line.channel.receive(0.2).close()


@attack("H6")
def life_words(address: str) -> Iterator[object]:
    """128 plain paths on each of 16 connections: each has a life word."""
    while True:
        held = lines(address, 16)
        for line in held[:16]:
            with suppress(*REFUSED):
                for _ in range(128):
                    held.append(line.opened("lane"))
        yield
        hold()
        for one in held:
            one.close()


@attack("H7")
def guards(address: str) -> Iterator[object]:
    """5,000 pools that can be truncated, so that the engine guards each mapping."""
    fd = memfd(4096, 0)
    while True:
        with Line(address) as line, line.opened("lane") as plain:
            for slot in range(5000):
                register(plain, slot, ["ashmem", 4096, False], fd)
            yield execute(plain, 1, [0, 0, 16, []], [0, 16, 16, []], slots=[0])
            hold()


@attack("M2")
def small_buffers(address: str) -> Iterator[object]:
    """Buffers of 4 bytes each, without an end."""
    while True:
        with Line(address) as line:
            model = line.prepared(add(1))
            for number in count():
                line.call("allocate", [], [model], [[0, 0, 1.0]], [])
                if not number % 1000:
                    yield


@attack("M2")
def many_plans(address: str) -> Iterator[object]:
    """A model of 2,000 inputs, each request bound anew and its plan kept, on many paths."""
    m = driver.ModelBuilder()
    inputs = [m.input("float32", (1,)) for _ in range(2000)]
    total = inputs[0]
    for one in inputs[1:]:
        total = m.operation("ADD", total, one, 0)
    m.output(total)
    model, fd = m.build(), memfd(4096)
    while True:
        with Line(address) as line:
            number = line.prepared(model)
            for _ in range(64):
                plain = line.opened("lane")
                register(plain, 0, ["ashmem", 4096, True], fd)
                for offset in range(128):
                    arguments = [[0, 4 * offset, 4, []]] * 2000
                    yield execute(plain, number, *arguments, [0, 4092, 4, []], slots=[0])


@attack("M2")
def many_models(address: str) -> Iterator[object]:
    """Models of 20,000 operations, no two of them equal, all kept."""
    while True:
        with Line(address) as line:
            yield
            for number in range(1000):
                fd, where = sealed_chain(20_000, number)
                line.prepare(fd, where)
                os.close(fd)
                yield


def sealed_chain(operations: int, constant: float = 0.0) -> tuple[int, list[int]]:
    """x + c + c + …, a valid model: its memory, and where the structure is."""
    tensor = [3, [1], 0.0, 0]
    operands = [[*tensor, 1, None, None, 1], [*tensor, 3, [0, 4], None, operations]]
    operands += [[1, [], 0.0, 0, 3, [64, 4], None, operations]]
    operands += [[*tensor, 0, None, None, 1] for _ in range(operations - 1)] + [[*tensor, 2, None, None, 0]]
    steps = [["ADD", [2 + n if n else 0, 1, 2], [3 + n]] for n in range(operations)]
    raw = structure([1, False, 1], [len(operands), operations, [0], [2 + operations]], *operands, *steps)
    fd, where = sealed_model(struct.pack("f124x", constant) + raw)
    return fd, [128, where[1] - 128]


@attack("new")
def nonsense_by_slot(address: str) -> Iterator[object]:
    """Memory of an unknown kind under new slots: the engine remembers an error for each."""
    with open(os.devnull, "rb") as null:
        while True:
            with Line(address) as line, line.opened("lane") as plain:
                for slot in range(300_000):
                    register(plain, slot, ["x" * 100, slot], null.fileno())
                    if not slot % 1000:
                        yield


@attack("new")
def descriptors_on_their_way(address: str) -> Iterator[object]:
    """Answers with descriptors that the client does not read: the kernel counts them for the device's account."""
    while True:
        held = []
        with suppress(*REFUSED):
            device = driver.connect(address)
            prepared = device.prepare(add())
            held += [device, *(prepared.burst() for _ in range(32))]
        for line in lines(address, 200):
            held.append(line)
            line.channel.socket.setblocking(False)
            with suppress(*REFUSED):
                for number in range(400):
                    line.channel.send([number, "traces", 0])
        yield
        hold()
        for one in held:
            one.close()


@attack("new")
def all_buffers(address: str) -> Iterator[object]:
    """As much of the device's memory as it gives, by large buffers, from as many connections as need be."""
    while True:
        held: list[Line] = []
        n = 2**24
        for line in lines(address, 16):
            held.append(line)
            with suppress(*REFUSED):
                model = line.prepared(add(n))
                while True:
                    line.call("allocate", [], [model], [[0, 0, 1.0]], [])
        yield
        hold()
        for line in held:
            line.close()


@attack("new")
def huge_pages(address: str) -> Iterator[object]:
    """Pools of huge pages that nothing reserved, in which each access can fail."""
    fd = os.memfd_create("enemy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    while True:
        os.ftruncate(fd, 2**30)
        with Line(address) as line, line.opened("lane") as plain:
            model = line.prepared(add(2**24))
            register(plain, 0, ["mmap_fd", 2**30, 3, 0], fd)
            with suppress(*REFUSED):
                execute(plain, model, [0, 0, 2**26, []], [0, 2**29, 2**26, []], slots=[0])
            os.ftruncate(fd, 0)
            with suppress(*REFUSED):
                execute(plain, model, [0, 0, 2**26, []], [0, 2**29, 2**26, []], slots=[0])
            yield


def filled(*, inside: bool) -> driver.Model:
    """The sum of as many ones as an input says; `inside`: which a branch makes."""
    m, branch = driver.ModelBuilder(), driver.ModelBuilder()
    size, condition = m.input("int32", (1,)), m.input("bool8", (1,))
    branch.output(branch.operation("FILL", branch.input("int32", (1,)), 1.0))
    ones = (
        m.operation("IF", condition, branch.build(), branch.build(), size) if inside else m.operation("FILL", size, 1.0)
    )
    m.output(m.operation("REDUCE_SUM", ones, np.array([0], np.int32), False))
    return m.build()


@attack("new")
def sizes_by_values(address: str) -> Iterator[object]:
    """Requests of a few bytes whose values ask for temporaries of 4 GiB, of 1 GiB, and of all that it may have.

    In four threads at once, in the main graph and in branches.
    """
    while True:
        with suppress(*REFUSED), driver.connect(address) as device:
            ready = [device.prepare(filled(inside=inside)) for inside in (False, True)]
            for size in (2**30, 2**28, 2**26, 2**25):
                x = np.array([size], np.int32), np.ones(1, bool)
                together(*(partial(prepared.run, *x, timeout=8.0) for prepared in 2 * ready))
                yield


@attack("H4")
def long_operations(address: str) -> Iterator[object]:
    """Convolutions of 2 * 10^11 products in four bursts at once, given up and begun again."""
    model = convolution()
    while True:
        with suppress(*REFUSED), driver.connect(address) as device, device.prepare(model) as prepared:
            bursts = [prepared.burst() for _ in range(4)]
            x = [np.zeros((1, 256, 256, 64), np.float32), np.zeros((256, 15, 15, 64), np.float32)]
            yield
            together(*(partial(burst.run, *x, timeout=8.0) for burst in bursts))
        yield
