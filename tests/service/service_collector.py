"""A collector for OpenTelemetry spans."""

import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """An OTLP/HTTP collector that keeps what it receives."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.resources: list[dict[str, Any]] = []
        self.received: list[Any] = []
        self.silent = threading.Event()  # if set, requests are answered only after `close`
        self.closed = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if outer.silent.is_set():
                    outer.closed.wait(60)
                    return
                if self.headers.get("content-encoding") == "gzip":
                    body = zlib.decompress(body, 31)
                outer._take(self.path, body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()

    def _take(self, path: str, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.paths.append(path)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(attributes_of(resource.resource))
            for scope in resource.scope_spans:
                self.received += scope.spans

    @property
    def spans(self) -> dict[str, Any]:
        """The most recent span of each name."""
        return {each.name: each for each in self.received}

    def close(self) -> None:
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()


def attributes_of(owner: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in owner.attributes}
