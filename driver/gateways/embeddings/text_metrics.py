"""What /metrics says of the models of `burst serve --embeddings`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from driver.gateways.embeddings.text_models import TextModel


def metrics_collector(models: Mapping[str, TextModel]) -> Any:
    """Return a collector for a registry of prometheus_client. `models`: by name; there may be more at each scrape."""
    from prometheus_client.registry import Collector

    class TextModelCollector(Collector):
        """Reads the counts at a scrape."""

        def collect(self) -> Iterator[Any]:
            """Yield the metrics."""
            yield from _metrics(list(models.values()))

        def describe(self) -> list[Any]:
            """Describe no metrics: registering this must not ask the models."""
            return []

    return TextModelCollector()


def _metrics(models: list[TextModel]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily

    def family(name: str, words: str, *labels: str) -> Any:
        return CounterMetricFamily(f"burst_embeddings_{name}", words, labels=["model", *labels])

    requests = family("requests", "Requests that named the model.", "outcome")
    texts = family("texts", "Texts, or pairs of a query and a document, that were embedded or ranked.")
    tokens = family("tokens", "Their tokens, special ones included, after truncation.")
    runs = family("runs", "Runs on the device, in which texts are joined.")
    seconds = family("seconds", "Time from whole requests to their answers.")
    for model in models:
        counts = model.counts
        for outcome in ("success", "fail"):
            requests.add_metric([model.name, outcome], counts.requests[outcome])
        texts.add_metric([model.name], counts.texts)
        tokens.add_metric([model.name], counts.tokens)
        runs.add_metric([model.name], sum(model.stats()["batches"].values()))
        seconds.add_metric([model.name], counts.seconds)
    yield from (requests, texts, tokens, runs, seconds)


__all__ = ["metrics_collector"]
