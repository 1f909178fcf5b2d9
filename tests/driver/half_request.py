"""A client of gRPC that sends a part of a message, and reads no answer."""

import socket
import struct
from typing import ClassVar

from driver.gateways.oip import messages


def connected(address, source=""):
    """A connection to HOST:PORT, http://HOST:PORT or unix:PATH. `source`: the address of IP that it comes from."""
    if address.startswith("unix:"):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(20)
        sock.connect(address.removeprefix("unix:"))
        return sock
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20, source_address=(source, 0))


class HalfRequest:
    """A connection of HTTP/2 with one call, of whose message only a part is sent, and whose answer is not read."""

    PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    HEADERS, RESET, SETTINGS, PING, WINDOW_UPDATE = 1, 3, 4, 6, 8
    FIELDS: ClassVar = {
        ":method": "POST",
        ":scheme": "http",
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }

    def __init__(self, address, nbytes, method="ModelInfer", *, grants=False, body=bytes(16379), packed="", source=""):
        """Announces a message of so many bytes. `grants`: takes answers of any size, as far as windows go. `body`: it
        begins with these, and goes on with zeros. `packed`: how these say that they are compressed.
        """
        self._socket, self._windows, self.said = connected(address, source), {0: 65535, 1: 65535}, b""
        self._initial = 65535
        self._stream = self._socket.makefile("rb")
        fields = b"".join(
            b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
            for name, value in self._fields(method, packed).items()
        )
        window = struct.pack(">HI", 4, 2**31 - 1) if grants else b""
        more = self._frame(self.WINDOW_UPDATE, struct.pack(">I", 2**31 - 1 - 65535)) if grants else b""
        begin = self.PREFACE + self._frame(self.SETTINGS, window) + more
        self._socket.sendall(begin + self._frame(self.HEADERS, fields, 4, 1))
        self._left = memoryview(struct.pack(">BI", bool(packed), nbytes) + body)

    def _fields(self, method, packed):
        found = self.FIELDS | {":path": f"/{messages.SERVICE}/{method}"}
        return found | {"grpc-encoding": packed} if packed else found

    def _frame(self, kind, content=b"", flags=0, stream=0):
        return struct.pack(">I", len(content))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + content

    def send(self, nbytes):
        """Sends so many bytes of it, as the server grants them; returns early if the server says anything."""
        while nbytes > 0 and not self.said:
            size = min(len(self._left), nbytes, 1 << 14, *self._windows.values())
            if size <= 0:
                self._read()
                continue
            self._socket.sendall(self._frame(0, bytes(self._left[:size]), 0, 1))
            self._left, nbytes = self._left[size:] or memoryview(bytes(16384)), nbytes - size
            self._windows = {stream: window - size for stream, window in self._windows.items()}
        return self

    def _read(self):
        """Reads a frame, and does what it says: the bytes of the answer in it, and whether the call has ended."""
        head = self._stream.read(9)
        if len(head) < 9:
            self.said = b"nothing"
            return 0, True
        kind, flags, stream = head[3], head[4], struct.unpack(">I", head[5:])[0]
        content = self._stream.read(struct.unpack(">I", b"\0" + head[:3])[0])
        if kind in {self.SETTINGS, self.PING} and not flags & 1:
            self._socket.sendall(self._frame(kind, content if kind == self.PING else b"", 1))
        if kind == self.SETTINGS:
            for name, value in struct.iter_unpack(">HI", content):
                if name == 4:  # the window that each stream begins with
                    self._windows[1] += value - self._initial
                    self._initial = value
        elif kind == self.WINDOW_UPDATE:
            self._windows[stream] += struct.unpack(">I", content)[0]
        elif kind == self.HEADERS:
            self.said += content
        return len(content) if kind == 0 else 0, kind == self.RESET or (kind in (0, self.HEADERS) and flags & 1)

    def rest(self, *, takes=False):
        """Reads on until the server has ended the call: the bytes of its answer. `takes`: all of it, as it comes."""
        if takes:
            more = struct.pack(">I", 2**30)
            self._socket.sendall(b"".join(self._frame(self.WINDOW_UPDATE, more, 0, stream) for stream in (0, 1)))
        nbytes, has_ended = 0, False
        while not has_ended:
            size, has_ended = self._read()
            nbytes += size
        return nbytes

    def told(self):
        """What the server says as it ends the call."""
        while not self.said:
            self._read()
        return self.said

    def leave(self):
        """Hangs up: `told` returns."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._stream.close()
        self._socket.close()
