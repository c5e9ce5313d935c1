"""OpenTelemetry: its instrumentations trace requests, this module queue and run. Off, nothing is imported."""

import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp

from .request import Request, Result
from .settings import SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_log = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PACKAGES = (
    "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http opentelemetry-instrumentation-asgi "
    "opentelemetry-instrumentation-grpc"
)

_provider: "TracerProvider | None" = None


def configure() -> None:
    """Start to send spans to the OTLP/HTTP collector that OTEL_EXPORTER_OTLP_ENDPOINT names, if it is set.

    The SDK reads the other OTEL_ variables (headers, sampler, service name).

    Raises:
        SettingsError: the endpoint is not a URL, or the OpenTelemetry packages are not installed.
    """
    global _provider
    name = next(filter(os.environ.get, _ENDPOINTS), None)
    if name is None:
        return
    _require_url(name, os.environ[name])
    try:
        import opentelemetry.instrumentation.asgi
        import opentelemetry.instrumentation.grpc  # noqa: F401 (the servers use both)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise SettingsError(
            f"{name} is set, but {error.name} is not installed: pip install {_PACKAGES}"
        ) from error
    service = os.environ.get("OTEL_SERVICE_NAME", "twinop")
    _provider = TracerProvider(resource=Resource.create({"service.name": service}), shutdown_on_exit=False)
    _provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))


def shutdown(seconds: float = 5.0) -> None:
    """Send the remaining spans and stop. Blocks for at most `seconds`, even if the collector is gone."""
    global _provider
    if _provider is None:
        return
    # The SDK would wait 30 s for an unresponsive collector: longer than a pod may take to terminate.
    sending = threading.Thread(target=_provider.shutdown, daemon=True)
    sending.start()
    sending.join(seconds)
    if sending.is_alive():
        _log.warning("the collector did not take the last spans within %g s: they are lost", seconds)
    _provider = None


def around(app: ASGIApp) -> ASGIApp:
    """Return the app with a span for each HTTP request, except for probes and metrics."""
    if _provider is None:
        return app
    from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware

    traced: ASGIApp = OpenTelemetryMiddleware(
        app,
        excluded_urls="/v2/health,/metrics",
        tracer_provider=_provider,
        exclude_spans=["receive", "send"],
    )
    return traced


def interceptors() -> list[Any]:
    """Return gRPC interceptors that make a span for each call."""
    if _provider is None:
        return []
    from opentelemetry.instrumentation.grpc import aio_server_interceptor

    return [aio_server_interceptor(tracer_provider=_provider)]


def ids() -> dict[str, str]:
    """Return the ids of the current request's span for log lines; nothing if there is no span."""
    if _provider is None:
        return {}
    from opentelemetry.trace import get_current_span

    context = get_current_span().get_span_context()
    found = {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
    return found if context.is_valid else {}


def note(**attributes: Any) -> None:
    """Add attributes to the request's span, such as request_id, with the prefix "twinop."."""
    if _provider is not None:
        from opentelemetry.trace import get_current_span

        get_current_span().set_attributes({f"twinop.{name}": value for name, value in attributes.items()})


def record_run(request: Request, result: Result) -> None:
    """Add the model, and spans for the queueing and the run, to the request's span.

    The spans are created afterwards, when their lengths are known.
    """
    if _provider is None:
        return
    note(model=result.model, version=result.version, batch_size=result.batch_size)
    tracer = _provider.get_tracer("twinop")
    start = time.time_ns() - time.monotonic_ns() + round(request.arrived * 1e9)
    for name, seconds in (("queue", result.queue_seconds), ("compute", result.compute_seconds)):
        end = start + round(seconds * 1e9)
        tracer.start_span(name, start_time=start).end(end)
        start = end


def _require_url(name: str, endpoint: str) -> None:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingsError(
            f"{name}: {endpoint!r} is not the URL of a collector, such as http://localhost:4318"
        )
