"""What /metrics says of the models of `burst serve --oip`: the figures of ModelStatistics, as Prometheus has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from driver.gateways.oip.repository import ModelRepository

_STAGES = "queue", "compute_input", "compute_infer", "compute_output"


def metrics_collector(repository: ModelRepository) -> Any:
    """Return a collector for a registry of prometheus_client."""
    from prometheus_client.registry import Collector

    class ModelCollector(Collector):
        """Reads the counts at a scrape."""

        def collect(self) -> Iterator[Any]:
            """Yield the metrics."""
            yield from _metrics(repository)

        def describe(self) -> list[Any]:
            """Describe no metrics: registering this must not ask the models."""
            return []

    return ModelCollector()


def _metrics(repository: ModelRepository) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    labels = ["model", "version"]
    ready = GaugeMetricFamily("burst_oip_model_ready", "1 for a model that is ready; else 0.", labels=labels)
    requests = CounterMetricFamily("burst_oip_requests", "Requests to infer.", labels=[*labels, "outcome"])
    rows = CounterMetricFamily("burst_oip_rows", "Rows that were inferred.", labels=labels)
    executions = CounterMetricFamily("burst_oip_executions", "Executions, in which rows are joined.", labels=labels)
    seconds = CounterMetricFamily("burst_oip_seconds", "Time of requests by stage.", labels=[*labels, "stage"])
    for row in repository.index(ready=False):
        ready.add_metric([row["name"], row["version"]], row["state"] == "READY")
    for figures in (model.statistics() for model in repository.all()):
        its, stats = [figures["name"], figures["version"]], figures["inference_stats"]
        for outcome in ("success", "fail"):
            requests.add_metric([*its, outcome], stats[outcome]["count"])
        rows.add_metric(its, figures["inference_count"])
        executions.add_metric(its, figures["execution_count"])
        for stage in _STAGES:
            seconds.add_metric([*its, stage], stats[stage]["ns"] / 1e9)
    yield from (ready, requests, rows, executions, seconds)


__all__ = ["metrics_collector"]
