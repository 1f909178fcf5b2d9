"""One-way streams from Python: how many messages a second what a user would pick instead carries on this machine.

    pip install numpy pyzmq iceoryx2 faster-fifo
    python streams.py [--seconds 0.25] [--bytes 64 65536] [--only pipe zmq …] [--json OUT]

A producer on CPU 0 and a consumer on CPU 1. Every way carries whole messages of bytes; a batch of elements is one
message, which is the best that each of them can do. The producer sends a few different messages in turn; the consumer
looks at the first and last byte of every 16th, whose turn it must be (their number and 16 have no common divisor), so
that nothing is lost, repeated or cut unnoticed, and that hardly costs anything. It measures for a while, in PARTS
parts, after one that warms up; the median part is the figure. A part is much longer than it takes to empty what is on
its way, and whatever can be limited holds as many bytes as ours.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import itertools
import json
import mmap
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from isolated import Row, fork_server, in_a_child

EVERY, PARTS = 16, 9  # messages between two looks; parts that count
LEAST_RING, BATCHES_IN_RING = 65536, 4  # as in stream.h
Take = Callable[[], object]
Look = Callable[[], tuple[int, int]]


class Way(NamedTuple):
    """How messages go. `sender` and `receiver` are called in their own process."""

    sender: Callable[[], Callable[[Any], object]]
    receiver: Callable[[], tuple[Take, Look]]  #: take a message; take one and return its first and last byte
    message: Callable[[bytes], Any] = bytes  #: what the sender wants to be given


def ring_bytes(nbytes: int) -> int:
    """What may be on its way."""
    return max(LEAST_RING, BATCHES_IN_RING * nbytes)


def looking(take: Callable[[], Any]) -> tuple[Take, Look]:
    """For a `take` that returns bytes."""

    def look() -> tuple[int, int]:
        message = take()
        return message[0], message[-1]

    return take, look


def stream(way: Way, nbytes: int, seconds: float) -> Row:
    """Sends messages of `nbytes` until the consumer has measured for so long; microseconds per message."""
    kinds = EVERY - 1 if nbytes < 1 << 18 else 3
    near, far = multiprocessing.Pipe()
    is_enough = mmap.mmap(-1, 1)

    def serve() -> None:
        try:
            take, look = way.receiver()
            far.send({})
            far.send(consume(take, look, seconds, kinds))
        except Exception as error:  # noqa: BLE001 (whatever ails a peer is its row)
            far.send({"error": f"{type(error).__name__}: {error}"})
        is_enough[0] = 1
        while True:
            take()  # until the sender has noticed, and ends us

    fork_server(serve)
    put = way.sender()
    row: Row = near.recv()
    turns = itertools.cycle([way.message(bytes([k + 1]) * nbytes) for k in range(kinds)])
    while not is_enough[0]:
        for message in itertools.islice(turns, EVERY):
            put(message)
    return row or near.recv()


def consume(take: Take, look: Look, seconds: float, kinds: int) -> Row:
    """Of each part its microseconds per message; and the median of them."""
    samples, seen, clock = [], EVERY - 1, time.perf_counter
    rest, part = [None] * (EVERY - 1), seconds / PARTS
    for _ in range(1 + PARTS):
        first, begin = seen, clock()
        while (now := clock()) < begin + part:
            for _ in rest:
                take()
            turn = seen % kinds + 1
            if (ends := look()) != (turn, turn):
                raise ValueError(f"message {seen} begins and ends with {ends}, not {turn}")
            seen += EVERY
        samples.append((now - begin) * 1e6 / (seen - first))
    p50, p99, p999 = np.percentile(samples[1:], [50, 99, 99.9])
    return {"p50_us": p50, "p99_us": p99, "p999_us": p999, "max_us": max(samples[1:]), "messages": seen}


def pipe(nbytes: int) -> Way:
    """os.pipe, as large as a user may make it."""
    out, into = os.pipe()
    most = int(pathlib.Path("/proc/sys/fs/pipe-max-size").read_text())
    fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, min(most, ring_bytes(nbytes)))

    def take() -> bytes:
        message = os.read(out, nbytes)
        return message if len(message) == nbytes else rest(message)

    def rest(message: bytes) -> bytes:
        parts = [message]
        while missing := nbytes - sum(map(len, parts)):
            parts.append(os.read(out, missing))
        return b"".join(parts)

    return Way(lambda: partial(os.write, into), lambda: looking(take))


def zmq(nbytes: int) -> Way:
    """pyzmq, PUSH and PULL over ipc."""
    import zmq as z

    endpoint, mark = f"ipc://{tempfile.mkdtemp()}/stream", max(2, ring_bytes(nbytes) // nbytes // 2)

    def sender() -> Callable[[bytes], object]:
        sock = z.Context().socket(z.PUSH)
        sock.sndhwm = mark
        sock.connect(endpoint)
        return sock.send

    def receiver() -> tuple[Take, Look]:
        sock = z.Context().socket(z.PULL)
        sock.rcvhwm = mark
        sock.bind(endpoint)
        return looking(sock.recv)

    return Way(sender, receiver)


def mp_queue(nbytes: int) -> Way:
    """multiprocessing.Queue."""
    queue: Any = multiprocessing.get_context("fork").Queue(ring_bytes(nbytes) // nbytes)
    return Way(lambda: queue.put, lambda: looking(queue.get))


def faster_fifo(nbytes: int) -> Way:
    """faster-fifo, one message a call."""
    import faster_fifo as ff

    queue = ff.Queue(max_size_bytes=ring_bytes(nbytes + 64))
    return Way(lambda: partial(queue.put, timeout=60), lambda: looking(partial(queue.get, timeout=60)))


def iceoryx2(nbytes: int) -> Way:
    """Publish and subscribe, in place and busy polling: loan, copy in, send; receive, look, give back.

    When the buffer is full we try again ourselves: with RetryUntilDelivered version 0.10 stalls now and then.
    """
    import iceoryx2 as iox2

    iox2.set_log_level(iox2.LogLevel.Error)

    class Message(ctypes.Structure):
        _fields_ = [("data", ctypes.c_uint8 * nbytes)]

    name, keep = f"stream-{os.getpid()}-{nbytes}", []

    def service() -> Any:
        node = iox2.NodeBuilder.new().create(iox2.ServiceType.Ipc)
        keep.append(node)
        builder = node.service_builder(iox2.ServiceName.new(name)).publish_subscribe(Message)
        builder = builder.enable_safe_overflow(False)
        return builder.subscriber_max_buffer_size(min(256, ring_bytes(nbytes) // nbytes)).open_or_create()

    def sender() -> Callable[[bytes], object]:
        discard = iox2.BackpressureStrategy.DiscardData
        loan = service().publisher_builder().backpressure_strategy(discard).create().loan_uninit

        def put(message: bytes) -> None:
            delivered = 0
            while not delivered:
                sample = loan()
                ctypes.memmove(sample.payload_ptr, message, nbytes)
                delivered = sample.assume_init().send()

        return put

    def receiver() -> tuple[Take, Look]:
        receive = service().subscriber_builder().create().receive

        def take() -> None:
            while (sample := receive()) is None:
                pass
            sample.delete()

        def look() -> tuple[int, int]:
            while (sample := receive()) is None:
                pass
            data = sample.payload().contents.data
            ends = data[0], data[nbytes - 1]
            sample.delete()
            return ends

        return take, look

    return Way(sender, receiver)


PEERS: dict[str, Callable[[int], Way]] = {f.__name__: f for f in (iceoryx2, pipe, zmq, mp_queue, faster_fifo)}


def isolated(way: Callable[[], Way], nbytes: int, seconds: float, timeout: float) -> Row:
    """Both processes are children that end with the block."""

    def work() -> Row:
        os.sched_setaffinity(0, {0})
        return stream(way(), nbytes, seconds)

    return in_a_child(work, timeout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.25)
    parser.add_argument("--bytes", type=int, nargs="+", default=[64])
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one peer and size")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    rows = []
    for nbytes in args.bytes:
        for peer in args.only:
            row = isolated(partial(PEERS[peer], nbytes), nbytes, args.seconds, args.timeout)
            rows.append({"peer": peer, "bytes": nbytes, **row})
            told = row.get("error") or f"{row['p50_us']:9.3f} us  {nbytes / row['p50_us']:9.1f} MB/s"
            print(f"{peer:14} {nbytes:>9} B  {told}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    sys.exit(main())
