"""Attacks by work and by messages: structures, preparations, connections, whatever takes time that others wait for."""

from __future__ import annotations

import os
import random
import signal
import socket
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from attacks_on_memory import sealed_chain
from enemy import (
    REFUSED,
    Line,
    add,
    asked,
    attack,
    chain,
    execute,
    hold,
    lines,
    memfd,
    register,
    sealed_model,
    structure,
    together,
)

import driver
from burst.channel import MAX_FDS, pack
from driver.protocol.lane_codec import launch
from driver.protocol.rpc import PROTOCOL

if TYPE_CHECKING:
    from collections.abc import Iterator


@attack("H3")
def invalid_models(address: str) -> Iterator[object]:
    """A structure of 54 MiB with 2^18 operands, whose last one breaks a rule; from eight connections."""
    scales = [0.5] * 20, 0
    operand = [11, [20, 1], 0.0, 0, 0, None, scales, 0]
    n = 2**18
    raw = structure([1, False, 1], [n, 1, [0], [1]], *[operand] * (n - 1), [3, [1] * 40, 0.0, 0, 0, None, None, 0])
    raw += structure(["ADD", [0, 0, 0], [1]])
    fd, where = sealed_model(raw)
    held = lines(address, 8)
    while True:
        yield
        together(*(lambda line=line: line.prepare(fd, where) for line in held))
        held = [line for line in held if line.channel.fileno() >= 0] or lines(address, 8)


@attack("new")
def long_validations(address: str) -> Iterator[object]:
    """A valid model of 80,000 operations, of which four connections ask again and again whether it is supported."""
    fd, where = sealed_chain(80_000)
    while True:
        held = lines(address, 4)

        def ask(line: Line) -> None:
            for _ in range(3):
                line.call("supported", where, fds=[fd])

        yield
        together(*(lambda line=line: ask(line) for line in held))
        for line in held:
            line.close()


@attack("new")
def long_preparations(address: str) -> Iterator[object]:
    """Models of 20,000 operations, prepared by four connections as fast as that goes, and dropped."""
    numbers = count(1)

    def prepare(line: Line) -> None:
        for _ in range(3):
            fd, where = sealed_chain(20_000, next(numbers))
            try:
                line.call("free", line.prepare(fd, where))
            finally:
                os.close(fd)

    while True:
        held = lines(address, 4)
        yield
        together(*(lambda line=line: prepare(line) for line in held))
        for line in held:
            line.close()


@attack("new")
def endless_loops(address: str) -> Iterator[object]:
    """WHILE without an end, on all slots, with the longest loop timeout."""
    condition, body = driver.ModelBuilder(), driver.ModelBuilder()
    n = condition.input("int32", (1,))
    condition.output(condition.operation("LESS", n, np.array([5], np.int32)))
    m = body.input("int32", (1,))
    body.output(body.operation("MUL", m, np.array([1], np.int32), 0))
    builder = driver.ModelBuilder()
    builder.output(builder.operation("WHILE", condition.build(), body.build(), builder.input("int32", (1,))))
    model, fd = builder.build(), memfd(4096)
    while True:
        with suppress(*REFUSED), Line(address) as line:
            number = line.prepared(model)
            plains = [line.opened("lane") for _ in range(4)]
            for plain in plains:
                register(plain, 0, ["ashmem", 4096, True], fd)
                plain.send_raw(asked(number, [[0, 0, 4, []]], [0, 64, 4, []], [0], 15 * 10**9))
            yield
            with suppress(*REFUSED):
                plains[0].receive(3.0).close()
        yield


@attack("M3")
def failing_operations(address: str) -> Iterator[object]:
    """GATHERs out of range, as fast as they go: each of them fails."""
    builder = driver.ModelBuilder()
    x, where = builder.input("float32", (4,)), builder.input("int32", (1,))
    builder.output(builder.operation("GATHER", x, 0, where))
    model, fd = builder.build(), memfd(4096)
    os.pwrite(fd, (10**9).to_bytes(4, "little"), 16)
    while True:
        with Line(address) as line, line.opened("lane") as plain:
            number = line.prepared(model)
            register(plain, 0, ["ashmem", 4096, True], fd)
            for turn in range(100_000):
                execute(plain, number, [0, 0, 16, []], [0, 16, 4, []], [0, 64, 4, []], slots=[0])
                if not turn % 500:
                    yield


@attack("new")
def requests_that_differ(address: str) -> Iterator[object]:
    """No two requests are equal, so that each is bound anew, from four connections."""
    model, fd = chain(200), memfd(2**16)

    def run(line: Line) -> None:
        number, plain = line.prepared(model), line.opened("lane")
        with plain:
            register(plain, 0, ["ashmem", 2**16, True], fd)
            for turn in range(300):
                execute(plain, number, [0, 16 * turn, 16, []], [0, 2**15 + 16 * turn, 16, []], slots=[0], loop=turn + 1)

    while True:
        held = lines(address, 4)
        yield
        together(*(lambda line=line: run(line) for line in held))
        for line in held:
            line.close()


@attack("new")
def spinning_bursts(address: str) -> Iterator[object]:
    """24 bursts that may poll for ten seconds each, woken again and again."""
    while True:
        with driver.connect(address) as device, device.prepare(add()) as prepared:
            bursts = []
            with suppress(*REFUSED):
                bursts += [prepared.burst(spin=10.0) for _ in range(24)]
            for burst in bursts * 50:
                with suppress(*REFUSED):
                    burst.run(np.ones(4, np.float32), timeout=5.0)
                yield


@attack("new")
def bursts_that_come_and_go(address: str) -> Iterator[object]:
    """Bursts opened and closed as fast as that goes, by four threads."""

    def come_and_go() -> None:
        with driver.connect(address) as device, device.prepare(add()) as prepared:
            for _ in range(50):
                prepared.burst().close()

    while True:
        yield
        together(*[come_and_go] * 4)


@attack("new")
def clients_that_come_and_go(address: str) -> Iterator[object]:
    """Connections opened, greeted and closed as fast as that goes, by four threads."""

    def come_and_go() -> None:
        for _ in range(100):
            Line(address).close()

    while True:
        yield
        together(*[come_and_go] * 4)


@attack("new")
def all_clients(address: str) -> Iterator[object]:
    """As many greeted connections as the account may have, with names of applications, and tries for more."""
    while True:
        held = []
        for number in count():
            try:
                held.append(Line(address, application=f"{number:0100}" if number < 200 else None))
            except REFUSED:
                break
            if len(held) > 2000:
                break
        yield
        for _ in range(200):
            with suppress(*REFUSED):
                Line(address).close()
        hold()
        for line in held:
            line.close()


@attack("new")
def silent_connections(address: str) -> Iterator[object]:
    """Connections that say nothing, as many as the process may hold, which wait in the queue of the socket."""
    while True:
        held = []
        for _ in range(3000):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            held.append(sock)
            if sock.connect_ex(address):
                break
        yield
        hold(2.0)
        for sock in held:
            sock.close()


@attack("new")
def answers_unread(address: str) -> Iterator[object]:
    """64 connections that ask and read no answer, for as long as the device bears it."""
    while True:
        held = lines(address, 64)
        for line in held:
            line.channel.socket.setblocking(False)
            with suppress(*REFUSED):
                for number in range(5000):
                    line.channel.send([number, "turns"])
        yield
        hold(1.0)
        for line in held:
            line.close()


@attack("new")
def watchers(address: str) -> Iterator[object]:
    """Eight connections that read traces, census and turns without a pause."""

    def watch(line: Line) -> None:
        for _ in range(100):
            line.call("traces", 0)
            line.call("census")
            line.call("turns")

    while True:
        held = lines(address, 8)
        yield
        together(*(lambda line=line: watch(line) for line in held))
        for line in held:
            line.close()


@attack("new")
def stopped_clients(address: str) -> Iterator[object]:
    """Clients that stop (SIGSTOP) amid bursts, while they owe the device their memory."""
    children: list[int] = []
    while True:
        child = os.fork()
        if not child:
            try:
                device = driver.connect(address)
                prepared = device.prepare(add())
                futures = [prepared.burst(depth=4).submit(np.ones(4, np.float32)) for _ in range(8)]
                os.kill(os.getpid(), signal.SIGSTOP)
                del futures
            finally:
                os._exit(0)
        children.append(child)
        os.waitpid(child, os.WUNTRACED)
        yield
        if len(children) > 10:
            for child in children:
                with suppress(ProcessLookupError, ChildProcessError):
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
            children.clear()


@attack("new")
def waiting_executions(address: str) -> Iterator[object]:
    """4,096 asynchronous executions of 2,000 operations each, on each of four connections."""
    model, fd = chain(2000), memfd(4096)
    while True:
        held = lines(address, 4)
        for line in held[:4]:
            with suppress(*REFUSED):
                number, launched = line.prepared(model), line.opened("lane")
                held.append(launched)
                launched.socket.setblocking(False)
                register(launched, 0, ["ashmem", 4096, True], fd)
                request = pack([number, [[0, 0, 16, []]], [[0, 64, 16, []]], [0], False, None])
                for turn in range(4096):
                    launched.send_raw(launch(turn, None, None, request))
            yield
        hold(1.0)
        yield
        for one in held:
            one.close()


@attack("new")
def noise(address: str) -> Iterator[object]:
    """Random messages with random descriptors, to the service and on plain paths."""
    source = random.Random(4)
    words = [
        "hello",
        "prepare",
        "supported",
        "free",
        "lane",
        "burst",
        "execute",
        "memory",
        "restore",
        "load",
        "join",
    ]
    words += ["traces", "census", "turns", "figures", "status", "allocate", "release", "copy_from", "copy", "cancel"]
    words += ["seal", "unseal"]
    values = [0, 1, -1, 2**63, 1.5, None, True, "x", b"y", [], {}, [0, 16], [[0, 0, 16, []]], [[0, 0, 2**40, [1, 4]]]]
    with open(os.devnull, "rb") as null:
        while True:
            line = Line(address, hello=source.random() < 0.5)
            channel = line.opened("lane") if source.random() < 0.5 else line.channel
            with suppress(*REFUSED), line, channel:
                for _ in range(40):
                    body = [source.choice(words), *source.choices(values, k=source.randrange(6))]
                    body = [source.choice(values), *body] if source.random() < 0.5 else body
                    channel.send(body, [null.fileno()] * source.choice([0, 0, 1, 1, 2, 4, MAX_FDS]))
                    with suppress(TimeoutError):
                        channel.receive(0.0 if source.random() < 0.7 else 0.01).close()
            yield


@attack("new")
def quarrels(address: str) -> Iterator[object]:
    """Greetings of other versions, twice, with names of any length: each of them is refused and logged."""
    while True:
        with Line(address, hello=False) as line:
            for version in (0, 2**40, "x", PROTOCOL):
                with suppress(*REFUSED):
                    line.call("hello", version, "\n" * 90)
            for _ in range(200):
                with suppress(*REFUSED):
                    line.call("prepare", [0, 16])
        yield


@attack("M4")
def slow_probes(address: str) -> Iterator[object]:
    """64 connections to the metrics that send a byte now and then, and come again."""
    where = str(Path(address).parents[1] / "metrics.sock")
    while True:
        held = []
        for _ in range(64):
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(1.0)
            held.append(sock)
            with suppress(*REFUSED):
                sock.connect(where)
        for _ in range(5):
            for sock in held:
                with suppress(*REFUSED):
                    sock.send(b"G", socket.MSG_NOSIGNAL)
            yield
            hold(0.3)
        for sock in held:
            sock.close()
