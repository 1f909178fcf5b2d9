"""What a stream pays for another process that it reaches by a pipe, ZeroMQ or gRPC.

    pip install numpy pyzmq grpcio
    python frames.py PEER HZ WORK_US FRAMES [BYTES]

In turns, a frame each: the client sends BYTES to a server, which works and answers 64 bytes; and the client does the
same work itself. Nothing is pinned. Prints a line of JSON as paced.c does.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from typing import TYPE_CHECKING

import numpy as np
from isolated import in_a_child, payload

if TYPE_CHECKING:
    from collections.abc import Callable

    from isolated import Call, Row

    Peer = Callable[[bytes, Call], tuple[Call, int]]  # a message, the server's work: a call, and the server's pid

REPLY = b"r" * 64


def spin(microseconds: float) -> None:
    """Works that long."""
    end = time.perf_counter_ns() + int(1e3 * microseconds)
    while microseconds and time.perf_counter_ns() < end:
        pass


def forked(serve: Callable[[], None]) -> int:
    """A server on any processor."""
    pid = os.fork()
    if pid == 0:
        try:
            serve()
        finally:
            os._exit(0)
    return pid


def pipe(message: bytes, work: Call) -> tuple[Call, int]:
    near, far = multiprocessing.Pipe()

    def serve() -> None:
        near.close()
        while True:
            far.recv_bytes()
            work()
            far.send_bytes(REPLY)

    def call() -> None:
        near.send_bytes(message)
        near.recv_bytes()

    return call, forked(serve)


def zmq(message: bytes, work: Call) -> tuple[Call, int]:
    import zmq as z

    endpoint = f"ipc://{tempfile.mkdtemp()}/peer"

    def serve() -> None:
        server = z.Context().socket(z.REP)
        server.bind(endpoint)
        while True:
            server.recv()
            work()
            server.send(REPLY)

    pid = forked(serve)
    client = z.Context().socket(z.REQ)
    client.connect(endpoint)

    def call() -> None:
        client.send(message)
        client.recv()

    return call, pid


def grpc(message: bytes, work: Call) -> tuple[Call, int]:
    address = f"unix:{tempfile.mkdtemp()}/peer"
    limits = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]

    def serve() -> None:
        from concurrent import futures

        import grpc as g

        def answer(request: bytes, context: object) -> bytes:
            work()
            return REPLY

        class Handler(g.GenericRpcHandler):
            def service(self, details: g.HandlerCallDetails) -> g.RpcMethodHandler:
                return g.unary_unary_rpc_method_handler(answer)

        server = g.server(futures.ThreadPoolExecutor(2), options=limits)
        server.add_generic_rpc_handlers((Handler(),))
        server.add_insecure_port(address)
        server.start()
        server.wait_for_termination()

    pid = forked(serve)
    import grpc as g

    stub = g.insecure_channel(address, options=limits).unary_unary("/peer/frame")
    stub(message, wait_for_ready=True)
    return lambda: stub(message), pid


PEERS: dict[str, Peer] = {function.__name__: function for function in (pipe, zmq, grpc)}


def cpu_ns(pid: int) -> int:
    """The processor time of another process, on its own clock: (~pid << 3) | 2, as clock_getcpuclockid(3) makes it."""
    return time.clock_gettime_ns(~pid << 3 | 2)


def in_turns(ways: tuple[Call, Call], hz: float, frames: int, servers: tuple[int, ...]) -> Row:
    """The first way and the second, a frame each. What the servers use counts for the first."""
    took, used = np.empty((frames, 2)), [0, 0]
    clock, own = time.perf_counter_ns, time.process_time_ns
    served, since, at = sum(map(cpu_ns, servers)), own(), time.monotonic()
    for frame in range(frames):
        for which, call in enumerate(ways):
            at += 1 / hz
            if (left := at - time.monotonic()) > 0:
                time.sleep(left)
            begin = clock()
            call()
            took[frame, which] = clock() - begin
            now = own()
            used[which] += now - since
            since = now
    used[0] += sum(map(cpu_ns, servers)) - served
    (p50, own_p50), (p99, own_p99) = np.percentile(took, (50, 99), axis=0)
    row = {"p50_ns": p50, "p99_ns": p99, "own_p50_ns": own_p50, "own_p99_ns": own_p99}
    return {**row, "cpu_ns": used[0] / frames, "own_cpu_ns": used[1] / frames}


def measured(peer: str, hz: float, microseconds: float, frames: int, nbytes: int) -> Row:
    """In a process of its own."""

    def own() -> None:
        spin(microseconds)

    call, server = PEERS[peer](payload(nbytes), own)
    for _ in range(10):
        call()
    return in_turns((call, own), hz, frames, (server,))


def main() -> None:
    """Measures one peer."""
    peer, hz, microseconds, frames = sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    nbytes = int(sys.argv[5]) if len(sys.argv) > 5 else 64
    timeout = 30 + 2 * frames / hz
    print(json.dumps(in_a_child(lambda: measured(peer, hz, microseconds, frames, nbytes), timeout)))


if __name__ == "__main__":
    main()
