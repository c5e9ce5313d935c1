"""A bearer token, TLS, and health, over HTTP and gRPC."""

import json
import signal
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import service_models as models
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from service_certificates import certified
from service_fixtures import Served, serve, wait_until
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from twinop.deploy.service.protocol import pb


@contextmanager
def guarded_in(folder: Path) -> Iterator[tuple[Served, Path]]:
    """Start a server with a token and TLS; return it with its certificate."""
    models.place(folder / "models", "relu", models.relu())
    certificate, key = certified(folder)
    options = ("--tls-certificate", str(certificate), "--tls-key", str(key))
    with serve(folder / "models", *options, env={"TWINOP_TOKEN": "secret"}) as server:
        yield server, certificate


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    with guarded_in(tmp_path_factory.mktemp("guarded")) as found:
        yield found


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


# -------------------------------------------------------------------------------- health


def test_grpc_health(tmp_path: Path) -> None:
    """It needs no token, as other probes."""
    with guarded_in(tmp_path) as (server, certificate):
        credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
        with grpc.secure_channel(f"localhost:{server.grpc_port}", credentials) as channel:
            stub = HealthStub(channel)

            def is_serving(service: str) -> bool:
                found: int = stub.Check(HealthCheckRequest(service=service), timeout=60).status
                return found == HealthCheckResponse.SERVING

            for service in ("", "inference.GRPCInferenceService"):
                wait_until(partial(is_serving, service))
            with pytest.raises(grpc.RpcError) as error:
                is_serving("nothing")
            assert error.value.code() is grpc.StatusCode.NOT_FOUND
            watched = stub.Watch(HealthCheckRequest(), timeout=60)
            assert next(watched).status == HealthCheckResponse.SERVING
            server.process.send_signal(signal.SIGTERM)
            assert next(watched).status == HealthCheckResponse.NOT_SERVING
            watched.cancel()
        assert server.stop() == 0
