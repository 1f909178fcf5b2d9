"""What libburst sends is, byte for byte, what docs/protocol.md prints for the smallest example."""

import ctypes
import os
import socket
from ctypes import byref, c_uint64, c_void_p

import msgpack
import pytest
from libburst_by_ctypes import FOREVER, Options, Tensor, adder, checked, handle_of
from lying_device import LyingDevice
from protocol_page import block, messages, raw
from waiting import PATIENCE

pytestmark = pytest.mark.integration


class Scribe(LyingDevice):
    """Keeps the bytes of each call, the model's memory, and the context of the burst."""

    def __init__(self, path):
        self.calls, self.model, self.context = {}, b"", None
        super().__init__(path, prepare=self.prepare)

    def _serve_one(self, connection):
        while data := connection.recv(65536, socket.MSG_PEEK):
            _, method, *_ = msgpack.unpackb(data)
            self.calls[method] = data
            self._serve_call(connection)

    def _serve_call(self, connection):
        received, fds, *_ = socket.recv_fds(connection, 65536, 72)
        self.fds += fds
        number, method, *arguments = msgpack.unpackb(received)
        found = self.answers[method]
        body, more = found(arguments, fds) if callable(found) else (found, [])
        socket.send_fds(connection, [msgpack.packb([number, *body])], more)

    def prepare(self, arguments, fds):
        self.model = os.pread(fds[0], 4096, 0)
        return [0, 1], []

    def burst(self, arguments, fds):
        found = super().burst(arguments, fds)
        self.context = socket.socket(fileno=os.dup(fds[3]))
        self.context.settimeout(PATIENCE)
        return found

    def close(self):
        super().close()
        if self.context:
            self.context.close()


@pytest.fixture
def scribe(place):
    made = Scribe(f"{place}/scribe")
    yield made
    made.close()


def test_the_example_is_the_pages(library, scribe):
    """hello, the model, prepare, burst, the request, memory on the callback, and what ends it."""
    hello, prepare, _, burst, _, question, memories, forget, free, _ = messages()
    client = handle_of(library, "burst_connect_path", scribe.path.encode())
    compiled = handle_of(library, "burst_prepare", client, adder(library), c_uint64(FOREVER))
    pool, base, controller = c_void_p(), c_void_p(), c_void_p()
    checked(library, library.burst_pool_new(ctypes.c_size_t(192), byref(pool), byref(base)))
    checked(library, library.burst_open(compiled, byref(Options(size=ctypes.sizeof(Options))), byref(controller)))
    assert scribe.calls["hello"] == hello
    assert scribe.model == raw(block("hex model"))
    sent, printed = msgpack.unpackb(scribe.calls["prepare"]), msgpack.unpackb(prepare)
    assert sent == [*printed, None, None, "fast_single_answer", FOREVER, 1]  # what the page leaves out, as it may
    assert scribe.calls["burst"] == burst

    tensors = [Tensor(pool, 64 * i, 16, 0, None) for i in range(3)]
    sides = [2, (Tensor * 2)(*tensors[:2]), 1, (Tensor * 1)(tensors[2])]
    request = handle_of(library, "burst_request_new", controller, *sides)
    checked(library, library.burst_submit(controller, request, c_uint64(FOREVER), None))
    expected = raw(block("hex request 2"))
    assert scribe.reader.read(len(expected) // 24).tobytes() == expected

    scribe.callback.send(question)
    answer, fds, *_ = socket.recv_fds(scribe.callback, 65536, 72)
    scribe.fds += fds
    assert (answer, len(fds)) == (memories, 1)
    scribe.answer(raw(block("hex result 2")))
    checked(library, library.burst_await(controller, c_uint64(FOREVER), None))
    checked(library, library.burst_request_free(request))
    assert scribe.context.recv(65536) == forget
    checked(library, library.burst_close(controller))
    checked(library, library.burst_compiled_free(compiled))
    assert scribe.calls["free"] == free
    checked(library, library.burst_disconnect(client))
