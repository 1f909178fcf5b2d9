"""Wake words for Home Assistant: the stream, the protocol with wyoming's own client, and what is wrong with both."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import AsyncExitStack, suppress
from itertools import pairwise

import numpy as np
import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, generate_latest
from wake_nets import RATE, STEP, activations, save, silence, speech, tone, write_features, write_models, write_word
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncClient
from wyoming.error import Error
from wyoming.event import Event
from wyoming.info import Describe, Info
from wyoming.ping import Ping, Pong
from wyoming.wake import Detect, Detection, NotDetected
from zeroconf import ServiceStateChange
from zeroconf.asyncio import AsyncServiceBrowser, AsyncZeroconf

import driver
from burst import DeviceUnavailable
from driver.cli.command import burst
from driver.errors import DeviceFailed
from driver.gateways.wyoming.message_reader import MOST_DATA, MOST_SOUND
from driver.gateways.wyoming.satellite import TriggerOptions, WakeTrigger
from driver.gateways.wyoming.satellite_figures import metrics_collector
from driver.gateways.wyoming.wake_models import WakeModels, read_models
from driver.gateways.wyoming.wake_server import WakeOptions, WakeServer, wyoming_address
from driver.gateways.wyoming.wake_stream import WakeStream

ANYWHERE = "tcp://127.0.0.1:0"
COMMAND = [sys.executable, "-m", "driver.cli", "serve", "onnxruntime"]
WORD = "tone_v0.1"
SPOKEN = speech(1, 1.2, 1)


@pytest.fixture(scope="module")
def word(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("words"))


class Satellite:
    """wyoming's own client, and what a satellite does with it."""

    def __init__(self, uri):
        self._client = AsyncClient.from_uri(uri)

    async def __aenter__(self):
        await self._client.connect()
        return self

    async def __aexit__(self, *_):
        with suppress(OSError):  # what was not read when the server ended the connection
            await self._client.disconnect()

    async def send(self, *messages):
        for message in messages:
            await self._client.write_event(message if isinstance(message, Event) else message.event())

    async def receive(self):
        return await asyncio.wait_for(self._client.read_event(), 60)

    async def say(self, samples, rate=RATE, width=2, channels=1, size=1024):
        """In chunks as satellites send them."""
        await self.send(AudioStart(rate, width, channels))
        for begin in range(0, len(samples), size):
            await self.send(AudioChunk(rate, width, channels, samples[begin : begin + size].tobytes()))

    async def hear(self, samples, **form):
        """All that a whole stream is answered with."""
        await self.say(samples, **form)
        await self.send(AudioStop(), Ping("end"))
        found = []
        while (event := await self.receive()).type != "pong":
            found.append(event)
        return found


def served(word, work, uri=ANYWHERE, **options):
    """Runs `work(server)` beside a server."""

    async def main():
        async with WakeServer("onnxruntime", [word], uri, WakeOptions(**options)) as server:
            return await asyncio.wait_for(work(server), 120)

    return asyncio.run(main())


def one_satellite(word, work, **options):
    """Runs `work(satellite)` beside a server."""

    async def with_server(server):
        async with Satellite(server.uri) as satellite:
            return await work(satellite)

    return served(word, with_server, **options)


def metrics_registry(server):
    registry = CollectorRegistry()
    registry.register(metrics_collector(server.figures, server.models.stats))
    return registry


def times(events):
    return [Detection.from_event(event).timestamp for event in events if Detection.is_type(event.type)]


class TestStream:
    @pytest.mark.integration
    @pytest.mark.parametrize("size", [1280, 1, 999, 5000, 60000], ids=str)
    def test_it_is_the_definition(self, word, size):
        """However the sound is cut, each 80 ms have the activation that the models give of the whole clip."""
        samples = SPOKEN[: RATE // 2] if size == 1 else SPOKEN

        async def main():
            async with WakeModels(read_models([word]), "onnxruntime", 4) as models:
                stream, found = WakeStream(models), []
                for begin in range(0, len(samples), size):
                    part = samples[begin : begin + size]
                    found.extend([each[WORD] async for each in stream.feed(part, [WORD])])
                return found

        expected = activations(samples)
        np.testing.assert_allclose(asyncio.run(main()), expected, atol=1e-4)
        assert size == 1 or (expected.max() > 0.9 and expected[12] < 0.1)

    def test_a_longer_window(self, word, tmp_path):
        """A wake word may look at more embeddings than 16."""
        write_word(tmp_path / "long.onnx", window=34)

        async def main():
            async with WakeModels(read_models([word, tmp_path / "long.onnx"]), "onnxruntime", 4) as models:
                stream = WakeStream(models)
                return [each async for each in stream.feed(SPOKEN, [WORD, "long"])]

        found = asyncio.run(main())
        np.testing.assert_allclose([each["long"] for each in found], activations(SPOKEN, 34), atol=1e-4)
        np.testing.assert_allclose([each[WORD] for each in found], activations(SPOKEN), atol=1e-4)


class TestTrigger:
    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            (TriggerOptions(), [2, 9]),
            (TriggerOptions(trigger_level=3), [4]),
            (TriggerOptions(trigger_level=2), [3]),
            (TriggerOptions(refractory=0.0), [2, 3, 4, 9]),
            (TriggerOptions(threshold=0.95), []),
            (TriggerOptions(refractory=100.0), [2]),
        ],
    )
    def test_options(self, options, expected):
        """The threshold, how many activations it takes, and the time in which it is deaf; NaN is no activation."""
        values = [0.1, 0.5, 0.9, 0.8, 0.9, 0.2, 0.1, np.nan, 0.3, 0.6]
        trigger = WakeTrigger(options._replace(refractory=options.refractory / 10))
        assert [n for n, value in enumerate(values) if trigger.is_spoken(value, n * 0.05)] == expected


class TestProtocol:
    def test_description(self, word):
        """`describe` is answered with the wake words, by name and phrase; `ping` with `pong`."""

        async def work(satellite):
            await satellite.send(Describe(), Ping("x"))
            info = Info.from_event(await satellite.receive())
            assert [(each.name, each.phrase, each.installed) for each in info.wake[0].models] == [(WORD, "tone", True)]
            assert Pong.from_event(await satellite.receive()).text == "x"

        one_satellite(word, work)

    def test_detection(self, word):
        """A spoken word is told once, with its name and its time; a stream without one ends with not-detected."""
        first = int(np.argmax(activations(SPOKEN) > 0.5)) * 80

        async def work(satellite):
            await satellite.send(Detect(names=["tone"]))
            (event,) = await satellite.hear(SPOKEN)
            assert Detection.from_event(event).name == WORD
            assert first - 64 <= times([event])[0] <= first + 80
            (event,) = await satellite.hear(silence(1))
            assert NotDetected.is_type(event.type)
            assert len(times(await satellite.hear(speech(0.5, 1, 3, 1)))) == 2  # again, in the same stream

        one_satellite(word, work)

    def test_threshold(self, word):
        """Options are those of the server."""

        async def work(satellite):
            assert times(await satellite.hear(SPOKEN)) == []

        one_satellite(word, work, trigger=TriggerOptions(threshold=1.0))

    @pytest.mark.parametrize(
        ("rate", "width", "channels"), [(8000, 2, 1), (44100, 2, 2), (16000, 4, 1), (16000, 1, 1), (48000, 2, 1)]
    )
    def test_other_sound_is_converted(self, word, rate, width, channels):
        """Rates, widths and channels of other microphones give the same detection."""
        mono = np.concatenate((silence(1, rate), tone(1.2, rate), silence(1, rate)))
        wide = {1: lambda: (mono // 256 + 128).astype(np.uint8), 2: lambda: mono, 4: lambda: mono.astype("<i4") << 16}
        samples = np.repeat(wide[width]()[:, None], channels, axis=1) // channels

        async def work(satellite):
            found = await satellite.hear(samples.astype(wide[width]().dtype), rate=rate, width=width, channels=channels)
            assert len(times(found)) == 1

        one_satellite(word, work)

    @pytest.mark.integration
    def test_many_satellites(self, word):
        """Sixteen at once: each hears its own words, at their times, and nothing of the others."""

        async def one(server, n):
            samples = speech(1 + n * 0.16, 1.2, 1) if n % 2 else silence(3)
            async with Satellite(server.uri) as satellite:
                return times(await satellite.hear(samples))

        async def work(server):
            found = await asyncio.gather(*(one(server, n) for n in range(16)))
            for n, each in enumerate(found):
                expected = int(np.argmax(activations(speech(1 + n * 0.16, 1.2, 1)) > 0.5)) * 80
                assert each == [] if n % 2 == 0 else abs(each[0] - expected) <= 80
            assert len(server.models.stats()) == 3  # one of each model
            counts = server.figures.counts()
            assert len(counts) == 16
            assert sum(each[f"detections {WORD}"] for each in counts.values() if f"detections {WORD}" in each) == 8

        served(word, work)

    def test_satellites_behind_one_address(self, word, tmp_path):
        """Home Assistant connects for all of its satellites: each connection has a name of its own while it is there,
        and figures of its own; the metrics tell which word it listens for.
        """
        write_models(tmp_path)
        write_word(tmp_path / "other_v2.onnx", bias=1000)

        async def work(server):
            async with Satellite(server.uri) as second_of_all:
                async with Satellite(server.uri) as first:
                    for satellite in (first, second_of_all):  # in this order
                        await satellite.send(Detect(names=["Tone" if satellite is first else "other"]), Ping())
                        await satellite.receive()
                    names = {words: name for name, words in server.figures.wanted().items()}
                    assert set(names) == {(WORD,), ("other_v2",)}
                    assert set(names.values()) == {"127.0.0.1", "127.0.0.1#2"}
                    assert len(times(await first.hear(SPOKEN))) == 1
                    assert times(await second_of_all.hear(SPOKEN)) == []
                counts = server.figures.counts()
                assert counts[names[WORD,]][f"detections {WORD}"] == 1
                assert [round(each["seconds"], 3) for each in counts.values()] == [3.2, 3.2]
                assert not any(key.startswith("detections") for key in counts[names["other_v2",]])
                while server.figures.connected > 1:
                    await asyncio.sleep(0)
                async with Satellite(server.uri) as third:
                    await third.send(Ping())
                    await third.receive()
                    assert server.figures.wanted() == {
                        names["other_v2",]: ("other_v2",),
                        names[WORD,]: tuple(server.models.words),
                    }
            text = generate_latest(metrics_registry(server)).decode()
            assert f'burst_satellite_detections_total{{satellite="{names[WORD,]}",word="{WORD}"}} 1.0' in text

        served(tmp_path, work)

    def test_metrics_of_a_word(self, word):
        """A satellite that is connected says by the metrics what it listens for."""

        async def work(server):
            async with Satellite(server.uri) as satellite:
                await satellite.send(Detect(names=["tone"]), Ping())
                await satellite.receive()
                text = generate_latest(metrics_registry(server)).decode()
                assert f'burst_satellite_listens{{satellite="127.0.0.1",word="{WORD}"}} 1.0' in text
                assert "burst_satellites 1.0" in text

        served(word, work)


class TestAddresses:
    def test_answers_are_not_held_back(self):
        """The kernel sends the parts of an answer at once on each connection of an address, in place of waiting for an
        acknowledgement between them.
        """
        with wyoming_address(ANYWHERE).listen() as listener, socket.create_connection(listener.getsockname()):
            connection, _ = listener.accept()
            with connection:
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    def test_a_unix_socket(self, word, tmp_path):
        """Satellites of this account may connect at a path, others not; it is gone when the server is."""
        uri = f"unix://{tmp_path}/wake.sock"

        async def main():
            async with WakeServer("onnxruntime", [word], uri) as server:
                assert server.uri == uri
                assert (tmp_path / "wake.sock").stat().st_mode & 0o777 == 0o700
                async with Satellite(uri) as satellite, Satellite(uri) as other:
                    assert len(times(await satellite.hear(SPOKEN))) == 1
                    assert times(await other.hear(silence(1))) == []
                    assert set(server.figures.wanted()) == {"unix", "unix#2"}
                with pytest.raises(DeviceFailed, match="something is there already"):
                    WakeServer("onnxruntime", [word], uri)
            assert not (tmp_path / "wake.sock").exists()

        asyncio.run(main())

    @pytest.mark.integration
    def test_home_assistant_finds_it(self, word):
        """With --zeroconf a browser of the kind of service that Home Assistant looks for is told its address and port,
        and when it has gone.
        """

        async def main():
            events = asyncio.Queue()

            def tell(zeroconf, service_type, name, state_change):
                events.put_nowait((name, state_change))

            async with AsyncZeroconf(interfaces=["127.0.0.2"]) as network:
                browser = AsyncServiceBrowser(network.zeroconf, "_wyoming._tcp.local.", handlers=[tell])
                async with WakeServer("onnxruntime", [word], "tcp://127.0.0.2:0", WakeOptions(zeroconf=True)) as server:
                    name, change = await asyncio.wait_for(events.get(), 60)
                    assert change is ServiceStateChange.Added
                    assert str(server.address.port) in name
                    info = await network.async_get_service_info("_wyoming._tcp.local.", name)
                    assert info.parsed_addresses() == ["127.0.0.2"]
                    async with Satellite(f"tcp://{info.parsed_addresses()[0]}:{info.port}") as satellite:
                        await satellite.send(Describe())
                        assert Info.from_event(await satellite.receive()).wake[0].name == "burst"
                while (await asyncio.wait_for(events.get(), 60))[1] is not ServiceStateChange.Removed:
                    pass
                await browser.async_cancel()

        asyncio.run(main())

    def test_what_other_machines_cannot_reach_is_not_announced(self, word):
        """It is refused before anything is served."""
        for uri in (ANYWHERE, "unix:///tmp/x"):
            with pytest.raises(DeviceFailed, match="--zeroconf tells other machines"):
                WakeServer("onnxruntime", [word], uri, WakeOptions(zeroconf=True))
        with pytest.raises(DeviceFailed, match="no IPv4 address"):
            served(word, None, uri="tcp://[::]:0", zeroconf=True)


class TestWrong:
    @pytest.mark.integration
    @pytest.mark.parametrize(
        ("message", "told"),
        [
            (Detect(names=["alexa"]), "no wake word 'alexa'; there are tone"),
            (AudioStart(16000, 2, 3), "3 channels cannot be converted"),
            (AudioStart(0, 2, 1), "0 Hz"),
            (AudioStart(16000, 5, 1), "5 bytes"),
            (AudioStart("16000", 2, 1), "integers"),
            (AudioChunk(16000, 2, 1, b"abc"), "not a whole number of samples"),
            (AudioChunk(10**9, 2, 1, b"ab"), "cannot be converted"),
            (AudioChunk(16000, 2, 1, bytes(MOST_SOUND + 2)), "at most"),
            (AudioChunk(4000, 1, 1, bytes(4000 * 31)), "31 s of sound; at most 30"),
            (Event("audio-chunk"), "KeyError"),
            (Event("detect", {"names": 5}), "TypeError"),
            (Event("detect", {"names": [["x"]]}), "names are strings"),
            (Event("describe", {"x": "y" * MOST_DATA}), "at most"),
        ],
    )
    def test_each_mistake_is_told(self, word, message, told):
        """An error says what is wrong, the connection ends, and the next satellite is served."""

        async def work(server):
            async with Satellite(server.uri) as satellite:
                try:
                    await satellite.send(message)
                except OSError:  # the rest of it was not taken
                    assert told == "at most"
                try:
                    event = await satellite.receive()
                    assert told in Error.from_event(event).text
                    assert await satellite.receive() is None
                except OSError:
                    assert told == "at most"
            async with Satellite(server.uri) as satellite:
                assert len(times(await satellite.hear(SPOKEN))) == 1
            assert server.figures.counts()["127.0.0.1"]["errors"] == 1

        served(word, work)

    @pytest.mark.integration
    @pytest.mark.parametrize(
        "sent",
        [
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x00" * 100 + b"\n",
            b"[]\n",
            b'{"type": 5}\n',
            b'{"data_length": "x", "type": "ping"}\n',
            b'{"type": "ping", "data": [], "data_length": 2}\n{}',
            b'{"type": "ping", "payload_length": 99999999999}\n',
            b"[" * 60000 + b"\n",
            b"x" * 200000,
        ],
    )
    def test_no_messages(self, word, sent):
        """What is not Wyoming is answered with an error, and no other satellite feels it."""

        async def work(server):
            reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
            writer.write(sent)
            with suppress(OSError):
                assert b'"type": "error"' in await asyncio.wait_for(reader.read(), 60)
            writer.close()
            async with Satellite(server.uri) as satellite:
                await satellite.send(Ping("x"))
                assert Pong.is_type((await satellite.receive()).type)

        served(word, work)

    def test_a_satellite_that_vanishes(self, word):
        """In the middle of a stream, and of a message: its place is free, and the others' streams go on."""

        async def work(server):
            async with Satellite(server.uri) as other:
                await other.say(SPOKEN[: 2 * RATE])
                for _ in range(5):
                    _, writer = await asyncio.open_connection(server.address.host, server.address.port)
                    head = {"type": "audio-chunk", "data_length": 2, "payload_length": 4096}
                    writer.write(json.dumps(head).encode() + b"\n{}" + bytes(100))
                    await writer.drain()
                    writer.transport.abort()
                async with Satellite(server.uri) as third:  # there is room again
                    await third.send(Ping("x"))
                    await third.receive()
                await other.send(AudioChunk(RATE, 2, 1, SPOKEN[2 * RATE :].tobytes()), AudioStop(), Ping("end"))
                found = []
                while (event := await other.receive()).type != "pong":
                    found.append(event)
                assert len(times(found)) == 1
            while server.figures.connected:
                await asyncio.sleep(0)

        served(word, work, satellites=16)

    def test_too_many(self, word):
        """One more than may be is told so; when one leaves, there is room."""

        async def work(server):
            async with Satellite(server.uri) as first:
                await first.send(Ping("x"))
                await first.receive()
                async with Satellite(server.uri) as second:
                    assert "--satellites" in Error.from_event(await second.receive()).text
            assert server.figures.refused == 1
            while server.figures.connected:
                await asyncio.sleep(0)
            async with Satellite(server.uri) as third:
                await third.send(Ping("x"))
                assert Pong.is_type((await third.receive()).type)

        served(word, work, satellites=1)

    def test_an_idle_satellite_yields(self, word, monkeypatch):
        """One that has been silent for long loses its place when a newcomer has none."""
        monkeypatch.setattr("driver.gateways.wyoming.satellite.YIELDS_AFTER", 0.0)
        monkeypatch.setattr("driver.gateways.wyoming.wake_server.YIELDS_AFTER", 0.0)

        async def work(server):
            async with Satellite(server.uri) as first:
                await first.send(Ping("x"))
                await first.receive()
                async with Satellite(server.uri) as second:
                    await second.send(Ping("y"))
                    assert Pong.is_type((await second.receive()).type)
                    with suppress(OSError):
                        assert await first.receive() is None

        served(word, work, satellites=1)

    def test_another_address_has_places_of_its_own(self, word, tmp_path):
        """One machine that holds all it may have leaves half as many to others."""

        async def work(server):
            async with AsyncExitStack() as stack:
                for _ in range(2):
                    satellite = await stack.enter_async_context(Satellite(server.uri))
                    await satellite.send(Ping("x"))
                    await satellite.receive()
                one_more = await stack.enter_async_context(Satellite(server.uri))
                assert "--satellites" in Error.from_event(await one_more.receive()).text
                address = server.address.host, server.address.port
                reader, writer = await asyncio.open_connection(*address, local_addr=("127.0.0.2", 0))
                writer.write(b'{"type": "ping"}\n')
                assert b"pong" in await reader.readline()
                writer.transport.abort()

        served(word, work, satellites=2)

    def test_a_satellite_that_floods(self, word):
        """It waits in its own socket; another one is answered meanwhile."""

        async def work(server):
            flood = AudioChunk(RATE, 2, 1, silence(15).tobytes()).event()
            async with Satellite(server.uri) as loud, Satellite(server.uri) as other:

                async def send():
                    while True:
                        await loud.send(flood)

                sending = asyncio.create_task(send())
                assert len(times(await other.hear(SPOKEN))) == 1
                assert not sending.done()
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

        served(word, work)

    @pytest.mark.integration
    @pytest.mark.parametrize(
        ("sent", "told"),
        [
            (b"", "nothing was sent within 0.3 s"),
            (b'{"type": "pi', "a message was not complete within 0.3 s"),
            (b'{"type": "ping", "data_length": 9}\n', "a message was not complete within 0.3 s"),
            (b'{"type": "ping"}\n{', "a message was not complete within 0.3 s"),
            (
                b'{"type": "audio-chunk", "payload_length": 2048}\n' + bytes(9),
                "a message was not complete within 0.3 s",
            ),
            (b"answers", None),
        ],
    )
    def test_a_satellite_that_stands_still(self, word, monkeypatch, sent, told):
        """Before its first message, within one, or by not reading its answers: it is told, and its place is free."""
        monkeypatch.setattr("driver.gateways.wyoming.message_reader.COMPLETE_WITHIN", 0.3)

        async def work(server):
            reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
            if sent == b"answers":
                writer.transport.pause_reading()
                with suppress(OSError):
                    while True:
                        writer.write(b'{"type": "describe"}\n' * 1000)
                        await writer.drain()
            else:
                writer.write(sent)
                assert told in (await asyncio.wait_for(reader.read(), 60)).decode()
            while server.figures.connected:
                await asyncio.sleep(0)
            writer.transport.abort()

        served(word, work, satellites=1)

    @pytest.mark.parametrize(
        ("write", "told"),
        [
            (lambda path: write_word(path, classes=7), "expected one of float32 [1, 1]"),
            (lambda path: write_features(path.parent) or path.write_bytes(b"no model"), "--wake-word"),
            (lambda path: write_word(path, window=50), "expected one of float32 [1, 16, 96]"),
            (lambda path: save(path, [], (1, 2), (1, 2)), "no wake word's model"),
            (lambda path: None, "no such file"),
        ],
    )
    def test_no_wake_word(self, tmp_path, write, told):
        """A file that is no wake word's model is refused before anything is served, with the shape that is expected."""
        write_features(tmp_path)
        write(tmp_path / "x.onnx")
        with pytest.raises(DeviceFailed) as error:
            WakeServer("onnxruntime", [tmp_path / "x.onnx"], ANYWHERE)
        assert told in str(error.value)
        assert str(tmp_path) in str(error.value)

    def test_features_of_another_kind(self, word, tmp_path):
        """So are the two models that all words share, where they are missing, or others."""
        with pytest.raises(DeviceFailed, match=r"no melspectrogram\.onnx"):
            read_models([word], tmp_path)
        write_features(tmp_path, bins=40)
        with pytest.raises(DeviceFailed, match=r"expected one of float32 \[\?, 1, \?, 32\]"):
            read_models([word], tmp_path)
        with pytest.raises(DeviceFailed, match="given twice"):
            read_models([word, word])

    def test_a_folder(self, word, tmp_path):
        """It stands for the wake words in it, beside which the two models of all lie."""
        write_models(tmp_path)
        write_word(tmp_path / "other.onnx")
        (tmp_path / "README.txt").touch()
        assert [each.name for each in read_models([tmp_path]).words] == ["other", WORD]
        (tmp_path / "more.tflite").touch()
        with pytest.raises(DeviceFailed, match=r"\.onnx and \.tflite files are given"):
            read_models([tmp_path])
        (tmp_path / "empty").mkdir()
        with pytest.raises(DeviceFailed, match="the folder has no wake word"):
            read_models([word, tmp_path / "empty"])
        with pytest.raises(DeviceFailed, match=r"expected a \.tflite or \.onnx file"):
            read_models([tmp_path / "README.txt"])

    @pytest.mark.parametrize(
        "text", ["nonsense", "tcp://x", "tcp://h:70000", "unix:x", "unix://x", ":10400", "tcp://[::1:5"]
    )
    def test_wrong_addresses(self, text):
        """What is no address is refused, with the forms that there are."""
        with pytest.raises(DeviceFailed, match=r"tcp://HOST:PORT|path of a socket is absolute"):
            wyoming_address(text)

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            (WakeOptions(trigger=TriggerOptions(threshold=1.5)), "--threshold"),
            (WakeOptions(trigger=TriggerOptions(threshold=float("nan"))), "--threshold"),
            (WakeOptions(trigger=TriggerOptions(trigger_level=0)), "--trigger-level"),
            (WakeOptions(trigger=TriggerOptions(refractory=-1.0)), "--refractory-seconds"),
            (WakeOptions(satellites=0), "--satellites"),
        ],
    )
    def test_wrong_options(self, options, told):
        """Each names the option and its range."""
        with pytest.raises(DeviceFailed, match=told):
            options.checked()


class TestDeath:
    @pytest.mark.integration
    @pytest.mark.parametrize("which", ["engine_pid", "service_pid"])
    def test_the_device_dies(self, word, which):
        """kill -9 of a process of the device, three times while sound is listened to: streams go on, with the
        detections of undisturbed ones at the same times, and no others.
        """
        cuts = [round(seconds * RATE) for seconds in (0, 1.1, 1.9, 2.4, 3.2)]  # the word is from 1.0 to 2.2

        def kill():
            with driver.connect("onnxruntime") as device:
                os.kill(getattr(device, which), signal.SIGKILL)

        async def talk(server, samples, kills=False):
            async with Satellite(server.uri) as satellite:
                await satellite.send(AudioStart(RATE, 2, 1))
                found = []
                for begin, end in pairwise(cuts):  # a kill amid each part but the first, while it is listened to
                    killing = asyncio.create_task(asyncio.to_thread(kill)) if kills and begin else None
                    for at in range(begin, end, 1024):
                        await satellite.send(AudioChunk(RATE, 2, 1, samples[at : min(end, at + 1024)].tobytes()))
                    await satellite.send(Ping())
                    while (event := await satellite.receive()).type != "pong":
                        found.append(event)
                    if killing:
                        await killing
                return times(found)

        async def work(server):
            expected = await talk(server, SPOKEN)
            assert len(expected) == 1
            quiet = [talk(server, speech(2.5, 0.1, 0.6)) for _ in range(3)]
            found = await asyncio.gather(talk(server, SPOKEN, kills=True), talk(server, SPOKEN), *quiet)
            assert found == [expected, expected, [], [], []]
            assert server.models.trouble == ""

        served(word, work)

    def test_a_device_that_does_not_come_back(self, word):
        """Its satellites are told, and hear neither a detection nor that there was none."""

        async def work(server):
            async def fails(_):
                raise DeviceUnavailable("it is gone")

            server.models.embedding = fails
            async with Satellite(server.uri) as satellite:
                await satellite.say(SPOKEN[: 2 * STEP])
                assert "it is gone" in Error.from_event(await satellite.receive()).text
                assert await satellite.receive() is None

        served(word, work)


class TestCommand:
    @pytest.mark.integration
    def test_from_the_beginning_to_the_end(self, word):
        """It prints its address, hears a word, tells metrics by satellite, and ends on SIGTERM with 0."""
        words = ["--wyoming", "tcp://:0", "--wake-word", str(word), "--metrics", ":0", "--json"]
        with subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, text=True) as process:
            said = json.loads(process.stdout.readline())

            async def talk():
                async with Satellite(said["wyoming"]) as satellite:
                    return times(await satellite.hear(SPOKEN))

            assert len(asyncio.run(talk())) == 1
            with urllib.request.urlopen(said["metrics"]) as answer:
                text = answer.read().decode()
            assert f'burst_satellite_detections_total{{satellite="127.0.0.1",word="{WORD}"}} 1.0' in text
            assert 'burst_satellite_seconds_total{satellite="127.0.0.1"} 3.2' in text
            with urllib.request.urlopen(said["metrics"].replace("/metrics", "/healthz")) as answer:
                assert answer.read() == b"ok\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0

    @pytest.mark.integration
    def test_other_machines(self, word):
        """An address that other machines reach is served, with a warning."""
        words = ["--wyoming", "tcp://0.0.0.0:0", "--wake-word", str(word)]
        with subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert "tone_v0.1 at tcp://0.0.0.0:" in process.stdout.readline()
            process.terminate()
            assert "no password" in process.stderr.read()

    @pytest.mark.integration
    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["--wyoming", "tcp://:0"], "--wyoming and --wake-word"),
            (["--wake-word", "x"], "--wyoming and --wake-word"),
            (["--wyoming", "nonsense", "--wake-word", "x"], "--wyoming nonsense"),
            (["--wyoming", "tcp://:0", "--wake-word", "x"], "no such file"),
            (["--wyoming", "tcp://:0", "--wake-word", "x", "--group", "y"], "--group"),
        ],
    )
    def test_what_cannot_be_served(self, words, told, tmp_path):
        """It says what is wrong, and exits with 2."""
        done = subprocess.run([*COMMAND, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert told in " ".join(done.stderr.split())

    def test_a_folder_of_another_account(self, tmp_path, monkeypatch):
        """The folder of devices' sockets may be another account's, unreadable: wake words do not use it."""
        monkeypatch.setattr(os, "access", lambda *_, **__: False)
        words = ["serve", "onnxruntime", "--dir", str(tmp_path), "--wyoming", "nonsense", "--wake-word", "x"]
        assert "--wyoming nonsense" in CliRunner().invoke(burst, words).output
