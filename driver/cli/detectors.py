"""`burst serve --frigate`: object detection for Frigate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from driver.cli.gateway import gateway_errors, tell_where

if TYPE_CHECKING:
    from collections.abc import Mapping

FRIGATE_OPTIONS = (
    click.option(
        "--frigate",
        metavar="ADDRESS",
        help="Serve a model to Frigate's zmq detectors at ipc:///PATH or tcp://HOST:PORT.",
    ),
    click.option(
        "--model",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="With --frigate: the .onnx or .tflite file. Frigate's model.path has the same file name.",
    ),
    click.option(
        "--model-type",
        metavar="TYPE",
        help="With --frigate: ssd, yolonas, yolo-generic, yolox, rfdetr or dfine, as Frigate's model.model_type.",
    ),
)


def serve_frigate(device: str, given: Mapping[str, Any], others: object, metrics: str | None, as_json: bool) -> bool:
    """Serves until SIGTERM if the options ask for that; else returns False at once. `others`: options of another kind
    of serving.
    """
    address, model, model_type = given["frigate"], given["model"], given["model_type"]
    if not (address or model or model_type):
        return False
    if not (address and model and model_type):
        raise click.UsageError(
            "--frigate, --model and --model-type go together: burst serve litert "
            "--frigate ipc:///tmp/cache/zmq_detector --model ssd.tflite --model-type ssd"
        )
    if others:
        raise click.UsageError(
            "--frigate serves one model, and not the device: give --group, --oip to another burst serve"
        )
    with gateway_errors("--frigate", "frigate"):
        from driver.gateways.foreground import serve_in_foreground
        from driver.gateways.frigate.process import DetectorServer

        def tell(server: DetectorServer) -> None:
            fields = {"device": device, "frigate": server.address, "metrics": server.metrics.where}
            tell_where(as_json, fields, f"{model_type} model {model} for Frigate at {server.address}")

        serve_in_foreground(DetectorServer(device, model, model_type, address, metrics), tell)
    return True
