"""A client that sends what no encoder emits, to a real device, as fast as it can: answered, refused, and forgotten."""

import random
import time
from contextlib import closing
from itertools import count

import numpy as np
import pytest
import stress
from mutator import PacketMutator
from waiting import PATIENCE
from wire_packets import GOLDEN

import driver
from burst import Controller
from burst.datum import DATUM, DATUM_DTYPE

X = np.ones((1, 4), np.float32)
REQUEST_IDENTIFIER = 9
PACKETS = {"short": {1: 10_000, 2: 20_000}, "stress": {1: stress.times(2_000_000), 2: stress.times(8_000_000)}}


class Hostile:
    """A burst whose queues and slots are its own, and whose packets are anybody's."""

    def __init__(self, prepared, version, seed):
        self._controller = Controller(prepared.configure_burst(50e-6), versions=[version])
        self._writer, self._reader = self._controller._writer, self._controller._reader
        self.version, self._ids = version, count(2**60)
        self._random = random.Random(seed)
        golden = next(g.direction for g in GOLDEN if g.direction.kind == "request" and g.direction.version == version)
        self._mutate = PacketMutator(golden, seed)
        request = prepared_request(prepared)
        self._good = bytes(self._controller.encode(request))
        self.answers = 0

    def mutants(self, n):
        """Packets near the good one, each made from it or from the one before; in version 2 mostly with an id."""
        packet = self._good
        for _ in range(n):
            packet = self._mutate(packet if self._random.random() < 0.5 else self._good)
            packet = packet[: len(packet) - len(packet) % DATUM] or self._good
            if packet[-DATUM] == REQUEST_IDENTIFIER and self._random.random() < 0.9:
                packet = packet[:-16] + next(self._ids).to_bytes(8, "little") + packet[-8:]
            yield packet

    def send(self, packet):
        self._writer.write(np.frombuffer(packet, DATUM_DTYPE), 20)

    def drain(self):
        """What has been answered, raw."""
        n = self._reader.available
        return self._reader.read(n).tobytes() if n else b""

    def attack(self, n):
        """Sends n mutants; in version 1 one at a time, as that demands."""
        for packet in self.mutants(n):
            self.send(packet)
            if self.version == 1:
                assert self._reader.read(1, PATIENCE).size == 1
                self.answers += 1
            self.answers += len(self.drain()) // (3 * DATUM)

    def check(self):
        """A good request is still answered; in version 2 by its id, after all that was sent before it."""
        packet, number = bytearray(self._good), next(self._ids)
        if self.version > 1:
            packet[-16:-8] = number.to_bytes(8, "little")
        self.send(packet)
        seen = b""
        identifier = bytes([4, *bytes(7)]) + number.to_bytes(8, "little") + bytes(8)
        while identifier not in seen if self.version > 1 else not seen:
            seen = seen[-2 * DATUM :] + self._reader.read(1, PATIENCE).tobytes() + self.drain()

    def close(self):
        self._controller.close()


def prepared_request(prepared):
    from driver.client.workspace import InputSet, OutputSet, Workspace

    return Workspace(InputSet(prepared.model, ((1, 4),)), OutputSet(prepared.model)).request


def resident(pid):
    with open(f"/proc/{pid}/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("length", ["short", pytest.param("stress", marks=pytest.mark.stress)])
@pytest.mark.usefixtures("place")
def test_mutated_packets(kit, version, length, tally):
    """No crash, no hang, no growth: the device answers the next good request and another client, and is no larger."""
    seed, packets = 20261121 if length == "short" else random.randrange(2**31), PACKETS[length][version]
    with (
        driver.connect() as device,
        driver.connect() as other,
        device.prepare(kit.add_model()) as prepared,
        other.prepare(kit.add_model()) as innocent,
        innocent.burst() as burst,
    ):
        begin, before, sent, round_ = time.monotonic(), None, 0, 0
        while sent < packets:
            part = min(packets - sent, 20_000)
            with closing(Hostile(prepared, version, f"{seed} {round_}")) as hostile:
                hostile.attack(part)
                hostile.check()
            sent, round_ = sent + part, round_ + 1
            assert burst.run(X, timeout=20).outputs[0].tolist() == [[2.0] * 4]
            before = before or resident(device.engine_pid)
        grown = resident(device.engine_pid) - before
        assert grown < 16 << 20
        seconds = time.monotonic() - begin
        tally("mutated packets to a device", sent)
        print(f"version {version}, seed {seed}: {sent} packets in {seconds:.0f} s, grown by {grown >> 10} KiB")
