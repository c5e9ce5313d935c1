"""Send OpenTelemetry spans for each request, its queueing and its run; import nothing without an endpoint."""

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from . import logs
from .errors import ServiceError, failure_of
from .request import Request, Result
from .settings import SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_log = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PACKAGES = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"

_tracer: "_Tracer | None" = None
_OFF = nullcontext()


def configure(endpoint: str | None) -> None:
    """Start to send spans to an OTLP/HTTP collector, such as http://localhost:4318.

    Without `endpoint`, OTEL_EXPORTER_OTLP_ENDPOINT applies. The SDK reads the other OTEL_ variables (headers,
    sampler, service name). Without either, nothing is sent.

    Raises:
        SettingsError: the endpoint is not a URL, or the OpenTelemetry packages are not installed.
    """
    global _tracer
    if endpoint is None and not any(map(os.environ.get, _ENDPOINTS)):
        return
    url = None if endpoint is None else _url(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise SettingsError(
            f"otlp_endpoint is set, but {error.name} is not installed: pip install {_PACKAGES}"
        ) from error
    name = os.environ.get("OTEL_SERVICE_NAME", "twinop")
    provider = TracerProvider(resource=Resource.create({"service.name": name}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
    _tracer = _Tracer(provider)


def shutdown(seconds: float = 5.0) -> None:
    """Send the remaining spans and stop. Blocks for at most `seconds`, even if the collector is gone."""
    global _tracer
    if _tracer is None:
        return
    # The SDK would wait 30 s for an unresponsive collector: longer than a pod may take to terminate.
    sending = threading.Thread(target=_tracer.provider.shutdown, daemon=True)
    sending.start()
    sending.join(seconds)
    if sending.is_alive():
        _log.warning("the collector did not take the last spans within %g s: they are lost", seconds)
    _tracer = None


def request_span(name: str, headers: Mapping[str, str]) -> AbstractContextManager[None]:
    """Return a context manager for one request. An exception that leaves it marks the request as failed.

    Args:
        name: the operation, such as "infer".
        headers: headers or metadata by lower-case name. `traceparent` names the client's span.
    """
    return _OFF if _tracer is None else _tracer.request_span(name, headers)


def note(**attributes: Any) -> None:
    """Add attributes to the request's span, such as request_id, with the prefix "twinop."."""
    if _tracer is not None:
        span = _tracer.api.get_current_span()
        span.set_attributes({f"twinop.{name}": value for name, value in attributes.items()})


def record_run(request: Request, result: Result) -> None:
    """Add the model, and spans for the queueing and the run, to the request's span.

    The spans are created afterwards, when their lengths are known.
    """
    if _tracer is None or not _tracer.api.get_current_span().is_recording():
        return
    note(model=result.model, version=result.version, batch_size=result.batch_size)
    start = time.time_ns() - time.monotonic_ns() + round(request.arrived * 1e9)
    for name, seconds in (("queue", result.queue_seconds), ("compute", result.compute_seconds)):
        end = start + round(seconds * 1e9)
        _tracer.tracer.start_span(name, start_time=start).end(end)
        start = end


def _url(endpoint: str) -> str:
    """Return the collector's URL, with the path /v1/traces unless it has one."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingsError(
            f"otlp_endpoint: {endpoint!r} is no URL of a collector, such as http://localhost:4318"
        )
    return endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"


class _Tracer:
    """The imported OpenTelemetry modules, and the objects made from them."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.provider = provider
        self.api = trace
        self.tracer = provider.get_tracer("twinop")
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def request_span(self, name: str, headers: Mapping[str, str]) -> Iterator[None]:
        with self.tracer.start_as_current_span(
            name,
            self._propagator.extract(headers),
            self.api.SpanKind.SERVER,
            record_exception=False,  # a stack trace would show paths and code
            set_status_on_exception=False,
        ) as span:
            context = span.get_span_context()
            logs.bind(trace_id=f"{context.trace_id:032x}", span_id=f"{context.span_id:016x}")
            try:
                yield
            except BaseException as error:
                failure = failure_of(error)
                note(failure=failure.reason)
                message = str(error) if isinstance(error, ServiceError) else failure.reason
                span.set_status(self.api.StatusCode.ERROR, message)
                raise
