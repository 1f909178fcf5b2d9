"""`burst serve DEVICE --wyoming ADDRESS --wake-word FILE`: wake words for Home Assistant."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from driver.errors import DeviceFailed
from driver.gateway import Gateway, OpenGateway

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

    import click

    from driver.finding import Finding
    from driver.gateway import GatewayCall


class WyomingGateway(Gateway):
    """Listens for wake words in the sound of Home Assistant's satellites."""

    libraries = ("wyoming",)
    examples = ("burst serve litert --wyoming tcp://127.0.0.1:10400 --wake-word hey_jarvis_v0.1.tflite",)

    def options(self) -> Sequence[click.Option]:
        """Return the address, the models, and when a word counts as spoken."""
        import click

        path = click.Path(path_type=Path)
        return (
            click.Option(
                ["--wyoming"],
                metavar="ADDRESS",
                help="Serve wake words to Home Assistant at tcp://HOST:PORT, tcp://:PORT (this machine only), or "
                "unix:///PATH.",
            ),
            click.Option(
                ["--wake-word", "wake_words"],
                type=path,
                metavar="FILE",
                multiple=True,
                help="A .tflite or .onnx file of openWakeWord, or a folder of them. Repeatable.",
            ),
            click.Option(
                ["--features"],
                type=path,
                metavar="FOLDER",
                help="Folder of melspectrogram and embedding_model, if not that of the first FILE.",
            ),
            click.Option(
                ["--threshold"], type=float, default=0.5, show_default=True, help="Activations above it count."
            ),
            click.Option(
                ["--trigger-level"], type=int, default=1, show_default=True, help="Number that makes a detection."
            ),
            click.Option(
                ["--refractory-seconds"],
                type=float,
                default=2.0,
                show_default=True,
                help="Time after a detection in which the word is not detected again.",
            ),
            click.Option(["--satellites"], type=int, default=64, show_default=True, help="Connections of a machine."),
            click.Option(["--zeroconf"], is_flag=True, help="Announce the server to Home Assistant by multicast DNS."),
        )

    @asynccontextmanager
    async def serve(self, call: GatewayCall) -> AsyncIterator[OpenGateway]:
        """Serve the wake words until the end."""
        from driver.gateways.wyoming.satellite import TriggerOptions
        from driver.gateways.wyoming.wake_server import WakeOptions, WakeServer

        given = call.options
        if not given["wyoming"] or not given["wake_words"]:
            raise DeviceFailed(f"--wyoming and --wake-word go together: {self.examples[0]}")
        options = WakeOptions(
            features=given["features"],
            trigger=TriggerOptions(given["threshold"], given["trigger_level"], given["refractory_seconds"]),
            satellites=given["satellites"],
            metrics=call.metrics,
            zeroconf=given["zeroconf"],
        )
        async with WakeServer(call.device, given["wake_words"], given["wyoming"], options) as server:
            line = f"{', '.join(server.models.words)} at {server.uri}"
            yield OpenGateway(line, {"wyoming": server.uri, "metrics": server.metrics.where})

    def checks(self) -> Mapping[str, Callable[[], Iterable[Finding]]]:
        """Return the check of the port at which Home Assistant expects wake words."""
        from driver.gateways.wyoming.satellite_doors import wake_words

        return {"wake words": wake_words}
