"""Spans of OpenTelemetry: one for each request to infer, below the client's, and one for each stage of it.

A client that is traced says which span is its own in a field `traceparent`, as W3C has it: of an HTTP header, or of
gRPC's metadata.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Self

from burst_engine.names import install_command
from driver.errors import DeviceFailed
from driver.gateways.refusal import refusal_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driver.gateways.oip.inference import InferAnswer, InferCall

_STAGES = "compute_input", "compute_infer", "compute_output"
_MOST_WORDS, _MOST_NAME = 400, 200  # characters: spans wait for the collector in their thousands


class RequestSpans:
    """Makes spans and gives them to a provider of OpenTelemetry's SDK. Any thread."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._propagator = provider, TraceContextTextMapPropagator()
        self._tracer = provider.get_tracer("burst.oip")

    @classmethod
    def to(cls, url: str) -> Self:
        """Return spans that are sent to a collector's address, by OTLP over HTTP. Raise DeviceFailed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as error:
            raise DeviceFailed(f"--otlp needs {error.name}: {install_command('otel')}") from None
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come first, as everywhere.
        provider = TracerProvider(resource=Resource({"service.name": "burst"}).merge(Resource.create()))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{url.rstrip('/')}/v1/traces")))
        return cls(provider)

    def note(self, call: InferCall, begin: int, answer: InferAnswer | None, error: Exception | None) -> None:
        """Note a request that is answered, or has failed. `begin`: of time.monotonic_ns()."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        end, shift = time.monotonic_ns(), time.time_ns() - time.monotonic_ns()
        parent = self._propagator.extract({"traceparent": call.traceparent}) if call.traceparent else None
        model, version = call.model[:_MOST_NAME], (answer.version if answer else call.version)[:_MOST_NAME]
        given = {"burst.model": model, "burst.version": version}
        span = self._tracer.start_span(
            f"infer {model}", parent, SpanKind.SERVER, attributes=given, start_time=begin + shift
        )
        within = set_span_in_context(span)
        times: Sequence[int] = answer.times if answer else ()
        for stage, first, last in zip(_STAGES, times, times[1:], strict=False):
            self._tracer.start_span(stage, within, start_time=first + shift).end(last + shift)
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, refusal_of(error, _ignore).text[:_MOST_WORDS]))
        span.end(end + shift)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _ignore(_error: Exception) -> None:
    """Do nothing: the door notes it."""


__all__ = ["RequestSpans"]
