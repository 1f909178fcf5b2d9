"""Devices that serve bursts themselves: with an executor of their own, or with a firmware that speaks the queues.

The executions are those of another device of this package, or of the reference device.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from burst import (
    ErrorStatus,
    ExecutionBurst,
    ExecutionBurstServer,
    GeneralFailure,
    PeerDied,
    Request,
    Result,
)
from burst.channel import Channel
from burst.wire import Token
from burst_test_devices.firmware import FirmwareBurst
from burst_test_devices.odd import Slow
from driver.devices.reference import ReferenceDevice
from driver.interface import BoundExecution, Needs, PreparedModel
from driver.protocol.model_codec import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from burst import BurstOffer, Memory
    from driver.interface import BindOptions, Preparation
    from driver.nn import Model

    Configure = Callable[[BurstOffer], ExecutionBurst | None]
_PATIENCE = 20.0  # seconds


class OwnModel(PreparedModel):
    """Another prepared model, but for its bursts."""

    def __init__(self, prepared: PreparedModel, configure: Configure, versions: Sequence[int] = (2, 1)) -> None:
        self._prepared, self._configure, self.is_static = prepared, configure, prepared.is_static
        self.burst_versions = versions

    def bind(self, inputs: Sequence[Any], outputs: Sequence[Any], options: BindOptions) -> BoundExecution:
        """As the other one."""
        return self._prepared.bind(inputs, outputs, options)

    def configure_execution_burst(self, offer: BurstOffer) -> ExecutionBurst | None:
        """As the device does."""
        return self._configure(offer)


class Keeping:
    """A BurstExecutorWithCache that keeps memory by slot, and binds each request anew with what the engine offers."""

    def __init__(self, offer: BurstOffer) -> None:
        self._offer, self.memories = offer, dict[int, "Memory"]()

    def is_cache_entry_present(self, slot: int) -> bool:
        return slot in self.memories

    def add_cache_entry(self, slot: int, memory: Memory) -> None:
        self.memories[slot] = memory

    def remove_cache_entry(self, slot: int) -> None:
        self.memories.pop(slot, None)

    def execute(self, request: Request, slots: Sequence[int | Token], *_: object) -> Result:
        """The deadline and the loop timeout are known to what it binds."""
        assert self._offer.bind
        pools = tuple(slot if isinstance(slot, Token) else self.memories[slot] for slot in slots)
        execution = self._offer.bind(request._replace(pools=pools))
        execution.run()
        return Result(ErrorStatus.NONE, output_shapes=tuple(execution.shapes))


class OwnExecutor(ReferenceDevice):
    """Bursts have an executor that keeps the client's memory."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """As the other device."""
        return OwnModel(super().prepare(model, preparation), _with_executor)


class SlowExecutor(Slow):
    """The same, as slow as the input says."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """As the other device."""
        return OwnModel(super().prepare(model, preparation), _with_executor)


def _with_executor(offer: BurstOffer) -> ExecutionBurst:
    return ExecutionBurstServer.create_with_executor(offer, Keeping(offer))


class ThisModel(OwnModel):
    """Bursts run the prepared model itself, as in a sample driver's `ExecutionBurstServer::create(..., this)`."""

    def __init__(self, prepared: PreparedModel) -> None:
        super().__init__(prepared, lambda _: None)

    def configure_execution_burst(self, offer: BurstOffer) -> ExecutionBurst | None:
        """Serve it."""
        return ExecutionBurstServer.create(offer, self)


class FromThis(ReferenceDevice):
    """Bursts run the prepared model that they were opened on."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """As the other device."""
        return ThisModel(super().prepare(model, preparation))


class FromInner(ReferenceDevice):
    """Bursts run another prepared model than the other paths do."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """As the other device."""
        inner = super().prepare(model, preparation)
        return OwnModel(inner, lambda offer: ExecutionBurstServer.create(offer, inner))


class FirmwareInside(ReferenceDevice):
    """Bursts are served by a firmware in a thread of the engine."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """As the other device."""
        return OwnModel(super().prepare(model, preparation), FirmwareBurst.of)


class FirmwareProcess:
    """The process of a firmware, as the driver sees it: started with the first burst, and again when it has died."""

    def __init__(self, kind: str) -> None:
        """`kind`: the device that executes there."""
        self._kind, self._numbers = kind, itertools.count(1)
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._bursts: dict[int, RemoteBurst] = {}
        self._answers: dict[int, str | None] = {}
        self._answered = threading.Condition()

    def configure(self, model: Model, offer: BurstOffer) -> ExecutionBurst:
        """Hands the queues over. Raises GeneralFailure."""
        encoded, number = encode(model), next(self._numbers)
        wires, fds = zip(offer.requests.to_wire(), offer.results.to_wire(), strict=True)
        everything = [*fds[0], *fds[1], offer.callback.fileno(), *encoded.fds]
        with self._lock:
            channel = self._channel = self._channel or self._start()
            self._bursts[number] = burst = RemoteBurst(channel, number, offer)
        try:
            channel.send(
                ["configure", number, self._kind, wires, encoded.where, [offer.version, offer.spin]], everything
            )
            with self._answered:
                if not self._answered.wait_for(lambda: number in self._answers, _PATIENCE):
                    raise GeneralFailure("the firmware does not answer")
                said = self._answers.pop(number)
        except PeerDied as error:
            said = str(error)
        if said:
            self._bursts.pop(number, None)
            raise GeneralFailure(f"the firmware cannot serve this burst: {said}")
        offer.callback.close()  # the firmware has its own
        return burst

    def _start(self) -> Channel:
        near, far = Channel.pair()
        with far:
            command = [sys.executable, "-P", "-m", "burst_test_devices.firmware", str(far.fileno())]
            process = subprocess.Popen(command, pass_fds=[far.fileno()])
        threading.Thread(target=self._listen, args=(near, process), name="firmware-driver", daemon=True).start()
        return near

    def _listen(self, channel: Channel, process: subprocess.Popen[bytes]) -> None:
        try:
            while True:
                number, said = channel.receive().body
                if said is None:
                    self._bursts.pop(number).on_end()
                else:
                    self._say(number, said)
        except PeerDied:
            process.wait()
            with self._lock:
                self._channel = None
                bursts = [number for number, burst in self._bursts.items() if burst.channel is channel]
            for number in bursts:
                self._say(number, f"it died with status {process.returncode}")
                burst = self._bursts.pop(number)
                burst.life.die()
                burst.on_end()
            channel.close()

    def _say(self, number: int, said: str) -> None:
        with self._answered:
            self._answers[number] = said
            self._answered.notify_all()


class RemoteBurst(ExecutionBurst):
    """A burst in the firmware's process."""

    def __init__(self, channel: Channel, number: int, offer: BurstOffer) -> None:
        self.channel, self._number, self.on_end, self.life = channel, number, offer.on_end, offer.life

    def start(self) -> None:
        self._tell("start")

    def stop(self) -> None:
        self._tell("stop")

    def free_memory(self, slots: Iterable[int]) -> None:
        self._tell("free_memory", *slots)

    def _tell(self, *what: object) -> None:
        with suppress(PeerDied):  # the thread that listens calls `on_end`
            self.channel.send([what[0], self._number, *what[1:]])


class Firmware(ReferenceDevice):
    """Bursts are served by a firmware in a process of its own."""

    needs = Needs(system_calls=("execve",))  # it starts the firmware
    kind = "reference"
    versions: Sequence[int] = (2, 1)

    def __init__(self) -> None:
        self._process = FirmwareProcess(self.kind)

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """Plain executions are those of the other device."""
        prepared = super().prepare(model, preparation)
        return OwnModel(prepared, lambda offer: self._process.configure(model, offer), self.versions)


class OldFirmware(Firmware):
    """The same, and it speaks only what the HAL 1.2 has."""

    versions = (1,)


class SlowFirmware(Firmware):
    """The same, as slow as the input says."""

    kind = "burst_test_devices.odd:Slow"
