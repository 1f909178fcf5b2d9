"""Devices whose own bursts are wrong, each in one way. On the plain path all are right.

They shorten the time that the engine gives a burst to end, because tests wait for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from burst import ErrorStatus, ExecutionBurst, ExecutionBurstServer, ResourceExhaustedTransient
from burst.datum import DATUM, FmqResultDatum
from burst.wire import Token
from burst_test_devices.firmware import Answer, FirmwareBurst, write_result
from burst_test_devices.own_bursts import OwnModel
from driver.devices.reference import ReferenceDevice
from driver.engine import open_burst
from driver.interface import Preparation
from driver.nn import ModelBuilder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from burst import BurstOffer, Memory
    from driver.interface import PreparedModel
    from driver.nn import Model


_RECYCLED = 1 << 14  # bytes; other memory is dropped by clients at any time, which would make this a matter of luck


class WrongBursts(ReferenceDevice):
    """A firmware in a thread, as a subclass makes it."""

    name = "wrong"

    def __init__(self) -> None:
        open_burst.GRACE = 0.3

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """As the reference device."""
        return OwnModel(super().prepare(model, preparation), self.configured)

    def configured(self, offer: BurstOffer) -> Any:
        """What `configure_execution_burst` returns."""
        return FirmwareBurst.of(offer)


class Raising(WrongBursts):
    """Raises, for another reason than a status."""

    def configured(self, offer: BurstOffer) -> Any:
        raise RuntimeError("no channel of the accelerator is free")


class Refusing(WrongBursts):
    """Refuses with a status."""

    def configured(self, offer: BurstOffer) -> Any:
        raise ResourceExhaustedTransient("all 4 channels are taken")


class Nonsensical(WrongBursts):
    """Returns what is no burst."""

    def configured(self, offer: BurstOffer) -> Any:
        return "a burst"


class FromNumber(WrongBursts):
    """Serves with what is no prepared model."""

    def configured(self, offer: BurstOffer) -> Any:
        return ExecutionBurstServer.create(offer, 5)


class FromOther(WrongBursts):
    """Serves with a prepared model that has another input."""

    def configured(self, offer: BurstOffer) -> Any:
        builder = ModelBuilder()
        builder.output(builder.operation("FLOOR", builder.input("float16", (4,))))
        return ExecutionBurstServer.create(offer, ReferenceDevice().prepare(builder.build(), Preparation()))


class Hasty(WrongBursts):
    """Says that the burst has ended before it has begun."""

    def configured(self, offer: BurstOffer) -> Any:
        offer.on_end()
        return super().configured(replace(offer, on_end=lambda: None))


class _Stillborn(FirmwareBurst):
    def start(self) -> None:
        raise RuntimeError("the accelerator does not start")


class Stillborn(WrongBursts):
    """Its bursts cannot be started."""

    def configured(self, offer: BurstOffer) -> Any:
        return _Stillborn.of(offer)


class _Deaf(FirmwareBurst):
    def free_memory(self, slots: Iterable[int]) -> None:
        raise RuntimeError(f"what are {list(slots)}?")


class Deaf(WrongBursts):
    """Its bursts cannot free memory."""

    def configured(self, offer: BurstOffer) -> Any:
        return _Deaf.of(offer)


class Endless(WrongBursts):
    """Never says that a burst has ended."""

    def configured(self, offer: BurstOffer) -> Any:
        return super().configured(replace(offer, on_end=lambda: None))


class _Stubborn(FirmwareBurst):
    def stop(self) -> None:
        raise RuntimeError("it goes on")

    @property
    def answered(self) -> int:
        raise RuntimeError("it does not count")


class Stubborn(WrongBursts):
    """Its bursts cannot be stopped: they end with their client's queues, and never say so."""

    def configured(self, offer: BurstOffer) -> ExecutionBurst:
        return _Stubborn.of(replace(offer, on_end=lambda: None))


class _Stale(FirmwareBurst):
    """What was freed is taken for what comes next, if it is as large as that of one row of the kit."""

    _spare: Memory | None = None

    def free_memory(self, slots: Iterable[int]) -> None:
        for slot in slots:
            memory = self.memories.pop(slot, None)
            if memory is not None and memory.nbytes == _RECYCLED:
                self._spare = memory

    def pools(self, slots: Sequence[int | Token]) -> list[Memory | Token]:
        for slot in slots:
            if slot not in self.memories and self._spare is not None and not isinstance(slot, Token):
                self.memories[slot], self._spare = self._spare, None
        return super().pools(slots)


class Stale(WrongBursts):
    """Its bursts take freed memory for the memory of the next slot."""

    def configured(self, offer: BurstOffer) -> Any:
        return _Stale.of(offer)


class _Sorting(FirmwareBurst):
    def pools(self, slots: Sequence[int | Token]) -> list[Memory | Token]:
        return super().pools(slots if any(isinstance(slot, Token) for slot in slots) else sorted(slots))


class Sorting(WrongBursts):
    """Its bursts take the pools of a request in the order of their slots."""

    def configured(self, offer: BurstOffer) -> Any:
        return _Sorting.of(offer)


class _Talkative(FirmwareBurst):
    _has_measured = False

    def times(self, found: Answer, in_driver: int, measure: bool) -> tuple[int, int]:
        self._has_measured |= measure
        return super().times(found, in_driver, self._has_measured)


class Talkative(WrongBursts):
    """Once a request of a burst has asked for times, all get them."""

    def configured(self, offer: BurstOffer) -> Any:
        return _Talkative.of(offer)


class _Tireless(FirmwareBurst):
    def is_late(self, deadline: int | None) -> bool:
        return False


class Tireless(WrongBursts):
    """Its bursts know no deadlines."""

    def configured(self, offer: BurstOffer) -> Any:
        return _Tireless.of(offer)


class _Cheerful(FirmwareBurst):
    def fitting(self, raw: bytes, room: int, number: int) -> bytes:
        return write_result(ErrorStatus.NONE, (), (2**64 - 1,) * 2, number, self._version)


class Cheerful(WrongBursts):
    """Its bursts leave shapes out where the queue is too short for a result, and say that all is well."""

    def configured(self, offer: BurstOffer) -> Any:
        return _Cheerful.of(offer)


class _Halving(FirmwareBurst):
    def fitting(self, raw: bytes, room: int, number: int) -> bytes:
        return raw[:room]


class Halving(WrongBursts):
    """Its bursts write as much of a result as there is room for."""

    def configured(self, offer: BurstOffer) -> Any:
        return _Halving.of(offer)


class _Leaking(FirmwareBurst):
    def written(self, raw: bytes) -> bytes:
        elements = bytearray(raw)
        for at in range(0, len(raw), DATUM):
            if raw[at] == FmqResultDatum.OPERAND_INFORMATION.number:
                elements[at + 9] = 0xA5
        return bytes(elements)


class Leaking(WrongBursts):
    """Its bursts write what was in their memory where results have no meaning."""

    def configured(self, offer: BurstOffer) -> Any:
        return _Leaking.of(offer)
