"""`burst serve DEVICE --frigate ADDRESS --model FILE --model-type TYPE`: object detection for Frigate."""

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


class FrigateGateway(Gateway):
    """Answers the zmq detectors of Frigate by one model."""

    libraries = ("cv2",)
    examples = ("burst serve litert --frigate ipc:///tmp/cache/zmq_detector --model ssd.tflite --model-type ssd",)

    def options(self) -> Sequence[click.Option]:
        """Return the address, the model, and its type."""
        import click

        return (
            click.Option(
                ["--frigate"],
                metavar="ADDRESS",
                help="Serve a model to Frigate's zmq detectors at ipc:///PATH or tcp://HOST:PORT.",
            ),
            click.Option(
                ["--model"],
                type=click.Path(path_type=Path),
                metavar="FILE",
                help="The .onnx or .tflite file. Frigate's model.path has the same file name.",
            ),
            click.Option(
                ["--model-type"],
                metavar="TYPE",
                help="ssd, yolonas, yolo-generic, yolox, rfdetr or dfine, as Frigate's model.model_type.",
            ),
        )

    @asynccontextmanager
    async def serve(self, call: GatewayCall) -> AsyncIterator[OpenGateway]:
        """Serve the model until the end."""
        from driver.gateways.frigate.process import DetectorServer

        address, model, model_type = (call.options[name] for name in ("frigate", "model", "model_type"))
        if not (address and model and model_type):
            raise DeviceFailed(f"--frigate, --model and --model-type go together: {self.examples[0]}")
        async with DetectorServer(call.device, model, model_type, address, metrics=call.metrics) as server:
            line = f"{model_type} model {model} for Frigate at {server.address}"
            yield OpenGateway(line, {"frigate": server.address, "metrics": server.metrics.where})

    def checks(self) -> Mapping[str, Callable[[], Iterable[Finding]]]:
        """Return the check of the socket at which Frigate's detector looks."""
        from driver.gateways.frigate.frigate_socket import frigate

        return {"Frigate": frigate}
