"""What attacks are made of: connections that say what they like, models that no client with manners sends."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgpack
import numpy as np

import driver
import fmq
from burst import BurstError, Offer, Trace
from burst.channel import Channel, close_all, pack
from burst.datum import DATUM_DTYPE
from driver.protocol.lane_codec import in_turn
from driver.protocol.model_codec import encode
from driver.protocol.prepare_arguments import PrepareArguments
from driver.protocol.rpc import PROTOCOL, call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from driver.client.device import RemoteDevice

IMPORTERS = Path(__file__).parents[1] / "driver/importers"
INCREMENTS = {
    "jax": IMPORTERS / "jax_files/increment.jax",
    "torch": IMPORTERS / "pt2_files/increment.pt2",
}
"""x + 1 for devices that run files alone; written by make_jax.py and make_pt2.py."""
PATIENCE = 60.0  # seconds
REFUSED = (BurstError, driver.DriverError, OSError, ValueError, MemoryError)
"""What an attack may meet; it goes on."""
ALL_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
SIZE_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Attack(NamedTuple):
    """One kind of attack. `work(address)` yields after each round, and goes on until its process is killed."""

    name: str
    finding: str  #: of the review that first described it, or "new"
    work: Callable[[str], Iterator[object]]
    needs: tuple[str, ...] = ()  #: "silent_file": the path of a file that answers no read, after its address

    @property
    def claim(self) -> str:
        """What it does, in a line."""
        return (self.work.__doc__ or "").strip().splitlines()[0]


ATTACKS: dict[str, Attack] = {}


def attack(
    finding: str, *needs: str
) -> Callable[[Callable[[str], Iterator[object]]], Callable[[str], Iterator[object]]]:
    """Registers a generator function as an attack."""

    def register(work: Callable[[str], Iterator[object]]) -> Callable[[str], Iterator[object]]:
        ATTACKS[work.__name__] = Attack(work.__name__, finding, work, needs)
        return work

    return register


# ---- connections ----------------------------------------------------------------------------------------------------


class Line:
    """A connection to a served device that says what it likes."""

    def __init__(self, address: str, hello: bool = True, application: str | None = None) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(PATIENCE)
        sock.connect(address)
        sock.setblocking(True)
        self.channel = Channel(sock)
        if hello:
            self.call("hello", PROTOCOL, *([] if application is None else [application]))

    def call(self, method: str, *arguments: object, fds: Any = ()) -> list[Any]:
        """The values of the answer; its descriptors are closed."""
        values, found = call(self.channel, method, *arguments, fds=fds, timeout=PATIENCE)
        close_all(found)
        return values

    def opened(self, method: str) -> Channel:
        """A connection past the service."""
        _, fds = call(self.channel, method, timeout=PATIENCE)
        os.close(fds.pop())
        return Channel.from_fd(fds[0])

    def prepare(self, fd: int, where: list[Any], **options: Any) -> int:
        """The number of the model in that memory."""
        arguments = PrepareArguments(**options).to_wire()
        return int(self.call("prepare", where, *arguments, fds=[fd])[0])

    def prepared(self, model: driver.Model) -> int:
        """The number of that model."""
        encoded = encode(model, 0)
        return self.prepare(encoded.fd, encoded.where)

    def close(self) -> None:
        """Ends it."""
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def hold(seconds: float = 3.0) -> None:
    """Keeps what it has for a while."""
    threading.Event().wait(seconds)


def lines(address: str, most: int) -> list[Line]:
    """As many connections as the device grants."""
    found: list[Line] = []
    with suppress(*REFUSED):
        while len(found) < most:
            found.append(Line(address))
    return found


def own_burst(prepared: driver.RemotePreparedModel) -> tuple[Channel, list[object]]:
    """A burst without a controller: its context, and what has to be held."""
    queues = [fmq.MessageQueue.create(DATUM_DTYPE, 64) for _ in range(2)]
    trace = Trace.create()
    (near, callback), (context, far) = Channel.pair(), Channel.pair()
    with callback, far:
        offer = Offer(queues[0].descriptor, queues[1].descriptor, trace.memory, callback, far, [2])
        accepted = prepared.configure_burst(0.0)(offer)
    return context, [*queues, trace, near, accepted]


def together(*work: Callable[[], object]) -> None:
    """Calls all at once, each in a thread, and ignores what the device refuses."""

    def quietly(one: Callable[[], object]) -> None:
        with suppress(*REFUSED):
            one()

    threads = [threading.Thread(target=quietly, args=(one,), daemon=True) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def register(plain: Channel, slot: int, wire: list[Any], fd: int) -> None:
    """Memory on a plain path."""
    plain.send(["memory", slot, wire], [fd])


def execute(plain: Channel, model: int, *arguments: list[Any], slots: list[int], loop: int | None = None) -> list[Any]:
    """One execution on a plain path: the arguments are inputs, the last one is the output. Its answer."""
    *inputs, output = arguments
    plain.send_raw(asked(model, inputs, output, slots, loop))
    _, outcome = plain.receive(PATIENCE).body
    return outcome


def asked(model: int, inputs: list[Any], output: list[Any], slots: list[int], loop: int | None = None) -> bytes:
    """The message of it."""
    return in_turn(1, None, pack([model, inputs, [output], slots, False, loop]))


# ---- memory and models ----------------------------------------------------------------------------------------------


def memfd(nbytes: int, seals: int = SIZE_SEALS) -> int:
    """Memory that nothing was written to."""
    fd = os.memfd_create("enemy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def add(n: int = 4, constant: float = 1.0) -> driver.Model:
    """x + constant, of n floats."""
    m = driver.ModelBuilder()
    m.output(m.operation("ADD", m.input("float32", (n,)), np.full(1, constant, np.float32), 0))
    return m.build()


def plus_one(device: RemoteDevice) -> driver.Model:
    """x + 1, of 4 floats, in the form that the device runs."""
    return driver.load(INCREMENTS[device.name]) if device.name in INCREMENTS else add()


def chain(operations: int, constant: float = 1.0) -> driver.Model:
    """That many additions one after another."""
    m = driver.ModelBuilder()
    x, one = m.input("float32", (4,)), m.constant(np.full(4, constant, np.float32))
    for _ in range(operations):
        x = m.operation("ADD", x, one, 0)
    m.output(x)
    return m.build()


def convolution() -> driver.Model:
    """2 * 10^11 products."""
    m = driver.ModelBuilder()
    x, filters = m.input("float32", (1, 256, 256, 64)), m.input("float32", (256, 15, 15, 64))
    m.output(m.operation("CONV_2D", x, filters, np.zeros(256, np.float32), 1, 1, 1, 0))
    return m.build()


def structure(*objects: object) -> bytes:
    """Of a model, as it travels."""
    packer = msgpack.Packer()
    return b"".join(packer.pack(one) for one in objects)


def sealed_model(raw: bytes, before: int = 0) -> tuple[int, list[int]]:
    """Sealed memory of a model whose structure follows `before` bytes that were never written; and where that is."""
    fd = os.memfd_create("enemy-model", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, before + len(raw))
    os.pwrite(fd, raw, before)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, ALL_SEALS)
    return fd, [before, len(raw)]
