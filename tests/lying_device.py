"""A device that speaks the protocol as far as a test says, and lies from there on."""

import contextlib
import os
import socket
import threading

import msgpack
import numpy as np

import fmq
from burst.channel import MAX_BYTES, MAX_FDS
from burst.datum import DATUM_DTYPE
from fmq import Descriptor

HELLO = [4, "liar", "1", "CPU", 1, 1, 0, 0, []]


class LyingDevice:
    """Listens at `path` and serves one client, by `answers`: method -> what follows the number, a function of the
    call, or None, which hangs up.
    """

    def __init__(self, path, **answers):
        self.answers = {"hello": self.hello, "prepare": [0, 1], "free": [0], "burst": self.burst} | answers
        self.life = fmq.LifePage()
        self.path = path
        self.fds, self.callback, self.writer, self.reader, self._client = [], None, None, None, None
        self.is_open = threading.Event()  # a burst is
        self.is_left = threading.Event()  # by its client
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        try:
            while True:
                self._client, _ = self._listener.accept()
                with self._client:
                    self._serve_one(self._client)
        except OSError:
            return  # closed

    def _serve_one(self, connection):
        while True:
            raw, fds, *_ = socket.recv_fds(connection, MAX_BYTES, MAX_FDS)
            if not raw:
                self.is_left.set()
                return
            self.fds += fds
            number, method, *arguments = msgpack.unpackb(raw)
            found = self.answers[method]
            body, more = found(arguments, fds) if callable(found) else (found, [])
            if body is None:
                return
            socket.send_fds(connection, [msgpack.packb([number, *body])], more)

    def hello(self, *_):
        return [0, *HELLO], [self.life.fd]

    def burst(self, arguments, fds):
        """Attaches the queues, as a device does."""
        self._close_ends()
        _, requests, results, *_ = arguments
        with fmq.MessageQueue.open(Descriptor.from_wire(requests, [os.dup(fds[0])], announces=False)) as queue:
            self.reader = queue.reader()
        with fmq.MessageQueue.open(Descriptor.from_wire(results, [os.dup(fds[1])], announces=False)) as queue:
            self.writer = queue.writer()
        self.callback = socket.socket(fileno=os.dup(fds[2]))
        self.callback.settimeout(20)
        self.is_open.set()
        return [0, 2], [self.life.fd]

    def answer(self, packet):
        """A result, whatever was asked."""
        self.writer.write(np.frombuffer(packet, DATUM_DTYPE))

    def _close_ends(self):
        """Of the burst before."""
        for end in (self.reader, self.writer, self.callback):
            if end:
                end.close()

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):  # it has gone
            self._client.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(20)
        self._close_ends()
        self.life.close()
        for fd in self.fds:
            os.close(fd)
