"""A bearer token and TLS, over HTTP and gRPC."""

import json
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import service_models as models
from service_fixtures import Served, serve, wait_until
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from twinop.deploy.service.protocol import pb


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate and its key to a folder."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    made = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names)
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    """Start a server with a token and TLS; return it with its certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    folder = tmp_path_factory.mktemp("guarded")
    models.place(folder / "models", "relu", models.relu())
    certificate, key = make_certificate(folder)
    options = ("--tls-certificate", str(certificate), "--tls-key", str(key))
    with serve(folder / "models", *options, env={"TWINOP_TOKEN": "secret"}) as server:
        yield server, certificate


def test_token_and_tls_over_http(guarded: tuple[Served, Path]) -> None:
    server, certificate = guarded
    context = ssl.create_default_context(cafile=str(certificate))

    def status(path: str, token: str | None = None) -> int:
        request = urllib.request.Request(f"https://localhost:{server.http_port}{path}")
        if token is not None:
            request.add_header("Authorization", token)
        try:
            with urllib.request.urlopen(request, context=context, timeout=60) as response:
                return response.status
        except urllib.error.HTTPError as error:
            if error.code == 401:
                assert error.headers["www-authenticate"] == "Bearer"
                assert "Authorization: Bearer" in json.load(error)["error"]
            return error.code

    assert status("/v2/health/live") == status("/v2/health/ready") == 200
    for path in ("/v2/models/relu", "/v2", "/metrics", "/status", "/", "/nowhere", "/v2/health/live/"):
        assert status(path) == status(path, "Bearer wrong") == status(path, "Basic secret") == 401, path
    assert status("/v2/models/relu", "Bearer secret") == status("/status", "bearer secret") == 200
    assert status("/nowhere", "Bearer secret") == 404
    with pytest.raises(OSError):  # no TLS
        server.ask("GET", "/v2/health/live")


def test_token_and_tls_over_grpc(guarded: tuple[Served, Path]) -> None:
    server, certificate = guarded
    credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
    with grpc.secure_channel(f"localhost:{server.grpc_port}", credentials) as channel:
        guarded_stub: Any = GRPCInferenceServiceStub(channel)
        assert guarded_stub.ServerLive(pb.ServerLiveRequest()).live
        assert guarded_stub.ServerReady(pb.ServerReadyRequest()).ready
        request = pb.ModelReadyRequest(name="relu")
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            with pytest.raises(grpc.RpcError) as error:
                guarded_stub.ModelReady(request, metadata=metadata)
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert guarded_stub.ModelReady(request, metadata=(("authorization", "Bearer secret"),)).ready


def test_renewed_certificates_are_reloaded_over_http(guarded: tuple[Served, Path]) -> None:
    server, certificate = guarded
    files = (certificate, certificate.with_name("key.pem"))
    before = [path.read_bytes() for path in files]

    def is_served() -> bool:
        served = ssl.get_server_certificate(("127.0.0.1", server.http_port))
        return ssl.PEM_cert_to_DER_cert(served) == ssl.PEM_cert_to_DER_cert(certificate.read_text())

    make_certificate(certificate.parent)
    assert certificate.read_bytes() != before[0]
    wait_until(is_served)
    for path, content in zip(files, before, strict=True):
        path.write_bytes(content)
    wait_until(is_served)
