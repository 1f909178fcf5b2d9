"""`burst serve DEVICE --oip ADDRESS --models FOLDER`: models for clients of the Open Inference Protocol."""

from __future__ import annotations

from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from driver.client.served_sockets import is_path
from driver.devices import usable_class
from driver.errors import DeviceFailed
from driver.gateway import Gateway, OpenGateway
from driver.gateways.metrics_page import MetricsPage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import click

    from driver.gateway import GatewayCall


class OipGateway(Gateway):
    """Serves a folder of models by the Open Inference Protocol."""

    libraries = ("grpc", "aiohttp")
    examples = ("burst serve onnxruntime --oip :8001 --oip http://:8000 --models models/",)

    def options(self) -> Sequence[click.Option]:
        """Return the addresses, the folder, and what clients at TCP addresses may do."""
        import click

        return (
            click.Option(
                ["--oip"],
                metavar="ADDRESS",
                multiple=True,
                help="Serve the models of --models by the Open Inference Protocol: gRPC at HOST:PORT, at :PORT (this "
                "machine only) or at unix:PATH; HTTP at http://HOST:PORT or http+unix:PATH. Repeatable.",
            ),
            click.Option(
                ["--models"],
                type=click.Path(path_type=Path),
                metavar="FOLDER",
                help="A folder of .onnx and .tflite files, or a Triton model repository. It is watched.",
            ),
            click.Option(
                ["--also"],
                metavar="DEVICE",
                multiple=True,
                help="With --oip: another device, for files that those before it do not run. Repeatable.",
            ),
            click.Option(
                ["--otlp"],
                metavar="URL",
                default="",
                help="With --oip: send a span for each request to a collector of OpenTelemetry, by OTLP over HTTP.",
            ),
            click.Option(["--shared-memory"], is_flag=True, help="Also TCP clients may register shared memory."),
            click.Option(["--model-control"], is_flag=True, help="Also TCP clients may load and unload models."),
            click.Option(
                ["--tls"],
                nargs=2,
                type=click.Path(exists=True, dir_okay=False),
                metavar="CERT KEY",
                help="TLS at TCP addresses, with these PEM files.",
            ),
        )

    @asynccontextmanager
    async def serve(self, call: GatewayCall) -> AsyncIterator[OpenGateway]:
        """Serve the models until the end."""
        from driver.gateways.oip.grpc_door import Credentials
        from driver.gateways.oip.model_metrics import metrics_collector
        from driver.gateways.oip.process import InferenceServer, OipOptions, opened

        given = call.options
        if not given["oip"] or given["models"] is None:
            raise DeviceFailed(f"--oip and --models go together: {self.examples[0]}")
        for device in given["also"]:
            if not is_path(device):
                usable_class(device)
        credentials = Credentials(*given["tls"]) if given["tls"] else None
        options = OipOptions(
            given["shared_memory"], given["model_control"], credentials, also=given["also"], otlp=given["otlp"]
        )
        with closing(MetricsPage(call.metrics)) as page:
            server, addresses = opened(call.device, given["models"], given["oip"], options)
            async with server:
                if isinstance(server, InferenceServer):
                    page.begin(partial(metrics_collector, server.repository), lambda: "")
                elif call.metrics:
                    raise DeviceFailed("--metrics: each account has a process of its own here; give it to the device")
                line = f"models of {given['models']} at {', '.join(addresses)}"
                yield OpenGateway(line, {"oip": addresses, "metrics": page.where})
