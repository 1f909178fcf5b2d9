"""`burst serve DEVICE --embeddings FOLDER --http ADDRESS`: vectors of texts, for OpenAI's and Cohere's clients."""

from __future__ import annotations

from contextlib import asynccontextmanager, closing
from functools import partial
from typing import TYPE_CHECKING

from driver.errors import DeviceFailed
from driver.gateway import Gateway, OpenGateway
from driver.gateways.metrics_page import MetricsPage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import click

    from driver.gateway import GatewayCall


class EmbeddingsGateway(Gateway):
    """Embeds and ranks texts by models of sentence-transformers."""

    libraries = ("tokenizers", "aiohttp")
    examples = ("burst serve onnxruntime --embeddings all-MiniLM-L6-v2/ --http 127.0.0.1:8080",)

    def options(self) -> Sequence[click.Option]:
        """Return the models, the addresses, and what a folder may leave open."""
        import click

        from driver.gateways.embeddings.pooling import POOLINGS

        return (
            click.Option(
                ["--embeddings"],
                metavar="FOLDER",
                multiple=True,
                help="Serve /v1/embeddings, or for a cross-encoder /v1/rerank, by the model of a folder as "
                "sentence-transformers and fastembed have it; NAME=FOLDER names it. Repeatable.",
            ),
            click.Option(
                ["--http"],
                metavar="ADDRESS",
                multiple=True,
                help="Of --embeddings: HOST:PORT, :PORT (this machine only), or unix:PATH[,owner=NAME] (one account). "
                "Repeatable.",
            ),
            click.Option(
                ["--pooling"],
                type=click.Choice(list(POOLINGS)),
                help="How vectors of tokens become one, if the folder does not say so.",
            ),
            click.Option(
                ["--normalize/--no-normalize"],
                default=None,
                help="Vectors have length 1 or not; by default as modules.json says, and 1 without it.",
            ),
            click.Option(
                ["--http-tls"],
                nargs=2,
                type=click.Path(exists=True, dir_okay=False),
                metavar="CERT KEY",
                help="TLS at TCP addresses of --http, with these PEM files.",
            ),
        )

    @asynccontextmanager
    async def serve(self, call: GatewayCall) -> AsyncIterator[OpenGateway]:
        """Serve the models until the end."""
        from driver.gateways.embeddings.model_folder import read_folder
        from driver.gateways.embeddings.process import VectorServer, opened
        from driver.gateways.embeddings.text_metrics import metrics_collector

        given = call.options
        if not given["embeddings"] or not given["http"]:
            raise DeviceFailed(f"--embeddings and --http go together: {self.examples[0]}")
        pooling, normalizes = given["pooling"], given["normalize"]
        folders = [read_folder(text, pooling, normalizes=normalizes) for text in given["embeddings"]]
        with closing(MetricsPage(call.metrics)) as page:
            server, addresses = opened(call.device, folders, given["http"], given["http_tls"])
            if call.metrics and not isinstance(server, VectorServer):
                raise DeviceFailed("--metrics: each account has a process of its own here; give it to the device")
            async with server:
                if isinstance(server, VectorServer):
                    page.begin(partial(metrics_collector, server.models), lambda: "")
                names = [folder.name for folder in folders]
                fields = {"http": addresses, "models": names, "metrics": page.where}
                yield OpenGateway(f"{', '.join(names)} at {', '.join(addresses)}", fields)
