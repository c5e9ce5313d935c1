"""The bearer token, and gRPC's health service."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import service_models as models
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from service_fixtures import Served, serve, wait_until
from service_loads import refusal_of
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from twinop.deploy.service.operations import Token
from twinop.deploy.service.settings import ServerSettings

MODELS, INDEX = "/v2/models", "/v2/repository/index"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a token."""
    folder = tmp_path_factory.mktemp("guarded")
    models.place(folder / "models", "relu", models.relu())
    (folder / "token").write_text("secret\n")
    (folder / "models" / "twinop.toml").write_text("[server]\ntoken_file = '../token'")
    with serve(folder / "models") as server:
        yield server


def test_token(guarded: Served) -> None:
    def status(path: str, token: str | None = None) -> int:
        method = "POST" if path == INDEX else "GET"
        answer = guarded.ask(method, path, headers={} if token is None else {"Authorization": token})
        if answer.status == 401:
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "Authorization: Bearer" in answer.error
        return answer.status

    assert status("/v2/health/live") == status("/v2/health/ready") == 200
    for path in (MODELS, "/v2", "/metrics", "/", "/nowhere", "/v2/health/live/", INDEX):
        assert status(path) == status(path, "Bearer wrong") == status(path, "Basic secret") == 401, path
    assert status(MODELS, "Bearer secret") == status("/metrics", "bearer secret") == 200
    assert status("/nowhere", "Bearer secret") == 404
    assert status(INDEX, "Bearer secret") == 200


def test_token_and_health_over_grpc(guarded: Served) -> None:
    """The health service needs no token, as other probes."""
    with grpc.insecure_channel(f"127.0.0.1:{guarded.grpc_port}") as channel:
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
        for token, expected in (("", (0, 0)), ("wrong", (0, 0)), ("secret", (1, 1))):
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


def test_the_token_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINOP_TOKEN", "secret")
    token = Token(ServerSettings())
    assert token.allow(MODELS, b"Bearer secret") and not token.allow(MODELS, b"")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("token_file = 'none'", "none cannot be read: No such file"),
        ("token_file = '/dev/null'", "/dev/null cannot be read: not a regular file"),
        ("token_file = 'empty'", "empty is empty"),
        ("max_bytes_in_flight = 1000", "max_bytes_in_flight must be at least 268435456: four times"),
    ],
)
def test_contradictions(tmp_path: Path, settings: str, said: str) -> None:
    models.place(tmp_path, "relu", models.relu())
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "twinop.toml").write_text(f"[server]\n{settings}\n")
    assert said in refusal_of(tmp_path)
