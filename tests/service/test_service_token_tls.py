"""Bearer tokens for inference and control, TLS, and gRPC's health service."""

import json
import signal
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
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
from service_loads import refusal_of
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from twinop.deploy.service.operations import Tokens
from twinop.deploy.service.protocol import pb
from twinop.deploy.service.settings import ServerSettings

INFERENCE, CONTROL = "/v2/models", "/v2/repository/index"


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[Served, Path]]:
    """A server with TLS and a token in a file for each purpose; and its certificate."""
    models.place(tmp_path / "models", "relu", models.relu())
    certificate, key = certified(tmp_path)
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "control").write_text("control")
    files = ("token_file = '../token'", "control_token_file = '../control'")
    lines = ("[server]", "control = 'explicit'", *files)
    (tmp_path / "models" / "twinop.toml").write_text("\n".join(lines))
    options = ("--tls-certificate", str(certificate), "--tls-key", str(key))
    with serve(tmp_path / "models", *options) as server:
        yield server, certificate


def test_tokens_and_tls(guarded: tuple[Served, Path]) -> None:
    server, certificate = guarded
    context = ssl.create_default_context(cafile=str(certificate))

    def status(path: str, token: str | None = None) -> int:
        method = "POST" if path == CONTROL else "GET"
        request = urllib.request.Request(f"https://localhost:{server.http_port}{path}", method=method)
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
    for path in (INFERENCE, "/v2", "/metrics", "/", "/nowhere", "/v2/health/live/", CONTROL):
        assert status(path) == status(path, "Bearer wrong") == status(path, "Basic secret") == 401, path
    assert status(INFERENCE, "Bearer secret") == status("/metrics", "bearer secret") == 200
    assert status("/nowhere", "Bearer secret") == 404
    assert status(CONTROL, "Bearer secret") == status(INFERENCE, "Bearer control") == 401
    assert status(CONTROL, "Bearer control") == 200
    with pytest.raises(OSError):  # no TLS
        server.ask("GET", "/v2/health/live")


def test_tokens_and_health_over_grpc(guarded: tuple[Served, Path]) -> None:
    """The health service needs no token, as other probes."""
    server, certificate = guarded
    credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
    with grpc.secure_channel(f"localhost:{server.grpc_port}", credentials) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        assert stub.ServerLive(pb.ServerLiveRequest()).live
        assert stub.ServerReady(pb.ServerReadyRequest()).ready

        def is_allowed(call: Any, request: Any, token: str) -> bool:
            try:
                return bool(call(request, metadata=(("authorization", f"Bearer {token}"),)))
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.UNAUTHENTICATED
                return False

        ready = stub.ModelReady, pb.ModelReadyRequest(name="relu")
        index = stub.RepositoryIndex, pb.RepositoryIndexRequest()
        for token, expected in (("", (0, 0)), ("secret", (1, 0)), ("control", (0, 1))):
            assert (is_allowed(*ready, token), is_allowed(*index, token)) == expected

        health = HealthStub(channel)

        def is_serving(service: str) -> bool:
            found: int = health.Check(HealthCheckRequest(service=service), timeout=60).status
            return found == HealthCheckResponse.SERVING

        for service in ("", "inference.GRPCInferenceService"):
            wait_until(partial(is_serving, service))
        with pytest.raises(grpc.RpcError) as error:
            is_serving("nothing")
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        watched = health.Watch(HealthCheckRequest(), timeout=60)
        assert next(watched).status == HealthCheckResponse.SERVING
        server.process.send_signal(signal.SIGTERM)
        assert next(watched).status == HealthCheckResponse.NOT_SERVING
        watched.cancel()
    assert server.stop() == 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"": "ic", "a": "ic"}),
        ({"token_file": "a"}, {"": "", "a": "ic", "b": ""}),
        ({"control_token_file": "b"}, {"": "i", "a": "i", "b": "ic"}),
        ({"token_file": "a", "control_token_file": "b"}, {"": "", "a": "i", "b": "c"}),
    ],
)
def test_what_a_token_permits(given: dict[str, str], expected: dict[str, str], tmp_path: Path) -> None:
    """The letters are for inference and control; a file has its name in it."""
    for name in given.values():
        (tmp_path / name).write_text(name)
    tokens = Tokens(ServerSettings(**{key: tmp_path / name for key, name in given.items()}))

    def permitted(token: str) -> str:
        letters = {"i": INFERENCE, "c": CONTROL}
        return "".join(key for key, path in letters.items() if tokens.allow(path, f"Bearer {token}".encode()))

    assert {token: permitted(token) for token in expected} == expected


def test_the_token_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINOP_TOKEN", "secret")
    tokens = Tokens(ServerSettings())
    assert tokens.allow(INFERENCE, b"Bearer secret") and not tokens.allow(INFERENCE, b"")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("control_token_file = 'none'", "none cannot be read: No such file"),
        ("token_file = '/dev/null'", "/dev/null cannot be read: not a regular file"),
        ("token_file = 'empty'", "empty is empty"),
        ("tls_key = 'key.pem'", "TLS needs both tls_certificate and tls_key"),
        ("max_bytes_in_flight = 1000", "max_bytes_in_flight must be at least 268435456: four times"),
        ("control = 'explicit'\nreuse_port = true", "control explicit and reuse_port exclude each other"),
    ],
)
def test_contradictions(tmp_path: Path, settings: str, said: str) -> None:
    models.place(tmp_path, "relu", models.relu())
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "twinop.toml").write_text(f"[server]\n{settings}\n")
    assert said in refusal_of(tmp_path)
