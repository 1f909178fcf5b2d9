"""`burst serve --frigate`: object detection for Frigate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from burst import BurstError
from driver.errors import DriverError

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
    try:
        from driver.gateways.frigate.process import serve_detector
    except ModuleNotFoundError as error:
        raise click.UsageError(f"--frigate needs {error.name}: pip install 'burst-engine[frigate]'") from error

    def tell(bound: str, page: str | None) -> None:
        if as_json:
            print(json.dumps({"device": device, "frigate": bound, "metrics": page}), flush=True)
            return
        print(f"{device}: {model_type} model {model} for Frigate at {bound}", flush=True)
        if page:
            print(f"metrics are at {page}", flush=True)

    try:
        serve_detector(device, model, model_type, address, metrics, tell)
    except ModuleNotFoundError as error:
        raise click.UsageError(f"--metrics needs {error.name}: pip install 'burst-engine[metrics]'") from error
    except (DriverError, BurstError) as error:
        raise click.UsageError(str(error)) from error
    return True
