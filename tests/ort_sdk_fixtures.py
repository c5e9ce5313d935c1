"""For the tests of cmake/ort_sdk.py: a machine without network, and a local HTTP server as release site."""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import ort_sdk
import ort_sdk_fetch
import pytest
from ort_sdk import resolve
from ort_sdk_files import NAME, files, tarball


@pytest.fixture(autouse=True)
def machine_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy, no apt, nothing pinned but what a test pins."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path / "no programs"))
    monkeypatch.setattr(ort_sdk_fetch, "APT_ETC", tmp_path / "etc apt")
    monkeypatch.setattr(ort_sdk_fetch, "TIMEOUT", 0.5)


class Site:
    """A release site that serves one file, well or badly."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.ranges: list[str | None] = []
        self.paths: list[str] = []
        self.honours_range = True
        self.cut: list[int] = []  # for each request: close after so many bytes
        self.status = 200
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.paths.append(self.path)
                asked = self.headers.get("Range")
                site.ranges.append(asked)
                start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and site.honours_range else 0
                body = site.content[start:]
                if site.status != 200:
                    self.send_error(site.status)
                    return
                if start and not body:
                    self.send_error(416)
                    return
                self.send_response(206 if start else 200)
                if start:
                    self.send_header(
                        "Content-Range", f"bytes {start}-{len(site.content) - 1}/{len(site.content)}"
                    )
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: site.cut.pop(0)] if site.cut else body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/mirror"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(name="site")
def site_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    content = tarball(tmp_path / "site" / NAME, files()).read_bytes()
    monkeypatch.setitem(ort_sdk.PINNED_SHA256, NAME, hashlib.sha256(content).hexdigest())
    site = Site(content)
    yield site
    site.close()


@pytest.fixture(name="find")
def find_fixture(tmp_path: Path) -> Callable[..., Path]:
    """resolve() with a cache of its own; keyword arguments are environment variables."""

    def call(machine: str = "x86_64", **env: object) -> Path:
        base = {"TWINOP_CACHE": tmp_path / "the cache", "TWINOP_ORT_URL": "http://127.0.0.1:9"}
        return resolve({name: str(value) for name, value in (base | env).items()}, machine)

    return call
