"""Tokens for inference and control, and files of them that change."""

from pathlib import Path

import grpc
import pytest
import service_models as models
from service_fixtures import Served, serve, wait_until
from service_loads import refusal_of

from twinop.deploy.service.protocol import pb

PATHS = {"inference": "/v2/models", "control": "/v2/repository/index"}


def allowed(served: Served, token: str) -> set[str]:
    """Return what a token permits over HTTP."""
    headers = {"authorization": f"Bearer {token}"}
    methods = {"inference": "GET", "control": "POST"}
    statuses = {name: served.ask(methods[name], path, None, headers).status for name, path in PATHS.items()}
    assert set(statuses.values()) <= {200, 401}
    return {name for name, status in statuses.items() if status == 200}


def test_tokens_of_files_that_change(tmp_path: Path) -> None:
    models.place(tmp_path / "models", "relu", models.relu())
    files = {name: tmp_path / name for name in ("token", "control_token")}
    for name, file in files.items():
        file.write_text(f"{name}\n")
    lines = [f"{name}_file = '{file}'\n" for name, file in files.items()]
    (tmp_path / "models" / "twinop.toml").write_text("[server]\ncontrol = 'explicit'\n" + "".join(lines))
    with serve(tmp_path / "models") as served:
        assert allowed(served, "token") == {"inference"}
        assert allowed(served, "control_token") == {"control"}
        headers = {"authorization": "Bearer token"}
        assert served.ask("GET", "/metrics", None, headers).status == 200
        with served.stub() as stub:
            metadata = (("authorization", "Bearer token"),)
            assert stub.ModelReady(pb.ModelReadyRequest(name="relu"), metadata=metadata).ready
            with pytest.raises(grpc.RpcError) as error:
                stub.RepositoryIndex(pb.RepositoryIndexRequest(), metadata=metadata)
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
            metadata = (("authorization", "Bearer control_token"),)
            assert len(stub.RepositoryIndex(pb.RepositoryIndexRequest(), metadata=metadata).models) == 1

        files["token"].write_text("renewed")
        wait_until(lambda: allowed(served, "renewed") == {"inference"})
        assert allowed(served, "token") == set()
        files["token"].unlink()

        def said() -> list[str]:
            return [line["message"] for line in served.log if "the last token stays" in line["message"]]

        def is_told() -> bool:
            assert allowed(served, "renewed") == {"inference"}
            return len(said()) > 0

        wait_until(is_told)
        for _ in range(10):
            assert allowed(served, "renewed") == {"inference"}
        assert len(said()) == 1 and "cannot be read" in said()[0]
        files["token"].write_text("again")
        wait_until(lambda: allowed(served, "again") == {"inference"})


def test_one_token_for_all(tmp_path: Path) -> None:
    models.place(tmp_path, "relu", models.relu())
    with serve(tmp_path, "--control", "explicit", env={"TWINOP_TOKEN": "secret"}) as served:
        assert allowed(served, "secret") == set(PATHS)
        assert allowed(served, "") == set()


def test_control_alone_has_a_token(tmp_path: Path) -> None:
    models.place(tmp_path, "relu", models.relu())
    (tmp_path / "twinop.toml").write_text("[server]\ncontrol = 'explicit'\ncontrol_token = 'secret'\n")
    with serve(tmp_path) as served:
        assert allowed(served, "") == {"inference"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("token = 'a'\ntoken_file = 'b'", "token (or TWINOP_TOKEN) and token_file: give one of them"),
        ("control_token = 'a'\ncontrol_token_file = 'b'", "control_token_file: give one of them"),
        ("control_token_file = 'none'", "none cannot be read"),
        ("tls_key = 'key.pem'", "TLS needs both tls_certificate and tls_key"),
        (
            "max_bytes_in_flight = 1000",
            "max_bytes_in_flight must be at least 268435456: four times",
        ),
        ("control = 'explicit'\nreuse_port = true", "control explicit with reuse_port needs admin_port"),
    ],
)
def test_contradictions(tmp_path: Path, settings: str, said: str) -> None:
    models.place(tmp_path, "relu", models.relu())
    (tmp_path / "twinop.toml").write_text(f"[server]\n{settings}\n")
    assert said in refusal_of(tmp_path)
