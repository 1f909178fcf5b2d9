"""One connection of a satellite, or of Home Assistant for one: what its messages do, and when a word counts as spoken.

The next message is read when the one before is done, so a satellite that sends faster than its sound can be listened
to waits in its own socket, and what it can have in memory here is one message.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from wyoming.audio import AudioChunk, AudioChunkConverter, AudioStart, AudioStop
from wyoming.error import Error
from wyoming.info import Attribution, Describe, Info, WakeModel, WakeProgram
from wyoming.ping import Ping, Pong
from wyoming.server import AsyncEventHandler
from wyoming.wake import Detect, Detection, NotDetected

from burst import BurstError
from driver.gateways.wyoming import message_reader
from driver.gateways.wyoming.message_reader import MessageReader, RefusedMessage
from driver.gateways.wyoming.wake_stream import WakeStream

if TYPE_CHECKING:
    from collections.abc import Iterable

    from wyoming.event import Event

    from driver.gateways.wyoming.satellite_figures import SatelliteFigures
    from driver.gateways.wyoming.wake_models import WakeModels

_LOG = logging.getLogger(__name__)
RATE = 16000
YIELDS_AFTER = 30.0  #: seconds without a message, after which a newcomer may take a satellite's place
_MOST_LOGGED = 100  # errors of one satellite
_RATES = 4000, 192000
MOST_SECONDS = 30
"""Of sound in one message. It is listened to before the next one is read, even if the satellite has vanished."""
_MALFORMED = (AttributeError, KeyError, TypeError, ValueError, RecursionError, ArithmeticError)


class TriggerOptions(NamedTuple):
    """When a word counts as spoken, as wyoming-openwakeword has it.

    threshold: activations above it count. trigger_level: so many of them, where one at or below it takes one back.
    refractory: seconds of sound after a detection in which the word is not detected again.
    """

    threshold: float = 0.5
    trigger_level: int = 1
    refractory: float = 2.0


class WakeTrigger:
    """A trigger for one wake word, in one stream."""

    def __init__(self, options: TriggerOptions) -> None:
        self._options = options
        self._count, self._deaf_until = 0, 0.0
        self.was_detected = False

    def is_spoken(self, activation: float, second: float) -> bool:
        """second: of the stream, at the end of what gave this activation."""
        if not activation > self._options.threshold:
            self._count = max(0, self._count - 1)
            return False
        if second < self._deaf_until:
            return False
        self._count += 1
        if self._count < self._options.trigger_level:
            return False
        self._count, self._deaf_until = 0, second + self._options.refractory
        self.was_detected = True
        return True


class SatelliteHandler(AsyncEventHandler):
    """Answers one connection until it ends."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        models: WakeModels,
        trigger: TriggerOptions,
        figures: SatelliteFigures,
    ) -> None:
        super().__init__(reader, writer)
        self._models, self._options, self._figures = models, trigger, figures
        self._messages = MessageReader(reader)
        peer = writer.get_extra_info("peername")
        self.name = figures.enter(str(peer[0]) if peer else "unix", models.words)
        self._wanted = tuple(models.words)
        self._format: tuple[int, int, int] | None = None
        self._heard = -math.inf  # monotonic seconds
        self._begin()

    def was_heard(self) -> bool:
        """Return True if it has sent a message lately: it is no idle one."""
        return time.monotonic() < self._heard + YIELDS_AFTER

    def _begin(self) -> None:
        """Begin a new stream."""
        self._stream = WakeStream(self._models)
        self._triggers = {name: WakeTrigger(self._options) for name in self._models.words}
        self._converter = AudioChunkConverter(rate=RATE, width=2, channels=1)
        self._milliseconds = 0.0

    async def run(self) -> None:
        """Read messages until the connection ends, or is ended because of one of them."""
        try:
            while (event := await self._messages.read()) is not None:
                self._heard = time.monotonic()
                await self.handle_event(event)
        except RefusedMessage as error:
            await self._end(str(error), "bad-message")
        except _MALFORMED as error:
            await self._end(f"a message cannot be read: {type(error).__name__}: {error}", "bad-message")
        except BurstError as error:
            await self._end(f"the device fails: {error}", "device-failed")
        except (OSError, EOFError):
            pass  # it has gone; what it had said is forgotten with this object
        except asyncio.CancelledError:
            self.writer.transport.abort()
            raise
        finally:
            try:
                await self._close()
            finally:
                self._figures.leave(self.name)

    async def _close(self) -> None:
        """Close at once: a transport that is closed still waits for the satellite to take the last answer."""
        self.writer.close()
        try:
            async with asyncio.timeout(message_reader.COMPLETE_WITHIN):
                await self.writer.wait_closed()
        except OSError:
            self.writer.transport.abort()

    async def _end(self, text: str, code: str) -> None:
        if self._figures.note(self.name, "errors") <= _MOST_LOGGED:
            _LOG.warning("satellite %s: %s", self.name, text)
        with suppress(OSError, EOFError):
            await self.write_event(Error(text[:500], code).event())

    async def write_event(self, event: Event) -> None:
        """Send a message. Raise TimeoutError, an OSError, when the satellite does not take it."""
        async with asyncio.timeout(message_reader.COMPLETE_WITHIN):
            await super().write_event(event)

    async def handle_event(self, event: Event) -> bool:
        """Answer a message. Raise RefusedMessage, and BurstError when the device fails for good."""
        if AudioChunk.is_type(event.type):
            await self._listen(AudioChunk.from_event(event))
        elif AudioStart.is_type(event.type):
            self._check(AudioStart.from_event(event))
            self._begin()
        elif AudioStop.is_type(event.type):
            if not any(self._triggers[name].was_detected for name in self._wanted):
                await self.write_event(NotDetected().event())
        elif Detect.is_type(event.type):
            self._want(Detect.from_event(event).names)
        elif Describe.is_type(event.type):
            await self.write_event(service_info(self._models).event())
        elif Ping.is_type(event.type):
            await self.write_event(Pong(text=Ping.from_event(event).text).event())
        return True  # messages of other kinds are for other services

    def _want(self, names: Iterable[str] | None) -> None:
        """Return those that it names; all if it names none."""
        known = {_plain(key): name for name, word in self._models.words.items() for key in (word.phrase, name)}
        asked = list(names or self._models.words)
        if not all(isinstance(name, str) for name in asked):
            raise RefusedMessage("detect: names are strings")
        if unknown := [name for name in asked if _plain(name) not in known]:
            there = ", ".join(self._models.words)
            raise RefusedMessage(f"detect: there is no wake word {unknown[0]!r:.60}; there are {there}")
        self._wanted = tuple(dict.fromkeys(known[_plain(name)] for name in asked))
        self._figures.wants(self.name, self._wanted)

    def _check(self, sound: AudioStart | AudioChunk) -> None:
        """Check the form of the sound, which wyoming converts from."""
        form = sound.rate, sound.width, sound.channels
        if not all(type(each) is int for each in form):
            raise RefusedMessage(f"rate, width and channels are integers, not {form!r:.60}")
        low, high = _RATES
        if not low <= sound.rate <= high or sound.width not in {1, 2, 3, 4} or sound.channels not in {1, 2}:
            raise RefusedMessage(
                f"sound of {sound.rate} Hz, {sound.width} bytes and {sound.channels} channels cannot be converted; "
                f"send {low} to {high} Hz, 1 to 4 bytes, 1 or 2 channels, at best 16000 Hz, 2 bytes, 1 channel"
            )
        if form != self._format:  # a converter remembers the samples before
            self._format, self._converter = form, AudioChunkConverter(rate=RATE, width=2, channels=1)

    async def _listen(self, chunk: AudioChunk) -> None:
        self._check(chunk)
        if len(chunk.audio) % (chunk.width * chunk.channels):
            raise RefusedMessage(
                f"{len(chunk.audio)} bytes are not a whole number of samples of {chunk.width} bytes "
                f"and {chunk.channels} channels"
            )
        if chunk.seconds > MOST_SECONDS:
            raise RefusedMessage(f"a message has {chunk.seconds:.0f} s of sound; at most {MOST_SECONDS} are taken")
        begin = chunk.timestamp if type(chunk.timestamp) is int else round(self._milliseconds)
        self._milliseconds += 1000 * chunk.seconds
        self._figures.note(self.name, "seconds", chunk.seconds)
        samples = np.frombuffer(self._converter.convert(chunk).audio, np.int16)
        async for activations in self._stream.feed(samples, self._wanted):
            second = self._stream.samples / RATE
            for name, activation in activations.items():
                if self._triggers[name].is_spoken(activation, second):
                    self._figures.note(self.name, f"detections {name}")
                    _LOG.info("satellite %s: %s, %.2f", self.name, name, activation)
                    await self.write_event(Detection(name=name, timestamp=begin).event())


def _plain(name: str) -> str:
    """Return a name for comparison, by wyoming-openwakeword's rule: "Hey Jarvis" is hey_jarvis."""
    return name.lower().replace("_", " ").strip()


def service_info(models: WakeModels) -> Info:
    """Return the answer to `describe`."""
    source = Attribution("David Scripka", "https://github.com/dscripka/openWakeWord")
    words = [
        WakeModel(
            name=word.name,
            attribution=source,
            installed=True,
            description=word.phrase,
            version=None,
            languages=[],
            phrase=word.phrase,
        )
        for word in models.words.values()
    ]
    program = WakeProgram(
        name="burst",
        attribution=source,
        installed=True,
        description="Wake words of openWakeWord's models on one device",
        version=None,
        models=words,
    )
    return Info(wake=[program])


async def refuse(writer: asyncio.StreamWriter, text: str) -> None:
    """Tell a client why its connection ends at once, without waiting for it."""
    event = Error(text, "too-many").event()
    data = json.dumps(event.data).encode()
    writer.write(json.dumps({"type": event.type, "data_length": len(data)}).encode() + b"\n" + data)
    writer.close()


__all__ = ["SatelliteHandler", "TriggerOptions", "WakeTrigger", "refuse", "service_info"]
