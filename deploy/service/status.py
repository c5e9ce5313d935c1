"""The status page for operators: what is served, where it runs and why, and how it performs."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, Template
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from twinop import __version__

from .metrics import ModelMetrics

if TYPE_CHECKING:
    from .repository import Repository

_PAGE = Path(__file__).with_name("status.html")
_NONE = "–"


@dataclass(frozen=True, kw_only=True)
class ServerStatus:
    """The process. `started` is in seconds since 1970."""

    version: str
    state: str  # loading, ready or draining
    started: float
    control: str  # none, poll or explicit


@dataclass(frozen=True, kw_only=True)
class VersionStatus:
    """One version of one model. Unknown fields (still loading, or failed to load) keep their defaults."""

    name: str
    version: int
    state: str  # ready, loading, unloading or unavailable
    message: str = ""  # why it is unavailable, or why newer files were refused
    device: str = ""
    reason: str = ""  # why this device
    custom_nodes: Sequence[str] = ()  # on the library's kernels, such as "CustomRelu x3"
    body_nodes: Sequence[str] = ()  # on the model's function bodies
    fallback: str = ""  # why function bodies run instead of the library's kernels
    library: str = ""
    library_sha256: str = ""
    difference: str = ""  # between kernels and function bodies during warm-up
    max_batch_size: int = 0
    preferred_batch_sizes: Sequence[int] = ()
    max_queue_delay_us: int = 0
    instances: int = 1
    queued: int = 0
    max_queue: int = 0
    load_seconds: float | None = None
    metrics: ModelMetrics | None = None


async def status_page(repository: "Repository", request: Request) -> Response:
    """Answer GET /status."""
    state = "draining" if repository.draining else "ready" if repository.ready else "loading"
    server = ServerStatus(
        version=__version__,
        state=state,
        started=repository.started,
        control=str(repository.settings.server.control),
    )
    return response(server, [_status(repository, **each) for each in await repository.index()])


def _status(repository: "Repository", name: str, version: str, state: str, reason: str) -> VersionStatus:
    number = int(version)
    model = repository.models.get(name)
    served = None if model is None else model.versions.get(number)
    if served is None:
        return VersionStatus(name=name, version=number, state=state.lower(), message=reason)
    loaded = served.loaded
    told = loaded.describe()["parameters"]  # without paths, because clients may see the page
    return VersionStatus(
        name=name,
        version=number,
        state=state.lower(),
        message=reason,
        device=loaded.device,
        reason=told["device_reason"],
        custom_nodes=loaded.custom_nodes,
        body_nodes=loaded.body_nodes,
        fallback=told["fallback"],
        library=told.get("library", ""),
        library_sha256=told.get("library_sha256", ""),
        difference=loaded.difference or "",
        max_batch_size=loaded.settings.max_batch_size,
        preferred_batch_sizes=loaded.settings.preferred_batch_sizes,
        max_queue_delay_us=loaded.settings.max_queue_delay_us,
        instances=len(loaded.instances),
        queued=served.batcher.queued,
        max_queue=loaded.settings.max_queue,
        load_seconds=loaded.load_seconds,
        metrics=served.metrics,
    )


def response(server: ServerStatus, versions: Sequence[VersionStatus]) -> Response:
    """Return the page with headers that forbid storing it and running anything else in it."""
    nonce = secrets.token_urlsafe(16)
    return HTMLResponse(
        page(server, versions, nonce),
        headers={
            "Cache-Control": "no-store",
            "Content-Security-Policy": f"default-src 'none'; style-src 'nonce-{nonce}'; "
            f"script-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; base-uri 'none'; "
            "form-action 'none'; frame-ancestors 'none'",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        },
    )


def page(server: ServerStatus, versions: Sequence[VersionStatus], nonce: str = "") -> str:
    """Return the page's HTML. All values are escaped."""
    return _template().render(server=server, versions=versions, nonce=nonce, now=time.time())


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "count": count,
        "short": short,
        "span": span,
        "moment": moment,
        "sparkline": sparkline,
    }
    return environment.from_string(_PAGE.read_text(encoding="utf-8"))


def count(number: float | None) -> str:
    """Format a count: 12,345 or 3.2"""
    if number is None:
        return _NONE
    return f"{number:,}" if isinstance(number, int) else f"{number:,.1f}"


def short(seconds: float | None) -> str:
    """Format a latency: 12 µs, 0.41 ms, 35 ms, 1.20 s"""
    if seconds is None:
        return _NONE
    if seconds < 1e-4:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        milliseconds = seconds * 1e3
        return f"{milliseconds:.{2 if milliseconds < 10 else 1 if milliseconds < 100 else 0}f} ms"
    return f"{seconds:.2f} s"


def span(seconds: float) -> str:
    """Format a duration by its two largest units: 42 s, 3 min 10 s, 5 h 2 min, 12 d 3 h"""
    left = max(int(seconds), 0)
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if left >= size or (unit == "s" and not parts):
            parts.append(f"{left // size} {unit}")
        elif parts:
            break
        left %= size
    return " ".join(parts[:2])


def moment(seconds: float) -> str:
    """Format a point in time in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def sparkline(values: Sequence[float], width: int, height: int, most: int = 80) -> str:
    """Return the points of a polyline from the oldest value to the latest, with 0 at the bottom.

    Beyond `most` values, neighbours share a point that shows their maximum, so that no peak is lost.
    """
    bins = min(len(values), most)
    if bins < 2:
        return ""
    values = list(values)
    edges = [at * len(values) // bins for at in range(bins + 1)]
    peaks = [max(values[start:end]) for start, end in pairwise(edges)]
    top = max(peaks) or 1.0
    return " ".join(
        f"{at * width / (bins - 1):.1f},{height - peak / top * height:.1f}" for at, peak in enumerate(peaks)
    )
