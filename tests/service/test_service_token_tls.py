"""A bearer token, TLS, certificates of clients, and health, over HTTP and gRPC."""

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
from service_certificates import authority, issued, write
from service_fixtures import Served, serve, wait_until
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from twinop.deploy.service.protocol import pb


@contextmanager
def guarded_in(folder: Path) -> Iterator[tuple[Served, Path]]:
    """Start a server with a token and TLS; return it with its certificate."""
    models.place(folder / "models", "relu", models.relu())
    certificate, key = write(folder, "server", *authority("localhost"))
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


def test_renewed_certificates_are_reloaded(guarded: tuple[Served, Path]) -> None:
    server, certificate = guarded

    def is_served(port: int | None) -> bool:
        served = ssl.get_server_certificate(("127.0.0.1", port or 0))
        return ssl.PEM_cert_to_DER_cert(served) == ssl.PEM_cert_to_DER_cert(certificate.read_text())

    before = certificate.read_bytes()
    write(certificate.parent, "server", *authority("localhost"))
    assert certificate.read_bytes() != before
    for port in (server.http_port, server.grpc_port):
        wait_until(partial(is_served, port))
    key = certificate.with_suffix(".key")
    content = key.read_bytes()
    key.write_bytes(b"no key")
    wait_until(lambda: any("could not be reloaded" in line["message"] for line in server.log))
    assert is_served(server.http_port) and is_served(server.grpc_port)
    key.write_bytes(content)


# -------------------------------------------------------------------------------- certificates of clients


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    """Start a server that wants certificates of clients; return it with the folder of all certificates."""
    folder = tmp_path_factory.mktemp("mutual")
    models.place(folder / "models", "relu", models.relu())
    certificate, key = write(folder, "server", *authority("localhost"))
    ours, theirs = authority("clients"), authority("others")
    write(folder, "clients", *ours)
    write(folder, "good", *issued("client", ours))
    write(folder, "expired", *issued("client", ours, days=-1))
    write(folder, "foreign", *issued("client", theirs))
    (folder / "models" / "twinop.toml").write_text(
        f"[server]\ntls_certificate = '{certificate}'\ntls_key = '{key}'\n"
        f"tls_client_ca = '{folder / 'clients.pem'}'\n"
    )
    with serve(folder / "models") as server:
        yield server, folder


def over_http(server: Served, folder: Path, client: str | None) -> int:
    context = ssl.create_default_context(cafile=str(folder / "server.pem"))
    if client is not None:
        context.load_cert_chain(folder / f"{client}.pem", folder / f"{client}.key")
    with urllib.request.urlopen(f"https://localhost:{server.http_port}/v2", context=context) as answer:
        status: int = answer.status
        return status


def over_grpc(server: Served, folder: Path, client: str | None) -> bool:
    pair: tuple[bytes | None, bytes | None] = (None, None)
    if client is not None:
        pair = (folder / f"{client}.key").read_bytes(), (folder / f"{client}.pem").read_bytes()
    credentials = grpc.ssl_channel_credentials((folder / "server.pem").read_bytes(), *pair)
    with grpc.secure_channel(f"localhost:{server.grpc_port}", credentials) as channel:
        live: bool = GRPCInferenceServiceStub(channel).ServerLive(pb.ServerLiveRequest(), timeout=60).live
        return live


def test_a_certificate_of_a_client(mutual: tuple[Served, Path]) -> None:
    assert over_http(*mutual, "good") == 200
    assert over_grpc(*mutual, "good")


@pytest.mark.parametrize(
    ("client", "said"),
    [
        ("expired", "certificate has expired"),
        ("foreign", "unable to get local issuer certificate"),
        (None, "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
    ],
)
def test_a_certificate_that_is_refused(mutual: tuple[Served, Path], client: str | None, said: str) -> None:
    with pytest.raises(OSError):
        over_http(*mutual, client)
    wait_until(lambda: f"a TLS connection was refused: {said}" in [line["message"] for line in mutual[0].log])
    with pytest.raises(grpc.RpcError) as error:
        over_grpc(*mutual, client)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert over_http(*mutual, "good") == 200


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
