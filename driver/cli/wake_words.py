"""`burst serve --wyoming`: wake words for Home Assistant."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from driver.cli.gateway import gateway_errors, tell_where

if TYPE_CHECKING:
    from collections.abc import Mapping

WAKE_WORD_OPTIONS = (
    click.option(
        "--wyoming",
        metavar="ADDRESS",
        help="Serve wake words to Home Assistant at tcp://HOST:PORT, tcp://:PORT (this machine only), or unix:///PATH.",
    ),
    click.option(
        "--wake-word",
        "wake_words",
        type=click.Path(path_type=Path),
        metavar="FILE",
        multiple=True,
        help="With --wyoming: a .tflite or .onnx file of openWakeWord, or a folder of them. Repeatable.",
    ),
    click.option(
        "--features",
        type=click.Path(path_type=Path),
        metavar="FOLDER",
        help="With --wyoming: where melspectrogram and embedding_model are, if not by the first FILE.",
    ),
    click.option(
        "--threshold", type=float, default=0.5, show_default=True, help="With --wyoming: activations above it count."
    ),
    click.option(
        "--trigger-level", type=int, default=1, show_default=True, help="With --wyoming: so many make a detection."
    ),
    click.option(
        "--refractory-seconds",
        type=float,
        default=2.0,
        show_default=True,
        help="With --wyoming: time after a detection in which the word is not detected again.",
    ),
    click.option(
        "--satellites", type=int, default=64, show_default=True, help="With --wyoming: connections at a time, at most."
    ),
    click.option("--zeroconf", is_flag=True, help="With --wyoming: Home Assistant finds the server by multicast DNS."),
)


def serve_wyoming(device: str, given: Mapping[str, Any], others: object, metrics: str | None, as_json: bool) -> bool:
    """Serves until SIGTERM if the options ask for that; else returns False at once. `others`: options of another kind
    of serving.
    """
    address, words = given["wyoming"], given["wake_words"]
    if not address and not words:
        return False
    if not address or not words:
        raise click.UsageError(
            "--wyoming and --wake-word go together: "
            "burst serve litert --wyoming tcp://:10400 --wake-word alexa_v0.1.tflite"
        )
    if others:
        raise click.UsageError("--wyoming serves wake words alone: give --group, --oip to another burst serve")
    with gateway_errors("--wyoming", "wyoming"):
        from driver.gateways.foreground import serve_in_foreground
        from driver.gateways.wyoming.satellite import TriggerOptions
        from driver.gateways.wyoming.wake_server import WakeOptions, WakeServer

        def tell(server: WakeServer) -> None:
            fields = {"device": device, "wyoming": server.uri, "metrics": server.metrics.where}
            tell_where(as_json, fields, f"{', '.join(server.models.words)} at {server.uri}")

        trigger = TriggerOptions(given["threshold"], given["trigger_level"], given["refractory_seconds"])
        options = WakeOptions(given["features"], trigger, given["satellites"], metrics, given["zeroconf"])
        serve_in_foreground(WakeServer(device, words, address, options), tell)
    return True
